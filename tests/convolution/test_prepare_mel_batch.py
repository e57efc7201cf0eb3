import pytest
import torch

from optimized.convolution.prepare_mel_batch import _smaller
from optimized.convolution.prepare_mel_batch import prepare_mel_batch as optimized
from perfsuite import Cost, Pair, PerfsuiteError, Workload, side, size, stateful, tensor
from reference.convolution.prepare_mel_batch import prepare_mel_batch as reference
from suite.leak_cnn.costs import BATCH

SIDES = [reference, optimized]


def from_the_loader(side):
    """Give a side batches as a loader does: half precision in host memory, pinned if there is a GPU."""

    def make(mel, weight):
        host = mel.cpu()
        if mel.is_cuda:
            host = host.pin_memory()
        return lambda: side(host, mel.device, dtype=weight.dtype)

    return make


def inline(mel, device, channels_last=True, dtype=None):
    """Copy the batch unchanged and rearrange it on the device; the host waits for the copy."""
    batch = mel.to(device).unsqueeze(1)
    return (batch.contiguous(memory_format=torch.channels_last) if channels_last else batch).to(dtype or mel.dtype)


prepare_mel_batch = Pair(
    reference=stateful(from_the_loader(reference)),
    optimized=stateful(from_the_loader(optimized)),
    # The batch is stored in half precision; the network takes the dtype of its weights.
    inputs={"mel": tensor("B", "mels", "frames", dtype="float16"), "weight": tensor(1)},
    steps=(1, 2),
    sizes={"B": size(0, 33), "mels": size(0, 33), "frames": size(0, 4)},
    rivals={"inline": stateful(side(from_the_loader(inline), devices=("cuda",)))},
    workloads=[
        Workload("batch5632", B=BATCH, mels=32, frames=1, clock="wall", device="cuda", repeat=4, host_syncs=0),
        Workload("cpu", B=1024, mels=32, frames=1, clock="wall", device="cpu"),
    ],
    cost=Cost(bytes=lambda B, mels, frames: 6 * B * mels * frames),
)


def drawn(dtype=torch.float32, shape=(6, 32, 3)):
    return (100 * torch.randn(shape, generator=torch.Generator().manual_seed(0))).to(dtype)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("stored", [torch.float32, torch.float16])
@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("channels_last", [False, True])
def test_batch_has_the_requested_dtype_shape_and_layout(side, stored, dtype, channels_last):
    mel = drawn(stored)
    batch = side(mel, "cpu", channels_last, dtype)
    assert batch.dtype == (dtype or stored)
    assert batch.shape == (6, 1, 32, 3)
    assert batch.is_contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    assert torch.equal(batch[:, 0], mel.to(batch.dtype))


@pytest.mark.parametrize("side", SIDES)
def test_values_beyond_half_precision_become_infinite(side):
    mel = torch.tensor([[[1e5], [-1e5], [65504.0], [float("nan")]]])
    batch = side(mel, "cpu", dtype=torch.float16).flatten().tolist()
    assert batch[:3] == [float("inf"), float("-inf"), 65504.0]
    assert batch[3] != batch[3]


@pytest.mark.parametrize("side", SIDES)
def test_transposed_batch_becomes_channels_last(side):
    mel = drawn().transpose(0, 2)
    batch = side(mel, "cpu")
    assert batch.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(batch[:, 0], mel)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(
    ("mel", "message"),
    [
        (torch.zeros(2, 32), r"\[2, 32\] of torch.float32"),
        (torch.zeros(2, 1, 32, 1), r"\[2, 1, 32, 1\] of torch.float32"),
        (torch.zeros(2, 32, 1, dtype=torch.int16), r"\[2, 32, 1\] of torch.int16"),
    ],
)
def test_bad_input_raises_a_one_line_error(side, mel, message):
    with pytest.raises(PerfsuiteError, match=rf"^mel: {message}; give \[B, mels, frames\] of a floating dtype"):
        side(mel, "cpu")


def test_smaller_returns_the_dtype_of_fewer_bytes():
    half, single = torch.float16, torch.float32
    assert _smaller(half, single) is half
    assert _smaller(single, half) is half
    assert _smaller(half, torch.bfloat16) is half


class OnCuda(torch.Tensor):
    """Tensor that claims to be on a GPU."""

    is_cuda = True


@pytest.fixture
def transfers(monkeypatch):
    """Simulate a host with a GPU; record the dtypes copied into pinned memory, and what was sent and how."""
    pinned, staged, sent = set(), [], []
    empty, to = torch.empty, torch.Tensor.to

    def empty_(*arguments, pin_memory=False, **options):
        made = empty(*arguments, **options)
        if pin_memory:
            pinned.add(made.data_ptr())
            staged.append(made.dtype)
        return made

    def to_(tensor, target, **options):
        if target != "cuda":
            return to(tensor, target, **options)
        sent.append((tensor.data_ptr() in pinned, options))
        return tensor

    monkeypatch.setattr(torch, "empty", empty_)
    monkeypatch.setattr(torch.Tensor, "to", to_)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: tensor.data_ptr() in pinned)
    return pinned, staged, sent


@pytest.mark.parametrize(("dtype", "travels"), [(None, torch.float32), (torch.float16, torch.float16)])
def test_unpinned_batch_is_copied_to_pinned_memory_first(dtype, travels, transfers):
    _, staged, sent = transfers
    mel = drawn()
    batch = optimized(mel, "cuda", dtype=dtype)
    assert staged == [travels]
    assert sent == [(True, {"non_blocking": True})]
    assert torch.equal(batch[:, 0], mel.to(travels))


def test_pinned_batch_is_sent_without_a_host_copy(transfers):
    pinned, staged, sent = transfers
    mel = drawn(torch.float16)
    pinned.add(mel.data_ptr())
    batch = optimized(mel, "cuda", dtype=torch.float32)
    assert not staged
    assert sent == [(True, {"non_blocking": True})]
    assert torch.equal(batch[:, 0], mel.to(torch.float32))


def test_batch_on_the_gpu_is_not_copied_on_the_host(transfers):
    _, staged, _ = transfers
    batch = optimized(drawn().as_subclass(OnCuda), "cuda")
    assert not staged
    assert torch.equal(batch[:, 0], drawn())


@pytest.mark.gpu
@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("stored", [torch.float32, torch.float16])
@pytest.mark.parametrize("dtype", [None, torch.float16, torch.float32])
def test_host_does_not_wait_for_the_copy_on_a_gpu(pinned, stored, dtype, no_host_sync):
    mel = drawn(stored)
    given = mel.pin_memory() if pinned else mel
    with no_host_sync():
        batch = optimized(given, "cuda", dtype=dtype)
    assert batch.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(batch.cpu(), reference(mel, "cuda", dtype=dtype).cpu())
