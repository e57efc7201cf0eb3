"""The command `perfsuite predict`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from perfsuite.option_types import NamedPath
from suite.commands.ending import in_one_line
from suite.naming import shown
from suite.terminal import tell


@click.command()
@click.argument("recordings", nargs=-1, required=True, type=NamedPath(), metavar="RECORDING...")
@click.option("--checkpoint", type=NamedPath(), required=True, help="A file of leak_cnn, or the folder of a run.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, a list of all pieces.")
@click.option("--device", help="cpu, cuda or cuda:1.  [default: the GPU, if any]")
def predict(recordings: tuple[str, ...], checkpoint: str, as_json: bool, device: str | None) -> None:
    """Classify each 10 s of WAV or FLAC recordings as leak or no leak, with a network that leak_cnn has trained.

    For example `perfsuite predict --checkpoint .perfsuite/train/leak_cnn-optimized pipe.wav`.

    The command prints the verdict, the probability of LEAK, and the probability of each class. A piece is a leak if at
    least half of its windows of 0.25 s reach the threshold of the training. Shorter recordings are repeated.
    """
    with in_one_line("interrupted", "free some, or name another --device"):
        from suite.commands.train import device_called
        from suite.finding import checkpoint_of
        from suite.leak_cnn.classes import CLASSES
        from suite.leak_cnn.trained import sound_of, trained_of

        there = device_called(device)
        file, found = checkpoint_of(checkpoint, "leak_cnn")
        trained = trained_of(file, found.trainer, there)
        sounds = [sound_of(Path(name)) for name in recordings]  # read all files before anything is printed
        judged = [
            (name, piece) for name, sound in zip(recordings, sounds, strict=True) for piece in trained.judged(sound)
        ]
        if as_json:
            rows = [
                {**piece._asdict(), "recording": name, "classes": dict(zip(CLASSES, piece.classes, strict=True))}
                for name, piece in judged
            ]
            tell(json.dumps(rows, indent=1))
            return
        from rich.console import Console
        from rich.table import Table

        table = Table()
        table.add_column("recording", overflow="fold")
        for head in ("seconds", "verdict", "P(leak)", *CLASSES):
            table.add_column(head, justify="left" if head == "verdict" else "right", no_wrap=True)
        for name, piece in judged:
            shares = [f"{share:.2f}" for share in piece.classes]
            seconds = f"{piece.begin:g} to {piece.end:.4g}"
            verdict = "leak" if piece.leak else "no leak"
            table.add_row(shown(name), seconds, verdict, f"{piece.probability:.2f}", *shares)
        Console(width=140, markup=False).print(table)
