"""`changed_copy` copies a module as copy.deepcopy does, with other values."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from perfsuite.draws.module_copies import changed_copy


class Tied(torch.nn.Module):
    """Module that shares a parameter and a module, and holds an attribute that is not a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.again = self.first
        self.register_buffer("mean", torch.ones(3))
        self.register_buffer("unsaved", torch.zeros(2), persistent=False)
        self.frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
        self.notes = {"sizes": [3, 3], "of": (1, "a")}
        self.same_notes = self.notes
        self.plain = torch.ones(2)


class Own(torch.nn.Linear):
    """Module that defines how it is copied."""

    def __deepcopy__(self, known: dict[int, Any]) -> Own:
        clone = Own(self.in_features, self.out_features)
        clone.copied = True
        return clone


def doubled(tensor: torch.Tensor) -> torch.Tensor:
    return 2 * tensor.double()


def test_changed_copy_changes_values_and_keeps_shared_tensors_shared() -> None:
    module = Tied()
    module.first.weight.grad = torch.ones(3, 3)
    module.first.weight.grad_note = "kept by deepcopy alone"
    clone = changed_copy(module, doubled)
    assert isinstance(clone, Tied)
    assert clone.first.weight is clone.second.weight
    assert clone.first is clone.again
    assert clone.notes is clone.same_notes
    assert [n for n, _ in clone.named_parameters()] == [n for n, _ in module.named_parameters()]
    assert list(clone.state_dict()) == list(module.state_dict())
    for (name, tensor), changed in zip(
        [*module.named_parameters(), *module.named_buffers()], [*clone.parameters(), *clone.buffers()], strict=True
    ):
        assert torch.equal(changed, doubled(tensor)), name
        assert changed.requires_grad == tensor.requires_grad, name
        assert type(changed) is type(tensor), name
        assert changed.is_leaf, name
        assert changed.grad is None, name
    assert torch.equal(clone.plain, module.plain)
    assert clone.plain is not module.plain


def test_changed_copy_shares_no_state_with_the_module() -> None:
    module = Tied()
    handle = module.register_forward_hook(lambda *given: None)
    clone = changed_copy(module, torch.clone)
    assert len(clone._forward_hooks) == 1
    clone.notes["sizes"].append(4)
    clone._forward_hooks.clear()
    clone.first.register_buffer("more", torch.ones(1))
    clone.first.eval()
    with torch.no_grad():
        clone.first.weight.zero_()
    assert module.notes["sizes"] == [3, 3]
    assert len(module._forward_hooks) == 1
    assert "more" not in module.first._buffers
    assert module.first.training
    assert module.first.weight.abs().sum() > 0
    handle.remove()


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.nn.Conv2d(2, 3, 3, padding="same"),
        lambda: torch.nn.BatchNorm1d(3),
        lambda: torch.nn.LSTM(2, 3, num_layers=2),
        lambda: torch.nn.MultiheadAttention(4, 2),
        lambda: torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.1), torch.nn.GELU()),
        lambda: torch.nn.ParameterList([torch.ones(2), torch.ones(3)]),
    ],
)
def test_changed_copy_has_the_attributes_that_deepcopy_gives(make: Any) -> None:
    module = make()
    expected, found = copy.deepcopy(module), changed_copy(module, torch.clone)
    assert list(vars(found)) == list(vars(expected))
    for name, value in vars(expected).items():
        assert type(vars(found)[name]) is type(value), name
        if isinstance(value, (bool, int, float, str, tuple, set)):
            assert vars(found)[name] == value, name
    for (name, a), (_, b) in zip(found.state_dict().items(), expected.state_dict().items(), strict=True):
        assert torch.equal(a, b), name


def test_a_copied_lstm_computes_with_its_own_weights() -> None:
    module, x = torch.nn.LSTM(2, 3), torch.ones(4, 1, 2)
    clone = changed_copy(module, torch.zeros_like)
    assert not torch.equal(module(x)[0], torch.zeros(4, 1, 3))
    assert torch.equal(clone(x)[0], torch.zeros(4, 1, 3))


def test_changed_copy_calls_the_deepcopy_method_of_a_class() -> None:
    class Holder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = Own(2, 2)

    assert changed_copy(Holder(), torch.clone).own.copied
