"""Digests of the files that a workload ran are equal if and only if nothing that it runs has changed."""

from __future__ import annotations

import ctypes
import importlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from perfsuite.revisions import digests, observed_files

pytest_plugins = ["pytester"]

SOURCE = '''
"""What it does."""

import math

UNIT = "m"
"""Metres."""


def area(r):
    """The area."""
    return math.pi * r**2  # of a circle
'''


def of(folder: Path, text: str | bytes, name: str = "module.py") -> str:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return digests.of_file(path)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("  # of a circle", "  # of a disc, in square metres"),
        ('"""The area."""', '"""Another docstring.\n\n    Of two paragraphs.\n    """'),
        ('"""What it does."""', '"""Something."""'),
        ('"""Metres."""', '"""The unit of a radius."""'),
        ("\n\n\ndef", "\n\n\n\n# a new comment\ndef"),
        ("math.pi * r**2", "(math.pi * (r ** 2))"),
    ],
)
def test_comments_layout_and_docstrings_do_not_change_the_digest(tmp_path: Path, old: str, new: str) -> None:
    assert old in SOURCE
    assert of(tmp_path, SOURCE) == of(tmp_path, SOURCE.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new"),
    [("r**2", "r**3"), ("def area(r)", "def area(r, unit=1)"), ("import math", "import cmath as math"), ("pi", "tau")],
)
def test_any_other_change_of_the_source_changes_the_digest(tmp_path: Path, old: str, new: str) -> None:
    assert of(tmp_path, SOURCE) != of(tmp_path, SOURCE.replace(old, new))


@pytest.mark.parametrize(
    "reads", ["KERNEL = __doc__", "KERNEL = inspect.getdoc(f)", "from inspect import x as getdoc; getdoc(f)"]
)
def test_docstrings_count_if_the_source_reads_them_by_doc_or_getdoc(tmp_path: Path, reads: str) -> None:
    first, second = (of(tmp_path, f'"""{text}"""\n{reads}\n') for text in ("a = 1", "a = 2"))
    assert first != second


def test_docstring_of_a_function_counts_if_it_is_read(tmp_path: Path) -> None:
    read = SOURCE + "\nTEXT = area.__doc__\n"
    assert of(tmp_path, read) != of(tmp_path, read.replace("The area.", "The surface."))


def test_only_a_string_that_is_used_changes_the_digest(tmp_path: Path) -> None:
    text = "def f():\n    x = 1\n    'a string'\n    return 'a'\n"
    assert of(tmp_path, text) == of(tmp_path, text.replace("'a string'", "'another string'"))
    assert of(tmp_path, text) != of(tmp_path, text.replace("return 'a'", "return 'b'"))


def test_files_that_are_no_python_are_hashed_by_their_bytes(tmp_path: Path) -> None:
    assert of(tmp_path, "def broken(:\n") != of(tmp_path, "def broken(: \n")
    assert of(tmp_path, b"\x00\x01", "data.bin") != of(tmp_path, b"\x00\x02", "data.bin")
    assert of(tmp_path, b"1\x00") != of(tmp_path, b"2\x00")
    assert digests.of_file(tmp_path / "none.py") == ""
    assert digests.of_file(tmp_path) == ""


def test_data_is_hashed_by_content_and_large_data_by_size_and_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tokens.bin"
    path.write_bytes(b"1234")
    before = digests.of_data(path)
    os.utime(path, (1, 1))
    assert digests.of_data(path) == before
    path.write_bytes(b"1235")
    assert digests.of_data(path) != before
    monkeypatch.setattr(digests, "LARGE_BYTES", 3)
    before = digests.of_data(path)
    os.utime(path, (2, 2))
    assert digests.of_data(path) != before
    assert digests.of_data(tmp_path / "none") == ""


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("TORCH_ALLOW_TF32", True),
        ("OMP_NUM_THREADS", True),
        ("CUDA_LAUNCH_BLOCKING", True),
        ("TRITON_INTERPRET", True),
        ("OPENBLAS_NUM_THREADS", True),
        ("MALLOC_ARENA_MAX", True),
        ("MKL_NUM_THREADS", True),
        ("LD_PRELOAD", True),
        ("PYTHONMALLOC", True),
        ("PYTEST_ADDOPTS", True),
        ("PYTHONPATH", False),
        ("PYTEST_CURRENT_TEST", False),
        ("CUDA_VISIBLE_DEVICES", False),
        ("TRITON_CACHE_DIR", False),
        ("HOME", False),
    ],
)
def test_surroundings_include_variables_that_affect_speed(
    monkeypatch: pytest.MonkeyPatch, name: str, counts: bool
) -> None:
    found = []
    for value in ("0", "1"):
        monkeypatch.setattr(digests, "ENVIRONMENT", {"PATH": "/bin", name: value})
        digests.surroundings.cache_clear()
        found.append(digests.surroundings())
    digests.surroundings.cache_clear()
    assert (found[0] != found[1]) is counts


def test_surroundings_use_the_environment_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables set later, by torch or the code under test, do not count."""
    digests.surroundings.cache_clear()
    before = digests.surroundings()
    monkeypatch.setenv("TORCHINDUCTOR_SET_BY_A_LIBRARY", "1")
    digests.surroundings.cache_clear()
    assert digests.surroundings() == before


def test_surroundings_use_the_packages_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths added later do not count; importing setuptools adds its vendored packages to sys.path."""
    (tmp_path / "added-1.0.dist-info").mkdir()
    (tmp_path / "added-1.0.dist-info" / "METADATA").write_text("Name: added\nVersion: 1.0\n")
    digests.surroundings.cache_clear()
    before = digests.surroundings()
    monkeypatch.syspath_prepend(str(tmp_path))
    digests.surroundings.cache_clear()
    assert digests.surroundings() == before
    monkeypatch.setattr(digests, "PATHS", [str(tmp_path), *digests.PATHS])
    digests.surroundings.cache_clear()
    assert digests.surroundings() != before
    digests.surroundings.cache_clear()


RECORD = """\
added/__init__.py,sha256=%s,10
added/__pycache__/__init__.cpython-311.pyc,,
added-1.0.dist-info/INSTALLER,sha256=%s,4
../../../bin/added,sha256=%s,200
"""


def test_packages_name_the_build_but_not_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The digests of two builds of one version differ, and those of two installations of one build do not."""
    monkeypatch.setattr(digests, "PATHS", [str(tmp_path)])
    metadata, found = tmp_path / "added-1.0.dist-info", []
    metadata.mkdir()
    (metadata / "METADATA").write_text("Name: added\nVersion: 1.0\n")
    for record in (RECORD % ("a", "b", "c"), RECORD % ("a", "d", "e"), RECORD % ("f", "b", "c"), ""):
        (metadata / "RECORD").write_text(record)
        digests._installed.cache_clear()
        found.append(digests.packages())
    digests._installed.cache_clear()
    assert found[0] == found[1] != found[2]
    assert [package.partition("#")[0] for (package,) in found] == ["added==1.0"] * 4
    assert found[3] == ["added==1.0"]


def test_folder_is_digested_by_the_files_that_code_may_read(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    for name in ("a.py", "inner/b.py", "inner/tiles.txt", "notes.md", ".hidden", "c.pyc"):
        (tmp_path / name).write_text("1")
    before = digests.of_data(tmp_path)
    for name, counts in (("notes.md", False), (".hidden", False), ("c.pyc", False), ("inner/tiles.txt", True)):
        (tmp_path / name).write_text("2")
        assert (digests.of_data(tmp_path) != before) is counts
    before = digests.of_data(tmp_path)
    (tmp_path / "inner/b.py").rename(tmp_path / "inner/c.py")
    assert digests.of_data(tmp_path) != before


@pytest.mark.parametrize(
    ("written", "options", "found"),
    [
        ("addopts = -s\nmarkers = a: b\ntestpaths = .", [], {"addopts": "-s"}),
        ("usefixtures = a\n  b", [], {"usefixtures": "a\nb"}),
        ("log_level = INFO", ["-o", "log_level=DEBUG"], {"log_level": "DEBUG"}),
        ("", ["-o", "pythonpath=src"], {"pythonpath": "src"}),
        ("", [], {}),
    ],
)
def test_settings_of_pytest_include_those_that_may_affect_a_run(
    pytester: pytest.Pytester, written: str, options: list[str], found: dict[str, str]
) -> None:
    pytester.makeini(f"[pytest]\n{written}\n")
    assert digests.settings(pytester.parseconfig("-p", "no:perfsuite", *options)) == found


def test_vendored_packages_of_setuptools_are_not_searched() -> None:
    assert digests.searched(["", "/lib/site-packages", "/lib/site-packages/setuptools/_vendor"]) == [
        "",
        "/lib/site-packages",
    ]
    assert digests.PATHS


# --- the files that a workload ran ----------------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Make a repository of imported modules: fast → common, slow → common and shapes, other."""
    files = {
        "conftest.py": "",
        "lib_of_test/__init__.py": "",
        "lib_of_test/common.py": "",
        "lib_of_test/shapes.py": "",
        "lib_of_test/fast.py": "from lib_of_test import common\n",
        "lib_of_test/slow.py": "def f():\n    from . import common\n    from .shapes import __name__\n",
        "lib_of_test/other.py": "import lib_of_test.fast\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("common", "shapes", "fast", "slow", "other"):
        monkeypatch.delitem(sys.modules, f"lib_of_test.{name}", raising=False)
        importlib.import_module(f"lib_of_test.{name}")
    yield tmp_path
    for name in [n for n in sys.modules if n.partition(".")[0] == "lib_of_test"]:
        del sys.modules[name]


def module(name: str) -> ModuleType:
    return sys.modules[f"lib_of_test.{name}"]


def ran(tree: Path, *names: str, files: tuple[str, ...] = (), compiled: tuple[str, ...] = ()) -> digests.Ran:
    seen = observed_files.Observed(tree)
    seen.close()
    return digests.ran([module(n) for n in names], files, compiled, seen)


def test_sources_include_imports_inside_functions(tree: Path) -> None:
    assert set(ran(tree, "fast").sources) == {
        "conftest.py", "lib_of_test/__init__.py", "lib_of_test/common.py", "lib_of_test/fast.py"
    }  # fmt: skip
    assert set(ran(tree, "slow").sources) - set(ran(tree, "fast").sources) == {
        "lib_of_test/shapes.py", "lib_of_test/slow.py"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("package", "text", "names"),
    [
        ("a.b", "from . import c", {"a.b", "a.b.c"}),
        ("a.b", "from .c import d", {"a.b.c", "a.b.c.d"}),
        ("a.b", "from ..c import d", {"a.c", "a.c.d"}),
        ("a.b", "from ... import d", {"", ".d"}),
        ("a.b", "import c.d", {"c.d"}),
        ("a.b", "not python", set()),
    ],
)
def test_relative_imports_are_resolved(tmp_path: Path, package: str, text: str, names: set[str]) -> None:
    (tmp_path / "source.py").write_text(text)
    assert set(digests.imported_by(tmp_path / "source.py", package)) == names


def test_conftest_above_the_repository_is_not_included(tree: Path) -> None:
    inner = tree / "lib_of_test"
    seen = observed_files.Observed(inner)
    seen.close()
    found = digests.ran([module("fast")], (), (), seen)
    assert "conftest.py" not in found.sources
    assert set(found.sources) == {"__init__.py", "common.py", "fast.py"}


def test_source_that_cannot_be_parsed_is_not_unknown(tree: Path, seen: observed_files.Observed) -> None:
    (tree / "lib_of_test/common.py").write_text("__import__('x'")
    assert digests.ran([module("fast")], (), (), seen).unknown == ""


def test_executed_files_are_included_even_if_no_import_names_them(tree: Path) -> None:
    """For instance, a trainer's registry loads modules by strings."""
    found = ran(tree, "fast", files=(str(tree / "lib_of_test/shapes.py"), "<string>", "/usr/lib/python3/os.py"))
    assert "lib_of_test/shapes.py" in found.sources
    assert not any(p.startswith(("/", "..")) for p in found.sources)


def test_libraries_that_read_files_unobserved_make_the_record_unknown(tree: Path) -> None:
    assert ran(tree, "fast", compiled=("torch._C", "h5py._proxy")).unknown == "it reads files through h5py"
    assert ran(tree, "fast", compiled=("torch._C",)).unknown == ""


@pytest.fixture
def seen(tree: Path) -> Iterator[observed_files.Observed]:
    made = observed_files.Observed(tree, {tree / "pytest.ini"})
    yield made
    made.close()


def test_opened_data_files_of_the_repository_are_recorded(tree: Path, seen: observed_files.Observed) -> None:
    names = ("tokens.bin", "weights.pt", "code.py", ".hidden/x", "written", "tiles.toml", "pytest.ini", "tox.ini")
    for name in names:
        (tree / name).parent.mkdir(exist_ok=True)
        (tree / name).write_text("1")
    for name in ("tokens.bin", "code.py", ".hidden/x", "tiles.toml", "pytest.ini", "tox.ini"):
        (tree / name).read_text()
    with open(tree / "weights.pt", "r+b"), open(tree / "written", "w"):
        pass
    with pytest.raises(FileNotFoundError):
        (tree / "tuned.json").read_text()
    found = digests.ran([module("fast")], (), (), seen)
    data = ("code.py", "tiles.toml", "tokens.bin", "tox.ini", "tuned.json", "weights.pt")
    assert found.data == {n: digests.of_data(tree / n) for n in data}
    assert list(found.data) == sorted(found.data)
    assert found.data["tuned.json"] == ""


def test_source_that_code_reads_is_data_to_the_last_comment(tree: Path, seen: observed_files.Observed) -> None:
    """An import, a rewrite by pytest and a traceback read sources too, but not as data."""
    (tree / "lib_of_test/template.py").write_text("X = 1\n")
    (tree / "lib_of_test/reads.py").write_text(
        "import linecache\nfrom pathlib import Path\n"
        "import lib_of_test.common\n"
        "def f():\n"
        "    linecache.getlines(Path(__file__).with_name('slow.py').as_posix())\n"
        "    return Path(__file__).with_name('template.py').read_text(), Path(__file__).read_text()\n"
    )
    reads = importlib.import_module("lib_of_test.reads")
    reads.f()
    before = digests.ran([reads], (), (), seen)
    assert list(before.data) == ["lib_of_test/reads.py", "lib_of_test/template.py"]
    (tree / "lib_of_test/template.py").write_text("X = 1  # one\n")
    after = digests.ran([reads], (), (), seen)
    assert after.data["lib_of_test/template.py"] != before.data["lib_of_test/template.py"]


def test_source_that_a_library_reads_is_data_unless_it_is_an_imported_module(
    tree: Path, seen: observed_files.Observed, tmp_path_factory: pytest.TempPathFactory
) -> None:
    library = tmp_path_factory.mktemp("library") / "configs.py"
    library.write_text("def load(path): return path.read_text()\n")
    (tree / "config.py").write_text("tile = 64\n")
    load: dict[str, Any] = {}
    exec(compile(library.read_text(), str(library), "exec"), load)
    load["load"](tree / "config.py")
    load["load"](tree / "lib_of_test/fast.py")
    assert list(digests.ran([module("fast")], (), (), seen).data) == ["config.py"]


@pytest.mark.parametrize("form", [os.fsencode, Path])
def test_file_that_is_opened_by_bytes_or_a_path_is_recorded(
    tree: Path, seen: observed_files.Observed, form: Callable[[str], Any]
) -> None:
    (tree / "tokens.bin").write_text("1")
    os.close(os.open(form(str(tree / "tokens.bin")), os.O_RDONLY))
    assert [p.name for p in seen.data()] == ["tokens.bin"]


def test_link_to_other_data_is_a_change(tree: Path, seen: observed_files.Observed) -> None:
    for name in ("v1.bin", "v2.bin"):
        (tree / name).write_text(name)
    (tree / "tokens.bin").symlink_to("v1.bin")
    (tree / "tokens.bin").read_text()
    before = digests.ran([module("fast")], (), (), seen).data
    (tree / "tokens.bin").unlink()
    (tree / "tokens.bin").symlink_to("v2.bin")
    assert {name: digests.of_data(tree / name) for name in before} != before


def test_data_link_to_a_file_outside_the_repository_is_recorded_by_its_own_name(
    tree: Path, seen: observed_files.Observed, tmp_path_factory: pytest.TempPathFactory
) -> None:
    target = tmp_path_factory.mktemp("store") / "tokens.bin"
    target.write_text("1")
    (tree / "tokens.bin").symlink_to(target)
    (tree / "tokens.bin").read_text()
    assert digests.ran([module("fast")], (), (), seen).data == {"tokens.bin": digests.of_data(target)}


@pytest.fixture
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a small shared library: a copy of an extension of the standard library."""
    import _json

    return Path(shutil.copy(_json.__file__, tmp_path_factory.mktemp("built") / "libkernels.so"))


@pytest.mark.parametrize("load", [ctypes.CDLL, torch.ops.load_library])
def test_shared_library_of_the_repository_is_recorded(
    tree: Path, seen: observed_files.Observed, library: Path, load: Callable[[str], Any]
) -> None:
    (tree / "build").mkdir()
    name = shutil.copy(library, tree / f"build/lib{load.__name__}.so")
    load(name)
    found = digests.ran([module("fast")], (), (), seen)
    assert found.data == {f"build/lib{load.__name__}.so": digests.of_data(library)}


@pytest.mark.skipif(not observed_files.MAPPED.exists(), reason="the system does not list the libraries of a process")
def test_shared_library_that_other_code_loaded_is_recorded(tree: Path, library: Path) -> None:
    """A library may load others, which Python does not see."""
    name = shutil.copy(library, tree / "libinner.so")
    ctypes.CDLL(name)
    seen = observed_files.Observed(tree)
    seen.close()
    assert seen.data() == [Path(name)]


def test_shared_library_elsewhere_is_recorded_if_the_repository_loads_it_by_its_path(
    tree: Path, seen: observed_files.Observed, library: Path
) -> None:
    (tree / "lib_of_test/loads.py").write_text("import ctypes\ndef f(path): return ctypes.CDLL(path)\n")
    loads = importlib.import_module("lib_of_test.loads")
    ctypes.CDLL(shutil.copy(library, library.with_name("libother.so")))  # this file is not the repository's
    loads.f(str(library))
    found = digests.ran([module("fast")], (), (), seen)
    assert found.data == {os.path.relpath(library, tree): digests.of_data(library)}
    assert digests.of_data(tree / next(iter(found.data))) == digests.of_data(library)


def test_nothing_is_recorded_after_close(tree: Path) -> None:
    original = importlib.import_module
    first, second = observed_files.Observed(tree), observed_files.Observed(tree)
    second.close()
    (tree / "tokens.bin").write_text("1")
    (tree / "tokens.bin").read_text()
    first.close()
    (tree / "weights.pt").write_text("1")
    (tree / "weights.pt").read_text()
    assert importlib.import_module is original
    assert [p.name for p in first.data()] == ["tokens.bin"]
    assert second.data() == []


def test_records_are_closed_in_any_order(tree: Path) -> None:
    original = importlib.import_module
    first, second = observed_files.Observed(tree), observed_files.Observed(tree)
    importlib.import_module("json")
    first.close()
    importlib.import_module("html")
    second.close()
    second.close()
    assert importlib.import_module is original
    assert first.imports == [(__file__, "json")]
    assert second.imports == [(__file__, "json"), (__file__, "html")]


def test_audit_hook_is_installed_once_per_process(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    observed_files.Observed(tree).close()
    monkeypatch.setattr(sys, "addaudithook", lambda hook: pytest.fail("another hook"))
    observed_files.Observed(tree).close()


def test_headers_included_by_an_opened_source_are_data(tree: Path, seen: observed_files.Observed) -> None:
    (tree / "csrc").mkdir()
    (tree / "csrc/kernel.cu").write_text('#include <cuda.h>\n #include "tiles.h"\n#include "../gone.h"\n')
    (tree / "csrc/tiles.h").write_text('#include "more.h"\n')
    (tree / "csrc/more.h").write_text('#include "tiles.h"\n')
    (tree / "csrc/kernel.cu").read_text()
    assert [str(p.relative_to(tree)) for p in seen.data()] == [
        "csrc/kernel.cu", "csrc/more.h", "csrc/tiles.h", "gone.h"
    ]  # fmt: skip


def test_modules_imported_through_import_module_are_included(tree: Path, seen: observed_files.Observed) -> None:
    (tree / "lib_of_test/registry.py").write_text(
        "from importlib import import_module\n"
        "import_module('.shapes', __package__)\n"
        "def load(name): return import_module(name)\n"
    )
    registry = importlib.import_module("lib_of_test.registry")
    seen.begin()
    registry.load("lib_of_test.slow")
    seen.begin()
    registry.load("lib_of_test.other")
    with pytest.raises(ImportError):
        registry.load("lib_of_test.no_such_module")
    with pytest.raises(TypeError):
        registry.load(".relative")
    found = digests.ran([registry], (), (), seen)
    names = {Path(name).name for name in found.sources}
    assert found.data["src/lib_of_test/no_such_module.py"] == found.data["lib_of_test/no_such_module/__init__.py"] == ""
    # `shapes` was imported with the module; `slow` belongs to another workload.
    assert {"registry.py", "shapes.py", "other.py", "fast.py"} <= names
    assert "slow.py" not in names
    seen.close()
    assert importlib.import_module.__module__ == "importlib"


@pytest.mark.parametrize("text", ["__import__('x')", "import runpy\nrunpy.run_path('x')", "import_module('x')"])
def test_unobserved_imports_make_the_record_unknown(tree: Path, seen: observed_files.Observed, text: str) -> None:
    name = "conftest.py" if text.startswith("import_module") else "lib_of_test/common.py"
    (tree / name).write_text(f"def f():\n    {text.replace(chr(10), chr(10) + '    ')}\n")
    unknown = digests.ran([module("fast")], (), (), seen).unknown
    assert unknown == f"{name} imports modules through {text.split('(')[0].rpartition('.')[2]}"


def test_link_to_another_source_is_a_change(tree: Path) -> None:
    for number in (1, 2):
        (tree / f"lib_of_test/v{number}.py").write_text(f"x = {number}\n")
    (tree / "lib_of_test/kernel.py").symlink_to("v1.py")
    sys.modules["lib_of_test.kernel"] = importlib.import_module("lib_of_test.kernel")
    before = ran(tree, "kernel").sources
    assert {"lib_of_test/kernel.py", "lib_of_test/v1.py"} <= set(before)
    (tree / "lib_of_test/kernel.py").unlink()
    (tree / "lib_of_test/kernel.py").symlink_to("v2.py")
    assert digests.of_file(tree / "lib_of_test/kernel.py") != before["lib_of_test/kernel.py"]


def test_only_returns_sources_that_the_other_modules_do_not_import(tree: Path) -> None:
    assert digests.only(module("fast"), [module("slow")], tree) == ["lib_of_test/fast.py"]
    assert digests.only(module("slow"), [module("fast")], tree) == ["lib_of_test/shapes.py", "lib_of_test/slow.py"]
    assert digests.only(module("fast"), [module("slow"), module("other")], tree) == []
    assert digests.only(module("fast"), [None], tree) == []
    assert digests.only(None, [module("slow")], tree) == []
    assert digests.only(module("fast"), [sys], tree) == []


def test_folder_named_perfsuite_of_another_project_is_included(tree: Path) -> None:
    assert digests._is_own(tree / "perfsuite/kernels.py", tree)
    root = Path(digests.__file__).resolve().parents[2]
    assert not digests._is_own(root / "perfsuite/kernels.py", root)


def test_source_reached_through_a_link_is_included(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    (tree / "linked.py").write_text("x = 1\n")
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "link").symlink_to(tree)
    assert digests._is_own(elsewhere / "link/linked.py", tree)
    assert not digests._is_own(elsewhere / "linked.py", tree)


def test_loader_imported_under_another_name_makes_the_record_unknown(tree: Path) -> None:
    source = tree / "loads.py"
    source.write_text("from runpy import run_path as started\n")
    assert digests._unseen_imports([source], tree) == "loads.py imports modules through run_path"
