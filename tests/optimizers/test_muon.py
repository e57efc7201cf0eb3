import functools

import pytest
import torch
from scale import FULL, FULLY, count, draws

from optimized import newton_schulz
from optimized.kernels import triton_reason
from optimized.optimizers.muon import muon as optimized
from optimized.optimizers.muon import muon_torch, muon_triton
from perfsuite import Cost, Pair, Workload, compiled, floats, listof, side, size, stateful, tensor
from reference.optimizers.muon import COEFFICIENTS, ITERATIONS
from reference.optimizers.muon import muon as reference


def muon_of_torch(params, lr=1.4e-3, momentum=0.95, weight_decay=0.03):
    """Step PyTorch's Muon."""
    kept = [p for p in params if p.numel()]
    optimizer = torch.optim.Muon(kept, lr=lr, momentum=momentum, weight_decay=weight_decay) if kept else None

    def step(grads):
        for p, grad in zip(params, grads, strict=True):
            p.grad = grad
        if optimizer is not None:
            optimizer.step()

    return step


RESTARTS, SYMMETRIC_BY_GRAM = 3, 11
"""Products of the iteration by Gram matrices: multiplications of x, and symmetric products besides x xᵀ."""


def in_float32(make):
    return functools.partial(make, dtype=torch.float32)


def products(rows, columns):
    """Count the operations of the products in the form that needs fewer; a symmetric result costs half."""
    least, most = sorted((rows, columns))
    plain = ITERATIONS * (least * least * most + least**3 + 2 * least * least * most)
    by_gram = RESTARTS * (least * least * most + 2 * least * least * most) + SYMMETRIC_BY_GRAM * least**3
    return min(plain, by_gram)


RIVALS = {
    "torch": stateful(muon_of_torch),
    "compile": compiled(stateful(side(muon_torch, devices=("cuda",)))),
}
# Only matrices of more than 64 rows have tiles of 128 rows, as strips do.
LARGEST = 300 if torch.cuda.is_available() else 49
# g, m and p are read, m and p written.
BYTES_PER_PARAMETER = 20

muon = Pair(
    reference=stateful(reference),
    optimized=stateful(optimized),
    inputs={"params": listof("count", tensor("rows", "columns", values=floats(-1, 1)))},
    step_inputs={"grads": listof("count", tensor("rows", "columns", values=floats(-4, 4)))},
    mutates={"params"},
    sizes={"count": size(0, 3), "rows": size(0, LARGEST), "columns": size(0, LARGEST)},
    steps=(1, 2, 5),
    max_examples=draws(cpu=4, otherwise=24),  # `muon_float32` proves the same kernels on all
    rivals=RIVALS,
    variants={
        "triton": stateful(side(muon_triton, available=triton_reason)),
        "tiles": stateful(side(functools.partial(muon_triton, in_strips=False), available=triton_reason)),
    },
    workloads=[
        Workload("matrices200", count=200, rows=512, columns=512, device="cuda", speedup=25.0, host_syncs=0),
        Workload("cpu", count=16, rows=32, columns=32, clock="wall", device="cpu"),
    ],
    cost=Cost(
        bytes=lambda count, rows, columns: BYTES_PER_PARAMETER * count * rows * columns,
        flops=lambda count, rows, columns: count * products(rows, columns),
        precision="bfloat16",
    ),
)


# In bfloat16 the reference's own error is up to a third of the update. In float32, where the code differs only in the
# dtype of a tile, an error of 0.1% in a coefficient is detected.
muon_float32 = Pair(
    reference=stateful(in_float32(reference)),
    optimized=stateful(in_float32(optimized)),
    inputs=muon.inputs,
    step_inputs=muon.step_inputs,
    mutates=muon.mutates,
    sizes=muon.sizes,
    steps=muon.steps,
    max_examples=draws(cpu=4),
    variants={
        "triton": stateful(side(in_float32(muon_triton), available=triton_reason)),
        "batched": stateful(in_float32(muon_torch)),
    },
    workloads=[Workload("cpu", count=16, rows=32, columns=32, clock="wall", device="cpu")],
)


def of_blocks(make):
    """Give `make` the matrices of all transformer blocks, which `operator_matrices` declares, as one list."""

    def flat(matrices):
        return [matrices["time"], *(matrix for block in matrices["blocks"] for matrix in block)]

    def made(matrices):
        step = make(flat(matrices))
        return lambda grads: step(flat(grads))

    return made


def operator_matrices(values):
    """Return the specs of the time embedding and of each block's matrices.

    A block has the projections into and out of attention and the FFN's two. Rows of the embedding do not begin at
    multiples of 16 bytes.
    """
    shapes = (("3 * width", "width"), ("width", "width"), ("4 * width", "width"), ("width", "4 * width"))
    blocks = listof("depth", [tensor(*shape, values=values) for shape in shapes])
    return {"time": tensor("width", 9, values=values), "blocks": blocks}


muon_operator = Pair(
    reference=stateful(of_blocks(reference)),
    optimized=stateful(of_blocks(optimized)),
    inputs={"params": operator_matrices(floats(-1, 1))},
    step_inputs={"grads": operator_matrices(floats(-4, 4))},
    mutates={"params"},
    sizes={"depth": size(0, 2), "width": size(0, 17)},
    steps=(1, 2, 5),
    rivals={name: stateful(of_blocks(muon_of_torch)) for name in ("torch",)},
    workloads=[
        Workload("ups", depth=12, width=384, device="cuda", speedup=5.0, host_syncs=0),
        Workload("cpu", depth=2, width=32, clock="wall", device="cpu"),
    ],
    cost=Cost(
        bytes=lambda depth, width: BYTES_PER_PARAMETER * (depth * 12 * width**2 + 9 * width),
        flops=lambda depth, width: depth * sum(products(width, n * width) for n in (1, 3, 4, 4)) + products(width, 9),
        precision="bfloat16",
    ),
)


SIDES = [reference, optimized, muon_torch]
if triton_reason() is None and not torch.cuda.is_available():
    SIDES += [muon_triton]
# Wide, tall and square; of one tile and of several; with rows aligned to vectors and with others.
SHAPES = [(8, 8), (5, 130), (130, 5), (0, 3), (144, 160), (1, 1), (129, 129)] + [(160, 144)] * FULL


def iterated(signs, singular):
    """Return `signs` times the result of the iteration for these singular values of a matrix of norm 1."""
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        singular = [a * s + b * s**3 + c * s**5 for s in singular]
    return torch.tensor(signs) * torch.tensor(singular)


def drawn(seed, shapes=SHAPES):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


@pytest.mark.parametrize("call", SIDES)
def test_two_steps_match_hand_computation(call):
    params = [torch.zeros(2, 2), torch.ones(4, 1)]
    grads = [torch.diag(torch.tensor([3.0, -4.0])), torch.tensor([[0.0], [0.0], [5.0], [0.0]])]
    step = call(params, lr=0.5, momentum=0.75, weight_decay=0.5, dtype=torch.float32)
    step(grads)
    # For a matrix with one singular value, the sign times the iteration's result for 1 remains.
    update = torch.diag(iterated([1.0, -1.0], [0.6, 0.8]))
    torch.testing.assert_close(params[0], -0.5 * update)
    # It moves twice as far, because it has four times as many rows as columns.
    torch.testing.assert_close(params[1].flatten(), 0.75 - torch.eye(4)[2] * 0.5 * 2 * iterated([1.0], [1.0]))
    assert params[0].grad is grads[0]
    # The momentum is g/4; with -g/2 it becomes g/16, and the update -g/2 + 3/4 · (g/16 + g/2) = -5/64 g.
    step([-grad / 2 for grad in grads])
    torch.testing.assert_close(params[0], -0.5 * 0.75 * update + 0.5 * update)


@pytest.mark.parametrize("call", [*SIDES[:3], *(pytest.param(call, marks=FULLY) for call in SIDES[3:])])
def test_each_matrix_is_updated_independently_of_the_others(call):
    params, alone = drawn(0), drawn(0)
    step, steps = call(params, lr=0.1, dtype=torch.float32), [reference([p], 0.1, dtype=torch.float32) for p in alone]
    for seed in (1, 2):
        grads = drawn(seed)
        step(grads)
        for of_one, grad in zip(steps, grads, strict=True):
            of_one([grad])
    for p, e in zip(params, alone, strict=True):
        torch.testing.assert_close(p, e, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float64), (torch.float64, torch.float32, torch.bfloat16)])
def test_matrices_of_one_shape_and_several_dtypes_are_updated_in_their_own_dtype(dtypes):
    generator = torch.Generator().manual_seed(0)
    params, grads = (
        [torch.randn(4, 6, generator=generator, dtype=torch.float64).to(dtype) for dtype in dtypes] for _ in range(2)
    )
    together, apart = ([p.clone() for p in params] for _ in range(2))
    muon_torch(together, lr=0.1)(grads)
    for p, grad in zip(apart, grads, strict=True):
        muon_torch([p], lr=0.1)([grad])
    assert all(map(torch.equal, together, apart))


@pytest.mark.parametrize("call", SIDES)
def test_a_state_of_another_number_of_matrices_is_refused(call):
    step = call(drawn(0, [(9, 8), (5, 17)]), lr=0.1, dtype=torch.float32)
    with pytest.raises(ValueError, match="zip"):
        step.load_state_dict({"momenta": [torch.zeros(9, 8)]})


@pytest.mark.parametrize("call", SIDES)
def test_step_is_correct_after_restoring_the_state_from_before_a_nan_step(call):
    shapes = [(9, 8), (5, 17)]
    params, alone = drawn(0, shapes), drawn(0, shapes)
    step = call(params, lr=0.1, dtype=torch.float32)
    before = step.state_dict()
    step([torch.full_like(grad, torch.nan) for grad in drawn(1, shapes)])
    step.load_state_dict(before)
    for p, e in zip(params, alone, strict=True):
        p.copy_(e)
    step(drawn(1, shapes))
    call(alone, lr=0.1, dtype=torch.float32)(drawn(1, shapes))
    for p, e in zip(params, alone, strict=True):
        torch.testing.assert_close(p, e, atol=0, rtol=0)


@pytest.mark.parametrize("call", SIDES)
def test_matrix_of_zeros_stays_zero(call):
    params = [torch.zeros(3, 4)]
    call(params)([torch.zeros(3, 4)])
    assert params[0].eq(0).all()


@pytest.mark.parametrize("call", SIDES)
def test_parameters_may_be_strided_and_their_data_replaced(call):
    params = [torch.nn.Parameter(torch.ones(6, 8)), torch.nn.Parameter(torch.ones(6, 8)[::2, ::2])]
    expected = [p.detach().clone() for p in params]
    step, plain = call(params, 0.1, dtype=torch.float32), reference(expected, 0.1, dtype=torch.float32)
    for seed in (1, 2):
        grads = drawn(seed, [(6, 8), (3, 4)])
        step(grads)
        plain(grads)
        params[0].data = params[0].data.clone()
    for p, e in zip(params, expected, strict=True):
        assert p.requires_grad
        torch.testing.assert_close(p.detach(), e, atol=1e-5, rtol=0)


@pytest.mark.parametrize("call", SIDES)
@pytest.mark.parametrize("count", [1, 3])
def test_wrong_number_of_gradients_raises_value_error(call, count):
    with pytest.raises(ValueError, match="zip"):
        call([torch.ones(2, 2), torch.ones(3, 2)])([torch.ones(2, 2), torch.ones(3, 2), torch.ones(3, 2)][:count])


@pytest.mark.interpreted
def test_the_kernels_write_within_their_tensors(fences):
    params = [fences.around(p) for p in drawn(0)]
    step = muon_triton(params)
    for seed in range(1, count(quick=1, full=2) + 1):
        step([fences.around(grad) for grad in drawn(seed)])
    assert fences.intact()


def orthogonalized(x, restart, rounded):
    """Iterate in PyTorch on a matrix with no more rows than columns, rounding each result."""
    buffers, scale = {newton_schulz.X: rounded(x), newton_schulz.X_T: rounded(x).mT}, 1 / x.norm()
    for step in newton_schulz.steps_of(COEFFICIENTS, ITERATIONS, restart):
        product, plus, diagonal = step.factors
        total = buffers[step.left] @ buffers[step.right].mT * product
        if step.scaled:
            total *= scale ** (1 + step.is_symmetric)
        if step.added != newton_schulz.NOTHING:
            total += plus * buffers[step.added] + diagonal * torch.eye(len(total))
        buffers[step.out] = rounded(total)
        if not step.is_symmetric:
            buffers[step.mirrored] = buffers[step.out].mT
    return buffers[step.out]


def nearly_of_low_rank(seed):
    generator = torch.Generator().manual_seed(seed)
    directions = torch.linalg.qr(torch.randn(8, 8, generator=generator)).Q
    return (directions * 0.7 ** torch.arange(8)) @ torch.randn(8, 24, generator=generator)


def test_iteration_of_gram_matrices_is_nearly_as_accurate_as_that_of_the_matrix():
    """Gradients have nearly low rank: three iterations without a new Gram matrix lose their small singular values."""
    errors = {}
    for seed in range(40):
        x = nearly_of_low_rank(seed)
        truth = orthogonalized(x, 1, lambda t: t)
        for restart in (1, newton_schulz.RESTART, 3):
            torch.testing.assert_close(orthogonalized(x, restart, lambda t: t), truth, atol=1e-3, rtol=0)
            found = orthogonalized(x, restart, lambda t: t.bfloat16().float())
            errors.setdefault(restart, []).append(float((found - truth).norm() / truth.norm()))
    plain, by_gram, too_far = (max(errors[restart]) for restart in (1, newton_schulz.RESTART, 3))
    assert by_gram < 4 * plain < too_far / 4
