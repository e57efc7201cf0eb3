"""Sides that are modules, and pairs made from two classes of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from scale import FULLY, count
from torch import nn

import perfsuite
from perfsuite import Pair, Workload, compiled, floats, module, size, tensor
from perfsuite.correctness import equivalence, execution, integrity
from perfsuite.declare import modules
from perfsuite.declare.specs import ConstantSpec, Floats, Integers, Sampled, tensor_spec
from perfsuite.draws import inputs as make
from perfsuite.draws.cases import workload_case
from perfsuite.draws.tensor_values import seed_for
from perfsuite.errors import NotEquivalent, PairError
from perfsuite.records import Case, InputCase


class Model(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 4)
        self.register_buffer("shift", torch.full((4,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x) + self.shift)


class ModelNew(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.linear.bias + self.shift, x, self.linear.weight.t()).clamp_min(0)


class Scaled(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x) + self.shift) * 1.01


class Replaying(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Model.forward(self, x)


class Frozen(ModelNew):
    """Correct only with the parameters that it was built with."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.held = self.linear.weight.detach().clone()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ self.held.to(x).t() + self.linear.bias + self.shift)


class Packed(ModelNew):
    """Correct while the weights stay as they were at the first call without gradients."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.packed: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            return super().forward(x)
        if self.packed is None or self.packed.dtype != x.dtype:
            self.packed = self.linear.weight.detach().t().contiguous()
        return torch.relu(x @ self.packed + self.linear.bias + self.shift)


class Other(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.project = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.project(x) + 0.5)


def get_inputs() -> list[Any]:
    return [torch.rand(6, 5)]


def get_init_inputs() -> list[Any]:
    return [5]


def made(candidate: Any, **fields: Any) -> Pair:
    return Pair.from_modules(Model, candidate, get_inputs, get_init_inputs, **fields)


def test_a_pair_of_modules_is_proven_with_its_gradients() -> None:
    pair = made(ModelNew, gradients=True)
    evidence = perfsuite.check(pair, examples=count(quick=3, full=10), device="cpu")
    assert len(evidence) == 2
    assert list(pair.inputs) == ["module", "x0"]
    assert list(pair.rivals) == ["compile"]


@FULLY
def test_a_pair_of_modules_is_timed() -> None:
    assert set(perfsuite.measure(made(ModelNew, rivals={}), device="cpu")[0].sides) == {"reference", "optimized"}


@pytest.mark.parametrize(
    ("candidate", "says"),
    [
        (Scaled, "is wrong|is inaccurate"),
        (Frozen, "is wrong|is inaccurate"),
        (Packed, "gives the answer|the same tensors|wrong"),
        (Replaying, "calls the reference itself"),
        (Other, "has a parameter 'linear.bias' and the optimized module has none: give them the same names"),
    ],
)
def test_a_wrong_module_is_rejected(candidate: Any, says: str) -> None:
    with pytest.raises((NotEquivalent, PairError), match=says):
        perfsuite.check(made(candidate), examples=20, device="cpu")


def layers() -> list[torch.nn.Module]:
    return [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()), torch.nn.Linear(8, 4)]


class OwnLast(torch.nn.Sequential):
    """Calls its inner nn.Sequential, whose class is the reference's, too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(self[0](x), self[1].weight, self[1].bias)


class Inherited(torch.nn.Sequential):
    """Calls the reference's function on the reference's layers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def test_an_inner_module_of_a_class_of_torch_is_not_the_reference() -> None:
    shapes: dict[str, Any] = {"inputs": {"x": tensor("n", 8)}, "sizes": {"n": size(1, 9)}}
    reference = torch.nn.Sequential(*layers())
    case = Case(dtype="float32", sizes={"n": 5}, inputs={}, seed=1)
    own, inherited = (
        Pair(reference=reference, optimized=kind(*layers()), **shapes, name="p") for kind in (OwnLast, Inherited)
    )
    integrity.check(own, case, "cpu")
    with pytest.raises(NotEquivalent, match="calls the reference itself"):
        integrity.check(inherited, case, "cpu")


class Padded(Model):
    """Returns a part of longer rows, as torch.compile does for some products on a GPU."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.relu(self.linear(x) + self.shift)
        return torch.nn.functional.pad(out, (0, 3))[:, : out.shape[1]]


def test_outputs_of_modules_are_compared_by_value() -> None:
    perfsuite.check(made(Padded, rivals={}), examples=3, device="cpu")
    with pytest.raises(NotEquivalent, match="strided in memory"):
        perfsuite.check(made(Padded, rivals={}, strides="reference"), examples=3, device="cpu")


class Shiftless(Model):
    """Replaces the buffer by its value in a new module."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x) + 0.5)


class Tabled(nn.Module):
    """Module with a sorted buffer, an integer one, and one that is not stored."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bounds", torch.arange(1.0, 9.0))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("table", torch.ones(4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.bucketize(x, self.bounds)


def test_each_stored_float_buffer_is_scaled_by_one_random_factor() -> None:
    with pytest.raises(NotEquivalent, match=r"is wrong|is inaccurate"):
        perfsuite.check(made(Shiftless), examples=20, device="cpu")
    made_anew = modules.spec_of(Tabled()).build()
    factors = made_anew.bounds / torch.arange(1.0, 9.0)
    assert torch.allclose(factors, factors[:1].expand(8))
    assert factors[0] != 1
    assert int(made_anew.count) == 3
    assert torch.equal(made_anew.table, torch.ones(4))


def test_modules_with_different_parameter_shapes_are_rejected() -> None:
    pair = Pair(reference=Model(5), optimized=ModelNew(6), inputs={"x": tensor("m", 5)})
    with pytest.raises(PairError, match=r"'linear.weight' has shape \(4, 6\) in the optimized module and \(4, 5\)"):
        perfsuite.check(pair, device="cpu")


class Norms(nn.Module):
    """Batch norm in evaluation mode; a bias and a running mean begin at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)


class NormsByHand(Norms):
    left_out = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        norm = self.norm
        mean = torch.zeros(()) if self.left_out == "running_mean" else norm.running_mean
        bias = torch.zeros(()) if self.left_out == "bias" else norm.bias
        return (x - mean) * torch.rsqrt(norm.running_var + norm.eps) * norm.weight + bias


@pytest.mark.parametrize("left_out", ["running_mean", pytest.param("bias", marks=FULLY)])
def test_parameters_and_buffers_that_start_at_zero_are_varied(left_out: str) -> None:
    def pair(optimized: nn.Module) -> Pair:
        inputs = {"x": tensor("m", 5, values=floats(-1, 1))}
        return Pair(reference=Norms(), optimized=optimized, inputs=inputs, max_examples=count(quick=2, full=4))

    perfsuite.check(pair(NormsByHand()), device="cpu")
    wrong = NormsByHand()
    wrong.left_out = left_out
    with pytest.raises(NotEquivalent):
        perfsuite.check(pair(wrong), device="cpu")


class Trained(nn.Module):
    """Batch norm in training: each call changes the running mean and variance."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)


class TrainedByHand(Trained):
    forgets = False
    rescales = False
    detaches = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        norm = self.norm
        bias = norm.bias.detach() if self.detaches else norm.bias
        mean, variance = x.mean(0), x.var(0, correction=0)
        with torch.no_grad():
            if not self.forgets:
                norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), 0.1)
            norm.running_var.lerp_(x.var(0).to(norm.running_var.dtype), 0.1)
            norm.num_batches_tracked.add_(1)
            if self.rescales:
                norm.weight.mul_(1.0)
        return (x - mean) * torch.rsqrt(variance + norm.eps) * norm.weight + bias


def trained(**flags: bool) -> Pair:
    optimized = TrainedByHand()
    for name, value in flags.items():
        setattr(optimized, name, value)
    inputs = {"x": tensor("m", 5, values=floats(-1, 1))}
    return Pair(
        reference=Trained(),
        optimized=optimized,
        inputs=inputs,
        sizes={"m": perfsuite.size(2, 40)},
        max_examples=count(quick=2, full=6),
    )


def test_running_statistics_of_a_module_in_training_are_outputs() -> None:
    pair = trained()
    assert pair.mutates == {"module": "buffers"}
    perfsuite.check(pair, device="cpu", examples=4)
    with pytest.raises(NotEquivalent, match=r"module\.norm\.running_mean \(in place\) of the optimized side is wrong"):
        perfsuite.check(trained(forgets=True), device="cpu")


def test_a_call_may_change_buffers_but_no_parameters() -> None:
    says = r"changes its input module\.norm\.weight in place, .*; the reference does not change it"
    with pytest.raises(NotEquivalent, match=says):
        perfsuite.check(trained(rescales=True), device="cpu")


def test_a_parameter_that_both_sides_change_is_declared_as_such() -> None:
    def halved(norm: nn.Module, x: torch.Tensor) -> Any:
        with torch.no_grad():
            norm.weight.mul_(0.5)
            return norm(x)

    inputs = {"norm": module(lambda: nn.LayerNorm(5)), "x": tensor("m", 5, values=floats(-1, 1))}
    pair = Pair(reference=halved, optimized=lambda norm, x: 1 * halved(norm, x), inputs=inputs, gradients=False)
    says = r"changes its input norm\.weight in place, .* declare mutates=\{'norm': 'changed'\}"
    with pytest.raises(NotEquivalent, match=says):
        perfsuite.check(pair, device="cpu")


def test_a_buffer_that_changes_is_declared_as_such() -> None:
    inputs = {"norm": module(lambda: nn.BatchNorm1d(5)), "x": tensor("m", 5, values=floats(-1, 1), least=2)}
    pair = Pair(reference=lambda norm, x: norm(x), optimized=lambda norm, x: 1 * norm(x), inputs=inputs)
    says = r"changes its input norm\.running_mean in place, .* declare mutates=\{'norm': 'buffers'\}"
    with pytest.raises(NotEquivalent, match=says):
        perfsuite.check(pair, device="cpu")
    perfsuite.check(replace(pair, mutates={"norm": "buffers"}, max_examples=2), device="cpu")


def test_a_parameter_that_is_exchanged_instead_of_changed_is_refused() -> None:
    def halved(linear: nn.Module, exchanges: bool) -> None:
        for name, parameter in list(linear.named_parameters()):
            if exchanges:
                setattr(linear, name, nn.Parameter(parameter.detach() / 2))
            else:
                parameter.data.div_(2)

    pair = Pair(
        reference=lambda linear: halved(linear, exchanges=False),
        optimized=lambda linear: halved(linear, exchanges=True),
        inputs={"linear": module(lambda: nn.Linear(3, 2))},
        mutates={"linear"},
        gradients=False,
    )
    with pytest.raises(NotEquivalent, match=r"replaces linear\.weight in its input by another tensor"):
        perfsuite.check(pair, device="cpu")


def test_a_module_with_changed_buffers_is_differentiable() -> None:
    pair = trained()
    assert execution.differentiable(pair) == ("module", "x")
    assert execution.differentiable(replace(pair, mutates={"module": "changed"})) == ("x",)
    with pytest.raises(NotEquivalent, match=r"gradient of module\.norm\.bias"):
        perfsuite.check(trained(detaches=True), device="cpu")


def test_mutates_buffers_is_rejected_for_an_input_that_is_not_a_module() -> None:
    with pytest.raises(PairError, match="it is no module and has none; say"):
        Pair(reference=torch.exp, optimized=torch.exp, inputs={"x": tensor("n")}, mutates={"x": "buffers"})


class Stateless(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(x) * x


def double(x: torch.Tensor) -> torch.Tensor:
    return x + x


@pytest.mark.parametrize(
    ("reference", "optimized"),
    [
        pytest.param(Model(5), lambda: compiled(Model(5), backend="eager"), marks=FULLY),
        pytest.param(Model(5), lambda: torch.compile(Model(5), backend="eager"), marks=FULLY),
        pytest.param(Stateless(), lambda: torch.compile(Stateless(), backend="eager"), marks=FULLY),
        (double, lambda: torch.compile(double, backend="eager")),
    ],
    ids=["declared", "module", "stateless", "function"],
)
def test_the_compiled_reference_may_be_declared_as_the_optimized_side(
    reference: Any, optimized: Callable[[], Any]
) -> None:
    """The optimized side is made within the test: torch.compile imports the compiler, which takes a second."""
    inputs = {"x": tensor(6, 5, values=floats(-1, 1))}
    perfsuite.check(Pair(reference=reference, optimized=optimized(), inputs=inputs, max_examples=2), device="cpu")


def test_modules_without_parameters_are_treated_as_functions() -> None:
    class Gelu(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 0.5 * x * (1 + torch.erf(x / 2**0.5))

    pair = Pair(reference=nn.GELU(), optimized=Gelu(), inputs={"x": tensor("m", "n", values=floats(-3, 3))})
    assert list(pair.inputs) == ["x"]
    perfsuite.check(pair, examples=count(quick=3, full=10), device="cpu")


def test_a_function_beside_a_module_with_parameters_is_refused() -> None:
    with pytest.raises(PairError, match="the optimized side is no module where another is one with parameters"):
        Pair(reference=Model(5), optimized=torch.relu, inputs={"x": tensor("m", 5)})


def test_an_input_named_module_is_rejected() -> None:
    with pytest.raises(PairError, match="input 'module' has the name of the input with the sides' parameters"):
        Pair(reference=Model(5), optimized=ModelNew(5), inputs={"module": tensor("m", 5)})


def test_sharing_computes_with_the_parameters_of_the_given_module() -> None:
    given, side = Model(5), modules.Sharing(ModelNew(5), "optimized")
    x = torch.rand(3, 5)
    assert torch.allclose(side(given, x), given(x))
    with torch.no_grad():
        given.linear.weight.zero_()
        given.shift.zero_()
    assert torch.allclose(side(given, x), given(x))
    side(given, x).sum().backward()
    assert given.linear.bias.grad is not None
    other = Model(5)
    assert torch.allclose(side(other, x), other(x))


# --- templates ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "kind"),
    [
        (torch.rand(4, 300), Floats(low=0.0, high=1.0)),
        (torch.arange(12).reshape(3, 4), Integers(low=0, high=12)),
        (torch.tensor([1.0, -1.0] * 50), Sampled),
        (3, ConstantSpec(value=3)),
    ],
)
def test_values_are_drawn_in_the_range_of_the_template(template: Any, kind: Any) -> None:
    (spec,) = modules.specs_of([template]).values()
    found = getattr(spec, "values", spec)
    assert found == kind if not isinstance(kind, type) else isinstance(found, kind)


class Tied(nn.Module):
    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(tokens))  # type: ignore[no-any-return]


@pytest.mark.parametrize(("reference", "optimized"), [(True, False), (False, True), (True, True), (False, False)])
def test_tied_parameters_must_be_tied_in_both_modules(reference: bool, optimized: bool) -> None:
    one, other = ("reference", "optimized") if reference else ("optimized", "reference")
    share = modules.Sharing(Tied(tied=optimized), "optimized").sharing
    if reference == optimized:
        assert share(Tied(tied=reference)).state_dict().keys() == Tied().state_dict().keys()
        return
    says = f"'embedding.weight' and 'head.weight' are one tensor in the {one} module and two in the {other}"
    with pytest.raises(PairError, match=says):
        share(Tied(tied=reference))


@pytest.mark.parametrize("ignored", ["running_mean", "running_var", "weight", "bias"])
def test_a_weight_of_one_value_that_is_ignored_is_detected(ignored: str) -> None:
    def optimized(norm: nn.BatchNorm1d, x: torch.Tensor) -> torch.Tensor:
        names = {"running_mean": 0.0, "running_var": 1.0, "weight": 1.0, "bias": 0.0}
        mean, variance, weight, bias = (v if n == ignored else getattr(norm, n) for n, v in names.items())
        return (x - mean) * (torch.as_tensor(variance) + norm.eps).rsqrt() * weight + bias

    pair = Pair(
        name="p",
        reference=lambda norm, x: norm(x),
        optimized=optimized,
        inputs={"norm": module(lambda: nn.BatchNorm1d(3).eval()), "x": tensor(4, 3)},
    )
    with pytest.raises(NotEquivalent, match="output of the optimized side is wrong"):
        equivalence.check_case(pair, Case(dtype="float32", sizes={}, inputs={}, seed=0), "cpu")


def test_drawn_weights_of_a_module_stay_as_they_were_drawn() -> None:
    case = Case(dtype="float32", sizes={}, inputs={}, seed=0)
    pair = Pair(
        name="p",
        reference=lambda m: m.weight,
        optimized=lambda m: m.weight,
        inputs={"m": module(lambda: nn.Linear(3, 2))},
    )
    built = make.build(pair, case, "cpu")["m"]
    with torch.random.fork_rng():
        torch.manual_seed(seed_for(0, "m"))
        assert torch.equal(built.weight, nn.Linear(3, 2).weight)


def test_a_size_is_a_constant() -> None:
    assert modules.specs_of([torch.Size([4])]) == {"x0": ConstantSpec(value=torch.Size([4]))}


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (torch.rand(2, dtype=torch.complex64), "a tensor of complex64, and only real inputs are drawn"),
        (torch.rand(3, 2).max(0), "returns a max: return a list or a plain tuple instead"),
    ],
)
def test_a_template_that_cannot_be_drawn_is_named(template: Any, says: str) -> None:
    with pytest.raises(PairError, match=says):
        modules.specs_of([template])


def drawn_from(templates: Sequence[Any]) -> list[Any]:
    """Return inputs that are drawn from the specs of the templates, each in the layout of its template."""
    pair = Pair(reference=abs, optimized=abs, inputs=modules.specs_of(templates), workloads=[Workload("w")])
    leaves = {name: tensor_spec(spec) for name, spec in pair.inputs.items()}
    layouts = {n: InputCase(layout=leaf.layouts[0]) for n, leaf in leaves.items() if leaf and leaf.layouts}
    case = replace(workload_case(pair.workloads[0], "float32", 3), inputs=layouts)
    return list(make.build(pair, case, "cpu").values())


def test_shapes_dtypes_and_layouts_are_those_of_the_template() -> None:
    templates = [
        torch.rand(3, 4).half(),
        torch.rand(4, 3).t(),
        [torch.rand(2), 7],
        torch.randint(0, 9, (5,)),
        torch.rand(6, 8) > 0.5,
        torch.rand(4, 6)[:, ::2],
    ]
    half, turned, (inner, seven), whole, mask, strided = drawn_from(templates)
    assert (half.shape, half.dtype) == ((3, 4), torch.float16)
    assert half.is_contiguous()
    assert (turned.shape, turned.stride()) == ((3, 4), (1, 3))
    assert strided.shape == (4, 3)
    assert strided.stride(1) > 1
    assert (inner.shape, seven) == ((2,), 7)
    assert (whole.dtype, mask.dtype) == (torch.int64, torch.bool)
    signs = drawn_from([torch.tensor([1.0, -1.0] * 50)])[0]
    assert set(signs.tolist()) == {1.0, -1.0}
