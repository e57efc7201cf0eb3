import gc
import multiprocessing
import pickle
import time

import pytest
import torch
from scale import draws, some
from torch.utils.data import TensorDataset

from optimized.data.loader import Loader as Optimized
from perfsuite import Cost, Pair, PerfsuiteError, Workload, integers, scalar, side, size, stateful, tensor
from reference.data.loader import Loader as Reference
from suite.batching import permutation
from suite.slow_storage import SlowStorage
from suite.tensor_file import TensorFile

MELS = 32
ROW_BYTES = 4 * MELS + 8


def kept_apart(milliseconds, *tensors):
    """Return a data set of the tensors; its class is shared with an accepted revision imported beside this one."""
    tensors = [t.cpu().contiguous() for t in tensors]
    return SlowStorage(milliseconds, *tensors) if milliseconds else TensorDataset(*tensors)


def kept(batch, device):
    return tuple(t.to(device, copy=True) for t in batch)


def anew(dataset, batch_size, workers):
    """Return PyTorch's DataLoader with its defaults: workers start at every epoch, by fork unless set otherwise."""
    return Reference(dataset, batch_size, workers=workers)


# The reference takes no workers.
LOADERS = {
    Reference: lambda dataset, batch_size, workers: Reference(dataset, batch_size),
    anew: anew,
    Optimized: lambda dataset, batch_size, workers: Optimized(dataset, batch_size, workers=workers),
}


def epochs(side):
    """Return a side whose step is an epoch of a loader that stays open."""
    made = LOADERS[side]

    def make(features, labels, batch_size, workers, milliseconds):
        dataset = kept_apart(milliseconds, features, labels)
        loader = made(dataset, batch_size, workers)
        number = -1

        def step():
            nonlocal number
            number += 1
            return [kept(batch, features.device) for batch in loader.epoch(number)]

        return step

    return make


def first_batches(side):
    """Return a side whose step makes a loader, takes its first batch and closes it."""
    made = LOADERS[side]

    def make(features, labels, batch_size, workers, milliseconds):
        dataset = kept_apart(milliseconds, features, labels)

        def step():
            loader = made(dataset, batch_size, workers)
            batches = loader.epoch(0)
            first = kept(next(batches), features.device)
            batches.close()
            loader.close()
            return first

        return step

    return make


INPUTS = {
    "features": tensor("rows", MELS),
    "labels": tensor("rows", dtype="int64", values=integers(0, 5)),
    "batch_size": scalar(integers(1, 20)),
    "workers": scalar(integers(0, 2)),
    "milliseconds": scalar(integers(0, 1)),
}
SIZES = {"rows": size(1, 33)}
STORAGE = {"rows": 128, "batch_size": 16, "milliseconds": 2}

loader = Pair(
    reference=stateful(epochs(Reference)),
    optimized=stateful(epochs(Optimized)),
    inputs=INPUTS,
    sizes=SIZES,
    steps=(1, 2, 5),
    max_examples=draws(cpu=10),
    rivals={"anew": stateful(side(epochs(anew), devices=("cuda",)))},
    workloads=[
        # Data available at once does not test the loader: delivery by the same code takes a fifth more or less time
        # from one set of workers to the next.
        Workload("storage", **STORAGE, workers=4, clock="wall", speedup=2, device="cuda"),
        Workload("cpu", rows=512, batch_size=64, workers=1, milliseconds=0, clock="wall", device="cpu"),
    ],
    cost=Cost(bytes=lambda rows: rows * 2 * ROW_BYTES),
)

loader_start = Pair(
    reference=stateful(first_batches(Reference)),
    optimized=stateful(first_batches(Optimized)),
    inputs=INPUTS,
    sizes=SIZES,
    steps=(1, 2),
    max_examples=draws(cpu=10),
    workloads=[
        Workload("storage", **STORAGE, workers=0, clock="wall", device="cuda"),
        Workload("cpu", rows=512, batch_size=64, workers=1, milliseconds=0, clock="wall", device="cpu"),
    ],
    cost=Cost(bytes=lambda rows, batch_size: min(rows, batch_size) * 2 * ROW_BYTES),
)


@pytest.fixture
def split(tmp_path):
    return TensorFile.write(tmp_path / "split.pt", (torch.arange(22.0).view(11, 2), torch.arange(11)))


@pytest.fixture(autouse=True)
def _no_process_is_left():
    yield
    gc.collect()
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("drop_last", [False, True])
def test_batches_follow_the_permutation_of_the_epoch(split, workers, drop_last):
    plain = Reference(split, 4, seed=3, drop_last=drop_last)
    with Optimized(split, 4, workers=workers, seed=3, drop_last=drop_last) as loader:
        assert len(loader) == len(plain) == (2 if drop_last else 3)
        for epoch in (0, 1, 5, 0):
            found, expected = list(loader.epoch(epoch)), list(plain.epoch(epoch))
            order = permutation(11, 3, epoch, "cpu")[: 8 if drop_last else 11]
            assert torch.equal(torch.cat([labels for _, labels in found]), order)
            for batch, other in zip(found, expected, strict=True):
                assert all(torch.equal(a, b) for a, b in zip(batch, other, strict=True))


def test_workers_persist_across_epochs(split):
    with Optimized(split, 4) as loader:  # two workers by default
        list(loader.epoch(0))
        first = {p.pid for p in multiprocessing.active_children()}
        list(loader.epoch(1))
        assert {p.pid for p in multiprocessing.active_children()} == first
        assert len(first) == 2
    assert multiprocessing.active_children() == []


def test_abandoned_epoch_does_not_affect_the_next(split):
    with Optimized(split, 2, workers=1) as loader:
        half = loader.epoch(0)
        next(half)
        half.close()
        labels = torch.cat([labels for _, labels in loader.epoch(1)])
        assert torch.equal(labels, permutation(11, 0, 1, "cpu"))


def test_prefetch_of_one_batch_delivers_all_batches(split):
    with Optimized(split, 2, workers=1, prefetch=1) as loader:
        labels = torch.cat([labels for _, labels in loader.epoch(0)])
    assert torch.equal(labels, permutation(11, 0, 0, "cpu"))


def test_workers_end_when_the_loader_is_garbage_collected(split):
    loader = Optimized(split, 4, workers=1)
    list(loader.epoch(0))
    assert len(multiprocessing.active_children()) == 1
    del loader
    gc.collect()
    assert multiprocessing.active_children() == []


def test_loader_can_be_closed_twice_and_used_again(split):
    loader = Optimized(split, 4, workers=1)
    loader.close()
    for _ in range(2):
        assert len(list(loader.epoch(0))) == 3
        loader.close()
        loader.close()


def test_close_ends_the_workers_of_a_running_epoch(split):
    loader = Optimized(split, 2, workers=1)
    half = loader.epoch(0)
    next(half)
    loader.close()
    assert multiprocessing.active_children() == []
    half.close()


def test_spawned_workers_deliver_the_same_batches(split):
    with Optimized(split, 4, workers=1, context="spawn") as loader:
        labels = torch.cat([labels for _, labels in loader.epoch(2)])
    assert torch.equal(labels, permutation(11, 0, 2, "cpu"))


def test_loaders_do_not_change_the_global_rng_state(split):
    before = torch.get_rng_state()
    list(Reference(split, 4).epoch(0))
    with Optimized(split, 4, workers=1) as loader:
        list(loader.epoch(0))
    assert torch.equal(torch.get_rng_state(), before)


class Broken(TensorFile):
    def __getitem__(self, row):
        raise ValueError(f"row {row} is damaged")


@pytest.mark.parametrize("workers", some((0, 1), usual=(0,)))
def test_dataset_error_is_raised_by_the_loader(workers, split):
    with Optimized(Broken(split.path), 4, workers=workers) as loader, pytest.raises(ValueError, match="is damaged"):
        list(loader.epoch(0))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"workers": -1}, "workers: -1 is out of range; give 0 or more"),
        ({"prefetch": 0}, "prefetch: 0 is out of range; give 1 or more"),
        ({"workers": 1, "context": "fork"}, "context: workers cannot be started by 'fork' here; give 'forkserver'"),
    ],
)
def test_bad_options_raise_a_one_line_error(split, options, said):
    with pytest.raises(PerfsuiteError) as error:
        Optimized(split, 4, **options)
    assert str(error.value) == said


@pytest.mark.parametrize("side", [Reference, Optimized])
def test_batch_size_that_gives_no_batch_raises_an_error(split, side):
    with pytest.raises(PerfsuiteError, match="batch_size: 12 is more than the 11 examples"):
        side(split, 12, drop_last=True)
    with pytest.raises(PerfsuiteError, match="batch_size: 0 is out of range"):
        side(split, 0)


def test_slow_storage_delays_each_row_and_can_be_pickled(monkeypatch):
    waited = []
    monkeypatch.setattr(time, "sleep", waited.append)
    slow = SlowStorage(20, torch.arange(6.0).view(3, 2), torch.arange(3))
    assert [t.tolist() for t in slow[2]] == [[4.0, 5.0], 2]
    assert waited == [0.02]
    sent = pickle.loads(pickle.dumps(slow))
    assert type(sent) is SlowStorage
    assert sent.milliseconds == 20
    assert [t.tolist() for t in sent[1]] == [[2.0, 3.0], 1]


def test_tensor_file_is_pickled_without_its_tensors(split):
    split[0]
    sent = pickle.loads(pickle.dumps(split))
    assert sent._tensors is None
    assert len(sent) == 11
    assert [t.tolist() for t in sent[3]] == [[6.0, 7.0], 3]


def test_missing_tensor_file_raises_an_error(tmp_path):
    with pytest.raises(PerfsuiteError, match=r"^data: there is no file .*missing.pt; write it with"):
        TensorFile(tmp_path / "missing.pt")


@pytest.mark.gpu
def test_batches_are_in_pinned_memory_on_a_gpu(split):
    with Optimized(split, 4, workers=1) as loader:
        assert all(t.is_pinned() for batch in loader.epoch(0) for t in batch)
