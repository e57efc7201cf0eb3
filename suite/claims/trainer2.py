"""Claims C1 to C12 of trainer2, each with its measurement."""

from __future__ import annotations

import dataclasses
import functools
import gc
import math
import time
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from suite import ablation
from suite.ablation import Arm, Timed
from suite.ablation import typical as typical_window
from suite.claims.measuring import counts, interleaved, percent, saved, typical, within
from suite.claims.record import CONFIRMED, DEPENDS, REFUTED, UNMEASURED, Answer, Checks
from suite.techniques import implementation
from suite.trainer2.config import TECHNIQUES, TrainConfig, short_windows

FLOAT32 = tuple(t for t in TECHNIQUES if t != "autocast_bf16")
GRAPHS, BATCHING = "use_cudagraphs", "metric_batching"
CURVE_WINDOWS = 200
CHECKS = Checks()


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Device and sizes of the measurements. `techniques` are those that count as all techniques."""

    device: torch.device
    config: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    techniques: tuple[str, ...] = FLOAT32
    rounds: int = 7
    curve_windows: int = CURVE_WINDOWS


def setting(device: torch.device) -> Setting:
    """Return the trainer's own size on a GPU, and elsewhere a small one: claims about a GPU are not measured there."""
    if device.type == "cuda":
        return Setting(device=device)
    small = TrainConfig(batch_size=2, sequence_length=8, blocks=1, lattice=3, memory_slots=16, window=2)
    techniques = tuple(t for t in FLOAT32 if t != "compiled_function")
    return Setting(device=device, config=small, techniques=techniques, rounds=3)


# --- on the host and in the driver ----------------------------------------------------------------------------------


@CHECKS("C1", "The optimised rotor update has no host sync.", gpu=True)
def rotor_syncs(s: Setting) -> Answer:
    n, k = s.config.coordinates, s.config.rotor_k
    index = implementation("geometry.rotor_apply", "rotor_index", optimized=False)(n, k).to(s.device)
    theta, velocity = torch.zeros(k, device=s.device), torch.ones(n, device=s.device)
    loss_delta = torch.ones((), device=s.device)
    plain, fast = (
        counts(
            functools.partial(
                implementation("geometry.rotor_update", "rotor_update", optimized=optimized),
                theta,
                velocity,
                index,
                loss_delta,
                s.config.eta,
            )
        )[0]
        for optimized in (False, True)
    )
    detail = f"an update of {k} angles: {plain} syncs in the reference, {fast} in the optimized one"
    return (CONFIRMED if fast == 0 else REFUTED), detail


@CHECKS("C2", "Batching the metrics removes 10 to 15 syncs a window.", gpu=True)
def batching(s: Setting) -> Answer:
    metrics = [torch.ones((), device=s.device) for _ in range(3)]
    plain, fast = (
        counts(
            functools.partial(
                implementation("synchronization.metric_batching", "metric_batching", optimized=optimized), *metrics, 1
            )
        )[0]
        for optimized in (False, True)
    )
    one, none = (_window(s)[name].host_syncs or 0 for name in ("one at a time", "without graphs"))
    detail = (
        f"on how often progress is reported: without batching a report takes {plain} syncs, with it {fast}, so that 10 "
        "to "
        f"15 fewer syncs a window need {math.ceil(10 / max(plain - fast, 1))} reports or more. Without reports a "
        "window "
        f"has {one} syncs without batching and {none} with it"
    )
    return (DEPENDS if plain > fast else REFUTED), detail


@CHECKS("C3", "Scripting the softmax weights and the mix gives 1 to 2%.", gpu=True)
def scripting(s: Setting) -> Answer:
    c = s.config
    K = c.sequence_length + c.memory_slots
    cost = torch.rand(c.batch_size, K, device=s.device)
    states = torch.rand(c.batch_size, K, c.width, device=s.device)
    eager = implementation("compilation.compiled_function", "compiled_function", optimized=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.script(eager)
    compiled = implementation("compilation.compiled_function", "compiled_function", optimized=True)
    found = interleaved(
        s.device,
        s.rounds,
        {n: functools.partial(f, cost, states, c.beta) for n, f in (("e", eager), ("s", scripted), ("c", compiled))},
    )
    window = median(_window(s)[ablation.REFERENCE].seconds)
    share = [100 * 2 * c.window * (e - t) / window for e, t in zip(found["e"], found["s"], strict=True)]
    middle, half = ablation.mean(share)
    low, high = middle - half, middle + half
    detail = (
        f"{typical(found['e'])} eager, {typical(found['s'])} scripted, {typical(found['c'])} compiled: scripting saves "
        f"{percent(low, high)} of a window of the reference"
    )
    return within(low, high, 1, 2, detail)


@CHECKS("C4", "Where allocated/reserved is above 0.9, emptying the cache helps.", gpu=True)
def full_cache(s: Setting) -> Answer:
    parts = []
    for kept in (15, 8):  # of sixteen blocks
        _empty()
        blocks = _blocks(s.device, 16)
        del blocks[kept:]
        ratio = torch.cuda.memory_allocated(s.device) / torch.cuda.memory_reserved(s.device)
        before = torch.cuda.memory_reserved(s.device)
        torch.cuda.empty_cache()
        parts.append((ratio, (before - torch.cuda.memory_reserved(s.device)) / before))
        del blocks
    (full, little), (half, much) = parts
    detail = (
        f"at a ratio of {full:.2f} emptying the cache frees {little:.0%} of the reserved memory, at {half:.2f} "
        f"{much:.0%}. Only memory that is not allocated can be freed, so the condition should be the opposite"
    )
    return (REFUTED if little < much else CONFIRMED), detail


@CHECKS("C5", "Emptying the cache stalls for 10 to 100 ms.", gpu=True)
def stall(s: Setting) -> Answer:
    times: dict[int, list[float]] = {}
    for _ in range(s.rounds):
        for count in (16, 256):
            _empty()  # also frees what the other count has left
            blocks = _blocks(s.device, count)
            torch.cuda.synchronize(s.device)
            blocks.clear()
            began = time.perf_counter()
            torch.cuda.empty_cache()
            emptied = time.perf_counter()
            _blocks(s.device, count)  # the time that the next window needs to allocate it again
            torch.cuda.synchronize(s.device)
            times.setdefault(count, []).append(1e3 * (emptied - began))
            times.setdefault(-count, []).append(1e3 * (time.perf_counter() - emptied))
    torch.cuda.empty_cache()
    few, many = times[16], times[256]
    detail = (
        f"on how much is cached: 16 blocks of 64 MiB take {median(few):.1f} ms to free and "
        f"{median(times[-16]):.1f} ms to allocate again, 256 blocks take {median(many):.1f} and "
        f"{median(times[-256]):.1f} ms"
    )
    inside = [10 <= median(t) <= 100 for t in (few, many)]
    across = median(few) < 10 and median(many) > 100
    return (CONFIRMED if all(inside) else DEPENDS if any(inside) or across else REFUTED), detail


@CHECKS("C6", "CUDA graphs give 15 to 25%.", gpu=True)
def graphs(s: Setting) -> Answer:
    timed = _window(s)
    without, with_them = timed["without graphs"], timed[ablation.ALL]
    if why := _refused(with_them.notes):
        return UNMEASURED, why
    low, high = saved(ablation.paired(without.seconds, with_them.seconds))
    detail = (
        f"with all other techniques on, a window takes {typical_window(without)} without and "
        f"{typical_window(with_them)} with them: {percent(low, high)} less, and {without.launches} launches become "
        f"{with_them.launches}"
    )
    return within(low, high, 15, 25, detail)


@CHECKS("C7", "A launch costs about 7 µs, in a graph less than 1 µs.", gpu=True)
def launches(s: Setting) -> Answer:
    x, count = torch.zeros(1, device=s.device), 1000

    def many() -> None:
        for _ in range(count):
            x.add_(1)

    many()
    torch.cuda.synchronize(s.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        many()
    found = interleaved(s.device, s.rounds, {"eager": many, "graph": graph.replay}, count=1)
    return launch_verdict(*(1e6 * median(found[name]) / count for name in ("eager", "graph")))


@CHECKS("C8", "All that is implemented adds up to 10 to 15%.", gpu=True)
def together(s: Setting) -> Answer:
    timed = _window(s)
    if why := _refused(timed[ablation.ALL].notes):
        return UNMEASURED, why
    parts = timed["without graphs"]
    share = saved(ablation.paired(timed[ablation.REFERENCE].seconds, parts.seconds))
    times = ablation.paired(timed[ablation.REFERENCE].seconds, timed[ablation.ALL].seconds)
    detail = (
        f"a window of the reference takes {typical_window(timed[ablation.REFERENCE])}. With all techniques except CUDA "
        f"graphs it takes {typical_window(parts)}, {percent(*share)} less; with CUDA graphs, too, "
        f"{typical_window(timed[ablation.ALL])}, {times.value:.3g} times as fast ({times.low:.3g} to "
        f"{times.high:.3g}). "
        "The rows of the source's own table add up to 9 to 16%"
    )
    return within(*share, 10, 15, detail)


def launch_verdict(eager: float, replayed: float) -> Answer:
    """Return the verdict from the µs of an eager launch and of a graph node."""
    detail = (
        f"an in-place addition to one element takes {eager:.2f} µs eagerly, and {replayed:.2f} µs as a node of a graph"
    )
    launched, cheap = 5 <= eager <= 9, replayed < 1
    if launched == cheap:
        return (CONFIRMED if cheap else REFUTED), detail
    right, wrong = ("a launch", "a node of a graph") if launched else ("a node of a graph", "a launch")
    return DEPENDS, f"on which of the two: {right} takes what is claimed, {wrong} does not. {detail}"


# --- of the functions themselves ------------------------------------------------------------------------------------


@CHECKS("C9", "Adding up velocities in place is the same function.")
def in_place(s: Setting) -> Answer:
    generator = torch.Generator().manual_seed(0)
    draws = 100
    for _ in range(draws):
        steps = int(torch.randint(1, 65, (), generator=generator))
        velocities = (10 * torch.randn(steps, 16, s.config.coordinates, generator=generator)).to(s.device)
        plain, fast = (
            implementation("geometry.velocity_accumulation", "velocity_accumulation", optimized=optimized)(
                torch.zeros_like(velocities[0])
            )(velocities)
            for optimized in (False, True)
        )
        if not torch.equal(plain, fast):
            return REFUTED, f"not bit for bit: {steps} steps differ by {(plain - fast).abs().max():.3g}"
    return CONFIRMED, f"bit for bit, in {draws} draws of up to 64 steps"


@CHECKS("C10", "exp(lior) is a perplexity.")
def perplexity(s: Setting) -> Answer:
    lior_and_speed = implementation("geometry.lior_and_speed", "lior_and_speed", optimized=False)
    generator = torch.Generator().manual_seed(0)
    velocity = torch.randn(16, s.config.coordinates, generator=generator)
    curvature = torch.rand(16, generator=generator)
    diagonal = torch.ones(s.config.coordinates)
    one, four = (
        float(lior_and_speed(velocity, curvature, None, scale * diagonal, s.config.eps)[0].mean().exp())
        for scale in (1.0, 4.0)
    )
    detail = (
        f"lior does not depend on the likelihood of any token: with a metric four times as large, exp(lior) changes "
        f"from {one:.3g} to {four:.3g}, and no prediction changes"
    )
    return (REFUTED if four > 1.01 * one else CONFIRMED), detail


@CHECKS("C11", "The metric's update has the same sign in its docstring and in its code.")
def sign(s: Setting) -> Answer:
    update = implementation("geometry.metric_update", "metric_update", optimized=False)
    metric = torch.ones(s.config.coordinates)
    update(metric, torch.ones(s.config.coordinates), torch.tensor(1e-3), s.config.eta)
    grows = bool((metric > 1).all())
    detail = (
        "the source's document contains neither the docstring nor the code. Docstring and code of this repository "
        "agree: "
        f"if the nudge raised lior, g {'grows' if grows else 'shrinks'} along the velocity (1 becomes {metric[0]:.4f})"
    )
    return UNMEASURED, detail


@CHECKS("C12", "Loss curves agree within 1e-4 with and without graphs.", gpu=True)
def curves(s: Setting) -> Answer:
    batches = ablation.random_batches(s.config, s.device)
    given = [next(batches) for _ in range(s.curve_windows)]
    found = []
    notes: list[str] = []
    for on in (False, True):
        trainer = _trainer(s, tuple(t for t in s.techniques if on or t != GRAPHS))
        losses = []
        with ablation.noting(notes):
            for batch in given:
                trainer.train_window(batch)
                losses.append(trainer.last_metrics()["loss"])
        found.append(torch.tensor(losses, dtype=torch.float64))
    if why := _refused(notes):
        return UNMEASURED, why
    furthest = float((found[0] - found[1]).abs().max())
    detail = (
        f"over {s.curve_windows} windows they differ by {furthest:.2g} at most; the mean loss is {found[0].mean():.3g}"
    )
    return (CONFIRMED if furthest <= 1e-4 else REFUTED), detail


# --- helpers --------------------------------------------------------------------------------------------------------


def _trainer(s: Setting, on: tuple[str, ...] | None) -> Any:
    switches = {t: on is not None and t in on for t in TECHNIQUES}
    make = implementation("trainers.trainer2", "Trainer", optimized=on is not None)
    return make(dataclasses.replace(s.config, **switches), ablation.VOCABULARY, s.device)


@functools.cache
def _window(s: Setting) -> Mapping[str, Timed]:
    """Time a window of four arms.

    The arms are the reference, all techniques, all without CUDA graphs, and all without CUDA graphs and metric
    batching.
    """
    eager = tuple(t for t in s.techniques if t != GRAPHS)
    chosen = [
        Arm(name=ablation.REFERENCE, on=None),
        Arm(name=ablation.ALL, on=s.techniques),
        Arm(name="without graphs", on=eager),
        Arm(name="one at a time", on=tuple(t for t in eager if t != BATCHING)),
    ]
    batches = ablation.random_batches(s.config, s.device)
    timed = ablation.measure(
        lambda arm: _trainer(s, arm.on),
        chosen,
        batches,
        device=s.device,
        rounds=s.rounds,
        windows=1,
        short=short_windows,
    )
    return {arm.name: arm for arm in timed}


def _empty() -> None:
    """Free all unused memory, including that of unused trainers, which are in reference cycles."""
    gc.collect()
    torch.cuda.empty_cache()


def _blocks(device: torch.device, count: int) -> list[torch.Tensor]:
    """Allocate blocks of 64 MiB, each with memory of its own."""
    return [torch.empty(1 << 26, dtype=torch.uint8, device=device) for _ in range(count)]


def _refused(notes: Iterable[str]) -> str | None:
    """Return why a requested CUDA graph was not captured; None if it was."""
    return next((note for note in notes if note.startswith("cuda_graph_step runs eagerly")), None)
