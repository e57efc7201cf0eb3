"""`perfsuite history`: its output in the terminal, as JSON and as a page, and its error messages."""

from __future__ import annotations

import importlib.util
import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result
from histories import BEGAN, DOTS, figures, run, with_levels, written
from scratch import lines_with

from perfsuite.cli import main
from perfsuite.errors import PerfsuiteError
from perfsuite.gate.exit_codes import COULD_NOT_BEGIN
from perfsuite.history import name_lookup, store, terminal
from perfsuite.history.records import Accepted, Run
from perfsuite.history.series import Point, points
from perfsuite.records import Status

OTHER = "tests/linear/test_rows.py::rows::speed[small]"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.setenv("COLUMNS", "140")
    return tmp_path


def history(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["history", *arguments])


def course(*runs: Run, accepted: Sequence[Accepted] = (), id: str = DOTS) -> list[Point]:
    return points([(r, r.workloads[id]) for r in runs], {"nvidia-h200": accepted})


def accepted(day: int, seconds: float) -> Accepted:
    return Accepted(date=f"2026-11-{day:02d}T18:00:00+00:00", optimized_s=seconds, speedup=10.0)


# --- the terminal ---------------------------------------------------------------------------------------------------


def test_history_lists_the_last_runs(here: Path) -> None:
    red = {DOTS: figures(verdict=Status.REGRESSED), OTHER: figures(verdict=None)}
    written(here, *(run(n) for n in range(3)), run(3, kind="run", workloads=red, dirty=True, complete=False))
    done = history("--limit", "2")
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["date", "(UTC)", "kind", "revision", "device", "verdicts"]
    assert lines[1].split("  ") == [
        *("2026-11-04 12:00", "run, interrupted", "0000003+", "NVIDIA H200", "1 REGRESSED · 1 measured")
    ]
    assert "2026-11-03 12:00" in lines[2]
    assert lines[3:5] == ["the last 2 of 4 runs; see --limit", "+: with uncommitted changes"]
    assert "4 runs" in history().stdout


def test_history_of_a_workload_shows_each_run_and_the_steps(here: Path) -> None:
    pytest.importorskip("ruptures")
    runs = with_levels((12, 1e-5), (8, 1.2e-5))
    slower = replace(runs[12].workloads[DOTS], slowdown=0.2, accepted_s=1e-5, verdict=Status.REGRESSED)
    runs[12] = replace(runs[12], workloads={DOTS: slower})
    runs[15] = replace(runs[15], machine=replace(runs[15].machine, platform="Linux-7"), host="gpu-2")
    written(here, *runs)
    done = history("dots", "--limit", "8")
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0] == DOTS
    assert lines[1].split()[-4:] == ["since", "the", "run", "before"]
    assert lines_with(done.stdout, "2026-11-13 12:00  gate  000000c", "12.0 µs", "8.33×", "+20.0%  REGRESSED")
    assert lines_with(done.stdout, "2026-11-16", "PASS", "host gpu-1 → gpu-2")
    assert lines_with(done.stdout, "2026-11-17", "PASS", "host gpu-2 → gpu-1")
    (bars,) = lines_with(done.stdout, "NVIDIA H200, optimized: ", "9.96 µs to 12.0 µs, the oldest first")
    assert bars.split()[3][:12].strip("▁▂") == ""
    assert bars.split()[3][12:].strip("▇█") == ""
    assert "  since 2026-11-13, 000000c: 20.0% slower (12 runs before, 8 after)" in lines
    hint = f"    perfsuite bisect '{DOTS}' --good 000000b00 --bad 000000c00"
    assert hint in lines
    (listed,) = lines_with(history().stdout, "20.0% slower")
    assert listed.startswith("linear/dots[large] on nvidia-h200, since 2026-11-13")


def test_steps_are_updated_with_the_runs(here: Path) -> None:
    pytest.importorskip("ruptures")
    runs = with_levels((12, 1e-5), (8, 1.2e-5))
    written(here, *runs[:12])
    assert "slower" not in history("dots").stdout
    paths = written(here, *runs[12:])
    assert "20.0% slower (12 runs before, 8 after)" in history("dots").stdout
    paths[0].unlink()
    assert "(12 runs before, 7 after)" in history("dots").stdout


def test_bisect_command_is_shown_only_for_a_slowdown_between_commits() -> None:
    step: Any = pytest.importorskip("perfsuite.history.steps").Step(
        device="d", started="", revision="a" * 40, last="b" * 40, change=0.1, before=9, after=9
    )
    assert terminal.bisection("x", step) == f"perfsuite bisect 'x' --good {'b' * 9} --bad {'a' * 9}"
    for other in ({"dirty": True}, {"last": None}, {"revision": "b" * 40}, {"change": -0.1}):
        assert terminal.bisection("x", replace(step, **other)) == ""


def test_missing_ruptures_is_reported_in_one_line(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(here, *with_levels((12, 1e-5), (8, 1.2e-5)))
    monkeypatch.setitem(__import__("sys").modules, "ruptures", None)
    done = history("dots")
    assert done.exit_code == 0
    assert "slower" not in done.stdout
    assert done.stdout.splitlines()[-1] == (
        "to find steps, install the library ruptures (the extra `history`): pip install ruptures"
    )


def test_device_option_selects_one_device(here: Path) -> None:
    other = {"device": "nvidia-h100", "device_name": "NVIDIA H100"}
    written(here, run(0), run(1, seconds=2e-5, machine=other), run(2))
    done = history("dots")
    assert lines_with(done.stdout, "NVIDIA H100, optimized: ▁  20.0 µs to 20.0 µs")
    assert lines_with(done.stdout, "2026-11-02", "device NVIDIA H200 → NVIDIA H100")
    only = history("dots", "--device", "h100")
    assert "H200" not in only.stdout
    assert "1 run" in only.stdout
    about_ruptures = importlib.util.find_spec("ruptures") is None  # then one line says how to install it
    assert len(history("--device", "H200").stdout.splitlines()) == 4 + about_ruptures
    done = history("dots", "--device", "nvidia")
    assert (done.exit_code, done.stderr) == (
        COULD_NOT_BEGIN,
        "Error: 'nvidia' fits 2 devices: nvidia-h100, nvidia-h200; name one\n",
    )


def test_damaged_files_are_reported_on_stderr(here: Path) -> None:
    (path,) = written(here, run(0))
    bad = path.with_name("20261201T000000Z-00000000.json")
    bad.write_text("{")
    done = history("--json")
    assert done.exit_code == 0
    assert done.stderr.startswith(f"skipped: {bad}: it is damaged (")
    assert json.loads(done.stdout)["total"] == 1
    path.unlink()
    done = history()
    assert done.exit_code == COULD_NOT_BEGIN
    assert "holds no run that can be read" in done.stderr


def test_damaged_files_are_named_before_an_error(here: Path) -> None:
    good, bad = written(here, run(0), run(1))
    bad.write_text("{")
    done = history("gone")
    assert done.exit_code == COULD_NOT_BEGIN
    first, second = done.stderr.splitlines()
    assert first.startswith(f"skipped: {bad}: it is damaged (")
    assert second.startswith("Error: no workload in the history fits 'gone'; there are: ")
    good.write_text("{")
    done = history("gone")
    assert done.exit_code == COULD_NOT_BEGIN
    assert len(lines_with(done.stderr, "skipped: ", "it is damaged (")) == 2
    assert lines_with(done.stderr, "Error: ", "holds no run that can be read; `perfsuite run` adds one")


@pytest.mark.parametrize("name", ["window64", "/x", "/bold", ":smile:"])
def test_names_are_shown_literally(here: Path, name: str) -> None:
    id = f"tests/linear/test_dots.py::dots::speed[{name}]"
    other = {"device": "nvidia-h100", "device_name": "NVIDIA [red]H100[/x] :smile:"}
    written(here, run(0, id), run(1, OTHER, machine=other))
    assert history(id, "--device", "h100").stdout == f"{id} has no run on that device\n"
    assert lines_with(history().stdout, "NVIDIA [red]H100[/x] :smile:")


# --- wrong requests -------------------------------------------------------------------------------------------------


def test_missing_history_is_reported_in_one_line(here: Path) -> None:
    done = history()
    assert (done.exit_code, done.stdout) == (COULD_NOT_BEGIN, "")
    assert done.stderr.startswith("Error: there is no history here: `perfsuite run`, `gate`, `accept`")
    assert done.stderr.count("\n") == 1


def test_workload_may_be_named_by_a_unique_part() -> None:
    ids = [DOTS, OTHER, DOTS.replace("large", "larger")]
    for name in (DOTS, "linear/dots[large]", "dots::speed[large]"):
        assert name_lookup.workload(name, ids) == DOTS
    assert name_lookup.workload("SMALL", ids) == OTHER
    for name, words in (
        ("dots", rf"^'dots' fits 2 workloads: {re.escape(DOTS)}, .*; name one$"),
        ("rosw", rf"^no workload in the history fits 'rosw'; the nearest: {re.escape(OTHER)}$"),
        ("zzzz", r"^no workload in the history fits 'zzzz'; there are: "),
        ("a\nb", r"^no workload in the history fits 'a\\nb'; "),
        ("", "fits 3 workloads"),
    ):
        with pytest.raises(PerfsuiteError, match=words):
            name_lookup.workload(name, ids)


def test_unknown_workload_is_reported_in_one_line(here: Path) -> None:
    written(here, run(0, DOTS, OTHER))
    done = history("dits")
    assert done.exit_code == COULD_NOT_BEGIN
    assert done.stderr == f"Error: no workload in the history fits 'dits'; the nearest: {DOTS}\n"


def test_page_that_cannot_be_written_is_reported(here: Path) -> None:
    written(here, run(0))
    (here / "file").write_text("")
    done = history("--html", "file/page.html")
    assert done.exit_code == COULD_NOT_BEGIN
    assert done.stderr.startswith("Error: cannot write file/page.html: ")


# --- accepted figures and changes -----------------------------------------------------------------------------------


def test_change_is_the_measured_one_or_that_against_the_accepted_time() -> None:
    gated = run(4, workloads={DOTS: figures(1.2e-5, slowdown=0.01, baseline=accepted(2, 1.19e-5))})
    found = course(run(0), run(3, seconds=1.1e-5), gated, accepted=[accepted(2, 1e-5), accepted(9, 5e-6)])
    assert [p.change_shown for p in found] == ["–", "~+10.0%", "+1.0%"]
    assert [p.stored for p in found] == [False, True, False]
    assert [p.marks for p in found] == [(), ("accepted 10.0 µs",), ("accepted 10.0 µs → 11.9 µs",)]


def test_slowdown_by_the_ratio_to_the_reference_is_not_shown_as_that_against_the_accepted_revision() -> None:
    stored = figures(1.2e-5, slowdown=-0.28, accepted_s=None, baseline=accepted(2, 1e-5))
    assert [(p.change_shown, p.stored) for p in course(run(4, workloads={DOTS: stored}))] == [("~+20.0%", True)]


def test_a_change_that_rounds_to_zero_has_no_sign() -> None:
    found = course(run(0, workloads={DOTS: figures(slowdown=-0.0001)}))
    assert [p.change_shown for p in found] == ["0.0%"]


def test_an_interrupted_run_of_a_workload_is_marked(here: Path) -> None:
    written(here, run(0, complete=False), run(1))
    assert len(lines_with(history("dots").stdout, "gate, interrupted")) == 1
    assert history("dots", "--html", "page.html").exit_code == 0
    assert (here / "page.html").read_text().count("gate, interrupted") == 2  # in the plot and in the table


@pytest.mark.parametrize(
    ("fields", "mark"),
    [
        ({"driver": "590.1"}, "driver 580.1 → 590.1"),
        ({"torch": None}, "torch 2.11.0 → –"),
        ({"cuda": "13.1"}, "CUDA 13.0 → 13.1"),
        ({"triton": "3.7"}, "triton 3.6.0 → 3.7"),
        ({"python": "3.12.1"}, "Python 3.11.9 → 3.12.1"),
        ({"power_limit_w": 500.0}, "power limit 700.0 → 500.0"),
    ],
)
def test_change_of_the_software_is_marked(fields: dict[str, Any], mark: str) -> None:
    found = course(run(0), run(1), run(2, machine=fields), run(3, machine=fields))
    assert [p.marks for p in found] == [(), (), (mark,), ()]


def test_changes_of_sizes_and_device_are_marked() -> None:
    larger = run(1, workloads={DOTS: figures(sizes={"n": 128})})
    assert course(run(0), larger)[1].marks == ("sizes n=64 → n=128",)
    other = {"device": "nvidia-h100", "device_name": "NVIDIA H100", "driver": "590.1"}
    found = course(run(0), run(1, machine=other), run(2), run(3, machine=other))
    assert [p.marks for p in found] == [
        (),
        ("device NVIDIA H200 → NVIDIA H100",),
        ("device NVIDIA H100 → NVIDIA H200",),
        ("device NVIDIA H200 → NVIDIA H100",),
    ]
    bare = run(1, workloads={DOTS: figures(None, clock="", sizes={}, verdict=Status.UNCHANGED)})
    assert course(run(0), bare)[1].marks == ()


def test_sparkline_shows_small_noise_as_flat() -> None:
    assert terminal.sparkline([1.0, 1.0]) == "▁▁"
    assert terminal.sparkline([1.0, 2.0, 4.0]) == "▁▅█"
    noise = terminal.sparkline([math.exp(x) for x in (0.0, 0.005, 0.01)])
    assert set(noise) <= set("▁▂")
    assert terminal.course(course(run(0, seconds=None))) == "no times"


# --- JSON and the page ----------------------------------------------------------------------------------------------


def test_history_json_lists_runs_and_steps(here: Path) -> None:
    pytest.importorskip("ruptures")
    runs = with_levels((12, 1e-5), (8, 1.2e-5))
    written(here, *runs)
    found = json.loads(history("--json", "--limit", "3").stdout)
    assert (found["total"], len(found["runs"])) == (20, 3)
    assert found["runs"][0]["verdicts"] == {"PASS": 1}
    assert found["runs"][0]["machine"]["driver"] == "580.1"
    assert found["steps"][DOTS][0]["before"] == 12
    found = json.loads(history("dots", "--json", "--limit", "3").stdout)
    assert (found["workload"], found["total"], len(found["runs"])) == (DOTS, 20, 3)
    newest = found["runs"][0]
    assert (newest["optimized_s"], newest["costs"]["launches"]) == (runs[-1].workloads[DOTS].optimized_s, 2)
    assert (newest["change"], newest["change_is_against"]) == (None, None)
    assert found["steps"][0]["change"] == pytest.approx(0.2, abs=0.01)


class Outside(HTMLParser):
    """Collects the elements of a page that load something from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [tag] if tag in ("script", "link", "img", "iframe") else []
        self.found += [f"{tag} {name}" for name, _ in attrs if name in ("src", "href")]


def test_page_is_self_contained_and_draws_every_timed_run(here: Path) -> None:
    pytest.importorskip("ruptures")
    runs = with_levels((12, 1e-5), (8, 1.2e-5))
    runs[5] = replace(runs[5], host="<b>", workloads={DOTS: figures(None, verdict=Status.UNMEASURED)})
    written(here, *runs)
    done = history("dots", "--html", "page.html")
    assert (done.exit_code, done.stdout, done.stderr) == (0, "", "wrote page.html\n")
    text = (here / "page.html").read_text()
    outside = Outside()
    outside.feed(text)
    assert outside.found == []
    assert "<b></b>" not in text
    assert "host gpu-1 → &lt;b&gt;" in text
    (drawn,) = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    svg = ElementTree.fromstring(drawn)
    dots = svg.findall("circle")
    assert len(dots) == 19  # one had no time
    width, height = (float(x) for x in svg.attrib["viewBox"].split()[2:])
    places = [(float(d.attrib["cx"]), float(d.attrib["cy"])) for d in dots]
    assert all(0 < x < width and 0 < y < height for x, y in places)
    assert [x for x, _ in places] == sorted(x for x, _ in places)
    (level,) = (line for line in svg.findall("line") if line.attrib["class"] == "level")
    assert places[10][0] < float(level.attrib["x1"]) < places[11][0]
    assert min(y for _, y in places[:11]) > max(y for _, y in places[11:])  # slower runs are higher up
    assert "slower (11 runs before, 8 after)" in text
    guides = [t.text or "" for line in svg.findall("line") if line.attrib["class"] == "guide" for t in line]
    (guide,) = guides
    assert guide.endswith("host gpu-1 → <b>; host <b> → gpu-1")
    assert history("--html", "runs.html").exit_code == 0
    assert "The last 20 of 20 runs" in (here / "runs.html").read_text()


def test_workload_without_times_is_shown(here: Path) -> None:
    written(here, run(0, seconds=None), run(1, OTHER))
    assert "no times" in history("dots").stdout
    assert history("dots", "--html", "page.html").exit_code == 0
    assert "<svg" not in (here / "page.html").read_text()
    assert store.find(here) == here
    assert f"{BEGAN:%Y-%m-%d}" in (here / "page.html").read_text()
