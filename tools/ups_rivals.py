"""Compare ups with an FNO and a U-Net given the same time and data: ups_rivals.py DATA --seconds S [--out FILE].

Each of the three trains for S seconds on one device, including compilation. ups trains on all tasks at once with the
given configuration. The others train one network per task, and these share the time equally. Prints the NRMSE of the
validation samples at the first and the last step of a rollout, and writes the NRMSE of all steps as JSON. The FNO needs
the package neuraloperator, the U-Net monai.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from optimized.trainers.ups import Trainer  # noqa: E402
from perfsuite.errors import PerfsuiteError  # noqa: E402
from suite import configuration, trainers  # noqa: E402
from suite.commands.train import device_called, name_of  # noqa: E402
from suite.ups import evaluation, rivals  # noqa: E402
from suite.ups.batches import mixture_of  # noqa: E402
from suite.ups.model import parameters  # noqa: E402


def of_ups(config: Any, given: Any, seconds: float, rollout: int, device: torch.device) -> dict[str, Any]:
    """Train ups, and evaluate its averaged weights."""
    trainer = Trainer(config, given, device)
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        trainer.train_window({})
    trainer.last_report()
    spent = time.monotonic() - began
    networks, step = evaluation.loaded(config, given, {"averages": trainer.averages}, device)
    scores, _ = evaluation.evaluate(networks, given, device, rollout, step)
    errors: dict[str, list[float]] = {}
    for score in scores:
        errors.setdefault(score.task, []).append(score.nrmse)
    return {"parameters": parameters(networks), "steps": trainer.steps, "seconds": spent, "nrmse": errors}


def of_rival(name: str, given: Any, seconds: float, rollout: int, device: torch.device) -> dict[str, Any]:
    """Train a network for each task, and evaluate them."""
    found: dict[str, Any] = {"parameters": 0, "steps": 0, "seconds": 0.0, "nrmse": {}}
    for task in given.tasks:
        torch.manual_seed(0)
        network = rivals.RIVALS[name](len(task.fields.grid))
        trained = rivals.train(network, task.fields, seconds / len(given.tasks), device)
        found["parameters"] += rivals.parameters(trained.network)
        found["steps"] += trained.steps
        found["seconds"] += trained.seconds
        found["nrmse"][task.task] = rivals.errors(trained.network, task.fields, rollout, device)
    return found


def table(found: dict[str, Any]) -> Table:
    """Return a table with a row for each network."""
    tasks = next(iter(found.values()))["nrmse"]
    made = Table("network", "parameters", "steps", "time", *[f"{task}, first and last step" for task in tasks])
    for name, row in found.items():
        shown = [f"{errors[0]:.4f}, {errors[-1]:.4f}" for errors in row["nrmse"].values()]
        made.add_row(name, f"{row['parameters']:,}", str(row["steps"]), f"{row['seconds']:.0f} s", *shown)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="folder of PDEBench's files")
    parser.add_argument("--config", default=str(ROOT / "configs/ups/1gpu_fast.yaml"))
    parser.add_argument("--seconds", type=float, default=480.0)
    parser.add_argument("--rollout", type=int, default=10)
    parser.add_argument("--device")
    parser.add_argument("--only", action="append", choices=["ups", *rivals.RIVALS], help="repeatable")
    parser.add_argument("--out", help="JSON file")
    options = parser.parse_args()
    try:
        device = device_called(options.device)
        kinds = [trainers.config_of("ups"), trainers.data_config_of("ups")]
        config, data = configuration.read(kinds, options.config, ["--data", options.data])
        given = mixture_of(data)
        found: dict[str, Any] = {}
        for name in options.only or ["ups", *rivals.RIVALS]:
            if name == "ups":
                found[name] = of_ups(config, given, options.seconds, options.rollout, device)
            else:
                found[name] = of_rival(name, given, options.seconds, options.rollout, device)
            Console(stderr=True).print(f"{name}: {found[name]['steps']} steps in {found[name]['seconds']:.0f} s")
    except PerfsuiteError as error:
        sys.exit(f"Error: {error}")
    Console().print(table(found))
    if options.out:
        about = {"device": name_of(device), "torch": torch.__version__, "config": options.config}
        Path(options.out).write_text(json.dumps({**about, "networks": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
