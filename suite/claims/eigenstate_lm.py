"""eigenstate_lm's claims, C47 to C60, each with how it is measured. There is no C50 and no C59."""

from __future__ import annotations

import dataclasses
import functools
import gc
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy
import torch
from torch.nn import functional

from perfsuite.errors import PerfsuiteError
from perfsuite.report import units
from suite import ablation
from suite.ablation import Ratio
from suite.backends import tf32_products
from suite.claims.measuring import PASSES, interleaved, peak_bytes, percent, typical
from suite.claims.record import CONFIRMED, DEPENDS, REFUTED, UNMEASURED, Answer, Checks, Measure
from suite.eigenstate_lm.config import TrainConfig
from suite.eigenstate_lm.data import Data, Text, text_of
from suite.eigenstate_lm.model import (
    RANGE,
    SMALLEST,
    VOCABULARY,
    Sizes,
    block_weights,
    driven,
    eigenvalues,
    fed,
    first_states,
    make_weights,
    mixed,
    parameters,
    scanned_by,
)
from suite.packed_text import PackedText
from suite.techniques import implementation

SOURCE = TrainConfig(accumulation=1)
"""The source's network and its batch, once a step."""
STEP, STEP_BEFORE = 0.37, 17.0
"""Seconds of a step, as the source gives them."""
RATE, RATE_BEFORE = 22_089, 50
"""Tokens per second, as the source gives them."""
HOURS, HOURS_BEFORE = 1.7, 92.0
"""Hours of a run, as the source gives them."""
TIMES = 53.9
CACHED = 256
"""Chunks in the source's cache."""
EVERY = 10
"""Steps from one emptying of the cache to the next."""
PREFETCH, PREFETCH_MORE = 2, (4, 8)
CHUNKS = (1, 16, 64, 256)
TOLERANCE = 0.1
"""A measured figure may differ by this share of the claimed one."""
NOTHING = 0.05
"""A gain below this share counts as none."""
QUALITY = 0.01
"""A loss that is higher by more than this share is worse."""
ROUNDING = 1e-5
"""Largest relative error, against float64, that is rounding of float32 sums over thousands of steps."""
EPS = torch.finfo(torch.float32).eps
MB, GB = 1e6, 1e9
PRECISIONS: Mapping[str, Mapping[str, bool]] = {
    "float32": {},
    "TF32": {"tf32": True},
    "bfloat16": {"autocast_bf16": True},
    "float16": {"autocast_fp16": True},
}
TINY = TrainConfig(
    width=64,
    layers=2,
    eigenstates=16,
    sequence_length=64,
    batch_size=4,
    accumulation=2,
    steps=200,
    learning_rate=3e-3,
    dropout=0.0,
    use_compile=False,
)
"""The settings of configs/eigenstate_lm/tiny.yaml, uncompiled: compiling does not pay for kernels as small as these."""
TINY_VOCABULARY = 2048
ENDS = 8
"""Number of last steps whose mean loss is the final loss of a run."""
CHECKS = Checks()


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Device and sizes of the measurements."""

    device: torch.device
    config: TrainConfig = SOURCE
    """Configuration of the timed steps."""
    vocabulary: int = VOCABULARY
    cached: int = CACHED
    """Number of sequences in the text."""
    rounds: int = 4
    reference: tuple[int, int] = (512, 2048)
    """Sequence lengths at which the reference trainer is timed."""
    loop: tuple[int, ...] = (512, 1024, 2048)
    """Sequence lengths at which the recurrence runs step by step, with a gradient."""
    scanned: int = 32768
    """Sequence length of the scan."""
    reach: int = 32768
    """Number of tokens over which a gradient is followed back."""
    rows: int = 131072
    """Rows for which the loss is computed; fewer where these do not fit into memory."""
    trained: TrainConfig = TINY
    """Configuration of the runs whose losses are compared."""
    trained_vocabulary: int = TINY_VOCABULARY
    seeds: int = 3
    workers: int = 4


def setting(device: torch.device) -> Setting:
    """Return the source's size on a GPU, and elsewhere one that takes seconds."""
    if device.type == "cuda":
        return Setting(device=device)
    small = TrainConfig(
        width=16,
        layers=2,
        eigenstates=4,
        sequence_length=32,
        batch_size=2,
        accumulation=1,
        num_workers=1,
        use_compile=False,
    )
    return Setting(
        device=device,
        config=small,
        vocabulary=500,
        cached=16,
        rounds=3,
        reference=(16, 32),
        loop=(64, 128, 256),
        scanned=1024,
        reach=4096,
        rows=1024,
        trained=dataclasses.replace(TINY, width=16, eigenstates=4, sequence_length=16, steps=20),
        trained_vocabulary=60,
        seeds=2,
        workers=1,
    )


class _UncompiledError(RuntimeError):
    """Raised where something to be measured compiled runs uncompiled; the message says why."""


def _alone(measure: Measure) -> Measure:
    """Free unused memory before the measurement; return UNMEASURED where it does not compile or runs out of memory."""

    @functools.wraps(measure)
    def answer(s: Setting) -> Answer:
        _empty()
        try:
            return measure(s)
        except _UncompiledError as error:
            return UNMEASURED, str(error)
        except PerfsuiteError as error:
            if not _too_large(error):
                raise
            return UNMEASURED, str(error)

    return answer


# --- a step ---------------------------------------------------------------------------------------------------------


@CHECKS("C47", "A training step at 32 K tokens takes 370 ms.", gpu=True)
@_alone
def step(s: Setting) -> Answer:
    seconds = {name: median(times) for name, times in _timed(s).items()}
    verdict = _reached(list(seconds.values()))
    config = s.config
    each = _listed([f"{units.seconds(t)} in {name}" for name, t in seconds.items()])
    detail = (
        f"a step of {config.batch_size} sequences of {config.sequence_length:,} tokens takes {each}{_left_out(seconds)}"
        f". The source's own {RATE:,} tokens a second are {RATE * STEP:,.0f} tokens in {units.seconds(STEP)}, and such "
        f"a step has {SOURCE.tokens:,}"
    )
    return verdict, ("on the precision and the device: " if verdict == DEPENDS else "") + detail


@CHECKS("C48", "Without a loop over the tokens training is 53.9 times as fast.", gpu=True)
@_alone
def speedup(s: Setting) -> Answer:
    short, longer = s.reference
    config, length = s.config, s.config.sequence_length
    timed = {name: median(t) for name, t in _timed(s).items() if name in ("float32", "bfloat16")}
    _empty()
    calls = {
        "short": _steps(_trainer(s, optimized=False, length=short)),
        "longer": _steps(_trainer(s, optimized=False, length=longer)),
        "optimized": _steps(_trainer(s, length=longer, use_compile=False)),
    }
    found = {name: median(t) for name, t in interleaved(s.device, min(s.rounds, 2), calls, count=1).items()}
    whole = extrapolated((short, found["short"]), (longer, found["longer"]), length)
    times = [found["longer"] / found["optimized"], *(whole / t for t in timed.values())]
    at_once = _listed(
        [f"{units.seconds(t)} in {name} ({units.significant(whole / t)} times)" for name, t in timed.items()]
    )
    verdict = _meets(times, TIMES)
    detail = (
        f"for {config.batch_size} sequences of {short:,} tokens the reference takes {units.seconds(found['short'])}, "
        f"for {longer:,} {units.seconds(found['longer'])} and, at as much a token more, for {length:,} "
        f"{units.seconds(whole)}. The optimized trainer takes {units.seconds(found['optimized'])} for {longer:,}, "
        f"uncompiled ({units.significant(times[0])} times), and for {length:,} {at_once}. The source's own times of a "
        f"step are {STEP_BEFORE / STEP:.1f} times, its tokens a second {RATE / RATE_BEFORE:.0f}, and its hours "
        f"{HOURS_BEFORE / HOURS:.1f}"
    )
    return verdict, ("on the precision and the length: " if verdict == DEPENDS else "") + detail


# --- the recurrence -------------------------------------------------------------------------------------------------


@CHECKS("C49", "The recurrence is inherently sequential.")
@_alone
def sequential(s: Setting) -> Answer:
    loop = implementation("recurrence.eigenstate_scan", "eigenstate_scan", optimized=False)
    scan = implementation("recurrence.eigenstate_scan", "eigenstate_scan", optimized=True)
    drawn = {length: _drawn(s, length) for length in (*s.loop, s.scanned)}
    looped = {length: functools.partial(_differentiated, loop, *drawn[length]) for length in s.loop}
    at_once = {length: functools.partial(_differentiated, scan, *given) for length, given in drawn.items()}
    slow = {n: median(t) for n, t in interleaved(s.device, min(s.rounds, 3), _named(looped), count=1).items()}
    fast = {n: median(t) for n, t in interleaved(s.device, s.rounds, _named(at_once), count=5).items()}
    last, whole = str(s.loop[-1]), str(s.scanned)
    truths = {length: _truth(*drawn[length]) for length in (s.loop[-1], s.scanned)}
    own = error(looped[s.loop[-1]](), truths[s.loop[-1]])
    errors = {length: error(at_once[length](), truth) for length, truth in truths.items()}
    proportional = slow[last] * s.scanned / s.loop[-1]
    few = str(s.loop[0])
    detail = (
        f"it is an associative scan. Forward and backward, step by step, take {units.seconds(slow[few])} for "
        f"{s.loop[0]:,} tokens, {units.seconds(slow[last])} for {s.loop[-1]:,} and, in proportion, "
        f"{units.seconds(proportional)} for {s.scanned:,}; scanned they take {units.seconds(fast[few])}, "
        f"{units.seconds(fast[last])} and {units.seconds(fast[whole])}, {units.significant(proportional / fast[whole])}"
        f" times less. Of {s.loop[-1]:,} tokens the loop is {own:.1g} away from float64 and the scan "
        f"{errors[s.loop[-1]]:.1g}, and of {s.scanned:,} the scan {errors[s.scanned]:.1g}"
    )
    return _in_turn(max(errors.values()), fast[whole], proportional), detail


@CHECKS("C51", "The chunk size is only a matter of speed.")
@_alone
def chunks(s: Setting) -> Answer:
    chunked = implementation("recurrence.eigenstate_scan", "eigenstate_scan_chunked", optimized=True)
    drawn = _drawn(s, s.scanned)
    calls = {
        size: functools.partial(_differentiated, functools.partial(chunked, chunk=size), *drawn) for size in CHUNKS
    }
    found = interleaved(s.device, s.rounds, _named(calls), count=2)
    seconds = {size: median(found[str(size)]) for size in CHUNKS}
    truth = _truth(*drawn)
    errors = {size: error(call(), truth) for size, call in calls.items()}
    del truth
    peaks = {size: peak_bytes(s.device, call) for size, call in calls.items()}
    rows = _listed([f"{n}: {units.seconds(seconds[n])}, {amount(peaks[n])}, {errors[n]:.1g}" for n in CHUNKS], "; ")
    verdict = _only_speed(list(errors.values()), list(peaks.values()))
    detail = (
        f"the plain form, forward and backward of {s.scanned:,} tokens, by chunk (time, memory at its peak, distance "
        f"from float64): {rows}. The fastest is {min(seconds, key=lambda n: seconds[n])}. The source itself lowers the "
        "chunk size where memory runs out"
    )
    return verdict, (
        "on whether memory counts, for the result stays, but for rounding: " * (verdict == DEPENDS)
    ) + detail


@CHECKS("C52", "The gradient reaches back over the whole context of 32 K tokens.")
@_alone
def reach(s: Setting) -> Answer:
    first, most = _decays(s)
    scanned = [horizon(_influence_of_scan(s, decay)) for decay in (first, most)]
    whole = [horizon(_influence(s, decay)) for decay in (None, most)]
    length = SOURCE.sequence_length
    biggest = float(eigenvalues(first).norm(dim=-1).max())
    least = torch.finfo(torch.float32).smallest_normal * EPS
    layers = s.config.layers
    detail = (
        f"with the λ that training begins with, of a magnitude of {biggest:.3g} at most, a recurrence's gradient is "
        f"below {EPS:.2g} of the newest token's {_after(scanned[0], s.reach)}, and that of the whole network, {layers} "
        f"blocks deep, {_after(whole[0], s.reach)}. With one of {SMALLEST + RANGE:.2f}, which training can only "
        f"come near, it is so {_after(scanned[1], s.reach)} and {_after(whole[1], s.reach)}: {SMALLEST + RANGE:.2f} to "
        f"the {length:,} is 1e{length * math.log10(SMALLEST + RANGE):.0f}, and float32 has nothing between 0 and "
        f"{least:.2g}"
    )
    return _spans(whole, length), detail


# --- memory ---------------------------------------------------------------------------------------------------------


@CHECKS("C53", "Cross-entropy in chunks saves 13 to 26 GB.")
@_alone
def chunked_loss(s: Setting) -> Answer:
    parts, spared = [], []
    fewest = s.rows
    for name, wide in {"in bfloat16": False, "with the loss in float32, as under autocast": True}.items():
        at_once, kept, freed = (_peak_of_loss(s, form, wide) for form in (_whole_loss, _kept_loss, _freed_loss))
        fewest = min(fewest, at_once[1], kept[1], freed[1])
        spared += [(at_once[0] - kept[0]) / GB, (at_once[0] - freed[0]) / GB]
        parts.append(
            f"{name} the peak is {amount(at_once[0])} at once, {amount(kept[0])} in chunks whose logits the backward "
            f"finds ({amount(at_once[0] - kept[0])} less) and {amount(freed[0])} in chunks that leave none "
            f"({amount(at_once[0] - freed[0])} less)"
        )
    verdict = _between(spared, 13, 26)
    logits = SOURCE.tokens * VOCABULARY
    detail = (
        f"logits of {SOURCE.tokens:,} rows take {amount(2 * logits)} in bfloat16 and {amount(4 * logits)} in float32, "
        f"once: {'; '.join(parts)}"
    )
    if fewest != SOURCE.tokens:
        detail += f" (from {fewest:,} rows{'' if s.vocabulary == VOCABULARY else f' of {s.vocabulary:,} logits'})"
    return verdict, ("on what chunks keep, and on the precision of the loss: " * (verdict == DEPENDS)) + detail


@CHECKS("C54", "A cache of 256 chunks of 32 K tokens takes about 4 GB.")
@_alone
def cache(s: Setting) -> Answer:
    pack, length = _pack(s), s.config.sequence_length
    made = [torch.from_numpy(pack.row[n * length : (n + 1) * length].astype(numpy.int64)) for n in range(s.cached)]
    tokens = s.cached * length
    numbers = made[0].tolist()
    a_token = {
        "as int64": sum(t.untyped_storage().nbytes() for t in made) / tokens,
        "in the pack's two bytes each": pack.row.itemsize,
        "as lists of Python's numbers": (sys.getsizeof(numbers) + sum(map(sys.getsizeof, numbers))) / length,
    }
    whole = CACHED * SOURCE.sequence_length
    each = _listed([f"{amount(whole * size)} {how}" for how, size in a_token.items()])
    detail = (
        f"{CACHED} chunks of {SOURCE.sequence_length:,} tokens take {each}. For 4 GB a token would need "
        f"{4 * GB / whole:.0f} bytes"
        f"{'' if tokens == whole else f' (from {s.cached} of {length:,})'}"
    )
    near = [_near(whole * size, 4 * GB) for size in a_token.values()]
    return (CONFIRMED if near[0] else DEPENDS if any(near) else REFUTED), detail


@CHECKS("C55", "A step takes 7.2 GB in all.", gpu=True)
@_alone
def memory(s: Setting) -> Answer:
    peaks = {
        checkpointed: _peak_of_step(s, autocast_bf16=True, activation_checkpoint=checkpointed)
        for checkpointed in (False, True)
    }
    count = parameters(s.config.sizes(s.vocabulary))
    verdict = _fits(list(peaks.values()), 7.2 * GB)
    detail = (
        f"a step of {s.config.batch_size} sequences of {s.config.sequence_length:,} tokens in bfloat16 takes "
        f"{amount(peaks[False])} at its peak, and {amount(peaks[True])} where the linear layers are computed again in "
        f"the backward. Weights, gradients and moments are {amount(16 * count)} of it. Of the source's 7.2 GB four are "
        "the loader's cache, which is the host's, and its 2 GB of activations are "
        f"{2 * GB / (2 * SOURCE.tokens * SOURCE.width):.2g} arrays of [tokens, width] in half precision, for "
        f"{SOURCE.layers} blocks"
    )
    return verdict, ("on what is computed again: " * (verdict == DEPENDS)) + detail


@CHECKS("C56", "The optimizer's state takes 720 MB.")
@_alone
def optimizer_state(s: Setting) -> Answer:
    trainer = _trainer(s)
    state = trainer.optimizer.state_dict()
    size = sum(t.numel() * t.element_size() for name in ("first", "second") for t in state[name])
    count = sum(w.numel() for w in trainer.weights.values())
    source = parameters(SOURCE.sizes())
    whole = size / count * source
    detail = (
        f"AdamW's two moments have {size / count:g} bytes a parameter: of {source:,} that is {amount(whole)}, and half "
        f"as much in half precision. 720 MB are {720 * MB / source:.2f} bytes a parameter"
        f"{'' if count == source else f' (from {count:,} parameters)'}"
    )
    return (CONFIRMED if _near(whole, 720 * MB) else REFUTED), detail


@CHECKS("C57", "Emptying the allocator's cache every 10 steps helps.", gpu=True)
@_alone
def emptying(s: Setting) -> Answer:
    go_on = _steps(_trainer(s, autocast_bf16=True, adaptive_cleanup=False))
    for _ in range(3):
        _compiled(go_on)
    before = _reserved(s.device)
    used = peak_bytes(s.device, lambda: [go_on() for _ in range(EVERY)]) + _allocated(s.device)
    after = _reserved(s.device)

    def emptied() -> None:
        torch.cuda.empty_cache()
        go_on()

    found = interleaved(s.device, s.rounds, {"kept": go_on, "emptied": emptied}, count=1)
    never = [EVERY * t for t in found["kept"]]
    every = [(EVERY - 1) * t + more for t, more in zip(found["kept"], found["emptied"], strict=True)]
    longer = ablation.paired(every, never)
    low, high = 100 * (longer.low - 1), 100 * (longer.high - 1)
    detail = (
        f"a step takes {typical(found['kept'])}, and {typical(found['emptied'])} where the cache is emptied before it: "
        f"{EVERY} steps take {percent(low, high)} longer. Without it the allocator holds {amount(before)} after 3 "
        f"steps and {amount(after)} after {3 + EVERY}, of which they use {amount(used)} at the peak; what is returned "
        "the next step takes again"
    )
    return _helps(low, high, after / before - 1 if before else 0.0), detail


# --- the loader, and the precision ----------------------------------------------------------------------------------


@CHECKS("C58", "Loading is faster with 4 to 8 batches prefetched by each worker than with 2.")
@_alone
def prefetch(s: Setting) -> Answer:
    length, count = s.config.sequence_length, s.config.batch_size
    packed = implementation("data.packed_tokens", "PackedTokens", optimized=True)(_pack(s).path, length)
    make = functools.partial(
        implementation("data.loader", "Loader", optimized=True), packed, count, workers=s.workers, drop_last=True
    )
    loaders = {str(ahead): make(prefetch=ahead) for ahead in (PREFETCH, *PREFETCH_MORE)}
    batches = len(loaders[str(PREFETCH)])

    def epoch(loader: Any) -> None:
        for _ in loader.epoch(0):
            pass

    def gathered() -> None:
        for rows in torch.arange(batches * count).view(batches, count):
            packed.batch(rows)

    calls: dict[str, Callable[[], object]] = {n: functools.partial(epoch, loader) for n, loader in loaders.items()}
    calls["here"] = gathered
    found: dict[str, list[float]] = {name: [] for name in calls}
    try:
        for _ in range(PASSES):
            for name, times in interleaved(torch.device("cpu"), 2 * s.rounds, calls, count=1).items():
                found[name] += [t / batches for t in times]
            few = found[str(PREFETCH)]
            gains = [ablation.paired(few, found[str(ahead)]) for ahead in PREFETCH_MORE]
            verdict = _loads_faster(gains, median(few))
            if verdict != UNMEASURED:
                break
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        return UNMEASURED, " ".join(str(error).split())  # mostly for lack of shared memory
    finally:
        for loader in loaders.values():
            loader.close()
    each = _listed([f"{typical(found[name])} with {name}" for name in loaders])
    ratios = _listed([_times(r) for r in gains])
    more = _listed([str(ahead) for ahead in PREFETCH_MORE])
    detail = (
        f"a batch of {count} sequences of {length:,} tokens comes from {s.workers} worker{'s' * (s.workers != 1)}, "
        f"when nothing else is done, every {each}: {more} are {ratios}. Gathered in the process itself it takes "
        f"{typical(found['here'])}; of the source's {units.seconds(STEP)} a step the slowest of these is "
        f"{units.percent(max(median(t) for t in found.values()) / STEP)}"
    )
    if verdict == UNMEASURED:
        return verdict, f"{detail}. That may as well be nothing: too noisy to tell"
    return verdict, ("on whether a step waits for its batch: " * (verdict == DEPENDS)) + detail


@CHECKS("C60", "float16 makes training twice as fast, with no loss of quality.", gpu=True)
@_alone
def half(s: Setting) -> Answer:
    seconds = _timed(s)
    low = seconds.get("float16")
    ratios = {
        name: ablation.paired(seconds[name], low) for name in ("float32", "TF32") if low is not None and name in seconds
    }
    _empty()
    ends, left_out = _ends(s)
    lost = [b / a - 1 for a, b in ends]
    verdict = _twice(list(ratios.values()), lost)
    bfloat16 = f", bfloat16 {typical(seconds['bfloat16'])}" if "bfloat16" in seconds else ""
    each = _listed([f"{name}'s {typical(seconds[name])}, {_times(r)}" for name, r in ratios.items()])
    run = s.trained
    detail = (
        f"a step of {s.config.tokens:,} tokens takes {typical(low)} in float16 against {each}{bfloat16}"
        if low is not None and ratios
        else "a step did not fit in two precisions"
    )
    detail += (
        f". A network of width {run.width} ends after {run.steps} steps at {_listed([f'{a:.4f}' for a, _ in ends])} in "
        f"float32 by seed, and in float16 {100 * min(lost):+.2g}% to {100 * max(lost):+.2g}% higher, with "
        f"{left_out} steps left out in all for the scale of the loss"
    )
    return verdict, ("on what float32's products are: " * (verdict == DEPENDS)) + detail


# --- verdicts -------------------------------------------------------------------------------------------------------


def extrapolated(short: tuple[int, float], longer: tuple[int, float], length: int) -> float:
    """Extrapolate linearly from two pairs (length, seconds) to the seconds at `length`."""
    slope = (longer[1] - short[1]) / (longer[0] - short[0])
    return longer[1] + slope * (length - longer[0])


def error(found: Sequence[torch.Tensor], truth: Sequence[torch.Tensor]) -> float:
    """Return the largest relative error of a tensor: the norm of its difference over the true tensor's norm."""
    return max(float((a.double() - b).norm() / b.norm()) for a, b in zip(found, truth, strict=True))


def horizon(influence: torch.Tensor) -> int | None:
    """Return the distance in tokens from which an influence [distance] stays below float32's epsilon times the first.

    None where it does not.
    """
    there = (influence.double() >= EPS * influence[0].double()).nonzero()
    after = int(there[-1]) + 1 if len(there) else 0
    return after if after < len(influence) else None


def _reached(seconds: Sequence[float]) -> str:
    """Return the verdict on whether the steps take no longer than the source's."""
    within = [t <= (1 + TOLERANCE) * STEP for t in seconds]
    return CONFIRMED if within and all(within) else DEPENDS if any(within) else REFUTED


def _meets(found: Sequence[float], claimed: float) -> str:
    """Return the verdict on whether all figures are the claimed one: DEPENDS where only their range includes it."""
    if all(_near(f, claimed) for f in found):
        return CONFIRMED
    return DEPENDS if min(found) <= (1 + TOLERANCE) * claimed and max(found) >= (1 - TOLERANCE) * claimed else REFUTED


def _in_turn(furthest: float, scan: float, loop: float) -> str:
    """Return the verdict on whether the steps must run one after another.

    It is REFUTED where a scan has the same results, but for rounding, in less than half the time.
    """
    if furthest > ROUNDING:
        return CONFIRMED
    return REFUTED if 2 * scan < loop else UNMEASURED


def _only_speed(errors: Sequence[float], peaks: Sequence[float]) -> str:
    if max(errors) > ROUNDING:
        return REFUTED
    return DEPENDS if max(peaks) > (1 + TOLERANCE) * min(peaks) else CONFIRMED


def _spans(horizons: Sequence[int | None], length: int) -> str:
    """Return the verdict from the horizons for the first λ and for the largest; None counts as `length`."""
    first, most = (length if h is None else h for h in horizons)
    return CONFIRMED if first >= length else DEPENDS if most >= length else REFUTED


def _between(found: Sequence[float], least: float, most: float) -> str:
    least, most = (1 - TOLERANCE) * least, (1 + TOLERANCE) * most
    if max(found) < least:
        return REFUTED
    return CONFIRMED if all(least <= f <= most for f in found) else DEPENDS


def _fits(peaks: Sequence[float], claimed: float) -> str:
    """Return the verdict on whether the peaks are at most what is claimed."""
    enough = [p <= (1 + TOLERANCE) * claimed for p in peaks]
    return CONFIRMED if all(enough) else DEPENDS if any(enough) else REFUTED


def _helps(low: float, high: float, growth: float) -> str:
    """Return the verdict on whether emptying the cache helps.

    low, high  interval of the percent that steps take longer with it
    growth     share by which the reserved memory grows in some steps without it
    """
    if high < 0:
        return CONFIRMED
    if growth > TOLERANCE:
        return DEPENDS
    return REFUTED if low > -1 else UNMEASURED


def _loads_faster(gains: Sequence[Ratio], batch: float) -> str:
    """Return the verdict on whether loading is faster with more prefetched batches.

    gains  how many times as fast it is with more
    batch  seconds of a batch with few; a step waits for its batch only if this is longer than the step
    """
    faster = [r.low > 1 for r in gains]
    if not any(faster):
        return UNMEASURED if any(r.high >= 1 + NOTHING for r in gains) else REFUTED
    return CONFIRMED if all(faster) and batch > STEP else DEPENDS


def _twice(ratios: Sequence[Ratio], lost: Sequence[float]) -> str:
    if max(lost) > QUALITY:
        return REFUTED
    if not ratios:
        return UNMEASURED
    least, most = (1 - TOLERANCE) * 2, (1 + TOLERANCE) * 2
    if all(r.low <= most and r.high >= least for r in ratios):
        return CONFIRMED
    return DEPENDS if min(r.low for r in ratios) <= most and max(r.high for r in ratios) >= least else REFUTED


def _near(found: float, claimed: float) -> bool:
    return abs(found - claimed) <= TOLERANCE * claimed


# --- helpers --------------------------------------------------------------------------------------------------------


def _pack(s: Setting) -> PackedText:
    """Return a pack of random tokens."""
    given = Data(synthetic=s.cached, vocabulary=s.vocabulary, sequence_length=s.config.sequence_length)
    return text_of(given).pack


def _trainer(s: Setting, *, optimized: bool = True, length: int | None = None, **on: Any) -> Any:
    config = dataclasses.replace(s.config, sequence_length=length or s.config.sequence_length, **on)
    make = implementation("trainers.eigenstate_lm", "Trainer", optimized=optimized)
    return make(config, Text(_pack(s), config.sequence_length), s.device)


def _steps(trainer: Any) -> Callable[[], None]:
    return functools.partial(trainer.train_window, {})


def _compiled(call: Callable[[], object]) -> None:
    """Make a call that may compile something; raise _UncompiledError where that fails."""
    notes: list[str] = []
    with ablation.noting(notes):
        call()
    for note in notes:
        if "runs uncompiled" in note:
            raise _UncompiledError(note)


@functools.cache
def _timed(s: Setting) -> Mapping[str, list[float]]:
    """Return the seconds of a step by round, for each precision that fits into the device's memory."""
    calls = {}
    for name, on in PRECISIONS.items():
        trainer = _trainer(s, **on)
        try:
            _compiled(_steps(trainer))
        except PerfsuiteError as error:
            if not _too_large(error):
                raise
        else:
            calls[name] = _steps(trainer)
        del trainer
        _empty()
    if not calls:
        raise PerfsuiteError("out of memory: a step fits in no precision")
    return interleaved(s.device, s.rounds, calls, count=1)


def _drawn(s: Setting, length: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return ([β, λ, first states] of a block, gradients of its results), the same at each call."""
    generator = torch.Generator().manual_seed(0)
    B, K = s.config.batch_size, s.config.cells * s.config.eigenstates
    turning = eigenvalues(_decays(s)[0][0]).flatten(0, 1)
    given = [torch.randn(B, length, K, generator=generator), turning, torch.zeros(B, K, 2)]
    grads = [torch.randn(B, length, K, generator=generator), torch.randn(B, K, 2, generator=generator)]
    return [t.to(s.device) for t in given], [t.to(s.device) for t in grads]


def _differentiated(
    scan: Callable[..., Any], given: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Return the scan's results and the gradients by all its inputs."""
    leaves = [t.detach().requires_grad_() for t in given]
    found = scan(*leaves)
    return [*(t.detach() for t in found), *torch.autograd.grad(found, leaves, grads)]


def _truth(given: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return results and gradients computed in float64."""
    chunked = implementation("recurrence.eigenstate_scan", "eigenstate_scan_chunked", optimized=True)
    return _differentiated(chunked, [t.double() for t in given], [t.double() for t in grads])


def _named(calls: Mapping[int, Callable[[], object]]) -> dict[str, Callable[[], object]]:
    return {str(number): call for number, call in calls.items()}


def _decays(s: Setting) -> tuple[torch.Tensor, torch.Tensor]:
    """Return α [layers, cells, K] on the CPU: as at the start of training, and with the largest possible |λ|."""
    config = s.config
    sizes = Sizes(vocabulary=1, width=1, layers=config.layers, eigenstates=config.eigenstates, cells=config.cells)
    weights = make_weights(0, sizes)
    first = torch.stack([weights[f"{layer}.decay"] for layer in range(config.layers)])
    return first, torch.full_like(first, 100.0)


def _influence_of_scan(s: Setting, decay: torch.Tensor) -> torch.Tensor:
    """Return [distance]: the largest |dRe(c_last)/dβ| of all eigenstates, for a β so many tokens back."""
    scan = implementation("recurrence.eigenstate_scan", "eigenstate_scan", optimized=True)
    turning = eigenvalues(decay).flatten(0, -2).to(s.device)
    beta = torch.zeros(1, s.reach, len(turning), device=s.device, requires_grad=True)
    every, _ = scan(beta, turning, torch.zeros(1, len(turning), 2, device=s.device))
    (found,) = torch.autograd.grad(every[0, -1].sum(), beta)
    return found[0].abs().amax(-1).flip(0)


def _influence(s: Setting, decay: torch.Tensor | None) -> torch.Tensor:
    """Return [distance]: the norm of the gradient of the network's last output by its input so many tokens back."""
    config = s.config
    sizes = config.sizes(vocabulary=1)
    first = make_weights(0, sizes)
    if decay is not None:
        first |= {f"{layer}.decay": alpha for layer, alpha in enumerate(decay)}
    weights = {name: w.to(s.device) for name, w in first.items()}
    scan = implementation("recurrence.eigenstate_scan", "eigenstate_scan", optimized=True)
    project = implementation("recurrence.fused_output_projection", "fused_output_projection", optimized=False)
    generator = torch.Generator().manual_seed(0)
    given = (0.02 * torch.randn(1, s.reach, config.width, generator=generator)).to(s.device).requires_grad_()
    along = torch.randn(config.width, generator=generator).to(s.device)
    x = given
    with tf32_products(allowed=False):
        for layer, state in enumerate(first_states(sizes, 1, s.device)):
            own = block_weights(weights, layer)
            real, _ = scan(driven(own, x), scanned_by(own), state)
            x = fed(own, mixed(own, x, real, project, _undropped), _undropped)
        (found,) = torch.autograd.grad((x[0, -1] * along).sum(), given)
    norms: torch.Tensor = found[0].double().norm(dim=-1)
    return norms.flip(0)


def _undropped(x: torch.Tensor) -> torch.Tensor:
    return x


def _whole_loss(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = implementation("losses.chunked_cross_entropy", "chunked_cross_entropy", optimized=False)(
        hidden, weight, labels
    )
    return found


def _kept_loss(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Compute the loss in the chunks of `_freed_loss`, but let each keep its logits for the backward."""
    parts = [slice(start, start + _rows(hidden)) for start in range(0, len(hidden), _rows(hidden))]
    losses = [functional.cross_entropy(functional.linear(hidden[p], weight), labels[p], reduction="sum") for p in parts]
    return torch.stack(losses).sum() / len(hidden)


def _freed_loss(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = implementation("losses.chunked_cross_entropy", "chunked_cross_entropy", optimized=True)(
        hidden, weight, labels, rows=_rows(hidden)
    )
    return found


def _rows(hidden: torch.Tensor) -> int:
    """Return the rows of a chunk, 1/32 of all: for the source's batch, the 4096 that the optimized loss takes."""
    return max(1, len(hidden) // 32)


def _peak_of_loss(s: Setting, form: Callable[..., torch.Tensor], wide: bool) -> tuple[float, int]:
    """Return (peak bytes of forward and backward, scaled to the source's batch; rows that were measured).

    The rows are halved until they fit into memory.
    """
    rows = s.rows
    while (found := _peak_of_rows(s, form, wide, rows)) is None:
        rows //= 2
        _empty()
        if not rows:
            raise torch.OutOfMemoryError("out of memory: not even the loss of a row fits")
    return found * SOURCE.tokens * VOCABULARY / (rows * s.vocabulary), rows


def _peak_of_rows(s: Setting, form: Callable[..., torch.Tensor], wide: bool, rows: int) -> int | None:
    """Return the peak bytes of this many rows; None where they do not fit into memory."""
    dtype = torch.float32 if wide else torch.bfloat16
    try:
        hidden, weight = (
            torch.randn(count, s.config.width, device=s.device).to(dtype).requires_grad_()
            for count in (rows, s.vocabulary)
        )
        labels = torch.randint(s.vocabulary, (rows,), device=s.device)

        def call() -> None:
            with torch.autocast(s.device.type, torch.bfloat16, enabled=wide):
                loss = form(hidden, weight, labels)
            torch.autograd.grad(loss, (hidden, weight))

        return peak_bytes(s.device, call, [hidden, weight, labels])
    except torch.OutOfMemoryError:
        return None


def _peak_of_step(s: Setting, **on: bool) -> int:
    """Return the peak bytes of a trainer and one of its steps."""

    def call() -> None:
        trainer = _trainer(s, **on)
        _compiled(_steps(trainer))
        if s.device.type == "cuda":  # exclude the memory that compiling took
            torch.cuda.synchronize(s.device)
            torch.cuda.reset_peak_memory_stats(s.device)
        trainer.train_window({})

    found = peak_bytes(s.device, call)
    _empty()
    return found


def _ends(s: Setting) -> tuple[list[tuple[float, float]], int]:
    """Return ([(final loss in float32, in float16) by seed], number of steps whose gradient's norm was not finite)."""
    given = text_of(Data(synthetic=200, vocabulary=s.trained_vocabulary, sequence_length=s.trained.sequence_length))
    make = implementation("trainers.eigenstate_lm", "Trainer", optimized=True)
    found, left_out = [], 0
    for seed in range(s.seeds):
        ends = []
        for low in (False, True):
            trainer = make(dataclasses.replace(s.trained, seed=seed, autocast_fp16=low), given, s.device)
            reports = []
            for _ in range(s.trained.steps):
                trainer.train_window({})
                reports.append(trainer.last_report())
            left_out += sum(not math.isfinite(r.norm) for r in reports)
            ends.append(sum(r.loss for r in reports[-ENDS:]) / ENDS)
        found.append((ends[0], ends[1]))
    return found, left_out


def _empty() -> None:
    """Free all unused memory, also that of trainers that are gone: they are reference cycles."""
    gc.collect()
    torch.cuda.empty_cache()


def _too_large(error: PerfsuiteError) -> bool:
    return str(error).startswith("out of memory")


def _reserved(device: torch.device) -> int:
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def amount(size: float) -> str:
    """Format bytes in decimal units, MB or GB, as the source does."""
    return f"{units.significant(size / GB)} GB" if size >= GB else f"{units.significant(size / MB)} MB"


def _after(found: int | None, looked: int) -> str:
    return f"after {found:,} tokens" if found is not None else f"nowhere within {looked:,} tokens"


def _left_out(found: Mapping[str, object]) -> str:
    missing = [name for name in PRECISIONS if name not in found]
    return f"; in {_listed(missing)} it does not fit" if missing else ""


def _times(r: Ratio) -> str:
    return f"{r.value:.3g} times as fast ({r.low:.3g} to {r.high:.3g})"


def _listed(parts: Sequence[str], between: str = ", ") -> str:
    """Join the parts; between commas, the last one is joined by "and"."""
    if between != ", " or len(parts) < 2:
        return between.join(parts)
    return f"{', '.join(parts[:-1])} and {parts[-1]}"
