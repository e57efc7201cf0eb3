import copy
import pickle

import pytest
import torch
from scale import draws, steps

from optimized.kernels import triton_reason
from optimized.optimizers.fused_adamw import adamw as optimized
from optimized.optimizers.fused_adamw import adamw_torch, adamw_triton
from perfsuite import Cost, Pair, Workload, compiled, floats, listof, side, size, stateful, tensor
from reference.optimizers.fused_adamw import adamw as reference


def adamw_foreach(params):
    """Step the implementation that PyTorch picks for CUDA tensors by default."""
    # With capturable the step count is on the device, so that a compiled step need not be compiled again.
    capturable = bool(params) and params[0].is_cuda
    optimizer = torch.optim.AdamW(params, foreach=True, capturable=capturable)

    def step(grads):
        for p, grad in zip(params, grads, strict=True):
            p.grad = grad
        optimizer.step()

    return step


RIVALS = {
    "fused": stateful(adamw_torch),
    "foreach": stateful(adamw_foreach),
    "compile": compiled(stateful(side(adamw_foreach, devices=("cuda",)))),
}
VARIANTS = {"triton": stateful(side(adamw_triton, available=triton_reason)), "torch": stateful(adamw_torch)}
# p, g, m and v are read, p, m and v written.
BYTES_PER_PARAMETER = 28

fused_adamw = Pair(
    reference=stateful(reference),
    optimized=stateful(optimized),
    inputs={"params": listof("count", tensor("rows", "columns", values=floats(-4, 4)))},
    step_inputs={"grads": listof("count", tensor("rows", "columns"))},
    mutates={"params"},
    sizes={"count": size(0, 3), "rows": size(0, 49), "columns": size(0, 49)},
    steps=steps(cpu=(1, 2, 5), otherwise=(1, 2, 17, 100)),
    rivals=RIVALS,
    variants=VARIANTS,
    workloads=[
        # 52 M parameters in so few tensors that the reference's 15 launches per tensor fit the stream's queue.
        Workload("matrices24", count=24, rows=1024, columns=2048, device="cuda", speedup=4.0, host_syncs=0),
        Workload("cpu", count=8, rows=64, columns=64, clock="wall", device="cpu"),
    ],
    cost=Cost(bytes=lambda count, rows, columns: BYTES_PER_PARAMETER * count * rows * columns),
)


def cnn(values=None):
    """The 12 tensors of leak_cnn: three convolutions, one fully connected layer, two heads."""
    shapes = [
        ("c1", 1, 3, 3),
        ("c1",),
        ("c2", "c1", 3, 3),
        ("c2",),
        ("c3", "c2", 3, 3),
        ("c3",),
        ("hidden", "flat"),
        ("hidden",),
        ("classes", "hidden"),
        ("classes",),
        (1, "hidden"),
        (1,),
    ]
    return [tensor(*shape, values=values) for shape in shapes]


def cnn_bytes(c1, c2, c3, flat, hidden, classes):
    convolutions = 10 * c1 + (9 * c1 + 1) * c2 + (9 * c2 + 1) * c3
    return BYTES_PER_PARAMETER * (convolutions + (flat + 1) * hidden + (hidden + 1) * (classes + 1))


fused_adamw_cnn = Pair(
    reference=stateful(reference),
    optimized=stateful(optimized),
    inputs={"params": cnn(floats(-4, 4))},
    step_inputs={"grads": cnn()},
    mutates={"params"},
    sizes={
        "c1": size(0, 5),
        "c2": size(0, 5),
        "c3": size(0, 5),
        "flat": size(0, 17),
        "hidden": size(0, 9),
        "classes": size(0, 5),
    },
    steps=steps(cpu=(1, 2, 5), otherwise=(1, 2, 17)),
    max_examples=draws(cpu=6, otherwise=16),  # the same kernels as `fused_adamw`'s
    rivals=RIVALS,
    variants=VARIANTS,
    workloads=[
        Workload(
            "leak_cnn", c1=32, c2=64, c3=128, flat=2048, hidden=256, classes=5, device="cuda", repeat=4, speedup=5.0
        ),
        Workload("cpu", c1=8, c2=8, c3=8, flat=64, hidden=16, classes=5, clock="wall", device="cpu"),
    ],
    cost=Cost(bytes=cnn_bytes),
)

SIDES = [reference, optimized, adamw_torch]
if triton_reason() is None and not torch.cuda.is_available():
    SIDES.append(adamw_triton)


@pytest.mark.parametrize("call", SIDES)
def test_first_step_matches_hand_computation(call):
    params = [torch.tensor([1.0, -2.0, 3.0])]
    grads = [torch.tensor([0.5, -4.0, 0.0])]
    call(params, lr=0.1, weight_decay=0.5)(grads)
    # After one step m_hat / sqrt(v_hat) is the gradient's sign.
    assert params[0].tolist() == pytest.approx([0.95 - 0.1, -1.9 + 0.1, 2.85])
    # The given gradient is not copied, because a copy would be one more pass over it.
    assert params[0].grad is grads[0]


@pytest.mark.parametrize("call", SIDES)
def test_steps_on_unusual_layouts_match_torch_adamw(call):
    def tensors(seed):
        generator = torch.Generator().manual_seed(seed)
        made = [torch.randn(n, generator=generator) for n in (35, 48, 300, 10, 1, 4099, 0)]
        return [
            made[0].view(5, 7).t(),
            made[1].view(6, 8)[::2, ::2],
            made[2].view(4, 3, 5, 5).to(memory_format=torch.channels_last),
            made[3][3:8],
            made[4].view(()),
            made[5],
            made[6].view(0, 3),
        ]

    expected, params = tensors(0), tensors(0)
    optimizer = torch.optim.AdamW(expected, foreach=False, fused=False)
    step = call(params)
    for seed in (1, 2, 3):
        grads = [g.contiguous() for g in tensors(seed)]
        for p, grad in zip(expected, grads, strict=True):
            p.grad = grad
        optimizer.step()
        step(grads)
    for p, e in zip(params, expected, strict=True):
        torch.testing.assert_close(p, e)


@pytest.mark.parametrize("call", SIDES)
def test_parameter_data_may_be_replaced_between_steps(call):
    params = [torch.nn.Parameter(torch.ones(3))]
    step = call(params, lr=0.1, weight_decay=0.0)
    step([torch.ones(3)])
    params[0].data = params[0].data.clone()
    step([torch.ones(3)])
    assert params[0].tolist() == pytest.approx([0.8] * 3)


@pytest.mark.parametrize("call", SIDES)
def test_parameters_stay_leaves_that_require_gradients(call):
    # Parameters of a module: dense ones, and ones with gaps, which are updated through a copy.
    params = [torch.nn.Parameter(torch.ones(6, 8)), torch.nn.Parameter(torch.ones(6, 8)[::2, ::2])]
    step = call(params, lr=0.1, weight_decay=0.0)
    for _ in range(2):
        step([torch.ones(p.shape) for p in params])
    for p in params:
        assert p.is_leaf
        assert p.requires_grad
        torch.testing.assert_close(p.detach(), torch.full(p.shape, 0.8))


@pytest.mark.parametrize("call", SIDES)
@pytest.mark.parametrize("count", [1, 3])
def test_wrong_number_of_gradients_raises_value_error(call, count):
    step = call([torch.ones(2), torch.ones(3)])
    with pytest.raises(ValueError, match="zip"):
        step([torch.ones(2), torch.ones(3), torch.ones(3)][:count])


@pytest.mark.parametrize("call", SIDES)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda step: pickle.loads(pickle.dumps(step))])
def test_a_copied_step_has_moments_of_its_own(call, copied):
    step = call([torch.ones(3)], lr=0.1)
    step([torch.ones(3)])
    before = step.state_dict()
    other = copied(step)
    other([torch.full((3,), 2.0)])
    step([torch.full((3,), 4.0)])
    first, second = other.state_dict()["first"][0], step.state_dict()["first"][0]
    torch.testing.assert_close(first, 0.9 * before["first"][0] + 0.2)
    torch.testing.assert_close(second, 0.9 * before["first"][0] + 0.4)


def test_cnn_bytes_counts_the_published_number_of_parameters():
    sizes = {"c1": 32, "c2": 64, "c3": 128, "flat": 2048, "hidden": 256, "classes": 5}
    assert cnn_bytes(**sizes) == BYTES_PER_PARAMETER * 618_758


@pytest.mark.parametrize(("count", "gpu", "path"), [(0, True, "torch"), (2, True, "triton"), (2, False, "torch")])
def test_kernel_is_used_for_parameters_on_a_gpu(count, gpu, path, monkeypatch):
    module = "optimized.optimizers.fused_adamw"
    params = [torch.empty(2) for _ in range(count)]
    asked = []
    monkeypatch.setattr(f"{module}.use_triton", lambda *tensors: asked.extend(tensors) or gpu)
    monkeypatch.setattr(f"{module}.adamw_triton", lambda *arguments: ("triton", *arguments))
    monkeypatch.setattr(f"{module}.adamw_torch", lambda *arguments: ("torch", *arguments))
    served, given, *options = optimized(iter(params), 0.1, (0.5, 0.75), 1e-6, 0.25)
    assert served == path
    assert [id(p) for p in given] == [id(p) for p in asked] == [id(p) for p in params]
    assert options == [0.1, (0.5, 0.75), 1e-6, 0.25]


@pytest.mark.interpreted
def test_the_kernel_writes_within_its_tensors(fences):
    generator = torch.Generator().manual_seed(0)
    params = [fences.around(torch.randn(n, generator=generator)) for n in (1, 3, 2047, 2048, 2049, 5000)]
    params.append(fences.around(torch.randn(5, 7, generator=generator).t()))
    step = adamw_triton(params)
    for _ in range(2):
        step([fences.around(torch.randn(p.shape, generator=generator)) for p in params])
    assert fences.intact()
