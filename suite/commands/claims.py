"""The command `perfsuite claims`."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import click

from perfsuite.option_types import NamedPath
from suite.commands.ending import in_one_line, out_of_memory, writable
from suite.naming import shown
from suite.terminal import tell
from suite.trainers import memory_remedy

FOLDER = ".perfsuite/claims"


@click.command()
@click.argument("name")
@click.option("--only", multiple=True, metavar="ID", help="This claim alone, e.g. C6; may be given several times.")
@click.option("--device", help="cpu, cuda or cuda:1.  [default: the GPU, if any]")
@click.option("--out", type=NamedPath(), default=FOLDER, show_default=True, help="Folder of claims.json and .md.")
def claims(name: str, only: tuple[str, ...], device: str | None, out: str) -> None:
    """Measure the claims of the source of trainer NAME, and report whether each claim holds.

    The command writes claims.json and claims.md. It keeps the other claims in the folder's claims.json, and the earlier
    result of a claim that cannot be measured on this machine.
    """
    with in_one_line("interrupted; what was measured by then is written", memory_remedy(name)):
        _claims(name, only, device, Path(out))


def _claims(name: str, only: tuple[str, ...], device: str | None, out: Path) -> None:
    from suite import trainers

    checks, setting = trainers.checks_of(name)
    chosen = checks.chosen(only)
    import torch

    from perfsuite.report.files import write
    from suite.claims import record
    from suite.commands.train import device_called, name_of

    there = device_called(device)
    known = record.load(out / "claims.json")
    writable(out)
    given = setting(there)
    for check in chosen:
        tell(f"{check.id}: {check.said}", err=True)
        verdict, explanation = _answer(check, given)
        tell(f"  {verdict}: {explanation}", err=True)
        before = known.get(check.id)
        if verdict == record.UNMEASURED and before is not None and before.verdict != record.UNMEASURED:
            tell(f"  what was measured on {before.device} stays: {before.verdict}", err=True)
        else:
            known[check.id] = record.Claim(
                id=check.id,
                trainer=name,
                said=check.said,
                verdict=verdict,
                found=explanation,
                device=name_of(there),
                versions=f"torch {torch.__version__}",
                date=datetime.datetime.now(datetime.UTC).date().isoformat(),
            )
        record.save(known, out / "claims.json")
        write(out / "claims.md", record.page(known))
    tell(f"wrote {shown(out / 'claims.md')}", err=True)


def _answer(check: Any, setting: Any) -> tuple[str, str]:
    """Return the verdict and explanation of the check; UNMEASURED if memory runs out."""
    from suite.claims.record import UNMEASURED

    try:
        verdict, explanation = check.answer(setting)
    except (MemoryError, RuntimeError) as error:
        if (reason := out_of_memory(error)) is None:
            raise
        return UNMEASURED, reason
    return verdict, explanation
