"""Time an epoch of leak_cnn: leak_cnn_epochs.py DATA [--device D] [--rounds N] [--out DIR].

Compares the reference trainer, the source's original set-up, the optimized trainer in float32 and in bfloat16, and a
good conventional set-up, which is chosen from a small grid of loading and compilation options. First each set-up of the
grid is timed alone. Its best three are then timed interleaved with the other trainers, without validation. Validation
is measured separately: epochs with and without it, and the evaluation of the files alone. The first epochs of some
trainers run in a process of their own with empty compiler caches. They show after how many epochs compilation pays off,
and how much memory it uses. The tool prints tables, and writes them with all times to DIR.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from optimized.trainers.leak_cnn import Trainer as Optimized  # noqa: E402
from reference.evaluation.file_level_eval import file_level_eval  # noqa: E402
from reference.trainers.leak_cnn import Trainer as Reference  # noqa: E402
from suite.ablation import mean, paired  # noqa: E402
from suite.leak_cnn.config import TrainConfig, without_techniques  # noqa: E402
from suite.leak_cnn.conventional import AS_SOURCE, Conventional, SetUp  # noqa: E402
from suite.leak_cnn.dataset import LeakAudio, open_data  # noqa: E402

LOADING = [(0, 2), *((workers, prefetch) for workers in (4, 8, 12) for prefetch in (2, 4))]
GRID = [
    *(SetUp(where="memory", workers=w, prefetch=p) for w, p in LOADING),
    *(SetUp(where="file", workers=w, prefetch=4) for w in (0, 8, 12)),
    *(SetUp(where="batches", workers=w, prefetch=4) for w in (0, 4)),
    SetUp(where="memory", workers=8, prefetch=4, mode="default"),
    SetUp(where="memory", workers=8, prefetch=4, mode=None),
    SetUp(where="batches", workers=0, mode="default"),
]
BEST = 3
FIRST = "first_epoch"


OWN = {
    "reference": (Reference, {}, False),
    "optimized, all off": (Optimized, {}, False),
    "optimized, float32": (Optimized, {}, True),
    "optimized, float32, eager": (Optimized, {"use_compile": False}, True),
    "optimized": (Optimized, {"autocast_bf16": True}, True),
    "optimized, eager": (Optimized, {"autocast_bf16": True, "use_compile": False}, True),
}
"""Name → (trainer, fields, whether its techniques are on). "eager" has the Triton kernels but no torch.compile."""
CUDNN = {"use_compile": False, "conv_relu_pool": False}
ALONE = {
    "optimized, cuDNN": (Optimized, CUDNN, True),
    "optimized, cuDNN autotuned": (Optimized, {**CUDNN, "cudnn_autotune": True}, True),
}
"""Arms for which only the first epochs are timed. In one process cuDNN gives both what the first of them found."""
JUDGING = {
    "reference": OWN["reference"],
    "optimized, file by file": (Optimized, {"autocast_bf16": True, "file_level_eval": False}, True),
    "optimized": OWN["optimized"],
}
"""Arms whose validation is timed."""


def built(name: str, data: LeakAudio, device: str, config: TrainConfig) -> Any:
    """Build the trainer of that name."""
    every = {**OWN, **ALONE, **JUDGING}
    if name not in every:
        set_up = next(s for s in (AS_SOURCE, *GRID) if str(s) == name)
        return Conventional(dataclasses.replace(config, autocast_bf16=True), data, device, set_up)
    kind, fields, techniques = every[name]
    config = dataclasses.replace(config if techniques else without_techniques(config), **fields)
    return kind(config, data, device)


class Arm:
    """A trainer whose epochs are timed, each until the device has finished."""

    def __init__(self, name: str, data: LeakAudio, device: str, config: TrainConfig) -> None:
        self.name, self.device, self.epoch = name, device, 0
        self.trainer = built(name, data, device, config)

    def seconds(self) -> float:
        """Train the next epoch, and return its seconds."""
        began = time.perf_counter()
        self.trainer.train_window({"epoch": torch.tensor(self.epoch)})
        if self.device != "cpu":
            torch.cuda.synchronize()
        self.epoch += 1
        return time.perf_counter() - began

    def close(self) -> None:
        """End the trainer's workers."""
        for owner in (self.trainer, getattr(self.trainer, "_loader", None)):
            if owner is not None and hasattr(owner, "close"):
                owner.close()


@contextmanager
def arm(name: str, data: LeakAudio, device: str, config: TrainConfig) -> Iterator[Arm]:
    """Yield an arm, and close it at the end."""
    made = Arm(name, data, device, config)
    try:
        yield made
    finally:
        made.close()


def first_epoch(name: str, path: str, device: str, config: TrainConfig) -> dict[str, float]:
    """Return the seconds of building the trainer and of its first epochs, and the peak memory in bytes.

    Nothing is compiled before.
    """
    if device != "cpu":
        torch.zeros(1, device=device)  # create the device's context, which does not count for the trainer
    data = open_data(path)
    began = time.perf_counter()
    with arm(name, data, device, config) as found:
        made = time.perf_counter() - began
        first = found.seconds()
        later = [found.seconds() for _ in range(6)]
        peak = torch.cuda.max_memory_allocated() if device != "cpu" else 0
        held = torch.cuda.max_memory_reserved() if device != "cpu" else 0
    times = {"build": made, "first": first, "second": later[0], "later": statistics.median(later[2:])}
    return {**times, "peak_bytes": peak, "reserved_bytes": held}


def in_own_process(name: str, path: str, device: str, config: TrainConfig) -> dict[str, float]:
    """Run `first_epoch` in a process of its own, with empty compiler caches."""
    with tempfile.TemporaryDirectory() as folder:
        caches = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}
        options = ["--device", device, "--batch_size", str(config.batch_size), "--first", name]
        command = [sys.executable, __file__, path, *options]
        done = subprocess.run(command, env={**os.environ, **caches}, stdout=subprocess.PIPE, check=True, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def grid(data: LeakAudio, device: str, config: TrainConfig, epochs: int = 5) -> dict[str, float]:
    """Return set-up → median seconds of an epoch. Each is timed alone, without its first two epochs."""
    found = {}
    for set_up in GRID:
        with arm(str(set_up), data, device, config) as made:
            times = [made.seconds() for _ in range(2 + epochs)]
        found[str(set_up)] = statistics.median(times[2:])
        print(f"{set_up}: {1e3 * found[str(set_up)]:.1f} ms", file=sys.stderr, flush=True)
    return found


def interleaved(
    names: list[str], data: LeakAudio, device: str, config: TrainConfig, rounds: int
) -> dict[str, list[float]]:
    """Return arm → seconds of an epoch in each round."""
    made = [Arm(name, data, device, config) for name in names]
    try:
        for one in made:
            for _ in range(2 if one.name in ("reference", "optimized, all off") else 5):
                one.seconds()
        times = [[one.seconds() for one in made] for _ in range(rounds)]
        return {one.name: list(own) for one, own in zip(made, zip(*times, strict=True), strict=True)}
    finally:
        for one in made:
            one.close()


def judged(data: LeakAudio, device: str, config: TrainConfig, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return arm → "without" and "with" validation → seconds of an epoch in each round.

    The reference also has "files": the seconds of evaluating the files alone.
    """
    every = dataclasses.replace(config, validate_every=1)
    made = {
        (name, how): Arm(name, data, device, own)
        for name in JUDGING
        for how, own in (("without", config), ("with", every))
    }
    files = data.read("validation").by_file()[0].to(device)
    plain = made["reference", "with"].trainer

    def alone() -> float:
        began = time.perf_counter()
        with torch.no_grad():
            file_level_eval(plain._logits, files.to(plain.dtype), config.threshold)  # returns its results to the host
        return time.perf_counter() - began

    try:
        for (name, _), one in made.items():
            for _ in range(2 if name == "reference" else 5):
                one.seconds()
        alone()
        found: dict[str, dict[str, list[float]]] = {name: {} for name in JUDGING}
        for _ in range(rounds):
            for (name, how), one in made.items():
                found[name].setdefault(how, []).append(one.seconds())
            found["reference"].setdefault("files", []).append(alone())
        return found
    finally:
        for one in made.values():
            one.close()


def tables(found: dict[str, Any]) -> Iterator[Table]:
    """Yield the figures as tables."""
    table = Table(
        "an epoch", "median", "segments a second", "reference over it", "best conventional over it", title="interleaved"
    )
    times = found["interleaved"]
    rival = min((n for n in times if n in found["grid"]), key=lambda n: statistics.median(times[n]))
    for name, seconds in times.items():
        found_ratios = [paired(times[base], seconds) for base in ("reference", rival)]
        ratios = [f"{r.value:.2f}× ({r.low:.2f}–{r.high:.2f})" for r in found_ratios]
        median = statistics.median(seconds)
        table.add_row(name, f"{1e3 * median:.2f} ms", f"{found['segments'] / median:,.3g}", *ratios)
    yield table
    table = Table(
        "validation", "an epoch", "with validation", "the files alone", "share of an epoch with it", title="apart"
    )
    for name, own in found["judged"].items():
        share = mean([100 * (1 - a / b) for a, b in zip(own["without"], own["with"], strict=True)])
        cells = [f"{1e3 * statistics.median(own[k]):.2f} ms" if k in own else "" for k in ("without", "with", "files")]
        table.add_row(name, *cells, f"{share[0]:.1f}% ({share[0] - share[1]:.1f}–{share[0] + share[1]:.1f})")
    yield table
    table = Table("conventional", "an epoch", title="grid, each alone")
    for name, median in sorted(found["grid"].items(), key=lambda item: item[1]):
        table.add_row(name, f"{1e3 * median:.1f} ms")
    yield table
    table = Table(
        "",
        "built",
        "first epoch",
        "second",
        "later",
        "peak memory",
        "reserved",
        title="from nothing, no compiler's cache",
    )
    for name, own in found["first"].items():
        times = [f"{own[k]:.3f} s" for k in ("build", "first", "second", "later")]
        table.add_row(name, *times, *(f"{own[k] / 1e9:.2f} GB" for k in ("peak_bytes", "reserved_bytes")))
    yield table


def main() -> int:
    """Parse the command line and run; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--batch_size", type=int, default=TrainConfig.batch_size)
    parser.add_argument("--first", metavar="ARM", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path(".perfsuite/leak_cnn_epochs"))
    given = parser.parse_args()
    config = TrainConfig(batch_size=given.batch_size, validate_every=0)
    if given.first:
        print(json.dumps(first_epoch(given.first, given.data, given.device, config)))
        return 0
    given.out.mkdir(parents=True, exist_ok=True)
    data = open_data(given.data)
    found: dict[str, Any] = {"torch": torch.__version__, "data": data.digest}
    found["grid"] = grid(data, given.device, config)
    best = sorted(found["grid"], key=found["grid"].__getitem__)[:BEST]
    found["segments"] = data.segments("train") // config.batch_size * config.batch_size
    found["interleaved"] = interleaved([*OWN, str(AS_SOURCE), *best], data, given.device, config, given.rounds)
    found["judged"] = judged(data, given.device, config, given.rounds)
    alone = ("reference", "optimized", "optimized, eager", best[0], *ALONE)
    found["first"] = {name: in_own_process(name, given.data, given.device, config) for name in alone}
    if given.device != "cpu":
        found["device"] = torch.cuda.get_device_name()
    (given.out / "epochs.json").write_text(json.dumps(found, indent=1))
    with (given.out / "epochs.txt").open("w") as file:
        for console in (Console(width=140), Console(file=file, width=140)):
            for table in tables(found):
                console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
