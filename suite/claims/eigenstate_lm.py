"""Claims C47 to C60 of eigenstate_lm, each with its measurement. C50 and C59 do not exist."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import numpy
import torch

from perfsuite.errors import PerfsuiteError
from perfsuite.report import units
from suite import ablation
from suite.claims import eigenstate_lm_measured as measured
from suite.claims import eigenstate_lm_verdicts as verdicts
from suite.claims import words
from suite.claims.eigenstate_lm_setting import (
    CACHED,
    CHUNKS,
    EPS,
    EVERY,
    GB,
    HOURS,
    HOURS_BEFORE,
    MB,
    PRECISIONS,
    PREFETCH,
    PREFETCH_MORE,
    RATE,
    RATE_BEFORE,
    SOURCE,
    STEP,
    STEP_BEFORE,
    TIMES,
    Setting,
    setting,
)
from suite.claims.measuring import (
    PASSES,
    NotFiniteError,
    UncompiledError,
    compiled_call,
    interleaved,
    peak_bytes,
    percent,
    typical,
)
from suite.claims.record import CONFIRMED, DEPENDS, REFUTED, UNMEASURED, Answer, Checks, Measure
from suite.claims.words import amount, listed
from suite.eigenstate_lm.model import RANGE, SMALLEST, VOCABULARY, eigenvalues, parameters
from suite.techniques import implementation

__all__ = ["CHECKS", "setting"]

CHECKS = Checks()


def _alone(measure: Measure) -> Measure:
    """Free unused memory before the measurement; return UNMEASURED if there is no figure.

    There is none if something does not compile, memory runs out, or the figure is not finite.
    """

    @functools.wraps(measure)
    def answer(s: Setting) -> Answer:
        measured.free_memory()
        try:
            return measure(s)
        except (UncompiledError, NotFiniteError) as error:
            return UNMEASURED, str(error)
        except PerfsuiteError as error:
            if not measured.lacks_memory(error):
                raise
            return UNMEASURED, str(error)

    return answer


# --- a step ---------------------------------------------------------------------------------------------------------


@CHECKS("C47", "A training step at 32 K tokens takes 370 ms.", gpu=True)
@_alone
def step(s: Setting) -> Answer:
    seconds = {name: median(times) for name, times in measured.step_seconds(s).items()}
    verdict = verdicts.reached(list(seconds.values()))
    config = s.config
    each = listed([f"{units.seconds(t)} in {name}" for name, t in seconds.items()])
    detail = (
        f"a step of {config.batch_size} sequences of {config.sequence_length:,} tokens takes {each}{_left_out(seconds)}"
        f". At the source's own {RATE:,} tokens a second, {units.seconds(STEP)} are {RATE * STEP:,.0f} tokens, and "
        "such "
        f"a step has {SOURCE.tokens:,}"
    )
    return verdict, ("on the precision and the device: " if verdict == DEPENDS else "") + detail


@CHECKS("C48", "Without a loop over the tokens training is 53.9 times as fast.", gpu=True)
@_alone
def speedup(s: Setting) -> Answer:
    short, longer = s.reference
    config, length = s.config, s.config.sequence_length
    timed = {name: median(t) for name, t in measured.step_seconds(s).items() if name in ("float32", "bfloat16")}
    measured.free_memory()
    calls = {
        "short": measured.step_of(measured.make_trainer(s, optimized=False, length=short)),
        "longer": measured.step_of(measured.make_trainer(s, optimized=False, length=longer)),
        "optimized": measured.step_of(measured.make_trainer(s, length=longer, use_compile=False)),
    }
    found = {name: median(t) for name, t in interleaved(s.device, min(s.rounds, 2), calls, count=1).items()}
    whole = verdicts.extrapolated((short, found["short"]), (longer, found["longer"]), length)
    times = [found["longer"] / found["optimized"], *(whole / t for t in timed.values())]
    at_once = listed(
        [f"{units.seconds(t)} in {name} ({units.significant(whole / t)} times as fast)" for name, t in timed.items()]
    )
    verdict = verdicts.meets(times, TIMES)
    detail = (
        f"for {config.batch_size} sequences of {short:,} tokens the reference takes {units.seconds(found['short'])}, "
        f"for {longer:,} {units.seconds(found['longer'])} and, extrapolated linearly, for {length:,} "
        f"{units.seconds(whole)}. The optimized trainer takes {units.seconds(found['optimized'])} for {longer:,}, "
        f"uncompiled ({units.significant(times[0])} times as fast), and for {length:,} {at_once}. The source's own "
        f"figures give {STEP_BEFORE / STEP:.1f} times from the time of a step, {RATE / RATE_BEFORE:.0f} times from the "
        f"tokens a second, and {HOURS_BEFORE / HOURS:.1f} times from the hours"
    )
    return verdict, ("on the precision and the length: " if verdict == DEPENDS else "") + detail


# --- the recurrence -------------------------------------------------------------------------------------------------


@CHECKS("C49", "The recurrence is inherently sequential.")
@_alone
def sequential(s: Setting) -> Answer:
    loop = implementation("recurrence.eigenstate_scan", "eigenstate_scan", optimized=False)
    scan = implementation("recurrence.eigenstate_scan", "eigenstate_scan", optimized=True)
    drawn = {length: measured.drawn_recurrence(s, length) for length in (*s.loop, s.scanned)}
    looped = {length: functools.partial(measured.differentiated, loop, *drawn[length]) for length in s.loop}
    at_once = {length: functools.partial(measured.differentiated, scan, *given) for length, given in drawn.items()}
    slow = {n: median(t) for n, t in interleaved(s.device, min(s.rounds, 3), measured.by_name(looped), count=1).items()}
    fast = {n: median(t) for n, t in interleaved(s.device, s.rounds, measured.by_name(at_once), count=5).items()}
    last, whole = str(s.loop[-1]), str(s.scanned)
    truths = {length: measured.recurrence_in_float64(*drawn[length]) for length in (s.loop[-1], s.scanned)}
    own = verdicts.error(looped[s.loop[-1]](), truths[s.loop[-1]])
    errors = {length: verdicts.error(at_once[length](), truth) for length, truth in truths.items()}
    proportional = slow[last] * s.scanned / s.loop[-1]
    few = str(s.loop[0])
    detail = (
        f"an associative scan computes it. Forward and backward, a loop takes {units.seconds(slow[few])} for "
        f"{s.loop[0]:,} tokens, {units.seconds(slow[last])} for {s.loop[-1]:,} and, in proportion, "
        f"{units.seconds(proportional)} for {s.scanned:,}; the scan takes {units.seconds(fast[few])}, "
        f"{units.seconds(fast[last])} and {units.seconds(fast[whole])}, which is "
        f"{units.significant(proportional / fast[whole])} times less at {s.scanned:,}. The relative error against "
        f"float64 is {own:.1g} for the loop and {errors[s.loop[-1]]:.1g} for the scan at {s.loop[-1]:,} tokens, and "
        f"{errors[s.scanned]:.1g} for the scan at {s.scanned:,}"
    )
    return verdicts.in_turn(max(errors.values()), fast[whole], proportional), detail


@CHECKS("C51", "The chunk size is only a matter of speed.")
@_alone
def chunks(s: Setting) -> Answer:
    chunked = implementation("recurrence.eigenstate_scan", "eigenstate_scan_chunked", optimized=True)
    drawn = measured.drawn_recurrence(s, s.scanned)
    calls = {
        size: functools.partial(measured.differentiated, functools.partial(chunked, chunk=size), *drawn)
        for size in CHUNKS
    }
    found = interleaved(s.device, s.rounds, measured.by_name(calls), count=2)
    seconds = {size: median(found[str(size)]) for size in CHUNKS}
    truth = measured.recurrence_in_float64(*drawn)
    errors = {size: verdicts.error(call(), truth) for size, call in calls.items()}
    del truth
    peaks = {size: peak_bytes(s.device, call) for size, call in calls.items()}
    rows = listed([f"{n}: {units.seconds(seconds[n])}, {amount(peaks[n])}, {errors[n]:.1g}" for n in CHUNKS], "; ")
    verdict = verdicts.only_speed(list(errors.values()), list(peaks.values()))
    detail = (
        f"forward and backward in plain PyTorch for {s.scanned:,} tokens, by chunk size (time, peak memory, relative "
        f"error against float64): {rows}. The fastest is {min(seconds, key=lambda n: seconds[n])}. The source itself "
        "lowers the chunk size if memory runs out"
    )
    return verdict, (
        "on whether memory counts; the results are equal except for rounding: " * (verdict == DEPENDS)
    ) + detail


@CHECKS("C52", "The gradient reaches back over the whole context of 32 K tokens.")
@_alone
def reach(s: Setting) -> Answer:
    first, most = measured.decays(s)
    scanned = [verdicts.horizon(measured.influence_of_scan(s, decay)) for decay in (first, most)]
    whole = [verdicts.horizon(measured.influence_of_network(s, decay)) for decay in (None, most)]
    length = SOURCE.sequence_length
    biggest = float(eigenvalues(first).norm(dim=-1).max())
    least = torch.finfo(torch.float32).smallest_normal * EPS
    layers = s.config.layers
    detail = (
        f"with the initial λ, whose magnitude is at most {biggest:.3g}, the gradient through one recurrence falls "
        "below "
        f"{EPS:.2g} of the newest token's {_after(scanned[0], s.reach)}, and that through the whole network of "
        f"{layers} "
        f"blocks {_after(whole[0], s.reach)}. With a magnitude of {SMALLEST + RANGE:.2f}, which training can only "
        f"approach, they do so {_after(scanned[1], s.reach)} and {_after(whole[1], s.reach)}: {SMALLEST + RANGE:.2f} "
        "to "
        f"the power of {length:,} is 1e{length * math.log10(SMALLEST + RANGE):.0f}, and the smallest positive number "
        "in "
        f"float32 is {least:.2g}"
    )
    return verdicts.spans(whole, length), detail


# --- memory ---------------------------------------------------------------------------------------------------------


@CHECKS("C53", "Cross-entropy in chunks saves 13 to 26 GB.")
@_alone
def chunked_loss(s: Setting) -> Answer:
    parts, spared = [], []
    fewest = s.rows
    for name, wide in {"In bfloat16": False, "with the loss in float32, as under autocast,": True}.items():
        at_once, kept, freed = (
            measured.peak_of_loss(s, form, wide)
            for form in (measured.whole_loss, measured.kept_loss, measured.freed_loss)
        )
        fewest = min(fewest, at_once[1], kept[1], freed[1])
        spared += [(at_once[0] - kept[0]) / GB, (at_once[0] - freed[0]) / GB]
        parts.append(
            f"{name} the peak is {amount(at_once[0])} without chunks, {amount(kept[0])} in chunks whose logits are "
            "kept "
            f"for the backward pass ({amount(at_once[0] - kept[0])} less) and {amount(freed[0])} in chunks whose "
            "logits "
            f"are not kept ({amount(at_once[0] - freed[0])} less)"
        )
    verdict = verdicts.between(spared, 13, 26)
    logits = SOURCE.tokens * VOCABULARY
    detail = (
        f"one copy of the logits of {SOURCE.tokens:,} rows takes {amount(2 * logits)} in bfloat16 and "
        f"{amount(4 * logits)} in float32. {'; '.join(parts)}"
    )
    if fewest != SOURCE.tokens:
        detail += f" (from {fewest:,} rows{'' if s.vocabulary == VOCABULARY else f' of {s.vocabulary:,} logits'})"
    return verdict, ("on what chunks keep, and on the precision of the loss: " * (verdict == DEPENDS)) + detail


@CHECKS("C54", "A cache of 256 chunks of 32 K tokens takes about 4 GB.")
@_alone
def cache(s: Setting) -> Answer:
    pack, length = measured.random_pack(s), s.config.sequence_length
    made = [torch.from_numpy(pack.row[n * length : (n + 1) * length].astype(numpy.int64)) for n in range(s.cached)]
    tokens = s.cached * length
    numbers = made[0].tolist()
    a_token = {
        "as int64": sum(t.untyped_storage().nbytes() for t in made) / tokens,
        "in the pack (two bytes each)": pack.row.itemsize,
        "as lists of Python integers": (sys.getsizeof(numbers) + sum(map(sys.getsizeof, numbers))) / length,
    }
    whole = CACHED * SOURCE.sequence_length
    each = listed([f"{amount(whole * size)} {how}" for how, size in a_token.items()])
    detail = (
        f"{CACHED} chunks of {SOURCE.sequence_length:,} tokens take {each}. To take 4 GB, a token would "
        f"need {4 * GB / whole:.0f} bytes"
        f"{'' if tokens == whole else f' (from {s.cached} of {length:,})'}"
    )
    near = [verdicts.near(whole * size, 4 * GB) for size in a_token.values()]
    return (CONFIRMED if near[0] else DEPENDS if any(near) else REFUTED), detail


@CHECKS("C55", "A step takes 7.2 GB in all.", gpu=True)
@_alone
def memory(s: Setting) -> Answer:
    peaks = {
        checkpointed: measured.peak_of_step(s, autocast_bf16=True, activation_checkpoint=checkpointed)
        for checkpointed in (False, True)
    }
    count = parameters(s.config.sizes(s.vocabulary))
    verdict = verdicts.fits(list(peaks.values()), 7.2 * GB)
    detail = (
        f"a step of {s.config.batch_size} sequences of {s.config.sequence_length:,} tokens in bfloat16 takes "
        f"{amount(peaks[False])} at its peak, and {amount(peaks[True])} if the backward pass recomputes the linear "
        f"layers. Weights, gradients and moments are {amount(16 * count)} of it. Of the source's 7.2 GB, 4 GB are the "
        "loader's cache, which is in host memory, and its 2 GB of activations are "
        f"{2 * GB / (2 * SOURCE.tokens * SOURCE.width):.2g} arrays of [tokens, width] in half precision, for "
        f"{SOURCE.layers} blocks"
    )
    return verdict, ("on what is recomputed: " * (verdict == DEPENDS)) + detail


@CHECKS("C56", "The optimizer's state takes 720 MB.")
@_alone
def optimizer_state(s: Setting) -> Answer:
    trainer = measured.make_trainer(s)
    state = trainer.optimizer.state_dict()
    size = sum(t.numel() * t.element_size() for name in ("first", "second") for t in state[name])
    count = sum(w.numel() for w in trainer.weights.values())
    source = parameters(SOURCE.sizes())
    whole = size / count * source
    detail = (
        f"AdamW's two moments have {size / count:g} bytes a parameter: {amount(whole)} for {source:,} parameters, and "
        f"half as much in half precision. 720 MB would be {720 * MB / source:.2f} bytes a parameter"
        f"{'' if count == source else f' (from {count:,} parameters)'}"
    )
    return (CONFIRMED if verdicts.near(whole, 720 * MB) else REFUTED), detail


@CHECKS("C57", "Emptying the allocator's cache every 10 steps helps.", gpu=True)
@_alone
def emptying(s: Setting) -> Answer:
    go_on = measured.step_of(measured.make_trainer(s, autocast_bf16=True, adaptive_cleanup=False))
    for _ in range(3):
        compiled_call(go_on)
    before = measured.reserved_bytes(s.device)
    used = peak_bytes(s.device, lambda: [go_on() for _ in range(EVERY)]) + measured.allocated_bytes(s.device)
    after = measured.reserved_bytes(s.device)

    def emptied() -> None:
        torch.cuda.empty_cache()
        go_on()

    found = interleaved(s.device, s.rounds, {"kept": go_on, "emptied": emptied}, count=1)
    never = [EVERY * t for t in found["kept"]]
    every = [(EVERY - 1) * t + more for t, more in zip(found["kept"], found["emptied"], strict=True)]
    longer = ablation.paired(every, never)
    low, high = 100 * (longer.low - 1), 100 * (longer.high - 1)
    detail = (
        f"a step takes {typical(found['kept'])}, and {typical(found['emptied'])} if the cache is emptied before it: "
        f"{EVERY} steps take {percent(low, high)} longer. Without emptying, the allocator reserves {amount(before)} "
        f"after 3 steps and {amount(after)} after {3 + EVERY}. The steps use {amount(used)} of it at their peak, so "
        "the "
        "next step allocates again what was freed"
    )
    return verdicts.helps(low, high, after / before - 1 if before else 0.0), detail


# --- the loader, and the precision ----------------------------------------------------------------------------------


@CHECKS("C58", "Loading is faster with 4 to 8 batches prefetched by each worker than with 2.")
@_alone
def prefetch(s: Setting) -> Answer:
    length, count = s.config.sequence_length, s.config.batch_size
    packed = implementation("data.packed_tokens", "PackedTokens", optimized=True)(measured.random_pack(s).path, length)
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
            verdict = verdicts.loads_faster(gains, median(few))
            if verdict != UNMEASURED:
                break
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        return UNMEASURED, " ".join(str(error).split())  # usually too little shared memory
    finally:
        for loader in loaders.values():
            loader.close()
    each = listed([f"{typical(found[name])} with {name}" for name in loaders])
    ratios = listed([words.times(r) for r in gains])
    more = listed([str(ahead) for ahead in PREFETCH_MORE])
    detail = (
        f"if nothing else runs, {s.workers} worker{'s deliver' if s.workers != 1 else ' delivers'} a batch of {count} "
        f"sequences of {length:,} tokens every {each} prefetched batches: {more} are {ratios}. Without workers a batch "
        f"takes {typical(found['here'])}. The longest of these times is "
        f"{units.percent(max(median(t) for t in found.values()) / STEP)} of the source's {units.seconds(STEP)} a step"
    )
    if verdict == UNMEASURED:
        return verdict, f"{detail}. This is too noisy to distinguish from no effect"
    return verdict, ("on whether a step waits for its batch: " * (verdict == DEPENDS)) + detail


@CHECKS("C60", "float16 makes training twice as fast, with no loss of quality.", gpu=True)
@_alone
def half(s: Setting) -> Answer:
    seconds = measured.step_seconds(s)
    low = seconds.get("float16")
    ratios = {
        name: ablation.paired(seconds[name], low) for name in ("float32", "TF32") if low is not None and name in seconds
    }
    measured.free_memory()
    ends, left_out = measured.final_losses(s)
    lost = [b / a - 1 for a, b in ends]
    verdict = verdicts.twice(list(ratios.values()), lost)
    bfloat16 = f"; in bfloat16 it takes {typical(seconds['bfloat16'])}" if "bfloat16" in seconds else ""
    each = listed([f"{words.times(r)} as the {typical(seconds[name])} in {name}" for name, r in ratios.items()])
    run = s.trained
    detail = (
        f"a step of {s.config.tokens:,} tokens takes {typical(low)} in float16, {each}{bfloat16}"
        if low is not None and ratios
        else "a step did not fit in two precisions"
    )
    detail += (
        f". After {run.steps} steps the loss of a network of width {run.width} is, by seed, "
        f"{listed([f'{a:.4f}' for a, _ in ends])} in float32, and in float16 {100 * min(lost):+.2g}% to "
        f"{100 * max(lost):+.2g}% higher; the gradient scaler skipped {left_out} steps in all"
    )
    return verdict, ("on the precision of float32's products: " * (verdict == DEPENDS)) + detail


# --- words ---


def _after(found: int | None, looked: int) -> str:
    return f"after {found:,} tokens" if found is not None else f"nowhere within {looked:,} tokens"


def _left_out(found: Mapping[str, object]) -> str:
    missing = [name for name in PRECISIONS if name not in found]
    return f"; in {listed(missing)} it does not fit" if missing else ""
