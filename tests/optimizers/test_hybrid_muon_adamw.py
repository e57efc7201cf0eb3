import functools

import pytest
import torch
from scale import draws

from optimized.optimizers.hybrid_muon_adamw import hybrid_muon_adamw as optimized
from perfsuite import Pair, Workload, floats, listof, size, stateful, tensor
from reference.optimizers.fused_adamw import adamw
from reference.optimizers.hybrid_muon_adamw import hybrid_muon_adamw as reference
from reference.optimizers.muon import muon


def blocks(values):
    """Return the specs of each transformer block: matrices, biases, norms, and the kernel of a convolution."""
    shapes = [
        ("3 * width", "width"),
        ("3 * width",),
        ("width", "width"),
        ("width",),
        ("4 * width", "width"),
        ("width", "4 * width"),
        ("width", 1, 3),
    ]
    return listof("depth", [tensor(*shape, values=values) for shape in shapes])


def flat(make, dtype=torch.bfloat16):
    """Give `make` the parameters of all blocks, which `blocks` declares, as one list."""

    def made(params):
        step = make([p for block in params for p in block], dtype=dtype)
        return lambda grads: step([grad for block in grads for grad in block])

    return made


FIELDS = {
    "inputs": {"params": blocks(floats(-1, 1))},
    "step_inputs": {"grads": blocks(floats(-4, 4))},
    "mutates": {"params"},
    "sizes": {"depth": size(0, 2), "width": size(0, 17)},
    "steps": (1, 2, 5),
    "max_examples": draws(cpu=10),
}
CPU = Workload("cpu", depth=2, width=32, clock="wall", device="cpu")

hybrid_muon_adamw = Pair(
    reference=stateful(flat(reference)),
    optimized=stateful(flat(optimized)),
    workloads=[Workload("ups", depth=12, width=384, device="cuda", speedup=5.0, host_syncs=0), CPU],
    **FIELDS,
)
# In bfloat16 the error of the matrices is large; float32 also reveals small mistakes.
hybrid_muon_adamw_float32 = Pair(
    reference=stateful(flat(reference, torch.float32)),
    optimized=stateful(flat(optimized, torch.float32)),
    workloads=[CPU],
    **FIELDS,
)


@pytest.mark.parametrize("call", [reference, optimized])
def test_matrices_are_updated_by_muon_and_other_parameters_by_adamw(call):
    def tensors(seed):
        generator = torch.Generator().manual_seed(seed)
        return [torch.randn(shape, generator=generator) for shape in ((3, 5), (5,), (5, 3), (2, 3, 1), ())]

    params, expected = tensors(0), tensors(0)
    float32 = functools.partial(call, lr=0.1, weight_decay=0.5, dtype=torch.float32)
    step = float32(params)
    of_matrices = muon([expected[0], expected[2]], 0.1, weight_decay=0.5, dtype=torch.float32)
    of_others = adamw([expected[i] for i in (1, 3, 4)], 0.1, weight_decay=0.5)
    for seed in (1, 2, 3):
        grads = tensors(seed)
        step(grads)
        of_matrices([grads[0], grads[2]])
        of_others([grads[i] for i in (1, 3, 4)])
    for p, e in zip(params, expected, strict=True):
        torch.testing.assert_close(p, e)
    assert params[1].grad is grads[1]


@pytest.mark.parametrize("call", [reference, optimized])
@pytest.mark.parametrize("count", [1, 3])
def test_wrong_number_of_gradients_raises_value_error(call, count):
    with pytest.raises(ValueError, match="one for each"):
        call([torch.ones(2, 2), torch.ones(3)])([torch.ones(2, 2), torch.ones(3), torch.ones(3)][:count])
