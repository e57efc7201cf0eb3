"""polychromic's claims: measurements on a CPU, and verdicts on given figures."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from suite.claims import polychromic
from suite.claims.record import CONFIRMED, DEPENDS, EXCEEDED, REFUTED, UNMEASURED

pytest.importorskip("tokenizers", reason="tokenizers is not installed: pip install 'perfsuite[train]'")

SMALL = polychromic.setting(torch.device("cpu"))
TINY = dataclasses.replace(SMALL, rounds=2, steps=2, prompts=3, drawn_tokens=6)
CHECKS = polychromic.CHECKS.all
ON_GPU = ["C41", "C42", "C43"]


def test_every_claim_of_the_source_has_a_function_and_a_text() -> None:
    assert list(CHECKS) == ["C40", "C41", "C42", "C43", "C44", "C46"]
    assert all(check.said.endswith(".") and callable(check.measure) for check in CHECKS.values())


def test_claims_about_gpus_are_not_measured_without_a_gpu() -> None:
    assert [c.id for c in CHECKS.values() if c.gpu] == ON_GPU
    assert {CHECKS[name].answer(SMALL) for name in ON_GPU} == {(UNMEASURED, "there is no GPU")}


def test_setting_on_a_gpu_has_the_source_s_step() -> None:
    given = polychromic.setting(torch.device("cuda"))
    config = given.config
    assert (config.examples, config.prompts, config.replies, config.new_tokens) == (16, 4, 3, 100)
    assert (given.model, config.dtype) == ("135m", "bfloat16")


# --- on a CPU -------------------------------------------------------------------------------------------------------


def test_diversity_term_as_written_does_not_change_the_weights() -> None:
    verdict, text = polychromic.shapes(TINY)
    assert verdict == REFUTED
    assert "λ = 0 the weights are the same, bit for bit. With the gradient of its expectation they differ" in text


@pytest.mark.parametrize(
    ("written", "policy", "verdict"), [(0.0, 0.1, REFUTED), (0.1, 0.1, CONFIRMED), (0.0, 0.0, UNMEASURED)]
)
def test_diversity_claim_is_confirmed_if_the_weights_change(
    written: float, policy: float, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def weights(setting: Any, config: Any) -> dict[str, torch.Tensor]:
        moved = written if config.objective == "as_written" else policy
        return {"w": torch.full((2,), moved * (config.diversity > 0))}

    monkeypatch.setattr(polychromic, "_weights_after", weights)
    assert polychromic.shapes(TINY)[0] == verdict


def test_replies_are_the_same_from_both_implementations() -> None:
    verdict, text = polychromic.same_replies(TINY)
    assert verdict == CONFIRMED
    assert "0 of 9 replies of 6 tokens differ, in float32, and 0 of as many greedy ones" in text


@pytest.mark.parametrize(("which", "verdict"), [("drawn", DEPENDS), ("greedy", REFUTED)])
def test_replies_that_differ_are_reported(which: str, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = polychromic.implementation

    def implementation(module: str, function: str, *, optimized: bool) -> Callable[..., torch.Tensor]:
        generate = own(module, function, optimized=False)

        def other(*given: Any, top_p: float, **options: Any) -> torch.Tensor:
            found: torch.Tensor = generate(*given, top_p=top_p, **options)
            return found + (optimized and (top_p < 0.5) == (which == "greedy"))

        return other

    monkeypatch.setattr(polychromic, "implementation", implementation)
    verdict_found, text = polychromic.same_replies(TINY)
    assert verdict_found == verdict
    assert "9 of" in text


def test_transformers_trainer_computes_the_loss_in_evaluation() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    assert polychromic.in_evaluation(TINY)[0] == CONFIRMED


def test_claim_about_transformers_is_unmeasured_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> int:
        raise ImportError("No module named 'transformers'\nmore")

    monkeypatch.setattr(polychromic, "_losses_in_evaluation", missing)
    text = "transformers' Trainer cannot be imported: No module named 'transformers'"
    assert polychromic.in_evaluation(TINY) == (UNMEASURED, text)


# --- GPU claims -----------------------------------------------------------------------------------------------------


def timed(seconds: Mapping[str, float]) -> Callable[..., dict[str, list[float]]]:
    """Return a replacement of `interleaved` that makes each call once and returns these seconds."""

    def interleaved(device: Any, rounds: int, calls: Mapping[str, Callable[[], object]], **_: Any) -> Any:
        for call in calls.values():
            call()
        return {name: [seconds[name] * (1 + 0.001 * n) for n in range(3)] for name in calls}

    return interleaved


@pytest.mark.parametrize(("diversity", "verdict"), [(3.0, CONFIRMED), (0.1, REFUTED), (40.0, REFUTED)])
def test_verdict_on_diversity_depends_on_its_share_of_the_total_time(
    diversity: float, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(polychromic, "interleaved", timed({"reply": 2.0, "diversity": diversity}))
    monkeypatch.setattr(polychromic, "MINILM", {**polychromic.MINILM, "layers": 1})
    found, text = polychromic.shares(TINY)
    assert found == verdict
    assert "6 replies of 6 tokens, one after another and without a cache, take 12.0 s" in text


@pytest.mark.parametrize(("gain", "verdict"), [(2.5, CONFIRMED), (1.5, REFUTED), (50.0, EXCEEDED)])
def test_verdict_on_the_kernel_depends_on_ten_replies(
    gain: float, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(polychromic, "interleaved", timed({"plain": gain * 1e-5, "fast": 1e-5}))
    monkeypatch.setattr(polychromic, "REPLIES", (3, 10))
    assert polychromic.kernel(TINY)[0] == verdict


def test_kernel_claim_depends_if_only_more_replies_reach_the_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    gains = iter([1.1, 1.2, 2.4])

    def interleaved(*given: Any, **options: Any) -> dict[str, list[float]]:
        return timed({"plain": next(gains) * 1e-5, "fast": 1e-5})(*given, **options)

    monkeypatch.setattr(polychromic, "interleaved", interleaved)
    monkeypatch.setattr(polychromic, "REPLIES", (3, 10, 20))
    assert polychromic.kernel(TINY)[0] == DEPENDS


@pytest.mark.parametrize(("gain", "verdict"), [(1.7, CONFIRMED), (1.2, REFUTED), (5.0, EXCEEDED)])
def test_verdict_on_attention_depends_on_the_time_of_a_step(
    gain: float, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(polychromic, "interleaved", timed({"plain": gain, "flash": 1.0}))
    monkeypatch.setattr(polychromic, "LENGTHS", (16,))
    found, text = polychromic.attention(TINY)
    assert found == verdict
    assert "of two rows: 16 tokens" in text
