"""The claims of ups, C24 to C38 and C61, each with how it is measured."""

from __future__ import annotations

import dataclasses
import functools
import gc
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from perfsuite import machine
from perfsuite.report import units
from suite import ablation
from suite.ablation import Ratio
from suite.claims import ups_ranks as in_ranks
from suite.claims import ups_verdicts as judged
from suite.claims.eigenstate_lm import amount
from suite.claims.measuring import interleaved, peak_bytes, typical
from suite.claims.record import CONFIRMED, DEPENDS, UNMEASURED, Answer, Checks, Measure
from suite.claims.ups_setting import (
    FEW_QUERIES,
    RARE,
    SOURCE,
    Setting,
    UncompiledError,
    inverse_tasks,
    make_trainer,
    mixture,
    setting,
    steps,
    tuned,
)
from suite.techniques import implementation
from suite.ups.losses import InverseTask, query_indices
from suite.ups.model import make_decoder, make_encoder, make_operator
from suite.ups.task_fields import token_grid

__all__ = ["CHECKS", "Setting", "setting"]
GB = 1e9
QUERIES = SOURCE.num_queries
TOGETHER = 4
"""Steps that are timed in a row: a multiple of the steps after which the inverse losses recur."""
PHASES = {"1": 1.36, "2": 1.45, "3": 1.31, "4": 1.07, "5": 1.23, "6": 1.10, "7": 1.18, "8": 1.13}
"""The source's speedup of each phase."""
CHECKS = Checks()


def _alone(measure: Measure) -> Measure:
    """Begin with the memory that other checks have left; what cannot be compiled cannot be measured."""

    @functools.wraps(measure)
    def answer(s: Setting) -> Answer:
        _empty()
        try:
            return measure(s)
        except UncompiledError as error:
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
        losses = _inverse(inverse_tasks(trainer), shared=True)
        found = torch.autograd.grad(losses.sum(), list(trainer.weights.values()), allow_unused=True)
    norms = {"operator": 0.0, "encoders": 0.0, "decoders": 0.0}
    for name, gradient in zip(names, found, strict=True):
        norms[name.partition(".")[0]] += 0.0 if gradient is None else float(gradient.norm()) ** 2
    unused = sum(g is None for n, g in zip(names, found, strict=True) if n.startswith("operator."))
    every = [n for n in names if n.startswith("operator.")]
    without = dataclasses.replace(config, lambda_enc=0.0, lambda_dec=0.0)
    ends = [_operator_after(s, c) for c in (config, config, without)]
    repeated, changed = _apart(ends[1], ends[0]), _apart(ends[2], ends[0])
    clipped = [_operator_after(s, dataclasses.replace(c, grad_clip=1.0)) for c in (config, without)]
    verdict = judged.regularises(norms["operator"], changed, repeated)
    told = (
        f"their gradient has the norm {norms['encoders'] ** 0.5:.2g} by the encoders' weights and "
        f"{norms['decoders'] ** 0.5:.2g} by the decoders', and {norms['operator'] ** 0.5:.2g} by the operator's: "
        f"{unused} of its {len(every)} weights are not in their graph, for they are of cached latents. After "
        f"{s.steps} steps with and without them the operator's weights {_differ(changed)}, and in two runs with them "
        f"{_differ(repeated)}. Only where the norm of all gradients together is clipped, at 1, do they act on it, by "
        f"that norm: the weights then {_differ(_apart(clipped[1], clipped[0]))}"
    )
    return verdict, told


@CHECKS("C25", "Half as many query points halve the cost of the query loss.", gpu=True)
@_alone
def queries(s: Setting) -> Answer:
    sample = implementation("losses.query_sampling", "query_sampling", optimized=True)
    many = s.config.num_queries
    trainer = make_trainer(s, tuned(s))
    ratios, rows = [], []
    for task in inverse_tasks(trainer):
        points = task.points.flatten(0, -2).shape[0]
        calls: dict[str, Callable[[], object]] = {}
        for count in (many, many // 2):
            asked = dataclasses.replace(task, queries=query_indices(points, count).to(s.device))
            calls[f"alone {count}"] = functools.partial(_differentiated, trainer, [asked], sample)
            calls[f"both {count}"] = functools.partial(_differentiated, trainer, [asked], None)
        found = interleaved(s.device, s.rounds, calls, count=5)
        alone, both = (
            ablation.paired(found[f"{what} {many}"], found[f"{what} {many // 2}"]) for what in ("alone", "both")
        )
        ratios.append(alone)
        rows.append(
            f"on a grid of {points:,} points the query loss, forward and backward for {len(task.latents)} examples, "
            f"takes {typical(found[f'alone {many}'])} with {many:,} and {typical(found[f'alone {many // 2}'])} with "
            f"{many // 2:,}, {_times(alone)}; both inverse losses, which decode the whole grid once, {_times(both)}"
        )
    verdict = judged.is_multiple(ratios, 2)
    return verdict, ("on the grid: " * (verdict == DEPENDS)) + "; ".join(rows)


@CHECKS("C26", "Inverse losses in every fourth batch with half as many query points are 87.5% less work.")
@_alone
def work(s: Setting) -> Answer:
    shares, rows = [], []
    for names in (("advection1d",), ("darcy2d",), ("advection1d", "darcy2d")):
        before = _flops(s, names, QUERIES, shared=False) * RARE
        after = _flops(s, names, FEW_QUERIES, shared=False)
        once = _flops(s, names, FEW_QUERIES, shared=True)
        shares += [after / before]
        name = "both tasks" if len(names) == 2 else names[0]
        rows.append(
            f"{name}: {units.rate(before, 'FLOP')} become {units.rate(after, 'FLOP')}, {100 * (1 - after / before):.1f}"
            f"% less, and {100 * (1 - once / before):.1f}% less where the query points are read from the grid that is "
            "decoded anyway"
        )
    told = (
        f"forward and backward of {RARE} batches of {SOURCE.batch_size} examples, by torch's count of operations; "
        f"{'; '.join(rows)}. The frequency alone saves {100 * (1 - 1 / RARE):.0f}%: the second loss decodes the whole "
        "grid, whatever the number of query points is"
    )
    verdict = judged.remains(shares, 1 - 0.875)
    return verdict, ("on the grid: " * (verdict == DEPENDS)) + told


@CHECKS("C27", "A batch of both tasks still has the inverse losses of both.")
@_alone
def mixed(s: Setting) -> Answer:
    trainer = make_trainer(s, tuned(s, precision="float32"))
    tasks = inverse_tasks(trainer)
    whole = _inverse(tasks, shared=True)
    each = [_inverse([task], shared=True) for task in tasks]
    examples = sum(len(task.latents) for task in tasks)
    mean = torch.stack([len(t.latents) / examples * loss for t, loss in zip(tasks, each, strict=True)]).sum(0)
    difference = float((whole - mean).abs().max() / mean.abs().max())
    leaves = {n: w for n, w in trainer.weights.items() if not n.startswith("operator.")}
    found = torch.autograd.grad(whole.sum(), list(leaves.values()), allow_unused=True)
    norms: dict[str, float] = dict.fromkeys([t.task for t in mixture(s).tasks], 0.0)
    for name, gradient in zip(leaves, found, strict=True):
        norms[name.split(".")[1]] += 0.0 if gradient is None else float(gradient.norm())
    values = [
        f"{task} has {float(loss[0].detach()):.3g} and {float(loss[1].detach()):.3g}"
        for task, loss in zip(norms, each, strict=True)
    ]
    told = (
        f"a micro-batch of {' and '.join(str(len(t.latents)) for t in tasks)} examples has losses of "
        f"{float(whole[0].detach()):.3g} and {float(whole[1].detach()):.3g}, the mean of the tasks' own: "
        f"{' and '.join(values)}. The encoder and decoder of each task get a gradient"
    )
    verdict = judged.both_tasks(norms, difference)
    if verdict != CONFIRMED:
        listed = ", ".join(f"{task} {norm:.2g}" for task, norm in norms.items())
        told = (
            f"the losses of a mixed micro-batch differ by {difference:.2g} from the mean of the tasks' own, and their "
            f"gradients by the tasks' encoders and decoders have norms of {listed}"
        )
    return verdict, told


# --- the optimizers and their memory --------------------------------------------------------------------------------


@CHECKS("C28", "Offloading the optimizer's state frees about 8 GB.")
@_alone
def offload_frees(s: Setting) -> Answer:
    config = tuned(s)
    rates = _state_rates(make_trainer(s, config))
    _empty()
    matrices, others = (sum(sizes) for sizes in _source_sizes(s, whole=True))
    state = rates[0] * matrices + rates[1] * others
    most = 8.0 * sum(map(sum, _source_sizes(s, whole=True)))
    told = (
        f"Muon keeps {rates[0]:g} bytes for each element of a matrix and AdamW {rates[1]:g} for each of the others: of "
        f"{matrices + others:,} parameters {amount(state)}, and with AdamW alone {amount(most)}"
    )
    freed = [state]
    if s.device.type == "cuda":
        peaks = {on: _peak_of_steps(s, dataclasses.replace(config, cpu_offload_optimizer=on)) for on in (False, True)}
        freed = [float(peaks[False] - peaks[True])]
        told += (
            f". A trainer in bfloat16 with batches of {config.batch_size} takes {amount(peaks[False])} at its peak and "
            f"{amount(peaks[True])} with its state in host memory, {_less(freed[0])}"
        )
    return judged.frees(freed, most, 8 * GB), told


@CHECKS("C29", "Offloading works with the hybrid of Muon and AdamW.")
@_alone
def offload_works(s: Setting) -> Answer:
    trainer = make_trainer(s, tuned(s, cpu_offload_optimizer=True))
    before = {name: w.detach().clone() for name, w in trainer.weights.items()}
    for _ in range(s.steps):
        trainer.train_window({})
    trainer.last_report()
    moved = {name: not torch.equal(w.detach(), before[name]) for name, w in trainer.weights.items()}
    distances = _by_kind(list(before.values()), s.steps)
    verdict = judged.updates(list(moved.values()), list(distances.values()))
    told = (
        f"after {s.steps} steps {sum(moved.values())} of the trainer's {len(moved)} weights have changed. With the same "
        f"gradients the offloaded optimizer and the one on the device are {distances['Muon']:.2g} of an update apart "
        f"where Muon makes it, and {distances['AdamW']:.2g} where AdamW does"
    )
    return verdict, told


@CHECKS("C30", "FSDP2 frees about 3 GB on each GPU.")
@_alone
def sharding_frees(s: Setting) -> Answer:
    matrices, others = (sum(sizes) for sizes in _source_sizes(s, whole=False))
    count = matrices + others
    most = 16.0 * count
    told = (
        f"weights, gradients and AdamW's two moments of the operator's {count:,} parameters are {amount(most)} in "
        f"float32: sharding frees {amount(most / 2)} of them on each of two GPUs and {amount(most * 3 / 4)} on each of "
        "four"
    )
    own = [_two(s)[0]["held"][kind]["own"] for kind in in_ranks.KINDS]
    told += (
        f". Two ranks{_where(s)} hold {amount(own[0])} each with DistributedDataParallel and {amount(own[1])} with it"
    )
    freed = [most / 2, most * 3 / 4]
    if s.gpus >= 2:
        peaks = [_two(s)[0]["held"][kind]["peak"] for kind in in_ranks.KINDS]
        freed.append(float(peaks[0] - peaks[1]))
        told += f", and a step's peak is {amount(peaks[0])} and {amount(peaks[1])}, {_less(freed[-1])}"
    return judged.frees(freed, most, 3 * GB), told


@CHECKS("C31", "The weights still move after the network is wrapped.")
@_alone
def still_move(s: Setting) -> Answer:
    found: dict[str, bool] = dict(_two(s)[0]["moved"])
    trainer = make_trainer(s, tuned(s, cpu_offload_optimizer=True))
    before = _predicted(trainer)
    trainer.train_window({})
    trainer.last_report()
    found["the offloaded optimizer"] = not torch.equal(before, _predicted(trainer))
    told = "; ".join(f"{name}: {'they move' if moved else 'they stay'}" for name, moved in found.items())
    verdict = judged.moves(found)
    told = f"after a step the network computes something else, or not{_where(s)}. {told}"
    if verdict == DEPENDS:
        told = f"on when the optimizer is built: {told}. fully_shard puts new parameters into the network"
    return verdict, told


# --- precision, checkpoints and batches -----------------------------------------------------------------------------


@CHECKS("C32", "bfloat16 instead of float16 with a scaled loss makes a step 1.10 times as fast.", gpu=True)
@_alone
def precision(s: Setting) -> Answer:
    ratios, rows = [], []
    for how, on in _modes(s).items():
        configs = {name: tuned(s, precision=name, batch_size=_later_batch(s), compile=on) for name in ("fp16", "bf16")}
        found = _timed(s, configs)
        ratios.append(ablation.paired(found["fp16"], found["bf16"]))
        rows.append(
            f"{how}, a step takes {typical(found['fp16'])} in float16 and {typical(found['bf16'])} in bfloat16, "
            f"{_times(ratios[-1])}"
        )
    verdict = judged.has_gain(ratios, 1.10)
    return verdict, ("on whether the step is compiled: " * (verdict == DEPENDS)) + "; ".join(rows)


@CHECKS("C36", "A larger batch is faster.", gpu=True)
@_alone
def batches(s: Setting) -> Answer:
    ratios, rows = [], []
    for how, on in _modes(s).items():
        sizes = s.batches if not on else (s.batches[0], _later_batch(s))
        found = _timed(s, {str(size): tuned(s, batch_size=size, compile=on) for size in sizes})
        each = {size: [t / (2 * size) for t in found[str(size)]] for size in sizes}
        ratios += [ablation.paired(each[a], each[b]) for a, b in zip(sizes, sizes[1:], strict=False)]
        told = ", ".join(f"{units.significant(1 / median(each[size]))} with {size}" for size in sizes)
        whole = ablation.paired(each[sizes[0]], each[sizes[-1]])
        rows.append(f"{how}, examples a second: {told}; {sizes[-1]} against {sizes[0]} {_times(whole)}")
    verdict = judged.faster(ratios)
    return verdict, ("on the batch and on what else limits: " * (verdict == DEPENDS)) + "; ".join(rows)


@CHECKS("C37", "The phases multiply to 5.0 times.", gpu=True)
@_alone
def phases(s: Setting) -> Answer:
    configs = _phases(s)
    found = _timed(s, configs)
    each = {name: [t / (c.batch_size * c.accumulation) for t in found[name]] for name, c in configs.items()}
    alone = {name: ablation.paired(each["before"], each[name]) for name in configs if name in PHASES}
    together = ablation.paired(each["before"], each["together"])
    product, claimed = 1.0, 1.0
    for name, ratio in alone.items():
        product, claimed = product * ratio.value, claimed * PHASES[name]
    listed = ", ".join(f"{name}: {_significant(r)}, not {PHASES[name]:.2f}" for name, r in alone.items())
    left_out = [name for name in PHASES if name not in alone]
    told = (
        f"examples a second on one GPU, each phase alone against the source's settings before: {listed}. They multiply "
        f"to {units.significant(product)}, the source's own to {units.significant(claimed)}; all of them together are "
        f"{_times(together)}. Phase {' and '.join(left_out)} {'is' if len(left_out) == 1 else 'are'} left out, for "
        f"{'they take' if len(left_out) > 1 else 'it takes'} {_needs(left_out)}"
    )
    verdict = judged.multiply(together, product, claimed)
    return verdict, ("on whether they are multiplied or measured together: " * (verdict == DEPENDS)) + told


@CHECKS("C38", "Activation checkpointing costs 20% more time and leaves the forward unchanged.", gpu=True)
@_alone
def checkpointing(s: Setting) -> Answer:
    same = _same_forward(s)
    ratios, rows = [], []
    for how, on in _modes(s).items():
        configs = {
            str(again): tuned(s, batch_size=_later_batch(s), compile=on, activation_checkpoint=again)
            for again in (False, True)
        }
        found = _timed(s, configs)
        ratios.append(ablation.paired(found["True"], found["False"]))
        rows.append(
            f"{how}, a step takes {typical(found['False'])} without and {typical(found['True'])} with it, "
            f"{_longer(ratios[-1])} longer"
        )
    told = f"the operator's output is {'the same to the bit' if same else 'another'} with it; {'; '.join(rows)}"
    verdict = judged.costs(ratios, 0.2, unchanged=same)
    return verdict, ("on whether the step is compiled: " * (verdict == DEPENDS)) + told


# --- several ranks --------------------------------------------------------------------------------------------------


@CHECKS("C33", 'mode="reduce-overhead" works with DistributedDataParallel.', gpu=True)
@_alone
def graphs(s: Setting) -> Answer:
    ranks = min(s.gpus, 2)
    config = dataclasses.replace(s.config, depth=min(s.config.depth, s.graphed_depth))
    found = in_ranks.launched(in_ranks.graphed, max(ranks, 1), s.gpus and ranks, config, s.rounds)[0]
    eager = found.pop("eager")
    works = {name: _replays(row, eager) for name, row in found.items()}
    told = "; ".join(f"{name}, {_graphed(row, eager)}" for name, row in found.items())
    told = (
        f"a forward and backward of {config.depth} blocks takes {typical(eager['seconds'])} eagerly"
        f"{_launches(eager)} in {units.count(max(ranks, 1), 'rank')}; {told}"
    )
    if ranks < 2:
        told = (
            f"there is no second GPU. In a group of one rank, which shows that it runs and not that ranks agree, {told}"
        )
    verdict = judged.works(works, ranks)
    return verdict, ("on which of the two is inside: " * (verdict == DEPENDS)) + told


@CHECKS("C34", "The variables of NCCL make an all-reduce over NVLink faster.", gpu=True)
@_alone
def nccl(s: Setting) -> Answer:
    if s.gpus < 2:
        return UNMEASURED, _too_few(s, 2)
    return nccl_variables(s, gpus=2)


@CHECKS("C35", "Accumulation cuts the number of all-reduces.")
@_alone
def accumulation(s: Setting) -> Answer:
    found = _two(s)[0]["reductions"]
    count, one = s.config.accumulation, found["one"]
    verdict = judged.cuts(count * one, found["with no_sync"], found["without no_sync"])
    told = (
        f"{count} steps of one micro-batch have {count * one} all-reduces, {amount(count * found['one, bytes'])} for "
        f"each of two ranks{_where(s)}. A step of {count} micro-batches has {found['without no_sync']}, "
        f"{amount(found['without no_sync, bytes'])}, as it is, and {found['with no_sync']}, "
        f"{amount(found['with no_sync, bytes'])}, with no_sync around all but the last"
    )
    return verdict, ("on no_sync: " * (verdict == DEPENDS)) + told


@CHECKS("C61", "DistributedDataParallel is 3.8 times as fast on four GPUs.", gpu=True)
@_alone
def four(s: Setting) -> Answer:
    if s.gpus < 2:
        return UNMEASURED, _too_few(s, 2)
    return data_parallel(s, ranks=4 if s.gpus >= 4 else 2)


def nccl_variables(s: Setting, *, gpus: int) -> Answer:
    """The answer to C34 by two halves of four ranks, on this many GPUs."""
    variables: Mapping[str, str] = _variables()
    elements = sum(map(sum, _source_sizes(s, whole=False)))
    found = in_ranks.launched(in_ranks.all_reduce_times, 4, gpus, elements, 2 * s.rounds, 10, variables)[0]
    times = ablation.paired(found[1], found[0])
    links = ", ".join(sorted(set(machine.links(2).values()))) or "an unknown link"
    told = (
        f"an all-reduce of {amount(4 * elements)} between two ranks, joined by {links}, takes {typical(found[1])} as "
        f"NCCL is and {typical(found[0])} with the source's variables, {_times(times)}. Two of them concern sockets, "
        "which NVLink does not use, and two are NCCL's defaults"
    )
    return judged.helps(times), told


def data_parallel(s: Setting, *, ranks: int) -> Answer:
    """The answer to C61 by this many ranks, each with a GPU of its own if there are any."""
    sizes = (s.batches[0], s.batches[-1])
    found = in_ranks.launched(in_ranks.scaling, ranks, min(s.gpus, ranks), s.config, sizes, s.rounds)[0]
    rows, speedups = [], []
    for batch, (alone, together) in found.items():
        one, all_ = median(alone), median(together)
        row = f"with {batch} examples a GPU a step takes {units.seconds(one)} alone and {units.seconds(all_)} together"
        if ranks == 4:
            speedups.append(4 * one / all_)
            rows.append(f"{row}, {units.significant(speedups[-1])} times as many examples a second")
        else:
            bounds = judged.of_four(one, all_)
            speedups += bounds
            rows.append(
                f"{row}, {units.significant(2 * one / all_)} times as many examples a second, from which "
                f"{' to '.join(units.significant(b) for b in bounds)} follow for four"
            )
    told = f"the operator of ups, {'; '.join(rows)}"
    if ranks != 4:
        told += (
            ". Four were not measured: what a step takes longer on two is its all-reduce, and on four a ring sends 1.5 "
            "times as much at most"
        )
    verdict = judged.scales(speedups, 3.8)
    return verdict, ("on the batch: " * (verdict == DEPENDS)) + told


# --- how ------------------------------------------------------------------------------------------------------------


def _inverse(tasks: Sequence[InverseTask], *, shared: bool) -> torch.Tensor:
    """Both inverse losses, [2]; the first reads the decoded grid if `shared`, and decodes its query points if not."""
    function = implementation("losses.inverse_losses", "inverse_losses", optimized=True)
    sample = implementation("losses.query_sampling", "query_sampling", optimized=True)
    return torch.stack(function(tasks, 0, 1, None if shared else sample))


def _differentiated(trainer: Any, tasks: Sequence[InverseTask], sample: Callable[..., torch.Tensor] | None) -> None:
    """Forward and backward in the trainer's precision: of the query loss, or of both losses without `sample`."""
    task = tasks[0]
    leaves = [*task.decode.parameters(), *task.encode.parameters()]  # type: ignore[attr-defined]  # they are modules
    with torch.enable_grad(), torch.autocast(trainer.device.type, torch.bfloat16):
        if sample is None:
            loss = _inverse(tasks, shared=True).sum()
        else:
            loss = sample(task.decode, task.latents, task.field, task.points, task.queries)
    torch.autograd.grad(loss, leaves, allow_unused=True)


def _flops(s: Setting, names: Sequence[str], asked: int, *, shared: bool) -> float:
    """Operations of the inverse losses of a micro-batch at the source's sizes, forward and backward, by their shapes."""
    tasks = []
    with torch.device("meta"):
        for name, cells in (("advection1d", (1024,)), ("darcy2d", (128, 128))):
            if name not in names:
                continue
            examples, points = SOURCE.batch_size // len(names), torch.Size(cells).numel()
            tasks.append(
                InverseTask(
                    encode=make_encoder(SOURCE, token_grid(name, SOURCE.tokens)),
                    decode=make_decoder(SOURCE, len(cells)),
                    latents=torch.empty(examples, SOURCE.tokens, SOURCE.latent_width),
                    field=torch.empty(examples, *cells, 1),
                    points=torch.empty(*cells, len(cells)),
                    queries=torch.empty(min(points, asked), dtype=torch.int64),
                )
            )
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.enable_grad():
            _inverse(tasks, shared=shared).sum().backward()
    return float(counter.get_total_flops())


def _operator_after(s: Setting, config: Any) -> list[torch.Tensor]:
    """The operator's weights after some steps."""
    trainer = make_trainer(s, config)
    for _ in range(s.steps):
        trainer.train_window({})
    trainer.last_report()
    return [w.detach().clone() for name, w in trainer.weights.items() if name.startswith("operator.")]


def _apart(found: Sequence[torch.Tensor], known: Sequence[torch.Tensor]) -> float:
    """The largest distance of a tensor from the known one, of that one's norm."""
    return max(float((a - b).norm() / b.norm().clamp_min(1e-30)) for a, b in zip(found, known, strict=True))


def _differ(distance: float) -> str:
    return f"differ by {distance:.2g}" if distance else "are equal to the bit"


def _state_rates(trainer: Any) -> tuple[float, float]:
    """Bytes of the optimizers' state for each element of a matrix, and for each of the other weights."""
    states = [optimizer.state_dict() for optimizer in trainer.optimizers.values()]
    weights = [w for w in trainer.weights.values()]
    matrices = sum(w.numel() for w in weights if w.dim() == 2)
    others = sum(w.numel() for w in weights if w.dim() != 2)
    muon = sum(m.nbytes for state in states for m in state["muon"]["momenta"])
    adamw = sum(m.nbytes for state in states for which in ("first", "second") for m in state["adamw"][which])
    return muon / matrices, adamw / others


@functools.cache
def _source_sizes(s: Setting, *, whole: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(elements of each matrix, of each other weight) of the source's operator, and of all its networks if `whole`."""
    with torch.device("meta"):
        networks: list[torch.nn.Module] = [make_operator(SOURCE)]
        if whole:
            for task in mixture(s).tasks:
                dims = len(task.fields.grid)
                networks += [make_decoder(SOURCE, dims), make_encoder(SOURCE, token_grid(task.task, SOURCE.tokens))]
    weights = [w for network in networks for w in network.parameters()]
    return tuple(w.numel() for w in weights if w.dim() == 2), tuple(w.numel() for w in weights if w.dim() != 2)


def _peak_of_steps(s: Setting, config: Any) -> int:
    """Bytes of a trainer and of its steps."""

    def call() -> None:
        trainer = make_trainer(s, config)
        for _ in range(3):
            trainer.train_window({})
        trainer.last_report()

    mixture(s)
    found = peak_bytes(s.device, call)
    _empty()
    return found


def _by_kind(first: Sequence[torch.Tensor], count: int) -> dict[str, float]:
    """How far the offloaded optimizer is from the one on the device after steps on the same gradients, of an update."""
    generator = torch.Generator().manual_seed(0)
    grads = [[torch.randn(w.shape, generator=generator).to(w.device) for w in first] for _ in range(count)]
    ends = []
    for module, name in (
        ("memory.cpu_offload_optimizer", "offloaded_hybrid"),
        ("optimizers.hybrid_muon_adamw", "hybrid_muon_adamw"),
    ):
        own = [w.clone() for w in first]
        step = implementation(module, name, optimized=True)(own)
        for given in grads:
            step(given)
        if own[0].is_cuda:
            torch.cuda.synchronize(own[0].device)
        ends.append(own)
    apart = {"Muon": 0.0, "AdamW": 0.0}
    for w, a, b in zip(first, *ends, strict=True):
        kind = "Muon" if w.dim() == 2 else "AdamW"
        apart[kind] = max(apart[kind], float((a - b).norm() / (b - w).norm()))
    return apart


def _predicted(trainer: Any) -> torch.Tensor:
    """What the trainer's operator gives for its first micro-batch."""
    part = trainer.maker[0].parts[0]
    with torch.no_grad():
        found: torch.Tensor = trainer.networks.operator(part.before.to(trainer.device), part.dt.to(trainer.device))
    return found


def _same_forward(s: Setting) -> bool:
    """Whether the checkpointed operator has the same output, with sublayers dropped."""
    checkpointed = implementation("memory.activation_checkpoint", "activation_checkpoint_operator", optimized=True)
    trainer = make_trainer(s, tuned(s))
    part, scales = trainer.maker[0].parts[0], trainer.maker[0].scales
    before, dt = part.before.to(s.device), part.dt.to(s.device)
    scales = scales[..., : len(before)].to(s.device)
    operator = trainer.networks.operator
    with torch.enable_grad(), torch.autocast(s.device.type, torch.bfloat16):
        return torch.equal(operator(before, dt, scales), checkpointed(operator, before, dt, scales))


def _modes(s: Setting) -> dict[str, bool]:
    """How a step runs → `compile`."""
    return {"eager": False, "compiled": True} if s.compiled else {"eager": False}


def _later_batch(s: Setting) -> int:
    """The batch of the source's later phases, 20."""
    return s.batches[-2]


def _timed(s: Setting, configs: Mapping[str, Any]) -> dict[str, list[float]]:
    """Seconds of a step by round, by configuration."""
    calls: dict[str, Callable[[], object]] = {n: steps(make_trainer(s, config)) for n, config in configs.items()}
    return interleaved(s.device, s.rounds, calls, count=TOGETHER)


def _phases(s: Setting) -> dict[str, Any]:
    """Each phase alone, and all together, on one GPU; a phase that changes the batch changes it by as much."""
    workers = s.workers != (0, 0)
    before = dataclasses.replace(s.config, num_workers=s.workers[0])
    size = before.batch_size
    changes: dict[str, dict[str, Any]] = {
        "1": {"compile": True},
        "2": {"activation_checkpoint": True, "batch_size": 2 * size, "accumulation": 2},
        "3": {"inverse_loss_frequency": RARE, "num_queries": before.num_queries // 2, **_SCHEDULED},
        "4": {"num_workers": s.workers[1], "prefetch_factor": 2},
        "5": {"cpu_offload_optimizer": True, "batch_size": 2 * round(size * 5 / 8)},
        "6": {"precision": "bf16"},
        "8": {"fused_optimizers": True},
    }
    if not workers:
        del changes["4"]
    if not s.compiled:
        del changes["1"]
    merged: dict[str, Any] = {}
    for change in changes.values():
        merged |= change
    merged["batch_size"] = _later_batch(s)
    found = {"before": before, "together": dataclasses.replace(before, **merged)}
    return found | {name: dataclasses.replace(before, **change) for name, change in changes.items()}


_SCHEDULED = {"inverse_losses": True, "query_sampling": True}
"""Compute what the schedule asks for, and nothing else."""


def _needs(left_out: Sequence[str]) -> str:
    why = {"1": "a compiler", "4": "workers", "7": "several GPUs"}
    return " and ".join(why[name] for name in left_out)


@functools.cache
def _two(s: Setting) -> list[dict[str, Any]]:
    """What two ranks count and hold: on two GPUs, or else on the CPU."""
    return in_ranks.launched(in_ranks.counted_and_held, 2, 2 if s.gpus >= 2 else 0, s.config)


def _where(s: Setting) -> str:
    return "" if s.gpus >= 2 else " on the CPU"


def _too_few(s: Setting, needed: int) -> str:
    return f"it takes {needed} GPUs, and there {'is' if s.gpus == 1 else 'are'} {s.gpus}"


def _variables() -> Mapping[str, str]:
    import importlib

    found: Mapping[str, str] = importlib.import_module("optimized.distributed.nccl_settings").VARIABLES
    return found


def _replays(row: Mapping[str, Any], eager: Mapping[str, Any]) -> bool:
    """Whether a compiled network has the right gradients, in far fewer launches where they are counted."""
    fewer = "launches" not in row or 2 * row["launches"] < eager["launches"]
    return bool(row["right"]) and fewer


def _graphed(row: Mapping[str, Any], eager: Mapping[str, Any]) -> str:
    if "error" in row:
        return f"it fails: {row['error']}"
    same = f"its gradients are {'right' if row['right'] else 'wrong'}, {row['apart']:.2g} away"
    return f"{typical(row['seconds'])}{_launches(row)}, {_times(ablation.paired(eager['seconds'], row['seconds']))}, {same}"


def _launches(row: Mapping[str, Any]) -> str:
    return f" with {row['launches']} launches" if "launches" in row else ""


def _empty() -> None:
    """Give back all that nothing uses, of trainers that are gone, too: they are cycles."""
    gc.collect()
    torch.cuda.empty_cache()


def _times(r: Ratio) -> str:
    return f"{r.value:.3g} times as fast ({r.low:.3g} to {r.high:.3g})"


def _significant(r: Ratio) -> str:
    return f"{r.value:.3g} ({r.low:.3g} to {r.high:.3g})"


def _longer(r: Ratio) -> str:
    return f"{100 * (r.value - 1):.3g}% ({100 * (r.low - 1):.3g} to {100 * (r.high - 1):.3g})"


def _less(size: float) -> str:
    return f"{amount(abs(size))} {'less' if size >= 0 else 'more'}"
