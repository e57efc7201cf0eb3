"""Check outputs in a rank. The process that started the ranks compares them with the truth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from perfsuite.correctness.execution import Leaves
from perfsuite.correctness.ranks import parts
from perfsuite.correctness.ranks.process import on_cpu
from perfsuite.correctness.tally import Tally
from perfsuite.declare.sides import Side
from perfsuite.errors import NotEquivalent
from perfsuite.records import Case
from perfsuite.session.rank_timing.peers import RankPeers
from perfsuite.timing.output_checks import DrawnInputs, OutputCheck, digest


@dataclass(frozen=True, slots=True)
class Judge:
    """Message with outputs of one rank, which are compared with the truth of a case together with those of the other
    ranks."""

    name: str
    case: Case
    leaves: Leaves


@dataclass(frozen=True, slots=True)
class Judged:
    """The verdict on outputs: the fault, or an empty text; and the seconds that establishing the truth took."""

    text: str
    truth_s: float


Ask = Callable[[Judge], Judged]


class RankCheck(OutputCheck):
    """Output check that asks the parent process for a verdict, unless the outputs of every rank were proven before.

    All ranks ask at the same points: outputs are either known in every rank, or compared for all ranks.
    """

    def __init__(self, *arguments: Any, ask: Ask, peers: RankPeers, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.ask, self.peers = ask, peers
        self.waiting: list[tuple[str, Leaves, str]] = []
        """(digest, copies of outputs that are not compared yet, name of their side)."""

    def _hold(self, leaves: Leaves, name: str, tally: Tally | None = None) -> None:
        self._judge(leaves, name, self.case)

    def _judge(self, leaves: Leaves, name: str, case: Case) -> None:
        judged = self.ask(Judge(name=name, case=case, leaves=on_cpu(leaves)))
        self.seconds += judged.truth_s
        if judged.text:
            raise NotEquivalent(judged.text)

    def _is_known(self, key: str) -> bool:
        return self.peers.all(key in self.known)

    def hold_new(self, leaves: Leaves, drawn: DrawnInputs) -> None:
        self._judge(leaves, "timed optimized", drawn.case)

    def check(self, leaves: Leaves, name: str) -> None:
        key = digest(leaves)
        if not self._is_known(key):
            self._hold(leaves, name)
            self.known.add(key)

    def check_later(self, leaves: Leaves, name: str) -> None:
        key = digest(leaves)
        if self.peers.all(key in self.known or any(key == other for other, _, _ in self.waiting)):
            return
        copies = {n: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for n, leaf in leaves.items()}
        self.waiting.append((key, on_cpu(copies), name))

    def check_copied(self) -> None:
        while self.waiting:
            key, copies, name = self.waiting.pop(0)
            if not self._is_known(key):
                self._hold(copies, name)
                self.known.add(key)

    def first_step(self, leaves: Leaves, name: str, side: Side) -> None:
        if not self._is_known(digest(leaves)):
            self.prove(side, name)

    def produce(self, side: Side) -> Leaves:
        peers = self.peers
        call = parts.prepared(
            self.pair, side, self.case, self.device, rank=peers.rank, ranks=peers.ranks, home=self.home
        )
        return call()

    def same(self, sides: Any, report: Any) -> bool:
        return False

    def explained(self, error: NotEquivalent, side: Side, name: str) -> NotEquivalent:
        return error
