from collections import defaultdict
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

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
    """Return a data set with the smallest limit possible: two pieces of one batch each."""
    row_bytes = sum(t[0].numel() * t.element_size() for t in tensors)
    return Optimized(tensors, batch_size, device, limit_bytes=3 * batch_size * row_bytes)


class Pinned(Reference):
    """Data set as usually recommended: batches in pinned memory, copied without waiting."""

    def epoch(self, number):
        order = permutation(self.rows, self.seed, number, "cpu")
        for start, end in self.bounds:
            batch = (t[order[start:end]].pin_memory() for t in self.tensors)
            yield tuple(t.to(self.device, non_blocking=True) for t in batch)


def epochs(side):
    """Return a side whose step is an epoch; it copies the batches, which are valid only until the next one."""

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
    # The gather reads and writes each row, and reads the order, 8 bytes a row.
    cost=Cost(bytes=lambda rows: rows * (2 * ROW_BYTES + 8)),
)

SIDES = [Reference, Optimized, streaming]


def split(rows=10):
    return torch.arange(rows * 3.0).view(rows, 3), torch.arange(rows)


@pytest.mark.parametrize("side", SIDES)
def test_epoch_yields_the_permutation_in_batches(side):
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
def test_all_batches_use_the_same_memory(limit):
    data = Optimized(split(), 4, "cpu", limit_bytes=limit)
    whole = [t.data_ptr() for t in data.batch]
    for batch in data.epoch(0):
        assert [t.data_ptr() for t in batch] == whole


def test_unfinished_epoch_does_not_affect_the_next():
    data = streaming(split(41), 4, "cpu")
    half = data.epoch(0)
    for _ in range(3):
        next(half)
    labels = torch.cat([n.clone() for _, n in data.epoch(1)])
    assert torch.equal(labels, permutation(41, 0, 1, "cpu"))


def test_piece_is_not_overwritten_before_it_is_released():
    """Copies that run concurrently with earlier launches wait for `release`."""
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
        # A piece of two batches is released before its last batch is used.
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
def test_reason_says_why_batches_are_streamed(limit, reason):
    assert Optimized(split(), 4, "cpu", limit_bytes=limit).reason == reason


def test_device_memory_stays_within_the_limit():
    for batches in range(3, 10):
        limit = batches * 4 * 20
        data = Optimized(split(1000), 4, "cpu", limit_bytes=limit)
        there = [t for piece in data._pieces.there for t in piece]
        assert limit - 2 * 4 * 20 < sum(t.nbytes for t in (*data.batch, *there)) <= limit
        assert sum(t.nbytes for piece in data._pieces.host for t in piece) == sum(t.nbytes for t in there)


def test_limit_below_three_batches_raises_an_error():
    with pytest.raises(PerfsuiteError, match=r"^limit_bytes: 239 is less than three batches of 80 bytes; raise it, or"):
        Optimized(split(100), 4, "cpu", limit_bytes=239)


def test_batch_size_above_the_number_of_rows_needs_no_extra_memory():
    data = Optimized([torch.zeros(10, 1)], 100, "cpu", limit_bytes=80)
    assert data.reason is None
    assert [len(batch[0]) for batch in data.epoch(0)] == [10]


def test_smallest_rows_are_streamed_and_a_negative_limit_is_refused():
    """Rows of one byte are streamed one at a time; a negative limit is refused even for rows of 0 bytes."""
    rows = torch.arange(10, dtype=torch.uint8)
    assert "1 rows at a time" in Optimized([rows], 1, "cpu", limit_bytes=3).reason
    with pytest.raises(PerfsuiteError, match=r"^limit_bytes: -1 is less than three batches of 0 bytes"):
        Optimized([torch.zeros(10, 0)], 1, "cpu", limit_bytes=-1)


@pytest.mark.parametrize("limit", [None, 3 * 4 * 8])
def test_dataset_of_one_tensor_yields_all_rows(limit):
    data = Optimized([torch.arange(10)], 4, "cpu", limit_bytes=limit)
    labels = torch.cat([n.clone() for (n,) in data.epoch(0)])
    assert torch.equal(labels, permutation(10, 0, 0, "cpu"))


class Stream:
    """A GPU's stream, or the host, as the set of operations that it knows to be complete."""

    def __init__(self, device=None):
        self.done = set()

    def wait_event(self, event):
        self.done |= event.done

    def wait_stream(self, stream):
        self.done |= stream.done


class OnCuda(TorchDispatchMode):
    """Run copies on the current stream and other operations on the host; assert that memory is free before each use.

    Before a read, the stream must know that the last write is complete; before a write, also the reads since then.
    """

    def __init__(self):
        super().__init__()
        self.host, self.main, self.made = Stream(), Stream(), []
        self.current, self.count = self.main, 0
        self.kept = defaultdict(list)  # for each address, the streams passed to `record_stream`
        self.writes, self.reads = {}, defaultdict(set)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func is torch.ops.aten.copy_.default:
            self.ran(self.current, written=args[0], read=args[1])
            if self.current is not self.main:
                assert args[2]  # otherwise the host would wait
        elif func is torch.ops.aten.index_select.out:
            self.ran(self.host, written=kwargs["out"], read=args[0])
        return result

    def ran(self, stream, written, read):
        self.count += 1
        # Work that the host launches comes after everything that the host has waited for.
        seen = stream.done | self.host.done
        to, of = (t.untyped_storage().data_ptr() for t in (written, read))
        assert {self.writes[m] for m in (to, of) if m in self.writes} | self.reads[to] <= seen
        self.writes[to], self.reads[to] = self.count, set()
        self.reads[of].add(self.count)
        stream.done |= {self.count}

    def stream(self, device):
        self.made.append(Stream())
        return self.made[-1]

    def event(self):
        """Return an event; waiting for one that was never recorded waits for nothing, as in CUDA."""
        event = SimpleNamespace(done=set())
        event.record = lambda stream: setattr(event, "done", set(stream.done))
        event.synchronize = lambda: self.host.wait_event(event)
        return event

    @contextmanager
    def on(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before


@pytest.fixture
def cuda(monkeypatch):
    """Simulate a GPU's streams and events; its memory, pinned or not, is host memory."""
    cuda, empty = OnCuda(), torch.empty

    def empty_(*arguments, device=None, pin_memory=None, **options):
        assert pin_memory or device == torch.device("cuda")
        return empty(*arguments, **options)

    monkeypatch.setattr(torch, "empty", empty_)
    monkeypatch.setattr(torch.cuda, "Stream", cuda.stream)
    monkeypatch.setattr(torch.cuda, "Event", cuda.event)
    monkeypatch.setattr(torch.cuda, "stream", cuda.on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: cuda.current)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda t, s: cuda.kept[t.data_ptr()].append(s))
    with cuda:
        yield cuda


@pytest.mark.parametrize("batches", [3, 5, 7])
def test_memory_is_not_accessed_before_it_is_free_on_cuda(cuda, batches):
    features, labels = split(41)
    data = Optimized((features, labels), 4, "cuda", limit_bytes=batches * 4 * 20)
    assert "streamed from pinned memory" in data.reason
    # An epoch may be abandoned in the middle of a piece, and the next one may need the same memory at once.
    for epoch, taken in enumerate((1, 2, 3, 4, 5, 11)):
        seen = [tuple(t.clone() for t in batch) for _, batch in zip(range(taken), data.epoch(epoch), strict=False)]
        order = permutation(41, 0, epoch, "cpu")[: 4 * taken]
        assert torch.equal(torch.cat([f for f, _ in seen]), features[order])
        assert torch.equal(torch.cat([n for _, n in seen]), labels[order])
    # Memory that the host has freed is not reused while the stream still writes to it.
    assert [cuda.kept[t.data_ptr()] for piece in data._pieces.there for t in piece] == 4 * [cuda.made]
    assert len(cuda.made) == 1


@pytest.mark.parametrize("side", [Reference, Optimized])
def test_tensors_with_different_row_counts_raise_an_error(side):
    with pytest.raises(PerfsuiteError, match="3, 4 rows; give as many of each"):
        side((torch.zeros(3), torch.zeros(4)), 2, "cpu")


class Graphs:
    """Backend that replays by address, as CUDA does: a replay reads what its buffers hold at that time."""

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
def test_captured_step_reads_each_batch_from_the_same_memory(limit):
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
def test_batches_match_the_reference_on_a_gpu(limit, no_host_sync):
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
