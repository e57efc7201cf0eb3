"""The eigenstate_lm trainers: equal loss curves, checkpoints, data, reports, configuration and GPU behaviour."""

from __future__ import annotations

import dataclasses
import gc
import io
import math
import random
import sys
import tempfile
from pathlib import Path

import numpy
import pytest
import torch
from curves import NEIGHBOURS, a_rounding_away, deviation_of, first_points, share_of_rule
from scale import FULL, FULLY, count, draws
from states import same, through_a_file
from torch.utils.checkpoint import checkpoint

from optimized.trainers import eigenstate_lm as module
from optimized.trainers.eigenstate_lm import Trainer as Optimized
from perfsuite import Cost, Pair, PerfsuiteError, Workload, floats, integers, scalar, size, stateful, tensor
from reference.recurrence.eigenstate_scan import eigenstate_scan
from reference.trainers.eigenstate_lm import Trainer as Reference
from suite import packed_text
from suite.claims.eigenstate_lm_setting import TINY
from suite.eigenstate_lm.chunked_scan import chunked_scan
from suite.eigenstate_lm.config import TECHNIQUES, TRADES, TrainConfig, without_techniques
from suite.eigenstate_lm.data import Data, Steps, Text
from suite.runtime import DivergedError, Options, fit
from suite.text import synthetic

ROOT = Path(__file__).resolve().parents[2]
VOCABULARY = 60
SMALL = TrainConfig(
    width=16,
    layers=2,
    eigenstates=4,
    sequence_length=24,
    batch_size=3,
    accumulation=2,
    steps=60,
    learning_rate=1e-2,
    dropout=0.0,
    num_workers=1,
    use_compile=False,
)
OF_THEIR_OWN = ("use_compile", "tf32", "autocast_bf16")


def text_of(tokens, vocabulary, length, folder):
    """Return a pack of these tokens, without a tokenizer; its folder may be deleted."""
    tokens = numpy.asarray(tokens)
    packed_text.write(Path(folder), tokens, numpy.array([len(tokens)]), "", vocabulary, {"recipe": "drawn"})
    given = Text(packed_text.opened(folder), length)
    assert given.tokenizer == ""
    assert given.pack.row is not None  # a memory map, which outlives the folder
    return given


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    drawn = synthetic(VOCABULARY, SMALL.sequence_length, 40).input_ids.flatten().numpy()
    return text_of(drawn, VOCABULARY, SMALL.sequence_length, tmp_path_factory.mktemp("pack"))


# --- the pair -------------------------------------------------------------------------------------------------------


def steps(kind, in_bfloat16=False, scan=eigenstate_scan):
    """Return a pair's side that trains on given tokens. A step returns the loss, the gradient norm and the RMS of each
    weight; in bfloat16, which would round all RMS values alike, the RMS of each weight's change."""

    def make(embedding, tokens, length, batch_size, accumulation, layers, eigenstates, compiled, rate, seed):
        config = dataclasses.replace(
            SMALL,
            width=embedding.shape[1],
            layers=layers,
            eigenstates=eigenstates,
            sequence_length=length,
            batch_size=batch_size,
            accumulation=accumulation,
            learning_rate=rate,
            seed=seed,
            use_compile=bool(compiled),
            # Inputs in bfloat16 select the reference under autocast, which shows the error of bfloat16 alone.
            autocast_bf16=(in_bfloat16 and kind is Optimized) or embedding.dtype is torch.bfloat16,
        )
        if embedding.dtype is torch.bfloat16:
            embedding = embedding.float()
        with tempfile.TemporaryDirectory() as folder:
            given = text_of(tokens.cpu().numpy(), len(embedding), length, folder)
            if kind is Optimized:
                trainer = Optimized(config, given, embedding.device)
                assert trainer._sequences.pack.row is not None  # as above
            else:
                trainer = Reference(config, given, embedding.device, embedding.dtype, scan=scan)
        with torch.no_grad():
            trainer.weights["embedding"].copy_(embedding)
        first = {name: w.detach().clone() * in_bfloat16 for name, w in trainer.weights.items()}

        def step():
            trainer.train_window({})
            report = trainer.last_report()
            figures = torch.tensor([report.loss, report.norm], dtype=embedding.dtype, device=embedding.device)
            sizes = [(w.detach() - first[name]).square().mean().sqrt() for name, w in trainer.weights.items()]
            return figures, torch.stack(sizes)

        return step

    return make


SOURCE = {"V": 50257, "D": 1024, "N": 32 * 1024 + 1, "length": 1024, "layers": 8, "eigenstates": 128}


def flops(V, D, length, batch_size, accumulation, layers, eigenstates):
    """Count the operations: six per token and parameter."""
    config = dataclasses.replace(SMALL, width=D, layers=layers, eigenstates=eigenstates)
    return config.flops(V) * length * batch_size * accumulation


ITEMS = {"items": lambda length, batch_size, accumulation: length * batch_size * accumulation, "unit": "tokens"}


# The reference computes all sequences of a step at once: four would need more memory than an H200 has, and in float64
# two would.
LONG_SEQUENCES = {**SOURCE, "N": 8 * 32768 + 1, "length": 32768, "batch_size": 1, "accumulation": 2}
LONG_SEQUENCES |= {"compiled": 1, "rate": 3e-4, "seed": 0, "clock": "wall", "device": "cuda"}
TIMED = {**SOURCE, "batch_size": 4, "accumulation": 4, "compiled": 1, "rate": 3e-4, "seed": 0}
TIMED |= {"clock": "wall", "device": "cuda"}


eigenstate_lm = Pair(
    reference=stateful(steps(Reference)),
    optimized=stateful(steps(Optimized), settle=2),
    inputs={
        "embedding": tensor("V", "D", values=floats(-1, 1), differentiable=False),
        "tokens": tensor("N", dtype="int64", values=integers(0, "V")),
        "length": scalar(integers(1, 9)),
        "batch_size": scalar(integers(1, 3)),
        "accumulation": scalar(integers(1, 3)),
        "layers": scalar(integers(1, 2)),
        "eigenstates": scalar(integers(1, 5)),
        # Drawn shapes are not compiled: each would need a compilation of its own.
        "compiled": scalar(integers(0, 0)),
        "rate": scalar(floats(1e-4, 1e-2)),
        "seed": scalar(integers(0, 1000)),
    },
    gradients=False,
    sizes={"V": size(3, 12), "D": size(1, 12), "N": size(90, 120)},
    max_examples=draws(cpu=3),
    steps=(1, 2),
    workloads=[
        Workload("steps1024", **TIMED, speedup=4),
        Workload(
            "cpu",
            V=200,
            D=16,
            N=32 * 16 + 1,
            length=16,
            layers=2,
            eigenstates=4,
            batch_size=2,
            accumulation=2,
            compiled=0,
            rate=3e-3,
            seed=0,
            clock="wall",
            device="cpu",
        ),
    ],
    cost=Cost(flops=flops, precision="float32", **ITEMS),
    time_limit=600,
)


eigenstate_lm_bfloat16 = dataclasses.replace(
    eigenstate_lm,
    reference=stateful(steps(Reference, in_bfloat16=True)),
    optimized=stateful(steps(Optimized, in_bfloat16=True), settle=2),
    precision="bfloat16",
    # At smaller sizes a weight's gradient may vanish in bfloat16, so that the truth itself is uncertain.
    sizes={"V": size(16, 40), "D": size(16, 24), "N": size(90, 120)},
    workloads=[
        Workload("steps1024", **TIMED, speedup=10),
        eigenstate_lm.workloads[1],
    ],
    cost=Cost(flops=flops, precision="bfloat16", **ITEMS),
)


class BySequence(Reference):
    """The reference trainer with the memory of one sequence instead of all sequences of a step."""

    def _loss(self, leaves, inputs, labels):
        of_one = super()._loss
        rows = [(inputs[i : i + 1], labels[i : i + 1]) for i in range(len(inputs))]
        return torch.stack([checkpoint(of_one, leaves, *row, use_reentrant=False) for row in rows]).mean()


# The source trains at this length, at which a reference that scans token by token would take a minute a step.
eigenstate_lm_long = dataclasses.replace(
    eigenstate_lm_bfloat16,
    reference=stateful(steps(Reference, in_bfloat16=True, scan=chunked_scan)),
    truth=steps(BySequence, in_bfloat16=True, scan=chunked_scan),
    workloads=[
        Workload("tokens32k", **LONG_SEQUENCES, throughput={"nvidia-h200": 4e5}),
        eigenstate_lm.workloads[1],
    ],
)


# --- loss curves ----------------------------------------------------------------------------------------------------


def trained(kind, given, config=SMALL, count=20, device="cpu", **options):
    trainer = kind(config, given, device, **options)
    for _ in range(count):
        trainer.train_window({})
    return trainer


LONG = count(quick=30, full=SMALL.steps)
"""Number of steps over which both sides are compared."""


def curve(trainer, windows=LONG):
    """Return the loss of each step, [steps]."""
    losses = []
    for _ in range(windows):
        trainer.train_window({})
        losses.append(trainer.last_report().loss)
    return torch.tensor(losses, dtype=torch.float64)


def deviations(given, config=SMALL, device="cpu", windows=LONG):
    """Return (truth, float32 curve, largest deviation from the truth up to each step)."""
    truth = curve(Reference(config, given, device, torch.float64), windows)
    runs = [curve(Reference(config, given, device), windows)]
    for seed in range(NEIGHBOURS):
        runs.append(curve(a_rounding_away(Reference(config, given, device), seed), windows))
    return truth, runs[0], deviation_of(runs, truth)


@pytest.fixture(scope="module")
def known(text):
    return deviations(text)


def share_of_budget(found, known, dtype=torch.float32):
    """Return the largest error as a fraction of the error that the rule allows."""
    truth, _, deviation = known
    return share_of_rule(found, truth, deviation, dtype)


def test_optimized_loss_curve_matches_the_reference(text, known):
    assert share_of_budget(curve(Optimized(SMALL, text, "cpu")), known) <= 1
    assert known[2].max() > 0


def test_reference_with_chunked_scan_has_the_same_loss_curve(text, known):
    assert share_of_budget(curve(Reference(SMALL, text, "cpu", scan=chunked_scan)), known) <= 1


def test_reference_loss_falls_and_all_weights_change(text, known):
    """The loss falls and all weights change; otherwise agreement would show nothing."""
    assert known[0][-5:].mean() < 0.75 * known[0][:5].mean()
    trainer = Reference(SMALL, text, "cpu")
    before = {k: v.clone() for k, v in trainer.state_dict()["weights"].items()}
    trainer.train_window({})
    changed = {k for k, v in trainer.state_dict()["weights"].items() if not torch.equal(v, before[k])}
    assert changed == before.keys()


@pytest.mark.parametrize("name", [t for t in TECHNIQUES if t not in OF_THEIR_OWN])
def test_toggling_one_technique_keeps_the_loss_curve(name, text, known):
    config = dataclasses.replace(SMALL, **{name: not getattr(SMALL, name)})
    assert share_of_budget(curve(Optimized(config, text, "cpu"), 8), first_points(known, 8)) <= 1


@pytest.mark.parametrize("name", [t for t in TECHNIQUES if t not in OF_THEIR_OWN])
def test_one_technique_alone_keeps_the_loss_curve(name, text, known):
    config = dataclasses.replace(without_techniques(SMALL), **{name: True})
    assert share_of_budget(curve(Optimized(config, text, "cpu"), 8), first_points(known, 8)) <= 1


def test_without_techniques_optimized_equals_reference_bit_for_bit(text):
    plain = trained(Reference, text)
    off = trained(Optimized, text, without_techniques(SMALL))
    assert same(plain.state_dict(), off.state_dict())
    assert plain.last_report() == off.last_report()


@pytest.mark.parametrize("name", ["activation_checkpoint", pytest.param("loader", marks=FULLY)])
def test_activation_checkpoint_and_loader_keep_the_loss_curve(name, text, known):
    config = dataclasses.replace(SMALL, **{name: True})
    assert share_of_budget(curve(Optimized(config, text, "cpu"), 8), first_points(known, 8)) <= 1


@pytest.mark.parametrize("checkpointed", [False, True])
def test_dropout_masks_depend_only_on_the_seed(checkpointed, text):
    config = dataclasses.replace(SMALL, dropout=0.3, activation_checkpoint=checkpointed)
    states = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        states.append(trained(Optimized, text, config, 3).state_dict()["weights"])
    assert same(states[0], states[1])
    assert not same(states[0], states[2])
    torch.manual_seed(0)
    plain = dataclasses.replace(config, activation_checkpoint=False)
    assert same(states[0], trained(Optimized, text, plain, 3).state_dict()["weights"])


@pytest.mark.parametrize("low", ["autocast_bf16", pytest.param("autocast_fp16", marks=FULLY)])
def test_half_precision_final_loss_matches_the_reference(low, text):
    """The final losses differ by less than 1% for each seed."""
    for seed in range(count(quick=1, full=3)):
        config = dataclasses.replace(SMALL, seed=seed, **{low: True})
        ends = [curve(kind(config, text, "cpu"))[-8:].mean() for kind in (Reference, Optimized)]
        assert abs(ends[1] / ends[0] - 1) < 0.01


FP8 = {"autocast_bf16": True, "fp8_linear": True}


def test_fp8_final_loss_matches_the_reference_in_bfloat16(text):
    """The final losses differ by less than 0.5% for each seed, and by more than in bfloat16."""
    for seed in range(count(quick=1, full=3)):
        configs = [dataclasses.replace(SMALL, seed=seed, **fields) for fields in ({"autocast_bf16": True}, FP8)]
        expected, *ends = (
            curve(kind(config, text, "cpu"))[-8:].mean()
            for kind, config in ((Reference, configs[0]), *((Optimized, config) for config in configs))
        )
        assert abs(ends[1] / expected - 1) < 0.005
        assert ends[1] != ends[0]


def test_overflowing_gradients_skip_the_step_and_halve_the_loss_scale(text):
    config = dataclasses.replace(SMALL, autocast_fp16=True)
    for kind in (Reference, Optimized):
        trainer = kind(config, text, "cpu")
        trainer.optimizer.scale.fill_(2.0**100)
        before = {k: w.detach().clone() for k, w in trainer.weights.items()}
        trainer.train_window({})
        assert all(torch.equal(w, before[k]) for k, w in trainer.weights.items())
        assert float(trainer.optimizer.scale) == 2.0**99
        assert trainer.last_report().scale == 2.0**100


def test_loss_scale_does_not_change_gradient_norm_or_clipping(text):
    """A non-finite step, or a run in float16, leaves a scale other than 1."""
    norms = []
    for kind, scale in ((Reference, 1.0), (Reference, 0.5), (Optimized, 0.5), (Optimized, 2.0**16)):
        trainer = kind(SMALL, text, "cpu")
        trainer.optimizer.scale.fill_(scale)
        for _ in range(3):
            trainer.train_window({})
        norms.append(trainer.last_report().norm)
    assert norms == pytest.approx([norms[0]] * 4, rel=1e-4)


@pytest.mark.parametrize("kind", [Reference, Optimized])
def test_learning_rate_is_constant_after_the_schedule_ends(kind, text):
    config = dataclasses.replace(SMALL, steps=11)
    trainer = trained(kind, text, config, 11)
    last = trainer.last_report().rate
    trainer.train_window({})
    assert trainer.last_report().rate == last


def test_loader_without_packed_tokens_is_rejected():
    with pytest.raises(ValueError, match="loader=True: its workers read the packed file; switch packed_tokens on"):
        dataclasses.replace(SMALL, loader=True, packed_tokens=False)


@FULLY
@pytest.mark.usefixtures("quickly_compiled")
def test_compiled_loss_curve_matches_and_a_second_trainer_recompiles_nothing(text, known):
    config = dataclasses.replace(SMALL, use_compile=True)
    assert share_of_budget(curve(Optimized(config, text, "cpu"), 5), first_points(known, 5)) <= 1
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    trained(Optimized, text, dataclasses.replace(config, seed=3, learning_rate=1e-3), 2)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before


def test_failed_compilation_warns_and_training_runs_uncompiled(text, monkeypatch):
    def fails(*arguments):
        raise torch._dynamo.exc.TorchDynamoException("no compiler was found")

    monkeypatch.setattr(torch, "compile", lambda function, **options: fails)
    module._compiled.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match="eigenstate_lm's blocks runs uncompiled: no compiler was found"):
            trainer = trained(Optimized, text, dataclasses.replace(SMALL, use_compile=True), 1)
    finally:
        module._compiled.cache_clear()
    assert trainer.last_report() == trained(Optimized, text, count=1).last_report()


# --- checkpoints ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [Reference, Optimized])
@pytest.mark.parametrize("second", [Reference, Optimized])
def test_each_trainer_resumes_from_a_checkpoint_of_the_other(first, second, text):
    target = second(SMALL, text, "cpu")
    target.load_state_dict(through_a_file(trained(first, text, count=5)))
    for _ in range(5):
        target.train_window({})
    undisturbed = trained(second, text, count=10)
    if first is second:
        assert same(target.state_dict(), undisturbed.state_dict())
    for name, weight in undisturbed.weights.items():
        torch.testing.assert_close(target.weights[name], weight, rtol=1e-3, atol=1e-4)
    assert target.last_report().loss == pytest.approx(undisturbed.last_report().loss, rel=1e-4)


@pytest.mark.parametrize("kind", [Reference, Optimized])
@pytest.mark.parametrize("low", [None, pytest.param("autocast_fp16", marks=FULLY)])
def test_resuming_at_random_steps_is_bit_identical(kind, low, text):
    config = dataclasses.replace(SMALL, loader=FULL, **({low: True} if low else {}))
    expected = trained(kind, text, config, 16).state_dict()
    rng = random.Random(1)
    stops = [rng.randrange(1, 16) for _ in range(count(quick=1, full=20 if kind is Optimized else 7))]
    going, saved = kind(dataclasses.replace(config, loader=False), text, "cpu"), {}
    for step in range(1, 16):
        going.train_window({})
        saved[step] = through_a_file(going)
    for stop in stops:
        trainer = kind(dataclasses.replace(config, loader=FULL and stop == stops[0]), text, "cpu")
        trainer.load_state_dict(saved[stop])
        for step in range(stop, 16):
            trainer.train_window({"step": torch.tensor(step)})
        assert same(trainer.state_dict(), expected), f"stopped after step {stop}"


def test_resuming_with_dropout_is_bit_identical(text, tmp_path):
    """The run uses the training loop, which saves the random generators' states."""
    config = dataclasses.replace(SMALL, dropout=0.2, steps=12)

    def run(folder, windows, resume=None):
        trainer = Optimized(config, text, "cpu")
        torch.manual_seed(5 if resume is None else 6)
        options = Options(folder=str(tmp_path / folder), windows=windows)
        batches = Steps(text, config.sequences, config.steps, config.seed)
        return trainer, fit(trainer, batches, options, name="eigenstate_lm", resume=resume)

    whole, _ = run("whole", 12)
    _, first = run("parts", 7)
    resumed, _ = run("parts", 12, first.checkpoint)
    assert same(whole.state_dict(), resumed.state_dict())


@pytest.mark.parametrize("kind", [Reference, Optimized])
def test_checkpoint_with_other_sizes_is_rejected(kind, text, tmp_path):
    other = kind(dataclasses.replace(SMALL, layers=1), text, "cpu").state_dict()
    with pytest.raises(ValueError, match=r"the weights 1\.contract, .* are only in the checkpoint, or only here"):
        kind(SMALL, text, "cpu").load_state_dict(other)
    state = kind(dataclasses.replace(SMALL, eigenstates=5), text, "cpu").state_dict()
    with pytest.raises(ValueError, match=r"0\.drive has shape \[2, 5, 16\] in the checkpoint and \[2, 4, 16\] here"):
        kind(SMALL, text, "cpu").load_state_dict(state)
    fewer = text_of(range(50), 50, SMALL.sequence_length, tmp_path)
    state = kind(SMALL, fewer, "cpu").state_dict()
    with pytest.raises(ValueError, match="its vocabulary has 50 tokens, and that of the data 60"):
        kind(SMALL, text, "cpu").load_state_dict(state)


# --- the data -------------------------------------------------------------------------------------------------------


def test_epoch_repeats_no_sequence_and_the_next_has_another_order(text):
    trainer, seen = Reference(SMALL, text, "cpu"), []
    count = len(text) // SMALL.sequences
    whole = trainer.sequences.batch

    class Watched:
        def batch(self, rows):
            seen.append(rows.tolist())
            return whole(rows)

    trainer.sequences = Watched()
    for _ in range(2 * count):
        trainer.train_window({})
    first, second = ([row for rows in seen[i * count : (i + 1) * count] for row in rows] for i in range(2))
    assert len(set(first)) == len(first) == count * SMALL.sequences
    assert first != second


@pytest.mark.parametrize("kind", [Reference, Optimized])
def test_step_number_other_than_the_next_is_rejected(kind, text):
    trainer = trained(kind, text, count=2)
    trainer.train_window({"step": torch.tensor(2)})
    with pytest.raises(ValueError, match="step 2 was given to a trainer that has made 3"):
        trainer.train_window({"step": torch.tensor(2)})


def test_fewer_sequences_than_one_step_takes_are_rejected(text):
    with pytest.raises(PerfsuiteError, match=r"a step takes 200 sequences .* has 39 of 24 tokens to train on; lower"):
        Steps(text, 200, 60, 0)


# --- what a run reports ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Reference, Optimized])
def test_non_finite_loss_stops_training(kind, text, tmp_path):
    trainer = kind(SMALL, text, "cpu")
    with torch.no_grad():
        trainer.weights["embedding"].mul_(1e38)
    batches = Steps(text, SMALL.sequences, SMALL.steps, SMALL.seed)
    with pytest.raises(DivergedError, match=r"step 1: the loss is (nan|inf); training has stopped"):
        fit(trainer, batches, Options(folder=str(tmp_path)))
    assert not list(tmp_path.glob("*.pt"))


def test_run_reports_steps_tokens_and_throughput(text, tmp_path):
    from rich.console import Console

    output = io.StringIO()
    batches = Steps(text, SMALL.sequences, 12, SMALL.seed)
    trainer = Optimized(SMALL, text, "cpu")
    outcome = fit(trainer, batches, Options(folder=str(tmp_path)), name="eigenstate_lm", console=Console(file=output))
    assert (outcome.windows, outcome.items) == (12, 12 * SMALL.tokens)
    assert output.getvalue().startswith("eigenstate_lm: 12 steps in ")
    assert f"{outcome.items / 1e3:.3g}k tokens in all" in output.getvalue()
    assert {"loss", "learning_rate", "gradient_norm", "tokens_per_second"} <= outcome.metrics.keys()
    assert "tokens/s" in trainer.throughput.summary()


@pytest.mark.parametrize(("kind", "precision"), [(Reference, "float32"), (Optimized, "tf32")])
def test_throughput_is_compared_with_matmuls_in_the_trainer_s_own_precision(kind, precision, text, monkeypatch):
    held = []
    monkeypatch.setattr(sys.modules[kind.__module__], "Throughput", lambda config, *_: held.append(config.precision))
    kind(dataclasses.replace(SMALL, tf32=True), text, "cpu")
    assert held == [precision]


@pytest.mark.parametrize(("kind", "sequences"), [(Reference, 6), (Optimized, 3)])
def test_out_of_memory_error_reports_sequences_at_once_and_memory_needed(kind, sequences, text, monkeypatch):
    trainer = kind(SMALL, text, "cpu")

    def out(*arguments, **options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(trainer, "_loss", out)
    says = rf"out of memory: {sequences} sequences of 24 tokens at once need about .* GiB"
    with pytest.raises(PerfsuiteError, match=says):
        trainer.train_window({})


def test_float32_matmul_precision_is_restored_after_training(text):
    before = torch.get_float32_matmul_precision()
    for kind in (Reference, Optimized):
        trained(kind, text, dataclasses.replace(SMALL, tf32=True), 1)
    assert torch.get_float32_matmul_precision() == before


# --- the configuration ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"batch_size": 0}, "batch_size=0: use 1 or more"),
        ({"dropout": 1.0}, "dropout=1.0: use 0 or more and less than 1"),
        ({"learning_rate": math.nan}, "learning_rate=nan: use a number above 0"),
        ({"steps": 10}, "steps=10: a tenth of them warms up; use more than 10"),
        ({"autocast_fp16": True, "autocast_bf16": True}, "autocast_fp16=True: a product has one precision"),
        ({"fp8_linear": True}, "fp8_linear=True: everything else is in bfloat16 then; switch autocast_bf16 on"),
        ({**FP8, "width": 24}, "width=24: fp8_linear needs a multiple of 16"),
        ({"seed": -1}, "seed=-1"),
    ],
)
def test_invalid_settings_are_rejected(fields, says):
    with pytest.raises(ValueError, match=says):
        dataclasses.replace(SMALL, **fields)


def test_boolean_fields_are_exactly_the_switches():
    named = {f.name for f in dataclasses.fields(TrainConfig) if f.type in (bool, "bool")}
    assert named == {*TECHNIQUES, *TRADES}
    off = without_techniques(SMALL)
    assert not any(getattr(off, t) for t in (*TECHNIQUES, *TRADES))


PARAMETERS = {"small_32k": 123_104_256, "medium_32k": 318_898_176, "large_32k": 675_751_936, "tiny": 207_040}


@pytest.mark.parametrize("path", sorted((ROOT / "configs/eigenstate_lm").glob("*.yaml")), ids=lambda p: p.stem)
def test_config_files_match_their_data_and_model_size(path):
    pytest.importorskip("jsonargparse")
    from suite import configuration
    from suite.eigenstate_lm.model import parameters

    config, _, data = configuration.read([TrainConfig, Options, Data], path)
    assert parameters(config.sizes(data.vocabulary)) == PARAMETERS[path.stem]
    assert (config.sequence_length, config.batch_size, config.steps) == (
        data.sequence_length,
        data.batch_size,
        data.steps,
    )
    assert config.autocast_bf16 == (path.stem != "tiny")
    if path.stem == "tiny":
        assert dataclasses.replace(config, use_compile=False) == TINY
    assert data.validation > 0
    assert config.validate_every > 0


# --- on a GPU -------------------------------------------------------------------------------------------------------

gpu = pytest.mark.gpu


@pytest.fixture(scope="module")
def longer(tmp_path_factory):
    drawn = synthetic(2048, TINY.sequence_length, 200).input_ids.flatten().numpy()
    return text_of(drawn, 2048, TINY.sequence_length, tmp_path_factory.mktemp("longer"))


@gpu
def test_gpu_loss_curve_matches_the_reference_over_200_steps(longer):
    known = deviations(longer, TINY, "cuda", TINY.steps)
    for compiled in (False, True):
        trainer = Optimized(dataclasses.replace(TINY, use_compile=compiled), longer, "cuda")
        share = share_of_budget(curve(trainer, TINY.steps), known)
        print(f"compiled={compiled}: {share:.2f} of the budget; from {known[0][0]:.3f} to {known[0][-1]:.3f}")
        assert share <= 1


@gpu
@pytest.mark.parametrize("low", ["autocast_bf16", "autocast_fp16"])
def test_gpu_half_precision_final_loss_matches_the_reference(low, longer):
    """The final losses differ by less than 1% for each seed."""
    for seed in range(3):
        config = dataclasses.replace(TINY, seed=seed, use_compile=True, **{low: True})
        ends = [curve(kind(config, longer, "cuda"), TINY.steps)[-8:].mean() for kind in (Reference, Optimized)]
        print(f"{low}, seed {seed}: {ends[0]:.4f} and {ends[1]:.4f}, {100 * (ends[1] / ends[0] - 1):+.3f}%")
        assert abs(ends[1] / ends[0] - 1) < 0.01


@gpu
def test_gpu_fp8_final_loss_matches_the_reference_in_bfloat16(longer):
    """The final losses differ by less than 0.5% for each seed."""
    for seed in range(3):
        config = dataclasses.replace(TINY, seed=seed, use_compile=True, **FP8)
        ends = [curve(kind(config, longer, "cuda"), TINY.steps)[-8:].mean() for kind in (Reference, Optimized)]
        print(f"FP8, seed {seed}: {ends[0]:.4f} and {ends[1]:.4f}, {100 * (ends[1] / ends[0] - 1):+.3f}%")
        assert abs(ends[1] / ends[0] - 1) < 0.005


@gpu
@pytest.mark.parametrize("low", [{}, {"autocast_bf16": True}, {"autocast_fp16": True}, FP8], ids=str)
def test_gpu_resuming_at_20_random_steps_is_bit_identical(low, longer):
    config = dataclasses.replace(TINY, use_compile=True, dropout=0.1, **low)
    rng = random.Random(3)
    torch.manual_seed(0)
    going, saved = Optimized(config, longer, "cuda"), {}
    for step in range(1, 31):
        going.train_window({})
        saved[step] = through_a_file(going), torch.cuda.get_rng_state()
    for _ in range(20):
        stop = rng.randrange(1, 30)
        trainer = Optimized(config, longer, "cuda")
        trainer.load_state_dict(saved[stop][0])
        torch.cuda.set_rng_state(saved[stop][1])
        for _ in range(stop, 30):
            trainer.train_window({})
        assert same(trainer.state_dict(), saved[30][0] | {"config": None}), f"stopped after step {stop}"


@gpu
def test_gpu_step_waits_only_for_the_previous_report(no_host_sync, longer):
    trainer = trained(Optimized, longer, dataclasses.replace(TINY, use_compile=True), 5, "cuda")
    torch.cuda.synchronize()
    with no_host_sync():
        for _ in range(10):
            trainer.train_window({})
            trainer.metrics()
    assert trainer.last_metrics()["window"] == 15


@gpu
def test_gpu_peak_memory_is_constant_over_100_steps(longer):
    gc.collect()  # reference cycles may keep an earlier test's trainer alive
    trainer, peaks = Optimized(dataclasses.replace(TINY, use_compile=True), longer, "cuda"), []
    for _ in range(100):
        torch.cuda.reset_peak_memory_stats()
        trainer.train_window({})
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated())
    assert len(set(peaks[10:])) == 1, f"{min(peaks[10:])} to {max(peaks[10:])} bytes"
