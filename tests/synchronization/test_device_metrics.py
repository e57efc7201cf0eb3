import copy
import io
import math
import pickle

import pytest
import torch
from scale import steps

from optimized.synchronization.device_metrics import DeviceMetrics as Optimized
from perfsuite import Cost, Pair, PerfsuiteError, Workload, integers, listof, size, stateful, tensor
from reference.synchronization.device_metrics import DeviceMetrics as Reference
from suite.leak_cnn.costs import BATCH, ROWS
from suite.leak_cnn.metrics import EpochMetrics, accuracy, examples, macro_f1

CLASSES = 5
SIDES = [Reference, Optimized]


def epoch(metrics):
    """Return a side whose step adds an epoch's batches and returns the metrics at its end."""

    def make(anchor):
        held = metrics(CLASSES, anchor.device)

        def step(losses, logits, labels):
            held.reset()
            for batch in zip(losses, logits, labels, strict=True):
                held.add(*batch)
            return held.value()

        return step

    return make


class Kept:
    """Losses and predictions that stay on the device until the end of the epoch, and are counted there at once."""

    def __init__(self, classes, device):
        self.classes = classes

    def reset(self):
        self.losses, self.cells = [], []

    @torch.no_grad()
    def add(self, loss, logits, labels):
        self.losses.append(loss.double() * len(labels))
        self.cells.append(labels * self.classes + logits.argmax(1))

    def value(self):
        total = torch.stack(self.losses).sum().item()
        counts = torch.bincount(torch.cat(self.cells), minlength=self.classes**2)
        confusion = counts.view(self.classes, self.classes).tolist()
        return EpochMetrics(total / examples(confusion), accuracy(confusion), macro_f1(confusion), confusion)


device_metrics = Pair(
    reference=stateful(epoch(Reference)),
    optimized=stateful(epoch(Optimized)),
    inputs={"anchor": tensor()},
    step_inputs={
        "losses": listof("batches", tensor()),
        "logits": listof("batches", tensor("B", CLASSES)),
        "labels": listof("batches", tensor("B", dtype="int64", values=integers(0, CLASSES))),
    },
    sizes={"batches": size(1, 8), "B": size(1, 65)},
    steps=steps(cpu=(1, 2, 5), otherwise=(1, 2, 17)),
    rivals={"kept": stateful(epoch(Kept))},
    workloads=[
        # The host waits only once, to read the epoch's metrics.
        Workload("epoch", batches=-(-ROWS // BATCH), B=BATCH, clock="wall", device="cuda", host_syncs=1),
        Workload("cpu", batches=7, B=256, clock="wall", device="cpu"),
    ],
    cost=Cost(bytes=lambda batches, B: batches * (4 * (CLASSES * B + 1) + 8 * B)),
)


def counted(side, classes=3):
    held = side(classes, "cpu")
    held.add(torch.tensor(0.5), torch.eye(3), torch.tensor([0, 1, 1]))
    held.add(torch.tensor(2.0), torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([2]))
    return held


@pytest.mark.parametrize("side", SIDES)
def test_known_values(side):
    loss, accuracy, f1, confusion = counted(side).value()
    assert loss == (3 * 0.5 + 2.0) / 4
    assert accuracy == 3 / 4
    assert confusion == [[1, 0, 0], [0, 1, 1], [0, 0, 1]]
    assert f1 == pytest.approx((1 + 2 / 3 + 2 / 3) / 3)


@pytest.mark.parametrize("side", SIDES)
def test_value_changes_nothing_and_reset_clears_the_metrics(side):
    held = counted(side)
    first = held.value()
    assert held.value() == first
    held.add(torch.tensor(0.0), torch.eye(3), torch.tensor([0, 1, 2]))
    assert held.value().confusion != first.confusion
    assert first.confusion == [[1, 0, 0], [0, 1, 1], [0, 0, 1]]
    held.reset()
    held.add(torch.tensor(1.0), torch.eye(3)[:1], torch.tensor([1]))
    assert held.value() == (1.0, 0.0, 0.0, [[0, 0, 0], [1, 0, 0], [0, 0, 0]])


@pytest.mark.parametrize("side", SIDES)
def test_small_losses_added_to_a_large_one_are_not_lost(side):
    held = side(2, "cpu")
    held.add(torch.tensor(1e8), torch.zeros(1, 2), torch.tensor([0]))
    for _ in range(1000):
        held.add(torch.tensor(1.0), torch.zeros(1, 2), torch.tensor([0]))  # below half a unit of 1e8 in float32
    assert held.value().loss == (1e8 + 1000) / 1001


@pytest.mark.parametrize("side", SIDES)
def test_nonfinite_losses_make_the_mean_loss_nonfinite(side):
    held = counted(side)
    held.add(torch.tensor(math.inf), torch.eye(3), torch.tensor([0, 1, 2]))
    assert held.value().loss == math.inf
    held.add(torch.tensor(-math.inf), torch.eye(3), torch.tensor([0, 1, 2]))
    assert math.isnan(held.value().loss)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("empty", [False, True])
def test_value_without_examples_raises_an_error(side, empty):
    held = side(3, "cpu")
    if empty:
        held.add(torch.tensor(1.0), torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64))
    with pytest.raises(PerfsuiteError, match="no example was counted; add a batch before"):
        held.value()


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_losses_and_logits_may_be_half_precision_and_require_gradients(side, dtype):
    held = side(2, "cpu")
    logits = torch.tensor([[1.0, 2.0]], dtype=dtype, requires_grad=True)
    for _ in range(3):
        held.add(logits.sum() / 7, logits, torch.tensor([1]))
    assert held.value().loss == torch.tensor(3.0 / 7, dtype=dtype).item()
    assert held.value().confusion == [[0, 0], [0, 3]]
    if side is Optimized:
        assert not held._loss.requires_grad


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda metrics: pickle.loads(pickle.dumps(metrics))])
def test_copied_metrics_accumulate_on_their_own(side, copied):
    metrics = side(2, "cpu")
    metrics.add(torch.tensor(1.0), torch.eye(2), torch.tensor([0, 1]))
    other = copied(metrics)
    other.add(torch.tensor(3.0), torch.eye(2), torch.tensor([1, 1]))
    assert (other.value().loss, other.value().confusion) == (2.0, [[1, 0], [1, 2]])
    assert (metrics.value().loss, metrics.value().confusion) == (1.0, [[1, 0], [0, 1]])


@pytest.mark.parametrize("side", SIDES)
def test_metrics_can_be_saved_and_loaded(side):
    metrics, file = side(2, "cpu"), io.BytesIO()
    metrics.add(torch.tensor(1.0), torch.eye(2), torch.tensor([0, 1]))
    torch.save(metrics, file)
    file.seek(0)
    assert torch.load(file, weights_only=False).value() == metrics.value()


@pytest.mark.gpu
def test_add_does_not_wait_on_a_gpu(no_host_sync):
    held = Optimized(CLASSES, "cuda")
    logits = torch.randn(64, CLASSES, device="cuda")
    labels = torch.randint(0, CLASSES, (64,), device="cuda")
    with no_host_sync():
        held.reset()
        for _ in range(3):
            held.add(logits.mean(), logits, labels)
    assert sum(map(sum, held.value().confusion)) == 192
