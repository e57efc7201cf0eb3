import math

import pytest
import torch

from optimized.geometry import metric_update as module
from optimized.geometry.metric_update import metric_update as optimized
from optimized.geometry.metric_update import metric_update_triton, metric_update_vectorised
from optimized.kernels import triton_reason
from perfsuite import Cost, Pair, Workload, compiled, floats, side, tensor
from reference.geometry.metric_update import metric_update as reference

metric_update = Pair(
    reference=reference,
    optimized=optimized,
    inputs={
        "metric_diag": tensor("n", values=floats(0.01, 100)),
        "velocity_rotated": tensor("n"),
        "loss_delta": tensor(),
    },
    mutates={"metric_diag"},
    gradients=False,
    rivals={"compile": compiled(side(metric_update_vectorised, devices=("cuda",)))},
    variants={
        "triton": side(metric_update_triton, available=triton_reason),
        "vectorised": metric_update_vectorised,
    },
    workloads=[
        Workload("n8", n=8, clock="wall", device="cuda", speedup=2.0, host_syncs=0, launches=1),
        Workload("cpu", n=8, clock="wall", device="cpu"),
    ],
    cost=Cost(bytes=lambda n: 12 * n + 4),
)

SIDES = [reference, optimized, metric_update_vectorised]
if triton_reason() is None and not torch.cuda.is_available():
    SIDES.append(metric_update_triton)


def update(call, metric, velocity, loss_delta, **options):
    metric = torch.tensor(metric)
    assert call(metric, torch.tensor(velocity), torch.tensor(loss_delta), **options) is metric
    return metric.tolist()


@pytest.mark.parametrize("call", SIDES)
def test_known_values(call):
    moved = update(call, [1.0, 2.0, 3.0], [1.0, 2.0, 0.0], 0.1)
    assert moved == pytest.approx([1.2, 2.8, 3.0])
    assert update(call, [1.0, 2.0], [1.0, 1.0], -0.25, eta=2.0) == pytest.approx([0.75, 1.75])


@pytest.mark.parametrize("call", SIDES)
def test_metric_is_clamped_to_its_range(call):
    assert update(call, [1.0, 2.0, 0.001], [1.0, 0.0, 0.0], -5.0) == pytest.approx([0.01, 2.0, 0.01])
    assert update(call, [99.0, 2.0, 200.0], [1.0, 0.0, 0.0], 5.0) == pytest.approx([100.0, 2.0, 100.0])


@pytest.mark.parametrize("call", SIDES)
def test_zero_velocity_leaves_the_metric_unchanged(call):
    assert update(call, [1.0, 2.0], [0.0, 0.0], 5.0) == [1.0, 2.0]


@pytest.mark.parametrize("call", SIDES)
@pytest.mark.parametrize(
    ("velocity", "loss_delta"),
    [
        ([1.0, 2.0], math.nan),
        ([1.0, 2.0], math.inf),
        ([0.0, 0.0], -math.inf),
        ([math.nan, 2.0], 0.1),
        ([1.0, -math.inf], 0.1),
        ([1.0, math.inf], 0.0),
        ([3e38, 1.0], 0.1),  # its square overflows
        ([1.0, 0.0], 3e38),  # times eta it overflows: one step is infinite, the other NaN
    ],
)
def test_nonfinite_step_leaves_the_metric_unchanged(call, velocity, loss_delta):
    # The metric is not clamped either.
    assert update(call, [0.001, 200.0], velocity, loss_delta) == pytest.approx([0.001, 200.0])


@pytest.mark.parametrize("call", SIDES)
def test_nan_in_the_metric_stays_nan(call):
    moved = update(call, [math.nan, 1.0], [1.0, 1.0], 0.1)
    assert math.isnan(moved[0])
    assert moved[1] == pytest.approx(1.5)


@pytest.mark.parametrize("call", SIDES)
def test_empty_metric_stays_empty(call):
    assert update(call, [], [], 0.1) == []


@pytest.mark.parametrize(
    ("gpu", "n", "path"),
    [(True, 8, "kernel"), (True, 4096, "kernel"), (True, 4097, "vectorised"), (False, 8, "vectorised")],
)
def test_kernel_is_used_on_a_gpu_for_up_to_4096_coordinates(gpu, n, path, monkeypatch):
    module = "optimized.geometry.metric_update"
    asked = []
    monkeypatch.setattr(f"{module}.use_triton", lambda *tensors: asked.extend(tensors) or gpu)
    monkeypatch.setattr(f"{module}.metric_update_triton", lambda *arguments: ("kernel", *arguments))
    monkeypatch.setattr(f"{module}.metric_update_vectorised", lambda *arguments: ("vectorised", *arguments))
    arguments = (torch.empty(n), torch.empty(n), torch.tensor(0.5), 3.0)
    served, *given = optimized(*arguments)
    assert served == path
    assert all(a is b for a, b in zip(given, arguments, strict=True))
    assert [id(t) for t in asked] in ([id(t) for t in arguments[:3]], [])


@pytest.mark.parametrize("n", [1, 3, 8, 257, 512, 4096])
def test_launch_has_one_program_and_options_valid_on_a_gpu(n, monkeypatch):
    launches = []
    # One program only: others would change the metric a second time.
    kernel = {(1,): lambda *arguments, **options: launches.append(options)}
    monkeypatch.setattr(module, "_metric_update_kernel", kernel)
    metric_update_triton(torch.empty(n), torch.empty(n), torch.tensor(0.5))
    (options,) = launches
    block, warps = options["BLOCK"], options["num_warps"]
    assert n <= block < 2 * n
    assert 1 <= warps <= 32
    assert block.bit_count() == warps.bit_count() == 1  # powers of two


@pytest.mark.interpreted
@pytest.mark.parametrize("n", [1, 3, 8, 257, 4096, 4097])
def test_kernel_matches_the_reference_at_each_size(n):
    generator = torch.Generator().manual_seed(0)
    velocity, loss_delta = torch.randn(n, generator=generator), torch.tensor(-0.3)
    whole = torch.full((n + 2,), 7.0)
    whole[1:-1] = torch.rand(n, generator=generator) + 0.5
    expected = reference(whole[1:-1].clone(), velocity, loss_delta)
    torch.testing.assert_close(metric_update_triton(whole[1:-1], velocity, loss_delta), expected)
    # The neighbouring elements are unchanged.
    assert whole[0] == whole[-1] == 7.0
