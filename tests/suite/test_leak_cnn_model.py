"""The network of leak_cnn and its loss."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
from torch.nn import functional

from suite.backends import cudnn_benchmark, tf32_products
from suite.leak_cnn.classes import CLASSES, LEAK
from suite.leak_cnn.loss import class_weights, leak_cnn_loss
from suite.leak_cnn.model import DROPOUT, features, forward, head, make_weights, shapes
from suite.leak_cnn.step import training_loss, with_gradients
from suite.leak_cnn.trial import Network, near_a_threshold


def test_network_has_618_758_parameters() -> None:
    weights = make_weights(0)
    assert len(weights) == 12
    assert sum(w.numel() for w in weights.values()) == 618_758
    assert {name: tuple(w.shape) for name, w in weights.items()} == shapes()
    assert all(w.dtype is torch.float32 for w in weights.values())


def test_initial_weights_depend_on_the_seed_and_are_within_torch_s_bounds() -> None:
    first, again, other = make_weights(0), make_weights(0), make_weights(1)
    for name, weight in first.items():
        inputs = math.prod(shapes()[f"{name.partition('.')[0]}.weight"][1:])
        assert torch.equal(weight, again[name])
        assert not torch.equal(weight, other[name])
        assert weight.abs().max() <= 1 / math.sqrt(inputs)
    assert first["hidden.weight"].abs().max() > 0.99 / math.sqrt(2048)


def test_trial_module_has_the_parameter_names_of_the_network() -> None:
    named = dict(Network(32, 64, 128, 256).named_parameters())
    assert {name: tuple(w.shape) for name, w in named.items()} == shapes()


def test_forward_has_the_expected_shapes() -> None:
    weights, segments = make_weights(0), torch.randn(3, 1, 32, 1)
    x = features(weights, segments)
    assert x.shape == (3, 128, 8, 1)
    assert (x >= 0).all()
    classes, leak = forward(weights, segments)
    assert (classes.shape, leak.shape) == ((3, len(CLASSES)), (3,))
    assert torch.equal(classes, head(weights, x)[0])


def test_outer_columns_of_the_kernels_do_not_affect_one_column_inputs() -> None:
    weights, segments = make_weights(0), torch.randn(2, 1, 32, 1)
    middle = {name: functional.pad(w[..., 1:2], (1, 1)) if w.dim() == 4 else w for name, w in weights.items()}
    torch.testing.assert_close(forward(middle, segments), forward(weights, segments))


def test_keep_mask_drops_and_scales_the_features() -> None:
    weights, segments = make_weights(0), torch.randn(2, 1, 32, 1)
    every = torch.full((2, 2048), 1 / (1 - DROPOUT))
    none = forward(weights, segments, keep=torch.zeros(2, 2048))[0]
    constant = functional.relu(weights["hidden.bias"]) @ weights["classes.weight"].T + weights["classes.bias"]
    torch.testing.assert_close(none, constant.expand(2, -1))
    assert not torch.allclose(forward(weights, segments, keep=every)[0], forward(weights, segments)[0])
    torch.testing.assert_close(forward(weights, segments, keep=torch.ones(2, 2048)), forward(weights, segments))


def test_class_weights_are_inverse_frequencies_of_mean_one() -> None:
    weights = class_weights(torch.tensor([10, 20, 40, 20, 10]))
    assert weights.mean().item() == pytest.approx(1)
    assert (weights / weights[2]).tolist() == pytest.approx([4, 2, 1, 2, 4])
    assert weights.dtype is torch.float32


def test_classes_without_examples_have_weight_one() -> None:
    assert class_weights(torch.tensor([10, 0, 10, 0, 10])).tolist() == pytest.approx([1] * 5)
    assert class_weights(torch.zeros(5, dtype=torch.int64)).tolist() == [1] * 5


def test_loss_is_weighted_cross_entropy_plus_half_the_binary_cross_entropy() -> None:
    classes = torch.log(torch.tensor([[0.1, 0.2, 0.3, 0.2, 0.2], [0.5, 0.1, 0.1, 0.1, 0.2]]))
    leak = torch.tensor([math.log(3), 0.0])  # probabilities 3/4 and 1/2
    labels, weights = torch.tensor([LEAK, 0]), torch.tensor([2.0, 1.0, 1.0, 1.0, 1.0])
    entropy = (1.0 * -math.log(0.3) + 2.0 * -math.log(0.5)) / 3
    binary = (-math.log(0.75) - math.log(0.5)) / 2
    assert leak_cnn_loss(classes, leak, labels, weights).item() == pytest.approx(entropy + 0.5 * binary)


def test_with_gradients_returns_the_gradients_of_backward() -> None:
    weights, segments = make_weights(0), torch.randn(4, 1, 32, 1)
    labels, balance = torch.tensor([0, 1, 2, 3]), torch.ones(5)
    loss, gradients = with_gradients(training_loss, weights, segments, labels, balance)
    leaves = {name: w.requires_grad_() for name, w in weights.items()}
    training_loss(leaves, segments, labels, balance).backward()
    assert not loss.requires_grad
    assert list(gradients) == list(weights)
    for name, leaf in leaves.items():
        assert torch.equal(gradients[name], leaf.grad), name  # type: ignore[arg-type]  # there is one


@pytest.mark.parametrize("layer", ["conv1", "conv2", "conv3", "hidden"])
def test_near_a_threshold_detects_a_relu_input_of_zero(layer: str) -> None:
    torch.manual_seed(0)
    network = Network(2, 3, 2, 4).double()
    batch = (torch.randn(2, 1, 8, 1).double(), torch.tensor([0, 2]), torch.ones(5).double())
    assert not any(near_a_threshold(network, *batch).values())
    with torch.no_grad():
        getattr(network, layer).weight[0] = 0.0
        getattr(network, layer).bias[0] = 0.0
    near = near_a_threshold(network, *batch)
    assert all(near.values())
    assert "gradient of network.conv1.weight" in near


@pytest.mark.parametrize("within", [True, False])
@pytest.mark.parametrize("before", [True, False])
def test_backend_settings_apply_inside_the_context_and_are_restored(within: bool, before: bool) -> None:
    cudnn, products = torch.backends.cudnn, torch.get_float32_matmul_precision()
    own = cudnn.allow_tf32, cudnn.benchmark
    try:
        cudnn.allow_tf32 = cudnn.benchmark = before
        with contextlib.suppress(KeyError), tf32_products(allowed=within), cudnn_benchmark(on=within):
            assert torch.get_float32_matmul_precision() == ("high" if within else "highest")
            assert cudnn.allow_tf32 == within
            assert cudnn.benchmark == within
            raise KeyError
        assert (cudnn.allow_tf32, cudnn.benchmark) == (before, before)
        assert torch.get_float32_matmul_precision() == products
    finally:
        cudnn.allow_tf32, cudnn.benchmark = own
