"""Time a step of eigenstate_lm: eigenstate_lm_steps.py [--device D] [--steps N] [--length T] [--out DIR].

The optimized trainer is timed at the source's size and at the two larger sizes, in each precision, and with the options
that trade time for memory. The reference trainer is timed on shorter texts, and its step at the full length is
extrapolated from these times. All data are random tokens. The tool prints a table, and writes all figures to DIR.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import sys
import time
from pathlib import Path
from statistics import linear_regression
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import yaml  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from optimized.trainers import eigenstate_lm as optimized  # noqa: E402
from perfsuite import PerfsuiteError  # noqa: E402
from reference.trainers.eigenstate_lm import Trainer as Reference  # noqa: E402
from suite.eigenstate_lm.config import TrainConfig  # noqa: E402
from suite.eigenstate_lm.data import Data, Text, text_of  # noqa: E402
from suite.eigenstate_lm.model import VOCABULARY  # noqa: E402

BF16 = {"autocast_bf16": True}


def _sizes(name: str) -> dict[str, Any]:
    """Return the network's size and the batch size from configs/eigenstate_lm/NAME.yaml."""
    whole = yaml.safe_load((ROOT / "configs" / "eigenstate_lm" / f"{name}.yaml").read_text())
    return {field: whole[field] for field in ("width", "layers", "eigenstates", "batch_size")}


MEDIUM, LARGE = _sizes("medium_32k"), _sizes("large_32k")
ROWS: dict[str, dict[str, Any]] = {
    "small, bfloat16": BF16,
    "the same, four micro-batches a step": {**BF16, "accumulation": 4},
    "the same, made ahead by workers": {**BF16, "accumulation": 4, "loader": True},
    "small, bfloat16, without dropout": {**BF16, "dropout": 0.0},
    "small, bfloat16, not compiled": {**BF16, "use_compile": False},
    "small, bfloat16, recomputed": {**BF16, "activation_checkpoint": True},
    "small, bfloat16 and FP8": {**BF16, "fp8_linear": True},
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
SHORT = (1024, 4096)
"""Sequence lengths at which the reference is timed."""
WARM = 2
REFERENCE_STEPS = 2


def text(length: int) -> Text:
    return text_of(Data(synthetic=20, vocabulary=VOCABULARY, sequence_length=length))


def timed(kind: Any, config: TrainConfig, device: str, steps: int) -> dict[str, float]:
    """Return the seconds of a step and figures derived from them.

    The host does not wait between steps. The first steps are not timed.
    """
    optimized._compiled.cache_clear()
    torch._dynamo.reset()
    gc.collect()
    cuda = torch.device(device).type == "cuda"
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    trainer = kind(config, text(config.sequence_length), device)
    for _ in range(WARM if kind is optimized.Trainer else 1):
        trainer.train_window({})
    trainer.last_report()
    first = time.perf_counter() - began
    began = time.perf_counter()
    for _ in range(steps):
        trainer.train_window({})
    trainer.last_report()
    seconds = (time.perf_counter() - began) / steps
    most = trainer.throughput._most
    found = {"seconds": seconds, "tokens_per_second": config.tokens / seconds, "warm_seconds": first}
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
    parser.add_argument("--reference", type=int, nargs="*", default=SHORT, help="lengths to time the reference at")
    parser.add_argument("--batch_size", type=int, default=4, help="of the reference, and of rows without one")
    parser.add_argument("--out", type=Path, default=Path(".perfsuite/eigenstate_lm"))
    given = parser.parse_args()
    if len(given.reference) > 1 and given.length <= sorted(given.reference)[1]:
        parser.error(f"--length {given.length}: above two of --reference's, from which the reference is extrapolated")
    console = Console()
    sizes = {"sequence_length": given.length, "batch_size": given.batch_size}
    plain = dataclasses.replace(TrainConfig(), accumulation=1, **sizes)
    given.out.mkdir(parents=True, exist_ok=True)
    cuda = torch.device(given.device).type == "cuda"
    record: dict[str, Any] = {"torch": torch.__version__, "device": torch.cuda.get_device_name() if cuda else "cpu"}

    def found(what: str, name: Any, value: Any) -> None:
        """Record a figure, and write it at once: the next row may exceed the time limit."""
        record.setdefault(what, {})[name] = value
        console.print(what, name, value)
        (given.out / "steps.json").write_text(json.dumps(record, indent=1) + "\n")

    for length in given.reference:
        config = dataclasses.replace(plain, sequence_length=length)
        found("reference", length, timed(Reference, config, given.device, REFERENCE_STEPS)["seconds"])
    whole = _extrapolated(record["reference"], given.length) if given.reference else None
    if whole is not None:
        found("reference", f"{given.length}, extrapolated", whole)
    for name, fields in ROWS.items():
        if given.only is not None and not any(part in name for part in given.only):
            continue
        try:
            value = timed(optimized.Trainer, dataclasses.replace(plain, **fields), given.device, given.steps)
        except PerfsuiteError as error:
            value = {"record": str(error)}
        found("rows", name, value)
    table = Table("", "a step", "tokens/s", "MFU", "peak memory", "reference over it")
    for name, row in record.get("rows", {}).items():
        if "record" in row:
            table.add_row(name, row["record"])
            continue
        shares = [f"{100 * row['mfu']:.1f}%", f"{row['peak_gib']:.1f} GiB"] if "mfu" in row else ["–", "–"]
        ratio = "–"
        if whole is not None and "width" not in ROWS[name]:  # the reference is timed only at the small size
            ratio = f"{whole * row['tokens_per_second'] / plain.tokens:,.0f}×"
        table.add_row(name, f"{1e3 * row['seconds']:.1f} ms", f"{row['tokens_per_second']:,.0f}", *shares, ratio)
    console.print(table)


def _extrapolated(seconds: dict[int, float], length: int) -> float:
    """Extrapolate the seconds to `length`: linearly, or in proportion if there is only one point."""
    if len(seconds) == 1:
        ((short, took),) = seconds.items()
        return took * length / short
    slope, base = linear_regression(list(seconds), list(seconds.values()))
    return base + slope * length


if __name__ == "__main__":  # workers import this file
    main()
