import contextlib
import os

import pytest
import torch
import torch.distributed as dist
from scale import ranks

from optimized import process_groups
from optimized.distributed.nccl_settings import VARIABLES
from optimized.distributed.nccl_settings import nccl_settings as optimized
from perfsuite import Pair, Workload, floats, size, tensor
from reference.distributed.nccl_settings import nccl_settings as reference

BOUNDED = floats(-4, 4)

# NCCL reads its variables once per process, so a pair would time NCCL's defaults twice. `perfsuite claims ups` times
# the settings in separate processes, as C34.
nccl_settings = Pair(
    reference=reference,
    optimized=optimized,
    inputs={
        "gradients": [
            tensor("ranks * examples", "rows", "columns", values=BOUNDED, by_rank=0),
            tensor("ranks * examples", "rows", values=BOUNDED, by_rank=0),
        ]
    },
    sizes={"examples": size(1, 9), "rows": size(0, 17), "columns": size(0, 17)},
    gradients=False,
    ranks=ranks(2, 4),
    workloads=[
        Workload("cpu", examples=4, rows=64, columns=64, clock="wall", device="cpu"),
    ],
)


@pytest.fixture
def alone():
    """Run a process group whose only rank is this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("call", [reference, optimized])
def test_gradients_are_averaged_over_the_examples(call, alone):
    found = call([torch.tensor([[1.0, 2.0], [3.0, 6.0]]), torch.tensor([5.0, -1.0])])
    assert [f.tolist() for f in found] == [[[2.0, 4.0]], [2.0]]


def test_variables_are_set_only_while_the_group_is_created(alone, monkeypatch):
    names = [*VARIABLES, "OTHER"]
    seen = []

    def noted(call):
        def noting(*args, **kwargs):
            seen.append((call.__name__, {name: os.environ.get(name) for name in names}))
            return call(*args, **kwargs)

        return noting

    monkeypatch.setenv("NCCL_IB_DISABLE", "1")
    monkeypatch.delenv("NCCL_MIN_NCHANNELS", raising=False)
    monkeypatch.setattr(dist, "new_group", noted(dist.new_group))
    monkeypatch.setattr(dist, "all_reduce", noted(dist.all_reduce))
    before = dict(os.environ)
    for _ in range(2):
        optimized([torch.ones(2, 3)])
        assert dict(os.environ) == before
    inside, outside = VARIABLES | {"OTHER": None}, {name: before.get(name) for name in names}
    assert seen == [("new_group", inside), ("all_reduce", inside), ("all_reduce", outside), ("all_reduce", outside)]


def test_all_reduce_uses_a_separate_group(alone, monkeypatch):
    groups = []
    all_reduce = dist.all_reduce
    monkeypatch.setattr(dist, "all_reduce", lambda t, group=None: (groups.append(group), all_reduce(t, group=group)))
    optimized([torch.ones(2, 3)])
    assert len(set(groups)) == 1
    assert groups[0] not in (None, dist.group.WORLD)


def test_the_environment_is_restored_after_an_error(monkeypatch):
    monkeypatch.setenv("A", "1")
    monkeypatch.delenv("B", raising=False)
    inside = []
    with contextlib.suppress(KeyError), process_groups.environment({"A": "2", "B": "3"}):
        inside.extend((os.environ["A"], os.environ["B"]))
        raise KeyError
    assert inside == ["2", "3"]
    assert (os.environ["A"], "B" in os.environ) == ("1", False)


def test_each_default_group_gets_its_own_separate_group(monkeypatch):
    groups = []
    all_reduce = dist.all_reduce
    monkeypatch.setattr(dist, "all_reduce", lambda t, group=None: (groups.append(group), all_reduce(t, group=group)))
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            optimized([torch.tensor([1.0, 3.0])])
            optimized([torch.tensor([1.0, 3.0])])
        finally:
            dist.destroy_process_group()
    # Creating a group runs one collective in it.
    assert [groups.index(group) for group in groups] == [0, 0, 0, 3, 3, 3]
