"""The commands of perfsuite: its own, and those that installed packages add."""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import Distribution, EntryPoint, entry_points
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import click

from perfsuite.gate.exit_codes import COULD_NOT_BEGIN, ENDED_EARLY

COMMANDS = "perfsuite.commands"


class CannotBegin(click.ClickException):
    """Wrong input of a command, such as an unknown name or a damaged file, in one line."""

    exit_code = COULD_NOT_BEGIN


class Commands(click.Group):
    """Group of perfsuite's own commands and those that other packages add."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command. If it is interrupted, the exit code is 2; click's own is 1, which blames the code."""
        try:
            return super().invoke(ctx)
        except (KeyboardInterrupt, click.Abort):
            click.echo("interrupted", err=True)
            ctx.exit(ENDED_EARLY)

    def list_commands(self, ctx: click.Context) -> list[str]:
        own = sorted([*super().list_commands(ctx), "judge"])
        others = {e.name for e in entry_points(group=COMMANDS) if not _absent(e)}
        return [*own, *sorted(others - set(own))]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        own = super().get_command(ctx, cmd_name)
        if own is not None:
            return own
        if cmd_name == "judge":  # imported only when it is used, because it is large
            from perfsuite.judge.command import judge

            return judge
        missing = None
        for entry in entry_points(group=COMMANDS, name=cmd_name):
            if lacks := _absent(entry):
                missing = missing or f"command {cmd_name!r} needs {lacks}"
                continue
            try:
                command = entry.load()
            except Exception as error:
                return _broken(cmd_name, f"command {cmd_name!r} of {entry.value} cannot be loaded: {error}")
            if isinstance(command, click.Command):
                return command
            return _broken(cmd_name, f"{entry.value} in the entry-point group {COMMANDS!r} is no click command")
        return _broken(cmd_name, missing) if missing else None


def _absent(entry: EntryPoint) -> str | None:
    """Return what is missing for a command whose distribution was installed without its package, as from a wheel; None
    if nothing is missing.

    An editable install maps only the packages of the wheel. Its folder is added to sys.path, because it contains the
    other packages.
    """
    distribution = entry.dist
    if distribution is None:
        return None
    package = entry.module.partition(".")[0]
    if folder := _editable(distribution, package):
        if folder not in sys.path:
            sys.path.append(folder)
        return None
    files = distribution.files
    if files is None or any(f.parts[0] in (package, f"{package}.py") for f in files):
        return None
    name = distribution.metadata["Name"]
    return f"the package {package!r}, which {name} does not install; run it in a clone, after `pip install -e .` there"


def _editable(distribution: Distribution, package: str) -> str | None:
    """Return the folder of an editable install (PEP 610), or of a clone that contains the package; None for any other.

    Building or installing a clone leaves an egg-info in it, which Python finds before the installed metadata when it
    runs in that folder. No installer wrote it, and it lists only the contents of the wheel.
    """
    if not (distribution.read_text("RECORD") or distribution.read_text("installed-files.txt")):
        folder = Path(os.path.abspath(str(distribution.locate_file(""))))
        if (folder / package).is_dir() or (folder / f"{package}.py").is_file():
            return str(folder)
    try:
        origin = json.loads(distribution.read_text("direct_url.json") or "{}")
        editable = origin["dir_info"]["editable"] and origin["url"].startswith("file://")
        return unquote(origin["url"].removeprefix("file://")) if editable else None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _broken(name: str, reason: str) -> click.Command:
    """Return a command that only says why it cannot run, so that the help of the other commands still works."""

    def fail() -> None:
        raise CannotBegin(" ".join(reason.split()))

    anything = {"ignore_unknown_options": True, "allow_extra_args": True}
    return click.Command(name, callback=fail, help=reason, short_help=reason, context_settings=anything)
