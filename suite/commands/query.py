"""The command `perfsuite query`."""

from __future__ import annotations

import json
from typing import NamedTuple

import click

from perfsuite.errors import PerfsuiteError
from perfsuite.option_types import NamedPath
from suite.commands.ending import in_one_line
from suite.commands.with_fields import WithFields
from suite.naming import escaped, shown, typed
from suite.terminal import tell


class Found(NamedTuple):
    """A passage: its rank, its distance in the learned metric, and its text."""

    rank: int
    distance: float
    passage: str


@click.command(cls=WithFields)
@click.argument("checkpoint", type=NamedPath())
@click.argument("text")
@click.option("-n", "count", type=click.IntRange(min=1), default=5, show_default=True, help="Passages to show.")
@click.option(
    "--passages",
    type=click.IntRange(min=1),
    default=2000,
    show_default=True,
    metavar="N",
    help="Most passages of the text that are searched, at even distances.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, a list of passages.")
@click.option("--device", help="cpu, cuda or cuda:1.  [default: the GPU, if any]")
@click.argument("fields", nargs=-1, type=click.UNPROCESSED, metavar="[--FIELD VALUE]...")
def query(
    checkpoint: str, text: str, count: int, passages: int, as_json: bool, device: str | None, fields: tuple[str, ...]
) -> None:
    """Find the passages that are nearest to TEXT in the geometry that trainer2 has learned.

    For example `perfsuite query .perfsuite/train/trainer2-optimized "open a file" -n 3`.

    CHECKPOINT is a file of trainer2, or the folder of a run. The command searches the text of the training; options
    such as --data and --cache replace fields of that training.
    """
    with in_one_line("interrupted", "free some, or name another --device"):
        _query(checkpoint, text, count, passages, as_json, device, fields)


def _query(
    checkpoint: str, text: str, count: int, most: int, as_json: bool, device: str | None, fields: tuple[str, ...]
) -> None:
    from suite.commands.train import device_called
    from suite.finding import checkpoint_of
    from suite.trainer2 import search

    text = typed(text)
    if not text.strip():
        raise PerfsuiteError("the query is empty; give some text")
    there = device_called(device)
    file, found = checkpoint_of(checkpoint, "trainer2")
    trainer = search.trainer_of(file, found.trainer, there)
    passages = search.Passages(search.data_of(found.configuration, fields), len(trainer.weights["embedding"]), most)
    tell(f"{passages.where}, by {shown(file)}", err=True)
    at = search.coordinates(trainer, passages.encoded(text))
    distances = search.costs(trainer, at, search.coordinates(trainer, passages.sequences))[0]
    nearest = distances.topk(min(count, len(distances)), largest=False)
    rows = [
        Found(rank, round(distance, 6), passages.decoded(row))
        for rank, (distance, row) in enumerate(
            zip(nearest.values.tolist(), nearest.indices.tolist(), strict=True), start=1
        )
    ]
    if as_json:
        tell(json.dumps([row._asdict() for row in rows], indent=1))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("rank", "distance", "passage", show_lines=True)
    for row in rows:
        table.add_row(str(row.rank), f"{row.distance:.4g}", escaped(" ".join(row.passage.split())))
    Console(width=120, markup=False).print(table)
