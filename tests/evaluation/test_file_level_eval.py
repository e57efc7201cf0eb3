import math

import pytest
import torch

from optimized.evaluation.file_level_eval import file_level_eval as optimized
from optimized.evaluation.file_level_eval import file_level_eval_preallocated
from perfsuite import Cost, Pair, PerfsuiteError, Workload, floats, size, tensor
from reference.evaluation.file_level_eval import file_level_eval as reference

SIDES = [reference, optimized, file_level_eval_preallocated]
CLASSES = 5
HIDDEN = 16


def forward_of(weights):
    """Return a perceptron of leak_cnn's form: segments [N, 1, mels, 1] → logits [N, classes] and [N]."""

    def forward(segments):
        hidden = (segments.flatten(1) @ weights["hidden"] + weights["bias"]).relu()
        return hidden @ weights["classes"], (hidden @ weights["leak"]).squeeze(1)

    return forward


def evaluating(side):
    return lambda weights, mels: side(forward_of(weights), mels)


# Bound on the float32 rounding error of a probability.
NEAR = 1e-5


def near_the_threshold(weights, mels):
    """Return a mask of the files that rounding could move across the threshold."""
    p, _ = reference(forward_of(weights), mels)
    needed = (p.shape[1] + 1) // 2
    either = [(p >= 0.5 + by).sum(1) >= needed for by in (-NEAR, NEAR)]
    return {"output[1]": either[0] != either[1]}


WEIGHTS = {
    "hidden": tensor("mels", HIDDEN, values=floats(-1, 1)),
    "bias": tensor(HIDDEN, values=floats(-1, 1)),
    "classes": tensor(HIDDEN, CLASSES, values=floats(-1, 1)),
    "leak": tensor(HIDDEN, 1, values=floats(-1, 1)),
}

file_level_eval = Pair(
    reference=evaluating(reference),
    optimized=evaluating(optimized),
    inputs={"weights": WEIGHTS, "mels": tensor("files", "longs", "shorts", "mels", 1)},
    gradients=False,
    # Few windows, because the reference evaluates each by itself, in every replica of a draw.
    sizes={"files": size(0, 4), "longs": size(1, 17), "shorts": size(1, 3), "mels": size(1, 33)},
    excuse=near_the_threshold,
    rivals={"preallocated": evaluating(file_level_eval_preallocated)},
    variants={"preallocated": evaluating(file_level_eval_preallocated)},
    workloads=[
        Workload(
            "files125", files=125, longs=40, shorts=2, mels=32, clock="wall", device="cuda", speedup=20.0, host_syncs=0
        ),
        Workload("cpu", files=8, longs=40, shorts=2, mels=32, clock="wall", device="cpu"),
    ],
    cost=Cost(
        bytes=lambda files, longs, shorts, mels: 4 * files * longs * (shorts * mels + 1) + files,
        flops=lambda files, longs, shorts, mels: 2 * files * longs * shorts * HIDDEN * (mels + CLASSES + 1),
    ),
)


def given(segments):
    """Return the input as the model's logits: first those of five classes, then the leak's."""
    values = segments.flatten(1)
    return values[:, :CLASSES], values[:, CLASSES]


def files_of(p, shorts=2):
    """Build input of `given` whose long windows have exactly the probabilities p [files, longs]: multiples of 0.25."""
    values = torch.full((*p.shape, shorts, CLASSES + 1, 1), -math.inf)
    # Each head gives exactly 0, ½ or 1. Softmax has one class other than LEAK, which gives ½ if both logits are 0.
    of_classes, of_leak = (2 * p).clamp(max=1), (2 * p - 1).clamp(min=0)
    values[..., 2, 0][of_classes > 0] = 0.0
    values[..., 0, 0][of_classes < 1] = 0.0
    values[..., CLASSES, 0][of_leak > 0] = 0.0
    values[..., CLASSES, 0][of_leak == 1] = math.inf
    return values


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(("longs", "needed"), [(40, 20), (39, 20), (1, 1), (2, 1)])
def test_file_leaks_if_at_least_half_of_its_windows_reach_the_threshold(side, longs, needed):
    p = torch.zeros(longs + 1, longs)
    for windows in range(longs + 1):
        p[windows, :windows] = 0.75
    found, leaks = side(given, files_of(p))
    assert torch.equal(found, p)
    assert leaks.tolist() == [windows >= needed for windows in range(longs + 1)]


@pytest.mark.parametrize("side", [s for s in SIDES if s is not reference])
def test_model_runs_without_recording_gradients(side):
    recording = []
    side(lambda segments: (recording.append(torch.is_grad_enabled()), given(segments))[1], files_of(torch.ones(3, 4)))
    assert set(recording) == {False}


@pytest.mark.parametrize("side", SIDES)
def test_a_window_at_the_threshold_counts(side):
    p = torch.tensor([[0.5, 0.25, 0.5, 0.0], [0.5, 0.25, 0.25, 0.25]])
    found, leaks = side(given, files_of(p))
    assert torch.equal(found, p)
    assert leaks.tolist() == [True, False]


@pytest.mark.parametrize("side", SIDES)
def test_the_threshold_is_not_rounded(side):
    mels = torch.randn(1, 1, 2, 6, 1, generator=torch.Generator().manual_seed(0))
    found = side(given, mels)[0].item()
    assert side(given, mels, found)[1].item() is True
    assert side(given, mels, math.nextafter(found, 1.0))[1].item() is False


@pytest.mark.parametrize("side", SIDES)
def test_probabilities_are_compared_in_the_dtype_of_the_models_results(side):
    # As under autocast. The probability is (1/5 + 1/2) / 2 = 0.35, and 0.3496 in bfloat16.
    mels = torch.zeros(1, 1, 2, CLASSES + 1, 1, dtype=torch.bfloat16)
    found, leaks = side(lambda segments: given(segments.float()), mels, 0.3499)
    assert found.dtype == torch.bfloat16
    assert leaks.item() is True


@pytest.mark.parametrize("side", SIDES)
def test_nan_window_does_not_count(side):
    mels = files_of(torch.full((3, 4), 0.75))
    mels[0, :2, 1, 2] = math.nan
    mels[1, :3, 0, 5] = math.nan
    found, leaks = side(given, mels)
    assert found.isnan().sum(1).tolist() == [2, 3, 0]
    assert leaks.tolist() == [True, False, True]


@pytest.mark.parametrize("side", SIDES)
def test_no_files_give_empty_results(side):
    found, leaks = side(given, torch.zeros(0, 40, 2, 6, 1))
    assert found.shape == (0, 40)
    assert (leaks.shape, leaks.dtype) == ((0,), torch.bool)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("shape", [(3, 40, 2, 32), (3, 0, 2, 32, 1), (3, 40, 0, 32, 1)])
def test_mels_of_a_bad_shape_raise_an_error(side, shape):
    with pytest.raises(PerfsuiteError, match=r"^mels: the shape is \[3, .*; give \[files, long windows"):
        side(given, torch.zeros(shape))


@pytest.mark.parametrize(("files_at_once", "calls"), [(1, 5), (2, 3), (5, 1), (128, 1), (0, 5)])
def test_files_at_once_limits_the_files_per_model_call(files_at_once, calls):
    seen = []

    def model(segments):
        seen.append(len(segments))
        return given(segments)

    mels = torch.randn(5, 4, 2, 6, 1, generator=torch.Generator().manual_seed(0))
    whole = reference(given, mels)
    parts = optimized(model, mels, files_at_once=files_at_once)
    assert len(seen) == calls
    assert sum(seen) == 40
    assert max(seen) <= 8 * max(1, files_at_once)
    torch.testing.assert_close(parts, whole)


def test_the_model_sees_each_segment_once_and_in_order():
    mels = torch.arange(3 * 4 * 2 * 6.0).view(3, 4, 2, 6, 1)
    seen = []

    def model(segments):
        seen.append(segments.clone())
        return given(segments)

    optimized(model, mels, files_at_once=2)
    assert torch.equal(torch.cat(seen), mels.view(24, 1, 6, 1))
    seen.clear()
    reference(model, mels)
    assert torch.equal(torch.cat(seen), mels.view(24, 1, 6, 1))


@pytest.mark.parametrize("side", SIDES)
def test_probabilities_require_no_gradient(side):
    weights = torch.ones(6, 6, requires_grad=True)
    found, _ = side(lambda segments: given(segments.flatten(1) @ weights), torch.ones(2, 4, 2, 6, 1))
    assert not found.requires_grad


@pytest.mark.gpu
def test_evaluation_does_not_wait_on_a_gpu(no_host_sync):
    mels = torch.randn(5, 40, 2, 6, 1, device="cuda")
    with no_host_sync():
        found, leaks = optimized(given, mels, files_at_once=2)
    expected = reference(given, mels)
    torch.testing.assert_close(found, expected[0])
    assert torch.equal(leaks, expected[1])
