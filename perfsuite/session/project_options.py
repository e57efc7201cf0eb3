"""Find the command-line options that a project's own conftests and plugins add, so that worker processes get them too.

This module imports nothing heavy, because every pytest run with the plugin imports it.
"""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any

import pytest

OPTIONS: pytest.StashKey[dict[str, Any]] = pytest.StashKey()
"""Stash key of the options that conftests and plugins have added: name → number of values, as argparse's `nargs`."""
FLAGS = ("store_true", "store_false", "store_const", "append_const", "count", argparse.BooleanOptionalAction)
"""Kinds of options without a value."""


def known(config: pytest.Config) -> dict[str, Any]:
    """Return the options that pytest knows now: name → number of values, as argparse's `nargs`."""
    return _options_of(config._parser)


def of_plugins(config: pytest.Config) -> dict[str, Any]:
    """Return the options of plugins that the project loads by name, with `-p` or PYTEST_PLUGINS.

    Their `pytest_addoption` is called again, because pytest does not record which plugin adds an option. Installed
    packages that register plugins are left out: their options are for the run, such as xdist's number of processes.
    """
    hook = config.pluginmanager.hook.pytest_addoption
    own = [i for i in hook.get_hookimpls() if _package_of(i.plugin) not in (__package__, "_pytest")]
    installed = {e.module.partition(".")[0] for e in entry_points(group="pytest11")} if own else ()
    parser = pytest.Parser(_ispytest=True)
    hook_arguments = {"parser": parser, "pluginmanager": config.pluginmanager}
    for one in own:
        if _package_of(one.plugin) not in installed and not (one.wrapper or one.hookwrapper):
            one.function(*(hook_arguments[name] for name in one.argnames))
    return _options_of(parser)


def _package_of(plugin: object) -> str:
    module = plugin.__name__ if isinstance(plugin, ModuleType) else type(plugin).__module__
    return module.partition(".")[0]


def _options_of(parser: Any) -> dict[str, Any]:
    options = [option for group in (parser._anonymous, *parser._groups) for option in group.options]
    return {name: _values_of(option.attrs()) for option in options for name in option.names()}


def _values_of(attributes: Mapping[str, Any]) -> Any:
    return 0 if attributes.get("action") in FLAGS else attributes.get("nargs")


def worker_arguments(config: pytest.Config) -> list[str]:
    """Return the arguments with which another pytest process gets those of this run that are options of the project's
    conftests and plugins.

    That process may collect only files for which another conftest applies, so it leaves out options that it lacks.
    """
    own = config.stash.get(OPTIONS, {})
    outside = shlex.split(os.environ.get("PYTEST_ADDOPTS", ""))
    arguments = [*config.getini("addopts"), *outside, *map(str, config.invocation_params.args)]
    every = [*config.option.perfsuite_project_argument, *among(arguments, own)]
    return [f"--perfsuite-project-argument={argument}" for argument in every]


def among(arguments: Sequence[str], own: Mapping[str, Any]) -> Iterator[str]:
    """Yield the arguments that are the options `own` or their values."""
    left = list(arguments)
    while left:
        argument = left.pop(0)
        if argument == "--":
            return
        name, has_value, _ = argument.partition("=")
        if name not in own:
            continue
        yield argument
        number = 0 if has_value else own[name] if own[name] is not None else 1
        while left and number != 0 and (isinstance(number, int) or not left[0].startswith("-")):
            yield left.pop(0)
            number = 0 if number == "?" else number - 1 if isinstance(number, int) else number
