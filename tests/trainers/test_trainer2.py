"""The trainer2 trainers: equal metrics in each window, checkpoints, reports, configuration and GPU behaviour."""

from __future__ import annotations

import dataclasses
import io
import math
import random
import warnings

import pytest
import torch
from scale import count, draws

from optimized.trainers import trainer2 as module
from optimized.trainers.trainer2 import Trainer as Optimized
from perfsuite import Cost, Pair, Workload, floats, integers, scalar, side, size, stateful, tensor
from perfsuite.correctness.equivalence import C, K
from reference.trainers.trainer2 import Trainer as Reference
from suite.trainer2.config import TECHNIQUES, TrainConfig, without_techniques

VOCABULARY = 50
SMALL = TrainConfig(
    batch_size=3, sequence_length=6, blocks=1, lattice=3, memory_slots=16, window=2, compiled_function=False
)
WINDOWS = count(quick=30, full=200)
NEIGHBOURS = 3
"""Number of reference runs with a perturbed initial field; they show how far rounding alone moves the curve."""
CLAIMED = 1e-4
"""The source's tolerance for loss curves."""
OF_THEIR_OWN = ("compiled_function", "use_cudagraphs", "autocast_bf16")
CURVES = ("loss", "curvature", "speed", "loss_delta")


def windows(kind, change=lambda trainer: trainer, bfloat16=False):
    """Return a pair's side that trains from a given initial field. A window returns its metrics and the new state.

    bfloat16  whether the forward pass is in bfloat16
    graphs    whether the optimized trainer compiles and captures CUDA graphs. Drawn shapes do not: each would need a
              compilation of its own.
    """

    def make(field, embedding, blocks, window, graphs):
        config = dataclasses.replace(
            SMALL, width=embedding.shape[1], lattice=field.shape[0], blocks=blocks, window=window, memory_slots=2048
        )
        # Inputs in bfloat16 select the reference under autocast, which shows the error of bfloat16 alone. There is no
        # complex bfloat16 dtype for the field.
        in_half = field.dtype is torch.bfloat16
        config = dataclasses.replace(config, autocast_bf16=bfloat16 or in_half)
        field, embedding = (t.float() if in_half else t for t in (field, embedding))
        if kind is Optimized:
            used = {"use_cudagraphs": bool(graphs), "compiled_function": bool(graphs), "warmup_steps": 2}
            trainer = Optimized(dataclasses.replace(config, **used), embedding.shape[0], field.device)
        else:
            trainer = Reference(config, embedding.shape[0], field.device, field.dtype)
        trainer.weights["embedding"].copy_(embedding)
        first = torch.complex(field[..., 0], field[..., 1])
        trainer.field.copy_(first)
        trainer.rest.copy_(first)
        trainer = change(trainer)

        def train(input_ids):
            trainer.train_window({"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)})
            if kind is Optimized:
                reported = trainer.reported.clone()
            else:
                reported = torch.tensor([trainer.metrics()[name] for name in CURVES], dtype=field.dtype)
                reported = reported.to(field.device)
            return reported, trainer.metric.clone(), trainer.theta.clone()

        return train

    return make


COMPILED = {}


def compiled_step(trainer):
    """Return the reference with its step under torch.compile and its CUDA graphs, as a user would write it.

    Only one trainer of each configuration is compiled; it loads the state of every later one.
    """
    key = trainer.config, len(trainer.weights["embedding"])
    if key in COMPILED:
        COMPILED[key].load_state_dict(trainer.state_dict())
        return COMPILED[key]
    step = trainer._step

    def moved(field, momentum, *batch):
        trainer.field, trainer.momentum = field, momentum
        reported = step(*batch)
        return trainer.field, trainer.momentum, reported

    compiled = torch.compile(moved, mode="reduce-overhead")

    def call(*batch):
        with warnings.catch_warnings():  # for example about slow complex operations
            warnings.simplefilter("ignore")
            torch.compiler.cudagraph_mark_step_begin()
            after, momentum, reported = compiled(trainer.field, trainer.momentum, *batch)
        # The next replay overwrites the graph's outputs.
        trainer.field, trainer.momentum = after.clone(), momentum.clone()
        return tuple(t.clone() for t in reported)

    trainer._step = call
    COMPILED[key] = trainer
    return trainer


def flops(B, T, D, blocks, window):
    """Count the operations of the free and the nudged window: weight products, and attention, half of it masked."""
    return 2 * window * blocks * (2 * B * T * 12 * D**2 + 2 * B * T * T * D)


ITEMS = {"items": lambda B, T, window: B * T * window, "unit": "tokens"}
ONE = scalar(integers(1, 1))
DEEP = {"blocks": 6, "graphs": 1, "clock": "wall", "device": "cuda", "host_syncs": 0}
trainer2 = Pair(
    reference=stateful(windows(Reference)),
    optimized=stateful(windows(Optimized), settle=2),  # eager steps, then the capture
    inputs={
        "field": tensor(8, 8, 16, 16, 2, values=floats(-2, 2)),
        "embedding": tensor("V", "D", values=floats(-3, 3)),
        "blocks": scalar(integers(1, 2)),
        "window": ONE,
        "graphs": scalar(integers(0, 0)),
    },
    step_inputs={"input_ids": tensor("B", "T", dtype="int64", values=integers(0, "V"))},
    gradients=False,
    sizes={"B": size(1, 4), "T": size(1, 9), "V": size(1, 50), "D": size(256, 256)},
    steps=(1, 3),
    max_examples=draws(cpu=3, otherwise=12),  # the field alone has 32,768 numbers
    rivals={"reduce_overhead": stateful(side(windows(Reference, compiled_step), devices=("cuda",)), settle=2)},
    workloads=[
        Workload("launches", B=16, T=128, V=32000, D=256, **DEEP, window=8, speedup=2.5),
        Workload("products", B=64, T=512, V=32000, D=512, **DEEP, window=1),
        Workload("cpu", B=4, T=8, V=50, D=256, blocks=1, window=1, graphs=0, clock="wall", device="cpu"),
    ],
    cost=Cost(flops=flops, **ITEMS),
)


# The source's fastest form, in bfloat16, against the float32 reference.
trainer2_bfloat16 = dataclasses.replace(
    trainer2,
    optimized=stateful(windows(Optimized, bfloat16=True), settle=2),
    precision="bfloat16",
    rivals={
        "reduce_overhead": stateful(side(windows(Reference, compiled_step, bfloat16=True), devices=("cuda",)), settle=2)
    },
    workloads=[
        Workload("launches", B=16, T=128, V=32000, D=256, **DEEP, window=8, speedup=10),
        Workload("products", B=64, T=512, V=32000, D=512, **DEEP, window=1, speedup=8),
        Workload("cpu", B=4, T=8, V=50, D=256, blocks=1, window=1, graphs=0, clock="wall", device="cpu"),
    ],
    cost=Cost(flops=flops, precision="bfloat16", **ITEMS),
)


def batches(count, config=SMALL):
    """Yield the same batches for every trainer; the second half of each batch's last item is padding."""
    generator = torch.Generator().manual_seed(5)
    B, T = config.batch_size, config.sequence_length
    for _ in range(count):
        mask = torch.ones(B, T)
        mask[-1, T // 2 :] = 0
        yield {"input_ids": torch.randint(VOCABULARY, (B, T), generator=generator), "attention_mask": mask}


def curve(trainer, windows=WINDOWS, config=SMALL):
    """Return the metrics of each window, [windows, 4]."""
    rows = []
    for batch in batches(windows, config):
        trainer.train_window(batch)
        found = trainer.last_metrics() if hasattr(trainer, "last_metrics") else trainer.metrics()
        rows.append([found[name] for name in CURVES])
    return torch.tensor(rows, dtype=torch.float64)


def state(trainer):
    return {k: v for k, v in trainer.state_dict().items() if isinstance(v, torch.Tensor)}


@pytest.fixture(scope="module")
def known():
    """Return (truth, float32 curve, largest deviation from the truth up to each window) of the reference."""
    truth = curve(Reference(SMALL, VOCABULARY, "cpu", torch.float64))
    plain = curve(Reference(SMALL, VOCABULARY, "cpu"))
    runs = [plain]
    for seed in range(NEIGHBOURS):
        near = Reference(SMALL, VOCABULARY, "cpu")
        flips = torch.rand(near.field.shape, generator=torch.Generator().manual_seed(seed)) < 0.5
        near.field.mul_(torch.where(flips, 1 + 2**-24, 1 - 2**-24))
        runs.append(curve(near))
    squares = torch.stack([(run - truth) ** 2 for run in runs]).mean(0)
    return truth, plain, squares.sqrt().cummax(0).values


def budget(known):
    truth, _, deviation = known
    eps = torch.finfo(torch.float32).eps
    return K * deviation + C * eps * (truth.abs() + truth.square().mean(0).sqrt())


def test_optimized_metrics_match_the_reference_over_many_windows(known):
    truth, plain, deviation = known
    found = curve(Optimized(SMALL, VOCABULARY, "cpu"))
    beyond = (found - truth).abs() / budget(known)
    window, which = divmod(int(beyond.argmax()), len(CURVES))
    assert beyond.max() <= 1, f"{CURVES[which]} of window {window}: {beyond.max():.2f} of its budget"
    # The source's tolerance holds only if rounding alone moves the reference's curve by less.
    if K * deviation[:, 0].max() <= CLAIMED:
        assert (found - plain)[:, 0].abs().max() <= CLAIMED
    assert deviation[:, 0].max() > 0


def test_reference_loss_varies_and_all_state_except_rest_changes(known):
    """Metric, rotor, field and memory all change; otherwise agreement would show nothing."""
    truth, *_ = known
    assert truth[:, 0].std() > 0.01
    trainer = Reference(SMALL, VOCABULARY, "cpu")
    before = {k: v.clone() for k, v in state(trainer).items()}
    curve(trainer, 3)
    for name, value in state(trainer).items():
        assert torch.equal(value, before[name]) == (name == "rest"), name


@pytest.mark.parametrize("name", [t for t in TECHNIQUES if t not in OF_THEIR_OWN])
def test_switching_one_technique_off_keeps_the_metrics(name, known):
    config = dataclasses.replace(SMALL, **{name: False})
    found = curve(Optimized(config, VOCABULARY, "cpu"), 20)
    assert ((found - known[0][:20]).abs() <= budget(known)[:20]).all()


def test_switching_all_techniques_off_keeps_the_metrics(known):
    found = curve(Optimized(without_techniques(SMALL), VOCABULARY, "cpu"), 20)
    assert ((found - known[0][:20]).abs() <= budget(known)[:20]).all()


def test_bfloat16_error_is_within_that_of_the_bfloat16_reference(known):
    config = dataclasses.replace(SMALL, autocast_bf16=True)
    truth = known[0][:50]
    plain = (curve(Reference(config, VOCABULARY, "cpu"), len(truth)) - truth).abs()
    found = (curve(Optimized(config, VOCABULARY, "cpu"), len(truth)) - truth).abs()
    assert plain.max() > 100 * known[2][:50].max()
    assert (found <= K * plain.cummax(0).values + C * torch.finfo(torch.bfloat16).eps * truth.abs()).all()


@pytest.mark.usefixtures("quickly_compiled")
def test_compiled_metrics_match_the_reference(known):
    found = curve(Optimized(dataclasses.replace(SMALL, compiled_function=True), VOCABULARY, "cpu"), 20)
    assert ((found - known[0][:20]).abs() <= budget(known)[:20]).all()


@pytest.mark.parametrize("first", [Reference, Optimized])
@pytest.mark.parametrize("second", [Reference, Optimized])
def test_each_trainer_resumes_from_a_checkpoint_of_the_other(first, second):
    every = list(batches(6))
    source, target = first(SMALL, VOCABULARY, "cpu"), second(SMALL, VOCABULARY, "cpu")
    for batch in every[:3]:
        source.train_window(batch)
    target.load_state_dict(source.state_dict())
    undisturbed = second(SMALL, VOCABULARY, "cpu")
    for batch in every:
        undisturbed.train_window(batch)
    for batch in every[3:]:
        target.train_window(batch)
    for name, value in state(undisturbed).items():
        if first is second:
            assert torch.equal(state(target)[name], value), name
        elif value.is_floating_point() or value.is_complex():
            assert torch.allclose(state(target)[name], value, rtol=1e-4, atol=1e-5), name


@pytest.mark.parametrize("side", [Reference, Optimized])
def test_resuming_at_random_windows_is_bit_identical(side, tmp_path):
    every = list(batches(12))
    undisturbed = side(SMALL, VOCABULARY, "cpu")
    for batch in every:
        undisturbed.train_window(batch)
    expected = state(undisturbed)
    rng = random.Random(1)
    for _ in range(count(quick=3, full=20)):
        stop = rng.randrange(1, 12)
        trainer = side(SMALL, VOCABULARY, "cpu")
        for batch in every[:stop]:
            trainer.train_window(batch)
        torch.save(trainer.state_dict(), tmp_path / "state.pt")
        trainer = side(SMALL, VOCABULARY, "cpu")
        trainer.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        for batch in every[stop:]:
            trainer.train_window(batch)
        for name, value in state(trainer).items():
            assert torch.equal(value, expected[name]), f"{name}, stopped after window {stop}"


@pytest.mark.parametrize("side", [Reference, Optimized])
def test_checkpoint_with_other_memory_slots_is_rejected(side):
    other = side(dataclasses.replace(SMALL, memory_slots=8), VOCABULARY, "cpu")
    with pytest.raises(ValueError, match=r"memory_coordinates has shape \[8, 8\] in the checkpoint and \[16, 8\] here"):
        side(SMALL, VOCABULARY, "cpu").load_state_dict(other.state_dict())


@pytest.mark.parametrize("side", [Reference, Optimized])
def test_checkpoint_with_fewer_blocks_is_rejected(side):
    other = side(SMALL, VOCABULARY, "cpu")
    with pytest.raises(ValueError, match=r"the weights 1\.contract, .* are only in the checkpoint, or only here"):
        side(dataclasses.replace(SMALL, blocks=2), VOCABULARY, "cpu").load_state_dict(other.state_dict())


def test_failed_compilation_warns_and_training_runs_uncompiled(monkeypatch):
    def fails(*arguments):
        raise torch._dynamo.exc.TorchDynamoException("no compiler was found")

    monkeypatch.setattr(torch, "compile", lambda function, **options: fails)
    module._compiled.cache_clear()
    try:
        trainer = Optimized(dataclasses.replace(SMALL, compiled_function=True), VOCABULARY, "cpu")
        with pytest.warns(RuntimeWarning, match="trainer2's f.* runs uncompiled: no compiler was found"):
            trainer.train_window(next(iter(batches(1))))
    finally:
        module._compiled.cache_clear()
    plain = Optimized(dataclasses.replace(SMALL, compiled_function=False), VOCABULARY, "cpu")
    plain.train_window(next(iter(batches(1))))
    assert torch.equal(trainer.field, plain.field)


def test_report_contains_its_window_number():
    trainer = Optimized(SMALL, VOCABULARY, "cpu")
    assert trainer.metrics() is None
    for number, batch in enumerate(batches(5), 1):
        trainer.train_window(batch)
        assert trainer.metrics()["window"] == number
    other = Optimized(SMALL, VOCABULARY, "cpu")
    other.load_state_dict(trainer.state_dict())
    other.train_window(next(iter(batches(1))))
    assert other.metrics()["window"] == 6


@pytest.mark.usefixtures("quickly_compiled")
def test_second_trainer_recompiles_nothing():
    config = dataclasses.replace(SMALL, compiled_function=True)
    curve(Optimized(config, VOCABULARY, "cpu"), 1)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for seed in range(3):
        curve(Optimized(dataclasses.replace(config, seed=seed), VOCABULARY, "cpu"), 2)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before


@pytest.mark.parametrize("kind", [Reference, Optimized])
def test_metrics_do_not_depend_on_padding_tokens(kind):
    short = next(iter(batches(1)))
    other = {k: v.clone() for k, v in short.items()}
    other["input_ids"][-1, SMALL.sequence_length // 2 :] = 7
    found = []
    for batch in (short, other):
        trainer = kind(SMALL, VOCABULARY, "cpu")
        trainer.train_window(batch)
        found.append(trainer.metrics() if kind is Reference else trainer.last_metrics())
    assert found[0] == found[1]


def test_changed_batch_shape_is_rejected_with_static_shapes():
    trainer = Optimized(SMALL, VOCABULARY, "cpu")
    first, second = batches(2)
    trainer.train_window(first)
    fewer = {k: v[:2] for k, v in second.items()}
    with pytest.raises(ValueError, match=r"a batch of shape \[2, 6\] after one of \[3, 6\]"):
        trainer.train_window(fewer)
    free = Optimized(dataclasses.replace(SMALL, static_shapes=False), VOCABULARY, "cpu")
    free.train_window(first)
    free.train_window(fewer)
    assert math.isfinite(free.last_metrics()["loss"])


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("coordinates", 7, "coordinates=7: rotors join pairs"),
        ("width", 128, "width=128: the field takes up 256 channels"),
        ("sequence_length", 513, "sequence_length=513"),
        ("beta_nudge", 0.0, "beta_nudge=0.0"),
        ("batch_size", 17, "batch_size=17: use at most memory_slots=16"),
    ],
)
def test_invalid_settings_are_rejected(field, value, says):
    with pytest.raises(ValueError, match=says):
        dataclasses.replace(SMALL, **{field: value})


def test_both_trainers_print_the_same_reports_within_a_window(capsys):
    config = dataclasses.replace(SMALL, step_progress_every=2)
    shown = []
    for kind in (Reference, Optimized):
        kind(config, VOCABULARY, "cpu").train_window(next(batches(1)))
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]
    assert shown[0].startswith("step 2: lior ")
    assert shown[0].count("step ") == 2 * (config.window // 2)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"static_shapes": False}, "static_shapes=False: a graph has one shape"),
        ({"capture_batch_size": 5}, "capture_batch_size=5: use batch_size=3"),
        ({"step_progress_every": 8}, "step_progress_every=8: a report waits"),
    ],
)
def test_settings_incompatible_with_cuda_graphs_are_rejected(fields, says):
    with pytest.raises(ValueError, match=says):
        dataclasses.replace(SMALL, use_cudagraphs=True, **fields)


# --- on a GPU -------------------------------------------------------------------------------------------------------

gpu = pytest.mark.gpu
LARGER = dataclasses.replace(SMALL, batch_size=8, sequence_length=32, blocks=2, lattice=8, memory_slots=64, window=64)


@pytest.fixture(scope="module")
def known_on_gpu():
    truth = curve(Reference(LARGER, VOCABULARY, "cuda", torch.float64), config=LARGER)
    plain = curve(Reference(LARGER, VOCABULARY, "cuda"), config=LARGER)
    return truth, plain, (plain - truth).abs().cummax(0).values


@gpu
@pytest.mark.parametrize("graphs", [False, True])
def test_gpu_metrics_match_the_reference_over_many_windows(graphs, known_on_gpu):
    config = dataclasses.replace(LARGER, use_cudagraphs=graphs, compiled_function=True)
    trainer = Optimized(config, VOCABULARY, "cuda")
    found = curve(trainer, config=LARGER)
    assert ((found - known_on_gpu[0]).abs() <= budget(known_on_gpu)).all()
    if graphs:
        assert (trainer._step.captures, trainer._step.reason) == (1, None)


@gpu
@pytest.mark.parametrize("graphs", [False, True])
def test_gpu_resuming_at_20_random_windows_is_bit_identical(graphs):
    config = dataclasses.replace(LARGER, use_cudagraphs=graphs, compiled_function=True, warmup_steps=3)
    every = list(batches(40, config))

    def trained(stops):
        trainer = Optimized(config, VOCABULARY, "cuda")
        for number, batch in enumerate(every):
            if number in stops:
                file = io.BytesIO()
                torch.save(trainer.state_dict(), file)
                trainer = Optimized(config, VOCABULARY, "cuda")
                trainer.load_state_dict(torch.load(io.BytesIO(file.getvalue())))
            trainer.train_window(batch)
        return state(trainer)

    whole = trained(())
    resumed = trained(set(random.Random(3).sample(range(1, 40), 20)))
    for name, value in whole.items():
        assert torch.equal(resumed[name], value), name


@gpu
def test_gpu_window_has_no_host_sync(no_host_sync):
    config = dataclasses.replace(LARGER, use_cudagraphs=True, compiled_function=True, warmup_steps=3)
    trainer = Optimized(config, VOCABULARY, "cuda")
    every = [{k: v.cuda() for k, v in batch.items()} for batch in batches(12, config)]
    for batch in every[:4]:
        trainer.train_window(batch)
    torch.cuda.synchronize()
    with no_host_sync():
        for batch in every[4:]:
            trainer.train_window(batch)
            trainer.metrics()
    assert math.isfinite(trainer.last_metrics()["loss"])


@gpu
@pytest.mark.parametrize("graphs", [False, True])
def test_gpu_peak_memory_is_constant_over_100_epochs(graphs):
    config = dataclasses.replace(LARGER, window=8, use_cudagraphs=graphs, compiled_function=True, warmup_steps=3)
    trainer = Optimized(config, VOCABULARY, "cuda")
    peaks = []
    for _ in range(100):
        torch.cuda.reset_peak_memory_stats()
        for batch in batches(4, config):
            trainer.train_window(batch)
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated())
    assert len(set(peaks[5:])) == 1, f"{min(peaks[5:])} to {max(peaks)} bytes"


def test_latest_report_follows_the_device_however_far_the_host_is_ahead(monkeypatch):
    """A simulated device completes its work when the test says so."""
    done = 0

    class Event:
        made = 0

        def record(self):
            Event.made += 1
            self.number = Event.made

        def query(self):
            return self.number <= done

        def synchronize(self):
            nonlocal done
            done = max(done, self.number)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    reports = module._Reports(torch.device("cpu"), batched=True)
    reports._cuda = True
    monkeypatch.setattr(reports, "_buffer", lambda: torch.zeros(4))
    windows = 3 * module.AHEAD
    for window in range(1, windows + 1):
        reports.send(torch.full((4,), float(window)), window)
        done = max(0, window - 7)
        found = reports.latest()
        assert (found["window"], found["loss"]) == (window - 7, window - 7) if found else window <= 7
    assert reports.wait() == {**dict.fromkeys(CURVES, windows), "window": windows}
    assert len(reports._free) == module.AHEAD
    for window in range(1, 2 * module.AHEAD):  # more reports than buffers
        reports.send(torch.full((4,), float(window)), window)
    assert reports.latest()["window"] == windows
    assert reports.wait()["window"] == 2 * module.AHEAD - 1
