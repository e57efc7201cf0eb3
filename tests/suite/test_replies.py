"""Prompts with their replies: reading, errors, and `perfsuite data replies`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from perfsuite.errors import PerfsuiteError
from suite.commands.data import data
from suite.polychromic import replies, replies_build
from suite.polychromic.replies import Example, Message, single_turn

CHAT = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi"},
        {"role": "user", "content": "Who are you?"},
        {"role": "assistant", "content": "A program."},
    ]
}


def written(folder: Path, *lines: object) -> Path:
    path = folder / "replies.jsonl"
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def test_both_line_formats_are_read(tmp_path: Path) -> None:
    path = written(tmp_path, {"prompt": " Hello\n", "reply": "Hi", "source": "me"}, "", CHAT)
    first, second = replies.read(path)
    assert first == single_turn("Hello", "Hi")
    assert second.reply == "A program."
    assert second.prompt[0] == Message("system", "Be brief.")
    assert [m.content for m in second.prompt[1:]] == ["Hello", "Hi", "Who are you?"]


def test_written_examples_are_read_unchanged(tmp_path: Path) -> None:
    examples = replies.read(written(tmp_path, {"prompt": 'say "é"\n\u2028 twice', "reply": "é é"}, CHAT))
    path = tmp_path / "again.jsonl"
    path.write_text("".join(replies.lines_of(examples)), encoding="utf-8")
    assert replies.read(path) == examples


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2: not JSON: "),
        ("[" * 100_000, "line 2: not JSON: "),
        ("[]", 'line 2: a line is {"prompt": …, "reply": …} or'),
        ({"prompt": "a"}, 'line 2: a line is {"prompt": …, "reply": …} or'),
        ({"prompt": "a", "reply": " \n"}, "line 2: its reply is empty"),
        ({"prompt": "", "reply": "b"}, "line 2: its prompt is empty"),
        ({"prompt": "a", "reply": 3}, "line 2: its reply is int, not text"),
        ({"messages": []}, "the last is the assistant's; here they are none"),
        ({"messages": "a"}, "line 2: a line is"),
        ({"messages": [{"role": "user"}]}, "line 2: a line is"),
        ({"messages": CHAT["messages"][:-1]}, "here they are system, user, assistant, user"),
        ({"messages": [*CHAT["messages"][1:3], CHAT["messages"][0], *CHAT["messages"][3:]]}, "take turns"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "message 1 is of the role 'tool'; roles are system, user"),
        ({"messages": [{"role": "user", "content": None}]}, "its message 1 is NoneType, not text"),
    ],
    ids=range(14),
)
def test_a_wrong_line_is_reported_with_its_number(tmp_path: Path, line: object, words: str) -> None:
    with pytest.raises(PerfsuiteError) as error:
        replies.read(written(tmp_path, {"prompt": "a", "reply": "b"}, line))
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "cannot read .*: No such file"), (b"\xff\n", "is not UTF-8: byte 0 is 0xff"), (b"\n \n", "has no lines")],
)
def test_an_unreadable_or_empty_file_is_reported(tmp_path: Path, content: bytes | None, words: str) -> None:
    path = tmp_path / "replies.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(PerfsuiteError, match=words):
        replies.read(path)


def test_split_keeps_all_replies_to_a_prompt_together() -> None:
    examples = [single_turn(f"prompt {n // 2}", f"reply {n}") for n in range(4000)]
    train, validation = replies.split(examples, 0.1, seed=0)
    assert len(train) + len(validation) == 4000
    assert 0.07 < len(validation) / 4000 < 0.13
    assert not {e.prompt for e in train} & {e.prompt for e in validation}
    assert replies.split(examples, 0.1, seed=0) == (train, validation)
    assert replies.split(examples, 0.1, seed=1) != (train, validation)
    assert replies.split(examples, 0.0, seed=0) == (examples, [])


def test_split_ignores_case_and_system_message_of_a_prompt() -> None:
    for n in range(50):
        a, b = single_turn(f"Prompt {n}", "x"), Example((Message("system", "s"), Message("user", f"prompt {n}")), "y")
        assert len(replies.split([a, b], 0.5, seed=0)[0]) in (0, 2)


def test_repeated_examples_are_omitted_and_counted(tmp_path: Path) -> None:
    source = written(tmp_path, *[{"prompt": "a", "reply": "b"}] * 2, {"prompt": "a", "reply": "c"}, CHAT)
    out = tmp_path / "made" / "out.jsonl"
    done = CliRunner().invoke(data, ["replies", str(out), "--from", str(source)])
    assert done.exit_code == 0, done.output
    assert f"wrote {out}: 3 replies to 2 prompts; 1 repeated ones left out" in done.stderr
    assert len(replies.read(out)) == 3
    digest = done.stdout.split()[0]
    done = CliRunner().invoke(data, ["replies", str(out), "--from", str(out)])
    assert f"kept {out}: 3 replies to 2 prompts" in done.stderr
    assert done.stdout.split()[0] == digest


def test_an_existing_file_is_replaced_only_with_overwrite(tmp_path: Path) -> None:
    source, out = written(tmp_path, CHAT), tmp_path / "out.jsonl"
    out.write_text("mine")
    done = CliRunner().invoke(data, ["replies", str(out), "--from", str(source)])
    assert done.exit_code == 1
    assert "exists and has another content; name another file, or add --overwrite" in done.stderr
    assert out.read_text() == "mine"
    assert CliRunner().invoke(data, ["replies", str(out), "--from", str(source), "--overwrite"]).exit_code == 0
    assert len(replies.read(out)) == 1
    done = CliRunner().invoke(data, ["replies", str(tmp_path), "--from", str(source), "--overwrite"])
    assert "is a folder; name a file" in done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.jsonl", "replies.jsonl"]


def test_missing_chatterbot_corpus_is_reported_with_its_install_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "chatterbot_corpus", None)
    done = CliRunner().invoke(data, ["replies", str(tmp_path / "out.jsonl")])
    assert done.exit_code == 1
    assert "chatterbot_corpus is not installed; pip install" in done.stderr


def test_chatterbot_pairs_each_line_with_the_next_as_its_reply(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "chatterbot_corpus" / "data" / "english"
    folder.mkdir(parents=True)
    (tmp_path / "chatterbot_corpus" / "__init__.py").write_text("")
    (folder / "a.yml").write_text("categories:\n- a\nconversations:\n- - Hi\n  - Hello\n  - Bye\n- - 3\n  - No\n")
    (folder / "b.yml").write_text("categories: []\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "chatterbot_corpus", raising=False)
    assert replies.chatterbot() == [single_turn("Hi", "Hello"), single_turn("Hello", "Bye")]
    built = replies_build.build(tmp_path / "out.jsonl", [], overwrite=False)
    assert (built.examples, built.prompts, built.repeated) == (2, 2, 0)
    monkeypatch.delitem(sys.modules, "chatterbot_corpus")
