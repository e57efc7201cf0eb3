"""Measure the effect of λ: polychromic_tradeoff.py --out FILE [--weights λ ...] [--seeds N ...] [--config FILE] …

Trains the optimized trainer of polychromic for `--steps` steps with each λ and seed, and evaluates each on the held-out
examples: the loss, the diversity of five replies to each prompt, and the log-likelihood of those replies under the
model without its adapters. Other options are fields of the configuration, e.g. --model FOLDER --data FILE. FILE keeps
the finished runs, and the next call resumes after them. Several processes need a file each.

polychromic_tradeoff.py --show FILE ... prints a table of all runs, relative to λ = 0 with the same seed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from optimized.trainers.polychromic import Trainer  # noqa: E402
from perfsuite.errors import PerfsuiteError  # noqa: E402
from suite import configuration, trainers  # noqa: E402
from suite.commands.train import device_called, name_of  # noqa: E402
from suite.polychromic.data import load  # noqa: E402
from suite.polychromic.evaluation import quality  # noqa: E402
from suite.runtime.timing import synchronize  # noqa: E402

WEIGHTS = (0.0, 0.3, 1.0, 3.0)
METRICS = ("held_out_loss", "diversity", "log_likelihood")


def main() -> int:
    """Train and evaluate, or show; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--weights", nargs="+", type=float, default=list(WEIGHTS), metavar="λ")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--device")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--show", nargs="+", type=Path, default=[], metavar="FILE")
    asked, fields = parser.parse_known_args()
    try:
        if not asked.show:
            if asked.out is None:
                raise PerfsuiteError("--out: name the file that keeps what is measured")
            measure(asked, fields)
        show([run for path in asked.show or [asked.out] for run in read(path)])
    except PerfsuiteError as error:
        print(f"polychromic_tradeoff.py: {error}", file=sys.stderr)
        return 2
    return 0


def measure(asked: argparse.Namespace, fields: Sequence[str]) -> None:
    """Train with each λ and seed that the file lacks, and write the file after each run."""
    kinds = [trainers.config_of("polychromic"), trainers.data_config_of("polychromic")]
    config, data = configuration.read(kinds, asked.config, list(fields))
    device, given = device_called(asked.device), load(data).trainer_data
    if not given.validation:
        raise PerfsuiteError("validation: there is no held-out example; raise it, or give more data")
    about = {"device": name_of(device), "config": dataclasses.asdict(config), "data": dataclasses.asdict(data)}
    found = read(asked.out, about) if asked.out.exists() else []
    for seed in asked.seeds:
        for weight in asked.weights:
            if any((run["weight"], run["seed"]) == (weight, seed) for run in found):
                continue
            trainer = Trainer(dataclasses.replace(config, diversity=weight, seed=seed), given, device)
            began = time.perf_counter()
            for _ in range(config.steps):
                trainer.train_window({})
            synchronize(device)
            seconds = time.perf_counter() - began
            measured = quality(trainer, given)
            found.append({"weight": weight, "seed": seed, "steps": config.steps, "seconds": seconds, **measured})
            print(json.dumps(found[-1]), file=sys.stderr, flush=True)
            asked.out.write_text(json.dumps({**about, "runs": found}, indent=1) + "\n")


def read(path: Path, about: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
    """Read the runs of a file. PerfsuiteError if it holds none, or they have another device, configuration or data."""
    try:
        stored = json.loads(path.read_text())
        runs: list[dict[str, Any]] = stored["runs"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PerfsuiteError(f"{path} has no runs of this tool: {error}; name another file") from None
    expected = json.loads(json.dumps(about or {}))
    different = [name for name, value in expected.items() if stored.get(name) != value]
    if different:
        raise PerfsuiteError(f"{path} has runs of another {' and '.join(different)}; name another file")
    return runs


def show(runs: Sequence[Mapping[str, Any]]) -> None:
    """Print each λ's means over the seeds, and their relative change from those of λ = 0."""
    plain = {run["seed"]: run for run in runs if run["weight"] == 0}
    table = Table(title="means over seeds, and their change from λ = 0")
    for head in ("λ", "seeds", *METRICS):
        table.add_column(head, justify="right")
    for weight in sorted({run["weight"] for run in runs}):
        own = [run for run in runs if run["weight"] == weight]
        cells = []
        for metric in METRICS:
            changes = [
                (run[metric] - plain[run["seed"]][metric]) / abs(plain[run["seed"]][metric])
                for run in own
                if run["seed"] in plain
            ]
            change = f" ({100 * fmean(changes):+.1f}%)" if changes and weight else ""
            cells.append(f"{fmean(run[metric] for run in own):.4g}{change}")
        table.add_row(f"{weight:g}", str(len(own)), *cells)
    Console(width=110).print(table)


if __name__ == "__main__":
    sys.exit(main())
