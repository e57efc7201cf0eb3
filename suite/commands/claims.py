"""`perfsuite claims`."""

from __future__ import annotations

import datetime
from pathlib import Path

import click

from suite.commands.ending import in_one_line

FOLDER = ".perfsuite/claims"


@click.command()
@click.argument("name")
@click.option("--only", multiple=True, metavar="ID", help="This claim alone, e.g. C6; may be given several times.")
@click.option("--device", help="cpu, cuda or cuda:1.  [default: the GPU, if any]")
@click.option(
    "--out", type=click.Path(file_okay=False), default=FOLDER, show_default=True, help="Folder of claims.json and .md."
)
def claims(name: str, only: tuple[str, ...], device: str | None, out: str) -> None:
    """Measure what the source of trainer NAME claims, and say of each claim whether it holds.

    Writes claims.json and claims.md. What the folder's claims.json has of other claims stays.
    """
    with in_one_line("interrupted; what was measured by then is written"):
        _claims(name, only, device, Path(out))


def _claims(name: str, only: tuple[str, ...], device: str | None, out: Path) -> None:
    from suite import trainers

    checks, setting = trainers.checks_of(name)
    chosen = checks.chosen(only)
    import torch

    from perfsuite import machine
    from perfsuite.report.files import write
    from suite.claims import record
    from suite.commands.train import device_called

    there = device_called(device)
    found = machine.identify(prefer=there.type)
    known = record.load(out / "claims.json")
    given = setting(there)
    for check in chosen:
        click.echo(f"{check.id}: {check.said}", err=True)
        verdict, told = check.answer(given)
        known[check.id] = record.Claim(
            id=check.id,
            trainer=name,
            said=check.said,
            verdict=verdict,
            found=told,
            device=found.device_name if there.type == "cuda" else found.cpu,
            versions=f"torch {torch.__version__}",
            date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        )
        click.echo(f"  {verdict}: {told}", err=True)
        record.save(known, out / "claims.json")
        write(out / "claims.md", record.page(known))
    click.echo(f"wrote {out / 'claims.md'}", err=True)
