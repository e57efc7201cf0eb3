"""A problem in KernelBench's convention: a file with `Model`, `get_inputs` and `get_init_inputs`."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import io
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.weight_norm import WeightNorm

from perfsuite.correctness import differences, execution
from perfsuite.correctness.integrity.probe import same_leaf
from perfsuite.correctness.reference_task import is_random
from perfsuite.correctness.rule import eps_of
from perfsuite.declare import modules
from perfsuite.declare.pair import Pair
from perfsuite.declare.specs import ConstantSpec, tensor_spec
from perfsuite.declare.workload import DTYPES, Workload
from perfsuite.draws import inputs as make
from perfsuite.draws import tensor_values
from perfsuite.draws.cases import workload_case
from perfsuite.errors import PerfsuiteError, in_one_line, printable
from perfsuite.judge import structure
from perfsuite.judge.child import leaves_of, operations, seed_generators, tensors_of_state
from perfsuite.records import Case, InputCase

EXAMINED = 4
"""Number of draws on which the reference is examined before any candidate."""
MODEL, CANDIDATE = "Model", "ModelNew"
CALL = "a call on inputs that are drawn like those of get_inputs()"
_MOVES = """
copy_ _to_copy clone empty empty_like empty_strided new_empty new_empty_strided new_zeros new_full zeros zeros_like ones
ones_like full full_like fill_ zero_ arange contiguous detach cat stack lift_fresh _local_scalar_dense
"""
MOVES = frozenset(_MOVES.split())
"""PyTorch operations that only create, fill, copy or read tensors and compute nothing."""


@dataclass(frozen=True, slots=True)
class Problem:
    """The reference, built once with `seed`, and how its inputs are drawn."""

    path: Path
    """File of the reference, as the user names it."""
    file: Path
    """The same file by its absolute path: the current folder may be another one when it is read."""
    pair: Pair
    module: torch.nn.Module
    init: Sequence[Any]
    seed: int
    device: str
    imported: tuple[str, ...] = ()
    """Other files that define classes of the reference, except torch's and Python's own."""
    paths: tuple[str, ...] = ()
    """Path of each output in the reference's result."""
    dtype: str = "float32"
    """Working precision: the dtype of the outputs, or of the parameters and inputs if no output is real; float32 if
    they have several."""
    structure: str = ""
    """Clause that names the inputs whose values have a property that draws do not keep, for a wrong answer."""

    def varied(self) -> Problem:
        """Return the same problem with slightly changed weights: with a scale of 1 or a bias of 0, answers would not
        show whether a candidate uses it."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            clone = modules.spec_of(self.module).build()
        specs = {name: spec for name, spec in self.pair.inputs.items() if name != modules.INPUT}
        pair = _pair(self.path, clone, specs, self.pair.precision, self.pair.excuse)
        return replace(self, pair=pair, module=clone)

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers of the reference, by name."""
        return tensors_of_state(self.module)

    @property
    def neutral(self) -> list[str]:
        """Names of the parameters and buffers that are all 0 or all 1, as biases and scales are at first."""
        floats = {name: tensor for name, tensor in self.state.items() if tensor.is_floating_point()}
        return [name for name, t in floats.items() if t.numel() and any(bool((t == v).all()) for v in (0, 1))]

    def cases(self, number: int, seed: int) -> list[Case]:
        """Return at least `number` draws, and enough that each regime of values of each input occurs."""
        random_ = random.Random(seed)
        kinds: dict[str, tuple[str, tuple[str, ...]]] = {}
        for name, spec in self.pair.inputs.items():
            if (leaf := tensor_spec(spec)) is not None and name != modules.INPUT:
                kinds[name] = (leaf.layouts or ("contiguous",))[0], tensor_values.regimes(leaf)
        most = max([number, *(len(regimes) for _, regimes in kinds.values())])
        orders = {
            name: random_.sample(regimes, len(regimes)) * -(-most // len(regimes))
            for name, (_, regimes) in kinds.items()
        }
        return [
            Case(
                dtype="float32",
                sizes={},
                inputs={n: InputCase(layout=kinds[n][0], regime=order[i]) for n, order in orders.items()},
                seed=random_.getrandbits(31),
            )
            for i in range(most)
        ]

    def case(self, seed: int) -> Case:
        """Return the draw of the workload with this seed."""
        return workload_case(self.pair.workloads[0], "float32", seed)

    def values(self, seed: int) -> dict[str, Any]:
        """Return a draw of the workload's inputs, including the module if that is an input."""
        return self.build(self.case(seed))

    def build(self, case: Case) -> dict[str, Any]:
        """Return the inputs of a draw, including the module if that is an input."""
        values: dict[str, Any] = make.clone(make.build(self.pair, case, self.device))
        return values

    def excused(self, values: dict[str, Any]) -> Any:
        """Return the masks of the elements that the reference's `excuse` leaves out on these inputs; None if it has
        none."""
        if self.pair.excuse is None:
            return None
        return self.pair.excused(make.upcast(values), eps_of(self.pair.precision or self.dtype))

    def arguments(self, values: dict[str, Any]) -> list[Any]:
        """Return the arguments of a call: all inputs but the module itself."""
        return [v for name, v in values.items() if name != modules.INPUT]

    def call(self, values: dict[str, Any]) -> execution.Leaves:
        """Return the outputs of the reference, by name."""
        return dict(execution.flatten(self.returned(values)))

    def returned(self, values: dict[str, Any]) -> Any:
        """Return what the reference returns, as it is."""
        with torch.no_grad():
            return self.module(*self.arguments(values))

    def work(self, operations_: Sequence[Sequence[Any]]) -> list[tuple[str, str]]:
        """Return those of the operations that compute something: (name without a final "_", shapes as text)."""
        return [(n.removesuffix("_"), str(shapes)) for n, shapes in operations_ if n not in MOVES]

    def own_work(self) -> list[tuple[str, str]]:
        """Return the PyTorch operations of the reference that compute something."""
        arguments = self.arguments(self.values(0))
        with _blaming(self.path, CALL):
            return self.work(operations(torch, lambda: self.module(*arguments)))


def load(path: Path, device: str, seed: int, precision: str | None = None) -> Problem:
    """Return the problem that a file defines. Raises PerfsuiteError, with a message of one line, if there is none."""
    file = path.resolve()
    module = _imported(path)
    for name in (MODEL, "get_inputs"):
        if not callable(getattr(module, name, None)):
            raise PerfsuiteError(f"{path}: no {name}; a reference has Model, get_inputs() and get_init_inputs()")
    with _blaming(path, "get_init_inputs()"):
        init: Sequence[Any] = list(getattr(module, "get_init_inputs", list)())
    _check_arguments(path, module.__name__, "get_init_inputs()", init)
    kept = io.BytesIO()  # __init__ may change its arguments
    torch.save(init, kept)
    seed_generators(seed)
    with _blaming(path, f"{MODEL}(*get_init_inputs())"):
        built = module.Model(*init)
    _check_module(path, built)
    with _blaming(path, "get_inputs()"):
        template = module.get_inputs()
        if not isinstance(template, (list, tuple)) or not template:
            raise PerfsuiteError(f"{path}: get_inputs() returns no list of inputs")
        specs = modules.specs_of(list(template))
    _check_arguments(path, module.__name__, "get_inputs()", template)
    built = built.to(device)
    pair = _pair(path, built, specs, precision, getattr(module, "excuse", None))
    imported = tuple(sorted(_sources(built) - {str(file)}))
    problem = Problem(
        path=path,
        file=file,
        pair=pair,
        module=built,
        init=torch.load(io.BytesIO(kept.getvalue()), weights_only=False),
        seed=seed,
        device=device,
        imported=imported,
        structure=structure.clause_of(template),
    )
    _examine(problem)
    values = problem.values(0)
    with _blaming(path, CALL):
        returned = problem.returned(make.clone(values))
    paths = tuple(path for path, _ in leaves_of(returned))
    return replace(problem, paths=paths, dtype=_precision(returned, [*problem.state.values(), values]))


def _precision(returned: Any, values: Any) -> str:
    """Return the dtype of the real outputs, or of the real parameters and inputs in `values` if no output is real. If
    they have several, return float32."""
    names = _real_dtypes(returned) or _real_dtypes(values)
    return names.pop() if len(names) == 1 and names <= set(DTYPES) else "float32"


def _real_dtypes(value: Any) -> set[str]:
    every = {tensor.dtype for _, tensor in make.tensors_in(value) if tensor.is_floating_point()}
    return {str(dtype).removeprefix("torch.") for dtype in every}


def _check_arguments(path: Path, name: str, what: str, arguments: Sequence[Any]) -> None:
    """Raise PerfsuiteError if an argument cannot be sent to a process that does not have the reference's module, which
    has this name."""
    own = sys.modules.pop(name)
    try:
        torch.save([leaf for _, leaf in leaves_of(arguments) if not isinstance(leaf, torch.Tensor)], io.BytesIO())
    except Exception as error:
        raise PerfsuiteError(
            f"{path}: {what} returns what no candidate can get: {in_one_line(error)}; let it return tensors, numbers, "
            f"strings, and lists and dicts of these"
        ) from error
    finally:
        sys.modules[name] = own


def _check_module(path: Path, built: object) -> None:
    """Raise PerfsuiteError if the reference is no module, or if it cannot be copied with its state."""
    if not isinstance(built, torch.nn.Module):
        raise PerfsuiteError(f"{path}: {MODEL} is no torch.nn.Module")
    for name, tensor in tensors_of_state(built).items():
        if torch.nn.parameter.is_lazy(tensor):
            raise PerfsuiteError(
                f"{path}: {name} of {MODEL} has no shape before the first call; give its layer the sizes, as with "
                f"Linear in place of LazyLinear"
            )
        if tensor.is_meta:
            raise PerfsuiteError(
                f"{path}: {name} of {MODEL} is on the meta device and has no values; create it on the CPU"
            )
    try:
        copy.deepcopy(built)
    except Exception as error:
        hooks = (hook for part in built.modules() for hook in part._forward_pre_hooks.values())
        remedy = (
            "use torch.nn.utils.parametrizations.weight_norm, whose modules can be copied"
            if any(isinstance(hook, WeightNorm) for hook in hooks)
            else "keep a tensor that __init__ computes as a buffer: register_buffer(name, tensor.detach())"
        )
        raise PerfsuiteError(f"{path}: copy.deepcopy of {MODEL} raises {in_one_line(error)}; {remedy}") from error
    for name, tensor in tensors_of_state(built).items():
        if any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
            raise PerfsuiteError(
                f"{path}: {name} of {MODEL} is an expanded tensor, into which no value can be loaded; register a copy "
                f"of it, as clone(memory_format=torch.contiguous_format) returns"
            )


def _sources(built: torch.nn.Module) -> set[str]:
    """Return the files that define the classes of the module and of its parts, except torch's and Python's own."""
    names = {cls.__module__ for part in built.modules() for cls in type(part).__mro__}
    left = (name for name in names if name.partition(".")[0] not in {"torch", *sys.stdlib_module_names})
    files = (getattr(sys.modules.get(name), "__file__", None) for name in left)
    return {str(Path(file).resolve()) for file in files if file}


def _pair(path: Path, built: torch.nn.Module, specs: Mapping[str, Any], precision: str | None, excuse: Any) -> Pair:
    pair = Pair(
        name=path.stem,
        reference=built,
        optimized=built,
        inputs=dict(specs),
        gradients=False,
        precision=precision,
        excuse=excuse,
        workloads=[Workload("template")],
    )
    if modules.INPUT in pair.inputs:  # draws change neither the weights, which a process gets once, nor their dtypes
        pair.inputs = {**pair.inputs, modules.INPUT: ConstantSpec(value=built)}
        pair.mutates = {}  # a call may change its own running means: only its outputs are compared
    pair.validate()
    return pair


def _examine(problem: Problem) -> None:
    """Raise PerfsuiteError if the reference is not a function of its inputs, or its answers cannot be compared."""
    path, answers = problem.path, list[execution.Leaves]()
    for seed in range(EXAMINED):
        values = problem.values(seed)
        given = make.clone(values)
        with _blaming(path, CALL):
            first, again = problem.call(given), problem.call(make.clone(values))
        inputs = list(zip(*(make.tensors_in(problem.arguments(v)) for v in (values, given)), strict=True))
        if any(not same_leaf(before, after) for (_, before), (_, after) in inputs):
            raise PerfsuiteError(f"{path}: the reference changes its inputs in place; let it work on a copy")
        if not first or not all(isinstance(leaf, torch.Tensor) for leaf in first.values()):
            raise PerfsuiteError(f"{path}: the reference returns what is no tensor: nothing can be compared")
        if not all(map(_is_dense, first.values())):
            raise PerfsuiteError(
                f"{path}: the reference returns a sparse, nested or quantized tensor, and only dense ones are "
                f"compared; let it return a dense one, as to_dense() does"
            )
        for name, leaf in first.items():
            if is_random(differences.as_double(leaf), differences.as_double(again.get(name))):
                raise PerfsuiteError(
                    f"{path}: the reference answers the same inputs otherwise when it is called again: it draws random "
                    f"numbers, as dropout does, or keeps a state"
                )
        answers.append(first)
    if all(same_leaf(leaf, other[name]) for other in answers[1:] for name, leaf in answers[0].items()):
        raise PerfsuiteError(f"{path}: the reference gives the same answer whatever its inputs are: nothing to judge")


def _is_dense(leaf: Any) -> bool:
    return leaf.layout is torch.strided and not leaf.is_nested and not leaf.is_quantized


def check_file(path: Path) -> None:
    """Raise PerfsuiteError if there is no such file."""
    if path.is_dir():
        raise PerfsuiteError(f"{printable(path)}: a folder; give the files in it, as with {printable(path / '*.py')}")
    if not path.is_file():
        raise PerfsuiteError(f"{printable(path)}: no such file")


def _imported(path: Path) -> Any:
    check_file(path)
    name = f"perfsuite_reference_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise PerfsuiteError(f"{path}: no Python file, which has a name that ends in .py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    with _blaming(path, "the import"):
        spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def _blaming(path: Path, what: str) -> Any:
    try:
        yield
    except PerfsuiteError:
        raise
    except (Exception, SystemExit) as error:
        raise PerfsuiteError(f"{path}: {what} raises {in_one_line(error)}") from error
