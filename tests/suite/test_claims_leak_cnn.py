"""leak_cnn's claims: measurements on a CPU, and verdicts on given figures."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import multiprocessing
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from scale import FULLY

from suite.claims import leak_cnn, leak_cnn_setting, measuring, record
from suite.claims import leak_cnn_measured as measured
from suite.claims.record import CONFIRMED, DEPENDS, REFUTED, UNMEASURED, VERDICTS
from suite.commands.claims import claims
from suite.leak_cnn.config import TrainConfig

SMALL = dataclasses.replace(leak_cnn.setting(torch.device("cpu")), batch_size=4, rounds=2)
CHECKS = leak_cnn.CHECKS.all
ON_GPU = ["C16", "C18", "C20", "C22", "C23"]


def test_every_claim_of_the_source_has_a_function_and_a_text() -> None:
    assert list(CHECKS) == [f"C{n}" for n in range(13, 24)]
    assert all(check.said.endswith(".") and callable(check.measure) for check in CHECKS.values())


def test_claims_about_gpus_are_not_measured_without_a_gpu() -> None:
    assert [c.id for c in CHECKS.values() if c.gpu] == ON_GPU
    assert {CHECKS[name].answer(SMALL) for name in ON_GPU} == {(UNMEASURED, "there is no GPU")}


# --- on a CPU -------------------------------------------------------------------------------------------------------


def test_launches_depend_on_the_number_of_tensors() -> None:
    verdict, finding = leak_cnn.launches(SMALL)
    assert verdict == REFUTED
    assert "With 1,144,838 parameters instead of 618,758, in 12 tensors as before, there are as many" in finding


def test_launch_claim_is_confirmed_by_millions_of_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = iter([6_000_000, 36, 1, 12_000_000, 36, 1])
    monkeypatch.setattr(measured, "launches_of", lambda setting, call: next(numbers))
    verdict, finding = leak_cnn.launches(SMALL)
    assert verdict == CONFIRMED
    assert "there are 12000000" in finding


def test_memory_is_reported_for_the_source_s_batch() -> None:
    verdict, finding = leak_cnn.memory(SMALL)
    assert verdict == REFUTED
    assert "5632×64×16×1×4 bytes, is 23.1 MB" in finding
    assert finding.endswith("(from a batch of 4)")


def test_inplace_activations_keep_as_much_memory_for_the_backward() -> None:
    assert leak_cnn.activations(SMALL)[0] == REFUTED
    beside, inplace = (measured.memory_of(SMALL, activation, False) for activation in leak_cnn._ACTIVATIONS)
    assert beside.kept == inplace.kept
    assert inplace.kept >= 4 * 5632 * (32 * 32 + 64 * 32 + 128 * 16)  # at least the outputs of ReLU are kept


@pytest.mark.parametrize(
    ("forward", "step", "verdict"), [(2.3, 2.4, CONFIRMED), (2.3, 0, DEPENDS), (0, 0, REFUTED), (23, 46, REFUTED)]
)
def test_memory_claims_are_met_within_a_tenth(
    forward: float, step: float, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def memory(setting: Any, activation: Any, compiled: bool) -> measured.Memory:
        more = 1e6 * (activation is not torch.relu_)
        return measured.Memory(kept=115.4 * more, forward=forward * more, step=step * more)

    monkeypatch.setattr(measured, "memory_of", memory)
    assert leak_cnn.memory(SMALL)[0] == verdict
    assert leak_cnn.activations(SMALL)[0] == CONFIRMED


def test_operations_track_the_peak_of_live_bytes() -> None:
    given = torch.zeros(1000)
    with measuring.Operations([given]) as seen:
        first = given + 1
        del first
        second, view = given * 2, given.view(10, 100)
    assert (seen.peak, seen.live(), seen.count) == (4000, 4000, 3)
    del second, view
    assert seen.live() == 0


def test_number_of_batches_depends_on_the_incomplete_last_one() -> None:
    pytest.importorskip("h5py", reason="h5py is not installed: pip install 'perfsuite[train]'")
    verdict, finding = leak_cnn.batches(SMALL)
    assert verdict == DEPENDS
    assert "the 576 of 40,000 segments that remain after 7 batches of 5632" in finding
    assert "makes 8 batches unless" in finding
    assert "make 7 and 7 steps on 800 segments" in finding
    assert "to 5 batches of 2048" in finding


@pytest.mark.parametrize(
    ("fork", "spawn", "verdict", "says"),
    [
        ((0.05, 0.051), (2.0, 2.1), REFUTED, "2.00 s later"),
        ((0.3, 0.301), (0.22, 0.222), CONFIRMED, "79.5 ms sooner"),
    ],
)
def test_verdict_on_spawn_depends_on_the_time_to_the_first_batch(
    fork: tuple[float, ...], spawn: tuple[float, ...], verdict: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leak_cnn, "interleaved", lambda *given, count: {"fork": [*fork], "spawn": [*spawn]})
    found, finding = leak_cnn.spawning(SMALL)
    assert found == verdict
    assert says in finding


@pytest.mark.parametrize("way", ["fork", pytest.param("spawn", marks=FULLY)])
def test_no_worker_is_left_after_its_first_batch(way: str) -> None:
    if way not in torch.multiprocessing.get_all_start_methods():
        pytest.skip(f"no {way} here")
    measured.first_batch_of_worker(way)
    assert not torch.multiprocessing.active_children()


def test_fullgraph_removes_no_graph_break() -> None:
    verdict, finding = leak_cnn.fullgraph(SMALL)
    assert verdict == REFUTED
    assert finding == (
        "the network is 1 graph without it and 1 with it, the same. With a graph break (2 graphs) it raises an "
        "error, and does not remove the break"
    )


@pytest.mark.parametrize(
    ("full", "verdict"),
    [
        ((1.0, 1.01, 1.02), REFUTED),
        ((0.95, 0.96, 0.965), CONFIRMED),
        pytest.param((0.9, 1.0, 1.1), REFUTED, marks=FULLY),
    ],
)
def test_verdict_on_fullgraph_depends_on_time(
    full: tuple[float, ...], verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measured, "compiled_step", lambda setting, whole: lambda: None)
    monkeypatch.setattr(leak_cnn, "interleaved", lambda *given: {"False": [1.0, 1.01, 1.02], "True": [*full]})
    assert leak_cnn.fullgraph(dataclasses.replace(SMALL, compiled=True))[0] == verdict


# --- GPU claims, on given figures -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("each", "verdict"), [((1.03, 1.035, 1.04), DEPENDS), ((1.5, 1.6, 1.7), REFUTED), ((0.9, 1.0, 1.1), REFUTED)]
)
def test_verdict_on_saved_syncs_depends_on_their_share_of_an_epoch(
    each: tuple[float, ...], verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = {"each": [t / 1e2 for t in each], "once": [0.01, 0.01, 0.01]}
    monkeypatch.setattr(leak_cnn, "interleaved", lambda *given, count: times)
    found, finding = leak_cnn.syncs_saved(SMALL)
    assert found == verdict
    assert finding.startswith("on ") == (verdict == DEPENDS)


def test_syncs_saved_is_confirmed_for_an_epoch_as_long_as_the_source_s(monkeypatch: pytest.MonkeyPatch) -> None:
    def once_each(device: Any, rounds: int, calls: Mapping[str, Callable[[], None]], count: int) -> Any:
        for call in calls.values():
            call()
        return {"each": [60.0, 60.1], "once": [58.0, 58.1]}

    monkeypatch.setattr(leak_cnn, "interleaved", once_each)
    verdict, _ = leak_cnn.syncs_saved(SMALL)
    assert verdict == CONFIRMED  # times as long as the source's epoch


@pytest.mark.parametrize(
    ("alone", "every", "verdict"), [(1, 1, CONFIRMED), (8, 1, DEPENDS), (8, 0, DEPENDS), (8, 8, REFUTED)]
)
def test_verdict_on_syncs_depends_on_other_syncs(
    alone: int, every: int, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("h5py", reason="h5py is not installed: pip install 'perfsuite[train]'")
    syncs = {"reference": 50, "alone": alone, "resident": 8, "all": every}
    monkeypatch.setattr(measured, "trained_epochs", lambda *given, **options: lambda: None)
    monkeypatch.setattr(leak_cnn, "count_calls", lambda sides: {name: (syncs[name], 0) for name in sides})
    assert leak_cnn.syncs(SMALL)[0] == verdict


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Run all calls in this process, with the seconds given for the end of each call's name."""
    finding: dict[str, float] = {}

    @contextlib.contextmanager
    def apart(made: Mapping[str, measuring.Make]) -> Iterator[dict[str, Callable[[], float]]]:
        calls = {}
        for name, (make, given) in made.items():
            make(*given)()
            seconds = next(seconds for end, seconds in finding.items() if name.endswith(end))
            calls[name] = functools.partial(next, itertools.cycle([seconds, 1.001 * seconds]))
        yield calls

    monkeypatch.setattr(measured, "apart", apart)
    return finding


@pytest.mark.parametrize(("off", "on", "verdict"), [(1.0, 0.92, CONFIRMED), (1.0, 0.99, REFUTED)])
def test_cudnn_autotuning_is_measured_in_both_precisions(
    off: float, on: float, verdict: str, here: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (leak_cnn, measured):
        monkeypatch.setattr(module, "TOGETHER", 1)
    here |= {"False": off, "True": on}
    found, finding = leak_cnn.autotune(SMALL)
    assert found == verdict
    assert "float32: 1" in finding
    assert "float16, channels last: 1" in finding


def test_techniques_are_timed_with_segments_from_the_file_and_on_the_device(
    here: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(leak_cnn, "audio_of", lambda data: None)
    monkeypatch.setattr(measured, "finished_epochs", lambda config, audio, device: lambda: asked.append(config))
    here |= {"read from the fileFalse": 1.0, "read from the fileTrue": 0.99, "False": 0.1, "True": 0.08}
    verdict, finding = leak_cnn.together(SMALL)
    assert verdict == DEPENDS
    assert finding.startswith("on where the segments are: with segments read from the file, an epoch takes 1.00 s")
    assert finding.endswith("The rows of the source's own table add up to 22 to 48%")
    assert [(c.resident_dataset, c.fused_adamw, c.autocast_fp16) for c in asked] == [
        (False, False, True),
        (False, True, True),
        (True, False, True),
        (True, True, True),
    ]


def test_a_failed_compilation_leaves_the_claim_unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*given: Any) -> Any:
        raise torch._dynamo.exc.TorchDynamoException("no compiler\nand more")

    monkeypatch.setattr(measured, "memory_of", refused)
    monkeypatch.setattr(measured, "graphs_of", refused)
    for measure in (leak_cnn.memory, leak_cnn.activations, leak_cnn.fullgraph):
        assert measure(SMALL) == (UNMEASURED, "it cannot be compiled: no compiler")


def test_an_epoch_that_runs_uncompiled_raises_uncompiled_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Uncompiled:
        def __init__(self, *given: Any) -> None:
            self.seen: list[int] = []

        def train_window(self, batch: Mapping[str, torch.Tensor]) -> None:
            self.seen.append(int(batch["epoch"]))
            if self.seen == [0, 1]:
                warnings.warn("leak_cnn's step runs uncompiled: why", RuntimeWarning, stacklevel=2)

    monkeypatch.setattr(measured, "implementation", lambda *given, optimized: Uncompiled)
    epoch = measured.finished_epochs(TrainConfig(), None, SMALL.device)
    epoch()
    with pytest.raises(measuring.UncompiledError, match="leak_cnn's step runs uncompiled: why"):
        epoch()


def test_unmeasured_answers_do_not_affect_a_combined_verdict() -> None:
    noisy, yes, no = (UNMEASURED, "?"), (CONFIRMED, "yes"), (REFUTED, "no")
    assert leak_cnn._together([noisy, yes], "size") == (CONFIRMED, "?; yes")
    assert leak_cnn._together([noisy, noisy], "size") == (UNMEASURED, "?; ?")
    assert leak_cnn._together([no, yes], "size") == (DEPENDS, "on size: no; yes")


@pytest.mark.parametrize(
    ("capability", "supported", "verdict"),
    [((12, 0), True, UNMEASURED), ((7, 5), False, UNMEASURED), ((9, 0), True, REFUTED)],
)
def test_bfloat16_is_measured_only_below_capability_12_and_with_native_support(
    capability: tuple[int, int], supported: bool, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: supported)
    times = {"float32": [1.0, 1.1], "bfloat16": [0.1, 0.11]}
    monkeypatch.setattr(leak_cnn, "interleaved", lambda *given: times)
    assert leak_cnn.bfloat16(SMALL)[0] == verdict


# --- processes ------------------------------------------------------------------------------------------------------


def _counting(path: str) -> Callable[[], object]:
    calls = []

    def call() -> None:
        calls.append(os.getpid())
        Path(path).write_text(" ".join(map(str, calls)))
        if len(calls) == 3:
            raise ValueError("three times")

    return call


@FULLY
def test_apart_uses_one_child_process_and_raises_its_error_here(tmp_path: Path) -> None:
    path = tmp_path / "calls"
    with measuring.apart({"one": (_counting, (str(path),))}) as calls:
        assert calls["one"]() >= 0
        calls["one"]()
        first, second = path.read_text().split()
        with pytest.raises(ValueError, match="three times"):
            calls["one"]()
    assert first == second != str(os.getpid())
    with pytest.raises(ProcessLookupError):
        os.kill(int(first), 0)


def _failing(path: str) -> Callable[[], object]:
    Path(path).touch()
    raise ValueError("it cannot begin")


@FULLY
def test_error_of_a_process_that_has_exited_is_raised_here(tmp_path: Path) -> None:
    path = tmp_path / "began"
    with measuring.apart({"one": (_failing, (str(path),))}) as calls:
        (child,) = multiprocessing.active_children()
        child.join(60)
        assert path.exists()
        with pytest.raises(ValueError, match="it cannot begin"):
            calls["one"]()


# --- the command, and a GPU -----------------------------------------------------------------------------------------


def test_command_measures_the_claims_of_leak_cnn(tmp_path: Path) -> None:
    asked = ["leak_cnn", "--only", "C13", "--only", "C23", "--device", "cpu", "--out", str(tmp_path)]
    done = CliRunner().invoke(claims, asked)
    assert done.exit_code == 0, done.output
    found = record.load(tmp_path / "claims.json")
    assert {name: (c.trainer, c.verdict) for name, c in found.items()} == {
        "C13": ("leak_cnn", REFUTED),
        "C23": ("leak_cnn", UNMEASURED),
    }


@pytest.mark.gpu
@pytest.mark.parametrize("name", CHECKS)
def test_every_claim_has_a_verdict_on_a_gpu(name: str) -> None:
    given = leak_cnn_setting.Setting(
        device=torch.device("cuda"), rounds=2, workers=0, data=leak_cnn_setting.FEW, batch_size=112
    )
    verdict, finding = CHECKS[name].answer(given)
    assert verdict in VERDICTS
    assert finding
