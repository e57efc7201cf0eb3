import math
from types import SimpleNamespace

import pytest
import torch

from optimized.geometry.lior_and_speed import (
    lior_and_speed as optimized,
)
from optimized.geometry.lior_and_speed import (
    lior_and_speed_triton,
    lior_and_speed_vectorised,
)
from optimized.kernels import triton_reason
from perfsuite import Cost, Pair, Workload, compiled, constant, floats, sampled, side, size, tensor
from reference.geometry.lior_and_speed import lior_and_speed as reference


def metric(generator, shape, dtype):
    """Draw a definite metric of either sign, which is not nearly flat in any direction."""
    n = shape[0]
    factor = torch.randn(shape, generator=generator, dtype=torch.float64)
    sign = 1 if torch.rand((), generator=generator) < 0.8 else -1
    return sign * (factor @ factor.t() / max(n, 1) + 0.1 * torch.eye(n))


def traffic(form):
    """Count the bytes of a call: inputs read once, outputs written once. `form` is the metric's size in values."""

    def count(B, n, direction):
        forward = 4 * (B * n + 3 * B + form(n))
        backward = 4 * (2 * B * n + 4 * B + 2 * form(n))
        return {"forward": forward, "backward": backward, "both": forward + backward}[direction]

    return count


WORKLOADS = [
    Workload("batch64", B=64, n=8, device="cuda", repeat=32, speedup=4.0, host_syncs=0, launches=1),
    Workload("rows4m", B=2**22, n=8, device="cuda", speedup=5.0),
    Workload("rows1m_both", B=2**20, n=8, direction="both", device="cuda", speedup=4.0),
    Workload("cpu", B=4096, n=8, clock="wall", direction="both", device="cpu"),
]
RIVALS = {"compile": compiled(side(reference, devices=("cuda",)))}

lior_and_speed = Pair(
    reference=reference,
    optimized=optimized,
    inputs={
        "velocity": tensor("B", "n"),
        "curvature": tensor("B", values=floats(0, 4)),
        # An expanded tensor repeats one row, so it is not a metric.
        "metric": tensor("n", "n", values=sampled(metric), layouts=("contiguous", "transposed", "strided", "offset")),
    },
    sizes={"n": size(0, 12)},
    rivals=RIVALS,
    variants={"triton": side(lior_and_speed_triton, available=triton_reason)},
    workloads=WORKLOADS,
    cost=Cost(bytes=traffic(lambda n: n * n)),
)

lior_and_speed_diagonal = Pair(
    reference=reference,
    optimized=optimized,
    inputs={
        "velocity": tensor("B", "n"),
        "curvature": tensor("B", values=floats(0, 4)),
        "metric": constant(None),
        "metric_diag": tensor("n", values=floats(0.01, 100)),  # the range the metric update clamps it to
    },
    sizes={"n": size(0, 12)},
    rivals=RIVALS,
    variants={"triton": side(lior_and_speed_triton, available=triton_reason)},
    workloads=WORKLOADS[1:],
    cost=Cost(bytes=traffic(lambda n: n)),
)

SIDES = [reference, optimized, lior_and_speed_vectorised]
if triton_reason() is None and not torch.cuda.is_available():
    SIDES.append(lior_and_speed_triton)


@pytest.mark.parametrize("call", SIDES)
def test_known_values(call):
    velocity = torch.tensor([[3.0, 4.0], [0.0, 0.0], [1.0, 1.0]])
    curvature = torch.tensor([2.0, 3.0, 0.5])
    lior, speed = call(velocity, curvature, torch.eye(2))
    assert speed.tolist() == pytest.approx([5.0, 1e-4, math.sqrt(2)])
    assert lior.tolist() == pytest.approx([10.0, 3e-4, math.sqrt(2) / 2])
    lior, speed = call(velocity, curvature, None, torch.tensor([1.0, 4.0]))
    assert speed.tolist() == pytest.approx([math.sqrt(73), 1e-4, math.sqrt(5)])
    lior, speed = call(velocity, curvature, torch.tensor([[0.0, 1.0], [0.0, 0.0]]), eps=0.25)
    assert speed.tolist() == pytest.approx([3.5, 0.5, math.sqrt(1.25)])


@pytest.mark.parametrize("call", SIDES)
def test_clamp_passes_the_gradient_at_zero_but_not_below(call):
    velocity = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]], requires_grad=True)
    form = torch.tensor([[1.0, 1.0], [0.0, -1.0]], requires_grad=True)
    _, speed = call(velocity, torch.ones(3), form)
    speed.sum().backward()
    assert velocity.grad.tolist() == [pytest.approx([1.0, 0.5]), [0.0, 0.0], [0.0, 0.0]]
    # The second row's form is negative, so it adds nothing to the metric's gradient.
    assert form.grad.tolist() == [pytest.approx([0.5, 0.0]), [0.0, 0.0]]


@pytest.mark.parametrize("call", SIDES)
@pytest.mark.parametrize("diagonal", [False, True])
def test_metric_gradient_without_eps_matches_the_formula(call, diagonal):
    velocity = torch.tensor([[1.0, 2.0], [3.0, 1.0], [0.5, -1.0]])
    form = (torch.ones(2) if diagonal else torch.eye(2)).requires_grad_()
    lior, speed = call(velocity, torch.ones(3), *((None, form) if diagonal else (form,)), eps=0.0)
    (lior + speed).sum().backward()
    length = velocity.norm(dim=-1)
    expected = (velocity.square() if diagonal else velocity[:, :, None] * velocity[:, None]) / length.reshape(
        -1, *(1,) * form.dim()
    )
    torch.testing.assert_close(form.grad, expected.sum(0))


@pytest.mark.parametrize("call", [optimized, lior_and_speed_vectorised, lior_and_speed_triton])
def test_each_row_may_have_its_own_metric(call):
    generator = torch.Generator().manual_seed(0)
    velocity = torch.randn(5, 3, generator=generator)
    factor = torch.randn(5, 3, 3, generator=generator)
    forms = factor @ factor.mT
    for got, expected in zip(
        call(velocity, torch.ones(5), forms), reference(velocity, torch.ones(5), forms), strict=True
    ):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("call", SIDES)
@pytest.mark.parametrize("diagonal", [False, True])
def test_nonfinite_row_does_not_affect_lior_and_speed_of_others(call, diagonal):
    velocity = torch.tensor([[math.nan, 1.0], [1.0, 2.0], [math.inf, 1.0]])
    form = (None, torch.ones(2)) if diagonal else (torch.ones(2, 2),)
    found = call(velocity, torch.full((3,), 2.0), *form)
    for values, scale in zip(found, (2, 1), strict=True):
        assert math.isnan(values[0])
        assert values[1].item() == pytest.approx(scale * math.sqrt(5 if diagonal else 9))
        assert values[2].item() == math.inf


def one_path(monkeypatch, gpu):
    """Make each path return its name; return the list of tensors passed to `use_triton`."""
    module = "optimized.geometry.lior_and_speed"
    asked = []
    monkeypatch.setattr(f"{module}.use_triton", lambda *tensors: asked.extend(tensors) or gpu)
    monkeypatch.setattr(f"{module}.lior_and_speed_vectorised", lambda *arguments: "vectorised")
    monkeypatch.setattr(f"{module}._LiorAndSpeed", SimpleNamespace(apply=lambda *arguments: "kernels"))
    return asked


@pytest.mark.parametrize("diagonal", [False, True])
@pytest.mark.parametrize(("n", "path"), [(0, "vectorised"), (1, "kernels"), (8, "kernels"), (9, "vectorised")])
@pytest.mark.parametrize("gpu", [True, False])
def test_kernels_are_used_on_a_gpu_for_1_to_8_coordinates(n, path, gpu, diagonal, monkeypatch):
    asked = one_path(monkeypatch, gpu)
    velocity, curvature = torch.empty(3, n), torch.empty(3)
    metric, diag = (None, torch.empty(n)) if diagonal else (torch.empty(n, n), None)
    assert optimized(velocity, curvature, metric, diag) == (path if gpu else "vectorised")
    assert lior_and_speed_triton(velocity, curvature, metric, diag) == path
    if path == "kernels":
        form = diag if diagonal else metric
        assert [id(t) for t in asked] == [id(t) for t in (velocity, curvature, form)]


def test_kernels_are_used_only_if_all_rows_share_one_metric(monkeypatch):
    one_path(monkeypatch, gpu=True)
    for call in (optimized, lior_and_speed_triton):
        assert call(torch.empty(3, 2), torch.empty(3), torch.empty(3, 2, 2)) == "vectorised"
        # If a diagonal is given, it replaces the metric.
        assert call(torch.empty(3, 2), torch.empty(3), torch.empty(3, 2, 2), torch.empty(2)) == "kernels"


@pytest.mark.interpreted
@pytest.mark.parametrize("diagonal", [False, True])
@pytest.mark.parametrize(("rows", "n"), [(1, 1), (3, 2), (129, 3), (300, 4), (520, 5), (2, 7), (600, 8)])
def test_the_kernels_write_within_their_outputs(rows, n, diagonal, fences):
    generator = torch.Generator().manual_seed(0)
    velocity = torch.randn(rows, n, generator=generator, requires_grad=True)
    curvature = torch.rand(rows, generator=generator, requires_grad=True)
    form = (torch.rand(n, generator=generator) if diagonal else torch.eye(n)).requires_grad_()
    lior, speed = lior_and_speed_triton(velocity, curvature, *((None, form) if diagonal else (form,)))
    (lior + speed).sum().backward()
    assert fences.intact()


@pytest.mark.interpreted
def test_the_kernels_refuse_a_second_derivative():
    velocity = torch.randn(3, 2, generator=torch.Generator().manual_seed(0), requires_grad=True)
    lior, _ = lior_and_speed_triton(velocity, torch.ones(3), torch.eye(2))
    (first,) = torch.autograd.grad(lior.square().sum(), velocity, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()
