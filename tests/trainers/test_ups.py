"""The ups trainers: equal loss curves, checkpoints, data, caches, configurations, graphs and stages."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import os
import random
from pathlib import Path

import h5py
import numpy
import pytest
import torch
from click.testing import CliRunner
from curves import NEIGHBOURS, a_rounding_away, deviation_of, share_of_rule
from scale import FULLY, count, draws
from states import same, through_a_file

from optimized.compilation import compiled_function
from optimized.graphs.cuda_graph_step import CudaGraphStep
from optimized.memory.cpu_offload_optimizer import OffloadedHybrid, offloaded_hybrid
from optimized.operator_calls import parts
from optimized.optimizers.hybrid_muon_adamw import hybrid_muon_adamw
from optimized.trainers.ups import Trainer as Optimized
from perfsuite import Cost, Pair, PerfsuiteError, Workload, floats, integers, scalar, size, stateful, tensor
from reference.trainers.ups import Trainer as Reference
from suite import configuration, trainers
from suite.commands.train import train
from suite.runtime import Options, fit
from suite.ups import evaluation, stages
from suite.ups import latents as latents_module
from suite.ups.batches import Data, Feed, Maker, load, mixture_of
from suite.ups.config import OF_RANKS, TECHNIQUES, TRADES, TrainConfig, without_techniques
from suite.ups.model import Operator
from suite.ups.resident import Resident

ROOT = Path(__file__).resolve().parents[2]
STEPS = 5
SMALL = TrainConfig(
    tokens=8,
    latent_width=8,
    width=16,
    depth=2,
    heads=2,
    decoder_width=16,
    decoder_depth=1,
    drop_path=0.3,
    batch_size=4,
    accumulation=2,
    inverse_loss_frequency=3,
    num_queries=8,
    grad_clip=0.5,
    learning_rate=1e-2,
    coder_rate=2.0,
    # In bfloat16, rounding of the matrices would hide small errors.
    muon_in_bfloat16=False,
)
DATA = Data(tokens=8, latent_width=8, batch_size=4, accumulation=2, synthetic=4, synthetic_frames=5, steps=STEPS)


@pytest.fixture(scope="module")
def mixture():
    return load(DATA).trainer_data


def made(kind, mixture, config=SMALL, **options):
    return kind(config, mixture, "cpu", **options)


def trained(kind, mixture, config=SMALL, steps=STEPS):
    trainer = made(kind, mixture, config)
    for _ in range(steps):
        trainer.train_window({})
    return trainer


def curve(trainer, steps=STEPS):
    """Return the loss of each step, [steps]."""
    losses = []
    for _ in range(steps):
        trainer.train_window({})
        losses.append(trainer.last_report().loss)
    return torch.tensor(losses, dtype=torch.float64)


@pytest.fixture(scope="module")
def known(mixture):
    """Return (truth, deviation by float32 rounding up to each step)."""
    truth = curve(made(Reference, mixture, dtype=torch.float64))
    runs = [curve(made(Reference, mixture))]
    runs += [curve(a_rounding_away(made(Reference, mixture), seed)) for seed in range(NEIGHBOURS)]
    return truth, deviation_of(runs, truth)


def share(found, known):
    """Return the largest error as a fraction of the error that the rule allows."""
    return share_of_rule(found, *known, torch.float32)


# --- the pair -------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=8)
def pair_data(tokens, latent_width):
    """Return a few samples; a trainer's own seed determines the order of the examples."""
    data = dataclasses.replace(DATA, tokens=tokens, latent_width=latent_width, batch_size=2)
    return mixture_of(data)


def steps(kind):
    """Return a pair's side with given first-layer weights. A step returns the loss and the RMS of each matrix."""

    def make(
        weight, tokens, heads, depth, batch_size, accumulation, frequency, queries, decoder_depth, compiled, rate, seed
    ):
        config = dataclasses.replace(
            SMALL,
            tokens=tokens,
            latent_width=weight.shape[1],
            width=len(weight),
            decoder_width=len(weight),
            decoder_depth=decoder_depth,
            heads=heads,
            depth=depth,
            batch_size=2 * batch_size,
            accumulation=accumulation,
            inverse_loss_frequency=frequency,
            num_queries=queries,
            compile=bool(compiled),
            learning_rate=rate,
            seed=seed,
        )
        options = {"dtype": weight.dtype} if kind is Reference else {}
        trainer = kind(config, pair_data(tokens, weight.shape[1]), weight.device, **options)
        with torch.no_grad():
            trainer.weights["operator.take.weight"].copy_(weight)
        matrices = [w for name, w in trainer.weights.items() if name.startswith("operator.") and w.ndim == 2]

        def step():
            trainer.train_window({})
            loss = torch.tensor([trainer.last_report().loss], dtype=weight.dtype, device=weight.device)
            return loss, torch.stack([w.detach().square().mean().sqrt() for w in matrices])

        return step

    return make


def flops(L, W, tokens, depth, batch_size, accumulation):
    """Count the operations: six per token and weight of the operator's blocks."""
    return 6 * accumulation * 2 * batch_size * tokens * (depth * 12 * W**2 + 2 * L * W)


def examples(batch_size, accumulation):
    """Count the examples of a step on both tasks."""
    return 2 * batch_size * accumulation


ups = Pair(
    reference=stateful(steps(Reference)),
    # Within 12 consecutive batches, three forms of a step have inverse losses and one has none. Each is captured at
    # its fourth call.
    optimized=stateful(steps(Optimized), settle=16),
    inputs={
        "weight": tensor("W", "L", values=floats(-0.5, 0.5), differentiable=False),
        "tokens": scalar(integers(4, 9)),
        "heads": scalar(integers(1, 2)),
        "depth": scalar(integers(1, 2)),
        "batch_size": scalar(integers(1, 2)),
        "accumulation": scalar(integers(1, 2)),
        "frequency": scalar(integers(1, 3)),
        "queries": scalar(integers(1, 20)),
        "decoder_depth": scalar(integers(1, 2)),
        # Drawn shapes are not compiled: each would need a compilation of its own.
        "compiled": scalar(integers(0, 0)),
        "rate": scalar(floats(1e-4, 1e-2)),
        "seed": scalar(integers(0, 1000)),
    },
    gradients=False,
    sizes={"L": size(2, 9), "W": size(8, 16, multiple_of=4)},
    max_examples=draws(cpu=3),
    steps=(1, 2),
    workloads=[
        Workload(
            "source",
            L=128,
            heads=8,
            W=384,
            tokens=128,
            depth=12,
            decoder_depth=3,
            batch_size=4,
            accumulation=3,
            frequency=4,
            queries=1024,
            compiled=1,
            rate=1.4e-3,
            seed=0,
            clock="wall",
            device="cuda",
        ),
        Workload(
            "cpu",
            L=8,
            heads=2,
            W=16,
            tokens=8,
            depth=2,
            decoder_depth=1,
            batch_size=2,
            accumulation=2,
            frequency=4,
            queries=8,
            compiled=0,
            rate=1e-3,
            seed=0,
            clock="wall",
            device="cpu",
        ),
    ],
    cost=Cost(flops=flops, precision="float32", items=examples, unit="examples"),
    time_limit=600,
)


# --- loss curves ----------------------------------------------------------------------------------------------------


def test_optimized_loss_curve_matches_the_reference(mixture, known):
    assert share(curve(made(Optimized, mixture)), known) <= 1


def test_reference_loss_falls_and_all_weights_change(mixture, known):
    assert known[0][-1] < 0.9 * known[0][0]
    trainer = made(Reference, mixture)
    before = {name: weight.detach().clone() for name, weight in trainer.weights.items()}
    trainer.train_window({})
    assert not any(torch.equal(weight, before[name]) for name, weight in trainer.weights.items())


@pytest.mark.parametrize("name", [*TECHNIQUES, *TRADES])
@pytest.mark.parametrize("alone", [False, pytest.param(True, marks=FULLY)])
def test_toggling_one_switch_keeps_the_loss_curve(name, alone, mixture, known):
    config = without_techniques(SMALL) if alone else SMALL
    config = dataclasses.replace(config, **{name: alone or not getattr(config, name)})
    assert share(curve(made(Optimized, mixture, config)), known) <= 1


def test_loss_curves_match_with_muon_in_bfloat16(mixture):
    config = dataclasses.replace(SMALL, muon_in_bfloat16=True)
    truth = curve(made(Reference, mixture, config, dtype=torch.float64))
    runs = [curve(a_rounding_away(made(Reference, mixture, config), seed)) for seed in range(NEIGHBOURS)]
    found = curve(made(Optimized, mixture, config))
    assert share_of_rule(found, truth, deviation_of(runs, truth), torch.float32) <= 1


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_losses_match_and_weights_are_finite(precision, mixture, known):
    config = dataclasses.replace(SMALL, precision=precision)
    ends = [curve(made(kind, mixture, config)) for kind in (Reference, Optimized)]
    assert torch.stack(ends).isfinite().all()
    torch.testing.assert_close(ends[0], ends[1], rtol=0.02, atol=0)
    torch.testing.assert_close(ends[1], known[0], rtol=0.05, atol=0)
    trainer = trained(Optimized, mixture, config)
    assert all(w.isfinite().all() for w in (*trainer.weights.values(), *trainer.averages.values()))


@pytest.mark.parametrize("kind", [Reference, Optimized])
def test_overflowing_gradients_skip_the_step_and_halve_the_loss_scale(kind, mixture):
    trainer = made(kind, mixture, dataclasses.replace(SMALL, precision="fp16"))
    trainer.scale.value = 2.0**120
    before = {name: weight.detach().clone() for name, weight in trainer.weights.items()}
    trainer.train_window({})
    assert all(torch.equal(weight, before[name]) for name, weight in trainer.weights.items())
    assert trainer.scale.value == 2.0**119


@pytest.mark.parametrize("kind", [Reference, Optimized])
def test_encoders_and_decoders_change_only_in_steps_with_inverse_losses(kind, mixture):
    """Micro-batches 0, 3, 6 and 9 have inverse losses: the third of five two-batch steps has none."""
    trainer = made(kind, mixture)
    changed = []
    for _ in range(5):
        before = {name: trainer.weights[name].detach().clone() for name in trainer.groups["coders"]}
        trainer.train_window({})
        changed.append(any(not torch.equal(trainer.weights[name], w) for name, w in before.items()))
    assert changed == [True, True, False, True, True]


@pytest.mark.parametrize("kind", [Reference, Optimized])
def test_coder_rate_scales_only_the_updates_of_encoders_and_decoders(kind, mixture):
    """Three times the rate moves them three times as far, and the operator as far as before."""
    moved = []
    for factor in (1.0, 3.0):
        trainer = kind(dataclasses.replace(SMALL, coder_rate=factor), mixture, "cpu")
        before = {name: weight.detach().clone() for name, weight in trainer.weights.items()}
        trainer.train_window({})
        moved.append({name: weight.detach() - before[name] for name, weight in trainer.weights.items()})
    for name in moved[0]:
        factor = 1.0 if name.startswith("operator.") else 3.0
        torch.testing.assert_close(moved[1][name], factor * moved[0][name], atol=1e-6, rtol=1e-4)
    assert any(m.abs().max() > 1e-3 for name, m in moved[0].items() if name.startswith("decoders."))


@pytest.mark.parametrize("kind", [Reference, Optimized])
def test_encoders_and_decoders_do_not_change_without_inverse_losses(kind, mixture):
    config = dataclasses.replace(SMALL, lambda_enc=0.0, lambda_dec=0.0)
    trainer = made(kind, mixture, config)
    before = {name: trainer.weights[name].detach().clone() for name in trainer.groups["coders"]}
    trainer.train_window({})
    assert all(torch.equal(trainer.weights[name], weight) for name, weight in before.items())


def test_decoder_is_not_called_without_inverse_losses(mixture, monkeypatch):
    config = dataclasses.replace(SMALL, lambda_enc=0.0, lambda_dec=0.0)
    trainer = made(Optimized, mixture, config)
    monkeypatch.setattr(trainer.networks.decoder("darcy2d"), "forward", None)
    trainer.train_window({})
    other = made(Optimized, mixture)
    monkeypatch.setattr(other.networks.decoder("darcy2d"), "forward", None)
    with pytest.raises(TypeError):
        other.train_window({})


def test_activation_checkpoint_keeps_the_loss_curve_bit_for_bit(mixture):
    plain, checkpointed = (
        curve(made(Optimized, mixture, dataclasses.replace(SMALL, activation_checkpoint=on))) for on in (False, True)
    )
    assert torch.equal(plain, checkpointed)


def test_cpu_offload_uses_offloaded_hybrid_and_changes_all_weights(mixture):
    trainer = made(Optimized, mixture, dataclasses.replace(SMALL, cpu_offload_optimizer=True))
    assert all(type(o) is OffloadedHybrid for o in trainer.optimizers.values())
    before = {name: weight.detach().clone() for name, weight in trainer.weights.items()}
    trainer.train_window({})
    assert not any(torch.equal(weight, before[name]) for name, weight in trainer.weights.items())
    # The optimizers that the trainer steps are these: their state and the weights are those without the switch.
    plain = trained(Optimized, mixture, steps=1)
    states = [{name: o.state_dict() for name, o in t.optimizers.items()} for t in (trainer, plain)]
    assert same(*states)
    assert all(m.any() for state in states[0].values() for m in state["muon"]["momenta"])
    assert all(torch.equal(weight, plain.weights[name]) for name, weight in trainer.weights.items())


def test_offloaded_hybrid_step_equals_hybrid_muon_adamw():
    generator = torch.Generator().manual_seed(0)
    shapes = [(4, 6), (6,), (4, 6), (5, 2)]
    draw = lambda: [torch.randn(shape, generator=generator) for shape in shapes]  # noqa: E731
    first = draw()
    sides = [[p.clone() for p in first] for _ in range(2)]
    steps = [hybrid_muon_adamw(sides[0]), offloaded_hybrid(sides[1])]
    for _ in range(3):
        grads = draw()
        for step in steps:
            step([g.clone() for g in grads])
    assert all(map(torch.equal, *sides))
    assert same(steps[0].state_dict(), steps[1].state_dict())


def test_averages_are_an_exponential_moving_average_of_the_weights(mixture):
    trainer = made(Optimized, mixture, dataclasses.replace(SMALL, ema_decay=0.75))
    first = {name: a.clone() for name, a in trainer.averages.items()}
    trainer.train_window({})
    for name, average in trainer.averages.items():
        expected = first[name] + 0.25 * (trainer.weights[name].detach() - first[name])
        torch.testing.assert_close(average, expected, rtol=1e-6, atol=1e-8)


def test_use_fsdp2_in_one_process_is_ignored_with_a_warning(mixture):
    config = dataclasses.replace(SMALL, use_fsdp2=True)
    for kind in (Reference, Optimized):
        with pytest.warns(RuntimeWarning, match=r"^use_fsdp2: a single process trains, so that nothing is sharded$"):
            made(kind, mixture, config)


# --- checkpoints ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "second"), [*itertools.product((Reference, Optimized), repeat=2)])
def test_each_trainer_resumes_from_a_checkpoint_of_the_other(first, second, mixture):
    target = made(second, mixture)
    target.load_state_dict(through_a_file(trained(first, mixture, steps=3)))
    found = curve(target, 3)
    undisturbed = trained(second, mixture, steps=3)
    torch.testing.assert_close(found, curve(undisturbed, 3), rtol=1e-4, atol=0)
    if first is second:
        assert same(target.state_dict(), undisturbed.state_dict())


@pytest.mark.parametrize("kind", [Reference, Optimized])
@pytest.mark.parametrize(
    "changes",
    [{}, pytest.param({"precision": "fp16"}, marks=FULLY), {"cpu_offload_optimizer": True, "resident_latents": False}],
)
def test_resuming_at_random_steps_is_bit_identical(kind, changes, mixture):
    config = dataclasses.replace(SMALL, **changes)
    expected = trained(kind, mixture, config, 8).state_dict()
    rng = random.Random(0)
    for stop in [rng.randrange(1, 8) for _ in range(count(quick=1, full=20))]:
        resumed = made(kind, mixture, config)
        resumed.load_state_dict(through_a_file(trained(kind, mixture, config, stop)))
        for _ in range(8 - stop):
            resumed.train_window({})
        assert same(resumed.state_dict(), expected)


@pytest.mark.parametrize("kind", [Reference, Optimized])
def test_resuming_through_fit_is_bit_identical(kind, tmp_path):
    ends = []
    for name, ends_at in (("whole", [6]), ("parts", [2, 6])):
        options = [Options(folder=str(tmp_path / name), windows=windows) for windows in ends_at]
        for number, part in enumerate(options):
            loaded = load(dataclasses.replace(DATA, steps=6))
            trainer = made(kind, loaded.trainer_data)
            resume = next((tmp_path / name).glob("*.pt")) if number else None
            fit(trainer, loaded.batches, part, name="ups", resume=resume)
        ends.append(trainer.state_dict())
    assert same(*ends)


def test_checkpoint_of_another_depth_or_stage_is_rejected(mixture):
    state = made(Reference, mixture).state_dict()
    with pytest.raises(ValueError, match="only in the checkpoint, or only here"):
        made(Reference, mixture, dataclasses.replace(SMALL, depth=1)).load_state_dict(state)
    state["config"]["stage"] = "diffusion"
    with pytest.raises(ValueError, match="it is of the stage diffusion, and this is operator"):
        made(Reference, mixture).load_state_dict(state)


# --- the data -------------------------------------------------------------------------------------------------------


def files(folder, samples=3, cells=16):
    """Write one file per task in PDEBench's layout."""
    rng = numpy.random.default_rng(0)
    x = ((numpy.arange(cells) + 0.5) / cells).astype("f4")
    with h5py.File(folder / "1D_Advection_Sols_beta1.0.hdf5", "w") as file:
        file["tensor"] = rng.standard_normal((samples, 4, cells)).astype("f4")
        file["t-coordinate"], file["x-coordinate"] = numpy.arange(5, dtype="f4") / 100, x
        file.attrs["beta"] = 1.0
    with h5py.File(folder / "2D_DarcyFlow_beta1.0_Train.hdf5", "w") as file:
        file["nu"] = rng.standard_normal((samples, cells, cells)).astype("f4")
        file["tensor"] = rng.standard_normal((samples, 1, cells, cells)).astype("f4")
        file["x-coordinate"] = file["y-coordinate"] = x
        file.attrs["beta"] = 1.0
    return dataclasses.replace(DATA, data=str(folder))


def test_latents_are_encoded_once_and_then_memory_mapped(tmp_path, monkeypatch):
    data = files(tmp_path)
    first = mixture_of(data)
    assert sorted(p.suffix for p in tmp_path.iterdir()) == [".hdf5", ".hdf5", ".json", ".json", ".npy", ".npy"]
    monkeypatch.setattr(latents_module, "_encode", None)  # a call would raise
    second = mixture_of(data)
    for one, other in zip(first.tasks, second.tasks, strict=True):
        assert torch.equal(one.latents.rows, other.latents.rows)
        assert other.latents.mapped is not None
    for kind in (Reference, Optimized):
        assert torch.isfinite(curve(made(kind, second), 2)).all()


def test_latents_are_frozen_encoder_outputs_of_normalised_fields(tmp_path):
    for task in mixture_of(files(tmp_path)).tasks:
        encoder = latents_module.frozen_encoder(task.task, 8, 8, 0)
        for sample, state in itertools.product(range(3), range(task.fields.states)):
            field = task.fields.at(sample, state)
            found = task.latents.rows[sample * task.fields.states + state]
            torch.testing.assert_close(found, encoder(field[None, ..., None], task.fields.points)[0])
        values = torch.stack([task.fields.read(sample)[0] for sample in task.fields.train])
        assert values.mean().abs() < 0.5
        assert 0.5 < values.std() < 1.5


def test_each_encoder_seed_has_its_own_latent_cache(tmp_path):
    data = files(tmp_path)
    first = mixture_of(data)
    other = mixture_of(dataclasses.replace(data, seed=1))
    assert len(list(tmp_path.glob("*.npy"))) == 4
    assert not torch.equal(first.tasks[0].latents.rows, other.tasks[0].latents.rows)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda array, index: array.write_bytes(array.read_bytes()[:-1]), "its bytes are not those that were written"),
        (lambda array, index: array.write_bytes(array.read_bytes()[:-1] + b"x"), "its bytes are not those"),
        (lambda array, index: array.unlink(), "No such file"),
        (lambda array, index: index.write_text("{"), "cannot be used: Expecting"),
        (lambda array, index: index.write_text("{}"), "its index lacks fields"),
        (
            lambda array, index: index.write_text(json.dumps({**json.loads(index.read_text()), "key": "of another"})),
            "it was made from other data, or by another encoder",
        ),
    ],
)
def test_damaged_latent_cache_raises_one_line_error(spoil, message, tmp_path):
    data = files(tmp_path)
    mixture_of(data)
    array = next(tmp_path.glob("1D*.npy"))
    spoil(array, array.with_suffix(".json"))
    with pytest.raises(PerfsuiteError, match=message) as raised:
        mixture_of(data)
    assert "\n" not in str(raised.value)
    array.with_suffix(".json").unlink()
    mixture_of(data)


def test_latent_cache_is_hashed_only_if_its_file_may_have_changed(tmp_path, monkeypatch):
    data = files(tmp_path)
    mixture_of(data)
    compared = []
    digest = latents_module.digest_of_file
    monkeypatch.setattr(latents_module, "digest_of_file", lambda path: compared.append(path.name) or digest(path))
    mixture_of(data)
    assert not compared
    array = next(tmp_path.glob("1D*.npy"))
    os.utime(array)
    mixture_of(data)
    mixture_of(data)
    assert compared == [array.name]


def test_latent_cache_that_cannot_be_written_leaves_no_files(tmp_path, monkeypatch):
    data = files(tmp_path)

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(latents_module, "_encode", full)
    with pytest.raises(PerfsuiteError, match="No space left on device; name another folder with --latents"):
        mixture_of(data)
    assert {p.suffix for p in tmp_path.iterdir()} == {".hdf5"}


def test_epoch_visits_each_example_at_most_once(mixture):
    maker = Maker(mixture=mixture, config=SMALL)
    for place, task in enumerate(mixture.tasks):
        examples, each = task.count(), maker.counts[place]
        batches = examples // each
        rows = torch.cat([maker.rows(place, number) for number in range(batches)]).tolist()
        assert len(set(rows)) == len(rows) == batches * each
        trained_on = {s * task.fields.states + f for s in task.fields.train for f in range(task.fields.states - 1)}
        assert set(rows) <= trained_on


def test_micro_batches_of_two_ranks_equal_those_of_one_process(mixture):
    config = dataclasses.replace(SMALL, inverse_loss_frequency=1)
    makers = [Maker(mixture=dataclasses.replace(mixture, rank=rank, ranks=2), config=config) for rank in range(2)]
    alone = Maker(mixture=mixture, config=config)
    for number, (rank, maker) in itertools.product(range(2), enumerate(makers)):
        found, same = maker[number], alone[2 * number + rank]
        for part, expected in zip(found.parts, same.parts, strict=True):
            for name in ("before", "after", "dt", "coded", "field", "queries"):
                assert torch.equal(getattr(part, name), getattr(expected, name))
        assert torch.equal(found.scales, same.scales)
        noise, expected = (
            torch.cat([x.flatten() for x in stages.draw(m, n, torch.empty(2, 3))])
            for m, n in ((maker, number), (alone, 2 * number + rank))
        )
        assert torch.equal(noise, expected)
    assert not torch.equal(makers[0][0].scales, makers[1][0].scales)


def test_batch_contains_both_tasks_in_equal_shares(mixture):
    batch = Maker(mixture=mixture, config=SMALL)[0]
    assert [(part.task, len(part.before)) for part in batch.parts] == [("advection1d", 2), ("darcy2d", 2)]
    assert batch.scales.shape == (2, 2, 4)


@pytest.mark.parametrize("resident", [False, True])
def test_inverse_losses_use_latents_before_and_after_the_step(mixture, resident):
    """Otherwise the decoder of Darcy flow would never be trained on a solution."""
    config = dataclasses.replace(SMALL, inverse_loss_frequency=2)
    maker = Maker(mixture=mixture, config=config)
    source = Resident(maker, torch.device("cpu")) if resident else maker
    states = {task.task: set() for task in mixture.tasks}
    for number in range(20):
        batch = source.batch(number) if resident else maker[number]
        for task, part in zip(mixture.tasks, batch.parts, strict=True):
            if number % 2:
                assert len(part.coded) == len(part.field) == len(part.queries) == 0
                continue
            for found, field, before, after in zip(part.coded, part.field, part.before, part.after, strict=True):
                state = 0 if torch.equal(found, before) else 1
                states[task.task].add(state)
                assert torch.equal(found, (before, after)[state])
                row = (task.latents.rows == found).flatten(1).all(1).nonzero()[0].item()
                assert torch.equal(field[..., 0], task.fields.at(*divmod(row, task.fields.states)))
    assert states == {task.task: {0, 1} for task in mixture.tasks}


@FULLY  # the switch `loader` also tests workers
def test_workers_produce_the_same_batches(mixture):
    config = dataclasses.replace(SMALL, num_workers=1, prefetch_factor=2)
    maker = Maker(mixture=mixture, config=config)
    feed = Feed(maker)
    for number in (0, 1, 5):
        found, expected = feed.batch(number), maker[number]
        assert torch.equal(found.scales, expected.scales)
        for one, other in zip(found.parts, expected.parts, strict=True):
            for field in dataclasses.fields(one)[1:]:
                assert torch.equal(getattr(one, field.name), getattr(other, field.name))


def test_data_position_from_other_data_is_rejected(mixture):
    state = load(DATA).batches.state_dict()
    with pytest.raises(PerfsuiteError, match="the data has changed since the checkpoint was written"):
        load(dataclasses.replace(DATA, synthetic=5)).batches.load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--batch_size", "3"], "a share of 0.5 of advection1d is no whole number of examples; use a multiple of 2"),
        (["--stage", "fourth"], "--stage must be one of operator, diffusion, consistency, got 'fourth'"),
        (["--stage", "diffusion"], "name the stage before's checkpoint with --init"),
        (["--data", "nowhere"], "data: nowhere is no folder"),
        (["--advection", "nowhere.hdf5"], "data: there is no file nowhere.hdf5"),
        (["--data", "."], "has no file *Advection*.hdf5 or *DarcyFlow*.hdf5"),
        (["--precision", "fp8"], "--precision must be one of float32, fp16, bf16, got 'fp8'"),
        (["--inverse_loss_frequency", "0"], "inverse_loss_frequency=0: use 1 or more"),
        (["--grad_clip", "0"], "grad_clip=0.0: use a number above 0, or null"),
    ],
)
def test_invalid_option_is_reported_without_a_traceback(options, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = str(ROOT / "configs/ups/tiny.yaml")
    result = CliRunner().invoke(train, ["ups", "--config", config, "--device", "cpu", *options])
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output


def test_cells_not_divisible_by_tokens_are_rejected(tmp_path):
    data = dataclasses.replace(files(tmp_path, cells=12), tokens=8)
    with pytest.raises(PerfsuiteError, match=r"tokens=8: .* has 12 cells, which do not divide into 8 tokens"):
        mixture_of(data)


def test_tiny_configuration_trains_three_steps(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = str(ROOT / "configs/ups/tiny.yaml")
    result = CliRunner().invoke(train, ["ups", "--config", config, "--device", "cpu", "--steps", "3"])
    assert result.exit_code == 0, result.output
    assert "3 steps" in result.output


@pytest.mark.parametrize("path", sorted((ROOT / "configs/ups").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_configuration_file_is_valid(path):
    chosen, _, data = configuration.read([trainers.config_of("ups"), Options, trainers.data_config_of("ups")], path)
    assert (chosen.batch_size, chosen.accumulation) == (data.batch_size, data.accumulation)
    assert path.stem == "tiny" or chosen.depth == 12


def test_configuration_files_have_the_source_s_values():
    def of(name):
        kinds = [trainers.config_of("ups"), trainers.data_config_of("ups")]
        chosen, _ = configuration.read(kinds, ROOT / f"configs/ups/{name}.yaml")
        return chosen

    baseline = of("4gpu_baseline")
    assert (baseline.batch_size, baseline.accumulation, baseline.precision) == (8, 3, "fp16")
    assert (baseline.inverse_loss_frequency, baseline.num_queries) == (1, 2048)
    assert baseline == without_techniques(baseline)
    fast = of("2gpu_fast")
    assert fast == dataclasses.replace(
        fast, **dict.fromkeys((*TECHNIQUES, *OF_RANKS), True), **dict.fromkeys(TRADES, False)
    )
    four, two = of("4gpu_optimized"), of("2gpu_optimized")
    assert (four.batch_size, four.accumulation, four.use_fsdp2, four.cpu_offload_optimizer) == (24, 2, True, True)
    assert (two.batch_size, two.accumulation, two.use_fsdp2) == (30, 2, False)
    assert not any(map(two.has_inverse, range(9)))
    assert [n for n in range(9) if four.has_inverse(n)] == [0, 4, 8]
    careful = of("conservative")
    assert (careful.inverse_loss_frequency, careful.num_queries, careful.use_fsdp2) == (2, 1536, False)


@pytest.mark.parametrize("again", [False, True])
def test_operator_in_two_parts_has_the_same_loss_curve(again, mixture, known, monkeypatch):
    monkeypatch.setattr(Optimized, "_has_parts", lambda trainer: True)
    trainer = made(Optimized, mixture, dataclasses.replace(SMALL, activation_checkpoint=again))
    assert share(curve(trainer), known) <= 1
    early = trainer.gradients._early["operator"].weights
    names = {name for name, weight in trainer.weights.items() if any(weight is w for w in early)}
    assert {name.split(".")[1] for name in names} == {"take", "time1", "time2", "blocks"}
    assert {name.split(".")[2] for name in names if ".blocks." in name} == {"0"}


@pytest.mark.parametrize("again", [False, True])
def test_blocks_share_compiled_sublayer_graphs(again, monkeypatch):
    graphs = []
    monkeypatch.setattr(compiled_function, "_inductor", lambda graph, inputs, **options: graphs.append(1) or graph)
    operator = Operator(latent_width=8, width=16, depth=3, heads=2)
    mixture = torch.randn(2, 4, 8), torch.rand(2), torch.rand(3, 2, 2)
    found = []
    for compiled in (True, False):
        calls = parts.__wrapped__(again=again, flex=False, compiled=compiled)
        stepped = calls.whole(operator, *mixture)
        assert torch.equal(calls.second(operator, mixture[0], *calls.first(operator, *mixture), mixture[2]), stepped)
        found.append([stepped, *torch.autograd.grad(stepped.square().sum(), list(operator.parameters()))])
    assert len(graphs) == 2
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


# --- a step as one CUDA graph ---------------------------------------------------------------------------------------


class Replays:
    """Stand-in for CUDA graphs: each replay calls the step again with its static inputs."""

    def __init__(self):
        self.captured = 0

    def aside(self, call, device):
        return call()

    def capture(self, call, device):
        self.captured += 1
        output = call()
        first = [True]

        def replay():
            if first.pop() if first else False:
                return
            output.copy_(call())

        return output, replay


@pytest.mark.parametrize("stage", ["operator", "diffusion", "consistency"])
def test_replayed_steps_equal_eager_steps(mixture, runs, stage):
    config = at_stage(stage, runs) if stage != "operator" else SMALL
    plain, replayed = made(Optimized, mixture, config), made(Optimized, mixture, config)
    graphs = Replays()
    replayed._replayed = CudaGraphStep(replayed._step, warmup=1, graphs=8, device="cpu", backend=graphs)
    assert torch.equal(curve(plain, 12), curve(replayed, 12))
    assert same(plain.state_dict(), replayed.state_dict())
    # Every third batch has inverse losses: the first of a step's two batches, the second or none.
    assert graphs.captured == (3 if stage == "operator" else 1)


@pytest.mark.gpu
@pytest.mark.parametrize("changes", [{}, {"precision": "bf16"}, {"grad_clip": None}, {"activation_checkpoint": True}])
def test_gpu_replayed_losses_match_eager_losses(mixture, changes):
    config = dataclasses.replace(SMALL, compile=False, **changes)
    eager = Optimized(dataclasses.replace(config, cuda_graphs=False), mixture, "cuda")
    replayed = Optimized(config, mixture, "cuda")
    torch.testing.assert_close(curve(replayed, 30), curve(eager, 30), rtol=1e-4, atol=0)
    assert (replayed._replayed.captures, replayed._replayed.reason) == (3, None)
    states = [t.state_dict()["optimizers"]["operator"]["adamw"]["steps"] for t in (eager, replayed)]
    assert states == [30, 30]


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [True, False])
def test_gpu_compiled_loss_curve_matches_the_reference(mixture, graphs):
    truth = curve(made(Reference, mixture, dtype=torch.float64), 30)
    runs = [curve(a_rounding_away(Reference(SMALL, mixture, "cuda"), seed), 30) for seed in range(NEIGHBOURS)]
    compiled = Optimized(dataclasses.replace(SMALL, compile=True, cuda_graphs=graphs), mixture, "cuda")
    assert share(curve(compiled, 30), (truth, deviation_of(runs, truth))) <= 1
    assert isinstance(compiled._replayed, CudaGraphStep) == graphs


def test_settles_covers_the_capture_of_every_form_of_a_step(mixture, monkeypatch):
    trainer = made(Optimized, mixture)
    assert trainer.settles == 3
    monkeypatch.setattr(Optimized, "_is_captured", lambda trainer: True)
    assert trainer.settles == 12


@pytest.mark.parametrize(
    ("changes", "captured"),
    [
        ({}, True),
        ({"precision": "fp16"}, False),
        ({"cpu_offload_optimizer": True}, False),
        ({"fused_optimizers": False}, False),
        ({"fused_clip": False}, False),
        ({"fused_clip": False, "grad_clip": None}, True),
        ({"cuda_graphs": False}, False),
    ],
)
def test_step_is_captured_only_if_it_needs_no_host_work(mixture, monkeypatch, changes, captured):
    trainer = made(Optimized, mixture, dataclasses.replace(SMALL, **changes))
    assert not trainer._is_captured()
    trainer.device = torch.device("cuda")
    monkeypatch.setattr("optimized.trainers.ups.triton_reason", lambda: None)
    assert trainer._is_captured() == captured


# --- the stages after the operator ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return stage → folder of a run of three steps; each stage starts from the one before."""
    folders = {}
    for stage in ("operator", "diffusion", "consistency"):
        folders[stage] = tmp_path_factory.mktemp(stage)
        loaded = load(dataclasses.replace(DATA, steps=3))
        trainer = made(Optimized, loaded.trainer_data, at_stage(stage, folders))
        fit(trainer, loaded.batches, Options(folder=str(folders[stage])), name="ups")
    return folders


def at_stage(stage, folders):
    before = {"diffusion": "operator", "consistency": "diffusion"}.get(stage)
    init = None if before is None else str(folders[before])
    return dataclasses.replace(SMALL, stage=stage, init=init, ema_decay=0.5)


@pytest.mark.parametrize("stage", ["diffusion", "consistency"])
def test_optimized_loss_curve_matches_the_reference_at_each_stage(stage, runs, mixture):
    config = at_stage(stage, runs)
    truth = curve(made(Reference, mixture, config, dtype=torch.float64))
    compared = [curve(made(Reference, mixture, config))]
    compared += [curve(a_rounding_away(made(Reference, mixture, config), seed)) for seed in range(NEIGHBOURS)]
    found = curve(made(Optimized, mixture, config))
    assert share_of_rule(found, truth, deviation_of(compared, truth), torch.float32) <= 1
    assert len(set(truth.tolist())) == STEPS


@pytest.mark.parametrize("stage", ["diffusion", "consistency"])
def test_stage_trains_only_the_denoiser_and_resuming_is_bit_identical(stage, runs, mixture):
    config = at_stage(stage, runs)
    trainer = made(Optimized, mixture, config)
    before = trainer.state_dict()
    for _ in range(4):
        trainer.train_window({})
    after = trainer.state_dict()
    assert same(before["kept"], after["kept"])
    assert not any(torch.equal(before["weights"][name], weight) for name, weight in after["weights"].items())
    resumed = made(Optimized, mixture, config)
    resumed.load_state_dict(through_a_file(trained(Reference, mixture, config, 0)))
    resumed.load_state_dict(through_a_file(trained(Optimized, mixture, config, 2)))
    for _ in range(2):
        resumed.train_window({})
    assert same(resumed.state_dict(), after)


@pytest.mark.parametrize("stage", ["diffusion", "consistency"])
@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=FULLY)])
def test_stage_losses_in_half_precision_are_within_5_percent_of_float32(precision, stage, runs, mixture):
    config = at_stage(stage, runs)
    expected = curve(made(Reference, mixture, config), 3)
    for kind in (Reference, Optimized):
        found = curve(made(kind, mixture, dataclasses.replace(config, precision=precision)), 3)
        torch.testing.assert_close(found, expected, rtol=0.05, atol=0)


def test_diffusion_starts_from_averaged_operator_and_student_from_its_teacher(runs, mixture):
    operator = stages.opened(runs["operator"])[1].trainer["averages"]
    diffusion = made(Optimized, mixture, at_stage("diffusion", runs)).refiner
    assert all(torch.equal(weight, operator[name]) for name, weight in diffusion.frozen.weights().items())
    assert diffusion.residual_scale != 1
    student = made(Optimized, mixture, at_stage("consistency", runs)).refiner
    averages = stages.opened(runs["diffusion"])[1].trainer["averages"]
    for network in (student.denoiser, student.teacher):
        assert all(torch.equal(p, averages[f"denoiser.{name}"]) for name, p in network.named_parameters())
    assert torch.equal(student.residual_scale, diffusion.residual_scale)


def test_ddim_steps_with_the_true_v_end_at_the_residual():
    generator = torch.Generator().manual_seed(0)
    residual, noise = torch.randn(2, 3, 4, 5, generator=generator, dtype=torch.float64)
    x = noise
    for number in range(stages.LEVELS, 0, -1):
        level = torch.full((3,), number / stages.LEVELS, dtype=torch.float64)
        alpha, sigma = stages.schedule(level)
        v = alpha * noise - sigma * residual
        torch.testing.assert_close(alpha * residual + sigma * noise, x)
        torch.testing.assert_close(stages.cleaned(x, v, level), residual)
        x = stages.ddim(x, v, level, level - 1 / stages.LEVELS)
    torch.testing.assert_close(x, residual)


def test_stage_that_starts_from_a_wrong_checkpoint_is_rejected(runs, mixture):
    with pytest.raises(PerfsuiteError, match="is of the stage operator, and consistency starts from diffusion"):
        made(Optimized, mixture, dataclasses.replace(SMALL, stage="consistency", init=str(runs["operator"])))
    with pytest.raises(PerfsuiteError, match="does not fit: "):
        made(Optimized, mixture, dataclasses.replace(SMALL, stage="diffusion", init=str(runs["operator"]), width=32))
    with pytest.raises(PerfsuiteError, match="no checkpoint"):
        made(Optimized, mixture, dataclasses.replace(SMALL, stage="diffusion", init="nowhere"))


@pytest.mark.parametrize("stage", ["operator", "diffusion", "consistency"])
def test_every_stage_can_be_evaluated(stage, runs, mixture):
    _, found, config = stages.opened(runs[stage])
    networks, step = evaluation.loaded(config, mixture, found.trainer, torch.device("cpu"))
    scores, _ = evaluation.evaluate(networks, mixture, torch.device("cpu"), 2, step)
    assert all(0 < score.nrmse < 10 for score in scores)
