"""Long runs of polychromic: both trainers agree over 100 steps, and killed runs resume bit for bit."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from curves import NEIGHBOURS, a_rounding_away, deviation_of, share_of_rule
from scale import FULLY
from states import same

from optimized.trainers.polychromic import Trainer as Optimized
from reference.trainers.polychromic import Trainer as Reference
from suite.polychromic.config import TrainConfig
from suite.polychromic.data import Data, load
from suite.runtime import checkpoints

pytest.importorskip("tokenizers", reason="tokenizers is not installed: pip install 'perfsuite[train]'")

STEPS, KILLS = 100, 20
CONFIG = Path(__file__).parents[2] / "configs/polychromic/tiny.yaml"


def curve(trainer):
    """Return cross-entropy, diversity and mean number of tokens in a reply, [steps, 3]."""
    found = []
    for _ in range(STEPS):
        trainer.train_window({})
        report = trainer.last_report()
        found.append([report.cross_entropy, report.diversity, report.tokens])
    return torch.tensor(found, dtype=torch.float64)


@FULLY
def test_optimized_curves_match_the_reference_over_100_steps_in_float32():
    """Both sides sample with the same random numbers. The lengths of the replies would differ if their tokens did."""
    fields = {"length": 48, "batch_size": 2, "accumulation": 2, "steps": STEPS}
    config = TrainConfig(
        prompts=2, replies=3, new_tokens=6, learning_rate=5e-3, rank=4, alpha=8.0, diversity=0.5, **fields
    )
    given = load(Data(synthetic=64, **fields)).trainer_data
    truth = curve(Reference(config, given, "cpu", torch.float64))
    runs = [curve(Reference(config, given, "cpu"))]
    runs += [curve(a_rounding_away(Reference(config, given, "cpu"), seed)) for seed in range(NEIGHBOURS)]
    found = curve(Optimized(config, given, "cpu"))
    torch.testing.assert_close(found[:, 2], truth[:, 2], rtol=1e-6, atol=0)
    assert truth[-10:, 0].mean() < truth[:10, 0].mean() - 0.2
    deviation = deviation_of(runs, truth)
    for n in range(2):
        assert share_of_rule(found[:, n], truth[:, n], deviation[:, n], torch.float32) <= 1


def begun(folder, *options):
    command = [sys.executable, "-m", "perfsuite", "train", "polychromic", "--config", str(CONFIG), "--device", "cpu"]
    command += ["--folder", str(folder), "--checkpoint_every", "5", "--steps", str(4 * STEPS), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def resumed(folder):
    return ("--resume", "latest") if checkpoints.Store(folder).files() else ()


@FULLY
def test_run_killed_at_random_steps_resumes_bit_identically(tmp_path):
    folder, rng, steps = tmp_path / "killed", random.Random(0), []
    for _ in range(KILLS):
        before = checkpoints.Store(folder).files()
        process = begun(folder, *resumed(folder))
        while process.poll() is None and checkpoints.Store(folder).files() == before:
            time.sleep(0.02)
        time.sleep(rng.uniform(0, 0.5))
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, "the run ended before it was killed: give it more steps"
        steps.append(checkpoints.load(checkpoints.Store(folder).latest(), "polychromic").windows)
    assert len(set(steps)) == KILLS
    assert begun(folder, *resumed(folder)).wait() == 0
    assert begun(tmp_path / "whole").wait() == 0
    ends = [checkpoints.load(checkpoints.Store(f).latest(), "polychromic") for f in (folder, tmp_path / "whole")]
    assert ends[0].windows == ends[1].windows == 4 * STEPS
    assert same(ends[0].trainer, ends[1].trainer)
