"""tools/ups_steps.py: its settings, and a run on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from scale import FULLY

from optimized.trainers.ups import Trainer as Optimized
from reference.trainers.ups import Trainer as Reference
from suite.ups.config import TrainConfig, without_techniques

ROOT = Path(__file__).resolve().parents[2]
BEFORE = without_techniques(TrainConfig(precision="fp16", num_workers=8))


@pytest.fixture
def steps(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import ups_steps

    return ups_steps


def test_phases_add_up_to_the_source_s_final_settings(steps):
    found = steps.variants(BEFORE, 4)
    assert found["before"] == (Reference, BEFORE)
    kind, last = found["8 optimizers"]
    assert kind is Optimized
    assert (last.batch_size, last.accumulation, last.precision, last.use_fsdp2) == (24, 2, "bf16", True)
    assert (last.activation_checkpoint, last.cpu_offload_optimizer, last.num_workers) == (True, True, 12)
    assert found["6 precision"][1].batch_size == 20
    assert "7 sharding" not in steps.variants(BEFORE, 1)


def test_same_work_has_the_examples_and_losses_of_before(steps):
    _, same = steps.variants(BEFORE, 1)["same work as before"]
    assert same.batch_size * same.accumulation == BEFORE.batch_size * BEFORE.accumulation
    assert (same.inverse_loss_frequency, same.num_queries) == (1, 2048)
    assert same.cuda_graphs


@FULLY
@pytest.mark.parametrize("ranks", [1, 2])
def test_tool_times_steps_in_one_and_in_several_processes(ranks, tmp_path):
    options = ["--device", "cpu", "--config", "configs/ups/tiny.yaml", "--only", "before", "--only", "fast"]
    command = [sys.executable, "tools/ups_steps.py", "none", *options, "--ranks", str(ranks)]
    done = subprocess.run([*command, "--out", str(tmp_path / "out.json")], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["ranks"] == ranks
    assert found["rows"]["before"]["examples"] == 8 * ranks
    assert len(found["rows"]["fast"]["seconds"]) == 5
    assert ({"all_reduce_s", "collectives_s"} <= set(found["floors"])) == (ranks > 1)
