"""Imports follow docs/architecture.md, and every technique has both sides and a pair."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path

import pytest
from scratch import ROOT

from perfsuite.baseline import storage
from perfsuite.report import markdown

HARNESS = ROOT / "perfsuite"
CALIBRATION = ROOT / "experiments" / "calibration"
HEAVY = ("torch", "numpy", "hypothesis", "scipy", "rich", "jinja2", "triton")


@cache
def table() -> dict[str, tuple[tuple[int, int], str]]:
    """Return module, such as "gate.stages" → ((row, place within it), torch column), from docs/architecture.md."""
    found: dict[str, tuple[tuple[int, int], str]] = {}
    for line in (ROOT / "docs/architecture.md").read_text().splitlines():
        cells = [c.strip() for c in line.strip("|").split("|")]
        if len(cells) == 5 and cells[0].isdigit():
            package = "".join(f"{name}." for name in re.findall(r"`(\w+)`", cells[1]))
            for place, module in enumerate(re.findall(r"`(\w+)`", cells[2])):
                name = f"{package}{module}"
                assert name not in found, f"{name} is in the table twice"
                found[name] = ((int(cells[0]), place), cells[4])
    return found


@cache
def calibration() -> dict[str, tuple[tuple[int, int], str]]:
    """Return file of experiments/calibration → ((row, place in it), torch column), from docs/calibration/README.md."""
    found = {"__init__": ((-1, 0), "no")}
    rows = [line for line in (ROOT / "docs/calibration/README.md").read_text().splitlines() if line.startswith("| `")]
    for row, line in enumerate(rows):
        cells = [c.strip() for c in line.strip("|").split("|")]
        found |= {name: ((row, place), cells[2]) for place, name in enumerate(re.findall(r"`(\w+)`", cells[0]))}
    return found


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(tree_of(path)))


def executed_at_import(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes within this one that are executed when the file is imported: all outside functions."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield child
            yield from executed_at_import(child)


@cache
def packages() -> set[str]:
    """Return the packages whose modules the table lists one by one."""
    return {name.partition(".")[0] for name in table() if "." in name}


def stage_of(path: Path) -> str:
    """Return the stage of a file: its module or package of perfsuite, such as "gate.stages" or "report"."""
    return stage_named(path.relative_to(HARNESS).with_suffix("").parts)


def stage_named(parts: Sequence[str]) -> str:
    return ".".join(parts[: 2 if parts[0] in packages() else 1])


def calibration_files() -> list[Path]:
    return sorted(CALIBRATION.glob("*.py"))


def harness_files() -> list[Path]:
    """Return the files of the stages: all except the `__init__.py` of the packages that the table lists."""
    fronts = {HARNESS / name / "__init__.py" for name in packages()}
    return sorted(set(HARNESS.rglob("*.py")) - fronts)


def imports(path: Path, *, top_only: bool = False, typing: bool = True) -> Iterator[tuple[str, str]]:
    """Yield (module, name) of a file's imports: all, those outside functions, or all except those under
    TYPE_CHECKING."""
    tree = tree_of(path)
    for_checkers = {
        inner
        for node in tree.body
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in executed_at_import(tree) if top_only else nodes_of(path):
        if node in for_checkers and not typing:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, ""
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                package = path.relative_to(ROOT).parent.parts
                base = package[: len(package) - node.level + 1]
                module = ".".join([*base, *([module] if module else [])])
            for alias in node.names:
                yield module, alias.name


def stages_imported(path: Path) -> set[str]:
    found = set()
    for module, name in imports(path):
        first, *rest = module.split(".")
        if first != "perfsuite":
            continue
        inside = HARNESS.joinpath(*rest, name)
        if inside.with_suffix(".py").exists() or (inside / "__init__.py").exists():
            rest.append(name)
        found.add(stage_named(rest) if rest else "__init__")
    return found - {stage_of(path)}


def torch_column(path: Path) -> str:
    """Return whether a file of perfsuite imports torch, according to its table."""
    return (calibration()[path.stem] if path.parent == CALIBRATION else table()[stage_of(path)])[1]


# --- perfsuite ------------------------------------------------------------------------------------------------------


def test_the_table_names_every_module() -> None:
    assert set(table()) == {stage_of(p) for p in harness_files()}


def test_packages_of_stages_come_one_after_the_other_and_import_nothing_themselves() -> None:
    in_order = [name.partition(".")[0] for name, _ in sorted(table().items(), key=lambda entry: entry[1][0])]
    listed = [name for name in in_order if name in packages()]
    assert [name for name, _ in groupby(listed)] == list(dict.fromkeys(listed))
    for name in packages():
        assert not list(imports(HARNESS / name / "__init__.py")), name


@pytest.mark.parametrize("path", harness_files(), ids=lambda p: str(p.relative_to(HARNESS)))
def test_a_module_imports_only_earlier_modules_of_the_table(path: Path) -> None:
    own, _ = table()[stage_of(path)]
    later = sorted(name for name in stages_imported(path) if table()[name][0] >= own)
    assert not later, f"{path.relative_to(ROOT)} imports {', '.join(later)}, which come after it"


@pytest.mark.parametrize("path", [*harness_files(), *calibration_files()], ids=lambda p: str(p.relative_to(ROOT)))
def test_torch_is_imported_only_as_the_table_allows(path: Path) -> None:
    torch = torch_column(path)
    top = any(m.split(".")[0] == "torch" for m, _ in imports(path, top_only=True, typing=False))
    anywhere = any(m.split(".")[0] == "torch" for m, _ in imports(path, typing=False))
    assert torch in ("yes", "no", "lazily")
    assert not (torch == "no" and anywhere), f"{path.name} imports torch"
    assert not (torch == "lazily" and top), f"{path.name} imports torch when it is imported itself"


IMPORT_EACH = """
import importlib, sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print(module)
            raise ImportError("torch")

sys.meta_path.insert(0, NoTorch())
for module in sys.argv[1:]:
    try:
        importlib.import_module(module)
    except ImportError as error:
        assert str(error) == "torch", error
"""
"""Program that imports the modules that it is given, and prints those whose import loads torch."""


def test_import_of_a_module_loads_torch_only_as_the_table_allows() -> None:
    paths = [p for p in [*harness_files(), *calibration_files()] if torch_column(p) != "yes" and p.stem != "__main__"]
    names = [".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for p in paths]
    assert {
        "perfsuite",
        "perfsuite.session.aot_compile",
        "perfsuite.session.modes.run",
        "experiments.calibration.record",
    } <= set(names)
    done = subprocess.run([sys.executable, "-c", IMPORT_EACH, *names], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout.split(), done.returncode) == ([], 0), done.stderr


def test_calibration_imports_only_earlier_files() -> None:
    assert set(calibration()) == {p.stem for p in calibration_files()}
    for path in calibration_files():
        own, _ = calibration()[path.stem]
        for module, name in imports(path):
            inside = module.removeprefix("experiments.calibration").lstrip(".").split(".")[0] or name
            if module.startswith("experiments.calibration"):
                assert calibration()[inside][0] < own, f"{path.name} imports {inside}, which comes after it"


def test_only_the_trainer_registry_of_suite_names_modules_of_the_sides() -> None:
    """Both sides and the tests import `suite`; it imports neither, and only its registry names their trainers."""
    for path in sides("suite"):
        roots = {module.split(".")[0] for module, _ in imports(path)}
        assert not roots & {"reference", "optimized", "tests"}, path.relative_to(ROOT)
        named = [n.value for n in nodes_of(path) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
        late = [text for text in named if re.match(r"(reference|optimized)(\.\w+)+(:\w+)?$", text)]
        assert not late or path.name == "trainers.py", f"{path.relative_to(ROOT)} names the module {late[0]}"


@pytest.mark.parametrize("path", sorted((ROOT / "suite/commands").glob("*.py")), ids=lambda p: p.name)
def test_a_command_module_imports_nothing_heavy_at_its_top(path: Path) -> None:
    """A command imports nothing heavy at its top, because the help of all commands imports it."""
    top = {module.split(".")[0] for module, _ in imports(path, top_only=True, typing=False)}
    assert not top & set(HEAVY), path.name


def test_perfsuite_does_not_import_the_techniques() -> None:
    for path in harness_files():
        roots = {module.split(".")[0] for module, _ in imports(path)}
        assert not roots & {"reference", "optimized", "suite", "experiments", "tests"}, path


def test_import_perfsuite_loads_no_heavy_package() -> None:
    code = f"import perfsuite, sys; print([m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_public_name_can_be_imported() -> None:
    import perfsuite

    for name in perfsuite.__all__:
        assert getattr(perfsuite, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = perfsuite.nothing


# --- the techniques -------------------------------------------------------------------------------------------------


def sides(folder: str) -> list[Path]:
    return [p for p in sorted((ROOT / folder).rglob("*.py")) if "__pycache__" not in p.parts]


def techniques(folder: str) -> set[str]:
    """Return `<domain>/<technique>` of each file that implements one.

    Top-level modules such as `optimized/kernels.py` are shared. `NAME_cuda.py` belongs to `NAME.py`.
    """
    found = {
        "/".join(p.relative_to(ROOT / folder).with_suffix("").parts)
        for p in sides(folder)
        if p.name != "__init__.py" and p.parent != ROOT / folder
    }
    return {t for t in found if not (t.endswith("_cuda") and t.removesuffix("_cuda") in found)}


EVERY = sorted(techniques("reference") | techniques("optimized"))


def test_techniques_are_found() -> None:
    assert EVERY


@pytest.mark.parametrize(("folder", "other"), [("reference", "optimized"), ("optimized", "reference")])
def test_neither_side_imports_or_names_the_other(folder: str, other: str) -> None:
    for path in sides(folder):
        roots = {module.split(".")[0] for module, _ in imports(path)}
        assert other not in roots, f"{path.relative_to(ROOT)} imports {other}"
        named = [n.value for n in nodes_of(path) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
        late = [text for text in named if re.match(rf"{other}(\.\w+)+$", text)]
        assert not late, f"{path.relative_to(ROOT)} names the module {late[0]}"


@pytest.mark.parametrize("technique", EVERY)
def test_a_technique_has_both_sides(technique: str) -> None:
    for folder in ("reference", "optimized"):
        assert (ROOT / folder / f"{technique}.py").exists(), f"{folder}/{technique}.py is missing"


@pytest.mark.parametrize("technique", EVERY)
def test_a_technique_has_its_pair(technique: str) -> None:
    domain, _, name = technique.rpartition("/")
    path = ROOT / "tests" / domain / f"test_{name}.py"
    assert path.exists(), f"{path.relative_to(ROOT)} is missing"
    module = technique.replace("/", ".")
    assert any(
        origin["reference"] == f"reference.{module}" and origin["optimized"] == f"optimized.{module}"
        for origin in pairs_of(path)
    ), f"{path.relative_to(ROOT)} declares no Pair of reference.{module} and optimized.{module}"


def pairs_of(path: Path) -> Iterator[dict[str, str | None]]:
    """Yield for each module-level Pair the module that each of its two sides comes from."""
    origin = {}
    for node in tree_of(path).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                origin[alias.asname or alias.name] = node.module
    for node in tree_of(path).body:
        call = node.value if isinstance(node, (ast.Assign, ast.AnnAssign)) else None
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "Pair":
            given = {k.arg: k.value for k in call.keywords}
            yield {
                side: next(
                    (
                        origin[n.id]
                        for n in ast.walk(given[side])
                        if isinstance(n, ast.Name) and origin.get(n.id, "").startswith(f"{side}.")
                    ),
                    None,
                )
                for side in ("reference", "optimized")
            }


def test_every_test_file_of_a_domain_belongs_to_a_technique() -> None:
    for path in sorted((ROOT / "tests").glob("*/test_*.py")):
        if path.parent.name in ("perfsuite", "planted", "suite", "trainers"):
            continue
        technique = f"{path.parent.name}/{path.stem.removeprefix('test_')}"
        assert technique in EVERY, f"{path.relative_to(ROOT)} tests no technique: there is no {technique}.py"


@pytest.mark.parametrize(("page", "device"), [("docs/results.md", "nvidia-h200"), ("docs/ranks.md", "nvidia-h200-x2")])
def test_documentation_tables_match_the_baselines(page: str, device: str) -> None:
    """The pages show the figures that `perfsuite table baselines/DEVICE.json --write PAGE` writes."""
    text = (ROOT / page).read_text()
    entries = storage.load(ROOT / "baselines" / f"{device}.json").entries
    assert markdown.insert(text, markdown.table(entries.values())) == text


def test_rows_of_the_readme_are_in_the_results_page() -> None:
    rows = re.findall(r"^\| \w+/\w+ \|.*$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(rows) == 6
    assert set(rows) <= set((ROOT / "docs/results.md").read_text().splitlines())


def test_readme_states_the_number_of_techniques() -> None:
    counted = [technique for technique in EVERY if not technique.startswith("trainers/")]
    assert f"pairs for {len(counted)} techniques" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("technique", EVERY)
def test_each_technique_is_either_in_a_results_table_or_listed_as_unmeasured(technique: str) -> None:
    text = (ROOT / "docs/results.md").read_text()
    found = re.search(r"<!-- perfsuite:table -->(.*?)<!-- /perfsuite:table -->", text, re.DOTALL)
    assert found, "docs/results.md has no <!-- perfsuite:table --> … <!-- /perfsuite:table -->"
    if not found[1].strip():
        pytest.skip("the table is generated from the first baseline of a GPU, which there is not yet")
    name = technique.rpartition("/")[2]
    waiting = re.search(r"<!-- unmeasured -->(.*?)<!-- /unmeasured -->", text, re.DOTALL)
    # A second pair of the same technique has a suffix.
    tables = found[1] + (ROOT / "docs" / "ranks.md").read_text()
    measured = re.search(rf"^\| {technique}(_\w+)? ", tables, re.MULTILINE) is not None
    listed = waiting is not None and re.search(rf"(?<!\w){name}(?!\w)", waiting[1]) is not None
    assert measured or listed, (
        f"{name} is neither in a table nor in the list in docs/results.md of what is not measured yet"
    )
    assert not (measured and listed), f"{name} has been measured: take it out of the list in docs/results.md"
