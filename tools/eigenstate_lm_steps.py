"""What a step of eigenstate_lm takes: eigenstate_lm_steps.py [--device D] [--steps N] [--length T] [--out DIR].

The optimized trainer at the source's size, and at the two larger ones, in each precision and with what trades time for
memory; and the reference trainer at shorter texts, from whose times a step of the whole length is extrapolated. Random
tokens. Prints tables, and writes them with all times to DIR.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import sys
import time
from pathlib import Path
from statistics import fmean, linear_regression
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from optimized.trainers import eigenstate_lm as optimized  # noqa: E402
from perfsuite import PerfsuiteError  # noqa: E402
from reference.trainers.eigenstate_lm import Trainer as Reference  # noqa: E402
from suite.eigenstate_lm.config import TrainConfig  # noqa: E402
from suite.eigenstate_lm.data import Data, Text, text_of  # noqa: E402
from suite.eigenstate_lm.model import VOCABULARY  # noqa: E402

BF16 = {"autocast_bf16": True}
MEDIUM = {"width": 1536, "layers": 12, "eigenstates": 192}
LARGE = {"width": 2048, "layers": 16, "eigenstates": 256, "batch_size": 2}
ROWS: dict[str, dict[str, Any]] = {
    "small, bfloat16": BF16,
    "the same, four micro-batches a step": {**BF16, "accumulation": 4},
    "the same, made ahead by workers": {**BF16, "accumulation": 4, "loader": True},
    "small, bfloat16, without dropout": {**BF16, "dropout": 0.0},
    "small, bfloat16, not compiled": {**BF16, "use_compile": False},
    "small, bfloat16, recomputed": {**BF16, "activation_checkpoint": True},
    "small, float16": {"autocast_fp16": True},
    "small, TF32": {"tf32": True},
    "small, float32": {},
    "small, float32, recomputed": {"activation_checkpoint": True},
    "small, bfloat16, eight sequences": {**BF16, "batch_size": 8},
    "medium, bfloat16": {**BF16, **MEDIUM},
    "large, bfloat16": {**BF16, **LARGE},
    "large, bfloat16, recomputed": {**BF16, **LARGE, "activation_checkpoint": True},
    "small, bfloat16, as many sequences as are too many": {**BF16, "batch_size": 20},
}
SHORT = (512, 1024, 2048)
"""Lengths at which the reference is timed."""
WARM = 2


def text(length: int) -> Text:
    return text_of(Data(synthetic=20, vocabulary=VOCABULARY, sequence_length=length))


def timed(kind: Any, config: TrainConfig, device: str, steps: int) -> dict[str, float]:
    """Seconds of each step after the first ones, and what is said of them."""
    optimized._compiled.cache_clear()
    torch._dynamo.reset()
    gc.collect()
    cuda = torch.device(device).type == "cuda"
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    trainer = kind(config, text(config.sequence_length), device)
    for _ in range(WARM):
        trainer.train_window({})
    trainer.last_report()
    first = time.perf_counter() - began
    seconds = []
    for _ in range(steps):
        began = time.perf_counter()
        trainer.train_window({})
        trainer.last_report()
        seconds.append(time.perf_counter() - began)
    most = trainer.throughput._most
    found = {"seconds": fmean(seconds), "tokens_per_second": config.tokens / fmean(seconds), "warm_seconds": first}
    if cuda:
        found["mfu"] = found["tokens_per_second"] * config.flops() / most
        found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--length", type=int, default=32768)
    parser.add_argument("--only", nargs="*", help="rows whose names contain one of these")
    parser.add_argument("--out", type=Path, default=Path(".perfsuite/eigenstate_lm"))
    given = parser.parse_args()
    if given.length <= SHORT[1]:
        parser.error(f"--length must be above {SHORT[1]}: the reference is timed at shorter ones")
    console = Console()
    plain = dataclasses.replace(TrainConfig(), accumulation=1, sequence_length=given.length)
    rows: dict[str, Any] = {}
    for name, fields in ROWS.items():
        if given.only and not any(part in name for part in given.only):
            continue
        config = dataclasses.replace(plain, **fields)
        try:
            rows[name] = timed(optimized.Trainer, config, given.device, given.steps)
        except PerfsuiteError as error:
            rows[name] = {"told": str(error)}
        console.print(name, rows[name])
    short = []
    for length in [n for n in SHORT if n < given.length]:
        config = dataclasses.replace(plain, sequence_length=length)
        short.append((length, timed(Reference, config, given.device, 1)["seconds"]))
        console.print("reference", *short[-1])
    slope, base = linear_regression(*zip(*short, strict=True))
    whole = base + slope * given.length
    told = {"rows": rows, "reference": short, "reference_whole": whole, "torch": torch.__version__}
    told["device"] = torch.cuda.get_device_name() if given.device != "cpu" else "cpu"
    table = Table("", "a step", "tokens/s", "MFU", "peak memory", "reference over it")
    for name, found in rows.items():
        if "told" in found:
            table.add_row(name, found["told"])
            continue
        tokens = found["tokens_per_second"] * found["seconds"]
        shares = [f"{100 * found['mfu']:.1f}%", f"{found['peak_gib']:.1f} GiB"] if "mfu" in found else ["–", "–"]
        ratio = whole * tokens / (plain.tokens * found["seconds"])
        table.add_row(
            name, f"{1e3 * found['seconds']:.1f} ms", f"{found['tokens_per_second']:,.0f}", *shares, f"{ratio:,.0f}×"
        )
    console.print(table)
    console.print(f"reference, float32, at {given.length} tokens by the line through {short}: {whole:.1f} s")
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "steps.json").write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":  # workers import this file
    main()
