"""Imported code outside the repository, whose version does not change with it, is found."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from perfsuite.revisions import digests, unversioned_code

NAMES = ("dep_of_test", "alone_of_test", "found_of_test")


@pytest.fixture
def apart(tmp_path: Path) -> Iterator[Path]:
    """Make a folder with a package, a module and a repository."""
    for name in ("dep/src/dep_of_test/__init__.py", "dep/alone_of_test.py", "top/found_of_test.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    yield tmp_path
    for name in NAMES:
        sys.modules.pop(name, None)


def found(apart: Path) -> list[str]:
    return [str(p.relative_to(apart)) for p in unversioned_code.imported(apart / "top") if apart in p.parents]


def test_packages_and_modules_of_other_folders_on_the_path_are_found(
    apart: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("dep/src", "dep", "top"):
        monkeypatch.syspath_prepend(apart / folder)
    assert found(apart) == []
    for name in NAMES:
        importlib.import_module(name)
    assert found(apart) == ["dep/alone_of_test.py", "dep/src/dep_of_test"]


def test_editable_install_is_found_that_is_not_on_the_path(apart: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An editable install may come with an import finder of its own, in place of an entry of sys.path."""
    metadata = apart / "site-packages/dep-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Name: dep\nVersion: 1.0\n")
    place = {"dir_info": {"editable": True}, "url": (apart / "dep").as_uri()}
    (metadata / "direct_url.json").write_text(json.dumps(place))
    with monkeypatch.context() as patches:
        patches.syspath_prepend(apart / "dep/src")
        importlib.import_module("dep_of_test")
    assert found(apart) == []
    monkeypatch.setattr(digests, "PATHS", [str(metadata.parent)])
    assert found(apart) == ["dep/src/dep_of_test"]
    before = digests.of_data(apart / found(apart)[0])
    (apart / "dep/src/dep_of_test/__init__.py").write_text("X = 1\n")
    assert digests.of_data(apart / found(apart)[0]) != before


def test_installed_packages_the_standard_library_and_perfsuite_are_not_found(tmp_path: Path) -> None:
    names = {p.stem for p in unversioned_code.imported(tmp_path)}
    assert names.isdisjoint({"perfsuite", "pytest", "torch", "json", "os", "_json"})
