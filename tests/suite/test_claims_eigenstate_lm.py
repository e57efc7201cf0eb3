"""eigenstate_lm's claims: measurements on a CPU, and verdicts on given figures."""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from scale import FULLY

from perfsuite.errors import PerfsuiteError
from suite import trainers
from suite.ablation import Ratio
from suite.claims import eigenstate_lm, eigenstate_lm_setting, record, words
from suite.claims import eigenstate_lm_measured as measured
from suite.claims import eigenstate_lm_verdicts as verdicts
from suite.claims.record import CONFIRMED, DEPENDS, REFUTED, UNMEASURED, VERDICTS
from suite.commands.claims import claims
from suite.eigenstate_lm.config import TrainConfig
from suite.eigenstate_lm.data import Data
from suite.eigenstate_lm.model import parameters

ROOT = Path(__file__).resolve().parents[2]
SMALL = dataclasses.replace(eigenstate_lm.setting(torch.device("cpu")), rounds=2)
CHECKS = eigenstate_lm.CHECKS.all
IDS = [f"C{n}" for n in (47, 48, 49, 51, 52, 53, 54, 55, 56, 57, 58, 60)]
ON_GPU = ["C47", "C48", "C55", "C57", "C60"]


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    """Clear the cached times, so that no test uses those of another test."""
    measured.step_seconds.cache_clear()
    yield
    measured.step_seconds.cache_clear()


def ratio(value: float, half: float = 0.0) -> Ratio:
    return Ratio(value=value, low=value - half, high=value + half)


def test_every_claim_of_the_source_has_a_function_and_a_text() -> None:
    assert list(CHECKS) == IDS
    assert all(check.said.endswith(".") and callable(check.measure) for check in CHECKS.values())
    assert trainers.checks_of("eigenstate_lm") == (eigenstate_lm.CHECKS, eigenstate_lm.setting)


def test_claims_about_gpus_are_not_measured_without_a_gpu() -> None:
    assert [c.id for c in CHECKS.values() if c.gpu] == ON_GPU
    assert {CHECKS[name].answer(SMALL) for name in ON_GPU} == {(UNMEASURED, "there is no GPU")}


def test_setting_on_a_gpu_has_the_source_s_sizes() -> None:
    given = eigenstate_lm.setting(torch.device("cuda"))
    assert given.config == TrainConfig(accumulation=1)
    assert (given.config.tokens, given.rows) == (131_072, 131_072)
    assert parameters(given.config.sizes(given.vocabulary)) == 123_104_256


def test_tiny_setting_matches_the_tiny_configuration_file() -> None:
    pytest.importorskip("jsonargparse")
    from suite import configuration
    from suite.runtime import Options

    path = ROOT / "configs/eigenstate_lm/tiny.yaml"
    config, _, data = configuration.read([TrainConfig, Options, Data], path)
    assert dataclasses.replace(config, use_compile=False) == eigenstate_lm_setting.TINY
    assert data.vocabulary == eigenstate_lm_setting.TINY_VOCABULARY


# --- on a CPU -------------------------------------------------------------------------------------------------------


def test_sequential_recurrence_claim_is_refuted_by_the_scan() -> None:
    verdict, finding = eigenstate_lm.sequential(SMALL)
    assert verdict == REFUTED
    assert "for 64 tokens" in finding
    assert "for 256 and, in proportion" in finding
    assert "for 1,024; the scan takes" in finding


def test_chunk_sizes_change_the_memory_and_not_the_result() -> None:
    verdict, finding = eigenstate_lm.chunks(SMALL)
    assert verdict == DEPENDS
    assert finding.startswith("on whether memory counts")
    assert all(f" {chunk}: " in finding for chunk in eigenstate_lm_setting.CHUNKS)


def test_gradient_reaches_less_than_the_claimed_context() -> None:
    verdict, finding = eigenstate_lm.reach(SMALL)
    assert verdict == REFUTED
    assert "after 1,587 tokens and after" in finding  # 0.99 ** 1587 is the first below 2 ** -23
    assert "is 1e-143" in finding
    assert "|" not in finding  # it would separate the cells of a Markdown table


def test_initial_eigenvalues_of_the_source_s_network_are_below_0_545() -> None:
    first, most = measured.decays(dataclasses.replace(SMALL, config=eigenstate_lm_setting.SOURCE))
    sizes = [eigenstate_lm.eigenvalues(decay).norm(dim=-1) for decay in (first, most)]
    assert first.shape == (8, 2, 128)
    assert 0.54 < float(sizes[0].max()) <= 0.545
    assert float(sizes[1].min()) == pytest.approx(0.99)


def test_influence_of_the_scan_decays_by_the_eigenvalue_at_each_step() -> None:
    """The influence of a step is multiplied by |λ| at each later step."""
    given = dataclasses.replace(SMALL, reach=6)
    decay = torch.full((1, 1, 1), -1.0)  # a single eigenstate has rotation angle 0
    magnitude = 0.1 + 0.89 / (1 + math.e)
    found = measured.influence_of_scan(given, decay)
    torch.testing.assert_close(found, magnitude ** torch.arange(6.0))


def test_horizon_of_the_network_is_longer_with_larger_eigenvalues() -> None:
    first, most = (
        verdicts.horizon(measured.influence_of_network(SMALL, decay)) for decay in (None, measured.decays(SMALL)[1])
    )
    assert first is not None
    assert most is not None
    assert 10 < first < 100 < 1000 < most < SMALL.reach


@pytest.mark.parametrize(
    ("influence", "found"),
    [([1.0, 0.5, 1e-8], 2), ([1.0, 1e-8, 0.5, 0.0], 3), ([2.0, 1e-8, 0.0], 1), ([1.0, 0.5], None), ([0.0, 0.0], None)],
)
def test_horizon_is_where_the_influence_stays_below_rounding(influence: list[float], found: int | None) -> None:
    assert verdicts.horizon(torch.tensor(influence)) == found


@pytest.mark.parametrize("influence", [[1.0, math.nan, 0.0], [math.nan, 0.5, 0.0], [math.inf, 0.5, 0.0]])
def test_nonfinite_gradient_gives_no_verdict_on_the_reach(
    influence: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("influence_of_scan", "influence_of_network"):
        monkeypatch.setattr(measured, name, lambda s, decay: torch.tensor(influence))
    assert eigenstate_lm.CHECKS.all["C52"].answer(SMALL) == (UNMEASURED, "the gradient is not finite")


@FULLY
def test_unchunked_loss_holds_the_logits_three_times() -> None:
    verdict, finding = eigenstate_lm.chunked_loss(SMALL)
    assert verdict == DEPENDS
    assert "takes 13.2 GB in bfloat16 and 26.3 GB in float32" in finding
    assert "(from 1,024 rows of 500 logits)" in finding
    at_once, kept, freed = (
        measured.peak_of_loss(SMALL, form, False)[0]
        for form in (measured.whole_loss, measured.kept_loss, measured.freed_loss)
    )
    logits = 2 * 131_072 * 50_257
    assert 3 * logits <= at_once < 3.2 * logits
    assert logits < kept < 1.3 * logits
    assert freed < 0.5 * logits


def test_a_loss_that_does_not_fit_is_measured_with_fewer_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def peak(setting: Any, form: Any, wide: bool, rows: int) -> int | None:
        return 2 * rows * setting.vocabulary if rows <= 256 else None

    monkeypatch.setattr(measured, "free_memory", lambda: None)
    monkeypatch.setattr(measured, "peak_of_rows", peak)
    found, rows = measured.peak_of_loss(SMALL, measured.whole_loss, False)
    assert (found, rows) == (2 * 131_072 * 50_257, 256)
    monkeypatch.setattr(measured, "peak_of_rows", lambda *given: None)
    with pytest.raises(torch.OutOfMemoryError):
        measured.peak_of_loss(SMALL, measured.whole_loss, False)


def test_chunked_losses_equal_the_whole_loss() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 8, generator=generator) for n in (96, 20))
    labels = torch.randint(20, (96,), generator=generator)
    known = measured.whole_loss(hidden, weight, labels)
    torch.testing.assert_close(measured.kept_loss(hidden, weight, labels), known)
    torch.testing.assert_close(measured.freed_loss(hidden, weight, labels), known)


def test_cached_chunks_take_eight_bytes_per_token() -> None:
    verdict, finding = eigenstate_lm.cache(SMALL)
    assert verdict == REFUTED
    assert finding.startswith("256 chunks of 32,768 tokens take 67.1 MB as int64, 16.8 MB in the pack ")
    assert finding.endswith("a token would need 477 bytes (from 16 of 32)")


def test_optimizer_state_takes_eight_bytes_per_parameter() -> None:
    verdict, finding = eigenstate_lm.optimizer_state(SMALL)
    assert verdict == REFUTED
    assert "8 bytes a parameter: 985 MB for 123,104,256 parameters" in finding
    assert "5.85 bytes a parameter" in finding


@FULLY
def test_prefetch_is_measured_with_two_four_and_eight_batches() -> None:
    verdict, finding = eigenstate_lm.prefetch(SMALL)
    assert verdict in (REFUTED, DEPENDS)
    assert "if nothing else runs, 1 worker delivers a batch of 2 sequences of 32 tokens every" in finding
    assert all(f" with {ahead}" in finding for ahead in (2, 4, 8))


@pytest.mark.parametrize(("says", "ends"), [("DataLoader worker (pid 7) is killed", True), ("another", False)])
def test_only_a_dead_worker_makes_the_prefetch_claim_unmeasured(
    says: str, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(*given: Any, count: int) -> Any:
        raise RuntimeError(says)

    monkeypatch.setattr(eigenstate_lm, "interleaved", dies)
    if ends:
        assert eigenstate_lm.prefetch(SMALL) == (UNMEASURED, says)
    else:
        with pytest.raises(RuntimeError, match=says):
            eigenstate_lm.prefetch(SMALL)


# --- GPU claims, at small size on a CPU -----------------------------------------------------------------------------


def test_a_step_is_timed_in_each_precision() -> None:
    verdict, finding = eigenstate_lm.step(SMALL)
    assert verdict == CONFIRMED
    assert "a step of 2 sequences of 32 tokens takes" in finding
    assert all(f"in {name}" in finding for name in eigenstate_lm_setting.PRECISIONS)
    assert "370 ms are 8,173 tokens, and such a step has 131,072" in finding


def test_reference_time_is_extrapolated_to_the_source_s_length() -> None:
    assert verdicts.extrapolated((512, 1.2), (1024, 2.3), 32768) == pytest.approx(2.3 + 62 * 1.1)
    verdict, finding = eigenstate_lm.speedup(SMALL)
    assert verdict in VERDICTS
    assert "for 2 sequences of 16 tokens the reference takes" in finding
    assert finding.endswith(
        "45.9 times from the time of a step, 442 times from the tokens a second, and 54.1 times from the hours"
    )


@FULLY
def test_activation_checkpointing_lowers_the_peak_memory_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = []
    measure = measured.peak_of_step

    def noted(setting: Any, **on: bool) -> int:
        peaks.append(measure(setting, **on))
        return peaks[-1]

    monkeypatch.setattr(measured, "peak_of_step", noted)
    given = dataclasses.replace(SMALL, config=dataclasses.replace(SMALL.config, layers=3))
    verdict, finding = eigenstate_lm.memory(given)
    assert verdict == CONFIRMED
    assert "a step of 2 sequences of 32 tokens in bfloat16 takes" in finding
    assert [words.amount(peak) in finding for peak in peaks] == [True, True]
    assert peaks[1] < peaks[0]


def test_emptying_the_cache_is_timed() -> None:
    verdict, finding = eigenstate_lm.emptying(SMALL)
    assert verdict in VERDICTS
    assert "10 steps take" in finding


def test_half_precision_claim_reports_final_losses_for_each_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"float32": [8.0, 8.1], "TF32": [1.6, 1.61], "bfloat16": [1.0, 1.0], "float16": [1.0, 1.01]}
    monkeypatch.setattr(measured, "step_seconds", Timed(seconds))
    monkeypatch.setattr(measured, "final_losses", functools.cache(measured.final_losses))
    verdict, finding = eigenstate_lm.half(SMALL)
    assert verdict == DEPENDS
    assert finding.startswith("on the precision of float32's products: a step of 64 tokens takes 1.00 s in float16, ")
    ends, left_out = measured.final_losses(SMALL)
    assert len(ends) == SMALL.seeds
    assert left_out >= 0
    assert all(f"{a:.4f}" in finding for a, _ in ends)
    assert all(0 < abs(b / a - 1) < 0.01 for a, b in ends)


class Timed:
    """Replacement of `step_seconds` with fixed times."""

    def __init__(self, seconds: Mapping[str, list[float]]) -> None:
        self.seconds = seconds

    def __call__(self, setting: Any) -> Mapping[str, list[float]]:
        return self.seconds

    def cache_clear(self) -> None:
        pass


def test_a_precision_that_does_not_fit_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    make = measured.make_trainer

    def limited(setting: Any, **on: Any) -> Any:
        trainer = make(setting, **on)
        if not on:
            trainer.train_window = out
        return trainer

    def out(batch: Any) -> None:
        raise PerfsuiteError("out of memory: so many sequences")

    monkeypatch.setattr(measured, "make_trainer", limited)
    monkeypatch.setattr(measured, "final_losses", lambda setting: ([(3.0, 3.001)], 2))
    _, finding = eigenstate_lm.step(SMALL)
    assert "; in float32 it does not fit. " in finding
    _, finding = eigenstate_lm.half(SMALL)
    assert "s in float32" not in finding
    assert "s in TF32" in finding
    assert "in float16 +0.033% to +0.033% higher; the gradient scaler skipped 2 steps" in finding


@pytest.mark.parametrize("name", ["C47", *(pytest.param(name, marks=FULLY) for name in ("C48", "C57", "C60"))])
def test_out_of_memory_in_a_step_leaves_the_claim_unmeasured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def out(*given: Any, **options: Any) -> Callable[..., None]:
        raise PerfsuiteError("out of memory: so many sequences")

    monkeypatch.setattr(measured, "step_of", lambda trainer: out)
    verdict, finding = CHECKS[name].measure(SMALL)
    assert verdict == UNMEASURED
    assert finding.startswith("out of memory: ")


def test_errors_other_than_out_of_memory_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: Any, **options: Any) -> None:
        raise PerfsuiteError("data: there is none")

    monkeypatch.setattr(measured, "step_of", lambda trainer: fails)
    for measure in (eigenstate_lm.step, eigenstate_lm.emptying):
        with pytest.raises(PerfsuiteError, match="there is none"):
            measure(SMALL)


def test_a_step_that_runs_uncompiled_leaves_the_claim_unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    def warns(*given: Any) -> None:
        warnings.warn("eigenstate_lm's blocks runs uncompiled: why", RuntimeWarning, stacklevel=2)

    monkeypatch.setattr(measured, "step_of", lambda trainer: warns)
    assert eigenstate_lm.emptying(SMALL) == (UNMEASURED, "eigenstate_lm's blocks runs uncompiled: why")


# --- verdicts on given figures --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "verdict"),
    [((0.25, 0.4), CONFIRMED), ((0.25, 2.2), DEPENDS), ((0.5, 2.2), REFUTED)],
)
def test_step_time_is_compared_with_the_source_s(seconds: tuple[float, ...], verdict: str) -> None:
    assert verdicts.reached(seconds) == verdict


@pytest.mark.parametrize(
    ("found", "verdict"),
    [((50.0, 55.0), CONFIRMED), ((35.0, 300.0), DEPENDS), ((52.0, 300.0), DEPENDS), ((1.0, 8.0), REFUTED)],
)
def test_meets_depends_if_only_the_range_includes_the_claimed_figure(found: tuple[float, ...], verdict: str) -> None:
    assert verdicts.meets(found, 53.9) == verdict


@pytest.mark.parametrize(
    ("furthest", "scan", "loop", "verdict"),
    [
        (1e-7, 3e-4, 7.3, REFUTED),
        (1e-7, 1.0, 1.5, UNMEASURED),
        (1e-2, 3e-4, 7.3, CONFIRMED),
        (math.nan, 3e-4, 7.3, CONFIRMED),
    ],
)
def test_sequential_steps_are_refuted_by_an_equal_and_faster_scan(
    furthest: float, scan: float, loop: float, verdict: str
) -> None:
    assert verdicts.in_turn(furthest, scan, loop) == verdict


@pytest.mark.parametrize(
    ("errors", "peaks", "verdict"),
    [
        ((1e-7, 2e-7), (1, 5), DEPENDS),
        ((1e-7, 2e-7), (100, 105), CONFIRMED),
        ((1e-7, 1e-3), (1, 1), REFUTED),
        ((1e-7, math.nan), (1, 1), REFUTED),
    ],
)
def test_verdict_on_chunks_depends_on_result_and_memory(
    errors: tuple[float, ...], peaks: tuple[float, ...], verdict: str
) -> None:
    assert verdicts.only_speed(errors, peaks) == verdict


def test_error_is_infinite_if_one_is_nan() -> None:
    nan = torch.full((3,), math.nan)
    assert verdicts.error([torch.ones(3), nan], [torch.ones(3).double()] * 2) == math.inf
    assert verdicts.error([torch.ones(3)], [torch.ones(3).double()]) == 0


@pytest.mark.parametrize(
    ("horizons", "verdict"), [((70, 7000), REFUTED), ((70, None), DEPENDS), ((None, None), CONFIRMED)]
)
def test_horizon_is_compared_with_the_context_length(horizons: tuple[int | None, ...], verdict: str) -> None:
    assert verdicts.spans(horizons, 32768) == verdict


@pytest.mark.parametrize(
    ("found", "verdict"),
    [((13.0, 26.0), CONFIRMED), ((25.0, 76.0), DEPENDS), ((30.0, 80.0), DEPENDS), ((0.1, 9.0), REFUTED)],
)
def test_saved_memory_is_compared_with_the_claimed_range(found: tuple[float, ...], verdict: str) -> None:
    assert verdicts.between(found, 13, 26) == verdict


@pytest.mark.parametrize(("peaks", "verdict"), [((7, 7.5), CONFIRMED), ((38, 7.5), DEPENDS), ((38, 21), REFUTED)])
def test_peaks_are_compared_with_the_claimed_maximum(peaks: tuple[float, ...], verdict: str) -> None:
    assert verdicts.fits(peaks, 7.2) == verdict


@pytest.mark.parametrize(
    ("low", "high", "growth", "verdict"),
    [
        (-3.0, -1.0, 0.0, CONFIRMED),
        (1.0, 3.0, 0.0, REFUTED),
        (-0.5, 0.5, 0.0, REFUTED),
        (-5.0, 5.0, 0.0, UNMEASURED),
        (1.0, 3.0, 0.5, DEPENDS),
    ],
)
def test_verdict_on_emptying_depends_on_time_and_reserved_memory(
    low: float, high: float, growth: float, verdict: str
) -> None:
    assert verdicts.helps(low, high, growth) == verdict


@pytest.mark.parametrize(
    ("gains", "batch", "verdict"),
    [
        ((0.85, 0.8), 0.002, REFUTED),
        ((1.0, 1.1), 0.002, UNMEASURED),
        ((1.3, 1.4), 0.002, DEPENDS),
        ((1.3, 1.4), 0.5, CONFIRMED),
        ((1.0, 1.4), 0.5, DEPENDS),
    ],
)
def test_prefetching_is_confirmed_only_if_a_step_waits_for_its_batch(
    gains: tuple[float, float], batch: float, verdict: str
) -> None:
    assert verdicts.loads_faster([ratio(gain, 0.15) for gain in gains], batch) == verdict


@pytest.mark.parametrize(
    ("ratios", "lost", "verdict"),
    [
        ((8.6, 1.6), 0.001, DEPENDS),
        ((2.1, 1.9), 0.001, CONFIRMED),
        ((1.2, 1.1), 0.001, REFUTED),
        ((2.1, 1.9), 0.05, REFUTED),
        ((2.1, 1.9), math.nan, REFUTED),
        ((), 0.001, UNMEASURED),
    ],
)
def test_verdict_on_half_precision_depends_on_time_and_loss(
    ratios: tuple[float, ...], lost: float, verdict: str
) -> None:
    assert verdicts.twice([ratio(r, 0.01) for r in ratios], [0.0, lost]) == verdict


@pytest.mark.parametrize(("size", "text"), [(985e6, "985 MB"), (13.17e9, "13.2 GB"), (0, "0 MB")])
def test_amount_of_memory_uses_decimal_units(size: float, text: str) -> None:
    assert words.amount(size) == text


# --- the command, and a GPU -----------------------------------------------------------------------------------------


def test_command_measures_the_claims_of_eigenstate_lm(tmp_path: Path) -> None:
    asked = ["eigenstate_lm", "--only", "C47", "--only", "C54", "--device", "cpu", "--out", str(tmp_path)]
    done = CliRunner().invoke(claims, asked)
    assert done.exit_code == 0, done.output
    found = record.load(tmp_path / "claims.json")
    assert {name: (c.trainer, c.verdict) for name, c in found.items()} == {
        "C47": ("eigenstate_lm", UNMEASURED),
        "C54": ("eigenstate_lm", REFUTED),
    }
    assert "67.1 MB as int64" in (tmp_path / "claims.md").read_text()


@pytest.mark.gpu
@pytest.mark.parametrize("name", IDS)
def test_every_claim_has_a_verdict_on_a_gpu(name: str) -> None:
    config = TrainConfig(width=64, layers=2, eigenstates=16, sequence_length=256, batch_size=2, accumulation=1)
    given = dataclasses.replace(SMALL, device=torch.device("cuda"), config=config)
    verdict, finding = CHECKS[name].answer(given)
    assert verdict in VERDICTS
    assert finding
