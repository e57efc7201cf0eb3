import functools

import pytest
import torch

from optimized.precision.autocast_bf16 import autocast_bf16 as optimized
from optimized.precision.autocast_bf16 import sgd_step as bf16_step
from perfsuite import Pair, Workload, compiled, side, stateful
from reference.precision.autocast_bf16 import autocast_bf16 as reference
from reference.precision.autocast_bf16 import sgd_step
from suite.leak_cnn.costs import TRAINING, training_cost
from suite.leak_cnn.loss import leak_cnn_loss
from suite.leak_cnn.model import forward
from suite.leak_cnn.trial import FEW, INPUTS, SIZES, Seen, drawn, on_network

autocast_bf16 = Pair(
    reference=on_network(reference),
    optimized=on_network(optimized),
    inputs=INPUTS,
    sizes=SIZES,
    precision="bfloat16",
    rivals={"compile": compiled(side(on_network(optimized), devices=("cuda",)))},
    workloads=[
        Workload("batch5632_both", **TRAINING, direction="both", speedup=1.8, device="cuda"),
        Workload("cpu", **FEW, clock="wall", direction="both", device="cpu"),
    ],
    cost=training_cost("bfloat16"),
)


class Float16Step:
    """The source's earlier step: autocast to float16, with torch's gradient scaler."""

    def __init__(self, weights, lr=0.1):
        self.leaves = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
        self.device = self.leaves["conv1.weight"].device.type
        self.optimizer = torch.optim.SGD(self.leaves.values(), lr=lr)
        # A power of two rounds nothing. PyTorch's initial scale, 65536, overflows in the first steps, which are then
        # skipped. This one does not grow while the step is tested and timed.
        self.scaler = torch.amp.GradScaler(self.device, init_scale=1024.0, growth_interval=1 << 30)

    def __call__(self, segments, labels, class_weights):
        self.optimizer.zero_grad()
        with torch.enable_grad():
            with torch.autocast(self.device, dtype=torch.float16):
                classes, leak = forward(self.leaves, segments)
            loss = leak_cnn_loss(classes.float(), leak.float(), labels, class_weights)
            self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach(), {name: leaf.grad for name, leaf in self.leaves.items()}


def on_flat(make):
    """Return a step with all gradients in one vector: in small tensors bfloat16 leaves too few digits."""

    def given(network):
        step = make(dict(network.named_parameters()))

        def flat(*batch):
            loss, gradients = step(*batch)
            return loss, torch.cat([gradient.flatten() for gradient in gradients.values()])

        return flat

    return given


autocast_bf16_step = Pair(
    reference=stateful(on_flat(sgd_step)),
    optimized=stateful(on_flat(bf16_step)),
    inputs={"network": INPUTS["network"]},
    step_inputs={name: INPUTS[name] for name in ("segments", "labels", "class_weights")},
    mutates={"network"},
    sizes=SIZES,
    steps=(1, 2),
    precision="bfloat16",
    gradients=False,
    rivals={"float16": stateful(on_flat(Float16Step))},
    workloads=[
        Workload("step5632", **TRAINING, clock="wall", device="cuda", speedup=1.8, host_syncs=0),
        Workload("cpu", **FEW, clock="wall", device="cpu"),
    ],
    cost=training_cost("bfloat16", within=True),
)


def test_products_are_bfloat16_and_the_loss_is_float32():
    with Seen(lambda args: [a.dtype for a in args if isinstance(a, torch.Tensor)]) as seen:
        loss = optimized(*drawn())
    assert seen.of("convolution") == [[torch.bfloat16] * 3] * 3
    assert {d for call in seen.of("addmm") for d in call} == {torch.bfloat16}
    assert loss.dtype is torch.float32
    assert {d for call in seen.of("_log_softmax") for d in call} == {torch.float32}


@pytest.mark.parametrize("step", [sgd_step, bf16_step, Float16Step])
def test_step_subtracts_lr_times_the_gradient(step):
    weights, *batch = drawn()
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    expected_loss = reference(weights, *batch)
    expected = dict(zip(weights, torch.autograd.grad(expected_loss, list(weights.values())), strict=True))
    make = step(weights, 0.5)
    for _ in range(2):
        for name, weight in weights.items():
            weight.data.copy_(before[name])
        loss, gradients = make(*batch)
        torch.testing.assert_close(loss, expected_loss.detach(), rtol=0.01, atol=0)
        for name, gradient in gradients.items():
            assert (gradient - expected[name]).norm() < 0.3 * expected[name].norm()  # 0.3 for the smallest gradients
            assert torch.equal(weights[name].detach(), before[name] - 0.5 * gradient)


def test_bfloat16_step_stays_finite_where_float16_overflows(monkeypatch):
    def trained(step):
        weights, segments, *others = drawn()
        before = {name: weight.detach().clone() for name, weight in weights.items()}
        step(weights)(1e5 * segments, *others)
        moved = any(not torch.equal(weight.detach(), before[name]) for name, weight in weights.items())
        return moved, all(weight.isfinite().all() for weight in weights.values())

    assert trained(bf16_step) == (True, True)
    assert trained(Float16Step) == (False, True)  # its scaler skips the step
    monkeypatch.setattr(torch.amp, "GradScaler", functools.partial(torch.amp.GradScaler, enabled=False))
    assert trained(Float16Step) == (True, False)
