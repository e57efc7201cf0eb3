"""The leak_cnn trainers: equal loss curves, checkpoints, reports, configuration and GPU behaviour."""

from __future__ import annotations

import dataclasses
import gc
import io
import math
import random
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from curves import NEIGHBOURS, a_rounding_away, deviation_of, first_points, share_of_rule
from scale import FULLY, count, draws
from states import same, through_a_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import TensorDataset

from optimized.compilation import compiled_function
from optimized.graphs.cuda_graph_step import CudaGraphStep
from optimized.trainers import leak_cnn as module
from optimized.trainers.leak_cnn import Trainer as Optimized
from perfsuite import Cost, Pair, PerfsuiteError, Workload, floats, integers, scalar, side, size, stateful, tensor
from reference.trainers.leak_cnn import Trainer as Reference
from suite.leak_cnn.classes import CLASSES, LEAK
from suite.leak_cnn.config import TECHNIQUES, TRADES, TrainConfig, without_techniques
from suite.leak_cnn.conventional import AS_SOURCE, Conventional, SetUp
from suite.leak_cnn.dataset import Split
from suite.leak_cnn.epochs import Epochs
from suite.leak_cnn.features import MELS, SHORTS
from suite.leak_cnn.metrics import macro_f1
from suite.runtime import DivergedError, Options, fit

ROOT = Path(__file__).resolve().parents[2]
SMALL = TrainConfig(
    batch_size=12,
    val_batch_size=9,
    channels=(4, 4, 8),
    hidden=8,
    epochs=10,
    learning_rate=4e-3,
    num_workers=0,
    use_compile=False,
)
FILES, LONGS = 4, 8
"""Files of each split, and long windows of each file, which make 16 segments."""
STEPS = FILES * LONGS * SHORTS // SMALL.batch_size
OF_THEIR_OWN = ("use_compile", "fullgraph_model", "tf32", "autocast_bf16")


@dataclass
class Drawn:
    """In-memory data set with any number of files, for either trainer."""

    mels: dict[str, torch.Tensor]
    """Split → [files, long windows, 2, 32, 1]."""
    labels: dict[str, torch.Tensor]
    """Split → int64 [files]."""
    digest: str = "drawn"

    def segments(self, split):
        return math.prod(self.mels[split].shape[:3])

    def counts(self, split):
        return torch.bincount(self.read(split).labels.cpu(), minlength=len(CLASSES))

    def read(self, split):
        mels, labels = self.mels[split], self.labels[split]
        each = mels.shape[1] * mels.shape[2]
        repeated = labels.repeat_interleave(each)
        return Split(
            features=mels.reshape(-1, 1, MELS, 1),
            labels=repeated,
            leaks=(repeated == LEAK).float(),
            files=torch.arange(len(labels)).repeat_interleave(each),
        )

    def examples(self, split):
        found = self.read(split)
        return TensorDataset(found.features.squeeze(1), found.labels, found.leaks)


def sounds(seed=0, files=FILES, longs=LONGS):
    """Return a data set with values like the real ones, in float16; each class has its own level."""
    generator = torch.Generator().manual_seed(seed)
    mels, labels = {}, {}
    for split in ("train", "validation"):
        labels[split] = torch.randint(len(CLASSES), (files,), generator=generator)
        labels[split][0] = LEAK
        noise = 8 * torch.randn(files, longs, SHORTS, MELS, 1, generator=generator)
        mels[split] = (noise - 30 + 6 * labels[split].view(-1, 1, 1, 1, 1)).half()
    return Drawn(mels, labels)


# --- the pair -------------------------------------------------------------------------------------------------------


def configured(seed, batch_size, width, rate, **fields):
    """Return the configuration for a pair's inputs."""
    sizes = {"channels": (width, 2 * width, 4 * width), "hidden": 8 * width}
    return dataclasses.replace(SMALL, seed=seed, batch_size=batch_size, learning_rate=rate, **sizes, **fields)


def epochs(kind, change=lambda trainer: trainer, in_bfloat16=False, validates=True):
    """Return a pair's side that trains on given data. An epoch returns the losses of steps and validation, and the RMS
    of each weight; in bfloat16, which would round all RMS values alike, the RMS of each weight's change.

    The predicted classes are not compared: between equal logits, rounding decides.
    """

    def make(train, validation, train_labels, validation_labels, seed, batch_size, width, compiled, rate):
        config = configured(
            seed,
            batch_size,
            width,
            rate,
            use_compile=bool(compiled),
            # Inputs in bfloat16 select the reference under autocast, which shows the error of bfloat16 alone.
            autocast_bf16=(in_bfloat16 and kind is Optimized) or train.dtype is torch.bfloat16,
            validate_every=int(validates),
        )
        if train.dtype is torch.bfloat16:
            train, validation = train.float(), validation.float()
        shown = {"train": train, "validation": validation}
        mels = {k: m[..., None].cpu() for k, m in shown.items()}
        data = Drawn(mels, {"train": train_labels.cpu(), "validation": validation_labels.cpu()})
        if kind is Optimized:
            trainer = Optimized(config, data, train.device)
        else:
            trainer = Reference(config, data, train.device, train.dtype)
        trainer = change(trainer)
        first = {name: w.detach().clone() * in_bfloat16 for name, w in trainer.weights.items()}

        def step(epoch):
            trainer.train_window({"epoch": epoch.cpu()})
            report = trainer.last_report()
            losses = [*report.losses, *([report.validation.segments.loss] if validates else [])]
            sizes = [(w.detach() - first[name]).square().mean().sqrt() for name, w in trainer.weights.items()]
            return torch.tensor(losses, dtype=train.dtype, device=train.device), torch.stack(sizes)

        return step

    return make


VALUES = floats(-3, 3)
LABELS = integers(0, len(CLASSES))
# The source's files, batch and network. The learning rate is so low that a ReLU which rounding flips moves the weights
# by less than their own rounding.
SOURCE = {"F": 500, "V": 125, "L": 40, "batch_size": 5632, "width": 32, "rate": 1e-5}


def segments(F, L, batch_size):
    """Count the segments that an epoch trains on, without the incomplete batch."""
    return F * L * SHORTS // batch_size * batch_size


leak_cnn = Pair(
    reference=stateful(epochs(Reference)),
    # The first epoch captures the step, the fourth the validation.
    optimized=stateful(epochs(Optimized), settle=5),
    inputs={
        "train": tensor("F", "L", SHORTS, MELS, values=VALUES, differentiable=False),
        "validation": tensor("V", "L", SHORTS, MELS, values=VALUES, differentiable=False),
        "train_labels": tensor("F", dtype="int64", values=LABELS),
        "validation_labels": tensor("V", dtype="int64", values=LABELS),
        "seed": scalar(integers(0, 1000)),
        "batch_size": scalar(integers(3, 5)),
        "width": scalar(integers(1, 1)),
        # Drawn shapes are not compiled: each would need a compilation of its own.
        "compiled": scalar(integers(0, 0)),
        "rate": scalar(floats(1e-3, 4e-3)),
    },
    step_inputs={"epoch": tensor(dtype="int64", values=integers(0, SMALL.epochs))},
    gradients=False,
    max_examples=draws(cpu=4, otherwise=50),
    sizes={"F": size(1, 2), "V": size(1, 2), "L": size(2, 3)},
    steps=(1, 2),
    cost=Cost(items=segments, unit="segments"),
    workloads=[
        Workload("epoch", **SOURCE, seed=0, compiled=1, clock="wall", device="cuda"),
        Workload(
            "cpu", F=8, V=2, L=2, seed=0, batch_size=4, width=1, compiled=0, rate=4e-3, clock="wall", device="cpu"
        ),
    ],
)


# The source's fastest form, in bfloat16, against the float32 reference.
leak_cnn_bfloat16 = dataclasses.replace(
    leak_cnn,
    reference=stateful(epochs(Reference, in_bfloat16=True)),
    optimized=stateful(epochs(Optimized, in_bfloat16=True), settle=5),
    precision="bfloat16",
    workloads=[
        Workload("epoch", **SOURCE, seed=0, compiled=1, clock="wall", device="cuda", speedup=40),
        Workload(
            "cpu", F=8, V=2, L=2, seed=0, batch_size=4, width=1, compiled=0, rate=4e-3, clock="wall", device="cpu"
        ),
    ],
)


def conventional_epochs():
    """Return the best conventional set-up of `tools/leak_cnn_epochs.py` as a rival for epochs without validation."""

    def make(train, validation, train_labels, validation_labels, seed, batch_size, width, compiled, rate):
        config = configured(seed, batch_size, width, rate, autocast_bf16=True)
        data = Drawn({"train": train[..., None].cpu()}, {"train": train_labels.cpu()})
        trainer = Conventional(config, data, train.device, SetUp(where="batches"))
        first = {name: w.detach().clone() for name, w in trainer.weights.items()}

        def step(epoch):
            trainer.train_window({"epoch": epoch.cpu()})
            moved = [(w.detach() - first[name]).square().mean().sqrt() for name, w in trainer.weights.items()]
            return torch.tensor(trainer.losses, dtype=train.dtype, device=train.device), torch.stack(moved)

        return step

    return make


leak_cnn_bfloat16_unvalidated = dataclasses.replace(
    leak_cnn_bfloat16,
    reference=stateful(epochs(Reference, in_bfloat16=True, validates=False)),
    optimized=stateful(epochs(Optimized, in_bfloat16=True, validates=False), settle=5),
    rivals={"conventional": stateful(side(conventional_epochs(), devices=("cuda",)), settle=2)},
    workloads=[
        Workload("epoch", **SOURCE, seed=0, compiled=1, clock="wall", device="cuda", speedup=40),
        leak_cnn_bfloat16.workloads[1],
    ],
)


# --- loss curves ----------------------------------------------------------------------------------------------------


def trained(kind, config=SMALL, count=SMALL.epochs, data=None, device="cpu", **options):
    trainer = kind(config, data or sounds(), device, **options)
    for epoch in range(count):
        trainer.train_window({"epoch": torch.tensor(epoch)})
    return trainer


def curve(trainer, count=SMALL.epochs):
    """Return the loss of each step, [steps], and the validation loss of each epoch, [epochs]."""
    steps, validations = [], []
    for epoch in range(count):
        trainer.train_window({"epoch": torch.tensor(epoch)})
        report = trainer.last_report()
        steps += report.losses
        validations.append(report.validation.segments.loss)
    return torch.tensor(steps, dtype=torch.float64), torch.tensor(validations, dtype=torch.float64)


def deviations(config=SMALL, device="cpu", data=None):
    """Return (truth, float32 curve, largest deviation from the truth up to each point) for each curve."""
    data, count = data or sounds(), config.epochs
    truth = curve(Reference(config, data, device, torch.float64), count)
    runs = [curve(Reference(config, data, device), count)]
    for seed in range(NEIGHBOURS):
        runs.append(curve(a_rounding_away(Reference(config, data, device), seed), count))
    found = []
    for which, exact in enumerate(truth):
        found.append((exact, runs[0][which], deviation_of([run[which] for run in runs], exact)))
    return found


@pytest.fixture(scope="module")
def known():
    return deviations()


def early(known, epochs=3):
    """Return the part of the known curves that these epochs draw."""
    return [first_points(curves, len(curves[0]) // SMALL.epochs * epochs) for curves in known]


def share_of_budget(found, known, dtype=torch.float32):
    """Return the largest error as a fraction of the error that the rule allows."""
    return max(
        share_of_rule(values, truth, deviation, dtype)
        for values, (truth, _, deviation) in zip(found, known, strict=True)
    )


def test_optimized_loss_curve_matches_the_reference_over_50_steps(known):
    assert len(known[0][0]) == SMALL.epochs * STEPS == 50
    assert share_of_budget(curve(Optimized(SMALL, sounds(), "cpu")), known) <= 1
    assert known[0][2].max() > 0


@pytest.mark.parametrize("where", ["file", "memory", "batches"])
def test_conventional_set_up_has_the_same_loss_curve(where, known):
    rival = Conventional(SMALL, sounds(), "cpu", SetUp(where=where, workers=0, mode=None))
    losses = []
    for epoch in range(SMALL.epochs):
        rival.train_window({"epoch": torch.tensor(epoch)})
        losses += rival.losses
    assert share_of_budget([torch.tensor(losses, dtype=torch.float64)], known[:1]) <= 1


def test_source_set_up_in_float16_has_the_same_loss_curve(known):
    set_up = dataclasses.replace(AS_SOURCE, workers=0, mode=None)
    source = Conventional(SMALL, sounds(), "cpu", set_up)
    source.train_window({"epoch": torch.tensor(0)})
    found = torch.tensor(source.losses, dtype=torch.float64)
    assert source.scaler.get_scale() > 1
    assert share_of_budget([found], early(known[:1], 1), torch.float16) <= 1


@FULLY
def test_first_losses_match_at_the_source_s_network_size():
    """Only 8 steps: rounding flips many more ReLUs and ties here, and later losses would differ too much."""
    config = dataclasses.replace(
        SMALL, channels=(32, 64, 128), hidden=256, learning_rate=1e-3, batch_size=48, val_batch_size=64, epochs=2
    )
    known = deviations(config, data=sounds(files=6, longs=16))
    assert len(known[0][0]) == 8
    assert share_of_budget(curve(Optimized(config, sounds(files=6, longs=16), "cpu"), 2), known) <= 1
    assert known[0][2].max() < 1e-3


def test_reference_loss_falls_and_all_weights_change(known):
    """The loss falls and all weights change; otherwise agreement would show nothing."""
    truth = known[0][0]
    assert truth[-STEPS:].mean() < 0.9 * truth[:STEPS].mean()
    trainer = Reference(SMALL, sounds(), "cpu")
    before = {k: v.clone() for k, v in trainer.state_dict()["weights"].items()}
    trainer.train_window({"epoch": torch.tensor(0)})
    changed = {k for k, v in trainer.state_dict()["weights"].items() if not torch.equal(v, before[k])}
    assert changed == before.keys()


@pytest.mark.parametrize("name", [t for t in TECHNIQUES if t not in OF_THEIR_OWN])
def test_switching_one_technique_off_keeps_the_loss_curve(name, known):
    config = dataclasses.replace(SMALL, **{name: False})
    assert share_of_budget(curve(Optimized(config, sounds(), "cpu"), 3), early(known)) <= 1


@pytest.mark.parametrize("name", [t for t in TECHNIQUES if t not in OF_THEIR_OWN])
def test_one_technique_alone_keeps_the_loss_curve(name, known):
    config = dataclasses.replace(without_techniques(SMALL), **{name: True})
    assert share_of_budget(curve(Optimized(config, sounds(), "cpu"), 3), early(known)) <= 1


def test_without_techniques_optimized_equals_reference_bit_for_bit():
    plain = trained(Reference, count=4)
    off = trained(Optimized, without_techniques(SMALL), count=4)
    assert same(plain.state_dict(), off.state_dict())
    assert plain.metrics() == off.last_metrics()
    assert plain.validation() == off.validation()


def test_activation_checkpoint_keeps_the_loss_curve(known):
    config = dataclasses.replace(SMALL, activation_checkpoint=True)
    assert share_of_budget(curve(Optimized(config, sounds(), "cpu"), 3), early(known)) <= 1


@pytest.mark.parametrize(("low", "dtype"), [("autocast_bf16", torch.bfloat16), ("autocast_fp16", torch.float16)])
def test_half_precision_error_is_within_that_of_the_half_precision_reference(low, dtype, known):
    config, count = dataclasses.replace(SMALL, **{low: True}), 5
    plain = curve(Reference(config, sounds(), "cpu"), count)
    halves = [
        (truth[: len(run)], run, (run - truth[: len(run)]).abs().cummax(0).values)
        for run, (truth, *_) in zip(plain, known, strict=True)
    ]
    assert halves[0][2].max() > 10 * known[0][2][: 5 * STEPS].max()
    found = curve(Optimized(config, sounds(), "cpu"), count)
    assert share_of_budget(found, halves, dtype) <= 1


@pytest.mark.usefixtures("quickly_compiled")
def test_compiled_loss_curve_matches_and_a_second_trainer_recompiles_nothing(known, monkeypatch):
    config = dataclasses.replace(SMALL, use_compile=True)
    assert share_of_budget(curve(Optimized(config, sounds(), "cpu"), 3), early(known)) <= 1
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    trained(Optimized, dataclasses.replace(config, seed=3, learning_rate=1e-2), count=2)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before
    # Each form counts its own recompilations. They are only traced, since compiling takes seconds.
    monkeypatch.setattr(compiled_function, "_inductor", lambda graph, inputs, options=None: graph)
    with torch._dynamo.config.patch(recompile_limit=1):
        trained(Optimized, dataclasses.replace(config, dropout=0.0), count=1)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > before


def test_failed_compilation_warns_and_training_runs_uncompiled(monkeypatch):
    def fails(*arguments):
        raise torch._dynamo.exc.TorchDynamoException("no compiler was found")

    monkeypatch.setattr(torch, "compile", lambda function, **options: fails)
    module._compiled.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match="leak_cnn's .* runs uncompiled: no compiler was found"):
            trainer = trained(Optimized, dataclasses.replace(SMALL, use_compile=True), count=1)
    finally:
        module._compiled.cache_clear()
    assert trainer.last_metrics() == trained(Optimized, SMALL, count=1).last_metrics()


class Recorded(TorchDispatchMode):
    """Backend that replays like CUDA: the captured operations, in the same memory, without the step's Python code."""

    def __init__(self):
        super().__init__()
        self.operations, self.replayed = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.operations.append((func, args, kwargs or {}, out))
        return out

    def aside(self, call, device):
        return call()

    def capture(self, call, device):
        self.operations.clear()
        with self:
            outputs = call()
        operations, fresh = list(self.operations), True

        def replay():
            nonlocal fresh
            self.replayed += 1
            if fresh:  # the capture has already executed the operations
                fresh = False
                return
            for func, args, kwargs, out in operations:
                again = func(*args, **kwargs)
                for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                    if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)

        return outputs, replay


def test_graph_replay_is_bit_identical_to_eager(monkeypatch):
    """No step or validation depends on decisions in Python, or on memory that another step would not use."""
    backends = []

    def graphed(call, **options):
        backends.append(Recorded())
        return CudaGraphStep(call, backend=backends[-1], **options)

    eager = trained(Optimized, dataclasses.replace(SMALL, use_cudagraphs=False), count=6)
    monkeypatch.setattr(module, "cuda_graph_step", graphed)
    replayed = trained(Optimized, dataclasses.replace(SMALL, warmup_steps=2), count=6)
    assert [b.replayed for b in backends] == [6 * STEPS - 2, 6 - 2]
    assert (replayed._step.captures, replayed._step.reason) == (1, None)
    for backend in backends:
        names = {func.overloadpacket.__name__ for func, *_ in backend.operations}
        assert not names & {"_local_scalar_dense", "nonzero", "_unique2", "masked_select"}, "the host waits"
    assert same(eager.state_dict(), replayed.state_dict())
    assert eager.last_metrics() == replayed.last_metrics()
    assert eager.validation() == replayed.validation()


# --- checkpoints ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [Reference, Optimized])
@pytest.mark.parametrize("second", [Reference, Optimized])
def test_each_trainer_resumes_from_a_checkpoint_of_the_other(first, second):
    target = second(SMALL, sounds(), "cpu")
    target.load_state_dict(through_a_file(trained(first, count=3)))
    for epoch in range(3, 6):
        target.train_window({"epoch": torch.tensor(epoch)})
    undisturbed = trained(second, count=6)
    if first is second:
        assert same(target.state_dict(), undisturbed.state_dict())
    for name, weight in undisturbed.weights.items():
        assert torch.allclose(target.weights[name], weight, rtol=1e-4, atol=1e-5), name
    assert target.last_report().losses == pytest.approx(undisturbed.last_report().losses, rel=1e-4)


@pytest.mark.parametrize("kind", [Reference, Optimized])
def test_resuming_at_random_epochs_is_bit_identical(kind):
    expected = trained(kind, count=8).state_dict()
    rng = random.Random(1)
    for _ in range(count(quick=3, full=20 if kind is Optimized else 7)):
        stop = rng.randrange(1, 8)
        trainer = kind(SMALL, sounds(), "cpu")
        trainer.load_state_dict(through_a_file(trained(kind, count=stop)))
        for epoch in range(stop, 8):
            trainer.train_window({"epoch": torch.tensor(epoch)})
        assert same(trainer.state_dict(), expected), f"stopped after epoch {stop}"


@pytest.mark.parametrize("kind", [Reference, Optimized])
def test_checkpoint_with_other_sizes_or_missing_weights_is_rejected(kind):
    other = kind(dataclasses.replace(SMALL, hidden=7), sounds(), "cpu")
    message = r"hidden\.weight has shape \[7, 128\] in the checkpoint and \[8, 128\] here"
    with pytest.raises(ValueError, match=message):
        kind(SMALL, sounds(), "cpu").load_state_dict(other.state_dict())
    state = other.state_dict()
    del state["weights"]["leak.bias"]
    with pytest.raises(ValueError, match=r"the weights leak\.bias are only in the checkpoint, or only here"):
        other.load_state_dict(state)


@pytest.mark.parametrize("kind", [Reference, Optimized])
def test_best_weights_have_the_largest_macro_f1_over_files(kind):
    trainer = kind(dataclasses.replace(SMALL, learning_rate=3e-2), sounds(3), "cpu")
    best, most = None, -1.0
    for epoch in range(6):
        trainer.train_window({"epoch": torch.tensor(epoch)})
        f1 = macro_f1(trainer.validation().files)
        if f1 > most:
            best, most = (epoch + 1, {k: w.clone() for k, w in trainer.state_dict()["weights"].items()}), f1
    state = trainer.state_dict()["best"]
    assert (state["epoch"], state["f1"]) == (best[0], most)
    assert same(state["weights"], best[1])


@pytest.mark.parametrize("kind", [Reference, Optimized])
def test_best_score_of_another_measure_is_reset_and_f1_above_1_is_rejected(kind):
    state = kind(SMALL, sounds(3), "cpu").state_dict()
    state["best"] = {"weights": state["best"]["weights"], "files": 3, "epoch": 1}
    trainer = kind(SMALL, sounds(3), "cpu")
    trainer.load_state_dict(state)
    assert float(trainer.best_f1) == -1
    state["best"]["f1"] = 2.0
    with pytest.raises(ValueError, match=r"the F1 is 2\.0; it lies between 0 and 1"):
        trainer.load_state_dict(state)


@pytest.mark.parametrize("kind", [Reference, Optimized])
def test_run_stops_after_patience_epochs_without_a_better_validation(kind):
    trainer = kind(dataclasses.replace(SMALL, patience=2), sounds(3), "cpu")
    assert trainer.stops() is None
    for epoch in range(3):
        trainer.train_window({"epoch": torch.tensor(epoch)})
    state = trainer.state_dict()
    for best, why in (
        (1, "no validation was better than that of epoch 1 for 2 epochs (patience)"),
        (2, None),
        (0, None),
    ):
        state["best"]["epoch"] = best
        trainer.load_state_dict(state)
        assert trainer.stops() == why
    endless = kind(SMALL, sounds(3), "cpu")
    endless.load_state_dict({**state, "best": {**state["best"], "epoch": 1}})
    assert endless.stops() is None


# --- what a run reports ---------------------------------------------------------------------------------------------


def poisoned():
    data = sounds()
    data.mels["train"][1, 3, 0, 5, 0] = torch.nan
    return data


@pytest.mark.parametrize("kind", [Reference, Optimized])
def test_nan_loss_stops_training_and_names_its_step(kind, tmp_path):
    data = poisoned()
    losses = trained(kind, count=1, data=data).last_report().losses
    step = next(i for i, loss in enumerate(losses, 1) if math.isnan(loss))
    batches = Epochs(data, SMALL.batch_size, SMALL.epochs, SMALL.seed)
    with pytest.raises(DivergedError, match=rf"epoch 1, step {step}: the loss is nan; training has stopped"):
        fit(kind(SMALL, data, "cpu"), batches, Options(folder=str(tmp_path)))
    assert not list(tmp_path.glob("*.pt"))


def test_nan_loss_is_reported_when_the_next_epoch_s_report_arrives_with_it(monkeypatch):
    """A simulated device completes its work only when the host waits for it."""

    class Event:
        done = False

        def record(self):
            Event.done = False

        def query(self):
            return Event.done

        def synchronize(self):
            Event.done = True

    monkeypatch.setattr(torch.cuda, "Event", Event)
    data = poisoned()
    trainer = Optimized(SMALL, data, "cpu")
    trainer._reports._cuda = True
    monkeypatch.setattr(torch, "empty", lambda *shape, pin_memory=False, **options: torch.zeros(*shape, **options))
    trainer.train_window({"epoch": torch.tensor(0)})
    assert trainer.metrics() is None
    data.mels["train"].nan_to_num_()
    trainer.train_window({"epoch": torch.tensor(1)})
    assert trainer.metrics()["window"] == 1
    assert "step" in trainer.metrics()


def test_run_reports_epochs_and_segments(tmp_path):
    from rich.console import Console

    config, output = dataclasses.replace(SMALL, epochs=3), io.StringIO()
    batches = Epochs(sounds(), config.batch_size, config.epochs, config.seed)
    trainer = Optimized(config, sounds(), "cpu")
    outcome = fit(trainer, batches, Options(folder=str(tmp_path)), name="leak_cnn", console=Console(file=output))
    assert (outcome.windows, outcome.items) == (3, 3 * STEPS * config.batch_size)
    assert output.getvalue().startswith("leak_cnn: 3 epochs in ")
    assert f"{outcome.items} segments in all" in output.getvalue()
    assert {"file_accuracy", "validation_f1", "learning_rate"} <= outcome.metrics.keys()


@pytest.mark.parametrize("kind", [Reference, Optimized])
def test_validation_runs_every_validate_every_epochs_and_after_the_last(kind):
    config = dataclasses.replace(SMALL, validate_every=2, epochs=5)
    trainer, seen = kind(config, sounds(), "cpu"), []
    for epoch in range(5):
        trainer.train_window({"epoch": torch.tensor(epoch)})
        seen.append(trainer.last_report().validation is not None)
    assert seen == [False, True, False, True, True]
    never = trained(kind, dataclasses.replace(config, validate_every=0), count=2)
    assert never.validation() is None
    assert "file_accuracy" not in never.last_report().metrics()


@pytest.mark.parametrize("kind", [Reference, Optimized])
def test_confusion_matrices_count_every_validation_segment_and_file(kind):
    found = trained(kind, count=1).validation()
    labels = sounds().labels["validation"]
    of_class = torch.bincount(labels, minlength=len(CLASSES)) * LONGS * SHORTS
    assert [sum(row) for row in found.segments.confusion] == of_class.tolist()
    leaks = int((labels == LEAK).sum())
    assert [sum(row) for row in found.files] == [FILES - leaks, leaks]


def test_data_set_larger_than_limit_bytes_is_streamed_with_a_warning():
    resident = trained(Optimized, count=3)
    with pytest.warns(RuntimeWarning, match="leak_cnn: the split takes .* batches are streamed from memory"):
        streamed = trained(Optimized, dataclasses.replace(SMALL, limit_bytes=12 * 72 * 3), count=3)
    assert same(resident.state_dict(), streamed.state_dict())
    with pytest.raises(PerfsuiteError, match="limit_bytes: 100 is less than three batches"):
        Optimized(dataclasses.replace(SMALL, limit_bytes=100), sounds(), "cpu")


@pytest.mark.parametrize("kind", [Reference, Optimized])
def test_data_set_smaller_than_a_batch_is_rejected(kind):
    config = dataclasses.replace(SMALL, batch_size=65, resident_dataset=False)
    with pytest.raises(PerfsuiteError, match="batch_size: 65 is more than the 64 examples"):
        kind(config, sounds(), "cpu")


def test_loader_workers_give_the_same_state_as_a_resident_data_set():
    config = dataclasses.replace(SMALL, resident_dataset=False, num_workers=1, persistent_workers=False)
    assert same(trained(Optimized, config, count=2).state_dict(), trained(Optimized, count=2).state_dict())


def test_torch_settings_are_restored_after_training():
    cudnn = torch.backends.cudnn

    def settings():
        return torch.get_float32_matmul_precision(), cudnn.benchmark, cudnn.allow_tf32, cudnn.deterministic

    before = settings()
    for kind in (Reference, Optimized):
        trained(kind, dataclasses.replace(SMALL, tf32=True, cudnn_autotune=True), count=1)
    assert settings() == before


# --- the configuration ----------------------------------------------------------------------------------------------


def test_default_network_and_settings_match_the_source():
    trainer = Optimized(dataclasses.replace(TrainConfig(), batch_size=8, use_compile=False), sounds(), "cpu")
    assert sum(w.numel() for w in trainer.weights.values()) == 618_758
    assert len(trainer.weights) == 12
    default = TrainConfig()
    assert (default.batch_size, default.val_batch_size, default.learning_rate) == (5632, 2048, 1e-3)


def test_learning_rate_matches_cosine_annealing():
    rates = [SMALL.rate(epoch) for epoch in range(SMALL.epochs + 2)]
    weight = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.AdamW([weight], lr=SMALL.learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, SMALL.epochs)
    expected = []
    for _ in range(SMALL.epochs):
        expected.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert rates[: SMALL.epochs] == pytest.approx(expected)
    assert rates[SMALL.epochs :] == [0, 0]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"batch_size": 0}, "batch_size=0: use 1 or more"),
        ({"dropout": 1.0}, "dropout=1.0: use 0 or more and less than 1"),
        ({"learning_rate": 0.0}, "learning_rate=0.0: use a number above 0"),
        ({"learning_rate": math.nan}, "learning_rate=nan"),
        ({"channels": (4, 0, 4)}, r"channels=\(4, 0, 4\)"),
        ({"autocast_fp16": True, "autocast_bf16": True}, "autocast_fp16=True: a product has one precision"),
        ({"limit_bytes": -1}, "limit_bytes=-1"),
        ({"seed": -1}, "seed=-1"),
    ],
)
def test_invalid_settings_are_rejected(fields, says):
    with pytest.raises(ValueError, match=says):
        dataclasses.replace(SMALL, **fields)


def test_boolean_fields_are_exactly_the_switches():
    named = {f.name for f in dataclasses.fields(TrainConfig) if f.type in (bool, "bool")}
    assert named == {*TECHNIQUES, *TRADES, "persistent_workers"}
    off = without_techniques(SMALL)
    assert not any(getattr(off, t) for t in (*TECHNIQUES, *TRADES))


@pytest.mark.parametrize("path", sorted((ROOT / "configs/leak_cnn").glob("*.yaml")), ids=lambda p: p.stem)
def test_config_files_have_the_techniques_and_sizes_of_their_names(path):
    pytest.importorskip("jsonargparse")
    from suite import configuration
    from suite.leak_cnn.epochs import Data

    config, _, data = configuration.read([TrainConfig, Options, Data], path)
    on = {t for t in TECHNIQUES if getattr(config, t)}
    every = set(TECHNIQUES) - {"cudnn_autotune"}
    full = every - {"tf32", "autocast_bf16"}
    expected = {"baseline": set(), "optimized": full, "optimized_bf16": every, "tiny": full - {"use_compile"}}
    assert on == expected[path.stem]
    sizes = (400, 400, 100, 100) if path.stem == "tiny" else (5632, 5632, 200, 200)
    assert (config.batch_size, data.batch_size, config.epochs, data.epochs) == sizes


# --- on a GPU -------------------------------------------------------------------------------------------------------

gpu = pytest.mark.gpu
LARGER = dataclasses.replace(SMALL, batch_size=128, val_batch_size=96, channels=(16, 32, 64), hidden=64, epochs=8)


def larger():
    return sounds(files=16, longs=40)


@pytest.fixture(scope="module")
def known_on_gpu():
    return deviations(SMALL, "cuda")


@gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("graphs", [False, True])
def test_gpu_loss_curve_matches_the_reference_over_50_steps(compiled, graphs, known_on_gpu):
    config = dataclasses.replace(SMALL, use_cudagraphs=graphs, use_compile=compiled)
    trainer = Optimized(config, sounds(), "cuda")
    assert share_of_budget(curve(trainer), known_on_gpu) <= 1
    if graphs:
        for step in (trainer._step, trainer._validate):
            assert (step.captures, step.reason) == (1, None)


@gpu
@pytest.mark.parametrize("graphs", [False, True])
def test_gpu_resuming_at_random_epochs_is_bit_identical(graphs):
    config = dataclasses.replace(LARGER, use_cudagraphs=graphs, use_compile=True)
    whole = trained(Optimized, config, 8, larger(), "cuda").state_dict()
    rng = random.Random(3)
    for _ in range(5):
        stop = rng.randrange(1, 8)
        trainer = Optimized(config, larger(), "cuda")
        trainer.load_state_dict(through_a_file(trained(Optimized, config, stop, larger(), "cuda")))
        for epoch in range(stop, 8):
            trainer.train_window({"epoch": torch.tensor(epoch)})
        assert same(trainer.state_dict(), whole), f"stopped after epoch {stop}"


@gpu
def test_gpu_epoch_waits_only_for_the_previous_report(no_host_sync):
    config = dataclasses.replace(LARGER, use_compile=True, epochs=40)
    trainer = trained(Optimized, config, 6, larger(), "cuda")
    torch.cuda.synchronize()
    with no_host_sync():
        for epoch in range(6, 20):
            trainer.train_window({"epoch": torch.tensor(epoch)})
            trainer.metrics()
    assert trainer.last_metrics()["window"] == 20


@gpu
def test_gpu_peak_memory_is_constant_over_100_epochs():
    config = dataclasses.replace(LARGER, use_compile=True, epochs=100)
    gc.collect()  # reference cycles may keep an earlier test's trainer alive
    trainer, peaks = Optimized(config, larger(), "cuda"), []
    for epoch in range(100):
        torch.cuda.reset_peak_memory_stats()
        trainer.train_window({"epoch": torch.tensor(epoch)})
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated())
    assert len(set(peaks[8:])) == 1, f"{min(peaks[8:])} to {max(peaks[8:])} bytes"


def test_host_waits_for_the_report_before_the_last_one(monkeypatch):
    """A simulated device completes its work only when the host waits for it."""
    made, waited = [], []

    class Event:
        def record(self):
            made.append(self)
            self.number = len(made)

        def query(self):
            return self.number in waited

        def synchronize(self):
            waited.append(self.number)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    reports = module._Reports(torch.device("cpu"))
    reports._cuda, reports._free = True, [torch.zeros(1) for _ in range(4)]
    for number in range(1, 5):
        reports.send(
            torch.tensor([float(number)]),
            lambda whole: SimpleNamespace(n=whole.item(), validation=None, wrong=lambda: None),
        )
        found = reports.wait(1)
        assert waited == list(range(1, number))
        assert (found.n if found else 0) == number - 1
    assert reports.wait(0).n == 4
    assert waited == [1, 2, 3, 4]
