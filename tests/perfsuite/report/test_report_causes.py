"""A gate's page names the cause, the size and the side at once: six planted causes among pairs that are as accepted.

PERFSUITE_KEEP_PAGES=FOLDER keeps the pages, to be looked at.
"""

from __future__ import annotations

import math
import os
import random
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from scratch import TWO_LINES, FakeWorkers, Project, lines_with, times

from perfsuite.records import (
    Alone,
    Condition,
    Limit,
    Measurement,
    Ran,
    SideRecord,
    Status,
)
from perfsuite.report import html, jsonfile
from perfsuite.report.model import rows
from perfsuite.revisions import digests
from perfsuite.session.tasks import Failure, Outcome, Task

pytest_plugins = ["pytester"]

NAMES = ("adamw", "dropout", "gather", "softmax")
TARGET = "tests/test_gather.py::gather::speed[n4096]"
BLOCKS = 8
REFERENCE_S, OPTIMIZED_S = 2.2e-4, 1e-4
PAIR = """
    from lib.NAME import fast
    from lib.plain import slow

    from perfsuite import Pair, Workload, tensor

    NAME = Pair(
        reference=slow,
        optimized=fast,
        inputs={"x": tensor("n")},
        workloads=[Workload("n4096", n=4096, speedup=1.5, peak_bytes=4 << 20)],
    )
"""


class Device:
    """Times of a simulated device with noise of 0.12% a block and 0.06% a process; fields change what it measures."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.noise = 1.0
        self.slower, self.reference_slower = 1.0, 1.0
        """Factors of the target's optimized side and of its reference."""
        self.device_slower = 1.0
        """Factor of every optimized side, of the accepted ones and of the control kernels."""
        self.condition = Condition(sm_clock_mhz=1980.0, temperature_c=52.0, power_w=410.0)
        self.peak_bytes = 2 << 20

    def __call__(self, id: str, process: int, second: bool) -> Measurement:
        own = id == TARGET
        accepted = OPTIMIZED_S * self.device_slower
        seconds = {
            "optimized": accepted * (self.slower if own else 1.0),
            "reference": REFERENCE_S * (self.reference_slower if own else 1.0),
            **({"accepted": accepted} if second else {}),
        }
        blocks = {name: self._blocks(value) for name, value in seconds.items()}
        return Measurement(
            id=id,
            pair=id.split("::")[1],
            workload="n4096",
            device="cpu",
            clock="device",
            direction="forward",
            dtype="float32",
            sizes={"n": 4096},
            seed=1,
            sides={name: self._side(values, own and name == "optimized") for name, values in blocks.items()},
            log_ratios={
                name: tuple(math.log(a / b) for a, b in zip(values, blocks["optimized"], strict=True))
                for name, values in blocks.items()
                if name != "optimized"
            },
            limit=Limit(seconds=2.52e8 / 4.2e12, by="memory", bytes=2.52e8, flops=1e9, ceiling=4.2e12),
            condition=self.condition,
            anchors={"copy": 1e-3 * self.device_slower, "matmul": 2e-3 * self.device_slower, "launch": 3e-6},
            seconds=3.0,
        )

    def _blocks(self, seconds: float) -> list[float]:
        shift = self.random.gauss(0, 6e-4 * self.noise)
        return [seconds * math.exp(shift + self.random.gauss(0, 1.2e-3 * self.noise)) for _ in range(BLOCKS)]

    def _side(self, blocks: list[float], changed: bool) -> SideRecord:
        median = sorted(blocks)[BLOCKS // 2]
        peak = self.peak_bytes if changed else 2 << 20
        return SideRecord(
            device_s=median, wall_s=median, blocks_s=tuple(blocks), peak_bytes=peak, host_syncs=0, launches=1
        )


class Gated:
    """Four pairs that were accepted; `page` gates a change of one of them on another device."""

    def __init__(self, project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
        self.project = project
        project.write("lib/__init__.py", "")
        project.write("lib/plain.py", "def slow(x):\n    return x + x + x\n")
        for name in NAMES:
            project.write(f"lib/{name}.py", "BLOCK = 128\n\n\ndef fast(x):\n    return 3 * x\n")
            project.write(f"tests/test_{name}.py", PAIR.replace("NAME", name))
        project.write("pytest.ini", "[pytest]\npythonpath = .\n")
        project.commit("Four pairs")
        prove = FakeWorkers._proof

        def noting(workers: FakeWorkers, task: Task) -> Outcome:
            name = task.id.split("::")[1]
            files = (f"lib/{name}.py", "lib/plain.py", f"tests/test_{name}.py")
            workers.ran = Ran(
                sources={f: digests.of_file(project.path / f) for f in files}, surroundings=digests.surroundings()
            )
            return prove(workers, task)

        monkeypatch.setattr(FakeWorkers, "_proof", noting)
        project.measured(Device(1))
        done = project.cli("accept", "--reason", "first")
        assert done.exit_code == 0, done.output
        project.commit("Baseline")

    def page(self, name: str, outcome: Callable[[str, int, bool], Outcome], change: str, alone_s: float = 1.0) -> str:
        """Return what the page of a red gate says above its table, without tags."""
        page = self._page(name, outcome, change, alone_s)
        top = page[page.index("<h1>") : page.index("<h2>Workloads")]
        return without_tags(top)

    def details(self, outcome: Callable[[str, int, bool], Outcome], change: str) -> dict[str, str]:
        """Return what the page of a green gate says of each workload below its table, by pair."""
        page = self._page("green", outcome, change, 1.0, green=True)
        cards = [without_tags(card) for card in page.split("<details")[1:]]
        return {pair: card for card in cards for pair in NAMES if f"{pair}[" in card.partition("to repeat")[0]}

    def _page(
        self,
        name: str,
        outcome: Callable[[str, int, bool], Outcome],
        change: str,
        alone_s: float,
        *,
        green: bool = False,
    ) -> str:
        fake = self.project.measured(outcome)
        fake.alone[TARGET] = Alone(id=TARGET, blocks_s=(alone_s,) * BLOCKS)
        if change:
            self.project.replace("lib/gather.py", "BLOCK = 128", f"BLOCK = 128  \nMORE = {change!r}")
            self.project.commit(change)
        assert (self.project.cli("gate").exit_code == 0) is green
        page = self.project.path / ".perfsuite/report/report.html"
        if folder := os.environ.get("PERFSUITE_KEEP_PAGES"):
            Path(folder).mkdir(parents=True, exist_ok=True)
            shutil.copy(page, Path(folder) / f"{name}.html")
        return page.read_text()


def without_tags(page: str) -> str:
    return " ".join(re.sub(r"<[^>]+>", " ", page).split())


@pytest.fixture
def gated(project: Project, monkeypatch: pytest.MonkeyPatch) -> Gated:
    return Gated(project, monkeypatch)


def test_a_green_workload_says_what_changed(gated: Gated) -> None:
    found = gated.details(Device(8), "Other blocks")
    assert re.search(r"Changed since it was accepted at [0-9a-f]{7} lib/gather\.py", found["gather"])
    assert all("Nothing that it runs has changed." in found[pair] for pair in NAMES if pair != "gather")


def test_a_slower_kernel(gated: Gated) -> None:
    device = Device(2)
    device.slower = 1.06
    text = gated.page("slower-kernel", device, "Smaller blocks")
    says = r"gather\[n4096\]: the optimized side is (5\.[89]|6\.[0-2])% slower than the accepted revision [0-9a-f]{7}"
    assert re.search(rf"perfsuite is red: {says} \(1 of 4 workloads not green\)\.", text)
    assert "REGRESSED 1 workload : it takes more time, memory, syncs or launches than what was accepted." in text
    assert re.search(r"gather\[n4096\] accepted code (99\.\d|100) µs, now 10[56] µs, side by side", text)
    assert re.search(r"Changed in [0-9a-f]{7} “Smaller blocks”: lib/gather\.py", text)


def test_a_reference_that_the_optimized_side_slows(gated: Gated) -> None:
    device = Device(3)
    device.reference_slower = 1.7
    text = gated.page("slower-reference", device, "One thread", alone_s=REFERENCE_S)
    assert "NOT TIMED 1 workload : the measured times cannot be trusted." in text
    assert re.search(
        r"the optimized side slows the reference: 37\d µs in a process with both, 220 µs in one without", text
    )
    assert re.search(r"Changed in [0-9a-f]{7} “One thread”: lib/gather\.py", text)


def test_a_throttled_device(gated: Gated) -> None:
    device = Device(4)
    device.device_slower = 1.5
    device.condition = Condition(
        sm_clock_mhz=1230.0, sm_clock_min_mhz=1050.0, temperature_c=89.0, throttle=("HW thermal slowdown",)
    )
    text = gated.page("throttled-device", device, "")
    slower = "the device was slower than when the figures were accepted"
    state = "SM clock 1230 MHz (lowest 1050), 89 °C, clock limited by HW thermal slowdown"
    limited = "with its clock limited by HW thermal slowdown"
    assert f"perfsuite cannot decide: {slower}, {limited} (4 of 4 workloads not green)." in text
    assert f"NOISY 4 workloads : {slower}, for the accepted code as well: {state}." in text
    assert "3 more" in text  # all have the same cause
    assert "None of its files has changed since" in text


def test_a_noisy_neighbour(gated: Gated) -> None:
    device = Device(5)
    device.noise = 60.0
    text = gated.page("noisy-neighbour", device, "Other blocks")
    assert "perfsuite cannot decide: the measurement is too noisy" in text
    assert re.search(r"NOISY \d workloads? : the measurement is too noisy to decide\.", text)
    assert re.search(r"after 12 processes a slowdown of up to \d\.\d% is not excluded, where 1\.0% matters", text)
    assert "measure on a quiet machine" in text


def test_a_broken_promise_of_memory(gated: Gated) -> None:
    device = Device(6)
    device.peak_bytes = 11 << 20
    text = gated.page("memory", device, "In float64")
    assert "BELOW FLOOR 1 workload : a promise is broken." in text
    assert "the optimized side breaks its promise: peak memory 11 MiB (promised: at most 4 MiB)" in text
    assert re.search(r"Changed in [0-9a-f]{7} “In float64”: lib/gather\.py", text)


def test_a_wrong_result(gated: Gated) -> None:
    device, wrong = (
        Device(7),
        "gather: output of the optimized side is wrong at [0, 4095]: 1.5 instead of 2.25 (64 of 262144 elements)",
    )
    failure = Failure(status=Status.NOT_EQUIVALENT, message=wrong)
    text = gated.page("wrong-result", lambda i, p, s: failure if i == TARGET else device(i, p, s), "Vector loads")
    assert "NOT EQUIVALENT 1 workload : the optimized side gives wrong results." in text
    assert "output of the optimized side is wrong at [0, 4095]: 1.5 instead of 2.25" in text
    assert re.search(r"Changed in [0-9a-f]{7} “Vector loads”: lib/gather\.py", text)


def test_the_command_to_repeat_gates_that_workload_alone(project: Project) -> None:
    names = ("window6", "window64", "n=8, k<4", "a::b[c]")
    workloads = ", ".join(f"Workload({name!r}, n=64, clock='wall')" for name in names)
    project.write("test_scale.py", TWO_LINES.replace('Workload("small", n=64, clock="wall")', workloads))
    project.accept()
    project.measured(times())
    assert project.cli("gate", "--report", "report").exit_code == 0
    report = jsonfile.read(project.path / "report/report.json")
    assert len(report.ids) == len(names)
    for one in rows(report):
        program, *arguments = shlex.split(html.detail(report, one, {}).command)
        project.measured(times())
        done = project.cli(*arguments)
        assert (program, done.exit_code) == ("perfsuite", 0), done.output
        assert lines_with(done.output, "1 PASS")
        assert project.workers is not None
        assert {task.id for task in project.workers.tasks} == {one.id}
