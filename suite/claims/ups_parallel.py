"""Claims of ups about several processes: launch the processes, and answer the claims from their figures.

`suite.claims.ups` lists the claims. Here: C33, CUDA graphs (mode="reduce-overhead") with DistributedDataParallel; C34,
NCCL's variables; C35, all-reduces with gradient accumulation; C61, the speedup of four GPUs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from statistics import median
from typing import Any, cast

from perfsuite.report import units
from perfsuite.system import machine
from suite import ablation
from suite.claims import ups_ranks as in_ranks
from suite.claims import ups_verdicts as judged
from suite.claims.measuring import typical
from suite.claims.record import DEPENDS, UNMEASURED, Answer
from suite.claims.ups_measured import source_sizes
from suite.claims.ups_setting import Setting
from suite.claims.words import amount, times
from suite.techniques import implementation


def graphs(s: Setting) -> Answer:
    """Answer C33 with two ranks, or with one if there is only one GPU."""
    ranks = min(s.gpus, 2)
    config = dataclasses.replace(s.config, depth=min(s.config.depth, s.graphed_depth))
    found = in_ranks.launched(in_ranks.graphed, max(ranks, 1), s.gpus and ranks, config, s.rounds)[0]
    eager = found.pop("eager")
    works = {name: replays(row, eager) for name, row in found.items()}
    detail = "; ".join(f"{name}, {_graphed(row, eager)}" for name, row in found.items())
    detail = (
        f"a forward and backward of {config.depth} blocks takes {typical(eager['seconds'])} eagerly"
        f"{_launches(eager)} in {units.count(max(ranks, 1), 'rank')}; {detail}"
    )
    if ranks < 2:
        alone = "there is no second GPU. In a group of one rank, which shows that it runs and not that ranks agree"
        detail = f"{alone}, {detail}"
    condition = "on whether the compiled network is inside DistributedDataParallel or around it"
    return _answer(judged.works(works, ranks), condition, detail)


def nccl(s: Setting) -> Answer:
    """Answer C34 on two GPUs."""
    if s.gpus < 2:
        return UNMEASURED, _too_few(s, 2)
    return nccl_variables(s, gpus=2)


def accumulation(s: Setting) -> Answer:
    """Answer C35 with two ranks."""
    found = two_ranks(s)["reductions"]
    count, one = s.config.accumulation, found["one"]
    verdict = judged.cuts(count * one, found["with no_sync"], found["without no_sync"])
    detail = (
        f"{count} steps of one micro-batch have {count * one} all-reduces, {amount(count * found['one, bytes'])} for "
        f"each of two ranks{where(s)}. A step of {count} micro-batches has {found['without no_sync']}, "
        f"{amount(found['without no_sync, bytes'])}, as it is, and {found['with no_sync']}, "
        f"{amount(found['with no_sync, bytes'])}, with no_sync around all but the last"
    )
    return _answer(verdict, "on no_sync", detail)


def four(s: Setting) -> Answer:
    """Answer C61 on four GPUs, or from the figures of two."""
    if s.gpus < 2:
        return UNMEASURED, _too_few(s, 2)
    return data_parallel(s, ranks=4 if s.gpus >= 4 else 2)


def nccl_variables(s: Setting, *, gpus: int) -> Answer:
    """Answer C34 with four ranks, of which two set NCCL's variables and two do not; with `gpus` 0 on the CPU."""
    variables = cast("Mapping[str, str]", implementation("distributed.nccl_settings", "VARIABLES", optimized=True))
    elements = sum(source_sizes(s, whole=False))
    found = in_ranks.launched(in_ranks.all_reduce_times, 4, gpus, elements, 2 * s.rounds, 10, variables)[0]
    gain = ablation.paired(found[1], found[0])
    links = sorted(set(machine.links(2).values()))
    joined = ", ".join(links) or "an unknown link"
    detail = (
        f"an all-reduce of {amount(4 * elements)} between two ranks, joined by {joined}, takes {typical(found[1])} as "
        f"NCCL is and {typical(found[0])} with the source's variables, {times(gain)}. Two of them concern sockets, "
        "which NVLink does not use, and two are NCCL's defaults"
    )
    return (UNMEASURED if links and "NVLink" not in links else judged.helps(gain)), detail


def data_parallel(s: Setting, *, ranks: int) -> Answer:
    """Answer C61 with `ranks` ranks, each with a GPU of its own if there are any."""
    sizes = (s.batches[0], s.batches[-1])
    found = in_ranks.launched(in_ranks.scaling, ranks, min(s.gpus, ranks), s.config, sizes, s.rounds)[0]
    rows, speedups = [], []
    for batch, seconds in found.items():
        one, all_, reduced = (median(seconds[name]) for name in ("alone", "together", "all-reduce"))
        row = f"with {batch} examples a GPU a step takes {units.seconds(one)} alone and {units.seconds(all_)} together"
        if ranks == 4:
            speedups.append(4 * one / all_)
            rows.append(f"{row}, {units.significant(speedups[-1])} times as many examples a second")
        else:
            bounds = judged.of_four(one, all_, reduced)
            speedups += bounds
            rows.append(
                f"{row}, {units.significant(2 * one / all_)} times as many examples a second, and an all-reduce "
                f"by itself {units.seconds(reduced)}. For four that means {units.significant(bounds[0])} to "
                f"{units.significant(bounds[1])} times"
            )
    detail = f"the operator of ups: {'; '.join(rows)}"
    if ranks != 4:
        detail += (
            ". Four GPUs were not measured: there a ring takes 1.5 times as long, and the backward hides all of the "
            "difference, or none"
        )
    return _answer(judged.scales(speedups, 3.8), "on the batch, and on what the backward hides", detail)


# --- helpers --------------------------------------------------------------------------------------------------------


@functools.cache
def two_ranks(s: Setting) -> dict[str, Any]:
    """Count the all-reduces of each of two ranks and measure its memory, on two GPUs or else on the CPU."""
    found: dict[str, Any] = in_ranks.launched(in_ranks.counted_and_held, 2, 2 if s.gpus >= 2 else 0, s.config)[0]
    return found


def replays(row: Mapping[str, Any], eager: Mapping[str, Any]) -> bool:
    """Return whether a compiled network has the right gradients and, if counted, less than half the launches."""
    fewer = "launches" not in row or 2 * row["launches"] < eager["launches"]
    return bool(row["right"]) and fewer


def where(s: Setting) -> str:
    """Return a phrase that says where the ranks of `two_ranks` run."""
    return "" if s.gpus >= 2 else " on the CPU"


def _answer(verdict: str, condition: str, detail: str) -> Answer:
    """Return the answer. If the verdict is DEPENDS, its text begins with the condition ("on …")."""
    return verdict, f"{condition}: {detail}" if verdict == DEPENDS else detail


def _too_few(s: Setting, needed: int) -> str:
    return f"it takes {needed} GPUs, and there {'is' if s.gpus == 1 else 'are'} {s.gpus}"


def _graphed(row: Mapping[str, Any], eager: Mapping[str, Any]) -> str:
    if "error" in row:
        return f"it fails: {row['error']}"
    same = f"its gradients are {'right' if row['right'] else 'wrong'}, {row['apart']:.2g} away"
    return (
        f"{typical(row['seconds'])}{_launches(row)}, {times(ablation.paired(eager['seconds'], row['seconds']))}, {same}"
    )


def _launches(row: Mapping[str, Any]) -> str:
    return f" with {row['launches']} launches" if "launches" in row else ""
