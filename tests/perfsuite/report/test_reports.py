"""Reports: every form is made from one synthetic run, and shows it honestly."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import math
import random
import re
import shlex
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from perfsuite.baseline.accepted_entries import entry_from
from perfsuite.codec import from_json, to_json
from perfsuite.errors import PerfsuiteError
from perfsuite.records import (
    CodeChange,
    Condition,
    Evidence,
    Limit,
    Machine,
    Measurement,
    PromiseRecord,
    SideRecord,
    Status,
    Verdict,
)
from perfsuite.report import (
    Correctness,
    RunReport,
    comment,
    html,
    jsonfile,
    junit,
    markdown,
    model,
    plots,
    terminal,
    units,
    write_all,
)
from perfsuite.report.annotations import command
from perfsuite.report.annotations import lines as annotation_lines
from perfsuite.report.files import write
from perfsuite.report.model import counts, headline, rows
from perfsuite.report.workload_rows import compare, condition, names, row

ROTOR = "tests/geometry/test_rotor_update.py::rotor_update::speed[window64]"
COSINE_SMALL = "tests/diversity/test_pairwise_cosine.py::pairwise_cosine::speed[n10]"
COSINE_LARGE = "tests/diversity/test_pairwise_cosine.py::pairwise_cosine::speed[n8192]"
ADAMW = "tests/optimizers/test_fused_adamw.py::fused_adamw::speed[matrices200x512]"
GONE = "tests/geometry/test_lior_and_speed.py::lior_and_speed::speed[k4m]"

MACHINE = Machine(
    device="nvidia-h200",
    device_name="NVIDIA H200",
    count=1,
    cpu="Intel(R) Xeon(R) Platinum 8480C",
    cores=16,
    memory_bytes=128 << 30,
    driver="580.159.03",
    cuda="13.0",
    power_limit_w=700.0,
    python="3.12.3",
    torch="2.11.0+cu130",
    triton="3.6.0",
    platform="Linux-6.8-x86_64",
)


def measured(item: str, times: dict[str, float], *, processes: int = 3, **fields: object) -> tuple[Measurement, ...]:
    """Return one measurement per process, with reproducible noise of 0.3% per block and 0.2% per process."""
    noise = random.Random(item)
    found = []
    for _ in range(processes):
        sides, logs = {}, {}
        for side, seconds in times.items():
            shift = noise.gauss(0, 0.002)
            blocks = [seconds * math.exp(shift + noise.gauss(0, 0.003)) for _ in range(8)]
            sides[side] = SideRecord(
                device_s=seconds, wall_s=seconds + 9e-6, blocks_s=tuple(blocks), peak_bytes=3 << 20, host_syncs=0,
                launches=2,
            )  # fmt: skip
            if side != "optimized":
                logs[side] = tuple(math.log(b / times["optimized"]) for b in blocks)
        technique, workload = names(item)
        defaults: dict[str, object] = {
            "id": item, "pair": technique.rpartition("/")[2], "workload": workload, "device": "nvidia-h200",
            "clock": "device", "direction": "forward", "dtype": "float32", "sizes": {"n": 8192, "d": 384}, "seed": 7,
            "sides": sides, "log_ratios": logs, "seconds": 2.5,
            "limit": Limit(seconds=times["optimized"] * 0.81, by="memory", bytes=3.2e8, flops=0.0, ceiling=4.25e12),
            "condition": Condition(
                sm_clock_mhz=1980.0, sm_clock_min_mhz=1965.0, temperature_c=54.0, power_w=412.0,
                throttle=("SW power cap",),
            ),
            "evidence": Evidence(
                pair="p", dtype="float32", device="cuda", draws=1, discarded=0, elements=4096, excused=0, worst=0.31
            ),
        }  # fmt: skip
        found.append(Measurement(**{**defaults, **fields}))  # type: ignore[arg-type]
    return tuple(found)


def example() -> RunReport:
    """Return a run with every case: green, red, a beaten and an unbeaten rival, and a workload not measured."""
    return RunReport(
        machine=MACHINE,
        revision="1f3c9a2",
        started="2030-04-05T10:11:12+00:00",
        seconds=187.0,
        measurements={
            ROTOR: measured(
                ROTOR,
                {"reference": 4.1e-3, "optimized": 19.4e-6, "compile": 1.21e-3},
                clock="wall",
                few=("reference",),
                condition=Condition(),
                limit=None,
                skipped={"liger": "not installed"},
            ),
            COSINE_SMALL: measured(
                COSINE_SMALL, {"reference": 61e-6, "optimized": 8.2e-6, "compile": 12e-6, "cuda": 9e-6}
            ),
            COSINE_LARGE: measured(COSINE_LARGE, {"reference": 2.9e-3, "optimized": 1.31e-3, "compile": 1.05e-3}),
            ADAMW: measured(
                ADAMW, {"reference": 9.48e-3, "optimized": 0.456e-3, "foreach": 1.36e-3, "accepted": 0.441e-3}
            ),
        },
        verdicts={
            ROTOR: Verdict(
                id=ROTOR, status=Status.PASS, message="rotor_update[window64]: 211× (promised 20×)", speedup=211.3,
                speedup_low=208.0, speedup_high=214.6, slowdown=0.001, low=-0.004, high=0.006, margin=0.012,
                compared="the accepted revision 1a2b3c4", processes=3,
            ),
            COSINE_LARGE: Verdict(id=COSINE_LARGE, status=Status.IMPROVED, message="pairwise_cosine[n8192]: 4% faster"),
            ADAMW: Verdict(
                id=ADAMW, status=Status.REGRESSED, slowdown=0.034, low=0.029, high=0.039, margin=0.01,
                compared="the accepted revision 1a2b3c4", processes=9, moved="optimized",
                message="fused_adamw[matrices200x512]: optimized is 3.4% slower than accepted (2.9 to 3.9)",
            ),
            GONE: Verdict(id=GONE, status=Status.UNMEASURED, message="lior_and_speed[k4m]: not measured"),
        },
        promises={
            ROTOR: PromiseRecord(speedup=20.0, host_syncs=0),
            ADAMW: PromiseRecord(speedup=15.0, peak_bytes=4 << 20),
            COSINE_SMALL: PromiseRecord(speedup=7.4),
        },
        correctness=Correctness(
            passed=41, failed=1, skipped=3, skip_reasons={"needs two GPUs": 2, "flash-attn is not installed": 1},
            failures={"tests/a/test_b.py::b::equivalence[float32]": "output 0 at [3, 1]: 0.5, truth 0.25 | <b>"},
        ),
        problems=("process 2 ended early: torch.OutOfMemoryError",),
        workloads=(ROTOR, COSINE_SMALL, COSINE_LARGE, ADAMW, GONE),
        skipped=(COSINE_SMALL,),
        shard="2/3",
    )  # fmt: skip


def printed(report: RunReport, width: int = 100) -> str:
    out = io.StringIO()
    terminal.show(report, Console(file=out, width=width, highlight=False))
    return out.getvalue()


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0 ns"), (1.234e-9, "1.23 ns"), (9.996e-7, "1.00 µs"), (12.34e-6, "12.3 µs"), (9.999e-4, "1.00 ms"),
     (0.4762, "476 ms"), (2.0, "2.00 s"), (None, "–")],
)  # fmt: skip
def test_seconds_have_three_digits_and_the_unit_that_fits(value: float | None, text: str) -> None:
    assert units.seconds(value) == text


@pytest.mark.parametrize(("value", "text"), [(211.3, "211×"), (5.184, "5.18×"), (1.0034, "1.003×"), (0.52, "0.520×")])
def test_ratio_shows_the_digits_that_decide(value: float, text: str) -> None:
    assert units.ratio(value) == text


def test_units_of_memory_rates_shares_and_durations() -> None:
    assert units.bytes_(3 << 29) == "1.50 GiB"
    assert units.bytes_(12) == "12 B"
    assert units.rate(4.25e12, "B/s") == "4.25 TB/s"
    assert units.percent(0.034) == "3.4%"
    assert units.percent(0.85) == "85%"
    assert units.duration(187) == "3 min 7 s"


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        (ROTOR, ("geometry/rotor_update", "window64")),
        ("test_scale.py::scale::speed[big]", ("scale", "big")),
        ("tests/test_scale.py::scale::speed[a[1]]", ("scale", "a[1]")),
        ("tests/[x]/test_a.py::a::speed[w]", ("[x]/a", "w")),
        ("odd", ("odd", "odd")),
    ],
)
def test_names_come_from_the_id(item: str, expected: tuple[str, str]) -> None:
    assert names(item)[1] == expected[1]
    assert names(item)[0] == expected[0]


def test_pairs_of_the_same_name_are_distinguished_by_their_modules() -> None:
    first, second = (f"tests/{name}.py::pair::speed[small]" for name in ("test_a", "test_b"))
    found = {i: measured(i, {"reference": 2e-6, "optimized": 1e-6}) for i in (first, ROTOR, second)}
    report = dataclasses.replace(
        example(), measurements=found, verdicts={}, promises={}, workloads=tuple(found), skipped=(), problems=()
    )
    assert [(r.id, r.technique) for r in rows(report)] == [
        (first, "tests/test_a/pair"),
        (ROTOR, "geometry/rotor_update"),
        (second, "tests/test_b/pair"),
    ]
    page = html.page(report)
    anchors = re.findall(r'<details[^>]* id="([^"]*)"', page)
    assert len(set(anchors)) == len(anchors) == 3
    assert "tests/test_a/pair" in markdown.table(found)
    assert "tests/test_b/pair" in printed(report)


@pytest.mark.parametrize("name", ["window6", "n=8, k<4", "it's"])
def test_the_command_to_repeat_names_one_workload(name: str) -> None:
    id = f"tests/test_a.py::pair::speed[{name}]"
    for verdicts, mode in (
        ({}, ["pytest", "-m", "perf"]),
        (
            {id: Verdict(id=id, status=Status.NOISY, message="")},
            ["perfsuite", "gate", "--partial"],
        ),
    ):
        run = RunReport(
            machine=MACHINE, revision=None, started="", seconds=1.0, verdicts=verdicts,
            measurements={id: measured(id, {"optimized": 1e-6})},
        )  # fmt: skip
        assert shlex.split(html.detail(run, rows(run)[0], {}).command) == [*mode, id]


def test_anchors_are_unique_and_depend_on_no_other_workload() -> None:
    ids = [f"tests/test_a.py::pair::speed[{name}]" for name in ("n<8", "n>8", "α", "β", "a b")]
    alone = [html.anchor(row(id, ())) for id in ids]
    assert len(set(alone)) == len(ids)
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+", anchor) for anchor in alone)
    every = [*ids, "tests/test_b.py::pair::speed[a b]"]
    run = RunReport(
        machine=MACHINE, revision=None, started="", seconds=1.0, measurements=dict.fromkeys(every, ())
    )  # fmt: skip
    assert [html.anchor(r) for r in rows(run)][: len(ids)] == alone


def test_the_page_counts_the_blocks_of_all_processes() -> None:
    gated = measured(ROTOR, {"optimized": 1e-6, "accepted": 1e-6}, processes=2)
    gated += measured(ROTOR, {"optimized": 1e-6, "accepted": 1e-6, "reference": 1e-5}, processes=1)
    run = RunReport(machine=MACHINE, revision=None, started="", seconds=1.0, measurements={ROTOR: gated})
    facts = dict(html.detail(run, rows(run)[0], {}).facts)
    assert facts["measured"] == "3 processes, 24 blocks, 7.5 s, seed 7"


def test_a_rival_stands_beside_the_optimized_side_of_its_own_process() -> None:
    """Only the first process times rivals. If everything took twice as long in it, the rival is not slower for that."""
    first, *others = measured(COSINE_SMALL, {"reference": 60e-6, "optimized": 8e-6, "fast": 12e-6})
    doubled = {n: dataclasses.replace(s, device_s=2 * (s.device_s or 0)) for n, s in first.sides.items()}
    lean = [dataclasses.replace(m, sides={n: s for n, s in m.sides.items() if n != "fast"}) for m in others]
    lean = [dataclasses.replace(m, log_ratios={"reference": m.log_ratios["reference"]}) for m in lean]
    shown = row(COSINE_SMALL, (dataclasses.replace(first, sides=doubled), *lean))
    assert (shown.optimized_s, shown.rival_s) == (8e-6, pytest.approx(12e-6, rel=0.01))


def test_row_takes_medians_over_processes_and_the_fastest_rival() -> None:
    found = measured(COSINE_SMALL, {"reference": 60e-6, "optimized": 8e-6, "slow": 20e-6, "fast": 12e-6})
    outlier = dataclasses.replace(
        found[2], sides={**found[2].sides, "optimized": dataclasses.replace(found[2].sides["optimized"], device_s=1.0)}
    )
    shown = row(COSINE_SMALL, (*found[:2], outlier))
    assert shown.optimized_s == 8e-6
    assert (shown.rival, shown.rival_s) == ("fast", pytest.approx(12e-6, rel=0.01))
    assert shown.speedup is not None
    assert shown.speedup.value == pytest.approx(7.5, rel=0.01)
    assert shown.limit_fraction == pytest.approx(0.81, rel=0.01)
    assert shown.loses is None


def test_row_takes_the_clock_that_the_workload_names() -> None:
    on_wall = row(ROTOR, measured(ROTOR, {"reference": 1e-3, "optimized": 1e-5}, clock="wall"))
    assert on_wall.optimized_s == pytest.approx(1.9e-5)


def test_accepted_revision_is_no_rival() -> None:
    shown = row(ADAMW, measured(ADAMW, {"reference": 9e-3, "optimized": 5e-4, "accepted": 4e-4}))
    assert shown.rival is None


def test_what_is_a_lower_bound_is_shown_as_one() -> None:
    """The reference was stopped; a process that let it run to its end takes precedence."""
    found = measured(ROTOR, {"reference": 0.9, "optimized": 5e-4}, few=("reference",), at_least=("reference",))
    shown = row(ROTOR, found)
    assert (shown.reference, shown.times_as_fast[:2]) == ("≥ 900 ms", "≥ ")
    assert shown.speedup is not None
    assert (shown.speedup.low, shown.speedup.high) == (None, None)
    report = dataclasses.replace(example(), measurements={ROTOR: found}, verdicts={})
    for text in (printed(report), markdown.summary(report), html.page(report), junit.document(report)):
        assert "≥ 900 ms" in text
        assert f"≥ {units.ratio(shown.speedup.value)}" in text
    assert "a lower bound" in html.page(report)
    whole = row(ROTOR, (*found, dataclasses.replace(found[0], at_least=())))
    assert not whole.reference.startswith("≥")


def test_verdict_figures_win_over_the_plain_interval() -> None:
    shown = {r.id: r for r in rows(example())}[ROTOR]
    assert shown.speedup is not None
    assert (shown.speedup.low, shown.speedup.high) == (208.0, 214.6)


def test_a_difference_within_the_noise_is_called_equal() -> None:
    found = measured(ADAMW, {"reference": 1e-3, "optimized": 5e-4, "compile": 5.0e-4})
    against = compare(found, "compile")
    assert against is not None
    assert against.low is not None
    assert against.high is not None
    assert against.low < 1 < against.high
    assert row(ADAMW, found).loses == "no faster than compile"


@pytest.mark.parametrize(
    ("against", "said"),
    [(1 / 1.002, "no faster than compile"), (1 / 1.02, "slower than compile, by 2.0%"), (0.4, "by 150%")],
)
def test_a_rival_is_faster_from_half_a_percent_on(against: float, said: str) -> None:
    found = row(ADAMW, measured(ADAMW, {"reference": 1e-3, "optimized": 5e-4, "compile": 5e-4}))
    assert found.against_rival is not None
    exact = dataclasses.replace(found.against_rival, value=against, low=0.999 * against, high=1.001 * against)
    shown = dataclasses.replace(found, against_rival=exact)
    assert exact.standing == "slower"
    assert shown.loses is not None
    assert shown.loses.endswith(said)


def test_too_few_blocks_give_no_interval() -> None:
    found = measured(ADAMW, {"reference": 1e-3, "optimized": 5e-4}, log_ratios={"reference": (0.69, 0.7)})
    against = compare(found, "reference")
    assert against is not None
    assert (against.low, against.high) == (None, None)


def test_headline_counts_verdicts() -> None:
    assert counts(example()) == {"PASS": 1, "IMPROVED": 1, "REGRESSED": 1, "UNMEASURED": 1, "measured": 1}
    assert "1 REGRESSED" in headline(example())
    partial = dataclasses.replace(example(), selected=2, collected=27)
    assert headline(partial).endswith("2 of 27 workloads")


def test_empty_run_says_that_nothing_was_measured() -> None:
    empty = RunReport(machine=MACHINE, revision=None, started="", seconds=0.0)
    assert "nothing measured" in printed(empty)
    assert "nothing measured" in html.page(empty)
    assert "nothing measured" in markdown.summary(empty)
    assert ElementTree.fromstring(junit.document(empty)).find(".//testcase") is None


def test_terminal_keeps_one_row_a_workload_at_100_columns() -> None:
    text = printed(example())
    table = list(itertools.takewhile(lambda line: not line.startswith(("✗", "•")), text.splitlines()[2:]))
    assert all(len(line) <= 100 for line in table)
    for workload in ("window64", "n10", "n8192", "matrices200x512", "k4m"):
        assert sum(line.strip().startswith(workload) for line in table) == 1
    assert re.search(r"n8192 +2\.90 ms +1\.31 ms +2\.2\d× .*– +compile 1\.05 ms ✗ +81% +IMPROVED", text)
    assert "diversity/pairwise_cosine[n8192] is slower than compile" in text
    assert "✗ fused_adamw[matrices200x512]: optimized is 3.4% slower" in text
    assert "2 skipped: needs two GPUs" in text
    assert "process 2 ended early" in text


def test_a_comparison_of_revisions_shows_both_times_and_the_change() -> None:
    run = example()
    found, *_ = run.measurements[ROTOR]
    beside = dataclasses.replace(found.sides["optimized"], blocks_s=(2.8e-5,), device_s=2.8e-5)
    alone = dataclasses.replace(
        found, sides={"optimized": found.sides["optimized"], "accepted": beside}, log_ratios={"accepted": (0.0,)}
    )
    text = printed(dataclasses.replace(run, measurements={ROTOR: (alone,)}, verdicts={ROTOR: run.verdicts[ROTOR]}))
    head = next(line for line in text.splitlines() if line.startswith("workload"))
    assert head.split()[:4] == ["workload", "before", "optimized", "change"]
    assert re.search(r"window64 +2\d\.\d µs +28\.4 µs \+0\.1% \(-0\.4 to \+0\.6\) +PASS", text)
    assert "+0.1% " in printed(run)
    assert "(-0.4" not in printed(run)


@pytest.mark.parametrize(
    "words", [lambda run: printed(run, 200), lambda run: re.sub(r"\\(.)", r"\1", markdown.summary(run))]
)
def test_a_rival_that_was_not_timed_is_reported_with_the_reason(words: Callable[[RunReport], str]) -> None:
    run = example()
    assert "rival liger of geometry/rotor_update[window64] left out: not installed" in words(run)
    several = {
        i: tuple(dataclasses.replace(m, skipped={"liger": "not installed", "fa": "raises"}) for m in found)
        for i, found in run.measurements.items()
    }
    text = words(dataclasses.replace(run, measurements=several))
    assert f"{len(several)} rivals left out: not installed" in text
    assert f"{len(several)} rivals left out: raises" in text


def test_terminal_leaves_out_what_a_cpu_does_not_tell() -> None:
    found = measured(ROTOR, {"reference": 1e-3, "optimized": 1e-5}, condition=Condition(), limit=None)
    text = printed(RunReport(machine=MACHINE, revision=None, started="", seconds=1.0, measurements={ROTOR: found}))
    assert "MHz" not in text
    assert "limit" not in text
    assert "rival" not in text
    assert "verdict" not in text


def test_terminal_is_wide_enough_in_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert terminal.console(io.StringIO()).width == terminal.PLAIN_WIDTH


def test_a_reference_that_became_slower_is_named_although_the_workload_passes() -> None:
    report = example()
    message = f"PASS {ROTOR}: a slowdown of 1.2% is excluded; 211× as fast, 98× when accepted: the reference is slower"
    passed = dataclasses.replace(report.verdicts[ROTOR], message=message, moved="reference")
    report = dataclasses.replace(report, verdicts={**report.verdicts, ROTOR: passed})
    for text in (printed(report), markdown.summary(report), comment.text(report)):
        plain = " ".join(text.replace("\\", "").split())
        assert "rotor_update[window64]: a slowdown of 1.2% is excluded; 211× as fast" in plain
    assert "the reference moved, not the optimized side" in html.page(report)


def test_interrupted_run_says_so_everywhere() -> None:
    report = dataclasses.replace(example(), complete=False)
    for text in (printed(report), markdown.summary(report), html.page(report), junit.document(report)):
        assert "nterrupted" in text
    assert any("interrupted" in line for line in annotation_lines(report))
    assert json.loads(jsonfile.document(report))["complete"] is False


class Ascii(io.TextIOWrapper):
    """Terminal that accepts only ASCII."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), encoding="ascii", newline="")

    def text(self) -> str:
        self.seek(0)
        return self.read()


def test_a_terminal_that_lacks_a_character_gets_a_question_mark() -> None:
    stream = Ascii()
    terminal.show(example(), terminal.console(stream))
    text = stream.text()
    assert "1 REGRESSED" in text
    assert "? fused_adamw[matrices200x512]: optimized is 3.4% slower" in text


def test_a_workload_that_was_not_measured_again_is_green() -> None:
    unchanged = Verdict(
        id=GONE,
        status=Status.UNCHANGED,
        message=f"UNCHANGED {GONE}: nothing that it runs has changed",
        compared="what was accepted at 1a2b3c4",
    )
    report = RunReport(machine=MACHINE, revision=None, started="", seconds=1.0, verdicts={GONE: unchanged})
    assert "1 UNCHANGED" in printed(report)
    assert "✗" not in printed(report)
    assert markdown.summary(report).startswith("## ✅")
    assert ElementTree.fromstring(junit.document(report)).find(".//failure") is None
    assert annotation_lines(report) == []
    assert jsonfile.parse(jsonfile.document(report)).verdicts == {GONE: unchanged}


@pytest.mark.parametrize("status", [s for s in Status if not s.green])
def test_a_red_workload_is_red_in_every_form(status: Status) -> None:
    red = Verdict(id=GONE, status=status, message=f"{status} {GONE}: the reason")
    report = RunReport(machine=MACHINE, revision=None, started="", seconds=1.0, verdicts={GONE: red})
    assert f"✗ {status} {GONE}: the reason" in printed(report, width=200)
    assert markdown.summary(report).startswith("## ❌")
    assert [line.split()[0] for line in annotation_lines(report)] == ["::error"]
    assert " open>" in html.page(report)
    case = ElementTree.fromstring(junit.document(report)).find(".//testcase[system-out]")
    assert case is not None
    # JUnit's "failure" says that the code is at fault, its "error" that nothing was decided.
    kinds = [case.find(kind) is not None for kind in ("failure", "error")]
    assert kinds == [status.blames_code, not status.blames_code]


def test_a_name_that_is_no_text_is_written_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file's name that is not UTF-8 is written in escaped form."""
    named = GONE.replace("lior", "\udcff")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    report = dataclasses.replace(example(), problems=(f"{named}: not collected",))
    write_all(report, tmp_path / "out")
    markdown.append_job_summary(report)
    assert "\\udcff" in (tmp_path / "summary.md").read_text()


def test_markdown_table_has_the_columns_and_marks_what_is_not_beaten() -> None:
    table = markdown.table(example().measurements)
    head, rule, *body = table.splitlines()
    assert head == "| technique | workload | reference | optimized | speedup | best rival | limit |"
    assert all(line.count(" | ") == 6 for line in (head, rule, *body))
    large = next(line for line in body if "n8192" in line)
    assert "compile 1.05 ms **(not beaten)**" in large
    assert "81% memory" in large
    assert "geometry/rotor_update" in body[0]


def test_markdown_table_of_a_baseline_is_that_of_its_measurements() -> None:
    kept = {item: found for item, found in example().measurements.items() if item != ROTOR}
    entries = [
        entry_from(
            found,
            machine=MACHINE,
            promises=PromiseRecord(),
            revision="1f3c9a2",
            dirty=False,
            reason="first",
            accepted="2030-04-05T10:11:12+00:00",
        )
        for found in kept.values()
    ]
    accepted, run = (markdown.table(source).splitlines() for source in (entries, kept))
    # Stored times are the blocks' medians, here a third of a percent off the nominal ones.
    strip = [re.sub(r"\d\.?\d+ (µs|ms)|\d+\.\d+×|\d+%", "#", line) for line in accepted]
    assert strip == [re.sub(r"\d\.?\d+ (µs|ms)|\d+\.\d+×|\d+%", "#", line) for line in run]


def test_markdown_table_goes_between_the_markers_and_again() -> None:
    text = f"# Title\n\n{markdown.BEGIN}\nold\n{markdown.END}\n\nafter\n"
    once = markdown.insert(text, "| new |")
    assert once == f"# Title\n\n{markdown.BEGIN}\n| new |\n{markdown.END}\n\nafter\n"
    assert markdown.insert(once, "| new |") == once


@pytest.mark.parametrize(
    "text", ["", markdown.BEGIN, f"{markdown.END}{markdown.BEGIN}", 2 * (markdown.BEGIN + markdown.END)]
)
def test_markdown_refuses_a_file_without_a_place(text: str) -> None:
    with pytest.raises(PerfsuiteError, match="no place for the table"):
        markdown.insert(text, "| new |")


def test_job_summary_puts_failures_first_and_escapes() -> None:
    text = markdown.summary(example())
    assert text.startswith("## ❌ perfsuite")
    assert "0.25 \\| &lt;b&gt;" in text
    assert text.index("REGRESSED: fused") < text.index("| technique |")


def test_job_summary_is_appended_where_github_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    assert not markdown.append_job_summary(example())
    path = tmp_path / "summary.md"
    path.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(path))
    assert markdown.append_job_summary(example())
    assert path.read_text().startswith("before\n## ")


def test_junit_counts_match_its_cases() -> None:
    root = ElementTree.fromstring(junit.document(example()))
    suites = {s.get("name"): s for s in root}
    speed = suites["perfsuite.speed"]
    assert (speed.get("tests"), speed.get("failures"), speed.get("errors")) == ("5", "1", "1")
    for suite in root:
        assert int(suite.get("tests", "")) == len(suite.findall("testcase"))
    failure = speed.find("testcase/failure")
    assert failure is not None
    assert failure.get("type") == "REGRESSED"
    assert "3.4% slower" in failure.get("message", "")
    assert suites["perfsuite.run"].find("testcase/error") is not None


def test_junit_survives_control_characters() -> None:
    report = dataclasses.replace(example(), problems=("\x1b[31mred\x1b[0m \x00 & <tag>",))
    error = ElementTree.fromstring(junit.document(report)).find(".//error[@type='run']")
    assert error is not None
    assert error.get("message") == "red � & <tag>"


def test_json_round_trip() -> None:
    report = example()
    assert jsonfile.parse(jsonfile.document(report)) == from_json(RunReport, to_json(report))
    again = jsonfile.parse(jsonfile.document(report))
    assert again.measurements[ROTOR][0] == report.measurements[ROTOR][0]
    assert jsonfile.document(again) == jsonfile.document(report)


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "is not JSON"), ("[]", "is no perfsuite report"), ("{}", "is no perfsuite report"),
     ('{"perfsuite_report": 99}', "of schema 99"), ('{"perfsuite_report": 1}', "lacks 'machine'")],
)  # fmt: skip
def test_json_refuses_what_is_no_report_in_one_line(text: str, message: str) -> None:
    with pytest.raises(PerfsuiteError, match=message) as caught:
        jsonfile.parse(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "1e999"])
def test_json_holds_finite_numbers_only(value: str) -> None:
    infinite = dataclasses.replace(example(), seconds=float(value))
    with pytest.raises(PerfsuiteError, match=r"the report has a figure that is no finite number: .*; run again"):
        jsonfile.document(infinite)
    text = jsonfile.document(example()).replace('"seconds": 187.0', f'"seconds": {value}')
    assert value in text
    with pytest.raises(PerfsuiteError, match=f"report.json is not JSON: {value} is no finite number; run again"):
        jsonfile.parse(text, "report.json")


class Tags(HTMLParser):
    """Parser that checks the nesting of tags, and collects what would load something."""

    void = frozenset({"meta", "br", "line", "circle", "text"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("link", "img", "iframe"):
            self.loads.append(tag)
        self.loads += [
            value or "" for name, value in attrs if name in ("src", "href") and not (value or "").startswith("#")
        ]
        if tag not in ("meta", "br", "input"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_html_page_is_self_contained_and_escaped() -> None:
    text = html.page(example())
    tags = Tags()
    tags.feed(text)
    assert tags.loads == []
    assert tags.open == []
    assert "url(" not in text
    assert "@import" not in text
    assert "&lt;b&gt;" in text
    assert "<b>&#" not in text
    assert "prefers-color-scheme: dark" in text


def test_html_page_opens_what_is_red_and_marks_what_is_not_beaten() -> None:
    text = html.page(example())
    assert re.findall(r'<details class="card" id="([^"]*)" open>', text) == [
        "optimizers-fused_adamw-matrices200x512-80d82e75",
        "geometry-lior_and_speed-k4m-864c6eb1",
    ]
    assert "not beaten" in text
    assert "promised 20.0×" not in text, "a goal far from the dots would squeeze them together"
    assert "promised 7.40×" in text
    assert text.count("h0") == sum(
        len(blocks) for found in example().measurements.values() for m in found for blocks in m.log_ratios.values()
    )


def test_html_page_names_the_cause_of_what_is_red() -> None:
    change = CodeChange(
        since="1a2b3c4", files=("lib/fast.py", "lib/slow.py"), commits=("9f94c2b A <b>faster</b> kernel",),
        uncommitted=("lib/slow.py",),
    )  # fmt: skip
    verdict = dataclasses.replace(example().verdicts[ADAMW], moved="optimized")
    report = dataclasses.replace(example(), verdicts={**example().verdicts, ADAMW: verdict}, changes={ADAMW: change})
    text = html.page(report)
    assert model.sentence(report) in text
    top = text[: text.index("<h2>Workloads")]
    assert model.reason(verdict.message, model.rows(report)[0]) in top
    assert "<b>1 workload</b>: it takes more time, memory, syncs or launches than what was accepted.</p>" in top
    assert "Changed in 9f94c2b “A &lt;b&gt;faster&lt;/b&gt; kernel”: lib/fast.py and 1 more" in top
    assert "9f94c2b A &lt;b&gt;faster&lt;/b&gt; kernel" in text
    assert "lib/fast.py and 1 more; edited and not committed: lib/slow.py" in top
    assert text.count("not committed") == 2  # and in the workload's details
    assert f"perfsuite gate --partial '{ADAMW}'" in text.replace("&#39;", "'")
    for other in (markdown.summary(report), printed(report)):
        assert "kernel”: lib/fast.py and 1 more" in other.replace("\\", "")
    other = dataclasses.replace(change, other="torch was 2.10.0, is 2.11.0")
    report = dataclasses.replace(report, changes={ADAMW: other})
    assert "Since it was accepted: torch was 2.10.0, is 2.11.0" in html.page(report)


def test_html_page_names_a_cause_that_many_share_once() -> None:
    every = [f"tests/more/test_{n}.py::technique_{n}::speed[w]" for n in range(12)]
    hot = Condition(sm_clock_mhz=1230.0, temperature_c=89.0, throttle=("HW thermal slowdown",))
    report = dataclasses.replace(
        example(),
        measurements={i: measured(i, {"reference": 2e-3, "optimized": 1e-3}, condition=hot) for i in every},
        verdicts={i: Verdict(id=i, status=Status.NOISY, message="NOISY: 1.4×", moved="device") for i in every},
    )
    text = html.page(report)
    top = text[: text.index("<h2>Workloads")]
    cause = "when the figures were accepted: SM clock 1230 MHz, 89 °C, clock limited by HW thermal slowdown.</p>"
    assert top.count(cause) == 1
    assert "<b>12 workloads</b>" in top
    assert "<summary>11 more</summary>" in top


def test_html_page_of_a_large_run_is_small() -> None:
    every = [f"tests/more/test_{n}.py::technique_{n}::speed[w]" for n in range(120)]
    sides = {"reference": 2e-3, "optimized": 1e-3, "accepted": 1e-3, "compile": 1.4e-3}
    report = dataclasses.replace(example(), measurements={i: measured(i, sides) for i in every})
    assert len(html.page(report).encode()) < 2e6


def blocks_of(other: str, **options: float) -> plots.Blocks:
    found = plots.blocks(example().measurements[ADAMW], other, PromiseRecord(), **options)
    assert found is not None
    return found


def test_blocks_beside_the_accepted_side_show_the_margin_and_the_noise() -> None:
    found = blocks_of("accepted", margin=0.01, noise=0.003)
    margin, one = (next(g.x for g in found.guides if g.label.startswith(label)) for label in ("margin", "1×"))
    slowest = max(row.median for row in found.rows)
    assert slowest < margin < one
    assert found.band is not None
    assert margin < found.band.low < one < found.band.high
    assert "±0.6%" in found.band.label
    assert [g.label for g in blocks_of("reference", margin=0.01, noise=0.003).guides] == []
    assert blocks_of("reference", margin=0.01, noise=0.003).band is None


def test_densities_are_of_the_accepted_and_the_current_side() -> None:
    found = plots.densities(example().measurements[ADAMW])
    assert found is not None
    accepted, current = found.curves
    assert accepted.median < current.median
    assert found.subtitle == "accepted 440 µs, current 456 µs"
    assert plots.densities(example().measurements[COSINE_LARGE]) is None  # it has no accepted side


def test_the_roofline_has_the_roofs_that_the_run_has_measured() -> None:
    memory = Limit(seconds=3e-4, by="memory", bytes=1e9, flops=2e10, ceiling=4e12)
    compute = dataclasses.replace(memory, by="compute", flops=4e11, ceiling=8e14)
    sides = {"reference": 2e-3, "optimized": 5e-4}
    slow, fast = measured(ROTOR, sides, limit=memory), measured(ADAMW, sides, limit=compute)
    known = plots.ceilings([*slow, *fast])
    assert known == {"memory": 4e12, "float32": 8e14}
    found = plots.roofline(slow, known)
    assert found is not None
    assert found.subtitle == "20.0 operations a byte; optimized reaches 50% of the roof"
    assert len(found.roof.split()) == 3  # from memory's slope over the ridge to the limit of arithmetic
    assert [name for _, _, name, _ in found.dots] == ["reference", "optimized"]
    assert found.dots[0][1] > found.dots[1][1]  # slower is further down
    alone = plots.roofline(slow, {"memory": 4e12})
    assert alone is not None
    assert len(alone.roof.split()) == 2
    no_operations = measured(ROTOR, sides, limit=dataclasses.replace(memory, flops=0.0))
    assert plots.roofline(no_operations, known) is None


@pytest.mark.parametrize(("low", "high"), [(0.997, 1.004), (5.1, 5.3), (208, 215), (1e-3, 1.4e-3), (1, 40)])
def test_ticks_are_few_round_and_within(low: float, high: float) -> None:
    found = plots.ticks(low, high)
    assert 2 <= len(found) <= 5
    assert all(low <= value <= high for value, _ in found)
    assert len({label for _, label in found}) == len(found)
    assert all(float(label[:-1]) == pytest.approx(value, rel=1e-9) for value, label in found)


def test_annotations_are_escaped_and_name_the_file() -> None:
    lines = annotation_lines(example())
    assert "::error file=tests/optimizers/test_fused_adamw.py,title=REGRESSED%3A optimizers/fused_adamw" in "\n".join(
        lines
    )
    assert all("\n" not in line for line in lines)
    assert command("error", "a:b,c", "50%\nnext") == "::error title=a%3Ab%2Cc::50%25%0Anext"
    levels = [line.split()[0] for line in lines]
    assert levels == sorted(levels, key=lambda level: level != "::error")


def test_the_project_s_folder_for_reports_ignores_itself(tmp_path: Path) -> None:
    write_all(example(), tmp_path / ".perfsuite" / "report")
    assert (tmp_path / ".perfsuite/.gitignore").read_text() == "*\n"
    write_all(example(), tmp_path / "out")
    assert not (tmp_path / "out/.gitignore").exists()


def test_write_all_replaces_whole_files(tmp_path: Path) -> None:
    paths = write_all(example(), tmp_path / "deep" / "er")
    assert {p.name for p in (tmp_path / "deep" / "er").iterdir()} == {p.name for p in paths.values()}
    assert jsonfile.read(paths["json"]).revision == "1f3c9a2"
    assert write_all(example(), tmp_path / "deep" / "er") == paths


def test_write_says_in_one_line_what_stands_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        PerfsuiteError, match=r"cannot write .*; free space there, make its folder writable, or name another"
    ):
        write(tmp_path / "file" / "report.json", "text")


def test_the_page_shows_a_throughput_and_its_promise() -> None:
    run = measured(ROTOR, {"optimized": 1e-4, "reference": 2e-3}, items=100.0, unit="tokens")
    report = dataclasses.replace(example(), measurements={ROTOR: run}, promises={ROTOR: PromiseRecord(throughput={})})
    assert re.search(r"throughput</\w+>\s*<\w+[^>]*>\s*[\d,]+ tokens/s", html.page(report))
    for goal, tone in ((9e5, ""), (1.1e6, "bad")):
        (row,) = (r for r in model.rows(report) if r.id == ROTOR)
        ((what, promised, reached, found),) = html._promises(
            PromiseRecord(throughput={"nvidia-h200": goal, "nvidia-h100": 9e9}), row, run
        )
        assert (what, promised, found) == ("throughput", f"≥ {goal:,.0f} tokens/s", tone)
        assert float(reached.removesuffix(" tokens/s").replace(",", "")) == pytest.approx(1e6, rel=0.01)


def test_a_stopped_reference_does_not_count_beside_a_complete_one() -> None:
    whole = measured(ROTOR, {"optimized": 0.1, "reference": 3.0}, processes=1)
    stopped = measured(ROTOR, {"optimized": 0.1, "reference": 1.0}, processes=1, at_least=("reference",))
    shown = row(ROTOR, [*stopped, *whole])
    assert shown.speedup is not None
    assert shown.speedup.value == pytest.approx(30, rel=0.02)


def test_a_rival_that_some_process_timed_is_not_left_out() -> None:
    timed = measured(ROTOR, {"optimized": 1e-4, "reference": 2e-3, "compile": 2e-4}, processes=1)
    skipped = measured(
        ROTOR, {"optimized": 1e-4, "reference": 2e-3}, processes=1, skipped={"compile": "no", "fft": "b"}
    )
    assert model.rivals_left_out([*timed, *skipped]) == {"fft": "b"}


def test_one_core_is_one() -> None:
    single = dataclasses.replace(example(), machine=dataclasses.replace(MACHINE, cores=1))
    assert model.machine_line(single.machine).endswith("8480C, 1 core")
    assert "8480C, 1 core<" in html.page(single)


def test_one_round_is_one() -> None:
    for aside, text in ((1, "1 ABBA round discarded"), (2, "2 ABBA rounds discarded")):
        found = measured(ROTOR, {"optimized": 1e-4}, processes=1, condition=Condition(set_aside=aside))
        assert condition(found) == text
    steady = Condition(sm_clock_mhz=1980.0, sm_clock_min_mhz=1979.7)
    assert condition(measured(ROTOR, {"optimized": 1e-4}, processes=1, condition=steady)) == "SM clock 1980 MHz"
