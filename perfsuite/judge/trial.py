"""Call a candidate in a child process and compare its outputs with the truth, which only the parent knows."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from perfsuite import faults
from perfsuite.correctness import equivalence, truths
from perfsuite.correctness.execution import Leaves, only_tensors
from perfsuite.correctness.integrity.probe import same_leaf
from perfsuite.correctness.tally import Tally
from perfsuite.correctness.truths import Discard, Truth
from perfsuite.declare.workload import TF32
from perfsuite.draws import inputs as make
from perfsuite.draws.memory_layouts import fill_poison
from perfsuite.errors import NotEquivalent, PerfsuiteError, in_one_line
from perfsuite.judge.causes import Causes
from perfsuite.judge.problem import MODEL, Problem
from perfsuite.judge.process import Ended, Nursery, Process, shortened
from perfsuite.records import Case

DRAWS = 8
"""Number of draws with the shapes of get_inputs(). The candidate is called twice on each."""
CHANGED = 4
"""Number of elements of each input that are replaced at a time."""
CHANGES = 3
"""Number of times that elements are replaced. One time is not enough: if a replaced element is in the key of a
candidate's cache, the candidate does not return the cached answer."""
GRID = 128
"""Number of multiples, up to the largest element, to which floats are rounded."""
CPU_LIMIT_S = 3600
"""CPU time that a process may use, in seconds."""
MOST_EXCUSED = 0.5
"""Largest share of elements that may be excused; zeros may tie in a whole draw."""
PIECE = 64
"""Number of elements of each output that are read as soon as a call is reported as done."""
UNWRITTEN = {
    torch.float16: (torch.int16, 0x7E3A),
    torch.bfloat16: (torch.int16, 0x7FEA),
    torch.float32: (torch.int32, 0x7FC1DEAD),
    torch.float64: (torch.int64, 0x7FF8DEAD00000000),
}
"""Dtype → the bits that an output holds before it is written: a NaN that no operation returns."""
WRITTEN_LATER = "it writes its output after it has said that the call is done"


@dataclass(slots=True)
class Served:
    """A module in a process of its own."""

    problem: Problem
    process: Process
    limit_s: float
    compiled: bool = False
    same_parameters: bool = True
    kept: list[str] = field(default_factory=list)
    """Names of the tensors that `__init__` has made and that are not in the module's state dict."""
    _last: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """The outputs of the last call: (in shared memory, as they were when the call was done)."""

    @classmethod
    def start(
        cls, nursery: Nursery, problem: Problem, source: Path, name: str, limit_s: float, *, compiled: bool = False
    ) -> Served:
        """Start a process and build the class `name` of the file `source` in it. Raises Ended if that fails."""
        hidden = [] if name == MODEL else [str(problem.file)]
        process = Process(
            nursery, source, name, problem.device, cpu_s=CPU_LIMIT_S, hidden=hidden, shown=problem.imported
        )
        made = cls(problem=problem, process=process, limit_s=limit_s, compiled=compiled)
        try:
            made._build()
        except BaseException:
            process.close()
            raise
        return made

    def _build(self) -> None:
        memory = self.process.memory
        self.process.clear()
        request = {
            "do": "build",
            "path": str(self.process.path),
            "module": "candidate",
            "name": self.process.name,
            "seed": self.problem.seed,
            "init": memory.pickled(list(self.problem.init)),
            "state": {name: memory.value(t, lambda t: memory.place(t)[0]) for name, t in self.problem.state.items()},
            "compile": self.compiled,
            "tf32": self.problem.pair.precision == TF32,
        }
        found = self.process.ask(request, self.limit_s)
        self.same_parameters, self.kept = bool(found.get("same_parameters")), found.get("kept", [])

    def call(
        self, every: Sequence[Sequence[Any]], forms: Sequence[torch.Tensor], *, again: bool = False
    ) -> tuple[float, list[list[torch.Tensor]]]:
        """Call the module on each list of arguments. Return (seconds of all calls, copies of the outputs of each).

        `forms` has a tensor of the shape and dtype of each output. With `again`, all calls use the first list, which is
        sent only once. Raises NotEquivalent if outputs have another form or are written late, or if inputs were
        changed. Raises Ended if the process raises an exception, hangs or ends.
        """
        memory, given = self.process.memory, list[tuple[torch.Tensor, torch.Tensor]]()
        self.process.clear()

        def later(values: torch.Tensor) -> dict[str, Any]:
            at, there = self._place(values)
            given.append((there, values))
            return at

        def fill() -> None:
            for there, values in given:
                make.copy_values(there, values)
            self._poison(outputs)

        def read() -> None:
            seen.extend(piece.cpu() for piece in pieces)

        arguments = [[memory.value(v, later) for v in one] for one in (every[:1] if again else every)]
        outputs, places = self._outputs(len(every), forms)
        request = {
            "do": "call",
            "inputs": arguments,
            "again": again,
            "outputs": places,
            "forms": [[list(t.shape), str(t.dtype).removeprefix("torch.")] for t in forms],
            "paths": self.problem.paths,
        }
        pieces, seen = [_piece(t) for one in outputs for t in one], list[torch.Tensor]()
        seconds, found = self.process.timed(request, self.limit_s, fill, read)
        made = [[t.clone() for t in one] for one in outputs]
        if "forms" in found:
            raise NotEquivalent(shortened(_other_forms(forms, found["forms"])))
        if "paths" in found:
            got, expected = (", ".join(p or "a tensor" for p in each) for each in (found["paths"], self.problem.paths))
            raise NotEquivalent(shortened(f"it returns its outputs as {got} where the reference returns {expected}"))
        if not all(same_leaf(piece.cpu(), early) for piece, early in zip(pieces, seen, strict=True)):
            raise NotEquivalent(WRITTEN_LATER)
        if not all(same_leaf(there, values) for there, values in given):
            raise NotEquivalent("it writes into its inputs")
        self._last = [pair for one, copies in zip(outputs, made, strict=True) for pair in zip(one, copies, strict=True)]
        return seconds, made

    def copies(self, forms: Sequence[torch.Tensor]) -> float:
        """Return the seconds of a request that only copies outputs. A call's time includes as much for that."""
        self.process.clear()
        _, places = self._outputs(1, forms)
        return self.process.timed({"do": "copy", "outputs": places}, self.limit_s)[0]

    def settled(self) -> None:
        """Raise NotEquivalent if outputs changed after the call was reported as done."""
        if not all(same_leaf(there, copied) for there, copied in self._last):
            raise NotEquivalent(WRITTEN_LATER)

    def operations(self, arguments: Sequence[Any]) -> list[tuple[str, str]]:
        """Return the PyTorch operations of a call that compute something, with the shapes of their tensors."""
        memory = self.process.memory
        self.process.clear()
        request = {"do": "trace", "inputs": [memory.value(v, lambda t: memory.place(t)[0]) for v in arguments]}
        found = self.process.ask(request, self.limit_s).get("operations", [])
        return self.problem.work(found)

    def _place(self, like: torch.Tensor) -> tuple[dict[str, Any], torch.Tensor]:
        """Reserve shared memory for a tensor like this one, without its values. Return (place, tensor)."""
        arena = self.process.memory if like.device.type == "cpu" else self.process.device_memory
        return arena.place(like, filled=False)

    def _outputs(self, number: int, forms: Sequence[torch.Tensor]) -> tuple[list[list[torch.Tensor]], list[list[Any]]]:
        """Return (tensors in shared memory, their places) for the outputs of this many calls."""
        made: list[list[torch.Tensor]] = []
        places: list[list[Any]] = []
        for _ in range(number):
            both = [self._place(torch.empty(t.shape, dtype=t.dtype, device=self.problem.device)) for t in forms]
            places.append([at for at, _ in both])
            made.append([tensor for _, tensor in both])
        return made, places

    def _poison(self, outputs: Sequence[Sequence[torch.Tensor]]) -> None:
        """Fill the outputs with values that no operation returns, before the process resumes. Bools are random, since
        both of their values are valid."""
        for one in outputs:
            for tensor in one:
                fill_poison(tensor)
                if tensor.dtype is torch.bool:
                    tensor.copy_(torch.rand(tensor.shape, device=tensor.device) < 0.5)
                elif tensor.dtype in UNWRITTEN:
                    bits, marked = UNWRITTEN[tensor.dtype]
                    tensor.view(bits).fill_(marked)
        if self.problem.device != "cpu":
            torch.cuda.synchronize()

    def close(self) -> None:
        """End its process."""
        self.process.close()


def _piece(output: torch.Tensor) -> torch.Tensor:
    """Return up to PIECE consecutive elements of an output, from a random offset."""
    flat = output.view(-1)
    begin = secrets.randbelow(max(1, flat.numel() - PIECE + 1))
    return flat[begin : begin + PIECE]


def _other_forms(forms: Sequence[torch.Tensor], found: Sequence[Any]) -> str:
    expected = [f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in forms]
    got = [f"{f[1]}{f[0]}" if isinstance(f, list) and len(f) == 2 else str(f) for f in found]
    most = len(expected) + 1
    shown = got if len(got) <= most else [*got[:most], "…"]
    return f"it returns {', '.join(shown) or 'nothing'} where the reference returns {', '.join(expected)}"


@dataclass(slots=True)
class CandidateProof:
    """The result of proving a candidate."""

    draws: int = 0
    """Draws on which it was compared with the truth."""
    worst: float = 0.0
    """The largest error seen, as a share of its budget."""
    borrowed: str = ""
    """The PyTorch operations of the reference, if the candidate also runs all of them; otherwise empty."""
    excused: int = 0
    """Elements beyond their budgets that the reference's `excuse` left out."""


def prove(problem: Problem, candidate: Served, draws: int = DRAWS) -> CandidateProof:
    """Prove a candidate. Raises NotEquivalent if an answer is wrong, Ended if the candidate fails, and PerfsuiteError
    if no draw has a truth."""
    found, tally, causes = CandidateProof(), Tally(), Causes(problem.pair)
    cases = problem.cases(draws, secrets.randbits(31))
    reasons: list[str] = []
    for case in cases:
        values = problem.build(case)
        reasons.append(_compared(problem, candidate, case, values, tally, causes))
    found.draws = reasons.count("")
    if not found.draws:
        raise PerfsuiteError(
            f"{problem.path}: none of {len(cases)} draws of the shapes and the range that get_inputs() gives can be "
            f"proven; on the first, the reference {reasons[0]}"
        )
    _other_elements(problem, candidate, tally, causes)
    _other_order(problem, candidate, tally, causes)
    found.worst, found.excused = tally.worst, tally.excused
    if tally.excused > MOST_EXCUSED * tally.elements:
        raise PerfsuiteError(
            f"{problem.path}: excuse() leaves out {tally.excused} of {tally.elements} elements in which "
            f"{candidate.process.source} differs; narrow it to what is within rounding of a step"
        )
    found.borrowed = _borrowed(problem, candidate)
    return found


def truth_of(problem: Problem, case: Case, values: dict[str, Any]) -> Truth | str:
    """Return the truth for these inputs of a draw, or why there is none: what the reference does in float32 or in
    float64. Raises PerfsuiteError if the device has too little memory for it."""
    try:
        working = replace(case, dtype=problem.dtype)  # the values are drawn already, each in a dtype of its own
        return truths.establish(problem.pair, working, problem.device, gradients=False, drawn=make.clone(values))
    except PerfsuiteError:
        raise
    except Discard:
        return "is not finite in float32 on the inputs of get_inputs()"
    except Exception as error:
        if faults.lacks_memory(error):
            raise PerfsuiteError(
                f"{problem.path}: the device has too little memory for the reference in float64"
            ) from None
        first = error
    try:
        problem.call(make.clone(values))
    except Exception as error:
        return f"raises {in_one_line(error)}"
    return (
        f"raises in float64, in which the truth is computed: {in_one_line(first)}; let it create "
        f"and cast tensors in the dtype of its inputs or parameters, not in a fixed one"
    )


def _compared(
    problem: Problem,
    candidate: Served,
    case: Case,
    values: dict[str, Any],
    tally: Tally,
    causes: Causes,
    when: str = "",
) -> str:
    """Compare two calls on the same values with the truth. Return why there is no truth, or an empty string."""
    truth = truth_of(problem, case, values)
    if isinstance(truth, str):
        return truth
    forms = only_tensors(truth.reference)
    arguments = problem.arguments(values)
    _, (first, second) = candidate.call([arguments, arguments], forms, again=True)
    inputs = [tensor for _, tensor in make.tensors_in(arguments)]
    _judge(problem, truth, inputs, first, tally, causes, when)
    _judge(problem, truth, inputs, second, tally, causes, f"{when} when it is called again on the same inputs")
    causes.note(truth, first)
    candidate.settled()
    return ""


def _other_elements(problem: Problem, candidate: Served, tally: Tally, causes: Causes) -> None:
    """Prove calls whose inputs differ from those of the call before in only a few elements. A candidate that caches
    answers by other elements then returns an old answer."""
    for _ in range(DRAWS):  # the reference may be finite on some draws only
        case = problem.case(secrets.randbits(31))
        values = problem.build(case)
        if not _compared(problem, candidate, case, values, tally, causes):
            break
    else:
        return
    beside = problem.build(replace(case, seed=secrets.randbits(31)))
    others = dict(make.tensors_in(problem.arguments(beside)))
    for _ in range(CHANGES):
        for name, tensor in make.tensors_in(problem.arguments(values)):
            if tensor.numel() and 0 not in tensor.stride():
                at = torch.randint(0, tensor.numel(), (CHANGED,), device=tensor.device)
                flat, source = tensor.detach().reshape(-1), others[name].detach().reshape(-1)
                flat[at] = source[at]
                tensor.detach().copy_(flat.view(tensor.shape))
        _compared(problem, candidate, case, values, tally, causes)


def _other_order(problem: Problem, candidate: Served, tally: Tally, causes: Causes) -> None:
    """Prove calls whose inputs have the same elements as those of the call before, in another order. A candidate that
    caches answers by their sum, or by another number that does not depend on the order, then returns an old answer.

    The elements are multiples of a power of two, so that their sum is exact in any order.
    """
    for _ in range(DRAWS):  # the reference may be finite on some draws only
        case = problem.case(secrets.randbits(31))
        values = problem.build(case)
        tensors = [t.detach() for _, t in make.tensors_in(problem.arguments(values)) if 0 not in t.stride()]
        for tensor in tensors:
            tensor.copy_(_coarse(tensor))
        if not _compared(problem, candidate, case, values, tally, causes):
            break
    else:
        return
    for tensor in tensors:
        flat = tensor.reshape(-1)
        tensor.copy_(flat[torch.randperm(flat.numel(), device=flat.device)].view(tensor.shape))
    _compared(problem, candidate, case, values, tally, causes, " on the elements of the call before in another order")


def _coarse(tensor: torch.Tensor) -> torch.Tensor:
    """Return the floats rounded to at most GRID multiples of a power of two and their negatives."""
    if not tensor.is_floating_point() or not tensor.numel():
        return tensor
    largest = tensor.abs().amax().double()
    step = torch.exp2((largest / GRID).log2().ceil()).clamp(min=torch.finfo(tensor.dtype).tiny)
    return ((tensor.double() / step).round() * step).to(tensor.dtype)


def _borrowed(problem: Problem, candidate: Served) -> str:
    """Return the names of the reference's PyTorch operations if the candidate runs all of them on the same shapes,
    otherwise an empty string."""
    own, left = problem.own_work(), list[tuple[str, str]]()
    try:
        left = candidate.operations(problem.arguments(problem.values(secrets.randbits(31))))
    except Ended:
        return ""  # a kernel that cannot run under a dispatch mode
    for step in own:
        if step not in left:
            return ""
        left.remove(step)
    return ", ".join(dict.fromkeys(name for name, _ in own))


def _is_unwritten(output: torch.Tensor) -> bool:
    if not output.numel() or output.dtype not in UNWRITTEN:
        return False
    bits, marked = UNWRITTEN[output.dtype]
    return bool((output.view(bits) == marked).all())


def _judge(
    problem: Problem,
    truth: Truth,
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    tally: Tally,
    causes: Causes,
    when: str,
) -> None:
    produced: Leaves = dict(zip(truth.reference, outputs, strict=True))
    if any(map(_is_unwritten, outputs)):
        raise NotEquivalent(f"it reports the call as done, but its output is not written{when}")
    try:
        equivalence.judge(problem.pair, truth, produced, name="candidate", tally=tally, strict_strides=False)
    except NotEquivalent as error:
        cause = f"{causes.of(truth, outputs, inputs)}{problem.structure}"
        raise NotEquivalent(f"{str(error).partition(': ')[2] or error}{when}{cause}") from None
