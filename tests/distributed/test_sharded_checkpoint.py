import contextlib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from scale import FULLY, ranks

from optimized.distributed.sharded_checkpoint import load as optimized_load
from optimized.distributed.sharded_checkpoint import save as optimized_save
from perfsuite import Pair, Workload, floats, size, stateful, tensor
from reference.distributed.sharded_checkpoint import load as reference_load
from reference.distributed.sharded_checkpoint import save as reference_save
from suite.runtime.errors import CheckpointError
from suite.sharded_network import ShardedNetwork

ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def shared_folder():
    """Make a temporary folder on rank 0, and give its path to all ranks."""
    with contextlib.ExitStack() as stack:
        names = [stack.enter_context(tempfile.TemporaryDirectory())] if dist.get_rank() == 0 else [None]
        dist.broadcast_object_list(names)
        yield Path(names[0])
        dist.barrier()  # before rank 0 removes it


def checkpointed(save, load):
    """Return a side that at each step saves the network, loads it into another one, and returns the other's shards."""

    def make(weights):
        network = ShardedNetwork(weights)
        other = ShardedNetwork([w.new_zeros(w.shape) for w in weights])

        def step(gradients):
            network.step(gradients)
            with shared_folder() as folder:
                save(network.model, network.optimizer, folder / "checkpoint")
                load(other.model, other.optimizer, folder / "checkpoint")
            return other.shards()

        return step

    return make


def layers(bound):
    return [tensor(*shape, values=floats(-bound, bound)) for shape in (("hidden", "features"), ("outputs", "hidden"))]


sharded_checkpoint = Pair(
    reference=stateful(checkpointed(reference_save, reference_load)),
    optimized=stateful(checkpointed(optimized_save, optimized_load)),
    inputs={"weights": layers(1)},
    step_inputs={"gradients": layers(4)},
    sizes={"features": size(1, 17), "hidden": size(1, 17), "outputs": size(1, 9)},
    steps=(1, 2),
    gradients=False,
    max_examples=1,  # each step writes and reads files
    ranks=ranks(2, 4),
    workloads=[
        Workload("dp2", ranks=2, features=1024, hidden=2048, outputs=1024, clock="wall", device="cuda"),
        Workload("cpu", features=256, hidden=512, outputs=64, clock="wall", device="cpu"),
    ],
)


@FULLY
def test_checkpoints_can_be_loaded_with_other_numbers_of_ranks(tmp_path):
    # Groups of 4, 2 and 1 ranks each load the checkpoints of the others.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(Path(__file__).with_name("reshard.py")), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    saved = sorted(p.name for p in tmp_path.glob("*-by-*"))
    assert saved == [f"{side}-by-{ranks}" for side in ("optimized", "reference") for ranks in (1, 2, 4)]
    # On the optimized side each rank writes its own file; in the reference rank 0 writes one.
    assert len(list((tmp_path / "optimized-by-2").glob("*.distcp"))) == 2
    assert (tmp_path / "reference-by-2").is_file()


@pytest.fixture
def alone():
    """Run a process group whose only rank is this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def network(*shapes):
    made = ShardedNetwork([torch.ones(shape) for shape in shapes])
    made.step([torch.ones(shape) for shape in shapes])
    return made


SIDES = [
    pytest.param(reference_save, reference_load, id="reference"),
    pytest.param(optimized_save, optimized_load, id="optimized"),
]


def largest(path):
    """Return the file that holds the tensors."""
    return max(path.rglob("*"), key=lambda p: p.stat().st_size) if path.is_dir() else path


@pytest.mark.parametrize(("save", "load"), SIDES)
@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (
            lambda path: path.rename(path.with_name("elsewhere")),
            r"cannot read .*c: No such file|no checkpoint in .*c: No",
        ),
        (lambda path: largest(path).unlink(), "cannot read .*: No such file or directory"),
        (
            lambda path: os.truncate(largest(path), 1000),
            "is damaged, or no checkpoint; load another|cut off; load another",
        ),
        (
            lambda path: os.truncate(largest(path), 0),
            "is damaged, or no checkpoint; load another|cut off; load another",
        ),
    ],
)
def test_missing_or_truncated_checkpoint_raises_a_one_line_error(save, load, harm, says, alone, tmp_path):
    saved, path = network((4, 3), (2, 4)), tmp_path / "c"
    save(saved.model, saved.optimizer, path)
    harm(path)
    other = network((4, 3), (2, 4))
    before = other.shards()
    with pytest.raises(CheckpointError, match=says) as raised:
        load(other.model, other.optimizer, path)
    assert "\n" not in str(raised.value)
    assert all(torch.equal(shard, before[name]) for name, shard in other.shards().items())


@pytest.mark.parametrize(("save", "load"), SIDES)
@pytest.mark.parametrize(
    ("shapes", "says"),
    [
        (((4, 3), (3, 4)), r"another model, whose 1.weight has shape \(2, 4\) in place of \(3, 4\); load another"),
        (((4, 3),), "another model, whose parameters have other names"),
        (((4, 3), (2, 4), (2, 2)), "another model, whose parameters have other names"),
    ],
)
def test_checkpoint_of_another_model_raises_an_error(save, load, shapes, says, alone, tmp_path):
    saved, other = network((4, 3), (2, 4)), network(*shapes)
    save(saved.model, saved.optimizer, tmp_path / "c")
    with pytest.raises(CheckpointError, match=says):
        load(other.model, other.optimizer, tmp_path / "c")


def test_plain_state_dict_raises_an_error(alone, tmp_path):
    saved = network((4, 3), (2, 4))
    content = {name: p.detach().full_tensor() for name, p in saved.model.named_parameters()}
    torch.save(content, tmp_path / "c")
    with pytest.raises(CheckpointError, match="c has no optimizer state; load a checkpoint that `save` wrote"):
        reference_load(saved.model, saved.optimizer, tmp_path / "c")


@pytest.mark.parametrize("content", [b"", b"no pickle", b"\x80\x04N."])
def test_damaged_metadata_raises_an_error(content, alone, tmp_path):
    saved, path = network((4, 3)), tmp_path / "c"
    optimized_save(saved.model, saved.optimizer, path)
    (path / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"c is damaged: its \.metadata cannot be read; load another"):
        optimized_load(saved.model, saved.optimizer, path)


@pytest.mark.parametrize(("save", "load"), SIDES)
def test_save_replaces_a_checkpoint_and_load_fills_a_new_optimizer(save, load, alone, tmp_path):
    saved, path = network((4, 3)), tmp_path / "c"
    save(saved.model, saved.optimizer, path)
    saved.step([torch.full((4, 3), 2.0)])
    save(saved.model, saved.optimizer, path)
    assert [p.name for p in tmp_path.iterdir()] == ["c"]
    other = network((4, 3))
    other.optimizer = torch.optim.AdamW(other.model.parameters(), lr=0.1)
    load(other.model, other.optimizer, path)
    assert all(torch.equal(shard, other.shards()[name]) for name, shard in saved.shards().items())
    assert other.shards()["steps of 0.weight"] == 2


@pytest.mark.parametrize("save", [reference_save, optimized_save])
@pytest.mark.parametrize("fails", ["mkdir", "replace"])
def test_failed_save_raises_an_error_that_names_the_path(save, fails, alone, tmp_path, monkeypatch):
    saved, path = network((4, 3)), tmp_path / "file" / "c"
    if fails == "mkdir":
        (tmp_path / "file").touch()
    else:
        path.parent.mkdir()

        def full(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "replace", full)
    says = "Not a directory|File exists" if fails == "mkdir" else "No space left on device"
    with pytest.raises(CheckpointError) as error:
        save(saved.model, saved.optimizer, path)
    # A dot matches no line break, so that the message is one line.
    assert re.fullmatch(rf"cannot write .*c: .*({says}).*; (free space there, or )?name another.*", str(error.value))


def test_failed_rename_keeps_the_earlier_checkpoint(alone, tmp_path, monkeypatch):
    saved, path = network((4, 3)), tmp_path / "c"
    optimized_save(saved.model, saved.optimizer, path)
    before = saved.shards()
    saved.step([torch.full((4, 3), 2.0)])
    replace = os.replace

    def failing(source, to):
        if str(source).endswith(".tmp") and to == path:
            raise OSError(28, "No space left on device")
        replace(source, to)

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", failing)
        with pytest.raises(CheckpointError, match="No space left on device"):
            optimized_save(saved.model, saved.optimizer, path)
    other = network((4, 3))
    optimized_load(other.model, other.optimizer, path)
    assert all(torch.equal(shard, other.shards()[name]) for name, shard in before.items())


def test_interrupted_rename_keeps_the_earlier_checkpoint(alone, tmp_path):
    saved, path, old = network((4, 3)), tmp_path / "c", tmp_path / ".c.old"
    optimized_save(saved.model, saved.optimizer, path)
    path.rename(old)
    other = network((4, 3))
    other.step([torch.ones(4, 3)])
    optimized_load(other.model, other.optimizer, path)
    assert all(torch.equal(shard, other.shards()[name]) for name, shard in saved.shards().items())
    other.step([torch.ones(4, 3)])
    optimized_save(other.model, other.optimizer, path)
    assert [p.name for p in tmp_path.iterdir()] == ["c"]
    optimized_load(saved.model, saved.optimizer, path)
    assert all(torch.equal(shard, saved.shards()[name]) for name, shard in other.shards().items())
