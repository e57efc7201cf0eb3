import pytest
import torch

from optimized.data.resident_dataset import ResidentDataset as Optimized
from optimized.graphs.cuda_graph_step import cuda_graph_step
from perfsuite import Cost, Pair, PerfsuiteError, Workload, integers, scalar, side, size, stateful, tensor
from reference.data.resident_dataset import ResidentDataset as Reference
from suite.batching import permutation
from suite.leak_cnn.costs import BATCH
from suite.leak_cnn.costs import ROWS as TRAINING_ROWS

MELS = 32
ROW_BYTES = 4 * MELS + 8


def streaming(tensors, batch_size, device):
    """The smallest limit that there is: two pieces of a batch each."""
    row_bytes = sum(t[0].numel() * t.element_size() for t in tensors)
    return Optimized(tensors, batch_size, device, limit_bytes=3 * batch_size * row_bytes)


class Pinned(Reference):
    """As one is told to: batches in pinned memory, copied without waiting."""

    def epoch(self, number):
        order = permutation(self.rows, self.seed, number, "cpu")
        for start, end in self.bounds:
            batch = (t[order[start:end]].pin_memory() for t in self.tensors)
            yield tuple(t.to(self.device, non_blocking=True) for t in batch)


def epochs(side):
    """A step is an epoch; its batches are copied, since they are valid only until the next."""

    def make(features, labels, batch_size):
        data = side((features.cpu(), labels.cpu()), batch_size, features.device)
        number = -1

        def step():
            nonlocal number
            number += 1
            return [tuple(t.clone(memory_format=torch.contiguous_format) for t in b) for b in data.epoch(number)]

        return step

    return make


resident_dataset = Pair(
    reference=stateful(epochs(Reference)),
    optimized=stateful(epochs(Optimized)),
    inputs={
        "features": tensor("rows", MELS),
        "labels": tensor("rows", dtype="int64", values=integers(0, 5)),
        "batch_size": scalar(integers(1, 20)),
    },
    sizes={"rows": size(1, 65)},
    steps=(1, 2, 17),
    rivals={
        "pinned": stateful(side(epochs(Pinned), devices=("cuda",))),
        "streamed": stateful(epochs(streaming)),
    },
    variants={"streamed": stateful(epochs(streaming))},
    workloads=[
        Workload("epoch", rows=TRAINING_ROWS, batch_size=BATCH, clock="wall", device="cuda", host_syncs=0),
        Workload("cpu", rows=2000, batch_size=256, clock="wall", device="cpu"),
    ],
    # Read and written by the gathering; the order, 8 bytes a row, read too.
    cost=Cost(bytes=lambda rows: rows * (2 * ROW_BYTES + 8)),
)

SIDES = [Reference, Optimized, streaming]


def split(rows=10):
    return torch.arange(rows * 3.0).view(rows, 3), torch.arange(rows)


@pytest.mark.parametrize("side", SIDES)
def test_an_epoch_is_the_permutation_in_batches(side):
    features, labels = split()
    data = side((features, labels), 4, "cpu")
    assert len(data) == 3
    for epoch in (0, 1, 0):
        batches = [(f.clone(), n.clone()) for f, n in data.epoch(epoch)]
        assert [len(n) for _, n in batches] == [4, 4, 2]
        order = permutation(10, 0, epoch, "cpu")
        assert torch.equal(torch.cat([n for _, n in batches]), order)
        assert torch.equal(torch.cat([f for f, _ in batches]), features[order])


@pytest.mark.parametrize("limit", [None, 3 * 4 * 20, 5 * 4 * 20])
@pytest.mark.parametrize(("rows", "batch_size"), [(10, 4), (12, 4), (4, 4), (3, 4), (41, 4), (9, 1)])
@pytest.mark.parametrize("drop_last", [False, True])
def test_both_sides_give_the_same_batches(limit, rows, batch_size, drop_last):
    if drop_last and rows < batch_size:
        for side in (Reference, Optimized):
            with pytest.raises(PerfsuiteError, match="batch_size: 4 is more than the 3 examples"):
                side(split(rows), batch_size, "cpu", drop_last=True)
        return
    expected = Reference(split(rows), batch_size, "cpu", seed=9, drop_last=drop_last)
    data = Optimized(split(rows), batch_size, "cpu", seed=9, drop_last=drop_last, limit_bytes=limit)
    assert len(data) == len(expected)
    for epoch in range(3):
        seen = [[t.clone() for t in batch] for batch in data.epoch(epoch)]
        wanted = list(expected.epoch(epoch))
        assert len(seen) == len(wanted) == len(data)
        for batch, other in zip(seen, wanted, strict=True):
            for a, b in zip(batch, other, strict=True):
                assert a.dtype == b.dtype
                assert torch.equal(a, b)


@pytest.mark.parametrize("limit", [None, 3 * 4 * 20])
def test_every_batch_lies_in_the_same_memory(limit):
    data = Optimized(split(), 4, "cpu", limit_bytes=limit)
    whole = [t.data_ptr() for t in data.batch]
    for batch in data.epoch(0):
        assert [t.data_ptr() for t in batch] == whole


def test_an_epoch_that_was_not_ended_does_not_disturb_the_next():
    data = streaming(split(41), 4, "cpu")
    half = data.epoch(0)
    for _ in range(3):
        next(half)
    labels = torch.cat([n.clone() for _, n in data.epoch(1)])
    assert torch.equal(labels, permutation(41, 0, 1, "cpu"))


def test_a_piece_is_not_overwritten_before_it_was_read():
    """Where copies run beside what was launched before, `release` is what they wait for."""
    data = Optimized(split(41), 4, "cpu", limit_bytes=5 * 4 * 20)
    pieces, held, said = data._pieces, set(), []
    fetch, ready, release = pieces.fetch, pieces.ready, pieces.release

    def fetched(number, rows):
        assert number % 2 not in held
        said.append(f"fetch {number}")
        fetch(number, rows)

    def made_ready(number):
        assert f"fetch {number}" in said
        held.add(number % 2)
        return ready(number)

    def released(number):
        held.remove(number % 2)
        release(number)

    pieces.fetch, pieces.ready, pieces.release = fetched, made_ready, released
    for i, _ in enumerate(data.epoch(0)):
        # The last batch of a piece of two is used while the piece is free already.
        assert bool(held) == (i % 2 == 0 and i < 10)
        said.append(f"batch {i}")
    assert said[:6] == ["fetch 0", "batch 0", "fetch 1", "batch 1", "batch 2", "fetch 2"]


@pytest.mark.parametrize(
    ("limit", "reason"),
    [
        (None, None),
        ((10 + 4) * 20, None),
        (
            (10 + 4) * 20 - 1,
            "the split takes 280 bytes with a batch, more than limit_bytes=279: batches are streamed from memory, "
            "4 rows at a time",
        ),
    ],
)
def test_it_says_why_it_streams(limit, reason):
    assert Optimized(split(), 4, "cpu", limit_bytes=limit).reason == reason


def test_what_lies_on_the_device_keeps_to_the_limit():
    for batches in range(3, 10):
        limit = batches * 4 * 20
        data = Optimized(split(1000), 4, "cpu", limit_bytes=limit)
        held = [*data.batch, *(t for piece in data._pieces.there for t in piece)]
        assert limit - 2 * 4 * 20 < sum(t.numel() * t.element_size() for t in held) <= limit


def test_a_limit_below_three_batches_is_one_line():
    with pytest.raises(PerfsuiteError, match=r"^limit_bytes: 239 is less than three batches of 80 bytes; raise it, or"):
        Optimized(split(100), 4, "cpu", limit_bytes=239)


@pytest.mark.parametrize("side", [Reference, Optimized])
def test_bad_input_is_one_line(side):
    with pytest.raises(PerfsuiteError, match="3, 4 rows; give as many of each"):
        side((torch.zeros(3), torch.zeros(4)), 2, "cpu")


class Graphs:
    """Replays as CUDA does, by address: what is read is what lies in the buffers then."""

    def __init__(self, state):
        self.state, self.replayed = state, 0

    def aside(self, call, device):
        return call()

    def capture(self, call, device):
        before = self.state.clone()
        outputs = call()
        self.state.copy_(before)

        def replay():
            self.replayed += 1
            outputs.copy_(call())

        return outputs, replay


@pytest.mark.parametrize("limit", [None, 3 * 4 * 20])
def test_a_captured_step_finds_each_batch_where_it_was(limit):
    features, _ = split(22)
    data = Optimized(split(22), 4, "cpu", limit_bytes=limit)
    weight = torch.zeros(3)

    def train(rows):
        return weight.mul_(0.5).add_(rows.sum(0)).clone()

    graphs = Graphs(weight)
    whole = cuda_graph_step(lambda: train(data.batch[0]), warmup=1, device="cpu", backend=graphs)
    expected = torch.zeros(3)
    for epoch in range(3):
        for (batch, _), rows in zip(data.epoch(epoch), permutation(22, 0, epoch, "cpu").split(4), strict=True):
            last = whole() if len(batch) == 4 else train(batch)
            expected = expected * 0.5 + features[rows].sum(0)
            torch.testing.assert_close(last, expected)
    assert whole.captures == 1
    assert graphs.replayed == 3 * 5 - 1
    torch.testing.assert_close(weight, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("limit", [None, 7 * 64 * 20])
def test_on_a_gpu_it_gives_the_same_batches(limit, no_host_sync):
    data = Optimized(split(1000), 64, "cuda", limit_bytes=limit)
    assert (data.reason is None) == (limit is None)
    expected = Reference(split(1000), 64, "cuda")
    for epoch in range(3):
        wanted, seen = list(expected.epoch(epoch)), []
        if limit is None:
            with no_host_sync():
                seen = [[t.clone() for t in batch] for batch in data.epoch(epoch)]
        else:
            seen = [[t.clone() for t in batch] for batch in data.epoch(epoch)]
        for batch, other in zip(seen, wanted, strict=True):
            for a, b in zip(batch, other, strict=True):
                assert torch.equal(a, b)
