"""Compare both trainers of leak_cnn: leak_cnn_seeds.py DATA [--seeds N] [--epochs N] [--device D] [--out DIR].

For each seed, trains the reference trainer in float32 and the optimized one in bfloat16, from the same initial weights,
on the same batches, with the same dropout. Each seed has a process of its own; the processes are distributed over the
GPUs. Segments are read one by one from memory instead of the file, which affects only the time. Prints the metrics of
the last epoch's validation, and the 95% interval of the difference over the seeds (Student's t), and writes them to
DIR.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from torch.utils.data import TensorDataset  # noqa: E402

from optimized.trainers.leak_cnn import Trainer as Optimized  # noqa: E402
from reference.trainers.leak_cnn import Trainer as Reference  # noqa: E402
from suite.ablation import mean  # noqa: E402
from suite.leak_cnn.config import TrainConfig, without_techniques  # noqa: E402
from suite.leak_cnn.dataset import LeakAudio, open_data  # noqa: E402


class InMemory(LeakAudio):
    """The same data set, read once into memory."""

    def examples(self, split: str) -> Any:
        """Return (mels, label, leak) of each segment."""
        found = self.read(split)
        return TensorDataset(found.features.squeeze(1), found.labels, found.leaks)


SIDES = ("reference", "optimized")
SHOWN = ("validation_accuracy", "validation_f1", "file_accuracy", "file_f1")


def train(side: str, seed: int, path: str, epochs: int, batch_size: int, device: str) -> dict[str, float]:
    """Train one side, and return the metrics of the last epoch."""
    config = TrainConfig(
        seed=seed, epochs=epochs, batch_size=batch_size, validate_every=epochs, num_workers=0, autocast_bf16=True
    )
    data = InMemory(**vars(open_data(path)))
    if side == "reference":
        trainer: Any = Reference(dataclasses.replace(without_techniques(config), autocast_bf16=False), data, device)
    else:
        trainer = Optimized(config, data, device)
    for epoch in range(epochs):
        trainer.train_window({"epoch": torch.tensor(epoch)})
    return dict(trainer.last_report().metrics())


def table(found: dict[str, list[dict[str, float]]]) -> Table:
    """Return the table of each side's mean and range over the seeds, in percentage points, and of the difference."""
    made = Table("in points", *SIDES, "optimized − reference, 95%")
    for name in SHOWN:
        values = {side: [100 * own[name] for own in found[side]] for side in SIDES}
        ranges = [f"{sum(v) / len(v):.2f} ({min(v):.2f}–{max(v):.2f})" for v in values.values()]
        middle, half = mean([b - a for a, b in zip(*values.values(), strict=True)])
        made.add_row(name, *ranges, f"{middle:+.2f} ({middle - half:+.2f} to {middle + half:+.2f})")
    return made


def main() -> int:
    """Parse the command line and run; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch_size", type=int, default=512)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path(".perfsuite/leak_cnn_seeds"))
    given = parser.parse_args()
    if given.seed is not None:
        warnings.simplefilter("ignore")  # about the compiler's own modules
        torch.set_num_threads(1)
        device = given.device
        if device == "cuda":
            device = f"cuda:{given.seed % torch.cuda.device_count()}"
            torch.cuda.set_device(device)
        sizes = (given.data, given.epochs, given.batch_size, device)
        print(json.dumps({side: train(side, given.seed, *sizes) for side in SIDES}))
        return 0
    given.out.mkdir(parents=True, exist_ok=True)
    options = ["--epochs", str(given.epochs), "--batch_size", str(given.batch_size), "--device", given.device]
    running = [
        subprocess.Popen(
            [sys.executable, __file__, given.data, *options, "--seed", str(seed)], stdout=subprocess.PIPE, text=True
        )
        for seed in range(given.seeds)
    ]
    outputs = [process.communicate()[0] for process in running]
    for seed, process in enumerate(running):
        if process.returncode:
            parser.error(f"seed {seed} ended with exit code {process.returncode}; its message is above")
    every = [json.loads(text.splitlines()[-1]) for text in outputs]
    found = {side: [own[side] for own in every] for side in SIDES}
    (given.out / "seeds.json").write_text(
        json.dumps({"options": options, "data": open_data(given.data).digest, **found}, indent=1)
    )
    with (given.out / "seeds.txt").open("w") as file:
        for console in (Console(width=140), Console(file=file, width=140)):
            console.print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
