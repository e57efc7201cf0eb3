"""Time a step of polychromic: polychromic_steps.py [--config FILE] [--sides NAME ...] [--out FILE].

Times the reference trainer, the optimized one, and a conventional set-up of transformers and PEFT in turn, on the same
examples: --rounds rounds of one step each, after --warm steps of each trainer. Any field of the configuration is an
option too, e.g. --model FOLDER --data FILE. Prints a table, and writes all figures as JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from optimized.trainers.polychromic import Trainer as Optimized  # noqa: E402
from perfsuite.errors import PerfsuiteError  # noqa: E402
from reference.trainers.polychromic import Trainer as Reference  # noqa: E402
from suite import configuration, trainers  # noqa: E402
from suite.commands.train import device_called, name_of  # noqa: E402
from suite.polychromic.config import without_techniques  # noqa: E402
from suite.polychromic.conventional import Conventional  # noqa: E402
from suite.polychromic.data import load  # noqa: E402
from suite.runtime.timing import synchronize  # noqa: E402

SIDES = {"reference": Reference, "conventional": Conventional, "optimized": Optimized}


class Timed:
    """A side whose steps are timed."""

    def __init__(self, kind: Any, config: Any, given: Any, device: torch.device, warm: int) -> None:
        self.device = device
        before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        began = time.perf_counter()
        self.side = kind(without_techniques(config) if kind is Reference else config, given, device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        for _ in range(warm):
            self.side.train_window({})
        synchronize(device)
        self.warm_s = time.perf_counter() - began
        self.peak = torch.cuda.max_memory_allocated(device) - before if device.type == "cuda" else None
        self.seconds: list[float] = []

    def step(self) -> None:
        """Time a step."""
        synchronize(self.device)
        began = time.perf_counter()
        self.side.train_window({})
        synchronize(self.device)
        self.seconds.append(time.perf_counter() - began)


def main() -> int:
    """Parse the command line and time the sides; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--sides", nargs="+", choices=list(SIDES), default=list(SIDES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warm", type=int, default=2, help="steps of each side before it is timed")
    parser.add_argument("--device")
    parser.add_argument("--out", type=Path)
    given, fields = parser.parse_known_args()
    try:
        return measure(given, fields)
    except PerfsuiteError as error:
        print(f"polychromic_steps.py: {error}", file=sys.stderr)
        return 2


def measure(asked: argparse.Namespace, fields: list[str]) -> int:
    """Time the sides in turn, and print the table; return the exit code."""
    kinds = [trainers.config_of("polychromic"), trainers.data_config_of("polychromic")]
    config, data = configuration.read(kinds, asked.config, fields)
    device = device_called(asked.device)
    given = load(data).trainer_data
    timed = {}
    for name in asked.sides:
        timed[name] = Timed(SIDES[name], config, given, device, asked.warm)
        print(
            f"{name}: {asked.warm} steps and all compilation in {timed[name].warm_s:.1f} s", file=sys.stderr, flush=True
        )
    for number in range(asked.rounds):
        for name in asked.sides if number % 2 else asked.sides[::-1]:
            timed[name].step()
    found = {
        name: {"seconds": side.seconds, "warm_s": side.warm_s, "peak_bytes": side.peak} for name, side in timed.items()
    }
    slowest = median(timed[asked.sides[0]].seconds)
    table = Table(title=f"a step of {config.examples} examples, {name_of(device)}, model {data.model}")
    for head in ("side", "a step", f"against {asked.sides[0]}", "peak memory"):
        table.add_column(head, justify="left" if head == "side" else "right")
    for name, side in timed.items():
        memory = f"{side.peak / 2**30:.1f} GiB" if side.peak is not None else "–"
        table.add_row(name, f"{median(side.seconds):.4g} s", f"{slowest / median(side.seconds):.3g}×", memory)
    Console(width=100).print(table)
    if asked.out is not None:
        about = {"device": name_of(device), "config": dataclasses.asdict(config), "data": dataclasses.asdict(data)}
        asked.out.write_text(json.dumps({**about, "sides": found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
