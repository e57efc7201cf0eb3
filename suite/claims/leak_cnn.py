"""Claims C13 to C23 of leak_cnn, each with its measurement."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from perfsuite.errors import first_line
from perfsuite.report import units
from perfsuite.timing.profiler_counts import count_calls
from suite import ablation
from suite.claims import leak_cnn_measured as measured
from suite.claims.leak_cnn_setting import EPOCH, FEW_BATCH, MB, STEPS, TOGETHER, TOLERANCE, VALIDATION, Setting, setting
from suite.claims.measuring import (
    Make,
    UncompiledError,
    interleaved,
    percent,
    saved,
    typical,
    within,
)
from suite.claims.record import CONFIRMED, DEPENDS, REFUTED, UNMEASURED, Answer, Checks, Measure
from suite.leak_cnn.config import TrainConfig, without_techniques
from suite.leak_cnn.costs import BATCH, ROWS
from suite.leak_cnn.epochs import audio_of
from suite.leak_cnn.features import MELS
from suite.leak_cnn.model import CHANNELS, HIDDEN, Activation, make_weights, shapes
from suite.leak_cnn.step import training_loss
from suite.techniques import implementation

__all__ = ["CHECKS", "setting"]

CHECKS = Checks()


def _compiles(measure: Measure) -> Measure:
    """Return UNMEASURED, with the reason, if something cannot be compiled."""

    @functools.wraps(measure)
    def answer(s: Setting) -> Answer:
        try:
            return measure(s)
        except (UncompiledError, torch._dynamo.exc.TorchDynamoException) as error:
            return (
                UNMEASURED,
                f"it cannot be compiled: {first_line(error) or type(error).__name__}",
            )

    return answer


# --- launches and memory --------------------------------------------------------------------------------------------


@CHECKS("C13", "Without the fused optimiser a step has about 6 million launches, three for each parameter.")
def launches(s: Setting) -> Answer:
    found: dict[str, list[int]] = {}
    parameters = []
    for hidden in (HIDDEN, 2 * HIDDEN):
        weights = list(make_weights(0, hidden=hidden).values())
        parameters.append(sum(w.numel() for w in weights))
        for name, options in _OPTIMIZERS.items():
            own = [w.to(s.device).requires_grad_() for w in weights]
            for w in own:
                w.grad = torch.ones_like(w)
            step = torch.optim.AdamW(own, **options).step
            found.setdefault(name, []).append(measured.launches_of(s, step))
    what = "launches" if s.device.type == "cuda" else "operations"
    each = ", ".join(f"{few} {name}" for name, (few, _) in found.items())
    (few, many), tensors = found[_ONE_BY_ONE], len(shapes())
    same = "as many" if few == many else str(many)
    detail = (
        f"{what} of a step of AdamW: {each}. With {parameters[1]:,} parameters instead of {parameters[0]:,}, in "
        f"{tensors} tensors as before, there are {same}: {_ONE_BY_ONE}, each tensor has {few / tensors:.3g}"
    )
    return (CONFIRMED if few >= 1e6 else REFUTED), detail


@CHECKS("C14", "ReLU in place saves 2.3 MB at a batch of 5632.")
@_compiles
def memory(s: Setting) -> Answer:
    parts, spared = [], []
    for compiled in (False, True)[: 1 + s.compiled]:
        beside, inplace = (measured.memory_of(s, activation, compiled) for activation in _ACTIVATIONS)
        forward, step = beside.forward - inplace.forward, beside.step - inplace.step
        spared += [forward, step]
        how = "compiled" if compiled else "eager"
        parts.append(f"{how}, that of a forward pass by {_mb(forward)} and that of a step by {_mb(step)}")
    product = BATCH * CHANNELS[1] * 16 * 4
    detail = (
        f"the product that the source gives, {BATCH}×{CHANNELS[1]}×16×1×4 bytes, is {_mb(product)}. ReLU in place "
        "lowers the peak: "
        f"{_join(parts)}"
    )
    claimed = 2.3 * MB
    near = [abs(n - claimed) <= TOLERANCE * claimed for n in spared]
    return (CONFIRMED if all(near) else DEPENDS if any(near) else REFUTED), detail + _scaled(s)


@CHECKS("C15", "ReLU in place saves three activations of a forward.")
@_compiles
def activations(s: Setting) -> Answer:
    three = 4 * BATCH * (CHANNELS[0] * MELS + CHANNELS[1] * MELS + CHANNELS[2] * MELS // 2)
    parts, spared = [], []
    for compiled in (False, True)[: 1 + s.compiled]:
        beside, inplace = (measured.memory_of(s, activation, compiled).kept for activation in _ACTIVATIONS)
        spared.append(beside - inplace)
        how = "A compiled" if compiled else "An eager"
        parts.append(f"{how} forward pass keeps {_mb(beside)} for the backward pass without it, {_mb(inplace)} with it")
    detail = (
        f"three activations are {_mb(three)}. {_join(parts, '. ')}. ReLU's backward pass needs its output, which is "
        "kept "
        "in both cases, and the layer before it does not need its own"
    )
    enough = [n >= (1 - TOLERANCE) * three for n in spared]
    return (CONFIRMED if all(enough) else DEPENDS if any(enough) else REFUTED), detail + _scaled(s)


# --- epochs, and what waits in them ---------------------------------------------------------------------------------


@CHECKS("C16", "Six syncs fewer save 2 to 5% of an epoch.", gpu=True)
def syncs_saved(s: Setting) -> Answer:
    step = measured.training_step(s)

    def each() -> None:
        for _ in range(STEPS):
            step().item()

    def once() -> None:
        torch.stack([step() for _ in range(STEPS)]).sum().item()

    found = interleaved(s.device, s.rounds, {"each": each, "once": once}, count=5)
    low, high = saved(ablation.paired(found["each"], found["once"]))
    middle, half = ablation.mean([a - b for a, b in zip(found["each"], found["once"], strict=True)])
    detail = (
        f"what else an epoch does: {STEPS} steps on segments on the device take {typical(found['each'])} if the loss "
        f"is read after each step and {typical(found['once'])} if it is read once, {percent(low, high)} less, "
        f"{units.seconds(middle / (STEPS - 1))} for each sync. "
        f"That is {100 * middle / EPOCH:.1g}% of the {EPOCH:.0f} s that an epoch takes in the source"
    )
    if 100 * (middle + half) / EPOCH >= 2:
        return within(low, high, 2, 5, detail)
    return (DEPENDS, f"on {detail}") if within(low, high, 2, 5, "")[0] == CONFIRMED else (REFUTED, detail)


@CHECKS("C17", "An epoch has seven batches.")
def batches(s: Setting) -> Answer:
    config = TrainConfig()
    whole, rest = divmod(ROWS, config.batch_size)
    rounded = [-(-n // size) for n, size in ((ROWS, config.batch_size), (VALIDATION, config.val_batch_size))]
    made = len(DataLoader(TensorDataset(torch.zeros(ROWS)), config.batch_size))
    small = dataclasses.replace(without_techniques(config), batch_size=FEW_BATCH, num_workers=0, validate_every=0)
    audio = audio_of(s.few)
    steps = []
    for optimized in (False, True):
        trainer = implementation("trainers.leak_cnn", "Trainer", optimized=optimized)(small, audio, s.device)
        trainer.train_window({"epoch": torch.tensor(0)})
        steps.append(trainer.steps)
    taken = " and ".join(map(str, steps))
    detail = (
        f"on what happens to the {rest} of {ROWS:,} segments that remain after {whole} batches of {config.batch_size}. "
        f"PyTorch's DataLoader makes {made} batches unless drop_last is set. The trainers here make {taken} steps on "
        f"{audio.segments('train')} segments in batches of {FEW_BATCH}. In validation the source rounds up, to "
        f"{rounded[1]} batches of {config.val_batch_size}"
    )
    dropped = all(n == audio.segments("train") // FEW_BATCH for n in steps)
    if made != whole and dropped and STEPS in (whole, rounded[0]):
        return DEPENDS, detail
    return (CONFIRMED if STEPS in (whole, rounded[0]) else REFUTED), detail.removeprefix("on ")


@CHECKS("C18", "With metrics on the device an epoch has one sync.", gpu=True)
def syncs(s: Setting) -> Answer:
    config = TrainConfig(batch_size=FEW_BATCH, num_workers=0, validate_every=0, use_compile=False)
    audio = audio_of(s.few)
    none = without_techniques(config)
    alone = dataclasses.replace(none, device_metrics=True)
    resident = dataclasses.replace(alone, resident_dataset=True, prepare_mel_batch=True)
    made = {
        "reference": measured.trained_epochs(config, audio, s.device, optimized=False),
        "alone": measured.trained_epochs(alone, audio, s.device),
        "resident": measured.trained_epochs(resident, audio, s.device),
        "all": measured.trained_epochs(config, audio, s.device),
    }
    for call in made.values():
        for _ in range(3):  # from the third call on, no CUDA graph is captured
            call()
    counted = count_calls({name: (lambda: None, call) for name, call in made.items()})
    found = {name: number for name, (number, _) in counted.items()}
    detail = (
        f"on what else waits: an epoch of {STEPS} batches has {found['reference']} syncs in the reference, "
        f"{found['alone']} with only the metrics on the device, {found['resident']} with the segments there, too (the "
        f"scaler still reads whether the gradients are finite), and {found['all']} with all techniques"
    )
    if found["alone"] <= 1:
        return CONFIRMED, detail.removeprefix("on what else waits: ")
    return (DEPENDS, detail) if found["all"] <= 1 else (REFUTED, detail.removeprefix("on what else waits: "))


@CHECKS("C19", "A worker that is spawned starts 50 to 100 ms sooner than one that is forked.")
def spawning(s: Setting) -> Answer:
    ways = torch.multiprocessing.get_all_start_methods()
    if "fork" not in ways:
        return UNMEASURED, "no worker can be forked here"
    calls = {way: functools.partial(measured.first_batch_of_worker, way) for way in ("fork", "spawn")}
    found = interleaved(torch.device("cpu"), min(s.rounds, 3), calls, count=1)
    gained = [1e3 * (a - b) for a, b in zip(found["fork"], found["spawn"], strict=True)]
    middle, half = ablation.mean(gained)
    sooner = "sooner" if middle > 0 else "later"
    detail = (
        f"a worker's first batch arrives after {typical(found['fork'])} if it is forked and after "
        f"{typical(found['spawn'])} if it is spawned, {units.seconds(abs(middle) / 1e3)} {sooner}: a spawned worker "
        "imports torch again"
    )
    return within(middle - half, middle + half, 50, 100, detail)


# --- what is faster -------------------------------------------------------------------------------------------------


@CHECKS("C20", "cudnn.benchmark makes steps on 32×1 inputs 5 to 10% faster.", gpu=True)
def autotune(s: Setting) -> Answer:
    forms = {"float32": (None, False), "float16, channels last": (torch.float16, True)}
    made: dict[str, Make] = {
        f"{form}{on}": (measured.tuned_steps, (s, on, *given)) for form, given in forms.items() for on in (False, True)
    }

    def judged(form: str, seconds: Mapping[str, list[float]], first: Mapping[str, float]) -> Answer:
        off, on = ([t / TOGETHER for t in seconds[f"{form}{on}"]] for on in (False, True))
        low, high = saved(ablation.paired(off, on))
        more = first.get(f"{form}{True}", 0.0) - first.get(f"{form}{False}", 0.0)
        detail = (
            f"{form}: {typical(off)} a step without and {typical(on)} with it, {percent(low, high)} less; the first "
            f"call takes {more:.2g} s longer"
        )
        return within(low, high, 5, 10, detail)

    def enough(seconds: dict[str, list[float]]) -> bool:
        return all(judged(form, seconds, {})[0] != UNMEASURED for form in forms)

    first, seconds = measured.rounds_apart(made, s.rounds, enough)
    return _together([judged(form, seconds, first) for form in forms], "the precision")


@CHECKS("C21", "fullgraph=True makes a compiled network 3 to 8% faster, for it removes graph breaks.")
@_compiles
def fullgraph(s: Setting) -> Answer:
    plain, full = (measured.graphs_of(training_loss, whole, s) for whole in (False, True))
    broken = measured.graphs_of(measured.with_graph_break, False, s)
    try:
        measured.graphs_of(measured.with_graph_break, True, s)
        refused = False
    except torch._dynamo.exc.TorchDynamoException:
        refused = True
    same = plain == full
    detail = (
        f"the network is {len(plain)} graph{'s' * (len(plain) != 1)} without it and {len(full)} with it, "
        f"{'the same' if same else 'others'}. With a graph break ({len(broken)} graphs) it "
        f"{'raises an error' if refused else f'leaves {len(broken)}'}, and does not remove the break"
    )
    if not s.compiled:
        return (REFUTED if same and refused else UNMEASURED), detail
    found = interleaved(s.device, s.rounds, {str(on): measured.compiled_step(s, on) for on in (False, True)})
    low, high = saved(ablation.paired(found["False"], found["True"]))
    without, with_it = typical(found["False"]), typical(found["True"])
    detail = f"{detail}. A step takes {without} without it and {with_it} with it, {percent(low, high)} less"
    verdict, detail = within(low, high, 3, 8, detail)
    return (REFUTED if verdict == UNMEASURED and same and refused else verdict), detail


@CHECKS("C22", "All that is implemented makes an epoch 15 to 30% faster.", gpu=True)
@_compiles
def together(s: Setting) -> Answer:
    audio = audio_of(s.data)
    before = dataclasses.replace(
        without_techniques(TrainConfig(batch_size=s.batch_size, num_workers=s.workers, validate_every=0)),
        loader=True,
        use_channels_last=True,
        use_compile=s.compiled,
        autocast_fp16=True,
    )
    places = {"read from the file": False, "on the device": True}
    made: dict[str, Make] = {}
    for place, resident in places.items():
        for done in (False, True):
            on: Mapping[str, Any] = dict.fromkeys(_IMPLEMENTED, True) if done else {}
            config = dataclasses.replace(before, resident_dataset=resident, **on)
            made[f"{place}{done}"] = (measured.finished_epochs, (config, audio, s.device))
    _, seconds = measured.rounds_apart(made, min(s.rounds, 5))  # an epoch from the file takes 1 s or more
    answers = []
    for place in places:
        was, became = seconds[f"{place}{False}"], seconds[f"{place}{True}"]
        low, high = saved(ablation.paired(was, became))
        detail = (
            f"with segments {place}, an epoch takes {typical(was)} before and {typical(became)} after, "
            f"{percent(low, high)} less"
        )
        answers.append(within(low, high, 15, 30, detail))
    verdict, detail = _together(answers, "where the segments are")
    return verdict, f"{detail}. The rows of the source's own table add up to 22 to 48%"


@CHECKS("C23", "bfloat16 needs compute capability 12.", gpu=True)
def bfloat16(s: Setting) -> Answer:
    capability = torch.cuda.get_device_capability(s.device)
    own = ".".join(map(str, capability))
    if capability >= (12, 0):
        return UNMEASURED, f"this device has compute capability {own}; the claim is about devices with less"
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        return (
            UNMEASURED,
            f"this device has compute capability {own} and no bfloat16; a device between that and 12 has it",
        )
    a = torch.randn(4096, 4096, device=s.device)
    low = a.bfloat16()
    found = interleaved(s.device, s.rounds, {"float32": lambda: a @ a, "bfloat16": lambda: low @ low})
    times = ablation.paired(found["float32"], found["bfloat16"])
    loss, gradients = measured.gradients_of(s, torch.bfloat16, False)()
    finite = all(bool(t.isfinite().all()) for t in (loss, *gradients.values()))
    detail = (
        f"this device has compute capability {own}: the gradients of a step in bfloat16 are {'' if finite else 'not '}"
        f"finite, and a product of 4096×4096 matrices takes {typical(found['bfloat16'])}, {times.value:.3g} times as "
        "fast as in float32, so bfloat16 is not emulated"
    )
    return (REFUTED if finite and times.low > 1 else UNMEASURED), detail


# --- helpers --------------------------------------------------------------------------------------------------------

_ONE_BY_ONE = "tensor by tensor"
_OPTIMIZERS: Mapping[str, Mapping[str, Any]] = {
    _ONE_BY_ONE: {"foreach": False},
    "in lists (PyTorch's default on a GPU)": {"foreach": True},
    "fused": {"fused": True},
}
_ACTIVATIONS: tuple[Activation, Activation] = (functional.relu, torch.relu_)
_IMPLEMENTED = (
    "prepare_mel_batch",
    "device_metrics",
    "fused_adamw",
    "inplace_activation",
    "cudnn_autotune",
    "fullgraph_model",
)
"""Techniques that the source says it has implemented.

Two are left out: file_level_eval affects only validation, and the loader is on in the baseline too.
"""


def _together(answers: Sequence[Answer], on: str) -> Answer:
    """Return one verdict from several answers; UNMEASURED ones count only if there are no others."""
    detail = _join([said for _, said in answers])
    clear = {verdict for verdict, _ in answers if verdict != UNMEASURED}
    if len(clear) > 1:
        return DEPENDS, f"on {on}: {detail}"
    return (clear.pop() if clear else UNMEASURED), detail


def _scaled(s: Setting) -> str:
    return "" if s.batch_size == BATCH else f" (from a batch of {s.batch_size})"


def _join(parts: Iterable[str], between: str = "; ") -> str:
    return between.join(parts)


def _mb(size: float) -> str:
    return f"{size / MB:.3g} MB"
