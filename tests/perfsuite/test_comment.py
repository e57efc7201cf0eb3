"""`perfsuite comment`: the text for a pull request, from reports that are not trusted."""

from __future__ import annotations

import dataclasses
import json
import random
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from builders import MACHINE, measurement
from click.testing import CliRunner, Result
from markdown_it import MarkdownIt
from scale import count, some
from scratch import ROOT

from perfsuite.cli import main
from perfsuite.errors import PerfsuiteError
from perfsuite.gate.exit_codes import COULD_NOT_BEGIN
from perfsuite.records import Excuse, Status, Verdict
from perfsuite.report import Correctness, RunReport, comment, html, jsonfile, markdown
from perfsuite.report.escaping import escape

RED, WAIVED, GREEN = (f"tests/test_dots.py::dots::speed[{name}]" for name in ("large", "small", "odd"))
EXCUSE = Excuse(status=Status.REGRESSED, owner="Ada Lovelace", until="2030-12-31", reason="driver 590, reported")


def verdict(id: str, status: Status, text: str = "the reason", **fields: Any) -> Verdict:
    return Verdict(id=id, status=status, message=f"{status} {id}: {text}", **fields)


def report(*verdicts: Verdict, **fields: Any) -> RunReport:
    measured = {v.id: (measurement(v.id),) for v in verdicts}
    given = {"measurements": measured, "verdicts": {v.id: v for v in verdicts}, **fields}
    return RunReport(machine=MACHINE, revision="1a2b3c4", started="2030-01-01T00:00:00+00:00", seconds=1.0, **given)


EXAMPLE = report(
    verdict(GREEN, Status.PASS),
    verdict(RED, Status.REGRESSED, "optimized is 5.0% slower; the device did not move", slowdown=0.05),
    verdict(WAIVED, Status.WAIVED, excuse=EXCUSE),
)


def excused_alone() -> RunReport:
    return report(verdict(WAIVED, Status.WAIVED, excuse=EXCUSE))


class Seen(HTMLParser):
    """Tags and text of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


def rendered(text: str) -> Seen:
    seen = Seen()
    parser = MarkdownIt("commonmark").enable(["table", "strikethrough"])
    seen.feed(parser.render(text))
    return seen


def length(text: str) -> int:
    return len(text.encode("utf-16-le")) // 2


# --- contents -------------------------------------------------------------------------------------------------------


def test_comment_of_a_red_gate() -> None:
    text = comment.text(EXAMPLE, "https://example.org/runs/7")
    lines = text.splitlines()
    assert lines[0] == comment.MARKER
    assert (
        lines[1] == "### ❌ perfsuite is red: dots\\[large\\]: optimized is 5.0% slower (1 of 3 workloads not green)."
    )
    assert f"- REGRESSED: `{RED}`: optimized is 5.0% slower; the device did not move" in lines
    assert "**1 workload excused; without the waivers this run is red: the code is at fault:**" in lines
    assert "| dots | small | REGRESSED | Ada Lovelace | 2030-12-31 | driver 590, reported |" in lines
    assert "[The whole report](https://example.org/runs/7)" in lines
    folded = text[text.index("<details>") : text.index("</details>")]
    assert "<summary>3 workloads</summary>\n\n| technique |" in folded
    for row in ("| dots | large |", "| dots | small |", "| dots | odd |"):
        assert row in folded
    assert "+5.0%" in folded


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (report(verdict(GREEN, Status.PASS)), "✅ perfsuite is green: 1 workload."),
        (excused_alone(), "✅ perfsuite is green: 1 workload, 1 of them excused by a waiver."),
        (report(verdict(RED, Status.NOISY)), "⚠️ perfsuite cannot decide: the measurement is too noisy (1 of"),
        (report(verdict(RED, Status.NOISY, moved="device")), "⚠️ perfsuite cannot decide: the device was slower than"),
        (
            report(verdict(RED, Status.NOISY, moved="optimized")),
            "❌ perfsuite is red: dots\\[large\\]: the reason (1 of 1 workload",
        ),
        (report(complete=False), "❌ perfsuite is red: the run ended early."),
        (report(), "✅ perfsuite is green, but nothing was compared with a baseline."),
        (report(correctness=Correctness(failed=2)), "❌ perfsuite is red: the code is at fault (2 proofs failed)."),
        (report(problems=("no baseline",)), "⚠️ perfsuite cannot decide: no baseline."),
    ],
)
def test_heading_states_the_verdict(run: RunReport, said: str) -> None:
    assert comment.text(run).splitlines()[1].startswith(f"### {said}")


def test_every_report_format_lists_waived_workloads() -> None:
    """The terminal's output is tested in test_fail_closed.py."""
    run = excused_alone()
    assert json.loads(jsonfile.document(run))["verdicts"][WAIVED]["excuse"] == {
        "status": "REGRESSED", "owner": "Ada Lovelace", "until": "2030-12-31", "reason": "driver 590, reported"
    }  # fmt: skip
    assert jsonfile.parse(jsonfile.document(run)).verdicts == run.verdicts
    for text in (markdown.summary(run), html.page(run), comment.text(run)):
        for part in ("REGRESSED", "Ada Lovelace", "2030-12-31", "driver 590, reported", "red: the code is at fault"):
            assert part in text
    for text in (markdown.summary(report()), html.page(report()), comment.text(report())):
        assert "xcused" not in text


# --- hostile text ---------------------------------------------------------------------------------------------------

HOSTILE = (
    "<img src=x onerror=alert(1)>",
    "<!-- perfsuite:comment -->",
    "--> </details> <details open>",
    "@octocat and @org/team, cc (@octocat)",
    "``` @octocat",
    "a`b @octocat `c",
    "x::`@octocat`",
    "x::y`<b>",
    "closes #12, owner/repo#3 and GH-4",
    "[link](https://evil.example) ![image](//evil.example/x.png)",
    "see https://github.com/o/r/issues/1 or www.evil.example",
    "a | b || c \\| d \\",
    "first\n\n# heading\n- item\r\n> quote\u2028@octocat",
    "# heading",
    "1. item",
    "- item",
    "--- rule",
    "*bold* _italic_ __x__ ~~gone~~ ~x~",
    ":rocket: $x^2$ &lt;b&gt; &#64;octocat",
    "\x1b[31mred\x07 \u202egnihton \u200b\udcff",
    "a" * 5000,
)


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_is_escaped(text: str) -> None:
    run = report(
        verdict(RED, Status.REGRESSED, text),
        verdict(WAIVED, Status.WAIVED, excuse=dataclasses.replace(EXCUSE, owner=text, reason=text)),
        verdict(f"tests/test_dots.py::dots::speed[{text}]", Status.NOISY, text),
        problems=(text,),
        correctness=Correctness(failed=1, skip_reasons={text: 1}, failures={text: text}),
    )
    written = comment.text(run)
    assert written.count("<!--") == 1
    assert written.count("<details>") == written.count("</details>") == 1
    seen = rendered(written)
    plain = rendered(comment.text(dataclasses.replace(EXAMPLE, problems=("x::y",), correctness=Correctness(failed=1))))
    assert seen.tags == plain.tags
    rows = [line for line in written.splitlines() if line.startswith("| ")]
    assert len(rows) == 3 + 5  # the table of waivers, and that of all rows
    shown = seen.text.replace("\u200b", "")
    for word in text.split():
        if word.isprintable() and len(word) < markdown.CELL:
            assert word in shown
    for code in ("@octocat", "@org", "#12", "#3", "GH-4", "://", "www.", ":rocket:"):  # nothing of it but in code
        assert code not in rendered_without_code(written)


def rendered_without_code(text: str) -> str:
    """Return the text of a page that GitHub searches for mentions: all that is not code."""
    tokens = MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(text)
    return "\n".join(
        child.content for token in tokens for child in token.children or () if child.type in ("text", "text_special")
    )


@pytest.mark.parametrize("text", ["plain words, 5.0% slower (2.9 to 3.9)", "geometry/rotor_update", "a.py: 3 of 5"])
def test_plain_text_is_not_escaped(text: str) -> None:
    assert escape(text) == text


def test_workload_id_is_shown_as_code() -> None:
    assert escape(f"{RED}: slow") == f"`{RED}`: slow"


# --- size -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wide", some(["a", "\U0001f680", "@", "|"], ["a", "\U0001f680"]))
def test_large_report_is_shortened_to_fit_and_counts_what_is_left_out(wide: str) -> None:
    many = [verdict(f"tests/test_x.py::p{n}::speed[w]", Status.REGRESSED, wide * 400) for n in range(900)]
    excuse = dataclasses.replace(EXCUSE, reason=wide * 2000, owner=wide * 2000)
    many += [verdict(f"tests/test_y.py::q{n}::speed[w]", Status.WAIVED, excuse=excuse) for n in range(40)]
    reasons = {f"{n} {wide * 2000}": 1 for n in range(40)}
    run = report(*many, correctness=Correctness(skip_reasons=reasons))
    text = comment.text(run, "https://example.org/" + "p" * 500)
    assert 52_000 < length(text) <= 65_536
    left = [line for line in text.splitlines() if "more, in the whole report" in line]
    assert len(left) == 4
    shown = sum(line.startswith("- REGRESSED") for line in text.splitlines())
    assert f"- … and {900 - shown} more, in the whole report" in left
    assert shown > 5
    assert text.rstrip().endswith("</sub>")


def test_a_long_finding_fits_at_every_place() -> None:
    wide = "\U000e0001" * 70_000
    red = verdict(RED, Status.REGRESSED, wide)
    machine = dataclasses.replace(MACHINE, device_name=wide, cpu=wide)
    for run in (report(red, problems=(wide,)), report(red), report(verdict(RED, Status.UNMEASURED), problems=(wide,))):
        text = comment.text(dataclasses.replace(run, machine=machine), "https://example.org/")
        assert length(text) <= comment.LIMIT
        assert text.rstrip().endswith("</sub>")


def test_the_rows_that_are_left_out_are_counted() -> None:
    rows = [f"| row {n} |" for n in range(3)]
    table = ["| heading |", "| --- |", *rows]
    for room, shown in ((1000, 3), (40, 2), (20, 0), (0, 0)):
        made = comment._table(table, room)
        assert [line for line in made if line.startswith("|")] == ([*table[:2], *rows[:shown]] if shown else [])
        assert (f"… and {3 - shown} of 3 more, in the whole report" in made) == (shown < 3)


# --- the command ----------------------------------------------------------------------------------------------------


def printed(path: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["comment", str(path), *arguments])


def test_comment_command_prints_the_comment(tmp_path: Path) -> None:
    path = jsonfile.write(EXAMPLE, tmp_path / "report.json")
    done = printed(path, "--page", "https://example.org/")
    assert done.exit_code == 0
    assert done.stdout == comment.text(jsonfile.read(path), "https://example.org/")


@pytest.mark.parametrize("page", ["javascript:alert(1)", "https://a b", "https://a)[x](b", "https://a\n@octocat", ""])
def test_page_that_is_no_https_address_is_refused(page: str) -> None:
    with pytest.raises(PerfsuiteError, match=r"--page .* is no address; give one that begins with https://"):
        comment.text(EXAMPLE, page)


@pytest.mark.parametrize("text", [None, "", "{}", "[" * 100_000, '{"perfsuite_report": 1}', "\udcff"])
def test_file_that_is_no_report_is_refused_in_one_line(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "report.json"
    if text is not None:
        path.write_bytes(text.encode("utf-8", "surrogateescape"))
    done = printed(path)
    assert done.exit_code == COULD_NOT_BEGIN
    assert done.output.startswith("Error: ")
    assert done.output.count("\n") == 1
    assert "report.json" in done.output


ODD = (None, True, -1, 0, 1e308, float("inf"), float("nan"), "-->", [], {}, 10**400, "\udcff", "@octocat")


def places(data: Any) -> list[tuple[Any, Any]]:
    """Return every (container, key) of JSON data."""
    keys = list(data) if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ()
    return [place for key in keys for place in ((data, key), *places(data[key]))]


def test_forged_report_gives_a_safe_comment_or_a_one_line_error() -> None:
    draws, document = random.Random(7), jsonfile.document(EXAMPLE)
    for _ in range(count(quick=150, full=20_000)):
        data = json.loads(document)
        for _ in range(draws.randint(1, 3)):
            container, key = draws.choice(places(data))
            container[key] = draws.choice(ODD)
        try:
            text, failure = comment.text(jsonfile.parse(json.dumps(data))), ""
        except PerfsuiteError as error:
            text, failure = "", str(error)
        assert "\n" not in failure
        assert length(text) <= comment.LIMIT
        assert "@octocat" not in rendered_without_code(text)


def test_the_comment_needs_only_the_standard_library() -> None:
    """The job that posts the comment has a write token, so it installs nothing."""
    code = "import perfsuite.report.comment, perfsuite.report.jsonfile"
    subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT, check=True, env={"PYTHONPATH": str(ROOT)})
