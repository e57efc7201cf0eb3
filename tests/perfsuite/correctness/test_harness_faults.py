"""An error of the harness is not attributed to a side, and discards no draw."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from perfsuite import Pair, floats, tensor
from perfsuite.correctness import contexts, differences, equivalence, integrity
from perfsuite.errors import HarnessFault, PairError
from perfsuite.records import Case

CASE = Case(dtype="float32", sizes={"n": 5}, inputs={}, seed=0)
Proof = Callable[..., None]


def pair_of(side: Callable[[torch.Tensor], torch.Tensor]) -> Pair:
    return Pair(name="p", reference=side, optimized=side, inputs={"x": tensor("n", values=floats(-2, 2))})


@pytest.mark.parametrize("proof", [equivalence.check_case, integrity.check, contexts.check])
def test_a_harness_error_in_computing_the_truth_raises_harness_fault(
    proof: Proof, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(differences, "math", None)
    with pytest.raises(HarnessFault, match=r"perfsuite itself raises AttributeError: .* a bug of perfsuite"):
        proof(pair_of(torch.sin), CASE, "cpu")


@pytest.mark.parametrize(
    "reference",
    [
        lambda x: x @ torch.zeros(3),
        lambda x: torch.linalg.cholesky(x),
        lambda x: torch.autograd.grad(x.sum(), x),
    ],
    ids=["a product", "one line of torch", "autograd"],
)
def test_an_error_of_the_reference_is_not_a_harness_fault(reference: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with pytest.raises(RuntimeError):
        equivalence.check_case(pair_of(reference), CASE, "cpu")


def test_an_error_of_the_reference_backward_pass_is_not_a_harness_fault() -> None:
    def overwritten(x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        z = y * y
        y.add_(1)
        return z

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        equivalence.check_case(pair_of(overwritten), CASE, "cpu", gradients=True)


def test_a_sparse_gradient_is_named_with_its_remedy() -> None:
    def rows(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding(torch.tensor([0, 0]), x, sparse=True)

    pair = replace(pair_of(rows), inputs={"x": tensor(3, 4)})
    with pytest.raises(PairError, match=r"gradient of x of the reference is a sparse_coo tensor.* with sparse=False"):
        equivalence.check_case(pair, CASE, "cpu", gradients=True)


def test_an_output_in_a_class_of_the_user_is_named_with_its_remedy() -> None:
    with pytest.raises(PairError, match=r"output is a SimpleNamespace; .* leave it out, or return its parts in a dict"):
        equivalence.check_case(pair_of(lambda x: SimpleNamespace(loss=x)), CASE, "cpu")


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda x: x.to_sparse(), "sparse_coo"),
        (lambda x: torch.nested.nested_tensor([x]), "nested"),
        (lambda x: x.to("meta"), "meta"),
        (lambda x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8), "quantized"),
    ],
    ids=["sparse", "nested", "meta", "quantized"],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_reference_must_return_dense_tensors(make: Callable[[torch.Tensor], torch.Tensor], kind: str) -> None:
    with pytest.raises(PairError, match=f"output of the reference is a {kind} tensor; only dense tensors"):
        equivalence.check_case(pair_of(make), CASE, "cpu")
