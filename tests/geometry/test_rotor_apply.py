import math

import pytest
import torch

from optimized.geometry import rotor_apply as module
from optimized.geometry.retrieval import retrieval
from optimized.geometry.rotor_apply import folded_metric as optimized_folded_metric
from optimized.geometry.rotor_apply import rotor_apply as optimized
from optimized.geometry.rotor_apply import rotor_apply_triton, rotor_apply_vectorised
from optimized.geometry.rotor_apply import rotor_index as optimized_index
from optimized.kernels import triton_reason
from perfsuite import Cost, Pair, Workload, compiled, floats, side, size, tensor
from reference.geometry.rotor_apply import folded_metric as reference_folded_metric
from reference.geometry.rotor_apply import rotor_apply as reference
from reference.geometry.rotor_apply import rotor_index as reference_index
from reference.geometry.rotor_update import rotor_update

rotor_apply = Pair(
    reference=reference,
    optimized=optimized,
    inputs={"theta": tensor("k", values=floats(-4, 4)), "x": tensor("M", "n")},
    sizes={"k": size(0, 34), "n": size(0, 18, multiple_of=2)},
    rivals={
        "compile": compiled(side(reference, devices=("cuda",))),
        "compile_vectorised": compiled(side(rotor_apply_vectorised, devices=("cuda",))),
    },
    variants={"triton": side(rotor_apply_triton, available=triton_reason)},
    workloads=[
        Workload("m2048", k=6, M=2048, n=8, device="cuda", repeat=16, speedup=4.0, host_syncs=0, launches=1),
        Workload("m2048_both", k=6, M=2048, n=8, direction="both", device="cuda"),
        Workload("cpu", k=6, M=2048, n=8, clock="wall", direction="both", device="cpu"),
    ],
    cost=Cost(
        bytes=lambda k, M, n, direction: (
            4 * {"forward": 2 * M * n + k, "backward": 3 * M * n + 2 * k}.get(direction, 5 * M * n + 3 * k)
        )
    ),
)

SIDES = [reference, optimized, rotor_apply_vectorised]
if triton_reason() is None and not torch.cuda.is_available():
    SIDES.append(rotor_apply_triton)
FOLDED = [reference_folded_metric, optimized_folded_metric]


@pytest.mark.parametrize("index", [reference_index, optimized_index])
def test_rotor_index_lists_coordinate_pairs_and_their_slots(index):
    assert index(8, 6).tolist() == [[0, 1, 0], [2, 3, 1], [4, 5, 2], [6, 7, 3], [1, 2, 4], [3, 4, 5]]
    # The layers wrap round: the last pair of an odd layer joins the last coordinate and the first.
    assert index(4, 6).tolist() == [[0, 1, 0], [2, 3, 1], [1, 2, 2], [3, 0, 3], [2, 3, 4], [0, 1, 5]]
    assert index(2, 3).tolist() == [[0, 1, 0], [1, 0, 1], [0, 1, 2]]
    for n, k in ((4, 0), (0, 3)):
        assert index(n, k).shape == (0, 3)
        assert index(n, k).dtype == torch.int64
    with pytest.raises(ValueError, match="n must be even, not 7"):
        index(7, 3)


@pytest.mark.parametrize("n", [2, 6, 16])
@pytest.mark.parametrize("k", [1, 7, 40])
def test_rotor_update_with_this_index_turns_every_slot_once(n, k):
    assert torch.equal(reference_index(n, k), optimized_index(n, k))
    theta = rotor_update(torch.zeros(k), torch.ones(n), optimized_index(n, k), torch.tensor(-1.0))
    # Every slot is turned exactly once.
    torch.testing.assert_close(theta, torch.full((k,), 0.1 * math.pi / 4 * math.sqrt(2)))


@pytest.mark.parametrize("call", SIDES)
def test_known_values(call):
    quarter = math.pi / 2
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    assert call(torch.tensor([quarter]), x)[0].tolist() == pytest.approx([-2.0, 1.0, 3.0, 4.0])
    assert call(torch.tensor([0.0, quarter]), x)[0].tolist() == pytest.approx([1.0, 2.0, -4.0, 3.0])
    # The second layer, whose second pair is (3, 0).
    assert call(torch.tensor([0.0, 0.0, quarter]), x)[0].tolist() == pytest.approx([1.0, -3.0, 2.0, 4.0])
    assert call(torch.tensor([0.0, 0.0, 0.0, quarter]), x)[0].tolist() == pytest.approx([4.0, 2.0, 3.0, -1.0])
    # The first layer first.
    assert call(torch.tensor([quarter, 0.0, quarter]), x)[0].tolist() == pytest.approx([-2.0, -3.0, 1.0, 4.0])


@pytest.mark.parametrize("call", SIDES)
@pytest.mark.parametrize("shape", [(4,), (0, 4), (3, 4), (2, 0, 4), (2, 3, 4), (3, 0)])
@pytest.mark.parametrize("k", [0, 3])
def test_any_leading_shape_is_accepted_and_the_input_is_unchanged(call, shape, k):
    generator = torch.Generator().manual_seed(0)
    theta, x = torch.randn(k, generator=generator), torch.randn(shape, generator=generator)
    before = x.clone()
    turned = call(theta, x)
    # The source changed its input: the mean velocity "in the original frame" was already rotated.
    assert torch.equal(x, before)
    assert not x.numel() or turned.data_ptr() != x.data_ptr()
    torch.testing.assert_close(turned, reference(theta, x))
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    if not k:
        assert torch.equal(turned, x)


@pytest.mark.parametrize("call", SIDES[:3])
@pytest.mark.parametrize("shape", [(4,), (2, 4)])
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.float64, torch.float32)])
def test_result_has_the_dtype_of_x(call, shape, dtypes):
    of_theta, of_x = dtypes
    theta, x = torch.linspace(0.5, 1.5, 3, dtype=of_theta), torch.ones(shape, dtype=of_x)
    found = call(theta, x)
    assert found.dtype == of_x
    torch.testing.assert_close(found.double(), reference(theta.double(), x.double()), rtol=2**-5, atol=2**-6)


@pytest.mark.parametrize("call", SIDES)
def test_an_odd_number_of_coordinates_is_refused(call):
    with pytest.raises(ValueError, match="n must be even, not 3"):
        call(torch.zeros(2), torch.zeros(5, 3))


@pytest.mark.parametrize("call", SIDES)
def test_nan_spreads_only_to_columns_it_is_rotated_with(call):
    x = torch.ones(1, 6)
    x[0, 2] = math.nan
    turned = call(torch.full((4,), 0.5), x)
    # Column 2 is rotated with 3 in the first layer, and with 1 in the second.
    assert turned[0].isnan().tolist() == [False, True, True, True, False, False]


@pytest.mark.parametrize("fold", FOLDED)
@pytest.mark.parametrize(("n", "k"), [(2, 1), (8, 6), (6, 20), (4, 0)])
def test_folded_metric_gives_the_quadratic_form_of_rotated_vectors(fold, n, k):
    generator = torch.Generator().manual_seed(0)
    theta = torch.randn(k, generator=generator, dtype=torch.float64)
    d = torch.randn(10, n, generator=generator, dtype=torch.float64)
    factor = torch.randn(n, n, generator=generator, dtype=torch.float64)
    turned = reference(theta, d)
    for metric in (factor @ factor.mT, factor, torch.rand(n, generator=generator, dtype=torch.float64)):
        along = turned * metric if metric.dim() == 1 else turned @ metric
        folded = fold(theta, metric, n)
        assert folded.shape == (n, n)
        torch.testing.assert_close(((d @ folded) * d).sum(-1), (along * turned).sum(-1))


@pytest.mark.parametrize("fold", FOLDED)
def test_retrieval_with_the_folded_metric_equals_retrieval_after_rotation(fold):
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    theta, query, own, memory = drawn(6), drawn(3, 8), drawn(3, 4, 8), drawn(5, 8)
    metric_diag = drawn(8).abs()
    curvature, states, memory_states = drawn(3).abs(), drawn(3, 4, 2), drawn(5, 2)
    filled, memory_filled = torch.ones(3, 4, dtype=torch.bool), torch.ones(5, dtype=torch.bool)
    turned = [reference(theta, t) for t in (query, own, memory)]
    expected = retrieval(
        turned[0], curvature, turned[1], states, filled, turned[2], memory_states, memory_filled, None, metric_diag
    )
    folded = fold(theta, metric_diag, 8)
    y = retrieval(query, curvature, own, states, filled, memory, memory_states, memory_filled, folded)
    torch.testing.assert_close(y, expected)


@pytest.mark.parametrize(
    ("k", "n", "path"), [(6, 8, "kernels"), (32, 16, "kernels"), (33, 16, "vectorised"), (6, 18, "vectorised")]
)
@pytest.mark.parametrize("gpu", [True, False])
def test_kernels_are_used_on_a_gpu_for_small_rotors(k, n, path, gpu, monkeypatch):
    asked = []
    monkeypatch.setattr(module, "use_triton", lambda *tensors: asked.extend(tensors) or gpu)
    monkeypatch.setattr(module, "rotate", lambda *arguments: "vectorised")
    monkeypatch.setattr(module._RotorApply, "apply", lambda *arguments: "kernels")
    theta, x = torch.empty(k), torch.empty(3, n)
    assert optimized(theta, x) == (path if gpu else "vectorised")
    assert [id(t) for t in asked] == [id(theta), id(x)]


@pytest.mark.interpreted
def test_the_kernels_refuse_a_second_derivative():
    x = torch.randn(3, 2, generator=torch.Generator().manual_seed(0), requires_grad=True)
    (first,) = torch.autograd.grad(rotor_apply_triton(torch.ones(2), x).pow(3).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


@pytest.mark.interpreted
@pytest.mark.parametrize(("rows", "k", "n"), [(1, 1, 2), (3, 6, 8), (128, 5, 4), (129, 7, 6), (300, 32, 16)])
def test_the_kernels_write_within_their_outputs(rows, k, n, fences):
    generator = torch.Generator().manual_seed(0)
    theta = torch.randn(k, generator=generator, requires_grad=True)
    x = torch.randn(rows, n, generator=generator, requires_grad=True)
    rotor_apply_triton(theta, x).square().sum().backward()
    assert fences.intact()
