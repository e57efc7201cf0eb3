"""Accumulate the results of a proof's draws, and check whether they are enough."""

from __future__ import annotations

from dataclasses import dataclass, field

from perfsuite.correctness.bias import Biases
from perfsuite.declare.pair import Pair
from perfsuite.declare.specs import GeneratorSpec
from perfsuite.errors import NotEquivalent, first_line
from perfsuite.records import Evidence

EXCUSED_SHARE = 0.01
MIN_PROOFS = 5
MIN_PROOF_SHARE = 0.25


@dataclass(slots=True)
class Tally:
    """Results of a series of draws so far."""

    draws: int = 0
    discarded: int = 0
    ill_conditioned: int = 0
    empty: int = 0
    """Draws whose outputs have no elements. They are compared with the truth, but do not count as proof if there are
    others."""
    elements: int = 0
    excused: int = 0
    worst: float = 0.0
    biases: Biases = field(default_factory=Biases)
    answers_differ: bool | None = None
    """Whether, on some draw, the reference had another answer for other inputs; None before the first check."""
    has_answer: bool = False
    """Whether the reference returned something, or the pair declares an input that it changes."""
    roundings: bool = False
    """Whether it could be checked that the reference does not round, on a draw with enough different values."""
    fault: str = ""
    """Fault of the reference. It applies to every further draw."""
    compiles: bool = False
    """Whether a draw made a side compile."""
    first: str = ""
    """The line that describes the first draw."""
    raised: NotEquivalent | None = None
    """First error that the reference raised."""
    numbers: dict[str, int] = field(default_factory=dict)
    """Line that describes a draw → its number, from 0. Draws that were planned with a large size are left out."""
    large: list[str] = field(default_factory=list)
    """Lines of the draws that were planned with a large size, which are numbered separately."""

    def number(self, line: str) -> int:
        """Return the number of this draw, which is the same each time that it is proven."""
        return self.large.index(line) if line in self.large else self.numbers.setdefault(line, len(self.numbers))

    def take(self, other: Tally) -> None:
        """Add the figures of another tally of one draw."""
        self.elements += other.elements
        self.excused += other.excused
        self.worst = max(self.worst, other.worst)
        self.biases.add(other.biases)

    def discard(self, raised: NotEquivalent) -> None:
        """Record that the reference raised on the present draw."""
        self.discarded += 1
        self.raised = self.raised or raised

    @property
    def proves_too_little(self) -> bool:
        """True if `check` or `evidence` would raise for the draws so far, because too few count as proof or the task is
        degenerate."""
        return self._raises_too_often or self._judged_too_few or self._is_degenerate

    @property
    def _raises_too_often(self) -> bool:
        return self.raised is not None and self.discarded > (1 - MIN_PROOF_SHARE) * self.draws

    @property
    def _judged_too_few(self) -> bool:
        draws = self.draws - self.empty
        proofs = draws - self.discarded - self.ill_conditioned
        few = proofs <= 0 or (draws >= MIN_PROOFS and proofs < MIN_PROOF_SHARE * draws)
        return bool(draws or not self.empty) and few

    @property
    def _is_degenerate(self) -> bool:
        return self.draws >= MIN_PROOFS and self.answers_differ is False

    def check(self, pair: Pair) -> None:
        """Raise NotEquivalent if the reference raised on so many draws that too little is proven."""
        if self.raised is not None and self._raises_too_often:
            raise self.raised

    def evidence(self, pair: Pair, dtype: str, device: str) -> Evidence:
        """Return the tally as a record. Raises NotEquivalent if the draws prove too little, errors are biased, or too
        many elements were excused."""
        if self._judged_too_few:
            raised = f" or raises ({first_line(self.raised)})" if self.raised is not None else ""
            random = any(isinstance(spec, GeneratorSpec) for spec in pair.inputs.values())
            remedy = ", or let it draw the same random numbers in every dtype, as torch.rand(…, dtype=torch.float32)"
            raise NotEquivalent(
                f"{pair.name}: {self.discarded} of {self.draws} draws were discarded, because the reference alone "
                f"overflows{raised}, and {self.ill_conditioned} are ill-conditioned in {dtype}, or the reference "
                f"computes in less than {dtype} (in TF32, or rounded to half precision inside): too little is proven; "
                f"bound the inputs with values=floats(low, high), let the reference compute in {dtype}, or declare "
                f'precision="tf32" where products may be{remedy if random else ""}'
            )
        if self._is_degenerate and not self.has_answer:
            raise NotEquivalent(
                f"{pair.name}: the reference returns nothing, and the pair declares no input that it changes, so there "
                f"is nothing to compare; return the answer, or name what changes in place: mutates={{…}}"
            )
        if self._is_degenerate:
            raise NotEquivalent(
                f"{pair.name}: the reference gives the same answer whatever its inputs are, on all of {self.draws} "
                f"draws: the task is degenerate, and equal answers prove nothing; draw inputs that matter"
            )
        for message in self.biases.found():
            raise NotEquivalent(f"{pair.name}: {message}")
        if self.excused > EXCUSED_SHARE * self.elements:
            raise NotEquivalent(
                f"{pair.name}: {self.excused} of {self.elements} elements were excused as near a threshold, more "
                f"than {EXCUSED_SHARE:.0%}; narrow `excuse` to what is within rounding"
            )
        return Evidence(
            pair=pair.name,
            dtype=dtype,
            device=device,
            draws=self.draws,
            discarded=self.discarded + self.ill_conditioned,
            elements=self.elements,
            excused=self.excused,
            worst=self.worst,
        )
