"""polychromic's claims: what a CPU can show of them, and how what only a GPU shows is judged."""

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


def test_what_says_something_of_a_gpu_is_not_measured_without_one() -> None:
    assert [c.id for c in CHECKS.values() if c.gpu] == ON_GPU
    assert {CHECKS[name].answer(SMALL) for name in ON_GPU} == {(UNMEASURED, "there is no GPU")}


def test_a_gpu_gets_the_source_s_step() -> None:
    given = polychromic.setting(torch.device("cuda"))
    config = given.config
    assert (config.examples, config.prompts, config.replies, config.new_tokens) == (16, 4, 3, 100)
    assert (given.model, config.dtype) == ("135m", "bfloat16")


# --- on a CPU -------------------------------------------------------------------------------------------------------


def test_as_written_the_diversity_shapes_nothing() -> None:
    verdict, text = polychromic.shapes(TINY)
    assert verdict == REFUTED
    assert "λ = 0 the weights are the same, bit for bit. With the gradient of its expectation they differ" in text


@pytest.mark.parametrize(
    ("written", "policy", "verdict"), [(0.0, 0.1, REFUTED), (0.1, 0.1, CONFIRMED), (0.0, 0.0, UNMEASURED)]
)
def test_a_term_shapes_training_where_weights_move(
    written: float, policy: float, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def weights(setting: Any, config: Any) -> dict[str, torch.Tensor]:
        moved = written if config.objective == "as_written" else policy
        return {"w": torch.full((2,), moved * (config.diversity > 0))}

    monkeypatch.setattr(polychromic, "_weights_after", weights)
    assert polychromic.shapes(TINY)[0] == verdict


def test_replies_are_the_same_in_both_ways() -> None:
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


def test_transformers_trainer_calls_the_loss_in_evaluation() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    assert polychromic.in_evaluation(TINY)[0] == CONFIRMED


def test_without_transformers_nothing_is_said_of_its_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> int:
        raise ImportError("No module named 'transformers'\nmore")

    monkeypatch.setattr(polychromic, "_losses_in_evaluation", missing)
    text = "transformers' Trainer cannot be imported: No module named 'transformers'"
    assert polychromic.in_evaluation(TINY) == (UNMEASURED, text)


# --- what a GPU shows -----------------------------------------------------------------------------------------------


def timed(seconds: Mapping[str, float]) -> Callable[..., dict[str, list[float]]]:
    """Return a replacement of the measurement: it makes each call once, and gives these seconds."""

    def interleaved(device: Any, rounds: int, calls: Mapping[str, Callable[[], object]], **_: Any) -> Any:
        for call in calls.values():
            call()
        return {name: [seconds[name] * (1 + 0.001 * n) for n in range(3)] for name in calls}

    return interleaved


@pytest.mark.parametrize(("diversity", "verdict"), [(3.0, CONFIRMED), (0.1, REFUTED), (40.0, REFUTED)])
def test_the_diversity_s_share_is_of_both(diversity: float, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polychromic, "interleaved", timed({"reply": 2.0, "diversity": diversity}))
    monkeypatch.setattr(polychromic, "MINILM", {**polychromic.MINILM, "layers": 1})
    found, text = polychromic.shares(TINY)
    assert found == verdict
    assert "6 replies of 6 tokens, one after another and without a cache, take 12.0 s" in text


@pytest.mark.parametrize(("gain", "verdict"), [(2.5, CONFIRMED), (1.5, REFUTED), (50.0, EXCEEDED)])
def test_a_kernel_is_judged_at_ten_replies(gain: float, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polychromic, "interleaved", timed({"plain": gain * 1e-5, "fast": 1e-5}))
    monkeypatch.setattr(polychromic, "REPLIES", (3, 10))
    assert polychromic.kernel(TINY)[0] == verdict


def test_a_kernel_that_is_so_much_faster_for_more_replies_depends(monkeypatch: pytest.MonkeyPatch) -> None:
    gains = iter([1.1, 1.2, 2.4])

    def interleaved(*given: Any, **options: Any) -> dict[str, list[float]]:
        return timed({"plain": next(gains) * 1e-5, "fast": 1e-5})(*given, **options)

    monkeypatch.setattr(polychromic, "interleaved", interleaved)
    monkeypatch.setattr(polychromic, "REPLIES", (3, 10, 20))
    assert polychromic.kernel(TINY)[0] == DEPENDS


@pytest.mark.parametrize(("gain", "verdict"), [(1.7, CONFIRMED), (1.2, REFUTED), (5.0, EXCEEDED)])
def test_attention_is_judged_by_a_step(gain: float, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polychromic, "interleaved", timed({"plain": gain, "flash": 1.0}))
    monkeypatch.setattr(polychromic, "LENGTHS", (16,))
    found, text = polychromic.attention(TINY)
    assert found == verdict
    assert "of two rows: 16 tokens" in text
