"""Define the values that the fields of a pair may have, and check the given ones."""

from __future__ import annotations

import keyword
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from perfsuite.declare.specs import ANY_WHOLE, ModuleSpec, ScalarSpec, Size, Spec, holds, tensors_of
from perfsuite.declare.workload import DTYPES, TF32
from perfsuite.errors import PairError

STRIDES = ("reference", "any")
CONTEXTS = (
    "inference_mode",
    "no_gradient_needed",
    "other_thread",
    "two_threads",
    "grad_mode_off",
    "autocast",
    "one_gradient_needed",
    "two_gradients_needed",
    "some_outputs_used",
    "two_graphs",
    "second_backward",
    "double_backward",
    "changed_before_backward",
    "after_calls_without_gradients",
    "after_other_dtype",
    "other_default_dtype",
    "uncounted_writes",
    "rewritten_inputs",
    "one_tensor",
    "uneven_lists",
    "inputs_with_graphs",
    "nan_gradients",
    "written_gradients",
    "saved_tensor_hooks",
    "backward_in_other_thread",
    "other_stream",
    "captured_graph",
    "many_elements",
    "every_step",
    "outside_changes",
    "needing_gradients",
    "same_step_tensors",
    "step_layouts",
    "step_sizes",
    "uneven_step_lists",
)
"""Other ways of calling a side that are tried (perfsuite.correctness.contexts)."""
CHANGED, WRITTEN, BUFFERS = "changed", "written", "buffers"
"""Kinds of mutated inputs: changed in place; only written, as an output; a module of which only buffers change."""
GRAD_OUTPUT = "grad_output"
"""Name in `consumes` of the incoming gradient of the backward pass."""


def check_inputs_named(what: str, inputs: Any) -> None:
    """Raise PairError if the inputs are not a mapping of names to specs."""
    if not isinstance(inputs, Mapping):
        raise PairError(f"{what}={inputs!r}: give each input's name with what it is, {what}={{'x': tensor('n')}}")


def check_mutates(mutates: Mapping[str, str], inputs: Mapping[str, Spec]) -> None:
    """Raise PairError if the kind of a mutated input is unknown, or if an input of kind "buffers" is not a module."""
    for name, how in mutates.items():
        if how not in (CHANGED, WRITTEN, BUFFERS):
            raise PairError(
                f'mutates={{{name!r}: {how!r}}}: say "{CHANGED}", "{WRITTEN}" of an output only, or '
                f'"{BUFFERS}" of a module'
            )
        if how == BUFFERS and not holds(inputs.get(name), ModuleSpec):
            raise PairError(f'mutates={{{name!r}: "{BUFFERS}"}}: it is no module and has none; say "{CHANGED}"')


def check_roles(every: Mapping[str, Spec], mutates: Collection[str], consumes: Collection[str]) -> None:
    """Raise PairError if `mutates` or `consumes` names an input that does not exist."""
    for role, named in (("mutates", set(mutates)), ("consumes", set(consumes) - {GRAD_OUTPUT})):
        for name in sorted(named - set(every)):
            raise PairError(f"{role}={{{name!r}}}: there is no such input; the inputs are {', '.join(every)}")


def check_names(names: Collection[str]) -> None:
    """Raise PairError if the name of an input is not a valid Python name."""
    for name in names:
        if not name.isidentifier() or keyword.iskeyword(name):
            raise PairError(f"input {name!r} is not a Python name; rename it")


def check_ranges(read: Mapping[str, Spec]) -> None:
    """Raise PairError if an input that is read contains integers without a declared range."""
    for name, spec in read.items():
        for leaf in tensors_of(spec):
            if leaf.values is ANY_WHOLE and leaf.dtype != "bool":
                raise PairError(
                    f"input {name!r} holds whole numbers of a range that is not given; give it, as "
                    f'tensor("n", dtype={leaf.dtype!r}, values=integers(0, 10))'
                )


def check_scalars(inputs: Mapping[str, Spec], step_inputs: Mapping[str, Spec]) -> None:
    """Raise PairError if a scalar is a step input, or is nested in an input."""
    for name, spec in step_inputs.items():
        if holds(spec, ScalarSpec):
            raise PairError(
                f"step input {name!r} is a scalar, which is drawn once and not for each step; "
                f"use a tensor without dimensions, {name}=tensor(values=…)"
            )
    for name, spec in inputs.items():
        if holds(spec, ScalarSpec) and not isinstance(spec, ScalarSpec):
            raise PairError(f"input {name!r} holds a scalar, which has no name there; make it an input of its own")


def check_kinds(fields: Mapping[str, Any]) -> None:
    """Raise PairError, with a line that names the field, if a field has a value of the wrong type."""
    for name in ("rivals", "variants", "unsupported", "sizes"):
        if not isinstance(fields[name], Mapping):
            raise PairError(f"{name}={fields[name]!r}: write a dict, {name}={{name: …}}")
    for name in ("gradients", "signed_zeros"):
        if not isinstance(fields[name], bool):
            raise PairError(f"{name}={fields[name]!r}: write True or False")
    if isinstance(fields["mutates"], str):
        raise PairError(f"mutates={fields['mutates']!r}: write a set, mutates={{{fields['mutates']!r}}}")
    for name, size in fields["sizes"].items():
        if not isinstance(size, Size):
            raise PairError(f"sizes={{{name!r}: {size!r}}}: write size(low, high), as size(1, 33)")
    steps = fields["steps"]
    if not isinstance(steps, (list, tuple)) or not steps or not all(type(n) is int and n > 0 for n in steps):
        raise PairError(f"steps={steps!r}: give numbers of calls, each 1 or more, as (1, 2, 17, 100)")
    if not isinstance(fields["time_limit"], (int, float)) or not fields["time_limit"] > 0:
        raise PairError(f"time_limit={fields['time_limit']!r}: give seconds, above 0")


def check_precisions(dtypes: Sequence[str], precision: str | None) -> None:
    """Raise PairError if a precision is unknown."""
    for dtype in dtypes:
        if dtype not in DTYPES:
            raise PairError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    if precision not in (None, *DTYPES, TF32):
        raise PairError(f"precision {precision!r} is not one of {', '.join((*DTYPES, TF32))}")


def check_unsupported(unsupported: Mapping[str, str]) -> None:
    """Raise PairError if a way of calling is unknown, or has no reason."""
    for name, why in unsupported.items():
        if name not in CONTEXTS:
            raise PairError(f"unsupported={{{name!r}: …}}: not one of {', '.join(CONTEXTS)}")
        if not why.strip():
            raise PairError(f"unsupported={{{name!r}: ''}}: say why the optimized side does not support it")


def check_proof(strides: str, max_examples: int | None, output_dtype: str | None, dtypes: Sequence[str]) -> None:
    """Raise PairError if `strides` or `output_dtype` is unknown, or if a proof would have no draws."""
    if strides not in STRIDES:
        raise PairError(f"strides={strides!r} is not one of {', '.join(STRIDES)}")
    if max_examples is not None and max_examples < 1:
        raise PairError(f"max_examples={max_examples}: a proof takes 1 draw or more")
    if output_dtype is not None and output_dtype not in DTYPES:
        raise PairError(f"output_dtype {output_dtype!r} is not one of {', '.join(DTYPES)}")
    if not dtypes:
        raise PairError("dtypes is empty; name at least one precision to prove, e.g. ('float32',)")


def check_other_sides(names: Iterable[str]) -> None:
    """Raise PairError if a rival or variant has the name of one of the two sides."""
    for name in names:
        if name in ("reference", "optimized"):
            raise PairError(f"a rival or variant may not be called {name!r}; choose another name")
