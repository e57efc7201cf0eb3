"""Check that a pair computes the same function in several processes as in one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from perfsuite.correctness import equivalence, rule, side_calls, truths
from perfsuite.correctness.execution import Leaves
from perfsuite.correctness.integrity.probe import same_leaf
from perfsuite.correctness.ranks import group, parts
from perfsuite.correctness.tally import Tally
from perfsuite.declare.pair import Pair
from perfsuite.declare.sides import as_side
from perfsuite.errors import NotEquivalent, PairError
from perfsuite.records import OPTIMIZED, REFERENCE, Case


class RanksApart(NotEquivalent):
    """A side does not return in all ranks. No other draws are tried, because each would take long."""


class OnRank(NotEquivalent):
    """An output is wrong on one rank, and is not one that the ranks hold in parts."""


class InParts(NotEquivalent):
    """An output is wrong that is joined from the ranks' parts."""


def check(
    pair: Pair, case: Case, device: str, *, module: ModuleType, home: Path | None = None, tally: Tally | None = None
) -> None:
    """Raise NotEquivalent if the optimized side in `pair.at_ranks` processes differs from the reference in one process.

    Raises PairError if the reference itself differs in several processes, and RanksApart if a side does not return in
    all of them. The calling process must have a process group of its own (`group.alone`).
    """
    known = truths.by_replicas(pair, case, device, gradients=False, home=home)
    try:
        truth = known(rule.NONE)
    except truths.Discard:
        if tally is not None:
            tally.discarded += 1
        return
    calls = _Calls(case, device, module, truth.leaves)
    for side in (REFERENCE, OPTIMIZED):
        who = f"{pair.name}: the {side}{' side' if side == OPTIMIZED else ''} in {pair.at_ranks} processes"
        try:
            of_ranks = calls.of(pair, side)
        except group.RanksFailed as error:
            raise RanksApart(f"{who} {error}", case) from None
        try:
            _check_forms(pair, calls.produced)
            hold(pair, known, of_ranks, truth, side, tally)
        except (OnRank, InParts) as error:
            parted = functools.partial(_wrong_parts, pair, known, truth, calls) if isinstance(error, InParts) else list
            cause = _cause(pair, case, device, home, calls, parted) if side == OPTIMIZED else ""
            raise _verdict(side, f"{error}{cause}", case) from None
        except NotEquivalent as error:
            raise _verdict(side, str(error), case) from None
    if (found := _disagreement(calls)) is not None:
        name, rank = found
        raise NotEquivalent(
            f"{pair.name}: {name} of the optimized side differs between rank 0 and rank {rank} of {pair.at_ranks}, "
            f"which the reference leaves equal to the bit: ranks that differ drift apart",
            case,
        )


def _verdict(side: str, words: str, case: Case) -> Exception:
    if side == REFERENCE:
        return PairError(f"{words}; in several processes it must be the function that it is in one")
    return NotEquivalent(words, case)


class _Calls:
    """Call sides in all ranks on one case, and keep their outputs."""

    def __init__(self, case: Case, device: str, module: ModuleType, truth: Leaves) -> None:
        self.case, self.device, self.module, self.truth = case, device, module, truth
        self.produced: dict[str, list[Leaves]] = {}
        """Side → its outputs on the case's own inputs, by rank."""

    def of(self, pair: Pair, side: str) -> list[Leaves]:
        """Return the side's outputs by rank. Raises RanksFailed if a rank does not return."""
        of_ranks = group.group_of(pair.at_ranks, self.device).call(pair, side, self.case, self.module)
        found = [parts.placed_as(leaves, self.truth, self.device) for leaves in of_ranks]
        if not pair.equal_parts:
            self.produced[side] = found
        return found


def _cause(
    pair: Pair, case: Case, device: str, home: Path | None, calls: _Calls, wrong_parts: Callable[[], list[int]]
) -> str:
    """Return the likely cause of a wrong output, or "".

    It depends on the order of the numbers, on whether the ranks agree, on whose part of an output is wrong, and on
    whether the side is right if all ranks get equal parts of the inputs.
    """
    if _is_reordered(calls):
        return (
            "; they are the reference's numbers in another order: likely the ranks' parts are gathered in another "
            "order than that of the ranks"
        )
    if _disagreement(calls) is not None:
        return (
            "; the ranks' results differ, which the reference leaves equal: likely a collective is missing, or waited "
            "for too late, or the ranks draw other random numbers"
        )
    if _is_wrong_alone(pair, case, device, home):
        return "; so it is in one process"
    if (wrong := wrong_parts()) and len(wrong) < pair.at_ranks:
        ranks = " and ".join(f"rank {rank}" for rank in wrong)
        return f"; only the part of {ranks} is wrong: likely it depends on the rank where the reference does not"
    alike = pair.at(pair.at_ranks, equal_parts=True)
    try:
        known = truths.by_replicas(alike, case, device, gradients=False, home=home)
        truth = known(rule.NONE)
        hold(alike, known, calls.of(alike, OPTIMIZED), truth, OPTIMIZED, None)
    except NotEquivalent:
        return (
            "; so it is where all ranks have equal parts of the inputs: likely a sum over the ranks is divided by "
            "their number twice, or not at all, or is another reduction, such as MAX instead of SUM"
        )
    except (truths.Discard, group.RanksFailed):
        return ""
    return (
        "; where all ranks have equal parts of the inputs it is right: likely it leaves out some ranks' parts, or is a "
        "mean of the ranks' own results, or another reduction, such as MAX instead of AVG"
    )


def _is_wrong_alone(pair: Pair, case: Case, device: str, home: Path | None) -> bool:
    """Return whether the optimized side is also wrong in this process alone, on the inputs of all ranks."""
    known = truths.by_replicas(pair, case, device, gradients=False, home=home)
    try:
        produced = side_calls.produce(pair, as_side(pair.optimized), case, device, gradients=False, home=home)
        equivalence.hold(pair, known, produced, name=OPTIMIZED, strict_strides=False)
    except truths.Discard:
        return False
    except Exception:
        return True
    return False


def hold(
    pair: Pair, known: truths.TruthFunction, of_ranks: list[Leaves], truth: truths.Truth, side: str, tally: Tally | None
) -> None:
    """Raise InParts if outputs joined from the ranks' parts are wrong, and OnRank if another output is wrong on a
    rank."""
    together = parts.joined(of_ranks, truth.leaves)
    if together:
        others = set(truth.leaves) - set(together)
        whole = functools.cache(lambda replicas: known(replicas).without(others))
        try:
            equivalence.hold(pair, whole, together, name=side, tally=tally, strict_strides=False)
        except NotEquivalent as error:
            raise InParts(f"{error}, in the parts of {pair.at_ranks} ranks together") from None
    alone = functools.cache(lambda replicas: known(replicas).without(together))
    wrong: list[tuple[int, int, NotEquivalent]] = []
    for rank, leaves in enumerate(of_ranks):
        own = {name: leaf for name, leaf in leaves.items() if name not in together}
        try:
            equivalence.hold(pair, alone, own, name=side, tally=tally, strict_strides=False)
        except NotEquivalent as error:
            wrong.append((error.steps or 0, rank, error))
    if wrong:  # the first rank that is wrong after the fewest steps
        _, rank, first = min(wrong, key=lambda found: found[:2])
        raise OnRank(f"{first}, on rank {rank} of {pair.at_ranks}") from None


def _wrong_parts(pair: Pair, known: truths.TruthFunction, truth: truths.Truth, calls: _Calls) -> list[int]:
    """Return the ranks whose parts of outputs are wrong beside the reference's parts of the other ranks."""
    wrong = []
    for rank, own in enumerate(calls.produced[OPTIMIZED]):
        of_ranks = [*calls.produced[REFERENCE]]
        of_ranks[rank] = own
        try:
            hold(pair, known, of_ranks, truth, OPTIMIZED, None)
        except InParts:
            wrong.append(rank)
        except NotEquivalent:
            continue  # another output is wrong, too
    return wrong


def _check_forms(pair: Pair, produced: dict[str, list[Leaves]]) -> None:
    """Raise NotEquivalent if an output has another shape on a rank than the reference's output on that rank, or another
    dtype than on rank 0 where the reference's dtypes are equal."""
    if OPTIMIZED not in produced:
        return
    for name in produced[OPTIMIZED][0]:
        of_reference, dtypes = (_dtypes(produced[side], name) for side in (REFERENCE, OPTIMIZED))
        other = next((r for r, dtype in enumerate(dtypes) if dtype != dtypes[0]), None)
        if other is not None and len(set(of_reference)) == 1:
            raise NotEquivalent(
                f"{pair.name}: {name} of the optimized side is {dtypes[other]} on rank {other} of {pair.at_ranks} and "
                f"{dtypes[0]} on rank 0"
            )
    for rank, (plain, fast) in enumerate(zip(produced[REFERENCE], produced[OPTIMIZED], strict=True)):
        for name, leaf in plain.items():
            got = fast.get(name)
            if isinstance(leaf, torch.Tensor) and isinstance(got, torch.Tensor) and got.shape != leaf.shape:
                raise NotEquivalent(
                    f"{pair.name}: {name} of the optimized side has shape {tuple(got.shape)} on rank {rank} of "
                    f"{pair.at_ranks}, where that of the reference has {tuple(leaf.shape)}"
                )


def _dtypes(of_ranks: list[Leaves], name: str) -> list[Any]:
    """Return the output's dtype on each rank, or its type if it is no tensor."""
    leaves = [leaves.get(name) for leaves in of_ranks]
    return [leaf.dtype if isinstance(leaf, torch.Tensor) else type(leaf) for leaf in leaves]


def _is_reordered(calls: _Calls) -> bool:
    """Return whether an output of the optimized side on some rank consists of the reference's numbers there, in another
    order, or an output joined from the ranks' parts of those of the reference."""

    def are(got: Any, plain: Any) -> bool:
        if not isinstance(got, torch.Tensor) or not isinstance(plain, torch.Tensor) or same_leaf(got, plain):
            return False
        return same_leaf(*(leaf.flatten().sort().values for leaf in (got, plain)))

    optimized, reference = calls.produced[OPTIMIZED], calls.produced[REFERENCE]
    joined = [parts.joined(of_side, calls.truth) for of_side in (optimized, reference)]
    of_ranks = zip([*optimized, joined[0]], [*reference, joined[1]], strict=True)
    return any(are(leaf, plain.get(name)) for fast, plain in of_ranks for name, leaf in fast.items())


def _disagreement(calls: _Calls) -> tuple[str, int] | None:
    """Return (name of an output, rank) where the optimized side's output differs from that on rank 0, although the
    reference's outputs are equal on all ranks; None if there is none. Outputs that ranks hold in parts are left out."""
    reference, optimized = calls.produced[REFERENCE], calls.produced[OPTIMIZED]
    in_parts = parts.joined(optimized, calls.truth)
    for name, leaf in reference[0].items():
        if name in in_parts:
            continue
        if name in optimized[0] and all(same_leaf(leaves[name], leaf) for leaves in reference):
            for rank, leaves in enumerate(optimized):
                if name in leaves and not same_leaf(leaves[name], optimized[0][name]):
                    return name, rank
    return None
