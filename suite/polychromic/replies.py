"""Prompts with their replies, stored as JSON lines.

A line is `{"prompt": text, "reply": text}` or, in the format of chat models,
`{"messages": [{"role": …, "content": text}, …]}`, whose last message is the assistant's.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perfsuite.errors import PerfsuiteError
from suite.naming import shown

USER, ASSISTANT = "user", "assistant"
ROLES = ("system", USER, ASSISTANT)
FORMS = 'a line is {"prompt": …, "reply": …} or {"messages": [{"role": …, "content": …}, …]}'


@dataclass(frozen=True, slots=True)
class Message:
    """A chat message. `role` is system, user or assistant."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Example:
    """The messages of a prompt, and the reply."""

    prompt: tuple[Message, ...]
    reply: str

    def line(self) -> str:
        """Return the example as a JSON line, without the line break."""
        messages = [*self.prompt, Message(ASSISTANT, self.reply)]
        return json.dumps({"messages": [{"role": m.role, "content": m.content} for m in messages]}, ensure_ascii=False)


def single_turn(prompt: str, reply: str) -> Example:
    """Return an example whose prompt is a single user message."""
    return Example((Message(USER, prompt),), reply)


def read(path: Path) -> list[Example]:
    """Read a file of JSON lines. PerfsuiteError names the first invalid line and the reason."""
    try:
        content = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        reason = error.strerror or str(error)
        raise PerfsuiteError(f"cannot read {shown(path)}: {reason}; name a file of JSON lines") from None
    except UnicodeDecodeError as error:
        raise PerfsuiteError(
            f"{shown(path)} is not UTF-8: byte {error.start} is {error.object[error.start]:#04x}"
        ) from None
    lines = [(n, line) for n, line in enumerate(content.split("\n"), 1) if line.strip()]
    if not lines:
        raise PerfsuiteError(f"{shown(path)} has no lines; {FORMS}")
    return [_example(line, f"{shown(path)}, line {number}") for number, line in lines]


def _example(line: str, where: str) -> Example:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise PerfsuiteError(f"{where}: not JSON: {error}") from None
    if not isinstance(found, dict):
        raise PerfsuiteError(f"{where}: {FORMS}")
    if "messages" in found:
        messages = _messages(found["messages"], where)
    elif "prompt" in found and "reply" in found:
        messages = [Message(USER, _text(found["prompt"], "prompt", where))]
        messages += [Message(ASSISTANT, _text(found["reply"], "reply", where))]
    else:
        raise PerfsuiteError(f"{where}: {FORMS}")
    return Example(tuple(messages[:-1]), messages[-1].content)


def _messages(found: Any, where: str) -> list[Message]:
    """Return the validated messages: optionally a system message, then alternating user and assistant messages."""
    if not isinstance(found, list) or not all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in found):
        raise PerfsuiteError(f"{where}: {FORMS}")
    messages = []
    for number, message in enumerate(found, 1):
        if message["role"] not in ROLES:
            raise PerfsuiteError(
                f"{where}: message {number} is of the role {message['role']!r}; roles are {', '.join(ROLES)}"
            )
        messages.append(Message(message["role"], _text(message["content"], f"message {number}", where)))
    turns = [m.role for m in messages if m.role != ROLES[0] or m is not messages[0]]
    if not turns or turns != [USER, ASSISTANT] * (len(turns) // 2):
        raise PerfsuiteError(
            f"{where}: after a system message, if any, the user's and the assistant's take turns, and the last is the "
            f"assistant's; here they are {', '.join(m.role for m in messages) or 'none'}"
        )
    return messages


def _text(found: Any, what: str, where: str) -> str:
    if not isinstance(found, str):
        raise PerfsuiteError(f"{where}: its {what} is {type(found).__name__}, not text")
    if not found.strip():
        raise PerfsuiteError(f"{where}: its {what} is empty")
    if not _is_text(found):
        raise PerfsuiteError(f"{where}: its {what} has half of a character (a lone surrogate)")
    return found.strip()


def _is_text(found: str) -> bool:
    try:
        found.encode()
    except UnicodeEncodeError:
        return False
    return True


def chatterbot(option: str = "--from") -> list[Example]:
    """Return the English conversations of the package chatterbot-corpus. Each line is a reply to the line before it.

    `option` is the command-line option for JSON lines, which the error for a missing package suggests.
    """
    try:
        import chatterbot_corpus
        import yaml
    except ImportError as error:
        raise PerfsuiteError(
            f"{error.name} is not installed; pip install pyyaml chatterbot-corpus, or name JSON lines with {option}"
        ) from None
    folder = Path(str(chatterbot_corpus.__file__)).parent / "data" / "english"
    found = []
    for path in sorted(folder.glob("*.yml")):
        for talk in yaml.safe_load(path.read_text(encoding="utf-8")).get("conversations", []):
            lines = [line.strip() for line in talk if isinstance(line, str)]
            found += [single_turn(a, b) for a, b in itertools.pairwise(lines) if a and b]
    if not found:
        raise PerfsuiteError(f"{shown(folder)} has no conversations; install another version of chatterbot-corpus")
    return found


def distinct(examples: Iterable[Example]) -> list[Example]:
    """Return the examples without duplicates, in the given order."""
    return list(dict.fromkeys(examples))


def split(examples: Sequence[Example], validation: float, seed: int) -> tuple[list[Example], list[Example]]:
    """Split into (training, validation) examples; about the fraction `validation` goes to the second list.

    All replies to the same prompt are in the same list.
    """
    sides: tuple[list[Example], list[Example]] = ([], [])
    for example in examples:
        sides[_place(example, seed) < validation].append(example)
    return sides


def _place(example: Example, seed: int) -> float:
    """Return a number in [0, 1) that depends on the prompt's user messages and the seed."""
    text = json.dumps([seed, *(m.content.casefold() for m in example.prompt if m.role == USER)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big") / 2**48


def lines_of(examples: Iterable[Example]) -> Iterator[str]:
    """Yield the examples as lines of a JSON-lines file."""
    return (f"{example.line()}\n" for example in examples)
