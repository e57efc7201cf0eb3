"""The sources' claims: their verdicts, their JSON file and Markdown page, and the command."""

from __future__ import annotations

import dataclasses
import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from scale import FULLY

from perfsuite.errors import PerfsuiteError
from suite.ablation import ALL, REFERENCE, Timed
from suite.claims import measuring, record, trainer2
from suite.claims.record import CONFIRMED, DEPENDS, EXCEEDED, REFUTED, UNMEASURED, Checks, Claim
from suite.commands.claims import claims

SMALL = dataclasses.replace(trainer2.setting(torch.device("cpu")), rounds=2, curve_windows=3)
HERE = "a device"


def made(id: str, **changed: Any) -> Claim:
    given = {"trainer": "toy", "said": "It pays.", "verdict": CONFIRMED, "found": "2%", "device": HERE}
    return Claim(id=id, **{**given, "versions": "torch 2", "date": "2026-01-01", **changed})


def timed(name: str, *seconds: float, syncs: int = 0, launches: int = 9) -> Timed:
    return Timed(name=name, seconds=seconds, host_syncs=syncs, launches=launches)


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> dict[str, Timed]:
    """Replace the measured window times by fixed ones."""
    found = {
        REFERENCE: timed(REFERENCE, 1.0, 1.1, 1.2, launches=1000),
        "without graphs": timed("without graphs", 0.88, 0.97, 1.05, launches=500),
        "one at a time": timed("one at a time", 0.9, 1.0, 1.1, syncs=4),
        ALL: timed(ALL, 0.22, 0.24, 0.26, launches=7),
    }
    monkeypatch.setattr(trainer2, "_window", lambda setting: found)
    return found


# --- the rule -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (16, 18, CONFIRMED),
        (24, 90, CONFIRMED),
        (1, 15, CONFIRMED),
        (26, 30, EXCEEDED),
        (-3, 14, REFUTED),
        (-3, 16, UNMEASURED),
    ],
)
def test_an_interval_that_overlaps_the_claimed_one_confirms_the_claim(low: float, high: float, verdict: str) -> None:
    found, finding = measuring.within(low, high, 15, 25, "so much")
    assert found == verdict
    assert finding == "so much" + ". This is too noisy to distinguish from no effect" * (verdict == UNMEASURED)


@pytest.mark.parametrize(("low", "verdict"), [(1.01, CONFIRMED), (0.9, UNMEASURED)])
def test_within_treats_a_ratio_of_1_as_no_effect(low: float, verdict: str) -> None:
    assert measuring.within(low, 1.6, 1.5, 2, "so much", nothing=1)[0] == verdict


def test_largest_distance_is_infinite_if_one_is_nan() -> None:
    assert measuring.largest([0.5, math.nan, 0.25]) == math.inf
    assert measuring.largest([0.5, 0.75]) == 0.75


def test_every_claim_of_the_source_has_a_check() -> None:
    assert list(trainer2.CHECKS.all) == [f"C{n}" for n in range(1, 13)]


def test_claims_about_gpus_are_not_measured_without_a_gpu() -> None:
    for test in trainer2.CHECKS.all.values():
        if test.gpu:
            assert test.answer(SMALL) == (UNMEASURED, "there is no GPU")
    assert [t.id for t in trainer2.CHECKS.all.values() if not t.gpu] == ["C9", "C10", "C11"]


def test_a_second_check_of_the_same_claim_raises_error() -> None:
    tests = Checks()
    tests("C1", "one")(lambda setting: (CONFIRMED, ""))
    with pytest.raises(ValueError, match="C1 is measured twice"):
        tests("C1", "two")(lambda setting: (CONFIRMED, ""))


def test_verdict_on_graphs_depends_on_the_time_they_save(windows: dict[str, Timed]) -> None:
    verdict, finding = trainer2.graphs(SMALL)
    assert verdict == EXCEEDED
    assert "a window takes 970 ms without and 240 ms with them" in finding
    assert "75.2% (74.8 to 75.5) less, and 500 launches become 7" in finding
    windows["without graphs"] = timed("without graphs", 0.28, 0.30, 0.32)
    assert trainer2.graphs(SMALL)[0] == CONFIRMED


def test_claims_about_graphs_are_unmeasured_if_capture_fails(
    windows: dict[str, Timed], monkeypatch: pytest.MonkeyPatch
) -> None:
    why = "cuda_graph_step runs eagerly: the step cannot be captured: why"
    windows[ALL] = dataclasses.replace(windows[ALL], notes=("another", why))
    assert trainer2.graphs(SMALL) == trainer2.together(SMALL) == (UNMEASURED, why)
    monkeypatch.setattr(trainer2, "_trainer", lambda setting, on: Refused(why if "use_cudagraphs" in on else None))
    assert trainer2.curves(SMALL) == (UNMEASURED, why)
    monkeypatch.setattr(trainer2, "_trainer", lambda setting, on: Refused(None))
    assert trainer2.curves(SMALL)[0] == CONFIRMED


class Refused:
    """Trainer that warns that it runs eagerly, if `why` is given."""

    def __init__(self, why: str | None) -> None:
        self.why = why

    def train_window(self, batch: Any) -> None:
        if self.why:
            warnings.warn(self.why, RuntimeWarning, stacklevel=2)

    def last_metrics(self) -> dict[str, float]:
        return {"loss": 1.0}


def test_stall_times_each_number_of_blocks_with_an_empty_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator caches freed memory, so one count's blocks must not be freed in the other count's time."""
    cached, returned = 0, []

    class Blocks(list[int]):
        def __init__(self, count: int) -> None:
            nonlocal cached
            cached = max(cached, count)
            super().__init__([0] * count)

    def emptied() -> None:
        nonlocal cached
        returned.append(cached)
        cached = 0

    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", emptied)
    monkeypatch.setattr(trainer2, "_blocks", lambda device, count: Blocks(count))
    trainer2.stall(SMALL)
    timed = returned[1::2]  # an untimed call precedes each timed one
    assert timed[: 2 * SMALL.rounds] == [16, 256] * SMALL.rounds


def test_together_compares_the_time_without_graphs(windows: dict[str, Timed]) -> None:
    verdict, finding = trainer2.together(SMALL)
    assert verdict == CONFIRMED
    assert "takes 1.10 s. With all techniques except CUDA graphs it takes 970 ms, 12.1% (11.2 to 13) less" in finding


@FULLY  # scripting and timing are slow
def test_verdict_on_scripting_depends_on_its_share_of_a_window(windows: dict[str, Timed]) -> None:
    verdict, finding = trainer2.scripting(SMALL)
    assert verdict == REFUTED  # too small to be 1% of a one-second window
    assert "of a window of the reference" in finding


def test_claims_about_functions_are_measured_on_any_device() -> None:
    assert trainer2.in_place(SMALL) == (CONFIRMED, "bit for bit, in 100 draws of up to 64 steps")
    assert trainer2.perplexity(SMALL)[0] == REFUTED
    verdict, finding = trainer2.sign(SMALL)
    assert verdict == UNMEASURED
    assert "g grows along the velocity" in finding


def test_in_place_is_refuted_if_results_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    def implementation(module: str, function: str, *, optimized: bool) -> Any:
        return lambda start: lambda velocities: velocities.sum(0) + optimized

    monkeypatch.setattr(trainer2, "implementation", implementation)
    verdict, finding = trainer2.in_place(SMALL)
    assert verdict == REFUTED
    assert "differ by 1" in finding


def test_window_is_timed_in_four_arms() -> None:
    found = trainer2._window(SMALL)
    assert set(found) == {REFERENCE, ALL, "without graphs", "one at a time"}
    assert all(len(t.seconds) == SMALL.rounds for t in found.values())


@pytest.mark.gpu
def test_every_claim_has_a_verdict_on_a_gpu() -> None:
    given = dataclasses.replace(SMALL, device=torch.device("cuda"))
    for test in trainer2.CHECKS.all.values():
        verdict, finding = test.answer(given)
        noisy = {"C3", "C6", "C8"}  # too noisy with two rounds
        assert verdict in {CONFIRMED, EXCEEDED, REFUTED, DEPENDS, *({UNMEASURED} if test.id in {"C11", *noisy} else ())}
        assert finding


# --- the file and the page ------------------------------------------------------------------------------------------


def test_claims_are_saved_in_numerical_order(tmp_path: Path) -> None:
    path = tmp_path / "claims.json"
    assert record.load(path) == {}
    given = {name: made(name) for name in ("C10", "C2")}
    record.save(given, path)
    assert record.load(path) == given
    assert list(record.load(path)) == ["C2", "C10"]
    shown = record.page(given)
    assert shown.index("| C2 |") < shown.index("| C10 |")
    assert "| C2 | It pays. | **confirmed** | 2% |" in shown
    assert f"Measured on: {HERE}, torch 2, 2026-01-01." in shown


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"schema": 2, "claims": []}',
        '{"schema": 1, "claims": [{"id": "C1"}]}',
        json.dumps({"schema": 1, "claims": [{**dataclasses.asdict(made("C1")), "id": 5}]}),
    ],
)
def test_load_rejects_files_that_hold_no_claims(text: str, tmp_path: Path) -> None:
    path = tmp_path / "claims.json"
    path.write_text(text)
    with pytest.raises(PerfsuiteError, match=r"claims.json holds no claims .*; move it away"):
        record.load(path)


def test_unknown_verdict_raises_value_error() -> None:
    with pytest.raises(
        ValueError, match="'perhaps' is not one of confirmed, more than claimed, refuted, depends, not m"
    ):
        made("C1", verdict="perhaps")


@pytest.mark.parametrize(
    ("eager", "node", "verdict", "words"),
    [
        (7e-6, 5e-7, CONFIRMED, "an in-place"),
        (7e-6, 2e-6, DEPENDS, "on which of the two: a launch takes what is claimed, a node of a graph does not. "),
        (2e-6, 5e-7, DEPENDS, "on which of the two: a node of a graph takes what is claimed, a launch does not. "),
        (2e-6, 2e-6, REFUTED, "an in-place"),
    ],
)
def test_launch_verdict_covers_eager_launches_and_graph_nodes(
    eager: float, node: float, verdict: str, words: str
) -> None:
    found, finding = trainer2.launch_verdict(1e6 * eager, 1e6 * node)
    assert found == verdict
    assert finding.startswith(words)


# --- the command ----------------------------------------------------------------------------------------------------


def test_command_measures_the_chosen_claims_and_keeps_the_others(tmp_path: Path) -> None:
    record.save({"C1": made("C1", trainer="trainer2"), "C9": made("C9", trainer="trainer2")}, tmp_path / "claims.json")
    done = CliRunner().invoke(claims, ["trainer2", "--only", "C9", "--device", "cpu", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    found = record.load(tmp_path / "claims.json")
    assert found["C1"].device == HERE
    assert found["C9"].device != HERE
    assert found["C9"].found == "bit for bit, in 100 draws of up to 64 steps"
    assert "**confirmed** | bit for bit" in (tmp_path / "claims.md").read_text()


def test_an_earlier_verdict_is_kept_if_the_claim_cannot_be_measured_here(tmp_path: Path) -> None:
    given = made("C6", trainer="trainer2")
    record.save({"C6": given}, tmp_path / "claims.json")
    asked = ["trainer2", "--only", "C6", "--only", "C7", "--device", "cpu", "--out", str(tmp_path)]
    done = CliRunner().invoke(claims, asked)
    assert done.exit_code == 0, done.output
    assert f"what was measured on {HERE} stays: confirmed" in done.output
    found = record.load(tmp_path / "claims.json")
    assert found["C6"] == given
    assert found["C7"].verdict == UNMEASURED
    assert "| C6 | It pays. | **confirmed** |" in (tmp_path / "claims.md").read_text()


@pytest.mark.parametrize(
    ("out", "message"),
    [("claims.md/x", "cannot read claims.md/x"), ("/proc/nowhere", "cannot write into /proc/nowhere: ")],
)
def test_an_unusable_output_folder_is_reported_before_anything_is_measured(out: str, message: str) -> None:
    Path("claims.md").write_text("")
    done = CliRunner().invoke(claims, ["trainer2", "--only", "C9", "--device", "cpu", "--out", out])
    assert done.exit_code == 1
    assert done.output.startswith(f"Error: {message}")
    assert "C9" not in done.output


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory. Tried."), MemoryError()])
def test_out_of_memory_in_one_claim_does_not_stop_the_others(
    error: Exception, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(setting: Any) -> Any:
        raise error

    check = trainer2.CHECKS.all["C9"]
    monkeypatch.setitem(trainer2.CHECKS.all, "C9", dataclasses.replace(check, measure=full))
    done = CliRunner().invoke(
        claims, ["trainer2", "--only", "C9", "--only", "C10", "--device", "cpu", "--out", str(tmp_path)]
    )
    assert done.exit_code == 0, done.output
    found = record.load(tmp_path / "claims.json")
    assert (found["C9"].verdict, found["C10"].verdict) == (UNMEASURED, REFUTED)
    assert "out of memory" in found["C9"].found


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["trainer2", "--only", "C99"], "there is no claim 'C99'; there are: C1, C2, "),
        (["trainer3"], "no trainer is called 'trainer3'; did you mean trainer2?"),
    ],
)
def test_an_unknown_claim_or_trainer_is_reported_in_one_line(arguments: list[str], says: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(claims, [*arguments, "--device", "cpu", "--out", str(tmp_path)])
    assert done.exit_code == 2
    (line,) = done.output.splitlines()
    assert line.startswith(f"Error: {says}")
    assert not list(tmp_path.iterdir())


def test_a_damaged_claims_file_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "claims.json"
    path.write_text(json.dumps({"schema": 7}))
    done = CliRunner().invoke(claims, ["trainer2", "--only", "C9", "--device", "cpu", "--out", str(tmp_path)])
    assert done.exit_code == 1
    assert json.loads(path.read_text()) == {"schema": 7}


def test_the_page_in_docs_is_made_from_the_stored_claims() -> None:
    docs = Path(__file__).parents[2] / "docs"
    assert (docs / "claims.md").read_text(encoding="utf-8") == record.page(record.load(docs / "claims.json"))
