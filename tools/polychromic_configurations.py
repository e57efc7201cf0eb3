"""Compare polychromic's configurations: polychromic_configurations.py CONFIG ... [--out FILE] [--FIELD VALUE].

Trains the optimized trainer with each configuration file in turn, for --steps steps or --seconds seconds, whichever
ends first, after --warm steps. Other fields apply to all of them, e.g. --model 135m --synthetic 200. Prints a table and
writes all figures as JSON:

  step          median seconds of a step
  memory        peak of the allocated GPU memory
  device busy   seconds in kernels / seconds of a step, from profiled steps
  kernels       launches of a step, and their seconds
  bandwidth     bytes of weights that a step with batched generation must read / seconds of a step / the bandwidth of a
                large copy: each new token reads all weights once, and the prompts, the examples and the replies read
                them once forward and, where they are differentiated, once backward
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from optimized.trainers.polychromic import Trainer  # noqa: E402
from perfsuite.errors import PerfsuiteError  # noqa: E402
from suite import configuration, trainers  # noqa: E402
from suite.commands.train import device_called, name_of  # noqa: E402
from suite.polychromic.config import TrainConfig  # noqa: E402
from suite.polychromic.data import load  # noqa: E402
from suite.runtime.timing import synchronize  # noqa: E402

COPIED = 1 << 30
"""Bytes of the copy that gives the bandwidth."""
OUTSIDE_DECODING = 5
"""Times that a step reads the weights outside decoding: for the prompts, and in two forward and backward passes."""


def main() -> int:
    """Measure and print; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", nargs="+", type=Path, metavar="CONFIG")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=120.0, help="end a configuration after so many")
    parser.add_argument("--warm", type=int, default=3)
    parser.add_argument("--profiled", type=int, default=2, help="steps whose kernels are counted")
    parser.add_argument("--device")
    parser.add_argument("--out", type=Path)
    asked, fields = parser.parse_known_args()
    try:
        return measure(asked, fields)
    except PerfsuiteError as error:
        print(f"polychromic_configurations.py: {error}", file=sys.stderr)
        return 2


def measure(asked: argparse.Namespace, fields: Sequence[str]) -> int:
    """Train with each configuration, and print the table; return the exit code."""
    kinds = [trainers.config_of("polychromic"), trainers.data_config_of("polychromic")]
    device = device_called(asked.device)
    rows: dict[str, dict[str, Any]] = {}
    found = {"device": name_of(device), "torch": torch.__version__, "bandwidth": bandwidth(device), "rows": rows}
    for path in asked.configs:
        config, data = configuration.read(kinds, path, list(fields))
        rows[path.stem] = {
            "config": dataclasses.asdict(config),
            **trained(config, load(data).trainer_data, device, asked),
        }
        print(f"{path.stem}: {median(rows[path.stem]['seconds']):.4g} s a step", file=sys.stderr, flush=True)
        if asked.out is not None:  # the next configuration may run out of time or memory
            asked.out.write_text(json.dumps(found, indent=1) + "\n")
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    Console(width=120).print(table(found))
    return 0


def trained(config: TrainConfig, given: Any, device: torch.device, asked: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of one configuration."""
    trainer = Trainer(config, given, device)
    for _ in range(asked.warm):
        trainer.train_window({})
    synchronize(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds: list[float] = []
    while len(seconds) < asked.steps and sum(seconds) < asked.seconds:
        began = time.perf_counter()
        trainer.train_window({})
        synchronize(device)
        seconds.append(time.perf_counter() - began)
    weights = sum(p.numel() * p.element_size() for p in trainer.model.parameters() if not p.requires_grad)
    if not trainer.model.shape.tied:  # a step reads only some rows of the embedding
        embedding = trainer.model.model.embed_tokens.weight
        weights -= embedding.numel() * embedding.element_size()
    found: dict[str, Any] = {"seconds": seconds, "weight_bytes": weights * (config.new_tokens - 1 + OUTSIDE_DECODING)}
    if device.type == "cuda":
        found["peak_bytes"] = torch.cuda.max_memory_allocated(device)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
            for _ in range(asked.profiled):
                trainer.train_window({})
            synchronize(device)
        events = profile.key_averages()
        found["busy_s"] = sum(event.self_device_time_total for event in events) / 1e6 / asked.profiled
        found["kernels"] = sum(event.count for event in events) / asked.profiled
    return found


def bandwidth(device: torch.device) -> float | None:
    """Return the bytes that a large copy reads and writes per second; None on a CPU."""
    if device.type != "cuda":
        return None
    source = torch.empty(COPIED, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(3):
        target.copy_(source)
    begin.record()
    for _ in range(10):
        target.copy_(source)
    end.record()
    synchronize(device)
    return 20 * COPIED / (begin.elapsed_time(end) / 1e3)


def table(found: Mapping[str, Any]) -> Table:
    """Return a table with a row for each configuration."""
    made = Table(title=f"polychromic's configurations, {found['device']}")
    for head in ("configuration", "steps", "step", "memory", "device busy", "kernels", "in kernels", "bandwidth"):
        made.add_column(head, justify="left" if head == "configuration" else "right")
    for name, row in found["rows"].items():
        step = median(row["seconds"])
        cells = ["–"] * 5
        if "busy_s" in row:
            cells = [
                f"{row['peak_bytes'] / 2**30:.1f} GiB",
                f"{100 * row['busy_s'] / step:.0f}%",
                f"{row['kernels']:,.0f}",
                f"{row['busy_s']:.3g} s",
                f"{100 * row['weight_bytes'] / step / found['bandwidth']:.1f}%",
            ]
        made.add_row(name, str(len(row["seconds"])), f"{step:.4g} s", *cells)
    return made


if __name__ == "__main__":
    sys.exit(main())
