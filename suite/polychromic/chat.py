"""A chat model's tokenizer: converts messages to tokens with the model's own chat template, and tokens to text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from perfsuite.errors import PerfsuiteError
from suite.naming import shown
from suite.polychromic.model_files import check_folder, read_json, read_tokenizer
from suite.polychromic.replies import ASSISTANT, Example, Message

SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")


@dataclass(frozen=True, slots=True)
class Encoded:
    """Tokens of a prompt and its reply. The first `prompt` tokens belong to the prompt."""

    tokens: tuple[int, ...]
    prompt: int


class Chat:
    """The tokenizer and the chat template from a model's folder in transformers' format.

    PerfsuiteError if a file is missing or damaged, or if the folder has no chat template.
    """

    def __init__(self, folder: Path) -> None:
        check_folder(folder, "a model as transformers stores it")
        self.folder = folder
        config = read_json(folder / "tokenizer_config.json")
        self.tokenizer = read_tokenizer(folder)
        self.special = {name: _content(config.get(name)) for name in SPECIAL}
        self.end = self._end()
        self._template = self._compiled(_template(folder, config))

    def _end(self) -> int:
        """Return the token that ends a reply."""
        name = self.special["eos_token"]
        found: int | None = self.tokenizer.token_to_id(name) if name else None
        if found is None:
            raise PerfsuiteError(f"{shown(self.folder / 'tokenizer_config.json')} names no eos_token of the vocabulary")
        return found

    def _compiled(self, source: str) -> Any:
        # A sandbox, as in transformers, because templates are third-party code.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _refuse
        environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
        try:
            return environment.from_string(source)
        except TemplateError as error:
            raise PerfsuiteError(f"the chat template in {shown(self.folder)} is damaged: {error}") from None

    def text(self, messages: Sequence[Message], *, asks: bool) -> str:
        """Render the messages with the template. With `asks`, append the generation prompt."""
        given = [{"role": m.role, "content": m.content} for m in messages]
        try:
            rendered: str = self._template.render(messages=given, add_generation_prompt=asks, **self.special)
        except Exception as error:  # a template can raise any error, e.g. by dividing by zero
            raise PerfsuiteError(f"the chat template in {shown(self.folder)} refuses the messages: {error}") from None
        return rendered

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens of the messages and the generation prompt."""
        found: list[int] = self.tokenizer.encode(self.text(messages, asks=True), add_special_tokens=False).ids
        return found

    def encode(self, example: Example) -> Encoded:
        """Tokenize the prompt and the reply separately. The reply ends with the end token.

        PerfsuiteError if the template renders the prompt differently once a reply follows.
        """
        asked = self.text(example.prompt, asks=True)
        whole = self.text([*example.prompt, Message(ASSISTANT, example.reply)], asks=False)
        if not whole.startswith(asked):
            raise PerfsuiteError(
                f"the chat template in {shown(self.folder)} writes a prompt otherwise once it has a reply, so that the "
                "model would be trained on other prompts than it replies to"
            )
        prompt = self.prompt(example.prompt)
        reply = self.tokenizer.encode(whole[len(asked) :], add_special_tokens=False).ids
        # Text that a template writes after the end token, e.g. a line break, is never generated.
        reply = reply[: reply.index(self.end) + 1] if self.end in reply else [*reply, self.end]
        return Encoded((*prompt, *reply), len(prompt))

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of a reply's tokens before the end token."""
        kept = list(tokens)
        if self.end in kept:
            kept = kept[: kept.index(self.end)]
        found: str = self.tokenizer.decode(kept, skip_special_tokens=True)
        return found


def _refuse(message: str) -> NoReturn:
    """Raise TemplateError: the templates' function `raise_exception`, with which they reject messages."""
    raise TemplateError(message)


def _content(token: Any) -> str | None:
    """Return the text of a special token, which transformers stores as text or as a dict with properties."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _template(folder: Path, config: dict[str, Any]) -> str:
    """Return the chat template, from its own file or from the tokenizer's configuration."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise PerfsuiteError(f"cannot read {shown(path)}: {error}") from None
    found = config.get("chat_template")
    if isinstance(found, list):  # several named templates
        found = next((t.get("template") for t in found if isinstance(t, dict) and t.get("name") == "default"), None)
    if not isinstance(found, str):
        raise PerfsuiteError(
            f"the tokenizer in {shown(folder)} has no chat template; name a model that was trained on chats (instruct)"
        )
    return found
