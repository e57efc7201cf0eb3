"""`Pair`, the main entry point: declared at module level, it becomes pytest items that prove, time and gate it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Any

from perfsuite.declare import declared_functions, modules, pair_fields
from perfsuite.declare.pair_fields import BUFFERS, CHANGED, GRAD_OUTPUT, WRITTEN
from perfsuite.declare.sides import Side, as_side, compiled
from perfsuite.declare.specs import (
    RANKS,
    GeneratorSpec,
    RecordedSpec,
    ScalarSpec,
    Size,
    Spec,
    accepted,
    holds,
    least_of,
    symbols,
)
from perfsuite.declare.workload import Cost, Workload
from perfsuite.errors import PairError

TEMPLATE_DRAWS = 5
"""Number of draws of a pair made by `from_modules`. The inputs of each have the full size."""


@dataclass(kw_only=True, eq=False)
class Pair:
    """A reference and an optimized side of one function, with everything that is needed to prove and time them.

    Sides are called with the inputs by position, in the order of `inputs`. They return a tensor, a number, None,
    or a tuple, list or dict of these. Sides may be modules: all share the parameters of the reference, by name.

    inputs        name → spec (`tensor`, `scalar`, `listof`, `module`, `generator`, `recorded`, `constant`, or nested)
    step_inputs   for stateful sides: inputs that have new values in each step
    mutates       inputs changed in place, {"x"}; all others must not change. As a dict, name → "changed"; "written" for
                  an input that is only an output, which is poisoned with NaN before the call; or "buffers" for a module
                  whose parameters do not change, as in a batch norm in training
    consumes      inputs that a call, or its backward pass, uses up: their contents afterwards are not compared, but
                  their gradients are; "grad_output" is the incoming gradient of the backward pass
    gradients     compare the gradients of every floating-point input that is not mutated, and of modules' parameters
    rivals        name → side: alternatives that a user might choose; proven equal, then timed against the two sides
    variants      name → side: other paths of the optimized side, proven equal but not timed
    workloads     sizes that are timed
    cost          least bytes and operations, from which the limit on this device follows
    dtypes        precisions to prove, each in its own item
    sizes         name → `size(low, high, multiple_of=)` for drawn inputs
    where         condition on the sizes, by name; draws that violate it are not made
    truth         cheaper float64 truth; proven against the reference at small sizes
    precision     lower working precision that the optimized side declares, e.g. "bfloat16"; "tf32" if float32 products
                  are computed in TF32
    excuse        inputs (float64) → bool mask of output elements within rounding of a threshold; a keyword-only
                  parameter `eps` receives the rounding unit of both sides' computation, which is larger under autocast
    adjust        called with the drawn inputs before any side: changes values near such a threshold in place; called on
                  the CPU if there are few elements
    steps         for stateful sides: numbers of steps after which the states are compared
    strides       "reference" (the optimized side's outputs have the same kind of strides as the reference's), or "any"
    unsupported   ways of calling (CONTEXTS) that the optimized side does not support → reason; they are not tried
    max_examples  most random draws of a proof, for a pair whose draws are expensive; up to three plain draws follow if
                  they prove too little
    output_dtype  dtype of the optimized side's outputs, if it is not the reference's
    ranks         numbers of torch.distributed processes in which both sides are proven too, e.g. (2, 4). Each process
                  is a rank of the default group, with NCCL on GPUs and gloo on CPUs, and gets its part of the inputs
                  that are `by_rank`. The truth is the reference in a group of one, on all inputs
    signed_zeros  whether -0.0 and 0.0 are different answers
    time_limit    seconds after which one item counts as hanging; longer for a profile with more draws than "dev"
    """

    reference: Callable[..., Any] | Side
    optimized: Callable[..., Any] | Side
    inputs: Mapping[str, Spec]
    workloads: Sequence[Workload] = ()
    step_inputs: Mapping[str, Spec] = field(default_factory=dict)
    mutates: Collection[str] | Mapping[str, str] = frozenset()
    writes: Collection[str] = ()
    consumes: Collection[str] = frozenset()
    gradients: bool = True
    rivals: Mapping[str, Callable[..., Any] | Side] = field(default_factory=dict)
    variants: Mapping[str, Callable[..., Any] | Side] = field(default_factory=dict)
    cost: Cost | None = None
    dtypes: Sequence[str] = ("float32",)
    sizes: Mapping[str, Size] = field(default_factory=dict)
    where: Callable[..., bool] | None = None
    truth: Callable[..., Any] | None = None
    precision: str | None = None
    excuse: Callable[..., Any] | None = None
    adjust: Callable[..., None] | None = None
    steps: Sequence[int] = (1, 2, 17, 100)
    time_limit: float = 300.0
    strides: str = "reference"
    unsupported: Mapping[str, str] = field(default_factory=dict)
    max_examples: int | None = None
    signed_zeros: bool = False
    output_dtype: str | None = None
    ranks: Sequence[int] = ()
    at_ranks: int = 1
    """Number of processes in which the pair is called; set by `at`."""
    equal_parts: bool = False
    """Whether all processes get the same part of the inputs that are `by_rank`; set by `at`."""
    name: str = "pair"

    def __post_init__(self) -> None:
        if self.writes:
            names = ", ".join(f'"{name}": "{WRITTEN}"' for name in sorted(self.writes))
            raise PairError(f"writes= is spelled mutates={{{names}}}")
        pair_fields.check_kinds(vars(self))
        pair_fields.check_inputs_named("inputs", self.inputs)
        pair_fields.check_inputs_named("step_inputs", self.step_inputs)
        self.mutates = dict(self.mutates) if isinstance(self.mutates, Mapping) else dict.fromkeys(self.mutates, CHANGED)
        self.consumes = frozenset(self.consumes)
        self._share_parameters()
        pair_fields.check_mutates(self.mutates, self.inputs)
        if isinstance(self.workloads, Workload):
            self.workloads = (self.workloads,)
        for workload in self.workloads:
            if not isinstance(workload, Workload):
                raise PairError(f'workloads= has {workload!r}; write each as Workload("name", size=…)')
        self._check_ranks()
        every = {**self.inputs, **self.step_inputs}
        pair_fields.check_roles(every, self.mutates, self.consumes)
        pair_fields.check_names(every)
        pair_fields.check_ranges({name: spec for name, spec in every.items() if name not in self.written})
        pair_fields.check_scalars(self.inputs, self.step_inputs)
        pair_fields.check_precisions(self.dtypes, self.precision)
        pair_fields.check_unsupported(self.unsupported)
        pair_fields.check_proof(self.strides, self.max_examples, self.output_dtype, self.dtypes)
        pair_fields.check_other_sides((*self.rivals, *self.variants))
        if self.is_stateful != as_side(self.optimized).stateful:
            raise PairError("one side is stateful(...) and the other is not; wrap both")

    def _check_ranks(self) -> None:
        given = isinstance(self.ranks, (list, tuple))
        numbers = [n for n in self.ranks if type(n) is int and n > 1] if given else []
        if not given or len(set(numbers)) < len(self.ranks):
            raise PairError(f"ranks={self.ranks!r}: give different numbers of processes, each 2 or more, as (2, 4)")
        if RANKS in self.sizes:
            raise PairError(f"sizes={{{RANKS!r}: …}}: this size is the number of processes; say ranks=(2, 4)")
        if self.ranks and self.gradients and not self.is_stateful:
            raise PairError(
                "a pair with ranks= is compared by its outputs: make its sides stateful, or gradients=False"
            )
        if not self.ranks and RANKS in self.symbols:
            raise PairError("an input depends on the size ranks: say in how many processes, as Pair(ranks=(2, 4))")
        if RANKS in self.symbols:
            self.workloads = [w.with_sizes(**{RANKS: w.ranks}) for w in self.workloads]
        if not self.ranks and (many := next((w for w in self.workloads if w.ranks > 1), None)) is not None:
            raise PairError(
                f"workload {many.name!r}: ranks={many.ranks}, and the pair is not proven in several processes: say "
                f"Pair(ranks=({many.ranks},))"
            )

    def at(self, ranks: int, *, equal_parts: bool = False) -> Pair:
        """Return the same pair, called in this number of processes. With `equal_parts`, all get the same part of the
        inputs; otherwise each gets its own."""
        return replace(self, at_ranks=ranks, equal_parts=equal_parts)

    @classmethod
    def from_modules(
        cls,
        reference: Callable[..., Any],
        optimized: Callable[..., Any],
        get_inputs: Callable[[], Sequence[Any]],
        get_init_inputs: Callable[[], Sequence[Any]] = lambda: (),
        **fields: Any,
    ) -> Pair:
        """Return a pair of two module classes, in KernelBench's convention: `reference(*get_init_inputs())` is one
        side.

        The result of `get_inputs` is a template: inputs of its shapes, dtypes and layouts are drawn, with values in the
        same range. Outputs are compared by value, whatever their strides. There is one workload, with these shapes, and
        one rival, `torch.compile` of the reference. `fields` are further fields of `Pair`, or replace these defaults.
        """
        init = list(get_init_inputs())
        made = {"reference": reference(*init), "optimized": optimized(*init)}
        defaults: dict[str, Any] = {
            "inputs": modules.specs_of(get_inputs()),
            "workloads": [Workload("template")],
            "rivals": {"compile": compiled(made["reference"])},
            "gradients": False,
            "strides": "any",
            "unsupported": {"autocast": "the convention calls modules outside of it"},
            "max_examples": TEMPLATE_DRAWS,
        }
        return cls(**{**made, **defaults, **fields})

    def _share_parameters(self) -> None:
        """If the sides are modules, add an input with the reference's module, whose parameters all sides share."""
        sides: dict[str, Side] = {
            n: as_side(s)
            for n, s in {
                **self.rivals,
                **self.variants,
                "reference": self.reference,
                "optimized": self.optimized,
            }.items()
        }
        found = {name: side.call for name, side in sides.items() if modules.is_module(side.call)}
        if not any(map(modules.has_state, found.values())):
            return
        reference = sides["reference"].call
        for name, side in sides.items():
            if name not in found:
                raise PairError(
                    f"the {name} side is no module where another is one with parameters: make all sides modules with "
                    f"parameters of the same names, or declare the module as an input, module=module(build)"
                )
            own = side.call is reference
            call = modules.Own(reference) if own else modules.Sharing(side.call, name)
            sides[name] = replace(side, call=call)
        if modules.INPUT in self.inputs:
            raise PairError(f"input {modules.INPUT!r} has the name of the input with the sides' parameters; rename it")
        self.inputs = {modules.INPUT: modules.spec_of(reference), **self.inputs}
        if modules.changes_buffers(reference):
            assert isinstance(self.mutates, Mapping)
            self.mutates = {modules.INPUT: BUFFERS, **self.mutates}
        self.reference, self.optimized = sides["reference"], sides["optimized"]
        self.rivals = {name: sides[name] for name in self.rivals}
        self.variants = {name: sides[name] for name in self.variants}

    @property
    def written(self) -> frozenset[str]:
        """Inputs that are only outputs."""
        return self._mutated(WRITTEN)

    @property
    def keeping_parameters(self) -> frozenset[str]:
        """Modules among the inputs of which a call changes only the buffers."""
        return self._mutated(BUFFERS)

    def _mutated(self, kind: str) -> frozenset[str]:
        assert isinstance(self.mutates, Mapping)
        return frozenset(name for name, how in self.mutates.items() if how == kind)

    @property
    def changed(self) -> frozenset[str]:
        """Inputs that a call may change, including generators, whose state it advances."""
        generators = (name for name, spec in self.inputs.items() if holds(spec, GeneratorSpec))
        return frozenset({*self.mutates, *self.consumes, *generators}) - {GRAD_OUTPUT}

    @property
    def is_stateful(self) -> bool:
        return as_side(self.reference).stateful

    @property
    def symbols(self) -> set[str]:
        """Names of the sizes that the inputs depend on."""
        return symbols(dict(self.inputs)) | symbols(dict(self.step_inputs))

    def allows(self, sizes: Mapping[str, Any]) -> bool:
        """Return whether `where` holds for these sizes and scalars. True if one that it needs is not drawn yet."""
        if self.where is None or not sizes.keys() >= set(declared_functions.required(self.where)):
            return True
        arguments = accepted(self.where, sizes)
        with declared_functions.of_pair(self.name, "where", ", ".join(f"{n}={v}" for n, v in arguments.items())):
            return bool(self.where(**arguments))

    def adjusted(self, values: Mapping[str, Any]) -> None:
        """Apply `adjust` to these inputs, in place."""
        if self.adjust is not None:
            with declared_functions.of_pair(self.name, "adjust", self._by_position()):
                self.adjust(*values.values())

    def excused(self, values: Mapping[str, Any], eps: float) -> Any:
        """Return the result of `excuse` on these inputs; None if the pair has no `excuse`."""
        if self.excuse is None:
            return None
        keywords = {"eps": eps} if declared_functions.has_keyword(self.excuse, "eps") else {}
        with declared_functions.of_pair(self.name, "excuse", f"{self._by_position()} in float64"):
            return self.excuse(*values.values(), **keywords)

    def _by_position(self) -> str:
        return f"the inputs ({', '.join(self.inputs)}) by position"

    def size_of(self, name: str) -> Size | None:
        """Return the range from which the size is drawn; None if none is declared."""
        if name == RANKS:
            return Size(low=self.at_ranks, high=self.at_ranks)
        declared = self.sizes.get(name)
        least = max((least_of(spec, name) for spec in (*self.inputs.values(), *self.step_inputs.values())), default=0)
        if not least or (declared is not None and declared.low >= least):
            return declared
        return replace(declared or Size(), low=least)

    @property
    def is_recorded(self) -> bool:
        return any(isinstance(s, RecordedSpec) for s in self.inputs.values())

    def validate_functions(self) -> None:
        """Raise PairError if `adjust`, `excuse`, `truth` or `where` cannot be called with the pair's inputs."""
        roles = (("adjust", self.adjust), ("excuse", self.excuse), ("truth", self.truth), ("where", self.where))
        for role, call in roles:
            if call is not None and not callable(call):
                raise PairError(f"pair {self.name!r}: {role}={call!r} is no function")
            if call is not None and role != "where":
                keywords = ["eps"] if role == "excuse" else []
                declared_functions.check_positional(self.name, role, call, list(self.inputs), keywords)
        if self.where is not None:
            scalars = {name for name, spec in self.inputs.items() if isinstance(spec, ScalarSpec)}
            declared_functions.check_named(self.name, "where", self.where, self.symbols | scalars)

    def validate(self) -> None:
        """Raise PairError for errors that can only be detected in the complete pair, such as those of its workloads."""
        if strange := sorted(set(self.sizes) - self.symbols):
            raise PairError(
                f"pair {self.name!r}: sizes={{{strange[0]!r}: …}} is the size of no input; the sizes are "
                f"{', '.join(sorted(self.symbols)) or 'none'}"
            )
        if not self.workloads:
            raise PairError(
                f"pair {self.name!r} has no workload, so that nothing of it is timed; "
                f'add workloads=[Workload("name", {", ".join(f"{s}=…" for s in sorted(self.symbols))})]'
            )
        seen: set[str] = set()
        scalars = {k for k, v in self.inputs.items() if isinstance(v, ScalarSpec)}
        self.validate_functions()
        for what in ("bytes", "flops", "items"):
            if (count := getattr(self.cost, what, None)) is not None:
                known = self.symbols | scalars | {"direction"}
                declared_functions.check_named(self.name, f"cost=Cost({what}=…)", count, known)
        for workload in self.workloads:
            if workload.name in seen:
                raise PairError(f"pair {self.name!r} has two workloads called {workload.name!r}; rename one")
            seen.add(workload.name)
            self._validate_workload(workload, scalars)

    def _validate_workload(self, workload: Workload, scalars: set[str]) -> None:
        where = f"pair {self.name!r}, workload {workload.name!r}"
        if workload.repeat > 1 and self.consumes:
            raise PairError(
                f"{where}: repeat={workload.repeat} calls it again on inputs that it has used up (consumes=); leave "
                f"repeat out"
            )
        if workload.promises.throughput and (self.cost is None or self.cost.items is None):
            raise PairError(
                f"{where}: a throughput is promised, but not what a call processes; give cost=Cost(items=lambda …: …, "
                f'unit="tokens")'
            )
        for size in sorted(self.symbols & set(workload.sizes)):
            if not is_whole(value := workload.sizes[size]):
                raise PairError(f"{where}: {size}={value!r} must be a whole number, 0 or more")
        if unbound := sorted((self.symbols | scalars) - set(workload.sizes)):
            what = "input" if unbound[0] in scalars else "size"
            raise PairError(f"{where}: {what} {unbound[0]!r} has no value; give {unbound[0]}=… in the workload")
        if unknown := sorted(set(workload.sizes) - self.symbols - scalars):
            raise PairError(
                f"{where}: no input has a size {unknown[0]!r}; the sizes are "
                f"{', '.join(sorted(self.symbols | scalars))}"
            )


def is_whole(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, Integral) and int(value) >= 0
