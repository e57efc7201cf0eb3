"""Timing on the CPU with a clock that the test controls: planted times are recovered exactly."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import json
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from threading import Event
from time import perf_counter, sleep
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from perfsuite import Cost, Pair, Workload, floats, side, stateful, tensor
from perfsuite.codec import from_json, to_json
from perfsuite.correctness import compilations, equivalence, truths
from perfsuite.correctness.integrity import late_work
from perfsuite.correctness.rule import REPLICAS_UP_TO
from perfsuite.declare.sides import Side
from perfsuite.errors import NotEquivalent, PairError
from perfsuite.records import Condition, Counts, Measurement, WorkloadProof
from perfsuite.system import tamper
from perfsuite.timing import (
    block_checks,
    clocks,
    measuring,
    output_checks,
    peers,
    preparation,
    roofline,
    runner,
    sampling,
    timing_checks,
    workload_proof,
)
from perfsuite.timing.bench import Bench
from perfsuite.timing.block_checks import FRESH_BLOCKS
from perfsuite.timing.measuring import RIVAL_BLOCKS
from perfsuite.timing.peers import ALONE, Peers
from perfsuite.timing.sampling import BLOCKS, BLOCKS_LEAST, EXTRA_BLOCKS, FEW_BLOCKS, ROUNDS

Call = Callable[..., Any]
X = {"x": tensor("n", values=floats(-2, 2))}
FAST_S, SLOW_S = 4e-3, 6e-3  # long enough for one call a sample, short enough to be repeated


class Time:
    """Clock in nanoseconds; with a drift, each timed call lasts a little longer than the one before."""

    def __init__(self) -> None:
        self.now = 0.0
        self.drift = 0.0
        self.calls = 0

    def spend(self, seconds: float) -> None:
        self.calls += 1
        self.now += seconds * (1 + self.drift * self.calls) * 1e9


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    made = Time()
    monkeypatch.setattr(clocks, "perf_counter_ns", lambda: made.now)
    monkeypatch.setattr(clocks, "process_time_ns", lambda: made.now)
    monkeypatch.setattr(clocks, "interruptions", lambda: 0)
    monkeypatch.setattr(tamper, "check", lambda: None)  # it would find the two replaced clocks
    numbers = random.Random(7)
    monkeypatch.setattr(peers.secrets, "randbits", numbers.getrandbits)
    return made


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the side of each sample, in order."""
    order: list[str] = []
    sample = sampling.Sampler.sample

    def logged(self: Any, name: str, *args: Any, **kwargs: Any) -> float:
        order.append(name)
        return sample(self, name, *args, **kwargs)

    monkeypatch.setattr(sampling.Sampler, "sample", logged)
    return order


def lasting(time: Time, seconds: float, call: Call = torch.exp) -> Call:
    def timed(*args: Any) -> Any:
        time.spend(seconds)
        return call(*args)

    return timed


def pair(time: Time, **fields: Any) -> Pair:
    made = {"reference": lasting(time, SLOW_S), "optimized": lasting(time, FAST_S), "inputs": X, "name": "p"}
    return Pair(**{**made, **fields})


def measure(of: Pair, n: int = 5, **options: Any) -> Measurement:
    workload = Workload("w", n=n, **options)
    return measuring.measure(of, workload, workload_id="p::speed[w]", device="cpu")


# --- the record ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", ["forward", "both"])
def test_a_side_may_empty_a_list_that_it_consumes(time: Time, direction: str) -> None:
    def emptied(xs: list[torch.Tensor]) -> torch.Tensor:
        return xs.pop() * xs.pop()

    inputs = {"xs": [tensor("n", values=floats(1, 2)), tensor("n", values=floats(1, 2))]}
    sides = {"reference": lasting(time, SLOW_S, emptied), "optimized": lasting(time, FAST_S, emptied)}
    made = measure(pair(time, **sides, inputs=inputs, consumes={"xs"}), direction=direction)
    assert made.evidence is not None


def test_a_step_may_empty_a_list_that_it_consumes(time: Time) -> None:
    def make(seconds: float) -> Call:
        def start(total: torch.Tensor) -> Call:
            return lasting(time, seconds, lambda xs: total.add_(xs.pop()))

        return start

    inputs, steps = {"total": tensor("n")}, {"xs": [tensor("n")]}
    sides = {"reference": stateful(make(SLOW_S)), "optimized": stateful(make(FAST_S))}
    made = measure(pair(time, **sides, inputs=inputs, step_inputs=steps, consumes={"xs"}))
    assert made.evidence is not None


def test_the_record_contains_the_planted_times(time: Time) -> None:
    made = measure(pair(time, rivals={"rival": lasting(time, 5e-3)}))
    assert (made.id, made.pair, made.workload, made.device) == ("p::speed[w]", "p", "w", "cpu")
    assert (made.clock, made.direction, made.dtype, made.sizes) == ("wall", "forward", "float32", {"n": 5})
    assert set(made.sides) == {"reference", "optimized", "rival"}
    for name, seconds in (("reference", SLOW_S), ("optimized", FAST_S), ("rival", 5e-3)):
        record = made.sides[name]
        assert record.wall_s == pytest.approx(seconds)
        assert record.blocks_s == pytest.approx((seconds,) * (RIVAL_BLOCKS if name == "rival" else BLOCKS))
        assert (record.device_s, record.peak_bytes, record.host_syncs, record.launches) == (None, None, None, None)
    assert made.log_ratios["reference"] == pytest.approx((math.log(1.5),) * BLOCKS)
    assert made.log_ratios["rival"] == pytest.approx((math.log(1.25),) * RIVAL_BLOCKS)
    assert "optimized" not in made.log_ratios
    assert made.few == ()
    assert made.skipped == {}
    assert made.limit is None
    assert made.condition == Condition()
    assert made.evidence is not None
    assert (made.evidence.draws, made.evidence.elements) == (1, 5)
    assert from_json(Measurement, json.loads(json.dumps(to_json(made)))) == made


def test_a_linear_drift_cancels_in_every_ratio(time: Time) -> None:
    time.drift = 1e-3
    made = measure(pair(time))
    assert made.log_ratios["reference"] == pytest.approx((math.log(1.5),) * BLOCKS, abs=1e-9)
    assert made.sides["optimized"].blocks_s[-1] > 1.05 * made.sides["optimized"].blocks_s[0]


def test_short_calls_are_repeated_in_a_sample(time: Time) -> None:
    before = 2 * (1 + 1)
    made = measure(pair(time, reference=lasting(time, 1e-3), optimized=lasting(time, 0.5e-3)))
    assert made.log_ratios["reference"] == pytest.approx((math.log(2),) * BLOCKS)
    assert time.calls > before + BLOCKS * ROUNDS * 2 * (4 + 8)


def test_rounds_are_palindromes_in_a_random_balanced_order(time: Time, turns: list[str]) -> None:
    measure(pair(time))
    rounds = list(zip(*[iter(turns[-4 * ROUNDS * BLOCKS :])] * 4, strict=True))
    assert len(rounds) == ROUNDS * BLOCKS
    assert set(rounds) == {
        ("reference", "optimized", "optimized", "reference"),
        ("optimized", "reference", "reference", "optimized"),
    }
    heads = [one_round[0] for one_round in rounds]
    assert 0.25 < heads.count("optimized") / len(heads) < 0.75


def test_each_process_draws_its_own_seed_unless_one_is_given(time: Time) -> None:
    def timed(**given: int) -> tuple[int | None, list[float]]:
        """Return the seed of a process and the values of the input that it times last."""
        values: list[float] = []

        def optimized(x: torch.Tensor) -> torch.Tensor:
            values[:] = x.tolist()
            time.spend(FAST_S)
            return torch.exp(x)

        of = pair(time, optimized=optimized)
        return measuring.measure(of, Workload("w", n=5), workload_id="i", device="cpu", **given).seed, values

    (first_seed, first), (second_seed, second) = timed(), timed()
    assert first_seed != second_seed
    assert first != second
    seed, fixed = timed(seed=12)
    assert seed == 12
    assert timed(seed=12) == (12, fixed)


def test_inputs_are_allocated_again_for_every_block(time: Time) -> None:
    seen: list[torch.Tensor] = []

    def optimized(x: torch.Tensor) -> torch.Tensor:
        if not any(x is kept for kept in seen):
            seen.append(x)  # kept alive: no address can come twice
        time.spend(FAST_S)
        return torch.exp(x)

    measure(pair(time, optimized=optimized))
    assert len({x.data_ptr() for x in seen}) == len(seen) >= BLOCKS * ROUNDS


# --- slow sides ----------------------------------------------------------------------------------------------


def test_a_slow_side_is_timed_in_one_round_per_block(time: Time, turns: list[str]) -> None:
    made = measure(pair(time, reference=lasting(time, 0.05)))
    assert made.few == ()
    assert made.log_ratios["reference"] == pytest.approx((math.log(12.5),) * BLOCKS)
    assert turns.count("reference") == 1 + 2 * BLOCKS
    assert turns.count("optimized") == 2 + 2 * BLOCKS  # without a partner its time gives no ratio


def test_a_very_slow_side_is_sampled_only_a_few_times(time: Time, turns: list[str]) -> None:
    made = measure(pair(time, reference=lasting(time, 0.5)))
    assert made.few == ("reference",)
    assert made.log_ratios["reference"] == pytest.approx((math.log(125),) * FEW_BLOCKS)
    assert turns.count("reference") == 1 + FEW_BLOCKS
    assert len(made.sides["optimized"].blocks_s) == BLOCKS


def test_a_slow_optimized_side_is_never_left_out(time: Time, turns: list[str]) -> None:
    made = measure(pair(time, optimized=lasting(time, 0.5)))
    assert made.few == ()
    assert len(made.log_ratios["reference"]) == BLOCKS_LEAST  # 8 blocks would take 8 s
    assert turns.count("optimized") == turns.count("reference") - 1


def test_number_of_blocks_of_long_calls_stays_within_bounds(time: Time) -> None:
    usual = measure(pair(time))
    assert len(usual.log_ratios["reference"]) == BLOCKS
    long = measure(pair(time, reference=lasting(time, 0.19), optimized=lasting(time, 0.19)))
    assert BLOCKS_LEAST < len(long.log_ratios["reference"]) < BLOCKS


def test_the_requested_number_of_blocks_is_timed(time: Time) -> None:
    made = measuring.measure(pair(time), Workload("w", n=5), workload_id="i", device="cpu", blocks=12)
    assert len(made.log_ratios["reference"]) == 12


def test_steps_that_are_slow_to_build_are_rebuilt_only_within_the_budget(
    time: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "perf_counter", lambda: time.now * 1e-9)
    monkeypatch.setattr(runner, "perf_counter", lambda: time.now * 1e-9)
    built = itertools.count()

    def make(x: torch.Tensor) -> Call:
        next(built)
        time.spend(1.0)
        return lasting(time, FAST_S, lambda: None)

    steps = stateful(make)
    measure(pair(time, reference=steps, optimized=steps, steps=(1,)))
    assert next(built) < 2 * BLOCKS


# --- nothing is timed before it is proven --------------------------------------------------------------------


@pytest.fixture
def no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: str, peers: Peers) -> None:
        raise AssertionError("timed before it was proven")

    monkeypatch.setattr("perfsuite.timing.bench.clock_for", refuse)


@pytest.mark.usefixtures("no_clock")
def test_a_side_that_is_not_equal_is_never_timed(time: Time) -> None:
    with pytest.raises(NotEquivalent, match="output of the optimized side is wrong"):
        measure(pair(time, optimized=lambda x: torch.exp(x) * 1.001))
    with pytest.raises(RuntimeError, match="boom"):
        measure(pair(time, optimized=raising))


@pytest.mark.usefixtures("no_clock")
def test_a_wrong_gradient_is_found_before_the_backward_pass_is_timed(time: Time) -> None:
    wrong = pair(time, reference=lambda x: x * torch.exp(x), optimized=lambda x: x * torch.exp(x.detach()))
    with pytest.raises(NotEquivalent, match="gradient of x of the optimized side is wrong"):
        measure(wrong, direction="backward")


@pytest.mark.usefixtures("no_clock")
def test_a_reference_that_overflows_on_the_workload_is_an_error(time: Time) -> None:
    overflowing = pair(time, reference=lambda x: torch.exp(x) * 1e30 * 1e30)
    with pytest.raises(PairError, match="the reference overflows on the workload's own inputs; bound them with"):
        measure(overflowing)


def raising(x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("boom\nand more")


def test_rivals_that_cannot_be_timed_are_skipped_with_their_reason(time: Time) -> None:
    calls: list[int] = []

    def unequal(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return torch.exp(x) * 1.001

    made = measure(
        pair(
            time,
            rivals={
                "unequal": unequal,
                "raising": raising,
                "elsewhere": side(torch.exp, devices=["cuda"]),
                "missing": side(torch.exp, available=lambda: "flash-attn is not installed; pip install flash-attn"),
                "good": lasting(time, 5e-3),
            },
        )
    )
    assert list(made.sides) == ["reference", "optimized", "good"]
    assert set(made.log_ratios) == {"reference", "good"}
    assert made.skipped["unequal"].startswith("not equal, so not timed: p: output of the unequal side is wrong")
    assert made.skipped["raising"] == "raises RuntimeError: boom"
    assert made.skipped["elsewhere"] == "runs on cuda only, and this machine has no such device"
    assert made.skipped["missing"] == "flash-attn is not installed; pip install flash-attn"
    assert len(calls) == 1


def test_rivals_that_were_proven_ahead_are_not_proven_again(time: Time, monkeypatch: pytest.MonkeyPatch) -> None:
    factor = 1.0

    def changing(x: torch.Tensor) -> torch.Tensor:
        return torch.exp(x) * factor

    of = pair(
        time,
        rivals={
            "good": lasting(time, 5e-3),
            "changing": lasting(time, 5e-3, changing),
            "raising": raising,
            "elsewhere": side(torch.exp, devices=["cuda"]),
        },
    )
    workload = Workload("w", n=5)
    bench = Bench(pair=of, workload=workload, device="cpu", home=None, seed=1, report=lambda phase: None)
    proof = workload_proof.prove(bench, "p::speed[w]", with_rivals=True)
    assert proof.rivals == ("good", "changing")
    assert set(proof.skipped) == {"raising", "elsewhere"}

    established: list[int] = []
    establish = truths.establish
    monkeypatch.setattr(truths, "establish", lambda *a, **k: established.append(1) or establish(*a, **k))
    made = measuring.measure(of, workload, workload_id="p::speed[w]", device="cpu", proof=proof)
    assert established == []
    assert set(made.sides) == {"reference", "optimized", "good", "changing"}
    assert made.skipped == proof.skipped

    factor = 1.001
    made = measuring.measure(of, workload, workload_id="p::speed[w]", device="cpu", proof=proof)
    assert list(made.sides) == ["reference", "optimized", "good"]
    assert made.skipped["changing"].startswith("not equal, so not timed: p: output of the changing side is wrong")


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("equal", [False, True])
def test_only_one_of_two_sides_with_the_same_code_is_proven(
    time: Time, slow: bool, equal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the reference is slow neither is proven, but the first outputs of both sides must have the same bits."""

    def accepted(x: torch.Tensor) -> torch.Tensor:
        return torch.exp(x) * (1 if equal else 1 + 1e-7)

    judged: list[str] = []
    judge = equivalence.judge
    monkeypatch.setattr(equivalence, "judge", lambda *a, **named: (judged.append(named["name"]), judge(*a, **named)))
    counts = Counts(host_syncs=2, launches=3)
    monkeypatch.setattr(Bench, "count", lambda self, runners, clock: dict.fromkeys(runners, counts))
    of, workload = pair(time), Workload("w", n=5)
    bench = Bench(pair=of, workload=workload, device="cpu", home=None, seed=1, report=lambda phase: None)
    proof = workload_proof.prove(bench, "i", slow=slow, same_code=True)
    assert judged == ([] if slow else ["optimized", "timed optimized"])
    assert proof.counts == {"optimized": counts, "accepted": counts}
    assert (proof.evidence is None) is slow
    assert len(proof.digests) == 1
    judged.clear()
    before = dataclasses.replace(of, optimized=lasting(time, FAST_S, accepted))
    timed: dict[str, Any] = {"proof": proof, "accepted": before, "new_values": False}
    made = measuring.measure(of, workload, workload_id="i", device="cpu", **timed)
    assert set(made.sides) == {"reference", "optimized", "accepted"}
    assert judged[:1] == ([] if equal else ["accepted"])


def test_a_side_with_the_same_code_and_another_output_is_compared_with_the_truth(time: Time) -> None:
    of = pair(time)
    bench = Bench(pair=of, workload=Workload("w", n=5), device="cpu", home=None, seed=1, report=lambda phase: None)
    proof = workload_proof.prove(bench, "i", slow=True, same_code=True)
    wrong = dataclasses.replace(of, optimized=lasting(time, FAST_S, lambda x: torch.exp(x) * 1.001))
    for current, accepted, name in ((wrong, of, "optimized"), (of, wrong, "accepted")):
        with pytest.raises(NotEquivalent, match=f"{name} side is wrong"):
            measuring.measure(
                current, Workload("w", n=5), workload_id="i", device="cpu", proof=proof, accepted=accepted
            )


@pytest.mark.parametrize("in_steps", [False, True])
@pytest.mark.parametrize("fault", ["", "optimized", "accepted"])
def test_a_process_may_warm_up_before_its_proof_arrives(
    time: Time, in_steps: bool, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It compares its first outputs with the proof before it times anything."""
    done: list[str] = []

    def adding(wrong: float) -> Side:
        def make(x: torch.Tensor) -> Call:
            state = x.clone()

            def step(y: torch.Tensor) -> torch.Tensor:
                time.spend(FAST_S)
                return state.add_(y + wrong).clone()

            return step

        return stateful(make)

    def of(wrong: bool) -> Pair:
        if not in_steps:
            return pair(time, optimized=lasting(time, FAST_S, lambda x: torch.exp(x) * (1 + 1e-3 * wrong)))
        added = {"y": tensor("n")}
        return pair(time, reference=adding(0.0), optimized=adding(0.1 * wrong), step_inputs=added)

    right, workload = of(wrong=False), Workload("w", n=5)
    bench = Bench(pair=right, workload=workload, device="cpu", home=None, seed=7, report=lambda phase: None)
    proof = workload_proof.prove(bench, "i")

    def awaited() -> WorkloadProof:
        done.append("proof")
        return proof

    established: list[str] = []
    establish = truths.establish
    monkeypatch.setattr(truths, "establish", lambda *a, **k: established.append("truth") or establish(*a, **k))
    with pytest.raises(NotEquivalent, match=f"{fault} side is wrong") if fault else nullcontext():
        made = measuring.measure(
            of(wrong=fault == "optimized"),
            workload,
            workload_id="i",
            device="cpu",
            accepted=of(wrong=fault == "accepted"),
            seed=7,
            wait_for_proof=awaited,
            thorough=False,
            new_values=False,
            alone=lambda: (done.append("alone"), True)[1],
        )
        assert made.evidence == proof.evidence
        assert made.seed == proof.seed
    assert done == (["proof"] if fault else ["proof", "alone"])
    assert bool(established) is bool(fault)


@pytest.mark.parametrize("equal", [False, True])
def test_only_digests_of_large_outputs_are_kept_until_the_proof_arrives(
    time: Time, equal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    of, workload = pair(time), Workload("w", n=5)
    bench = Bench(pair=of, workload=workload, device="cpu", home=None, seed=7, report=lambda phase: None)
    proof = workload_proof.prove(bench, "i")
    establish = truths.establish
    monkeypatch.setattr(truths, "establish", lambda *a, **k: done.append("truth") or establish(*a, **k))
    monkeypatch.setattr(preparation, "COPIED_BYTES", 1)
    monkeypatch.setattr(output_checks, "COPIED_BYTES", 1)
    monkeypatch.setattr(output_checks, "COPIED_TO_HOST_BYTES", 1)
    measuring.measure(
        of,
        workload,
        workload_id="i",
        device="cpu",
        seed=7,
        wait_for_proof=lambda: (done.append("proof"), proof if equal else dataclasses.replace(proof, digests=()))[1],
        thorough=False,
        new_values=False,
        report=lambda phase: done.append(phase) if done else None,
    )
    checked = done[: done.index("timing")] if "timing" in done else done
    assert checked[0] == "proof"
    assert ("truth" in done) is not equal
    if not equal:
        assert done[: done.index("truth")].count("optimized") == 1, "an error is that side's"


def test_incoming_gradients_are_matched_to_outputs_by_name(time: Time) -> None:
    """This also holds if a long reference is called only once."""

    def both(*names: str) -> Call:
        made = {"a": torch.exp, "b": lambda x: torch.sin(x).sum(0)}
        return lambda x: {n: made[n](x) for n in names}

    of = pair(time, reference=lasting(time, SLOW_S, both("a", "b")), optimized=lasting(time, FAST_S, both("b", "a")))
    workload = Workload("w", n=REPLICAS_UP_TO + 1, direction="both")
    bench = Bench(pair=of, workload=workload, device="cpu", home=None, seed=1, report=lambda phase: None)
    assert workload_proof.prove(bench, "i", slow=True, same_code=True, enough_s=1000.0).reference_s


def test_a_rival_that_lacks_memory_beside_other_proofs_is_proven_when_timed(time: Time) -> None:
    crowded = True

    def large(x: torch.Tensor) -> torch.Tensor:
        if crowded:
            raise torch.OutOfMemoryError
        return torch.exp(x)

    of, workload = pair(time, rivals={"large": lasting(time, 5e-3, large)}), Workload("w", n=5)
    bench = Bench(pair=of, workload=workload, device="cpu", home=None, seed=1, report=lambda phase: None)
    proof = workload_proof.prove(bench, "p::speed[w]", with_rivals=True)
    assert (proof.rivals, proof.skipped) == ((), {})
    crowded = False
    made = measuring.measure(of, workload, workload_id="p::speed[w]", device="cpu", proof=proof)
    assert list(made.sides) == ["reference", "optimized", "large"]


@pytest.mark.parametrize("name", ["reference", "optimized"])
def test_a_side_that_waits_for_the_device_is_an_error(name: str, time: Time, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clocks.CpuClock, "waiting", {name, "good"})
    with pytest.raises(PairError, match=rf"p, workload 'w': the {name} side waits for the device .*say clock='wall'"):
        measure(pair(time))


def test_a_rival_that_waits_for_the_device_is_skipped(time: Time, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clocks.CpuClock, "waiting", {"good"})
    made = measure(pair(time, rivals={"good": lasting(time, 5e-3)}))
    assert list(made.sides) == ["reference", "optimized"]
    assert made.skipped["good"].startswith("waits for the device within a call")


def test_the_accepted_side_is_timed_beside_the_other_two(time: Time) -> None:
    made = measuring.measure(
        pair(time, rivals={"rival": lasting(time, 1e-3)}),
        Workload("w", n=5),
        workload_id="i",
        device="cpu",
        accepted=pair(time, optimized=lasting(time, 5e-3)),
        thorough=False,
    )
    assert set(made.sides) == {"reference", "optimized", "accepted"}
    assert made.log_ratios["accepted"] == pytest.approx((math.log(1.25),) * BLOCKS)
    with pytest.raises(NotEquivalent, match="output of the accepted side is wrong"):
        measuring.measure(
            pair(time),
            Workload("w", n=5),
            workload_id="i",
            device="cpu",
            accepted=pair(time, optimized=lambda x: torch.exp(x) * 2),
        )


class FakeCuda(clocks.CudaClock):
    """Clock of a GPU that does not exist."""

    def __init__(self) -> None:
        pass


def counting_bench() -> Any:
    return SimpleNamespace(report=lambda phase: None, peers=ALONE, counted_here={})


def test_launches_of_a_call_that_is_too_long_to_profile_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"reference": 9.0, "optimized": 9.0, "slow": 1.1, "quick": 1.0}
    runners: Any = {
        name: SimpleNamespace(grad_mode=False, reset=None, call=name, last=runner.Call(s, None))
        for name, s in seconds.items()
    }
    monkeypatch.setattr("perfsuite.timing.bench.count_calls", lambda sides, any_of: dict.fromkeys(sides, (0, 5)))
    counts = Bench.count(counting_bench(), runners, FakeCuda())
    known, unknown = Counts(host_syncs=0, launches=5), Counts()
    assert counts == {"reference": unknown, "optimized": known, "slow": unknown, "quick": known}


def test_steps_are_compared_at_the_same_step_of_their_cycle(time: Time, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(x: torch.Tensor) -> Call:
        numbers = itertools.count(1)

        def step(y: torch.Tensor) -> torch.Tensor:
            time.spend(0.01 * (1 + (next(numbers) % 8 == 0)))  # so slow that a sample is one call
            return x + y

        return step

    monkeypatch.setattr(sampling, "ALLOCATE_BUDGET_S", 0.0)  # the steps are not built anew between blocks
    of = pair(time, reference=stateful(build), optimized=stateful(build), step_inputs={"y": tensor("n")})
    made = measuring.measure(of, Workload("w", n=5), workload_id="i", device="cpu", accepted=of, reference=3)
    assert made.log_ratios["accepted"] == pytest.approx((0.0,) * len(made.log_ratios["accepted"]))


@pytest.mark.parametrize(
    ("counted", "optimized", "accepted"),
    [
        # For each count: (host syncs, launches) of the optimized side, and of the accepted one.
        ([((1, 9), (0, 7)), ((0, 7), (0, 8))], (0, 7), (0, 8)),
        ([((3, 7), (2, 7)), ((3, 7), (2, 7)), ((3, 7), (3, 7))], (3, 7), (3, 7)),
        ([((3, 7), (2, 7))] * 4, (3, 7), (2, 7)),
        ([((2, 7), (3, 8))], (2, 7), (3, 8)),
    ],
)
def test_more_launches_than_accepted_are_counted_again(
    counted: list[tuple[tuple[int, int], tuple[int, int]]],
    optimized: tuple[int, int],
    accepted: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A difference that only some calls show must not make a gate red."""
    answers = iter(counted)
    monkeypatch.setattr(
        "perfsuite.timing.bench.count_calls",
        lambda sides, any_of: dict(zip(("optimized", "accepted"), next(answers), strict=True)),
    )
    runners: Any = {
        name: SimpleNamespace(grad_mode=False, reset=None, call=name, last=runner.Call(0.1, None))
        for name in ("optimized", "accepted")
    }
    counts = Bench.count(counting_bench(), runners, FakeCuda())
    assert counts == {
        name: Counts(host_syncs=syncs, launches=launches)
        for name, (syncs, launches) in (("optimized", optimized), ("accepted", accepted))
    }
    assert not list(answers)


def test_calls_without_counted_launches_are_never_queued_behind_a_spin(time: Time) -> None:
    sampler: Any = SimpleNamespace(counts={"optimized": Counts(launches=3)}, repeat=2)
    assert sampling.Sampler._launches(sampler, "optimized") == 6
    assert sampling.Sampler._launches(sampler, "reference") > clocks.QUEUE_DEPTH


@pytest.fixture
def long(time: Time, monkeypatch: pytest.MonkeyPatch) -> Time:
    """Use the same clock for calls before anything is timed."""
    monkeypatch.setattr(runner, "perf_counter", lambda: time.now * 1e-9)
    return time


def calls_of_a_reference(time: Time, seconds: float, **options: Any) -> int:
    count = itertools.count()

    def slow(x: torch.Tensor) -> torch.Tensor:
        next(count)
        time.spend(seconds)
        return torch.exp(x)

    made = measure(pair(time, reference=slow), n=REPLICAS_UP_TO + 1, **options)
    assert made.few == ("reference",)
    assert made.sides["reference"].wall_s == pytest.approx(seconds)
    assert len(made.sides["reference"].blocks_s) == FEW_BLOCKS
    return next(count)


PROOF = 2
"""Calls of a proof: one for the truth, one for the reference."""
WARM_UP = 2


def test_a_call_of_seconds_is_made_as_few_times_as_possible(long: Time) -> None:
    assert calls_of_a_reference(long, 2.0) == PROOF + WARM_UP + FEW_BLOCKS
    plan, settle = 1, FEW_BLOCKS - 1  # the first block has the warm-up's inputs
    assert calls_of_a_reference(long, 0.6) == PROOF + WARM_UP + plan + settle + FEW_BLOCKS


def test_a_slow_side_that_warmed_up_beside_other_processes_warms_up_again(long: Time) -> None:
    count, asked = itertools.count(), list[int]()

    def slow(x: torch.Tensor) -> torch.Tensor:
        next(count)
        long.spend(2.0 if asked else 6.0)
        return torch.exp(x)

    def alone() -> bool:
        asked.append(next(count))
        Event().wait(0.05)
        return True

    of, workload = pair(long, reference=slow), Workload("w", n=REPLICAS_UP_TO + 1)
    began = perf_counter()
    made = measuring.measure(of, workload, workload_id="i", device="cpu", alone=alone)
    took = perf_counter() - began
    assert asked == [PROOF + WARM_UP]
    assert next(count) == PROOF + WARM_UP + 1 + WARM_UP + FEW_BLOCKS
    assert made.sides["reference"].blocks_s == pytest.approx((2.0,) * FEW_BLOCKS)
    assert made.phases["waiting"] >= 0.05
    assert made.seconds <= took - 0.05
    assert "waiting" not in measure(pair(long)).phases


def proof_until(of: Pair, enough_s: float) -> WorkloadProof:
    workload = Workload("w", n=REPLICAS_UP_TO + 1)
    bench = Bench(pair=of, workload=workload, device="cpu", home=None, seed=1, report=lambda phase: None)
    return workload_proof.prove(bench, "i", slow=True, same_code=True, enough_s=enough_s)


@pytest.mark.parametrize(
    ("naps", "enough_s", "stopped", "calls"),
    [
        ([60_000], 0.05, True, 1),
        ([100], 0.0, None, 0),
        ([100, 100], 50.0, False, 2),  # the first call was quick: it may be start-up time
        ([60_000, 10], 0.2, True, 1),
    ],
)
@pytest.mark.parametrize("breaks", [False, True])
def test_a_reference_is_called_until_it_has_run_for_enough_s(
    time: Time,
    naps: list[int],
    enough_s: float,
    stopped: bool | None,
    calls: int,
    breaks: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(workload_proof, "COLD_S", 0.1)
    left, called = list(naps), []

    def slow(x: torch.Tensor) -> torch.Tensor:
        time.spend(SLOW_S)
        called.append(1)
        torch.set_default_dtype(torch.float64)
        try:
            for _ in range(left.pop(0) if left else 0):
                sleep(0.001)
        except BaseException as error:
            if breaks:
                raise RuntimeError("not complete") from error
            raise
        torch.set_default_dtype(torch.float32)
        return torch.exp(x)

    proof = proof_until(pair(time, reference=slow), enough_s)
    assert torch.get_default_dtype() is torch.float32
    assert len(called) == calls
    assert proof.reference_stopped is bool(stopped)
    assert (proof.reference_s is None) is (stopped is None)
    if stopped and proof.reference_s is not None:
        assert enough_s <= proof.reference_s < 30.0


def test_a_long_reference_is_not_called_to_find_its_incoming_gradients(time: Time) -> None:
    called = []

    def slow(x: torch.Tensor) -> torch.Tensor:
        time.spend(SLOW_S)
        called.append(x.requires_grad)
        return torch.exp(x)

    of = pair(time, reference=slow)
    workload = Workload("w", n=REPLICAS_UP_TO + 1, direction="both")
    bench = Bench(pair=of, workload=workload, device="cpu", home=None, seed=1, report=lambda phase: None)
    proof = workload_proof.prove(bench, "i", slow=True, same_code=True, enough_s=1000.0)
    assert proof.reference_s
    assert called == [True, True]  # two quick calls


@pytest.mark.parametrize(("reference", "bound"), [(0, True), (None, False), (1, False)])
def test_a_lower_bound_is_used_only_if_the_reference_is_not_timed(
    time: Time, reference: int | None, bound: bool
) -> None:
    of, workload = pair(time), Workload("w", n=REPLICAS_UP_TO + 1)
    proof = dataclasses.replace(proof_until(of, 0.0), reference_s=5.0, reference_stopped=True)
    made = measuring.measure(of, workload, workload_id="i", device="cpu", proof=proof, reference=reference)
    assert made.at_least == (("reference",) if bound else ())
    assert (made.sides["reference"].wall_s == 5.0) is bound


@pytest.mark.parametrize(("seconds", "once"), [(2.0, True), (0.01, False)])
def test_a_long_reference_is_called_after_the_other_sides_are_ready(long: Time, seconds: float, once: bool) -> None:
    """Other processes on the device wait once, not again while the other sides prepare."""
    done: list[str] = []

    def slow(x: torch.Tensor) -> torch.Tensor:
        long.spend(seconds)
        done.append("reference")
        return torch.exp(x)

    def fast(x: torch.Tensor) -> torch.Tensor:
        long.spend(FAST_S)
        done.append("optimized")
        return torch.exp(x)

    of, workload = pair(long, reference=slow, optimized=fast), Workload("w", n=REPLICAS_UP_TO + 1)
    bench = Bench(pair=of, workload=workload, device="cpu", home=None, seed=1, report=lambda phase: None)
    proof = workload_proof.prove(bench, "i")
    done.clear()
    made = measuring.measure(
        of,
        workload,
        workload_id="i",
        device="cpu",
        proof=proof,
        reference=1,
        alone=lambda: (done.append("alone"), True)[1],
        beside=lambda: (done.append("beside"), True)[1],
    )
    before, after = done[: done.index("alone")], done[done.index("alone") + 1 :]
    assert set(before) == {"optimized"}
    assert after[0] == "reference"
    assert (done.count("reference") == 1) is once
    assert (after.count("alone"), after.count("beside"), after[-1]) == (0, 1, "beside")
    assert made.few == ("reference",)
    assert made.sides["reference"].wall_s == pytest.approx(seconds)


@pytest.mark.parametrize("right", [True, False])
def test_outputs_that_differ_from_the_proven_ones_are_checked_after_timing(
    time: Time, right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes, done = itertools.count(), list[str]()

    def tiring(x: torch.Tensor) -> torch.Tensor:
        time.spend(FAST_S)
        return torch.exp(x) * (1 if next(changes) < 20 else 1 + 1e-7 if right else 0)

    def beside() -> bool:
        done.append("beside")
        return True

    judge = equivalence.judge
    monkeypatch.setattr(equivalence, "judge", lambda *a, **named: (done.append(named["name"]), judge(*a, **named)))
    of, workload = pair(time, optimized=tiring), Workload("w", n=5)
    bench = Bench(pair=of, workload=workload, device="cpu", home=None, seed=1, report=lambda phase: None)
    proof = workload_proof.prove(bench, "i")
    done.clear()
    with nullcontext() if right else pytest.raises(NotEquivalent, match=r"timed optimized.*it was right before"):
        measuring.measure(of, workload, workload_id="i", device="cpu", proof=proof, new_values=False, beside=beside)
    # An error that may exceed its budget is checked again with few replicas, then with all.
    assert done == ["beside", *["timed optimized"] * (1 if right else 3)]


@pytest.mark.parametrize(
    ("seconds", "held", "drawn"), [(0.0, 0, 1 + FRESH_BLOCKS[True]), (0.4, 0, 3), (9.0, 0, 2), (0.0, 300, 2)]
)
def test_new_values_are_drawn_before_a_process_waits_to_time(
    time: Time, seconds: float, held: int, drawn: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    draw = block_checks.NewValues._draw

    def slow_draw(self: Any) -> Any:
        time.now += seconds * 1e9
        done.append("draw")
        return draw(self)

    def alone() -> bool:
        done.append("alone")
        return True

    monkeypatch.setattr(block_checks, "perf_counter", lambda: time.now * 1e-9)
    monkeypatch.setattr(block_checks.NewValues, "_draw", slow_draw)
    if held:
        monkeypatch.setattr(block_checks, "FRESH_BYTES", held)
    of, workload = pair(time), Workload("w", n=100)
    bench = Bench(pair=of, workload=workload, device="cpu", home=None, seed=1, report=lambda phase: None)
    proof = workload_proof.prove(bench, "i")
    timed: list[int] = []
    conclude = block_checks.Watch.conclude
    monkeypatch.setattr(block_checks.Watch, "conclude", lambda self: (timed.append(len(self.fresh)), conclude(self)))
    measuring.measure(of, workload, workload_id="i", device="cpu", proof=proof, alone=alone)
    assert done == ["draw"] * drawn + ["alone"]
    assert timed == [drawn - 1], "the first is for calls that are not kept"


@pytest.mark.parametrize(
    ("device", "copied", "judged"),
    [
        ("cpu", {"of 10": "meta", "of 11": "meta"}, ["of 20", "of 12", "of 60"]),
        ("cuda", {"of 10": "meta", "of 11": "meta", "of 20": "cpu", "of 12": "cpu"}, ["of 60"]),
    ],
)
def test_outputs_are_copied_if_there_is_room_and_else_checked_at_once(
    monkeypatch: pytest.MonkeyPatch, device: str, copied: dict[str, str], judged: list[str]
) -> None:
    at_once: list[str] = []
    check: Any = SimpleNamespace(known=set(), copied={}, device=device, check=lambda leaves, name: at_once.append(name))
    to: list[dict[str, torch.device]] = []
    monkeypatch.setattr(output_checks, "COPIED_BYTES", 100)
    monkeypatch.setattr(output_checks, "COPIED_TO_HOST_BYTES", 300)
    monkeypatch.setattr(output_checks, "_moved", lambda leaves, devices, copy: (to.append(devices), leaves)[1])
    monkeypatch.setattr(output_checks, "digest", lambda leaves: str(leaves["count"]))
    for n in (10, 11, 20, 12, 60):  # of 4 bytes each
        # The output is not on the workload's device: it may be on the host, or on a second GPU.
        output_checks.OutputCheck.check_later(check, {"output": torch.rand(n, device="meta"), "count": n}, f"of {n}")
    assert at_once == judged
    assert [name for _, _, name in check.copied.values()] == list(copied)
    assert [str(devices["output"]) for devices in to] == list(copied.values())
    assert {str(devices["output"]) for _, devices, _ in check.copied.values()} == {"meta"}


def test_copied_outputs_do_not_change_with_later_writes(time: Time) -> None:
    of, workload = pair(time), Workload("w", n=100)
    bench = Bench(pair=of, workload=workload, device="cpu", home=None, seed=1, report=lambda phase: None)
    check = bench.check()
    made = check.produce(bench.sides["optimized"])
    check.check_later(made, "optimized")
    for leaf in made.values():
        leaf.fill_(0)  # a later call may write into its outputs again
    check.check_copied()
    check.check_later(made, "optimized")
    with pytest.raises(NotEquivalent, match="optimized"):
        check.check_copied()


def test_a_reference_whose_truth_took_long_is_called_once(long: Time, monkeypatch: pytest.MonkeyPatch) -> None:
    count = itertools.count()

    def slow(x: torch.Tensor) -> torch.Tensor:
        next(count)
        long.spend(2.0)
        return torch.exp(x)

    monkeypatch.setattr(output_checks, "perf_counter", lambda: long.now * 1e-9)
    of, workload = pair(long, reference=slow), Workload("w", n=REPLICAS_UP_TO + 1)
    bench = Bench(pair=of, workload=workload, device="cpu", home=None, seed=1, report=lambda phase: None)
    for module in (workload_proof, preparation):
        monkeypatch.setattr(module, "SLOW_TRUTH_S", 1.0)
    proof = workload_proof.prove(bench, "i", with_reference=True)
    assert (next(count), proof.truth_s) == (PROOF, pytest.approx(2.0 * PROOF))

    made = measuring.measure(of, workload, workload_id="i", device="cpu", proof=proof)
    assert next(count) == PROOF + 1 + 1
    assert made.few == ("reference",)
    assert made.sides["reference"].blocks_s == pytest.approx((2.0,))
    assert len(made.sides["optimized"].blocks_s) > 1


def test_incoming_gradients_of_a_call_of_seconds_are_drawn_once(long: Time) -> None:
    drawing = 1
    assert calls_of_a_reference(long, 2.0, direction="both") == PROOF + drawing + WARM_UP + FEW_BLOCKS


def test_a_slow_first_call_on_new_inputs_does_not_make_a_side_slow(long: Time) -> None:
    """A side that captures a graph for each address has such first calls."""

    def captures(seconds: float) -> Call:
        seen: set[int] = set()

        def call(x: torch.Tensor) -> torch.Tensor:
            long.spend(seconds if id(x) in seen else 2.0)
            seen.add(id(x))
            return torch.exp(x)

        return call

    made = measure(pair(long, reference=captures(SLOW_S), rivals={"rival": captures(5e-3)}), n=REPLICAS_UP_TO + 1)
    assert made.few == ()
    assert made.sides["reference"].wall_s == pytest.approx(SLOW_S)
    assert made.sides["rival"].wall_s == pytest.approx(5e-3)
    assert len(made.sides["reference"].blocks_s) == BLOCKS


def test_a_call_that_was_delayed_once_is_not_long(long: Time) -> None:
    for held_up in (0, 1):
        seconds = iter([SLOW_S] * held_up + [1.5] + [SLOW_S] * 3)

        def call(x: torch.Tensor, seconds: Iterator[float] = seconds) -> torch.Tensor:
            long.spend(next(seconds))
            return torch.exp(x)

        assert warmed_up(long, side(call)).long is None


def warmed_up(time: Time, given: Side, **fields: Any) -> runner.Runner:
    made = runner.Runner(
        name="reference",
        side=given,
        pair=pair(time, **fields),
        case=SimpleNamespace(),  # type: ignore[arg-type]
        direction="forward",
        device="cpu",
    )
    made.allocate({"x": torch.ones(2)}, random.Random(0))
    made.warm_up(clocks.CpuClock())
    return made


def test_a_warm_up_call_that_compiles_is_not_long(long: Time, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = itertools.count()
    assert warmed_up(long, side(lasting(long, 2.0))).long is not None
    monkeypatch.setattr(compilations, "graphs", lambda: next(numbers))
    assert warmed_up(long, side(lasting(long, 2.0))).long is None


def test_a_stateful_step_of_seconds_is_not_long(long: Time) -> None:
    steps = stateful(lambda x: lasting(long, 2.0, lambda: None))
    assert warmed_up(long, steps, reference=steps, optimized=steps).long is None


def test_wall_time_of_a_call_of_seconds_is_taken_from_the_warm_up(time: Time) -> None:
    long: Any = SimpleNamespace(long=runner.Call(2.0, 512), name="reference")
    sampler: Any = SimpleNamespace(clock=None, kind="device", runners={"reference": long})
    assert sampling.Sampler.other_clock(sampler, "reference") == 2.0
    message = SimpleNamespace(kind="wall", report=lambda _: None, calls={"reference": 1}, counts={}, slow={"reference"})
    message.clock, message.runners = None, sampler.runners
    message._launches, message.sample = lambda name: 0, lambda *_: 1.5  # on the device clock, which the warm-up has not
    assert sampling.Sampler.other_clock(message, "reference") == 1.5  # type: ignore[arg-type]


# --- what is timed stays right -------------------------------------------------------------------------------


def test_inputs_changed_in_place_are_restored_before_each_call(time: Time) -> None:
    seen: set[tuple[float, ...]] = set()

    def turn(x: torch.Tensor) -> torch.Tensor:
        seen.add(tuple(x.tolist()))
        time.spend(FAST_S)
        return x.mul_(2)

    made = measure(pair(time, reference=lasting(time, SLOW_S, lambda x: x.mul_(2)), optimized=turn, mutates={"x"}))
    assert len(seen) == 2 + FRESH_BLOCKS[False], "the inputs, new ones to warm up, and after each block"
    assert made.log_ratios["reference"] == pytest.approx((math.log(1.5),) * BLOCKS)


def test_a_later_process_of_a_gate_gets_no_new_values(time: Time) -> None:
    seen: set[tuple[float, ...]] = set()

    def noted(x: torch.Tensor) -> torch.Tensor:
        seen.add(tuple(x.tolist()))
        time.spend(FAST_S)
        return torch.exp(x)

    of, workload = pair(time, optimized=noted), Workload("w", n=5)
    measuring.measure(of, workload, workload_id="i", device="cpu", new_values=False)
    assert len(seen) == 1


def test_an_in_place_change_that_starts_during_timing_is_reported(time: Time) -> None:
    count = itertools.count()

    def sly(x: torch.Tensor) -> torch.Tensor:
        time.spend(FAST_S)
        out = torch.exp(x)
        if next(count) > 20:
            x.add_(1)
        return out

    with pytest.raises(NotEquivalent, match=r"optimized side changes its input x in place while it is timed.*mutates="):
        measure(pair(time, optimized=sly))


def test_an_output_that_becomes_wrong_during_timing_is_found(time: Time) -> None:
    count = itertools.count()

    def tiring(x: torch.Tensor) -> torch.Tensor:
        time.spend(FAST_S)
        return torch.exp(x) if next(count) < 20 else torch.zeros_like(x)

    with pytest.raises(NotEquivalent, match=r"output of the timed optimized side is wrong.*it was right before it was"):
        measure(pair(time, optimized=tiring))


def test_a_pair_that_writes_into_a_given_output_is_timed(time: Time) -> None:
    inputs = {**X, "out": tensor("n")}

    def into(seconds: float, call: Call = torch.exp) -> Call:
        def timed(x: torch.Tensor, out: torch.Tensor) -> None:
            time.spend(seconds)
            call(x, out=out)

        return timed

    def of(optimized: Call) -> Pair:
        return pair(time, reference=into(SLOW_S), optimized=optimized, inputs=inputs, mutates={"out": "written"})

    made = measure(of(into(FAST_S)))
    assert made.log_ratios["reference"] == pytest.approx((math.log(1.5),) * BLOCKS)
    assert made.evidence is not None
    assert made.evidence.elements == 5
    with pytest.raises(NotEquivalent, match="out"):
        measure(of(into(FAST_S, torch.sin)))


# --- directions ----------------------------------------------------------------------------------------------


def two_way(time: Time, forward_s: float, backward_s: float) -> Call:
    class Exp(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            time.spend(forward_s)
            out = torch.exp(x)
            ctx.save_for_backward(out)
            return out

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            time.spend(backward_s)
            return grad * ctx.saved_tensors[0]

    return lambda x: Exp.apply(x)


@pytest.mark.parametrize(("direction", "ratio"), [("forward", 1.25), ("backward", 1.75), ("both", 1.5)])
def test_direction_selects_the_passes_that_are_timed(time: Time, direction: str, ratio: float) -> None:
    of = pair(time, reference=two_way(time, 5e-3, 7e-3), optimized=two_way(time, 4e-3, 4e-3))
    made = measure(of, direction=direction)
    assert made.direction == direction
    assert made.log_ratios["reference"] == pytest.approx((math.log(ratio),) * BLOCKS)


def test_a_backward_workload_without_gradients_is_an_error(time: Time) -> None:
    of = pair(time, reference=lambda x: x.detach() * 1, optimized=lambda x: x.detach() * 1)
    with pytest.raises(PairError, match="direction='backward', but no output depends on an input's gradient"):
        measure(of, direction="backward")


def test_only_the_step_of_a_stateful_side_is_timed(time: Time) -> None:
    builds, steps = Counter[float](), Counter[float]()

    def descent(step_s: float) -> Call:
        def build(x: torch.Tensor) -> Call:
            time.spend(1.0)
            builds[step_s] += 1

            def step(g: torch.Tensor) -> None:
                time.spend(step_s)
                steps[step_s] += 1
                x.sub_(0.1 * g)

            return step

        return build

    of = pair(
        time,
        reference=stateful(descent(SLOW_S)),
        optimized=stateful(descent(FAST_S)),
        step_inputs={"g": tensor("n", values=floats(-2, 2))},
        mutates={"x"},
    )
    made = measure(of)
    assert made.log_ratios["reference"] == pytest.approx((math.log(1.5),) * BLOCKS)
    assert made.sides["optimized"].wall_s == pytest.approx(FAST_S)
    for step_s in (SLOW_S, FAST_S):  # each round builds the sides anew, and steps them several times
        assert BLOCKS * ROUNDS <= builds[step_s] < 2 * BLOCKS * ROUNDS < steps[step_s]


@pytest.mark.parametrize("warm_s", [0.2, 2.0])  # above a second, further warm-up is left out
def test_calls_that_settle_a_new_step_are_not_timed(time: Time, warm_s: float) -> None:
    def graphed(settle: int) -> Pair:
        def build(x: torch.Tensor) -> Call:
            calls = [0]

            def step(g: torch.Tensor) -> torch.Tensor:
                calls[0] += 1
                time.spend(warm_s if calls[0] <= 3 else 1e-4)
                return x + g

            return step

        return pair(
            time,
            reference=stateful(lambda x: lasting(time, 1.5e-4, lambda g: x + g)),
            optimized=stateful(build, settle=settle),
            step_inputs={"g": tensor("n", values=floats(-2, 2))},
        )

    made = measure(graphed(3))
    assert made.log_ratios["reference"] == pytest.approx((math.log(1.5),) * BLOCKS)
    with pytest.raises(NotEquivalent, match=r"some calls do the work of the others .*stateful\(…, settle=calls\)"):
        measure(graphed(2))


# --- device condition and limit ------------------------------------------------------------------------------


class FakeClock:
    waiting: frozenset[str] = frozenset()
    peers: Peers = ALONE

    def __init__(self, time: Time) -> None:
        self.time = time

    def sample(self, kind: str, reset: Call, call: Call, calls: int, launches: int, key: str = "") -> float:
        began = self.time.now
        for _ in range(calls):
            reset()
            call()
        self.work = [(self.time.now - began) / calls * 1e-9] * calls
        return self.work[0]

    def after_last_event(self, reset: Call, call: Call) -> float:
        reset()
        call()
        return 1e-6

    def flush(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


class FakeMonitor:
    throttles: Iterator[bool] = iter(())

    def __init__(self, index: int | None) -> None:
        pass

    def __enter__(self) -> FakeMonitor:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def sample(self) -> None:
        pass

    def throttled(self) -> bool:
        return next(self.throttles)

    def condition(self, set_aside: int = 0) -> Condition:
        return Condition(sm_clock_mhz=1980.0, set_aside=set_aside)


@pytest.mark.parametrize(
    ("throttles", "aside"),
    [([False] * BLOCKS, 0), ([True, False, True] + [False] * BLOCKS, 2), ([True] * 3 * BLOCKS, EXTRA_BLOCKS)],
    ids=["never", "twice", "always"],
)
def test_blocks_under_throttling_are_discarded_and_counted(
    time: Time, monkeypatch: pytest.MonkeyPatch, throttles: list[bool], aside: int
) -> None:
    monkeypatch.setattr("perfsuite.timing.bench.clock_for", lambda device, peers: FakeClock(time))
    monkeypatch.setattr(sampling, "Monitor", FakeMonitor)
    monkeypatch.setattr(FakeMonitor, "throttles", iter(throttles))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    made = measure(pair(time))
    assert made.condition == Condition(sm_clock_mhz=1980.0, set_aside=aside * ROUNDS)
    assert len(made.log_ratios["reference"]) == BLOCKS
    assert len(made.sides["optimized"].blocks_s) == BLOCKS


@pytest.mark.parametrize(
    ("cost", "seconds", "by"),
    [
        (Cost(bytes=lambda n: 1e5 * n), 5e-4, "memory"),
        (Cost(flops=lambda n: 7e7 * n, precision="tf32"), 3.5e-3, "compute"),
        (Cost(bytes=lambda n: 7e5 * n, flops=lambda n: n), 3.5e-3, "memory"),
    ],
)
def test_the_limit_is_the_cost_divided_by_the_ceiling(
    time: Time, monkeypatch: pytest.MonkeyPatch, cost: Cost, seconds: float, by: str
) -> None:
    asked: list[str] = []

    def flops(device: str, precision: str) -> float:
        asked.append(precision)
        return 1e11

    monkeypatch.setattr(roofline, "copy_bytes_per_s", lambda device: 1e9)
    monkeypatch.setattr(roofline, "matmul_flops_per_s", flops)
    limit = measure(pair(time, cost=cost)).limit
    assert limit is not None
    assert limit.seconds == pytest.approx(seconds)
    assert limit.by == by
    assert limit.ceiling == (1e9 if by == "memory" else 1e11)
    assert asked == ([cost.precision] if cost.flops else [])


def test_further_processes_of_a_workload_do_not_measure_the_ceilings(
    time: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(device: str) -> float:
        raise AssertionError

    monkeypatch.setattr(roofline, "copy_bytes_per_s", never)
    of, workload = pair(time, cost=Cost(bytes=lambda n: n)), Workload("w", n=5)
    options: dict[str, Any] = {"workload_id": "p::speed[w]", "device": "cpu", "thorough": False}
    assert measuring.measure(of, workload, new_values=False, **options).limit is None
    with pytest.raises(AssertionError):
        measuring.measure(of, workload, new_values=True, **options)


@pytest.mark.parametrize(
    ("declared", "dtype", "precision"),
    [
        ("tf32", "float32", "tf32"),
        ("tf32", "bfloat16", "bfloat16"),
        ("float32", "float64", "float64"),
        ("bfloat16", "float32", "bfloat16"),
        ("bfloat16", "float64", "bfloat16"),
    ],
)
def test_precision_of_a_cost_depends_on_the_dtype_of_the_workload(declared: str, dtype: str, precision: str) -> None:
    assert Cost(precision=declared).precision_in(dtype) == precision


@pytest.mark.parametrize(("device", "rate"), [("cuda", 1e9), ("cpu", 4e9)])
def test_limit_in_bfloat16_uses_the_faster_product_on_a_cpu(
    time: Time, monkeypatch: pytest.MonkeyPatch, device: str, rate: float
) -> None:
    """On a CPU the limit uses float32 products if these are faster."""
    rates = {"bfloat16": 1e9, "float32": 4e9}
    monkeypatch.setattr(roofline, "matmul_flops_per_s", lambda device, precision: rates[precision])
    made = pair(time, cost=Cost(flops=lambda n: n))
    limit = roofline.limit(made, Workload("w", n=5), "bfloat16", device)
    assert limit is not None
    assert limit.ceiling == rate


def test_an_empty_cost_has_no_limit(time: Time) -> None:
    assert measure(pair(time, cost=Cost())).limit is None


def test_phases_are_reported_by_side(time: Time) -> None:
    phases: list[str] = []
    measuring.measure(pair(time), Workload("w", n=5), workload_id="i", device="cpu", report=phases.append)
    assert phases[:2] == ["reference", "optimized"]
    assert set(phases) == {"reference", "optimized", "timing"}


def test_the_real_clock_gives_a_record() -> None:
    made = measuring.measure(
        Pair(reference=torch.exp, optimized=torch.exp, inputs=X, name="p"),
        Workload("w", n=1000),
        workload_id="i",
        device="cpu",
    )
    assert len(made.log_ratios["reference"]) == BLOCKS
    assert all(t > 0 for t in made.sides["optimized"].blocks_s)
    assert 0 < made.seconds < 60


def test_a_side_that_still_works_after_its_call_is_rejected_before_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    pending: list[tuple[torch.Tensor, torch.Tensor]] = []

    def late(x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        pending.append((out, x + 1))
        return out

    def waited(seconds: float) -> None:
        # Simulates a side stream that writes while the harness waits.
        while pending:
            out, answer = pending.pop()
            out.copy_(answer)

    monkeypatch.setattr(late_work, "time", SimpleNamespace(sleep=waited))
    pair = Pair(reference=lambda x: x + 1, optimized=late, inputs=X, workloads=[Workload("w", n=64)], name="p")
    with pytest.raises(NotEquivalent, match=r"p: the optimized side goes on working after it has returned: its output"):
        measuring.measure(pair, pair.workloads[0], workload_id="w", device="cpu")
    pair = dataclasses.replace(pair, optimized=lambda x: x + 2)
    with pytest.raises(NotEquivalent, match=r"p: output of the optimized side is wrong"):
        measuring.measure(pair, pair.workloads[0], workload_id="w", device="cpu")


def test_l2_that_a_side_sets_aside_during_its_proof_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver is simulated; the side sets L2 aside in its first call, which is a proof."""
    aside = [0]

    def keeps(x: torch.Tensor) -> torch.Tensor:
        aside[0] = 16 << 20
        return x + 1

    driver = SimpleNamespace(
        cuCtxResetPersistingL2Cache=lambda: 0, cuCtxSetLimit=lambda limit, size: aside.__setitem__(0, size.value)
    )
    monkeypatch.setattr(timing_checks, "persisting_l2_bytes", lambda: aside[0])
    monkeypatch.setattr(timing_checks, "_driver", lambda: driver)
    monkeypatch.setattr(tamper, "check", lambda: None)
    pair = Pair(reference=lambda x: x + 1, optimized=keeps, inputs=X, workloads=[Workload("w", n=64)], name="p")
    with pytest.raises(NotEquivalent, match=r"sets 16777216 bytes of L2 aside for persisting lines"):
        measuring.measure(pair, pair.workloads[0], workload_id="w", device="cpu")
    assert aside == [0]


@pytest.mark.parametrize("fails", [False, True])
def test_steps_are_freed_when_their_measurement_ends(time: Time, monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """Garbage collection is not needed: a data loader in a reference cycle would take seconds to end."""
    ended: list[int] = []
    made = itertools.count()

    class Resource:
        def __init__(self) -> None:
            self.number = next(made)

        def __del__(self) -> None:
            ended.append(self.number)

    def build(x: torch.Tensor) -> Call:
        held = Resource()

        def step(y: torch.Tensor) -> torch.Tensor:
            time.spend(FAST_S)
            if fails and time.calls > 40:
                raise PairError("no more")
            return x + y + 0 * held.number

        return step

    steps = pair(time, reference=stateful(build), optimized=stateful(build), step_inputs={"y": tensor("n")})
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(PairError) if fails else nullcontext():
            measure(steps)
        assert sorted(ended) == list(range(next(made)))
    finally:
        gc.enable()


@pytest.mark.parametrize("in_steps", [False, True])
def test_timed_inputs_have_the_precision_that_the_pair_declares(in_steps: bool) -> None:
    """The truth is computed from inputs in that precision; it would differ if the sides got more digits."""

    def double(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    def make() -> Callable[[torch.Tensor], torch.Tensor]:
        return double

    given = {"x": tensor("n", values=floats(-4, 4))}
    of = Pair(
        name="double",
        reference=stateful(make) if in_steps else double,
        optimized=stateful(make) if in_steps else double,
        inputs={} if in_steps else given,
        step_inputs=given if in_steps else {},
        precision="bfloat16",
        gradients=False,
    )
    workload = Workload("few", n=64)
    bench = Bench(pair=of, workload=workload, device="cpu", home=None, seed=1, report=lambda phase: None)
    first = (bench.step_master if in_steps else bench.masters["reference"])["x"]
    new = block_checks.drawn_anew(of, bench.case, "cpu", None, peers.ALONE).values["x"]
    for values in (first, new):
        assert values.dtype == torch.float32
        assert torch.equal(values, values.bfloat16().float())
