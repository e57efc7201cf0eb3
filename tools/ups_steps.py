"""Time a step of ups: ups_steps.py DATA [--ranks N] [--only NAME ...] [--out FILE].

Times these variants: the source's settings before its phases, each phase added to those before it, the fastest
settings, the fastest settings with the same work as before, and smaller batches. All variants are in memory at once and
are timed in turn, in several rounds. The time of a round is that of the slowest rank. The tool also measures lower
bounds of the time: the matrix products of a step at the rate of a large product in bfloat16, the all-reduce of the
gradients alone, and a step's own collectives alone. It prints a table, and writes all figures as JSON. Each variant is
compiled first, for up to a minute. With --compile-only the tool ends there, and has filled PyTorch's caches.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from optimized.buckets import Bucket  # noqa: E402
from optimized.trainers.ups import Trainer as Optimized  # noqa: E402
from perfsuite.errors import PerfsuiteError  # noqa: E402
from reference.trainers.ups import Trainer as Reference  # noqa: E402
from suite import configuration, launching, trainers  # noqa: E402
from suite.commands.train import device_called, name_of  # noqa: E402
from suite.runtime import together  # noqa: E402
from suite.runtime.timing import synchronize  # noqa: E402
from suite.ups.batches import mixture_of  # noqa: E402
from suite.ups.config import OF_RANKS, TECHNIQUES, TRADES, TrainConfig  # noqa: E402
from suite.ups.networks import CODERS  # noqa: E402

ROUNDS, STEPS = 5, 12
"""Timed rounds, and steps per round. The number of steps is a multiple of every schedule's period."""
PROFILED = 4
"""Steps whose kernels are counted. The profiler takes seconds per step if there are many small kernels."""
KERNELS = 12
"""Number of kernels that are named, those with the most time."""
SIDE = 8192
"""Rows and columns of the matrices whose product gives the rate of products."""
PHASES: dict[str, Mapping[str, Any]] = {
    "1 compilation": {"compile": True},
    "2 checkpointing": {"activation_checkpoint": True, "batch_size": 16, "accumulation": 2},
    "3 inverse losses": {
        "inverse_loss_frequency": 4,
        "num_queries": 1024,
        "inverse_losses": True,
        "query_sampling": True,
    },
    "4 loader": {"num_workers": 12, "prefetch_factor": 2},
    "5 offload": {"cpu_offload_optimizer": True, "batch_size": 20},
    "6 precision": {"precision": "bf16"},
    "7 sharding": {"use_fsdp2": True, "batch_size": 24},
    "8 optimizers": {"fused_optimizers": True},
}
"""Each phase of the source → the settings that it changes."""
FAST: Mapping[str, Any] = {
    **dict.fromkeys((*TECHNIQUES, *OF_RANKS), True),
    **dict.fromkeys(TRADES, False),
    "precision": "bf16",
    "num_workers": 0,
    "batch_size": 24,
    "accumulation": 2,
    "inverse_loss_frequency": 4,
    "num_queries": 1024,
}
"""Settings of the fastest variant, on the source's schedule."""


def variants(before: TrainConfig, ranks: int) -> dict[str, tuple[Any, TrainConfig]]:
    """Return name → (trainer, configuration)."""
    found: dict[str, tuple[Any, TrainConfig]] = {"before": (Reference, before)}
    changes: dict[str, Any] = {}
    for name, phase in PHASES.items():
        if name.startswith("7") and ranks == 1:
            continue
        changes |= phase
        found[name] = (Optimized, dataclasses.replace(before, **changes))
    fast = dataclasses.replace(before, **FAST)
    found["fast"] = (Optimized, fast)
    same = {name: getattr(before, name) for name in ("inverse_loss_frequency", "num_queries")}
    examples = before.batch_size * before.accumulation
    found["same work as before"] = (Optimized, dataclasses.replace(fast, **same, batch_size=examples, accumulation=1))
    for size in (24, 8, 4):
        found[f"fast, {size} a step"] = (Optimized, dataclasses.replace(fast, batch_size=size, accumulation=1))
    if ranks > 1:
        for name in ("fast", "fast, 24 a step"):
            unshared = dataclasses.replace(found[name][1], shared_optimizer=False)
            found[f"{name}, each updates all"] = (Optimized, unshared)
    return found


class Timed:
    """A trainer whose steps are timed, in all ranks."""

    def __init__(self, kind: Any, config: TrainConfig, given: Any, device: torch.device) -> None:
        self.config, self.device = config, device
        began = time.perf_counter()
        self.trainer = kind(config, given, device)
        for _ in range(getattr(self.trainer, "settles", 1) + 1):
            self.trainer.train_window({})
        self.trainer.last_report()
        self.warm_s = time.perf_counter() - began
        self.examples = config.batch_size * config.accumulation * given.ranks
        self.seconds: list[float] = []

    def round(self, here: together.Place) -> None:
        """Time a round of steps."""
        meet(here, self.device)
        began = time.perf_counter()
        for _ in range(STEPS):
            self.trainer.train_window({})
        synchronize(self.device)
        spent = torch.tensor((time.perf_counter() - began) / STEPS, dtype=torch.float64)
        if here.ranks > 1:
            dist.all_reduce(spent, op=dist.ReduceOp.MAX)
        self.seconds.append(float(spent))

    def peak(self) -> int | None:
        """Return the peak bytes of a round of steps beyond those allocated before, plus the trainer's own tensors."""
        if self.device.type != "cuda":
            return None
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        for _ in range(STEPS):
            self.trainer.train_window({})
        synchronize(self.device)
        state = self.trainer.state_dict()
        own = sum(t.numel() * t.element_size() for t in _tensors(state))
        return torch.cuda.max_memory_allocated(self.device) - before + own

    def kernels(self) -> dict[str, Any]:
        """Return the device's busy seconds and number of kernels per step, and the seconds of the longest kernels."""
        if self.device.type != "cuda":
            return {}
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities, acc_events=True) as profile:
            for _ in range(PROFILED):
                self.trainer.train_window({})
            synchronize(self.device)
        rows = profile.key_averages()
        longest = sorted(rows, key=lambda row: -row.self_device_time_total)[:KERNELS]
        return {
            "busy_s": sum(row.self_device_time_total for row in rows) / 1e6 / PROFILED,
            "kernels": sum(row.count for row in rows) / PROFILED,
            "longest": {
                row.key: [row.self_device_time_total / 1e6 / PROFILED, row.count / PROFILED] for row in longest
            },
        }

    def row(self) -> dict[str, Any]:
        """Return all figures."""
        found: dict[str, Any] = {"batch_size": self.config.batch_size, "accumulation": self.config.accumulation}
        found |= {"seconds": self.seconds, "examples": self.examples, "warm_s": self.warm_s, "peak_bytes": self.peak()}
        return found | self.kernels()


def _tensors(value: Any) -> list[torch.Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]


def meet(here: together.Place, device: torch.device) -> None:
    """Wait for the device, and for all ranks."""
    synchronize(device)
    if here.ranks > 1:
        dist.all_reduce(torch.zeros(()))


def mean_of(device: torch.device, call: Callable[[], object], count: int) -> float:
    """Return the mean seconds of a call over `count` calls in a row, after three calls that are not timed."""
    for _ in range(3):
        call()
    synchronize(device)
    began = time.perf_counter()
    for _ in range(count):
        call()
    synchronize(device)
    return (time.perf_counter() - began) / count


def communicate(buckets: Sequence[Bucket]) -> None:
    """Run all collectives of a step with all groups of weights."""
    for begin, end in ((Bucket.reduce, Bucket.wait), (Bucket.send, Bucket.receive)):
        for call in (begin, end):
            for bucket in buckets:
                call(bucket)


def floors(timed: Mapping[str, Timed], here: together.Place, device: torch.device) -> dict[str, Any]:
    """Measure the lower bounds of a step's time: the rate of products, a step's FLOPs, and its collectives."""
    found: dict[str, Any] = {}
    if device.type == "cuda":
        a = torch.randn(SIDE, SIDE, device=device, dtype=torch.bfloat16)
        found["products_per_s"] = 2 * SIDE**3 / mean_of(device, lambda: a @ a, 30)
    fast = timed.get("fast")
    if fast is not None:
        given = [fast.trainer._given(fast.trainer.source.batch(number)) for number in (0, 1)]
        flops = []
        fast.trainer._has_parts = lambda: False  # count the operator as a whole
        for micro in given:
            with FlopCounterMode(display=False) as counter, torch.enable_grad():
                loss, _ = fast.trainer._loss(micro)
                groups = [own for name, own in fast.trainer.groups.items() if name != CODERS or micro["inverse"]]
                torch.autograd.grad(loss, [fast.trainer.weights[name] for own in groups for name in own])
            flops.append(counter.get_total_flops())
        del fast.trainer._has_parts
        found["flops_with_inverse"], found["flops_without"] = flops
        if here.ranks > 1:
            found["all_reduce_bytes"] = fast.trainer.gradients.nbytes
            buffer = torch.zeros(found["all_reduce_bytes"] // 4, device=device)
            found["all_reduce_s"] = mean_of(device, lambda: dist.all_reduce(buffer), 30)
            found["collectives_s"] = mean_of(device, lambda: communicate(fast.trainer.gradients.buckets), 30)
    return found


def measured(options: argparse.Namespace, here: together.Place) -> dict[str, Any] | None:
    """Return all figures of this process; None with --compile-only."""
    device = device_called(together.device_of(here, options.device))
    kinds = [trainers.config_of("ups"), trainers.data_config_of("ups")]
    config = options.config or str(ROOT / f"configs/ups/{min(here.ranks, 4)}gpu_baseline.yaml")
    before, data = configuration.read(kinds, config, ["--data", options.data] if options.data != "none" else [])
    with together.joined(here, device):
        given = mixture_of(data, here.rank, here.ranks)
        chosen = {n: v for n, v in variants(before, here.ranks).items() if not options.only or n in options.only}
        timed = {}
        for name, (kind, changed) in chosen.items():
            timed[name] = Timed(kind, changed, given, device)
            if here.first:
                Console(stderr=True).print(f"{name}: warm after {timed[name].warm_s:.1f} s")
        if options.compile_only:
            return None
        for number in range(ROUNDS):
            for name in list(timed)[:: 1 if number % 2 else -1]:
                timed[name].round(here)
        if here.first:
            steps = ", ".join(f"{name} {1e3 * median(one.seconds):.2f} ms" for name, one in timed.items())
            Console(stderr=True).print(steps)
            if options.out:  # the rest can take minutes, and may be cut off
                Path(options.out).write_text(json.dumps({name: one.seconds for name, one in timed.items()}) + "\n")
        found = {"floors": floors(timed, here, device), "rows": {name: one.row() for name, one in timed.items()}}
        meet(here, device)
    return {"device": name_of(device), "torch": torch.__version__, "ranks": here.ranks, **found}


def table(found: Mapping[str, Any]) -> Table:
    """Return a table with a row for each variant."""
    made = Table("settings", "batch", "step", "examples/s", "against before", "device busy", "kernels", "memory")
    rate = {name: row["examples"] / median(row["seconds"]) for name, row in found["rows"].items()}
    for name, row in found["rows"].items():
        step = median(row["seconds"])
        busy = f"{100 * row['busy_s'] / step:.0f}%" if "busy_s" in row else "–"
        peak = f"{row['peak_bytes'] / 1e9:.1f} GB" if row["peak_bytes"] is not None else "–"
        against = f"{rate[name] / rate['before']:.2f}×" if "before" in rate else "–"
        batch = f"{row['batch_size']} × {row['accumulation']}"
        kernels = f"{row['kernels']:.0f}" if "kernels" in row else "–"
        made.add_row(name, batch, f"{1e3 * step:.2f} ms", f"{rate[name]:.0f}", against, busy, kernels, peak)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="folder of PDEBench's files; none: fields made in memory")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--config", help="the settings before, in YAML")
    parser.add_argument("--only", action="append", help="a row's name; repeatable")
    parser.add_argument("--device")
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--out", help="JSON file")
    options = parser.parse_args()
    here = together.place()
    try:
        if options.ranks > 1 and here.ranks == 1:
            sys.exit(launching.launch([sys.executable, *sys.argv], options.ranks))
        found = measured(options, here)
    except PerfsuiteError as error:
        sys.exit(f"Error: {error}" if str(error) else 1)
    if here.first and found:
        Console(width=140).print(table(found))
        if options.out:
            Path(options.out).write_text(json.dumps(found, indent=1) + "\n")
    together.leave(here, 0)


if __name__ == "__main__":
    main()
