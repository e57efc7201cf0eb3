import math

import pytest
import torch
from scale import FULLY, draws

from optimized.geometry import retrieval as module
from optimized.geometry.retrieval import _splits, retrieval_triton, retrieval_vectorised
from optimized.geometry.retrieval import retrieval as optimized
from optimized.kernels import triton_reason
from perfsuite import Cost, Pair, Workload, compiled, constant, floats, sampled, side, size, tensor
from reference.geometry.retrieval import retrieval as reference


def metric(generator, shape, dtype):
    """Draw definite metrics, most of them positive, which are not nearly flat in any direction."""
    n = shape[-1]
    factor = torch.randn(shape, generator=generator, dtype=torch.float64)
    sign = 1 if torch.rand((), generator=generator) < 0.8 else -1
    return sign * (factor @ factor.mT / max(n, 1) + 0.1 * torch.eye(n))


def marks(generator, shape, dtype):
    """Mark some or no slots as filled; at the timed sizes mark all of them, as the cost assumes."""
    share = (0.0, 0.5, 0.9)[int(torch.randint(0, 3, (), generator=generator))]
    return torch.rand(shape, generator=generator) < (1.0 if math.prod(shape) >= 2048 else share)


def inputs(**form):
    return {
        "query": tensor("B", "n", values=floats(-2, 2)),
        "curvature": tensor("B", values=floats(0, 2)),
        "coordinates": tensor("B", "K", "n", values=floats(-2, 2)),
        "states": tensor("B", "K", "D", values=floats(nonfinite=False)),
        "filled": tensor("B", "K", dtype="bool", values=sampled(marks)),
        "memory_coordinates": tensor("M", "n", values=floats(-2, 2)),
        "memory_states": tensor("M", "D", values=floats(nonfinite=False)),
        "memory_filled": tensor("M", dtype="bool", values=sampled(marks)),
        **form,
    }


def cost(form):
    """Count each input and output once; `form` returns the metric's size in values."""

    def traffic(B, K, M, n, D, direction):
        read = 4 * (B * n + B + (B * K + M) * (n + D) + form(B, n)) + B * K + M
        forward = read + 4 * B * D
        backward = 2 * read - (B * K + M) + 4 * B * D
        return {"forward": forward, "backward": backward, "both": forward + backward}[direction]

    def arithmetic(B, K, M, n, D, direction):
        forward = 2 * B * (K + M) * (D + n)
        return forward * {"forward": 1, "backward": 2, "both": 3}[direction]

    return Cost(bytes=traffic, flops=arithmetic)


# The kernels run in Triton's interpreter, which takes tens of milliseconds per program. Sizes still exceed the tiles:
# 16 queries, 128 candidates, 64 columns.
SIZES = {"B": size(0, 17), "K": size(0, 130), "M": size(0, 130), "n": size(0, 9), "D": size(0, 66)}
TRAINER = {"B": 16, "K": 128, "M": 2048, "n": 8, "D": 256}
CPU = Workload("cpu", B=4, K=32, M=256, n=8, D=64, clock="wall", direction="both", device="cpu")
RIVALS = {
    "compile": compiled(side(reference, devices=("cuda",))),
    "compile_vectorised": compiled(side(retrieval_vectorised, devices=("cuda",))),
}
VARIANTS = {"triton": side(retrieval_triton, available=triton_reason)}

retrieval = Pair(
    reference=reference,
    optimized=optimized,
    # An expanded tensor repeats one row, so it is not a metric.
    inputs=inputs(
        metric=tensor("n", "n", values=sampled(metric), layouts=("contiguous", "transposed", "strided", "offset"))
    ),
    sizes=SIZES,
    max_examples=draws(cpu=7),
    rivals=RIVALS,
    variants=VARIANTS,
    workloads=[
        Workload("batch16", **TRAINER, device="cuda", speedup=2.0, host_syncs=0, launches=2),
        Workload("batch64", B=64, K=512, M=2048, n=8, D=512, device="cuda"),
        Workload("batch16_both", **TRAINER, direction="both", device="cuda"),
        CPU,
    ],
    cost=cost(lambda B, n: n * n),
)

retrieval_diagonal = Pair(
    reference=reference,
    optimized=optimized,
    # The metric update clamps to 0.01 to 100; in this narrower range more draws are well conditioned.
    inputs=inputs(metric=constant(None), metric_diag=tensor("n", values=floats(0.01, 4))),
    sizes={**SIZES, "B": size(0, 9)},
    max_examples=draws(cpu=7),
    rivals=RIVALS,
    variants=VARIANTS,
    workloads=[
        Workload("batch16", **TRAINER, device="cuda"),
        Workload("batch64", B=64, K=512, M=2048, n=8, D=512, device="cuda"),
        Workload("batch16_both", **TRAINER, direction="both", device="cuda"),
        CPU,
    ],
    cost=cost(lambda B, n: n),
)

retrieval_batched = Pair(
    reference=reference,
    optimized=optimized,
    inputs=inputs(
        metric=tensor("B", "n", "n", values=sampled(metric), layouts=("contiguous", "transposed", "offset", "expanded"))
    ),
    sizes={"B": size(0, 9), "K": size(0, 20), "M": size(0, 20), "n": size(0, 5), "D": size(0, 20)},
    max_examples=draws(cpu=7),
    rivals=RIVALS,
    variants=VARIANTS,
    # Four coordinates: with a metric of eight for each query, compiling the backward takes most of a minute.
    workloads=[
        Workload("batch16_both", **{**TRAINER, "n": 4}, direction="both", device="cuda"),
        Workload("cpu", B=4, K=32, M=256, n=4, D=64, clock="wall", direction="both", device="cpu"),
    ],
    cost=cost(lambda B, n: B * n * n),
)

SIDES = [reference, optimized, retrieval_vectorised]
if triton_reason() is None and not torch.cuda.is_available():
    SIDES.append(retrieval_triton)


def drawn(B=3, K=4, M=5, n=2, D=6, seed=0):
    """Return the arguments up to the metric; all slots are filled, and the metric is the identity."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "query": torch.randn(B, n, generator=generator),
        "curvature": torch.rand(B, generator=generator) + 0.5,
        "coordinates": torch.randn(B, K, n, generator=generator),
        "states": torch.randn(B, K, D, generator=generator),
        "filled": torch.ones(B, K, dtype=torch.bool),
        "memory_coordinates": torch.randn(M, n, generator=generator),
        "memory_states": torch.randn(M, D, generator=generator),
        "memory_filled": torch.ones(M, dtype=torch.bool),
        "metric": torch.eye(n),
    }


def differentiated(call, arguments, **options):
    """Return the output, and the gradient of each floating argument by its name."""
    leaves = {k: v.detach().clone().requires_grad_() if v.is_floating_point() else v for k, v in arguments.items()}
    y = call(*leaves.values(), **options)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype)
    (y * weights).sum().backward()
    return y.detach(), {k: v.grad for k, v in leaves.items() if v.is_floating_point()}


@pytest.mark.parametrize("call", SIDES)
def test_known_values(call):
    # The query's own slots cost 2 * 5 and 2 * 10; the memory has one slot of cost 2 * 5 and an empty one.
    y = call(
        torch.tensor([[1.0, 1.0]]),
        torch.tensor([2.0]),
        torch.tensor([[[4.0, 5.0], [7.0, 9.0]]]),
        torch.tensor([[[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]]),
        torch.tensor([[True, True]]),
        torch.tensor([[-2.0, -3.0], [1.0, 1.0]]),
        torch.tensor([[0.0, 0.0, 1.0], [9.0, 9.0, 9.0]]),
        torch.tensor([True, False]),
        torch.eye(2),
        beta=0.1,
        eps=0.0,
    )
    far = math.exp(-1)
    assert y.tolist() == [pytest.approx([1 / (2 + far), far / (2 + far), 1 / (2 + far)])]


@pytest.mark.parametrize("call", SIDES)
def test_given_diagonal_replaces_the_metric(call):
    arguments = drawn()
    diagonal = torch.tensor([0.5, 3.0])
    expected = call(*{**arguments, "metric": torch.diag(diagonal)}.values())
    torch.testing.assert_close(call(*{**arguments, "metric": None}.values(), diagonal), expected)
    torch.testing.assert_close(call(*arguments.values(), diagonal), expected)


@pytest.mark.parametrize("call", SIDES[1:])
@pytest.mark.parametrize(("B", "n"), [(1, 1), (3, 2), (17, 8)])
def test_each_query_may_have_its_own_metric(call, B, n):
    arguments = drawn(B=B, n=n)
    factor = torch.randn(B, n, n, generator=torch.Generator().manual_seed(2))
    arguments["metric"] = factor @ factor.mT + 0.1 * torch.triu(torch.ones(n, n), 1)
    y, gradients = differentiated(call, arguments)
    in_double = {k: v.double() if v.is_floating_point() else v for k, v in arguments.items()}
    expected, true = differentiated(reference, in_double)
    torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-5)
    for name, gradient in true.items():
        torch.testing.assert_close(gradients[name].double(), gradient, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("call", SIDES)
@pytest.mark.parametrize("held", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("what", ["coordinates", "states", "both"])
def test_empty_slot_gets_no_weight_regardless_of_its_contents(call, held, what):
    arguments = drawn()
    arguments["filled"][:, 1] = False
    arguments["filled"][2, 3] = False
    arguments["memory_filled"][::2] = False
    expected, clean = differentiated(call, arguments, eps=0.0)
    for name in ("coordinates", "states"):
        if what in (name, "both"):
            arguments[name][~arguments["filled"]] = held
            arguments[f"memory_{name}"][~arguments["memory_filled"]] = held
    y, gradients = differentiated(call, arguments, eps=0.0)
    assert torch.equal(y, expected)
    for name, gradient in clean.items():
        assert torch.equal(gradients[name], gradient), name
        assert gradient.isfinite().all(), name
    assert not gradients["states"][~arguments["filled"]].any()
    assert not gradients["memory_coordinates"][~arguments["memory_filled"]].any()


@pytest.mark.parametrize("call", SIDES)
@pytest.mark.parametrize("eps", [0.0, 1e-8])
@pytest.mark.parametrize("query", [0.0, math.nan])
def test_query_without_filled_slots_gives_zero_output_and_gradients(call, eps, query):
    arguments = drawn()
    arguments["filled"][1] = False
    arguments["memory_filled"][:] = False
    arguments["query"][1] = query
    arguments["coordinates"][1] = math.nan
    y, gradients = differentiated(call, arguments, eps=eps)
    assert y[1].tolist() == [0.0] * 6
    assert y[0].all()
    for name in ("query", "curvature", "coordinates", "states"):
        assert not gradients[name][1].any(), name
        assert gradients[name].isfinite().all(), name
    for name in ("memory_coordinates", "memory_states"):
        assert not gradients[name].any(), name


@pytest.mark.parametrize("call", SIDES)
@pytest.mark.parametrize(
    "sizes", [{"B": 0}, {"K": 0}, {"M": 0}, {"K": 0, "M": 0}, {"D": 0}, {"n": 0}, {"B": 1, "K": 1, "M": 0}]
)
def test_edge_sizes_match_the_reference(call, sizes):
    arguments = drawn(**sizes)
    y, gradients = differentiated(call, arguments)
    expected, true = differentiated(reference, arguments)
    torch.testing.assert_close(y, expected)
    assert y.shape == (arguments["query"].shape[0], arguments["states"].shape[2])
    for name, gradient in true.items():
        torch.testing.assert_close(gradients[name], gradient, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("call", SIDES)
def test_clamp_passes_the_gradient_at_zero_but_not_below(call):
    arguments = drawn(B=1, K=3, M=0)
    arguments["query"][:] = 0.0
    # Forms of 3, 0 and -1.
    arguments["coordinates"] = torch.tensor([[[2.0, 1.0], [0.0, 0.0], [0.0, 1.0]]])
    arguments["metric"] = torch.tensor([[1.0, 0.0], [0.0, -1.0]])
    _, gradients = differentiated(call, arguments, eps=1e-2, beta=1.0)
    assert gradients["coordinates"][0, 0].abs().min() > 0
    assert gradients["coordinates"][0, 1:].tolist() == [[0.0, 0.0], [0.0, 0.0]]
    # Only the first candidate, at (2, 1), adds to the metric's gradient.
    scale = gradients["metric"][1, 1].item()
    assert gradients["metric"].flatten().tolist() == pytest.approx([4 * scale, 2 * scale, 2 * scale, scale])


@pytest.mark.parametrize("call", SIDES)
def test_nonfinite_filled_slot_affects_only_its_own_query(call):
    arguments = drawn()
    arguments["coordinates"][1, 2, 0] = math.nan
    arguments["states"][2, 0, 3] = math.inf
    y = call(*arguments.values())
    assert y[0].isfinite().all()
    assert y[1].isnan().all()
    assert [bool(v) for v in y[2].isinf()] == [False, False, False, True, False, False]


@pytest.mark.parametrize("call", SIDES)
def test_distant_candidates_neither_overflow_nor_underflow(call):
    arguments = drawn(B=2, K=3, M=0)
    # Logits of about -1e4: the exponentials are all 0, unless taken relative to the largest.
    arguments["coordinates"] = arguments["coordinates"] * 1e-3 + 1e3
    assert call(*arguments.values()).abs().sum() > 0
    arguments["coordinates"][:, 0] -= 10.0
    torch.testing.assert_close(call(*arguments.values()), arguments["states"][:, 0])


@pytest.mark.parametrize(
    ("tiles", "programs", "most", "length", "splits"),
    [(0, 4, 264, 1, 0), (32, 4, 264, 1, 32), (32, 32, 264, 4, 8), (7, 1000, 264, 27, 1), (1000, 4, 264, 16, 63)],
)
def test_splits_cover_the_tiles(tiles, programs, most, length, splits):
    assert _splits(tiles, programs, most) == (length, splits)
    assert length * splits >= tiles


@pytest.mark.interpreted
def test_splits_of_several_tiles_match_the_reference(monkeypatch):
    # With few programs each processes several tiles, and one split of each kind is combined.
    for name in ("MEMORY_PROGRAMS", "OWN_PROGRAMS"):
        monkeypatch.setattr(module, name, 1)
    arguments = drawn(B=2, K=150, M=200, n=3, D=70)
    arguments["filled"][0, :128] = False  # an empty first tile
    arguments["memory_filled"][:130] = False
    torch.testing.assert_close(retrieval_triton(*arguments.values()), reference(*arguments.values()))


@pytest.mark.interpreted
def test_many_splits_match_the_reference(monkeypatch):
    # There are more splits than are read at once.
    for name in ("FORWARD", "BACKWARD"):
        tiles = getattr(module, name)._replace(candidates=16)
        monkeypatch.setattr(module, name, tiles)
    arguments = drawn(B=2, K=40, M=300, n=3, D=5)
    y, gradients = differentiated(retrieval_triton, arguments)
    expected, true = differentiated(reference, arguments)
    torch.testing.assert_close(y, expected)
    for name, gradient in true.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("gpu", [True, False])
@pytest.mark.parametrize("diagonal", [False, True])
def test_kernels_are_used_on_a_gpu(gpu, diagonal, monkeypatch):
    asked = []
    monkeypatch.setattr(module, "use_triton", lambda *tensors: asked.extend(tensors) or gpu)
    monkeypatch.setattr(module, "retrieval_triton", lambda *arguments: ("kernels", *arguments))
    monkeypatch.setattr(module, "retrieval_vectorised", lambda *arguments: ("vectorised", *arguments))
    arguments = list(drawn().values())
    metric_diag = torch.ones(2) if diagonal else None
    path, *given = optimized(*arguments, metric_diag, 3.0, 0.5)
    assert path == ("kernels" if gpu else "vectorised")
    assert all(a is b for a, b in zip(given, [*arguments, metric_diag, 3.0, 0.5], strict=True))
    form = metric_diag if diagonal else arguments[8]
    assert [id(t) for t in asked] == [id(t) for t in (*arguments[:4], *arguments[5:7], form)]


@pytest.mark.interpreted
@pytest.mark.parametrize("form", ["full", "diagonal", "batched"])
@pytest.mark.parametrize(
    ("B", "K", "M", "n", "D"),
    [(1, 1, 1, 1, 1), (2, 65, 3, 3, 65), (17, 3, 33, 3, 5), pytest.param(17, 3, 65, 8, 5, marks=FULLY)],
)
def test_the_kernels_write_within_their_outputs(B, K, M, n, D, form, fences):
    arguments = drawn(B, K, M, n, D)
    if form == "batched":
        arguments["metric"] = torch.eye(n).expand(B, n, n)
    if form == "diagonal":
        arguments |= {"metric": torch.zeros(()), "metric_diag": torch.ones(n)}
    differentiated(retrieval_triton, arguments)
    assert fences.intact()


@pytest.mark.interpreted
def test_the_kernels_refuse_a_second_derivative():
    arguments = drawn()
    query = arguments["query"].requires_grad_()
    (first,) = torch.autograd.grad(retrieval_triton(*arguments.values()).square().sum(), query, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


@pytest.mark.interpreted
def test_query_gradient_is_correct_and_takes_fewer_programs_if_the_memory_needs_no_gradient(monkeypatch):
    kernel, programs = module._backward_kernel, []

    class Counted:
        def __getitem__(self, grid):
            programs.append(math.prod(grid))
            return kernel[grid]

    monkeypatch.setattr(module, "_backward_kernel", Counted())
    differentiated(retrieval_triton, drawn())
    arguments = drawn()
    arguments["query"].requires_grad_()
    retrieval_triton(*arguments.values()).square().sum().backward()
    assert programs[1] < programs[0]
    got = arguments["query"].grad.clone()
    arguments["query"].grad = None
    reference(*arguments.values()).square().sum().backward()
    torch.testing.assert_close(got, arguments["query"].grad, rtol=1e-4, atol=1e-5)
