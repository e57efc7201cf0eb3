import copy
import math

import pytest
import torch

from optimized.graphs.cuda_graph_step import cuda_graph_step
from optimized.synchronization.sync_free_scaler_step import ScalerStep as Optimized
from perfsuite import Cost, Pair, PerfsuiteError, Workload, floats, listof, sampled, size, stateful, tensor
from reference.synchronization.sync_free_scaler_step import ScalerStep as Reference
from suite.scaling import Scaling

SIDES = [Reference, Optimized]
# The scale is so small that clipping sometimes matters, and grows within a few steps.
SHORT = Scaling(init_scale=4.0, growth_interval=3)
# For the timed sizes: over thousands of steps a growing scale would leave only denormals.
STEADY = Scaling(growth_interval=1 << 30)
TIMED = 2048
# p, g, m and v are read, p, m and v written; g is read once more, for its norm.
BYTES_PER_PARAMETER = 32


def gradients(generator, shape, dtype):
    """Draw gradients of many magnitudes; one in eight tensors is not finite somewhere, except at the timed sizes."""
    drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
    drawn *= 10 ** float(torch.rand((), generator=generator) * 4 - 2)
    if 0 < drawn.numel() < TIMED and float(torch.rand((), generator=generator)) < 1 / 8:
        at = int(torch.randint(0, drawn.numel(), (), generator=generator))
        which = int(torch.randint(0, 3, (), generator=generator))
        drawn.view(-1)[at] = (math.nan, math.inf, -math.inf)[which]
    return drawn.to(dtype)


def training(side):
    """Return a side that steps on gradients in separate buffers, as a backward pass leaves them."""

    def make(params, lr):
        optimizer = side(params, lr, scaling=STEADY if params[0].numel() >= TIMED else SHORT)
        buffers = [torch.empty_like(p) for p in params]

        def step(grads):
            torch._foreach_copy_(buffers, grads)
            optimizer(buffers)
            return optimizer.scale

        return step

    return make


class GradScaler:
    """PyTorch's own parts, combined as documented; with a fused optimizer this does not wait either."""

    def __init__(self, params, lr, *, scaling):
        self.params, device = params, params[0].device.type
        self.optimizer = torch.optim.AdamW(params, lr=lr, fused=True)
        self.scaler = torch.amp.GradScaler(
            device, init_scale=scaling.init_scale, growth_interval=scaling.growth_interval
        )
        self.scaler.scale(torch.ones((), device=device))  # it creates its scale at the first use
        self.scale = self.scaler._scale

    def __call__(self, grads):
        for p, grad in zip(self.params, grads, strict=True):
            p.grad = grad
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.params, 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()


sync_free_scaler_step = Pair(
    reference=stateful(training(Reference)),
    optimized=stateful(training(Optimized)),
    inputs={
        "params": listof("count", tensor("rows", "columns", values=floats(-4, 4))),
        "lr": tensor(values=floats(1e-4, 1e-2), layouts=("contiguous",)),
    },
    step_inputs={"grads": listof("count", tensor("rows", "columns", values=sampled(gradients)))},
    mutates={"params"},
    sizes={"count": size(1, 3), "rows": size(0, 33), "columns": size(0, 33)},
    rivals={"grad_scaler": stateful(training(GradScaler))},
    workloads=[
        # As many parameters and tensors as leak_cnn has; the host and its launches take most of the time.
        Workload("leak_cnn", count=12, rows=224, columns=230, clock="wall", device="cuda", repeat=4, host_syncs=0),
        Workload("cpu", count=12, rows=64, columns=64, clock="wall", device="cpu"),
    ],
    cost=Cost(bytes=lambda count, rows, columns: BYTES_PER_PARAMETER * count * rows * columns),
)


def made(side, *, seed=0, scaling=SHORT, shapes=((5, 3), (7,)), **options):
    generator = torch.Generator().manual_seed(seed)
    params = [torch.randn(shape, generator=generator) for shape in shapes]
    return params, side(params, scaling=scaling, **options)


def drawn(seed, shapes=((5, 3), (7,)), factor=1.0):
    generator = torch.Generator().manual_seed(seed)
    return [factor * torch.randn(shape, generator=generator) for shape in shapes]


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(
    ("factor", "max_norm", "eps"),
    # The last values are as small as the constant added to the norm.
    [*((f, n, 1e-8) for f in (0.1, 100.0) for n in (0.2, 1.0, 30.0)), (1e-6, 1e-6, 1e-6)],
)
def test_steps_match_torch_grad_scaler_clipping_and_adamw(side, factor, max_norm, eps):
    """Results agree with GradScaler's own scale, clip_grad_norm_ and torch.optim.AdamW."""
    params, step = made(side, lr=0.1, max_norm=max_norm, eps=eps)
    expected = [torch.nn.Parameter(p.clone()) for p in params]
    optimizer = torch.optim.AdamW(expected, lr=0.1, eps=eps, foreach=False, fused=False)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)
    for seed in range(12):
        grads = drawn(seed, factor=factor)
        if seed in (2, 7, 8):
            grads[seed % 2].view(-1)[3] = math.nan if seed == 7 else math.inf
        scaler.scale(torch.ones(()))  # GradScaler creates its scale at the first use
        for p, grad in zip(expected, grads, strict=True):
            p.grad = grad.clone()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(expected, max_norm)
        scaler.step(optimizer)
        scaler.update()
        step(grads)
        assert step.scale.item() == scaler.get_scale()
        for p, e in zip(params, expected, strict=True):
            torch.testing.assert_close(p, e.detach())


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nonfinite_step_changes_only_the_scale(side, bad):
    params, step = made(side)
    step(drawn(1))
    before = [p.clone() for p in params]
    state = {k: [t.clone() for t in v] if isinstance(v, list) else v.clone() for k, v in step.state_dict().items()}
    grads = drawn(2)
    grads[1][6] = bad
    scale = step.scale
    step(grads)
    assert step.scale is scale
    assert step.scale.item() == 2.0
    after = step.state_dict()
    assert after["growth"].item() == 0
    assert after["steps"].item() == state["steps"].item() == 1
    now, then = [*params, *after["first"], *after["second"]], [*before, *state["first"], *state["second"]]
    assert all(torch.equal(a, b) for a, b in zip(now, then, strict=True))


@pytest.mark.parametrize("side", SIDES)
def test_scale_grows_after_growth_interval_consecutive_finite_steps(side):
    _, step = made(side)
    scales = []
    for bad in (0, 0, 0, 0, 0, 1, 0, 0, 0, 1, 1):
        grads = drawn(3)
        if bad:
            grads[0][0, 0] = math.inf
        step(grads)
        scales.append(step.scale.item())
    assert scales == [4, 4, 8, 8, 8, 4, 4, 4, 8, 4, 2]


@pytest.mark.parametrize("side", SIDES)
def test_the_scale_never_overflows(side):
    _, step = made(side, scaling=Scaling(init_scale=2.0**127, growth_interval=1))
    for _ in range(3):
        step(drawn(1))
        assert step.scale.item() == 2.0**127
        assert step.state_dict()["growth"].item() == 0


@pytest.mark.parametrize("side", SIDES)
def test_norm_of_large_scaled_gradients_does_not_overflow(side):
    # In float32 the sum of their squares overflows before the scale is divided out.
    params, step = made(side, scaling=Scaling(init_scale=2.0**70))
    expected, reference = made(Reference)
    reference([4.0 * g for g in drawn(1)])
    step([2.0**70 * g for g in drawn(1)])
    assert step.scale.item() == 2.0**70
    for p, e in zip(params, expected, strict=True):
        torch.testing.assert_close(p, e)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("factor", [1e-3, 1.0, 300.0, 1e4])
def test_reference_step_in_half_precision_equals_the_step_in_float32(dtype, factor):
    # In float16 eps is 0, and so is the second moment after gradients of common magnitude.
    start, low = drawn(0), [g.to(dtype) for g in drawn(1, factor=factor)]
    params, expected = [p.to(dtype) for p in start], [p.to(dtype).float() for p in start]
    Reference(params, lr=0.1)(low)
    Reference(expected, lr=0.1)([g.float() for g in low])
    for p, e in zip(params, expected, strict=True):
        assert torch.equal(p, e.to(dtype))


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("value", [0.0, 1e-4, 1.0, 300.0, 6e4])
def test_parameters_of_float16_stay_finite(side, value):
    param = torch.ones(4, dtype=torch.float16)
    step = side([param], lr=0.01)
    for _ in range(3):
        step([torch.full_like(param, value)])
        assert (param > 0.9).all()


@pytest.mark.parametrize("side", SIDES)
def test_learning_rate_is_read_at_each_step(side):
    rate = torch.tensor(0.1)
    params, step = made(side, lr=rate, weight_decay=0.0, shapes=((2,),))
    before = params[0].clone()
    step([torch.ones(2)])
    torch.testing.assert_close(params[0], before - 0.1)
    rate.fill_(0.5)
    step([torch.ones(2)])
    torch.testing.assert_close(params[0], before - 0.6)


@pytest.mark.parametrize(("side", "other"), [(Reference, Optimized), (Optimized, Reference)])
def test_each_side_resumes_from_the_state_dict_of_the_other(side, other):
    params, step = made(side)
    for seed in range(4):
        step(drawn(seed))
    moved = [p.clone() for p in params]
    resumed = other(moved, scaling=SHORT)
    resumed.load_state_dict(step.state_dict())
    for seed in range(4, 9):
        step(drawn(seed))
        resumed(drawn(seed))
    assert resumed.scale.item() == step.scale.item() == 32.0
    assert resumed.scale is not step.scale
    for p, e in zip(moved, params, strict=True):
        torch.testing.assert_close(p, e)


@pytest.mark.parametrize("side", SIDES)
def test_later_steps_do_not_change_a_state_dict(side):
    step = side([torch.ones(3)], scaling=SHORT)
    step([torch.ones(3)])
    state = step.state_dict()
    before = copy.deepcopy(state)
    for value in (2.0, 1.0, math.inf):
        step([torch.full((3,), value)])
    for name, value in before.items():
        torch.testing.assert_close(state[name], value, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("side", SIDES)
def test_parameters_of_unusual_layouts_match_dense_ones(side):
    """Parameters with gaps, transposed, channels last, empty and 0-d agree with dense ones."""

    def awkward(seed):
        one, two, three, four, five = drawn(seed, ((6, 8), (5, 7), (4, 3, 5, 5), (0, 3), (1,)))
        return [one[::2, ::2], two.t(), three.to(memory_format=torch.channels_last), four, five.view(())]

    params, expected = awkward(0), [p.clone(memory_format=torch.contiguous_format) for p in awkward(0)]
    step, dense = side(params, scaling=SHORT), Reference(expected, scaling=SHORT)
    for seed in range(1, 5):
        step(awkward(seed))
        dense([g.contiguous() for g in awkward(seed)])
    for p, e in zip(params, expected, strict=True):
        torch.testing.assert_close(p, e)


@pytest.mark.parametrize("side", SIDES)
def test_parameters_stay_leaves_after_a_step(side):
    for values in (torch.ones(3), torch.ones(6)[::2]):
        param = torch.nn.Parameter(values)
        side([param], lr=0.1, weight_decay=0.0, scaling=SHORT)([torch.ones(3)])
        assert param.is_leaf
        torch.testing.assert_close(param.detach(), torch.full((3,), 0.9))


@pytest.mark.parametrize("side", SIDES)
def test_bad_input_raises_an_error(side):
    with pytest.raises(PerfsuiteError, match="params: there are none"):
        side([])
    for wrong in (drawn(0)[:1], [*drawn(0), *drawn(0)]):
        with pytest.raises((ValueError, RuntimeError)):
            made(side)[1](wrong)
    step = made(side)[1]
    with pytest.raises(ValueError, match="zip"):
        step.load_state_dict({**step.state_dict(), "first": drawn(0)[:1]})


@pytest.mark.parametrize(
    "bad", [{"init_scale": 0.0}, {"growth_factor": 1.0}, {"backoff_factor": 1.0}, {"growth_interval": 0}]
)
def test_bad_scaling_raises_an_error(bad):
    with pytest.raises(PerfsuiteError, match=f"^{next(iter(bad))}: .* is out of range; give"):
        Scaling(**bad)


@pytest.mark.gpu
def test_step_is_captured_and_does_not_wait_on_a_gpu(no_host_sync):
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(5, 3, generator=generator), torch.randn(7, generator=generator)]
    params, expected = [p.cuda() for p in start], [p.clone() for p in start]
    step = Optimized(params, torch.tensor(0.1, device="cuda"), scaling=SHORT)
    reference = Reference(expected, 0.1, scaling=SHORT)
    buffers = [torch.zeros_like(p) for p in params]
    graphed = cuda_graph_step(lambda: step(buffers), device="cuda")
    for seed in range(12):
        grads = drawn(seed)
        if seed in (1, 8):
            grads[0][0, 0] = math.nan
        for buffer, grad in zip(buffers, grads, strict=True):
            buffer.copy_(grad)
        if seed > 4:
            with no_host_sync():
                graphed()
        else:
            graphed()
        reference(grads)
        assert step.scale.item() == reference.scale.item()
    assert graphed.captures == 1
    for p, e in zip(params, expected, strict=True):
        torch.testing.assert_close(p.cpu(), e)
