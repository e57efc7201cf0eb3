"""Claims C24 to C38 and C61 of ups, each with its measurement."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from statistics import median

import torch

from perfsuite.report import units
from suite import ablation
from suite.ablation import Ratio
from suite.claims import ups_measured as measured
from suite.claims import ups_parallel as parallel
from suite.claims import ups_verdicts as judged
from suite.claims.measuring import UncompiledError, interleaved, typical
from suite.claims.record import CONFIRMED, DEPENDS, UNMEASURED, Answer, Checks, Measure
from suite.claims.ups_parallel import two_ranks, where
from suite.claims.ups_ranks import KINDS, RankError
from suite.claims.ups_setting import (
    FEW_QUERIES,
    GB,
    RARE,
    SOURCE,
    Setting,
    inverse_tasks,
    make_trainer,
    mixture,
    setting,
    tuned,
)
from suite.claims.ups_words import differ, less, longer, ratio
from suite.claims.words import amount, times
from suite.ups.losses import query_indices

__all__ = ["CHECKS", "Setting", "setting"]
QUERIES = SOURCE.num_queries
PHASES = {"1": 1.36, "2": 1.45, "3": 1.31, "4": 1.07, "5": 1.23, "6": 1.10, "7": 1.18, "8": 1.13}
"""The source's speedup of each phase."""
NEEDS = {"1": "a compiler", "4": "workers", "7": "several GPUs"}
"""Phase → what it needs on this machine; without it, the phase is left out."""
CHECKS = Checks()


def _alone(measure: Measure) -> Measure:
    """Free unused memory before the measurement; return UNMEASURED if nothing can be compiled or a rank fails."""

    @functools.wraps(measure)
    def answer(s: Setting) -> Answer:
        measured.empty()
        try:
            return measure(s)
        except (UncompiledError, RankError) as error:
            return UNMEASURED, str(error)

    return answer


# --- the inverse losses ---------------------------------------------------------------------------------------------


@CHECKS("C24", "The inverse losses regularise the operator.")
@_alone
def regularises(s: Setting) -> Answer:
    config = tuned(s, precision="float32", inverse_loss_frequency=1)
    trainer = make_trainer(s, config)
    names = list(trainer.weights)
    with torch.enable_grad():
        losses = measured.inverse(inverse_tasks(trainer), shared=True)
        found = torch.autograd.grad(losses.sum(), list(trainer.weights.values()), allow_unused=True)
    norms = {"operator": 0.0, "encoders": 0.0, "decoders": 0.0}
    for name, gradient in zip(names, found, strict=True):
        norms[name.partition(".")[0]] += 0.0 if gradient is None else float(gradient.norm()) ** 2
    unused = sum(g is None for n, g in zip(names, found, strict=True) if n.startswith("operator."))
    every = [n for n in names if n.startswith("operator.")]
    without = dataclasses.replace(config, lambda_enc=0.0, lambda_dec=0.0)
    ends = [measured.operator_after(s, c) for c in (config, config, without)]
    repeated, changed = measured.apart(ends[1], ends[0]), measured.apart(ends[2], ends[0])
    clipped = [measured.operator_after(s, dataclasses.replace(c, grad_clip=1.0)) for c in (config, without)]
    verdict = judged.regularises(norms["operator"], changed, repeated)
    detail = (
        f"their gradient has the norm {norms['encoders'] ** 0.5:.2g} by the encoders' weights and "
        f"{norms['decoders'] ** 0.5:.2g} by the decoders', and {norms['operator'] ** 0.5:.2g} by the operator's: "
        f"{unused} of its {len(every)} weights are not in their graph, for they are of cached latents. After "
        f"{s.steps} steps with and without them the operator's weights {differ(changed)}, and in two runs with them "
        f"{differ(repeated)}. Only where the norm of all gradients together is clipped, at 1, do they act on it, by "
        f"that norm: the weights then {differ(measured.apart(clipped[1], clipped[0]))}"
    )
    return verdict, detail


@CHECKS("C25", "Half as many query points halve the cost of the query loss.", gpu=True)
@_alone
def queries(s: Setting) -> Answer:
    many = s.config.num_queries
    trainer = make_trainer(s, tuned(s, batch_size=s.batches[-1]))
    gains, rows = [], []
    for name, task in zip([t.task for t in mixture(s).tasks], inverse_tasks(trainer), strict=True):
        points = task.points.flatten(0, -2).shape[0]
        calls: dict[str, Callable[[], object]] = {}
        for count in (many, many // 2):
            asked = dataclasses.replace(task, queries=query_indices(points, count).to(s.device))
            for both in (False, True):
                calls[f"{both} {count}"] = functools.partial(measured.differentiated, asked, both=both)
        found = interleaved(s.device, s.rounds, calls, count=5)
        alone, whole = (
            ablation.paired(found[f"{both} {many}"], found[f"{both} {many // 2}"]) for both in (False, True)
        )
        fewer = measured.flops([name], QUERIES, "first") / measured.flops([name], FEW_QUERIES, "first")
        gains += [alone, Ratio(value=fewer, low=fewer, high=fewer)]
        rows.append(
            f"on a grid of {points:,} points the query loss, forward and backward for {len(task.latents)} examples, "
            f"takes {typical(found[f'False {many}'])} with {many:,} and {typical(found[f'False {many // 2}'])} with "
            f"{many // 2:,}, {times(alone)}; both inverse losses, which decode the whole grid once, {times(whole)}. On "
            f"the source's grid of {name} the query loss has {fewer:.3g} times fewer operations"
        )
    verdict = judged.is_multiple(gains, 2)
    return verdict, ("on the grid, and on whether operations limit: " * (verdict == DEPENDS)) + "; ".join(rows)


@CHECKS("C26", "Inverse losses in every fourth batch with half as many query points are 87.5% less work.")
@_alone
def work(s: Setting) -> Answer:
    shares, rows = [], []
    for names in (("advection1d",), ("darcy2d",), ("advection1d", "darcy2d")):
        before = measured.flops(names, QUERIES, "apart") * RARE
        after = measured.flops(names, FEW_QUERIES, "apart")
        once = measured.flops(names, FEW_QUERIES, "shared")
        shares += [after / before]
        name = "both tasks" if len(names) == 2 else names[0]
        rows.append(
            f"{name}: {units.rate(before, 'FLOP')} become {units.rate(after, 'FLOP')}, {100 * (1 - after / before):.1f}"
            f"% less, and {100 * (1 - once / before):.1f}% less where the query points are read from the grid that is "
            "decoded anyway"
        )
    detail = (
        f"forward and backward of {RARE} batches of {SOURCE.batch_size} examples, by torch's count of operations; "
        f"{'; '.join(rows)}. The frequency alone saves {100 * (1 - 1 / RARE):.0f}%: the second loss decodes the whole "
        "grid, whatever the number of query points is"
    )
    verdict = judged.is_amount(shares, 1 - 0.875)
    return verdict, ("on the grid: " * (verdict == DEPENDS)) + detail


@CHECKS("C27", "A batch of both tasks still has the inverse losses of both.")
@_alone
def mixed(s: Setting) -> Answer:
    trainer = make_trainer(s, tuned(s, precision="float32"))
    tasks = inverse_tasks(trainer)
    whole = measured.inverse(tasks, shared=True)
    each = [measured.inverse([task], shared=True) for task in tasks]
    examples = sum(len(task.latents) for task in tasks)
    mean = torch.stack([len(t.latents) / examples * loss for t, loss in zip(tasks, each, strict=True)]).sum(0)
    difference = float(((whole - mean).abs().max() / mean.abs().max()).detach())
    leaves = {n: w for n, w in trainer.weights.items() if not n.startswith("operator.")}
    found = torch.autograd.grad(whole.sum(), list(leaves.values()), allow_unused=True)
    norms: dict[str, float] = dict.fromkeys([t.task for t in mixture(s).tasks], 0.0)
    for name, gradient in zip(leaves, found, strict=True):
        norms[name.split(".")[1]] += 0.0 if gradient is None else float(gradient.norm())
    values = [
        f"{task} has {float(loss[0].detach()):.3g} and {float(loss[1].detach()):.3g}"
        for task, loss in zip(norms, each, strict=True)
    ]
    detail = (
        f"a micro-batch of {' and '.join(str(len(t.latents)) for t in tasks)} examples has losses of "
        f"{float(whole[0].detach()):.3g} and {float(whole[1].detach()):.3g}, the mean of the tasks' own: "
        f"{' and '.join(values)}. The encoder and decoder of each task get a gradient"
    )
    verdict = judged.both_tasks(norms, difference)
    if verdict != CONFIRMED:
        listed = ", ".join(f"{task} {norm:.2g}" for task, norm in norms.items())
        detail = (
            f"the losses of a mixed micro-batch differ by {difference:.2g} from the mean of the tasks' own, and their "
            f"gradients by the tasks' encoders and decoders have norms of {listed}"
        )
    return verdict, detail


# --- the optimizers and their memory --------------------------------------------------------------------------------


@CHECKS("C28", "Offloading the optimizer's state frees about 8 GB.")
@_alone
def offload_frees(s: Setting) -> Answer:
    config = tuned(s)
    rates = measured.state_rates(make_trainer(s, config))
    measured.empty()
    matrices, others = measured.source_sizes(s, whole=True)
    state = rates[0] * matrices + rates[1] * others
    most = 8.0 * (matrices + others)
    detail = (
        f"Muon keeps {rates[0]:g} bytes for each element of a matrix and AdamW {rates[1]:g} for each of the others: of "
        f"{matrices + others:,} parameters {amount(state)}, and with AdamW alone {amount(most)}"
    )
    freed = [state]
    if s.device.type == "cuda":
        peaks = {
            on: measured.peak_of_steps(s, dataclasses.replace(config, cpu_offload_optimizer=on)) for on in (False, True)
        }
        freed = [float(peaks[False] - peaks[True])]
        detail += (
            f". A trainer in bfloat16 with batches of {config.batch_size} takes {amount(peaks[False])} at its peak and "
            f"{amount(peaks[True])} with its state in host memory, {less(freed[0])}"
        )
    return judged.frees(freed, most, 8 * GB), detail


@CHECKS("C29", "Offloading works with the hybrid of Muon and AdamW.")
@_alone
def offload_works(s: Setting) -> Answer:
    trainer = make_trainer(s, tuned(s, cpu_offload_optimizer=True))
    before = {name: w.detach().clone() for name, w in trainer.weights.items()}
    for _ in range(s.steps):
        trainer.train_window({})
    trainer.last_report()
    moved = {name: not torch.equal(w.detach(), before[name]) for name, w in trainer.weights.items()}
    distances = measured.by_kind(list(before.values()), s.steps)
    verdict = judged.updates(list(moved.values()), list(distances.values()))
    detail = (
        f"after {s.steps} steps {sum(moved.values())} of the trainer's {len(moved)} weights have changed. With the "
        f"same gradients the offloaded optimizer and that on the device are {distances['Muon']:.2g} of an update apart "
        f"where Muon makes it, and {distances['AdamW']:.2g} where AdamW does"
    )
    return verdict, detail


@CHECKS("C30", "FSDP2 frees about 3 GB on each GPU.")
@_alone
def sharding_frees(s: Setting) -> Answer:
    count = sum(measured.source_sizes(s, whole=False))
    most = 16.0 * count
    detail = (
        f"weights, gradients and AdamW's two moments of the operator's {count:,} parameters are {amount(most)} in "
        f"float32: sharding frees {amount(most / 2)} of them on each of two GPUs and {amount(most * 3 / 4)} on each of "
        "four"
    )
    own = [two_ranks(s)["held"][kind]["own"] for kind in KINDS]
    held = two_ranks(s)["held"][KINDS[0]]["parameters"]
    detail += (
        f". Two ranks{where(s)}, with {held:,} parameters, hold {amount(own[0])} each with DistributedDataParallel and "
        f"{amount(own[1])} sharded"
    )
    freed = [most / 2, most * 3 / 4]
    if s.gpus >= 2:
        peaks = [two_ranks(s)["held"][kind]["peak"] for kind in KINDS]
        freed.append(float(peaks[0] - peaks[1]))
        detail += f". A step's peak is {amount(peaks[0])} and {amount(peaks[1])}, {less(freed[-1])}"
    return judged.frees(freed, most, 3 * GB), detail


@CHECKS("C31", "The weights still move after the network is wrapped.")
@_alone
def still_move(s: Setting) -> Answer:
    found: dict[str, bool] = dict(two_ranks(s)["moved"])
    trainer = make_trainer(s, tuned(s, cpu_offload_optimizer=True))
    before = measured.predicted(trainer)
    trainer.train_window({})
    trainer.last_report()
    found["the offloaded optimizer"] = not torch.equal(before, measured.predicted(trainer))
    detail = "; ".join(f"{name}: {'they move' if moved else 'they stay'}" for name, moved in found.items())
    verdict = judged.moves(found)
    detail = f"the weights of a wrapped network{where(s)}, in a step of the optimizer: {detail}"
    if verdict == DEPENDS:
        detail = f"on when the optimizer is built: {detail}. fully_shard puts new parameters into the network"
    return verdict, detail


# --- precision, checkpoints and batches -----------------------------------------------------------------------------


@CHECKS("C32", "bfloat16 instead of float16 with a scaled loss makes a step 1.10 times as fast.", gpu=True)
@_alone
def precision(s: Setting) -> Answer:
    ratios, rows = [], []
    for how, on in measured.modes(s).items():
        found = measured.timed(s, {name: tuned(s, precision=name, compile=on) for name in ("fp16", "bf16")})
        ratios.append(ablation.paired(found["fp16"], found["bf16"]))
        rows.append(
            f"{how}, a step takes {typical(found['fp16'])} in float16 and {typical(found['bf16'])} in bfloat16, "
            f"{times(ratios[-1])}"
        )
    verdict = judged.has_gain(ratios, 1.10)
    return verdict, ("on whether the step is compiled: " * (verdict == DEPENDS)) + "; ".join(rows)


CHECKS("C33", 'mode="reduce-overhead" works with DistributedDataParallel.', gpu=True)(_alone(parallel.graphs))
CHECKS("C34", "The variables of NCCL make an all-reduce over NVLink faster.", gpu=True)(_alone(parallel.nccl))
CHECKS("C35", "Accumulation cuts the number of all-reduces.")(_alone(parallel.accumulation))


@CHECKS("C36", "A larger batch is faster.", gpu=True)
@_alone
def batches(s: Setting) -> Answer:
    ratios, rows = [], []
    for how, on in measured.modes(s).items():
        sizes = s.batches if not on else (s.batches[0], measured.later_batch(s))
        configs = {str(size): tuned(s, batch_size=size, compile=on) for size in sizes}
        found = measured.timed(s, configs)
        each = {size: [t / (size * configs[str(size)].accumulation) for t in found[str(size)]] for size in sizes}
        ratios += [ablation.paired(each[a], each[b]) for a, b in itertools.pairwise(sizes)]
        detail = ", ".join(f"{units.significant(1 / median(each[size]))} with {size}" for size in sizes)
        whole = ablation.paired(each[sizes[0]], each[sizes[-1]])
        rows.append(f"{how}, examples a second: {detail}; {sizes[-1]} against {sizes[0]} {times(whole)}")
    verdict = judged.faster(ratios)
    return verdict, ("on the batch, and on whether the step is compiled: " * (verdict == DEPENDS)) + "; ".join(rows)


@CHECKS("C37", "The phases multiply to 5.0 times.", gpu=True)
@_alone
def phases(s: Setting) -> Answer:
    configs, found = measured.timed_phases(s)
    each = {name: [t / (c.batch_size * c.accumulation) for t in found[name]] for name, c in configs.items()}
    alone = {
        name: ablation.paired(each["before" if name == "4" else "resident"], each[name])
        for name in PHASES
        if name in configs
    }
    together = ablation.paired(each["before"], each["together"])
    product, claimed = 1.0, 1.0
    for name, gain in alone.items():
        product, claimed = product * gain.value, claimed * PHASES[name]
    listed = ", ".join(f"{name} {ratio(gain)}, claimed {PHASES[name]:.2f}" for name, gain in alone.items())
    left_out = "; ".join(f"phase {name}, which takes {NEEDS[name]}" for name in PHASES if name not in alone)
    detail = (
        f"examples a second on one GPU, each phase alone against the source's settings before: phase {listed}. They "
        f"multiply to {units.significant(product)}, and the source's own to {units.significant(claimed)}. All of these "
        f"phases together are {times(together)}. Not measured: {left_out}"
    )
    verdict = judged.multiply(together, product, claimed)
    return verdict, ("on whether the phases are measured one by one or together: " * (verdict == DEPENDS)) + detail


@CHECKS("C38", "Activation checkpointing costs 20% more time and leaves the forward unchanged.", gpu=True)
@_alone
def checkpointing(s: Setting) -> Answer:
    same = measured.same_forward(s)
    ratios, rows = [], []
    for how, on in measured.modes(s).items():
        configs = {
            str(again): tuned(s, batch_size=measured.later_batch(s), compile=on, activation_checkpoint=again)
            for again in (False, True)
        }
        found = measured.timed(s, configs)
        ratios.append(ablation.paired(found["True"], found["False"]))
        rows.append(
            f"{how}, a step takes {typical(found['False'])} without and {typical(found['True'])} with it, "
            f"{longer(ratios[-1])}"
        )
    detail = f"the operator's output is {'the same to the bit' if same else 'different'} with it; {'; '.join(rows)}"
    verdict = judged.costs(ratios, 0.2, unchanged=same)
    return verdict, ("on whether the step is compiled: " * (verdict == DEPENDS)) + detail


CHECKS("C61", "DistributedDataParallel is 3.8 times as fast on four GPUs.", gpu=True)(_alone(parallel.four))
