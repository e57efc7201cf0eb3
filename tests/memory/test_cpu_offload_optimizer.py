import pytest
import torch

from optimized.memory.cpu_offload_optimizer import OffloadedAdamW
from optimized.memory.cpu_offload_optimizer import cpu_offload_optimizer as optimized
from optimized.optimizers.muon import muon
from perfsuite import Pair, Workload, floats, listof, side, size, stateful, tensor
from reference.memory.cpu_offload_optimizer import cpu_offload_optimizer as reference
from reference.optimizers.hybrid_muon_adamw import hybrid_muon_adamw


def torchao():
    """Return why torchao's optimizer is unavailable, or None."""
    try:
        from torchao.optim import CPUOffloadOptimizer  # noqa: F401
    except ImportError as error:
        return f"torchao cannot be imported ({error}); pip install torchao"
    return None


def by_torchao(params):
    """Step torchao's optimizer, whose hooks copy each gradient once computed. It takes contiguous parameters."""
    from torchao.optim import CPUOffloadOptimizer

    live = [i for i, p in enumerate(params) if p.numel()]
    own = [torch.nn.Parameter(params[i].contiguous()) for i in live]
    optimizer = CPUOffloadOptimizer(own, torch.optim.AdamW) if live else None

    def step(grads):
        if optimizer is None:
            return
        with torch.enable_grad():
            torch.autograd.backward(own, [grads[i].contiguous() for i in live])
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for i, p in zip(live, own, strict=True):
                if not params[i].is_contiguous():
                    params[i].copy_(p)

    return step


FIELDS = {
    "mutates": {"params"},
    "sizes": {"count": size(0, 3), "rows": size(0, 33), "columns": size(0, 33)},
    "dtypes": ("float32", "bfloat16"),
}
CPU = Workload("cpu", count=4, rows=64, columns=64, clock="wall", device="cpu")
UPS = {"count": 40, "rows": 384, "columns": 1536, "device": "cuda"}  # 23.6 M parameters, as ups

cpu_offload_optimizer = Pair(
    reference=stateful(reference),
    optimized=stateful(optimized),
    inputs={"params": listof("count", tensor("rows", "columns", values=floats(-4, 4)))},
    step_inputs={"grads": listof("count", tensor("rows", "columns"))},
    rivals={"torchao": stateful(side(by_torchao, devices=("cuda",), available=torchao))},
    workloads=[Workload("ups", **UPS, clock="wall"), CPU],
    steps=(1, 2, 17),
    **FIELDS,
)


def steps(make):
    """Return a call that builds the optimizer, so that its peak memory includes the optimizer's state."""

    def call(params, first, second):
        step = make(params)
        step(first)
        step(second)

    return call


# A stateful pair's state exists before the measured call, so that no peak includes it. Here the reference's
# state takes 189 MB of the device's memory; the optimized side's takes none.
cpu_offload_memory = Pair(
    reference=steps(reference),
    optimized=steps(optimized),
    inputs={
        "params": listof("count", tensor("rows", "columns", values=floats(-4, 4))),
        "first": listof("count", tensor("rows", "columns")),
        "second": listof("count", tensor("rows", "columns")),
    },
    workloads=[Workload("ups", **UPS, clock="wall", peak_bytes=1 << 20), CPU],
    gradients=False,
    unsupported={"captured_graph": "the CPU takes part in each step"},
    **FIELDS,
)


@pytest.mark.parametrize("call", [reference, optimized])
def test_two_steps_match_hand_computation(call):
    params = [torch.tensor([1.0, -2.0, 3.0]), torch.tensor(0.5)]
    step = call(params, lr=0.1, betas=(0.5, 0.75), weight_decay=0.5)
    grads = [torch.tensor([0.5, -4.0, 0.0]), torch.tensor(2.0)]
    step(grads)
    # After one step m_hat / sqrt(v_hat) is the gradient's sign.
    assert params[0].tolist() == pytest.approx([0.95 - 0.1, -1.9 + 0.1, 2.85])
    assert params[1].item() == pytest.approx(0.475 - 0.1)
    assert params[0].grad is grads[0]
    step([torch.zeros(3), torch.tensor(-2.0)])
    # m_hat is (0.25 g) / 0.75 and v_hat (0.1875 g^2) / 0.4375 where the second gradient is 0.
    moved = 0.1 * (1 / 3) / (3 / 7) ** 0.5
    assert params[0].tolist() == pytest.approx([0.8075 - moved, -1.71 + moved, 2.7075])
    # With the gradients g and -g, m_hat is -g / 3 and v_hat is g^2.
    assert params[1].item() == pytest.approx(0.375 * 0.95 + 0.1 / 3)


@pytest.mark.parametrize("call", [reference, optimized])
@pytest.mark.parametrize("count", [1, 3])
def test_wrong_number_of_gradients_raises_value_error(call, count):
    step = call([torch.ones(2), torch.ones(3)])
    with pytest.raises(ValueError, match="zip"):
        step([torch.ones(2), torch.ones(3), torch.ones(3)][:count])


def tensors(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in ((3, 5), (5,), (7, 3), (2, 3, 1), (), (0,))]


def test_the_adamw_part_of_the_hybrid_optimizer_can_be_offloaded():
    params, expected = tensors(0), tensors(0)
    matrices, others = ([i for i, p in enumerate(params) if (p.dim() == 2) is wanted] for wanted in (True, False))
    of_matrices = muon([params[i] for i in matrices], 0.1, weight_decay=0.5, dtype=torch.float32)
    of_others = optimized([params[i] for i in others], 0.1, weight_decay=0.5)
    hybrid = hybrid_muon_adamw(expected, 0.1, weight_decay=0.5, dtype=torch.float32)
    for seed in (1, 2, 3):
        grads = tensors(seed)
        of_matrices([grads[i] for i in matrices])
        of_others([grads[i] for i in others])
        hybrid(grads)
    for p, e, before in zip(params, expected, tensors(0), strict=True):
        torch.testing.assert_close(p, e)
        assert not p.numel() or not torch.equal(p, before)


class Late:
    """Transfers that copy nothing until they are waited for, as on a busy bus."""

    def __init__(self, device):
        self.sent = []

    def begin(self):
        self.sent.clear()

    def fetch(self, pairs):
        return LateEvent(pairs)

    def send(self, to, source):
        self.sent.append((to, source))

    def end(self):
        for to, source in self.sent:
            to.copy_(source)


class LateEvent:
    def __init__(self, pairs):
        self.pairs = pairs

    def synchronize(self):
        for to, source in self.pairs:
            to.copy_(source)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_copy_is_waited_for(dtype):
    def run(transfers):
        params = [t.to(dtype) for t in tensors(0)]
        step = OffloadedAdamW(params, {"lr": 0.1, "weight_decay": 0.5}, transfers)
        for seed in (1, 2, 3):
            step([t.to(dtype) for t in tensors(seed)])
        return params

    for p, e, before in zip(run(Late), run(None), tensors(0), strict=True):
        assert torch.equal(p, e)
        assert not p.numel() or not torch.equal(p, before.to(dtype))


@pytest.mark.parametrize(("call", "moves"), [(reference, False), (optimized, True)])
def test_master_copy_keeps_updates_that_bfloat16_rounds_away(call, moves):
    params = [torch.ones(4, dtype=torch.bfloat16)]
    step = call(params, lr=1e-3, weight_decay=0.0)
    for _ in range(50):
        step([torch.ones(4, dtype=torch.bfloat16)])
    # Each step of 0.001 is rounded away: the next smaller number is 0.996.
    assert params[0].tolist() == pytest.approx([0.95 if moves else 1.0] * 4, abs=0.004)


def test_external_changes_of_parameters_are_kept():
    params = [torch.ones(4, dtype=torch.bfloat16)]
    step = optimized(params, lr=1e-3, weight_decay=0.0)
    for _ in range(25):
        step([torch.ones(4, dtype=torch.bfloat16)])
    params[0][:2] = 0.5
    for _ in range(25):
        step([torch.ones(4, dtype=torch.bfloat16)])
    assert params[0].tolist() == pytest.approx([0.475, 0.475, 0.95, 0.95], abs=0.004)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_stays_off_the_gpu_and_pending_gradients_are_waited_for(dtype):
    def run(make, delayed):
        params = [t.to("cuda", dtype) for t in tensors(0)]
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated()
        step = make(params)
        torch.cuda.synchronize()
        grew = torch.cuda.memory_allocated() - held
        for seed in (1, 2, 3):
            grads = [t.to("cuda", dtype) for t in tensors(seed)]
            late = [torch.full_like(g, torch.nan) for g in grads]
            if delayed:
                torch.cuda._sleep(20_000_000)  # about 10 ms, after which the gradients are computed
            for to, source in zip(late, grads, strict=True):
                to.copy_(source)
            step(late)
        return [p.clone() for p in params], grew, step

    (found, grew, step), (expected, *_) = run(optimized, True), run(optimized, False)
    assert grew == 0
    assert all(host.sent.is_pinned() for host in step.hosts if host.sent.numel())
    plain = run(reference, False)[0]
    for p, e, f in zip(found, expected, plain, strict=True):
        assert torch.equal(p, e)
        if dtype is torch.float32:
            torch.testing.assert_close(p, f)
