"""A chat model's tokenizer: its template, separate tokenization of prompt and reply, and errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from perfsuite.errors import PerfsuiteError
from suite.polychromic.chat import Chat
from suite.polychromic.replies import Example, Message, single_turn

tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed: pip install 'perfsuite[train]'")

TEMPLATE = """{% for message in messages %}
<|start|>{{ message['role'] }}
{{ message['content'] }}{{ eos_token }}
{% endfor %}
{% if add_generation_prompt %}
<|start|>assistant
{% endif %}"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Folder with a character-level tokenizer and a chat template."""
    words = ["<|start|>", "<|end|>", *map(chr, range(32, 127)), "\n"]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.add_special_tokens(words[:2])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    configured(tmp_path, eos_token={"content": "<|end|>", "special": True}, chat_template=TEMPLATE)
    return tmp_path


def configured(folder: Path, **fields: Any) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))


def test_prompt_is_the_tokenized_output_of_the_template(folder: Path) -> None:
    chat = Chat(folder)
    messages = [Message("system", "Be kind."), Message("user", "Hi")]
    text = chat.text(messages, asks=True)
    assert text == "<|start|>system\nBe kind.<|end|>\n<|start|>user\nHi<|end|>\n<|start|>assistant\n"
    tokens = chat.prompt(messages)
    assert tokens[0] == 0
    assert len(tokens) == len(text) - 3 * len("<|start|>") - 2 * len("<|end|>") + 5


def test_reply_ends_with_the_end_token(folder: Path) -> None:
    chat = Chat(folder)
    found = chat.encode(single_turn("Hi", "Hello"))
    assert list(found.tokens[: found.prompt]) == chat.prompt([Message("user", "Hi")])
    assert found.tokens[-1] == chat.end == 1
    assert chat.decode(found.tokens[found.prompt :]) == "Hello"
    assert len(found.tokens) - found.prompt == len("Hello") + 1


def test_encode_adds_the_end_token_if_the_template_does_not(folder: Path) -> None:
    configured(folder, eos_token="<|end|>", chat_template="{% for m in messages %}{{ m['content'] }}{% endfor %}")
    found = Chat(folder).encode(single_turn("a", "b"))
    assert found.tokens[-1] == 1
    assert len(found.tokens) == 3


def test_chat_template_file_overrides_the_tokenizer_configuration(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] | tojson }}")
    assert Chat(folder).text([Message("user", "é")], asks=False) == '"é"'


def test_template_named_default_is_chosen_from_several(folder: Path) -> None:
    several = [{"name": "tools", "template": "no"}, {"name": "default", "template": "yes"}]
    configured(folder, eos_token="<|end|>", chat_template=several)
    assert Chat(folder).text([Message("user", "a")], asks=False) == "yes"


def test_template_cannot_access_python_attributes(folder: Path) -> None:
    configured(folder, eos_token="<|end|>", chat_template="{{ messages.__class__.__mro__ }}")
    with pytest.raises(PerfsuiteError, match="refuses the messages: access to attribute '__class__'"):
        Chat(folder).text([Message("user", "a")], asks=False)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"eos_token": "<|end|>"}, "has no chat template; name a model that was trained on chats"),
        ({"eos_token": "<|end|>", "chat_template": [{"name": "tools", "template": "a"}]}, "has no chat template"),
        ({"eos_token": "<|end|>", "chat_template": "{% for %}"}, "is damaged: "),
        ({"chat_template": "a"}, "names no eos_token of the vocabulary"),
        ({"eos_token": "<|no|>", "chat_template": "a"}, "names no eos_token of the vocabulary"),
    ],
)
def test_missing_template_or_end_token_is_reported(folder: Path, fields: dict[str, Any], words: str) -> None:
    configured(folder, **fields)
    with pytest.raises(PerfsuiteError, match=words):
        Chat(folder)


def test_missing_or_damaged_tokenizer_files_are_reported(folder: Path) -> None:
    with pytest.raises(PerfsuiteError, match="absent is no folder; name one that has a model"):
        Chat(folder / "absent")
    for name, content, words in (
        ("tokenizer.json", "{", r"cannot read .*tokenizer\.json: "),
        ("tokenizer_config.json", "{", r"tokenizer_config\.json is damaged: "),
        ("tokenizer_config.json", "[]", "it holds no object"),
    ):
        before = (folder / name).read_text()
        (folder / name).write_text(content)
        with pytest.raises(PerfsuiteError, match=words):
            Chat(folder)
        (folder / name).write_text(before)
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(PerfsuiteError, match=r"cannot read .*tokenizer_config\.json: No such file"):
        Chat(folder)


def test_template_can_reject_messages_with_raise_exception(folder: Path) -> None:
    template = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system message') }}{% endif %}"
    configured(folder, eos_token="<|end|>", chat_template=template)
    with pytest.raises(PerfsuiteError, match="refuses the messages: no system message"):
        Chat(folder).encode(Example((Message("system", "a"), Message("user", "b")), "c"))


def test_template_that_renders_the_prompt_differently_with_a_reply_is_rejected(folder: Path) -> None:
    template = "{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    configured(folder, eos_token="<|end|>", chat_template=template)
    with pytest.raises(PerfsuiteError, match="writes a prompt otherwise once it has a reply"):
        Chat(folder).encode(single_turn("a", "b"))
