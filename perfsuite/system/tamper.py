"""Check that the clocks, the statistics and the harness itself are still as installed.

User code runs in the harness's process and could replace a timer, a comparison or a rule. No earlier state is recorded
for comparison, since it might already be manipulated. Instead, a function is genuine if it is compiled code, or Python
code from a file of its own package.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from perfsuite.errors import PACKAGE, TamperedError
from perfsuite.system.garbage import uncollected

TRUSTED = (
    "time.perf_counter",
    "time.perf_counter_ns",
    "time.monotonic",
    "time.monotonic_ns",
    "time.time",
    "time.sleep",
    "statistics.median",
    "statistics.fmean",
    "statistics.mean",
    "statistics.stdev",
    "math.log",
    "math.exp",
    "math.sqrt",
    "random.Random.shuffle",
    "random.Random.random",
    "random.SystemRandom.getrandbits",
    "json.dumps",
    "json.loads",
    "gc.get_objects",
    "builtins.min",
    "builtins.max",
    "builtins.sum",
    "builtins.sorted",
    "builtins.zip",
    "builtins.abs",
    "torch.equal",
    "torch.isfinite",
    "torch.isnan",
    "torch.where",
    "torch.maximum",
    "torch.remainder",
    "torch.empty",
    "torch.rand",
    "torch.Tensor.clone",
    "torch.Tensor.copy_",
    "torch.Tensor.abs",
    "torch.Tensor.all",
    "torch.Tensor.any",
    "torch.Tensor.max",
    "torch.Tensor.mean",
    "torch.Tensor.sum",
    "torch.Tensor.double",
    "torch.Tensor.to",
    "torch.Tensor.isnan",
    "torch.Tensor.isfinite",
    "torch.Tensor.__eq__",
    "torch.Tensor.__sub__",
    "torch.cuda.synchronize",
    "torch.cuda.Event",
    "torch.cuda.Event.record",
    "torch.cuda.Event.elapsed_time",
    "torch.cuda.Event.query",
    "torch.cuda.Event.synchronize",
    "torch.cuda._sleep",
    "torch.cuda.max_memory_allocated",
    "torch.cuda.reset_peak_memory_stats",
    "torch.profiler.profile",
    "torch.autograd.grad",
    "torch.autograd.backward",
)
"""Functions outside the harness that a verdict depends on."""

FOREIGN = ("st.", "pytest.", "hypothesis.")
"""Prefixes of decorators that replace a function by code of their own."""
INSTALLED = "the harness must run as installed"


def check() -> None:
    """Raise TamperedError, with the object's name, if something that a verdict depends on has been replaced."""
    for name in TRUSTED:
        module, _, rest = name.partition(".")
        while f"{module}.{rest.partition('.')[0]}" in sys.modules:
            first, _, rest = rest.partition(".")
            module = f"{module}.{first}"
        if module in sys.modules:
            _check_one(name, sys.modules[module], rest)
    for module_name in [n for n in sys.modules if n == "perfsuite" or n.startswith("perfsuite.")]:
        _check_own(sys.modules[module_name])


def _check_one(name: str, module: ModuleType, path: str) -> None:
    found: Any = module
    for part in path.split("."):
        found = getattr(found, part, None)
        if found is None:
            return  # this build does not have it
    named = getattr(found, "__name__", "") == path.rpartition(".")[2]
    if not named or not _is_genuine(found, module.__name__.partition(".")[0]):
        raise TamperedError(
            f"{name} has been replaced by {_described(found)}; the clocks and functions that a verdict rests on must "
            f"be as installed"
        )


def _is_genuine(found: Any, package: str) -> bool:
    """Return whether the object is compiled code, or Python code from the package's own folder. For a module of the
    standard library, that is the library's folder."""
    if isinstance(found, type):
        home = sys.modules.get(found.__module__)
        return found.__module__.partition(".")[0] == package and home is not None and _lies_in(package, _file(home))
    found = getattr(found, "__func__", found)
    code = getattr(found, "__code__", None)
    if isinstance(code, CodeType):
        return _lies_in(package, code.co_filename)
    return type(found).__module__ == "builtins" and type(found).__name__ in (
        "builtin_function_or_method",
        "method_descriptor",
        "wrapper_descriptor",
        "getset_descriptor",
        "type",
    )


@functools.cache
def _folder(package: str) -> Path:
    """Return the folder or file that may contain the code of a package; for a module of the standard library, the
    library's folder."""
    library = Path(sysconfig.get_paths()["stdlib"]).resolve()
    file = getattr(importlib.import_module(package), "__file__", None)
    if package in sys.stdlib_module_names or file is None:
        return library
    path = Path(file).resolve()
    return path.parent if path.name == "__init__.py" else path


def _file(module: ModuleType) -> str | None:
    found = getattr(module, "__file__", None)
    return found if isinstance(found, str) else None


@functools.cache
def _lies_in(package: str, file: str | None) -> bool:
    if file is None or file.startswith("<frozen"):
        return True
    path, folder = Path(file).resolve(), _folder(package)
    return path == folder or folder in path.parents


def _described(found: Any) -> str:
    code = getattr(found, "__code__", None)
    name = getattr(found, "__qualname__", type(found).__qualname__)
    return f"{name} of {code.co_filename}:{code.co_firstlineno}" if isinstance(code, CodeType) else f"{name}"


def _check_own(module: ModuleType) -> None:
    file = getattr(module, "__file__", None)
    if file is None or not is_harness(file):
        return
    functions, constants, imported = _declared(file)
    for name, (source, attribute) in imported.items():
        origin = sys.modules.get(source)
        if name in vars(module) and origin is not None and hasattr(origin, attribute):
            found = vars(module)[name]
            if found is not getattr(origin, attribute):
                raise TamperedError(f"{module.__name__}.{name} has been replaced by {_described(found)}; {INSTALLED}")
    for name, codes in functions.items():
        owner, _, method = name.rpartition(".")
        holder: Any = getattr(module, owner, None) if owner else module
        if holder is None or (not owner and name not in vars(module)):
            continue
        found = vars(holder).get(method)
        if found is None:
            continue
        if not _is_own(found, codes, file):
            raise TamperedError(f"{module.__name__}.{name} has been replaced by {_described(found)}; {INSTALLED}")
    for name, value in constants.items():
        now = vars(module).get(name, value)
        if type(now) is not type(value) or now != value:
            raise TamperedError(
                f"{module.__name__}.{name} has been set to {now!r} (installed: {value!r}); the rules are the same for "
                f"all"
            )


@functools.cache
def is_harness(file: str) -> bool:
    """Return whether a source file, named as in its code objects, is one of perfsuite's own."""
    return PACKAGE in Path(file).parents


def _is_own(found: Any, lines: set[int], file: str) -> bool:
    if type(found) is FunctionType and not found.__dict__:  # the usual case: nothing is wrapped
        return found.__code__.co_filename == file and found.__code__.co_firstlineno in lines
    for attribute in ("__func__", "fget", "func", "callback"):
        found = getattr(found, attribute, found)
    found = getattr(found, "__wrapped__", found)
    code = getattr(found, "__code__", None)
    if not isinstance(code, CodeType):
        return not callable(found) or type(found).__module__ == "functools" or hasattr(found, "__click_params__")
    return code.co_filename == file and code.co_firstlineno in lines


@functools.cache
def _declared(file: str) -> tuple[dict[str, set[int]], dict[str, Any], dict[str, tuple[str, str]]]:
    """Return the functions, constants and imports that a source file declares.

    Returns three dicts: function or Class.method → lines at which it may begin; constant → literal value; imported
    name → (module, attribute).
    """
    with uncollected():
        tree = ast.parse(Path(file).read_text())
    functions: dict[str, set[int]] = {}
    for name, node in _functions(tree):
        if any(ast.unparse(d).startswith(FOREIGN) for d in node.decorator_list):
            continue
        first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
        functions.setdefault(name, set()).update(range(first, node.lineno + 1))
    constants: dict[str, Any] = {}
    for statement in tree.body:
        target: ast.expr | None = None
        value: ast.expr | None = None
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            target, value = statement.targets[0], statement.value
        elif isinstance(statement, ast.AnnAssign):
            target, value = statement.target, statement.value
        if target is None or value is None:
            continue
        both = [(target, value)]
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            both = list(zip(target.elts, value.elts, strict=True))
        for named, declared in both:
            if isinstance(named, ast.Name) and named.id.isupper():
                with contextlib.suppress(ValueError):
                    constants[named.id] = _constant(declared)
    imported = {
        alias.asname or alias.name: (node.module or "", alias.name)
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and not node.level
        for alias in node.names
    }
    return functions, constants, imported


ARITHMETIC = (ast.Expression, ast.Constant, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop)


def _constant(node: ast.expr) -> Any:
    """Return the value of a literal, or of arithmetic with numbers such as 2.0**-13. Raises ValueError for anything
    else."""
    whole = ast.Expression(node)
    if isinstance(node, (ast.BinOp, ast.UnaryOp)) and all(isinstance(n, ARITHMETIC) for n in ast.walk(whole)):
        return eval(compile(whole, "<constant>", "eval"), {"__builtins__": {}})  # numbers and operators alone
    return ast.literal_eval(node)


def _functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    yield f"{node.name}.{inner.name}", inner
