"""Prove a workload's sides equal on the inputs that are timed, and recognise proven outputs later.

The float64 truth is expensive, so it is computed at most once per draw, and only if an output is not bitwise equal to
a proven one. A later process that draws the same inputs and gets the same bits does not compute it at all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from perfsuite import faults
from perfsuite.correctness import equivalence, rule, side_calls, truths
from perfsuite.correctness.execution import Leaves
from perfsuite.correctness.integrity.late_work import comes_late, late_message
from perfsuite.correctness.tally import Tally
from perfsuite.declare.pair import Pair
from perfsuite.declare.sides import Side
from perfsuite.draws import inputs as make
from perfsuite.errors import NotEquivalent, PairError, in_one_line
from perfsuite.records import Case

NO_MEMORY = "runs out of memory"
"""Reason why a rival is not timed."""
COPIED_BYTES, COPIED_TO_HOST_BYTES = 1 << 30, 8 << 30
"""Most bytes of copies of outputs on their device, and on the host. The timed sides may need all of the device's
remaining memory."""
AFTER_FIRST = " after 1 step"
HASHED_AT_ONCE = 1 << 25
"""64-bit words of a GPU tensor that are hashed at a time. The intermediate results need several times their bytes."""


@dataclass(frozen=True, slots=True)
class DrawnInputs:
    """New values of a workload's inputs, and the case from which they were made."""

    case: Case
    values: dict[str, Any]


class OutputCheck:
    """Comparison of the outputs of a workload's sides with the truth of one draw."""

    def __init__(
        self,
        pair: Pair,
        case: Case,
        master: Mapping[str, Any],
        device: str,
        *,
        gradients: bool,
        home: Path | None,
    ) -> None:
        self.pair, self.case, self.master, self.device = pair, case, master, device
        self.gradients, self.home = gradients, home
        self.known = set[str]()
        """Digests of outputs that were proven for this draw."""
        self._truths: dict[int, truths.Truth] = {}
        """Truths by the number of replicas."""
        self.seconds = 0.0
        """Seconds of computing the truth."""
        self.copied: dict[str, tuple[Leaves, dict[str, torch.device], str]] = {}
        """Digest → (copies of outputs that are still to be compared, their devices, name of their side)."""

    @property
    def truth(self) -> truths.Truth:
        """The float64 truth of the draw. Raises PairError if the reference overflows."""
        return self._known(rule.NONE)

    def _known(self, replicas: int) -> truths.Truth:
        if replicas not in self._truths:
            self._truths[replicas] = self._established(replicas)
        return self._truths[replicas]

    def _established(self, replicas: int) -> truths.Truth:
        if self.pair.is_stateful:
            replicas = min(replicas, rule.FEW)
        began = perf_counter()
        try:
            found = truths.establish(
                self.pair, self.case, self.device, gradients=self.gradients, home=self.home, replicas=replicas
            )
            self.seconds += perf_counter() - began
            return found
        except truths.Discard:
            raise PairError(truths.overflows(self.pair)) from None
        except Exception as error:
            if faults.lacks_memory(error):
                error.add_note(faults.OF_THE_TRUTH)
            raise

    def first(self, leaves: Leaves, name: str, side: Side) -> None:
        """Raise NotEquivalent if the outputs of the side's first call are wrong."""
        if self.pair.is_stateful:
            self.first_step(leaves, name, side)
        else:
            self.check(leaves, name)

    def hold_new(self, leaves: Leaves, drawn: DrawnInputs) -> None:
        """Raise NotEquivalent if these outputs on new values are wrong. If the truth overflows, they count as right."""
        known = truths.by_replicas(
            self.pair, self.case, self.device, most=rule.FEW, gradients=self.gradients, drawn=lambda: drawn.values
        )
        try:
            known(rule.NONE)
        except truths.Discard:
            return
        equivalence.hold(self.pair, known, leaves, name="timed optimized", strict_strides=False)

    def check(self, leaves: Leaves, name: str) -> None:
        """Raise NotEquivalent if these outputs of a stateless pair are wrong."""
        key = digest(leaves)
        if key not in self.known:
            self._hold(leaves, name)
            self.known.add(key)

    def _hold(self, leaves: Leaves, name: str, tally: Tally | None = None) -> None:
        equivalence.hold(self.pair, self._known, leaves, name=name, tally=tally, strict_strides=False)

    def check_later(self, leaves: Leaves, name: str) -> None:
        """Check only whether the outputs are known, which is fast. If not, copy them, so that `check_copied` compares
        them later; compare them now if the copies would need too much memory."""
        key = digest(leaves)
        if key in self.known or key in self.copied:
            return
        held = make.bytes_in([leaves, *(copies for copies, _, _ in self.copied.values())])
        if held > (COPIED_BYTES if self.device == "cpu" else COPIED_TO_HOST_BYTES):
            self.check(leaves, name)
            return
        devices = {n: leaf.device for n, leaf in leaves.items() if isinstance(leaf, torch.Tensor)}
        to = devices if held <= COPIED_BYTES else dict.fromkeys(devices, torch.device("cpu"))
        self.copied[key] = _moved(leaves, to, copy=True), devices, name

    def check_copied(self) -> None:
        """Raise NotEquivalent if outputs that `check_later` has copied are wrong."""
        while self.copied:
            key, (copies, devices, name) = self.copied.popitem()
            if key in self.known:
                continue
            produced = _moved(copies, devices)
            self._hold(produced, name)
            self.known.add(key)

    def trust(self, leaves: Leaves) -> None:
        """Accept these outputs as proven."""
        self.known.add(digest(leaves))

    def first_step(self, leaves: Leaves, name: str, side: Side) -> None:
        """Check the outputs and state of a stateful side after its first step. If they are not known, prove the side
        again."""
        if digest(leaves) not in self.known:
            self.prove(side, name)

    def prove(self, side: Side, name: str, tally: Tally | None = None) -> None:
        """Run the side on the draw and compare its outputs with the truth. Raises NotEquivalent if they are wrong."""
        produced = self.produce(side)
        self._hold(produced, name, tally)
        self.known.add(self._key(produced))

    def produce(self, side: Side) -> Leaves:
        """Return the side's outputs on the draw, from a separate call."""
        return side_calls.produce(self.pair, side, self.case, self.device, gradients=self.gradients, home=self.home)

    def same(self, sides: Mapping[str, Side], report: Callable[[str], None]) -> bool:
        """Return whether two sides return bitwise equal outputs. The first side is trusted, so equal outputs become
        known."""
        keys = []
        for name, side in sides.items():
            report(name)
            produced = self.produce(side)
            keys.append((digest(produced), self._key(produced)))
        if keys[0] != keys[1]:
            return False
        self.known.add(keys[0][1])
        return True

    def _key(self, produced: Leaves) -> str:
        """Return the digest by which the outputs of a timed side are recognised. For a stateful pair, it is the digest
        of the outputs and state after the first step."""
        if not self.pair.is_stateful:
            return digest(produced)
        return digest({n.removesuffix(AFTER_FIRST): leaf for n, leaf in produced.items() if n.endswith(AFTER_FIRST)})

    def explained(self, error: NotEquivalent, side: Side, name: str) -> NotEquivalent:
        """Return the same error, or one that says that the side continues to work after it has returned."""
        late = comes_late(self.pair, side, self.case, self.device, self.truth, gradients=self.gradients, home=self.home)
        if not late:
            return error
        return NotEquivalent(f"{self.pair.name}: the {name} side {late_message('its output')}: {error}")


def prove_sides(
    check: OutputCheck, sides: Mapping[str, Side], rivals: Mapping[str, Side], report: Callable[[str], None]
) -> tuple[Tally, dict[str, str]]:
    """Prove `sides`, then `rivals`. Return (tally of the first of `sides`, rivals that cannot be timed → reason).

    Raises NotEquivalent if one of `sides` is wrong. A rival that is wrong or raises is only left out.
    """
    tally, skipped = Tally(draws=1), dict[str, str]()
    for number, (name, side) in enumerate(sides.items()):
        report(name)
        try:
            check.prove(side, name, tally if number == 0 else None)
        except NotEquivalent as error:
            raise check.explained(error, side, name) from None
    for name, side in rivals.items():
        report(name)
        try:
            check.prove(side, name)
        except NotEquivalent as error:
            skipped[name] = unequal(error)
        except torch.OutOfMemoryError:
            skipped[name] = NO_MEMORY
        except Exception as error:
            skipped[name] = f"raises {in_one_line(error)}"
    return tally, skipped


def unequal(error: NotEquivalent) -> str:
    """Return the reason why a rival with wrong outputs is not timed."""
    return f"not equal, so not timed: {error}"


def _moved(leaves: Leaves, devices: Mapping[str, torch.device], *, copy: bool = False) -> Leaves:
    return {n: leaf.to(devices[n], copy=copy) if isinstance(leaf, torch.Tensor) else leaf for n, leaf in leaves.items()}


def digest(leaves: Leaves) -> str:
    """Return a digest of the bits of everything that a side produced. It is the same in every process."""
    hashed = hashlib.sha256()
    for name, leaf in leaves.items():
        if isinstance(leaf, torch.Tensor):
            hashed.update(f"{name} {leaf.dtype} {tuple(leaf.shape)} ".encode())
            hashed.update(_bits(leaf))
        else:
            hashed.update(f"{name} {leaf!r} ".encode())
    return hashed.hexdigest()


def _bits(tensor: torch.Tensor) -> bytes:
    data = tensor.detach().contiguous()
    if data.is_complex():
        data = torch.view_as_real(data.resolve_conj()).contiguous()
    flat = data.flatten().view(torch.uint8)
    if not flat.is_cuda:
        return hashlib.sha256(flat.numpy().data).digest()
    words = torch.nn.functional.pad(flat, (0, -flat.numel() % 8)).view(torch.int64)
    sums = [_weighted(chunk, number) for number, chunk in enumerate(words.split(HASHED_AT_ONCE))]
    return repr([s.tolist() for s in sums]).encode()


def _weighted(words: torch.Tensor, chunk: int) -> torch.Tensor:
    """Return two sums of the words modulo 2⁶⁴, with weights that depend on the position of the word."""
    place = torch.arange(words.numel(), device=words.device).add_(chunk * HASHED_AT_ONCE)
    sums = []
    for odd in (0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9):
        weights = place.mul(odd).add_(odd)
        weights ^= weights >> 31
        weights.mul_(0x14D049BB133111EB).bitwise_or_(1)
        sums.append(weights.mul_(words).sum())
    return torch.stack(sums)
