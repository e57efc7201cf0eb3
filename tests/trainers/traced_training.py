"""Trains a few windows of a trainer and prints, as JSON, which functions of this repository ran.

Usage: `python traced_training.py TRAINER SIDE OPTIONS CHANGES...`. OPTIONS are configuration options as JSON. Each of
CHANGES, fields of the configuration as JSON, starts another training. The output has a mapping from file to the names
of the functions that ran, for each training, and the loaded modules of optimized/.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import threading
from collections import defaultdict
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from suite import configuration, trainers
from suite.runtime import Options

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = tuple(f"{ROOT}/{name}/" for name in ("optimized", "reference", "suite"))


def main() -> None:
    """Train once without a change, and once with each."""
    name, side, options, *changes = sys.argv[1:]
    kinds = [trainers.config_of(name), Options, trainers.data_config_of(name)]
    fields = [f"--{key}={json.dumps(value)}" for key, value in json.loads(options).items()]
    config, _, data = configuration.read(kinds, str(ROOT / f"configs/{name}/tiny.yaml"), fields)
    loaded = trainers.data_of(name)(data)
    batches = iter(loaded.batches)
    windows = [next(batches) for _ in range(2)]
    train(name, side, config, loaded, windows[:1])  # defines all classes and compiles functions
    ran = []
    for change in ({}, *map(json.loads, changes)):
        given = dataclasses.replace(config, **change)
        ran.append(traced(lambda given=given: train(name, side, given, loaded, windows)))
    print(json.dumps({"ran": ran, "optimized": sorted(m for m in sys.modules if m.startswith("optimized."))}))


def train(name: str, side: Any, config: Any, loaded: Any, windows: list[Any]) -> None:
    """Make a trainer and train it."""
    trainer = trainers.build(name, config, loaded.trainer_data, torch.device("cpu"), side)
    for window in windows:
        trainer.train_window(window)
    trainer.metrics()


def traced(call: Any) -> dict[str, list[str]]:
    """Return file → names of its functions that the call runs in any thread."""
    found: defaultdict[str, set[str]] = defaultdict(set)

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(FOLDERS):
            found[frame.f_code.co_filename.removeprefix(f"{ROOT}/")].add(frame.f_code.co_qualname)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return {file: sorted(names - {"<module>"}) for file, names in found.items()}


if __name__ == "__main__":
    main()
