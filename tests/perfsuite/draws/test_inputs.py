"""Inputs: every case is built as described, reproducibly and within its domain."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import scipy.stats
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from scale import FULLY

from perfsuite import (
    Pair,
    Workload,
    constant,
    floats,
    integers,
    listof,
    module,
    recorded,
    sampled,
    scalar,
    size,
    stateful,
    tensor,
)
from perfsuite.correctness.execution import flatten
from perfsuite.declare.specs import EXPANDED, LAYOUTS, Floats, TensorSpec, tensor_spec
from perfsuite.declare.workload import DTYPES
from perfsuite.draws import inputs as make
from perfsuite.draws import tensor_values
from perfsuite.draws.cases import SMALL_HIGH, case_line, cases, parse_case, workload_case
from perfsuite.draws.tensor_values import DRAW_ON_DEVICE, INTEGER_REGIMES, MILD, UNBOUNDED_REGIMES, dtype_of
from perfsuite.errors import PairError, PerfsuiteError
from perfsuite.records import Case, InputCase

FIXED = settings(
    derandomize=True, deadline=None, database=None, max_examples=100, suppress_health_check=list(HealthCheck)
)
LINEAR = {"weight", "bias"}


def pair(**fields: Any) -> Pair:
    return Pair(**{"reference": abs, "optimized": abs, "inputs": {"x": tensor("m", "n")}, "name": "p", **fields})


def case(inputs: dict[str, InputCase] | None = None, seed: int = 0, dtype: str = "float32", **sizes: Any) -> Case:
    return Case(dtype=dtype, sizes={"m": 5, "n": 7, **sizes}, inputs=inputs or {}, seed=seed)


def built(spec: Any, how: InputCase = InputCase(), **fields: Any) -> Any:  # noqa: B008 - frozen
    return make.build(pair(inputs={"x": spec}), case({"x": how}, **fields), "cpu")["x"]


def draws(of: Pair, dtype: str = "float32", count: int = 100, seed: int = 0) -> list[Case]:
    found: list[Case] = []

    @hypothesis.seed(seed)
    @settings(FIXED, derandomize=False, max_examples=count, phases=[Phase.generate])
    @given(cases(of, dtype))
    def collect(one: Case) -> None:
        found.append(one)

    collect()
    return found


# --- layouts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dims", [("m", "n"), ("n",), (), ("m", "n", 3), (1, 1), (0, "n")], ids=str)
@pytest.mark.parametrize("layout", [x for x in LAYOUTS if x not in EXPANDED])
def test_layout_changes_the_memory_but_not_the_values(layout: str, dims: tuple[Any, ...]) -> None:
    plain = built(tensor(*dims))
    other = built(tensor(*dims), InputCase(layout=layout))
    assert torch.equal(plain, other)
    assert other.dtype == plain.dtype
    if plain.numel() < 2:
        return
    stride = other.stride()
    match layout:
        case "contiguous":
            assert other.is_contiguous()
            assert other.storage_offset() == 0
        case "transposed" if len(dims) > 1:
            assert stride[-2] == 1
            assert stride[-1] == other.shape[-2]
        case "strided" | "transposed":
            assert stride[-1] == 2
            assert not other.is_contiguous()
        case "offset":
            assert other.storage_offset() == 1 + other.numel() % 3
            assert other.is_contiguous()
        case "slice" if len(dims) > 2:
            assert stride == ((other.shape[1] + 1) * other.shape[2], other.shape[2], 1)


@pytest.mark.parametrize("layout", ["strided", "offset", "rows", "slice"])
def test_memory_between_the_elements_is_poisoned(layout: str) -> None:
    for dtype in (torch.float32, torch.int64):
        values = integers(0, 9) if dtype == torch.int64 else floats()
        drawn = built(tensor("m", "n", 3, dtype=str(dtype)[6:], values=values), InputCase(layout=layout))
        whole = drawn.new_empty(0).set_(drawn.untyped_storage())
        assert whole.numel() > drawn.numel()
        poison = whole.isnan() if dtype.is_floating_point else whole == torch.iinfo(dtype).max
        assert int(poison.sum()) == whole.numel() - drawn.numel()


def test_workloads_and_lists_have_the_only_declared_layout() -> None:
    turned = tensor(4, 3, layouts=("transposed",))
    pair = Pair(
        reference=len, optimized=len, inputs={"x": turned, "xs": listof(3, turned)}, workloads=[Workload("w")], name="p"
    )
    built = make.build(pair, workload_case(pair.workloads[0], "float32", 1), "cpu")
    assert [t.stride() for t in (built["x"], *built["xs"])] == 4 * [(1, 4)]


def test_one_tensor_of_a_list_is_contiguous_and_the_others_have_the_layout() -> None:
    for count, plain in ((1, set()), (2, {0}), (3, {2}), (4, {0})):
        drawn = built(listof(count, tensor("n")), InputCase(layout="strided"))
        assert {i for i, one in enumerate(drawn) if one.is_contiguous()} == plain


@pytest.mark.parametrize(("low", "high"), [(0.3, None), (None, -0.1)])
def test_values_with_one_bound_may_be_far_from_it(low: float | None, high: float | None) -> None:
    for regime in ("huge", "mixed"):
        drawn = built(tensor("m", "n", values=floats(low, high)), InputCase(regime=regime))
        assert bool((drawn >= low).all()) if low is not None else bool((drawn <= high).all())
        assert float(drawn.abs().max()) > 1e4
        assert drawn.isfinite().all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_layout_does_not_depend_on_the_seed(layout: str) -> None:
    shapes = [("m", "n", 3), ("m", "n"), ("m",), ("m", 1, "n", 2)]
    for dims in shapes:
        assert len({built(tensor(*dims), InputCase(layout=layout), seed=seed).stride() for seed in range(9)}) == 1


def test_inner_and_middle_dimensions_are_expanded() -> None:
    assert built(tensor("m", "n", 3), InputCase(layout="inner expanded")).stride() == (7, 1, 0)
    assert built(tensor("m", "n", 1), InputCase(layout="inner expanded")).stride()[:2] == (1, 0)
    assert built(tensor("m", "n", 3), InputCase(layout="middle expanded")).stride() == (3, 0, 1)
    assert built(tensor("m", 1, "n", 2), InputCase(layout="middle expanded")).stride()[2:] == (0, 1)
    bounds = integers(0, (2, 5, 9))
    assert built(tensor("m", 3, dtype="int64", values=bounds), InputCase(layout="inner expanded")).stride() == (0, 1)


def test_expanded_input_repeats_one_row_of_memory() -> None:
    x = built(tensor("m", "n"), InputCase(layout="expanded"))
    assert x.shape == (5, 7)
    assert x.stride() == (0, 1)
    assert (x == x[0]).all()
    assert built(tensor(), InputCase(layout="expanded")).shape == ()
    assert built(tensor(1, "n"), InputCase(layout="expanded")).is_contiguous()


def test_adjust_changes_the_drawn_inputs() -> None:
    def positive(x: torch.Tensor, y: torch.Tensor) -> None:
        assert not torch.is_grad_enabled()
        x.abs_()

    inputs = {"x": tensor("m", "n"), "y": tensor("n")}
    adjusted, plain = pair(inputs=inputs, adjust=positive), pair(inputs=inputs)
    for seed in range(3):
        drawn, before = (make.build(of, case(seed=seed), "cpu") for of in (adjusted, plain))
        assert (before["x"] < 0).any()
        assert torch.equal(drawn["x"], before["x"].abs())
        assert torch.equal(drawn["y"], before["y"])
    # Expanded tensors cannot be written in place.
    layouts = {one.inputs.get("x", InputCase()).layout for one in draws(adjusted, count=200)}
    assert layouts == set(LAYOUTS) - set(EXPANDED)


def test_small_inputs_are_adjusted_on_the_cpu() -> None:
    def positive(x: torch.Tensor, net: torch.nn.Module, others: list[torch.Tensor]) -> None:
        for each in (x, *net.parameters(), *others):
            each.abs_()

    def net(m: int) -> torch.nn.Module:
        return torch.nn.Linear(m, 3)

    inputs = {"x": tensor("m", "n"), "net": module(net), "others": listof(2, tensor("n"))}
    adjusted, plain = pair(inputs=inputs, adjust=positive), pair(inputs=inputs)
    directly, values = (make.build(of, case(), "cpu") for of in (adjusted, plain))
    values["x"] = values["x"].t().contiguous().t()
    kept = dict(make.tensors_in(values))
    with torch.no_grad():
        assert make._adjusted_on_cpu(adjusted, values)
    assert all(t is kept[path] for path, t in make.tensors_in(values))
    both = zip(make.tensors_in(values), make.tensors_in(directly), strict=True)
    assert all(torch.equal(a, b) for (_, a), (_, b) in both)


def test_large_inputs_or_failures_on_the_cpu_are_adjusted_on_the_device() -> None:
    def refused(x: torch.Tensor) -> None:
        x.zero_()
        raise RuntimeError("CUDA alone")

    of = pair(inputs={"x": tensor("m", "n")}, adjust=refused)
    values = {"x": torch.ones(3, 3)}
    assert not make._adjusted_on_cpu(of, values)
    assert not make._adjusted_on_cpu(of, {"x": torch.ones(make.ADJUSTED_ON_CPU + 1)})
    assert (values["x"] == 1).all()


def test_layouts_can_be_restricted_and_written_inputs_are_never_expanded() -> None:
    of = pair(
        inputs={"x": tensor("m"), "y": tensor("m", layouts=["offset"]), "z": tensor("m", layouts=EXPANDED)},
        mutates={"x": "changed", "z": "written"},
    )
    seen: dict[str, set[str]] = {"x": set(), "y": set(), "z": set()}
    for one in draws(of, count=200):
        for name, layouts in seen.items():
            layouts.add(one.inputs.get(name, InputCase()).layout)
    assert seen == {"x": set(LAYOUTS) - set(EXPANDED), "y": {"offset"}, "z": {"contiguous"}}


# --- values --------------------------------------------------------------------------------------------------

SPECS = {
    "unbounded": floats(),
    "finite": floats(nonfinite=False),
    "both": floats(-4, 4),
    "tenths": floats(0.1, 0.7),
    "from below": floats(0.3),
    "from above": floats(None, -0.1),
    "positive": floats(1e-3, 1e6),
    "one value": floats(2.5, 2.5),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SPECS)
def test_every_regime_stays_in_its_domain_and_dtype(name: str, dtype: str) -> None:
    values = SPECS[name]
    spec = tensor("m", "n", values=values)
    for regime in tensor_values.regimes(spec):
        for seed in range(5):
            x = built(spec, InputCase(regime=regime), dtype=dtype, seed=seed)
            assert x.dtype == dtype_of(dtype)
            assert x.shape == (5, 7)
            if regime == "nonfinite":
                continue
            assert x.isfinite().all(), regime
            if values.low is not None:
                assert (x.double() >= values.low).all(), regime
            if values.high is not None:
                assert (x.double() <= values.high).all(), regime
            beside = make.jitter(pair(inputs={"x": spec}), {"x": x}, seed, "a", torch.finfo(x.dtype).eps)["x"]
            assert beside.dtype == x.dtype
            if values.low is not None:
                assert (beside.double() >= values.low).all(), regime
            if values.high is not None:
                assert (beside.double() <= values.high).all(), regime


def test_bounds_are_clipped_to_the_range_of_the_dtype() -> None:
    x = built(tensor("m", "n", values=floats(-1e6, 1e6)), InputCase(regime="edges"), dtype="float16")
    assert x.isfinite().all()
    assert float(x.abs().max()) == torch.finfo(torch.float16).max


def test_regimes_have_their_described_values() -> None:
    def of(regime: str, dtype: str = "float32") -> torch.Tensor:
        x: torch.Tensor = built(tensor(40, 50), InputCase(regime=regime), dtype=dtype)
        return x

    info = torch.finfo(torch.float32)
    assert (of("sorted").diff(dim=-1) >= 0).all()
    assert of("repeated").unique().numel() <= 50
    assert not of("zeros").any()
    assert 0 < float(of("tiny").abs().max()) < 1e-8
    assert float(of("huge").abs().max()) > 1e9
    for dtype in ("float16", "bfloat16", "float32"):
        assert 256 < float(of("large", dtype).abs().mean()) < 600
    assert (of("huge", "float16") @ of("huge", "float16").T).isfinite().all()
    assert (of("huge") @ of("huge").T).isfinite().all()
    assert 0 < float(of("denormal").abs().max()) < info.tiny
    spread = of("mixed").abs().log10()
    assert float(spread.max() - spread[spread > -30].min()) > 8
    nonfinite = of("nonfinite")
    for kind in (nonfinite.isnan(), nonfinite.isposinf(), nonfinite.isneginf(), nonfinite.isfinite()):
        assert kind.any()
    edges = built(tensor(40, 50, values=floats(-4, 3)), InputCase(regime="edges"))
    assert set(edges.unique().tolist()) == {-4.0, 0.0, 3.0}
    assert (built(tensor(40, values=floats(1, 2)), InputCase(regime="tiny")) == 1).all()


@pytest.mark.parametrize("shape", [(40, 50), (5, 2, 3), (2050, 8), (8, 2050)])
def test_nonfinite_values_of_each_kind_have_rows_of_their_own(shape: tuple[int, ...]) -> None:
    along = set()
    for seed in range(8):
        x = built(tensor(*shape), InputCase(regime="nonfinite"), seed=seed)
        for dim in (0, -1):
            rows = x.movedim(dim, -1).flatten(0, -2)
            infinite = rows.isposinf().any(-1) & ~rows.isnan().any(-1) & ~rows.isneginf().any(-1)
            if infinite.any() and rows.isneginf().all(-1).any() and rows.isnan().any(-1).any():
                along.add(dim)
    assert along == {0, -1}


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (0, 3)])
def test_nonfinite_values_may_have_no_rows(shape: tuple[int, ...]) -> None:
    x = built(tensor(*shape), InputCase(regime="nonfinite"))
    assert x.shape == shape
    assert not x.isfinite().any()


@pytest.mark.parametrize("dtype", ["int64", "int32", "uint8", "float32"])
@pytest.mark.parametrize("regime", INTEGER_REGIMES)
def test_integers_respect_bounds_by_name_and_by_column(regime: str, dtype: str) -> None:
    spec = tensor("P", 3, dtype=dtype, values=integers("low", ["n", "n", "k"]))
    for seed in range(5):
        x = built(spec, InputCase(regime=regime), P=40, low=2, k=4, seed=seed)
        assert x.dtype == getattr(torch, dtype)
        assert (x >= 2).all()
        assert (x < torch.tensor([7, 7, 4])).all()


def test_one_tensor_of_a_list_may_have_bounds() -> None:
    bounded, free = built([tensor(40, values=floats(-4, 3)), tensor(40)], InputCase(regime="edges"))
    assert set(bounded.unique().tolist()) == {-4.0, 0.0, 3.0}
    assert len(free.unique()) == 40


def test_integers_reach_their_bounds() -> None:
    x = built(tensor(500, dtype="int64", values=integers(-3, 3)))
    assert set(x.tolist()) == {-3, -2, -1, 0, 1, 2}
    assert set(built(tensor(500, dtype="bool")).tolist()) == {False, True}
    assert built(tensor(4, dtype="int64", values=integers(5, "m")), m=5).tolist() == [5] * 4  # an empty range


@pytest.mark.parametrize("regime", ["normal", "edges", "repeated", "sorted", "outside"])
def test_integer_without_dimensions_has_an_empty_shape(regime: str) -> None:
    x = built(tensor(dtype="int64", values=integers(0, 5, outside=True)), InputCase(regime=regime))
    assert x.shape == ()
    assert built(tensor(dtype="int64", values=integers(4, 5))).tolist() == 4


@pytest.mark.parametrize("dtype", ["int64", "int32"])
def test_outside_regime_has_values_beyond_the_bounds(dtype: str) -> None:
    spec = tensor(300, dtype=dtype, values=integers(0, "n", outside=True))
    assert "outside" in tensor_values.regimes(spec)
    assert "outside" not in tensor_values.regimes(tensor(3, dtype=dtype, values=integers(0, "n")))
    x = built(spec, InputCase(regime="outside"))
    off = (x < 0) | (x >= 7)
    assert 60 < int(off.sum()) < 180
    assert 7 in x.tolist()
    assert -1 in x.tolist()


def test_sampled_values_come_from_the_function() -> None:
    def make_ramp(generator: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.arange(math.prod(shape)).reshape(shape) + torch.randint(0, 2, (), generator=generator)

    spec = tensor("m", "n", values=sampled(make_ramp))
    assert tensor_values.regimes(spec) == ("normal",)
    assert built(spec).dtype == torch.float32
    assert {float(built(spec, seed=s)[0, 0]) for s in range(20)} == {0.0, 1.0}


# --- seeds ---------------------------------------------------------------------------------------------------


def test_values_depend_on_the_seed_and_the_name_of_the_input() -> None:
    of = pair(inputs={"x": tensor("n"), "y": tensor("n"), "z": listof(2, tensor("n"))})
    first, again, other = (make.build(of, case(seed=s), "cpu") for s in (1, 1, 2))
    leaves = [t for _, t in make.tensors_in(first)]
    for a, b in zip(leaves, [t for _, t in make.tensors_in(again)], strict=True):
        assert torch.equal(a, b)
        assert a.data_ptr() != b.data_ptr()
    for t in make.tensors_in(other):
        assert all(not torch.equal(t[1], a) for a in leaves)
    assert len({tuple(t.tolist()) for t in leaves}) == 4


@FIXED
@given(st.integers(0, 2**31 - 1), st.integers(0, 2**31 - 1))
def test_different_seeds_differ(a: int, b: int) -> None:
    hypothesis.assume(a != b)
    assert not torch.equal(built(tensor(16), seed=a), built(tensor(16), seed=b))


@pytest.mark.parametrize("elements", [DRAW_ON_DEVICE, DRAW_ON_DEVICE + 1])
def test_inputs_on_both_sides_of_the_limit_repeat_by_seed_and_are_standard_normal(elements: int) -> None:
    """Up to the limit, values are drawn in float64 on the CPU; beyond it in float32 on the device."""
    x = built(tensor(elements), seed=3)
    assert torch.equal(x, built(tensor(elements), seed=3))
    assert not torch.equal(x, built(tensor(elements), seed=4))
    assert scipy.stats.kstest(x.numpy(), "norm").statistic < 0.01


def test_step_inputs_differ_by_step_and_repeat_by_case() -> None:
    of = pair(
        reference=stateful(abs), optimized=stateful(abs), step_inputs={"g": tensor("n"), "x2": listof(2, tensor("n"))}
    )
    first, second = (make.build_step(of, case(), "cpu", i) for i in (1, 2))
    assert not torch.equal(first["g"], second["g"])
    assert torch.equal(first["g"], make.build_step(of, case(), "cpu", 1)["g"])
    assert not torch.equal(first["g"], make.build_step(of, case(seed=1), "cpu", 1)["g"])
    how = case({"g": InputCase(layout="strided", regime="zeros")})
    assert make.build_step(of, how, "cpu", 1)["g"].stride() == (2,)


# --- other specs ---------------------------------------------------------------------------------------------


def test_nested_specs_lists_scalars_and_constants_are_built() -> None:
    of = pair(
        inputs={
            "nest": {"a": tensor("n"), "b": [tensor("m"), (tensor("m", "n"), constant("flag"))]},
            "many": listof("count", tensor("n")),
            "rate": scalar(floats(0, 1)),
            "k": scalar(integers(1, "n")),
            "none": constant(None),
        }
    )
    values = make.build(of, case({"nest": InputCase(layout="strided")}, count=3, rate=0.25, k=4), "cpu")
    assert values["nest"]["a"].stride() == (2,)
    assert values["nest"]["b"][0].stride() == (2,)
    assert isinstance(values["nest"]["b"][1], tuple)
    assert values["nest"]["b"][1][1] == "flag"
    assert len(values["many"]) == 3
    assert (values["rate"], values["k"], values["none"]) == (0.25, 4, None)
    for one in draws(of):
        assert 0 <= one.sizes["rate"] <= 1
        assert isinstance(one.sizes["k"], int)
        assert 1 <= one.sizes["k"] < max(2, one.sizes["n"])
    assert [path for path, _ in make.tensors_in(values)] == [
        "['nest']['a']",
        "['nest']['b'][0]",
        "['nest']['b'][1][0]",
        "['many'][0]",
        "['many'][1]",
        "['many'][2]",
    ]


def test_module_is_seeded_by_the_case_and_gets_the_sizes_it_names() -> None:
    def linear(n: int, width: int) -> torch.nn.Module:
        return torch.nn.Linear(n, width)

    of = pair(inputs={"x": tensor("m", "n"), "net": module(linear)})
    assert of.symbols == {"m", "n", "width"}
    torch.manual_seed(0)
    state = torch.random.get_rng_state()
    net, again, other = (make.build(of, case(width=3, seed=s, dtype="bfloat16"), "cpu")["net"] for s in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert net.weight.dtype == torch.bfloat16
    assert net.weight.shape == (3, 7)
    assert torch.equal(net.weight, again.weight)
    assert not torch.equal(net.weight, other.weight)
    clone = make.clone(net)
    assert clone is not net
    assert clone.weight.data_ptr() != net.weight.data_ptr()
    assert make.upcast(net).weight.dtype == torch.float64
    assert {path for path, _ in make.tensors_in(net, "net")} == {f"net.{name}" for name in LINEAR}


class Tied(torch.nn.Module):
    """A module with two names for one buffer and for one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.BatchNorm1d(3), torch.nn.BatchNorm1d(3)
        self.second.running_mean, self.second.weight = self.first.running_mean, self.first.weight


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_buffers_and_parameters_with_two_names_stay_one_tensor(dtype: str) -> None:
    net = make.build(pair(inputs={"net": module(Tied)}), case(dtype=dtype), "cpu")["net"]
    assert net.first.running_mean.dtype == net.first.weight.dtype == getattr(torch, dtype)
    assert net.second.running_mean is net.first.running_mean
    assert net.second.weight is net.first.weight
    assert net.second.running_var is not net.first.running_var


def test_recorded_inputs_are_loaded_and_cast(tmp_path: Path) -> None:
    torch.save({"x": torch.ones(3, dtype=torch.float64), "i": torch.ones(3, dtype=torch.int64)}, tmp_path / "run.pt")
    value = make.build(pair(inputs={"x": recorded("run.pt")}), case(), "cpu", home=tmp_path)["x"]
    assert value["x"].dtype == torch.float32
    assert value["i"].dtype == torch.int64
    with pytest.raises(PairError, match=r"recorded\('gone.pt'\): no such file .*gone.pt; record it again with torch.s"):
        make.build(pair(inputs={"x": recorded("gone.pt")}), case(), "cpu", home=tmp_path)


def test_value_that_is_no_spec_is_an_error() -> None:
    with pytest.raises(PairError, match=r"input 'x': 5 is not a spec; use tensor\(\)"):
        make.build(pair(inputs={"x": 5}), case(), "cpu")
    with pytest.raises(PairError, match="dtype='float31' is not one of float64"):
        built(tensor("n", dtype="float31"))


# --- drawing -------------------------------------------------------------------------------------------------


def test_drawn_sizes_satisfy_their_constraints() -> None:
    of = pair(
        sizes={"m": size(4, 40, multiple_of=4), "n": size(1, 9)},
        where=lambda m, n: m > n,
        inputs={"x": tensor("m", "n")},
    )
    found = draws(of, count=200)
    assert found
    for one in found:
        assert one.sizes["m"] % 4 == 0
        assert 4 <= one.sizes["m"] <= 40
        assert 1 <= one.sizes["n"] <= 9
        assert one.sizes["m"] > one.sizes["n"]
    assert {1, 9} <= {one.sizes["n"] for one in found}
    assert {40} <= {one.sizes["m"] for one in found}
    conditioned = pair(where=lambda n: n % 2 == 0)
    assert all(one.sizes["n"] % 2 == 0 for one in draws(conditioned))


@pytest.mark.parametrize("seed", range(4))
def test_50_draws_include_sizes_0_1_17_and_a_large_one(seed: int) -> None:
    sizes = {one.sizes["n"] for one in draws(pair(inputs={"x": tensor("n")}), count=50, seed=seed)}
    assert {0, 1, 17} <= sizes
    assert max(sizes) > SMALL_HIGH


def test_draws_cover_layouts_and_regimes_and_at_most_one_size_is_large() -> None:
    of = pair(inputs={"x": tensor("m", "n", "k"), "y": tensor("n", "k")})
    found = draws(of, count=400)
    seen = {(how.layout, how.regime) for one in found for how in one.inputs.values()}
    assert {layout for layout, _ in seen} == set(LAYOUTS)
    assert {regime for _, regime in seen} == set(UNBOUNDED_REGIMES)
    assert all(regime in MILD for layout, regime in seen if layout in EXPANDED)
    assert any(not one.inputs for one in found)
    assert any(len(one.inputs) == 2 for one in found)
    assert all(sum(v > SMALL_HIGH for v in one.sizes.values()) <= 1 for one in found)


@FULLY
def test_a_failing_draw_shrinks_to_a_small_case() -> None:
    of = pair(inputs={"x": tensor("m", "n"), "y": tensor("n")})

    @settings(FIXED, max_examples=200)
    @given(cases(of, "float32"))
    def fails(one: Case) -> None:
        if one.sizes["n"] >= 3 and one.inputs.get("y", InputCase()).regime == "huge":
            raise AssertionError(case_line(one))

    with pytest.raises(AssertionError) as caught:
        fails()
    found = parse_case(str(caught.value).splitlines()[0], "float32")
    assert found.sizes == {"m": 0, "n": 3}
    assert found.inputs == {"y": InputCase(regime="huge")}
    assert found.seed == 0


def test_bool_scalar_is_drawn_and_parsed() -> None:
    of = pair(inputs={"x": tensor("n"), "flag": scalar([True, False])})
    found = draws(of, count=40)
    assert {one.sizes["flag"] for one in found} == {True, False}
    for one in found:
        again = parse_case(case_line(one), "float32")
        assert again == one
        assert type(again.sizes["flag"]) is bool


def test_case_of_a_workload_has_default_inputs() -> None:
    workload = Workload("w", m=64, n=3, dtype="bfloat16")
    assert workload_case(workload, "float32", 9) == Case(dtype="bfloat16", sizes={"m": 64, "n": 3}, inputs={}, seed=9)
    assert workload_case(Workload("w", m=1, n=1), "float32", 9).dtype == "float32"


# --- one line that reproduces --------------------------------------------------------------------------------

NAMES = st.sampled_from(["a", "seed", "theta", "x_1", "inputs", "é"])
NUMBERS = st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
HOW = st.builds(InputCase, layout=st.sampled_from(LAYOUTS), regime=st.sampled_from(UNBOUNDED_REGIMES))


@FIXED
@given(
    st.dictionaries(NAMES.filter(lambda n: n != "seed"), NUMBERS),
    st.dictionaries(NAMES, HOW),
    st.integers(0, 2**31 - 1),
    st.none() | st.integers(1, 300),
)
def test_case_is_parsed_back_from_its_line(
    sizes: dict[str, Any], inputs: dict[str, InputCase], seed: int, steps: int | None
) -> None:
    whole = Case(dtype="float32", sizes=sizes, inputs=inputs, seed=seed, steps=steps)
    line = case_line(whole)
    assert "\n" not in line
    assert parse_case(line, "float32") == whole


@pytest.mark.parametrize("of", [pair(), pair(inputs={"s": scalar(floats(-1, 1)), "x": tensor("n")})])
def test_drawn_case_is_parsed_back_from_its_line(of: Pair) -> None:
    for one in draws(of):
        assert parse_case(case_line(one), "float32") == one


@pytest.mark.parametrize("line", ["n=x", "seed=1.5", "n=3;seed=", "nonsense", "n", "x steps"])
def test_line_that_is_no_case_is_refused(line: str) -> None:
    with pytest.raises(PerfsuiteError, match="is not a case; copy the whole line that a failure printed"):
        parse_case(line, "float32")


# --- copies --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_clone_keeps_strides_and_offset_in_fresh_memory(layout: str) -> None:
    x = built(tensor("m", "n"), InputCase(layout=layout))
    clone = make.clone({"x": x})["x"]
    assert torch.equal(clone, x)
    assert clone.stride() == x.stride()
    assert clone.storage_offset() == x.storage_offset()
    assert clone.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
    if layout not in EXPANDED:
        clone += 1
        assert not torch.equal(clone, x)
    wide = make.upcast({"x": x})["x"]
    assert wide.dtype == torch.float64
    assert torch.equal(wide.float(), x)


def test_upcast_keeps_integers_and_always_copies() -> None:
    value = {"i": torch.arange(3), "d": torch.ones(3, dtype=torch.float64), "s": "text", "n": None}
    wide = make.upcast(value)
    assert wide["i"].dtype == torch.int64
    assert wide["s"] == "text"
    for key in ("i", "d"):
        wide[key] += 1
        assert not torch.equal(wide[key], value[key])


def test_jitter_moves_values_by_an_ulp_and_differs_by_name() -> None:
    of = pair(
        inputs={"x": tensor("n"), "i": tensor("n", dtype="int64", values=integers()), "l": listof(2, tensor("n"))}
    )
    values = make.build(of, case(n=500), "cpu")
    eps = torch.finfo(torch.float32).eps
    one, again, other = (make.jitter(of, values, 0, name, eps) for name in ("a", "a", "b"))
    assert torch.equal(one["x"], again["x"])
    assert not torch.equal(one["x"], other["x"])
    assert torch.equal(one["i"], values["i"])
    moved = ((one["x"].double() - values["x"].double()) / values["x"].double()).abs()
    assert 0 < float(moved.max()) <= 1.5 * eps
    assert not torch.equal(one["l"][0] / values["l"][0], one["l"][1] / values["l"][1])
    special = {"x": torch.tensor([0.0, math.inf, -math.inf, math.nan]), "i": values["i"], "l": []}
    assert torch.equal(make.jitter(of, special, 0, "a", eps)["x"].nan_to_num(5), special["x"].nan_to_num(5))


def test_complex_inputs_are_upcast_and_moved_in_both_parts() -> None:
    x = torch.randn(4, 5, dtype=torch.complex64, generator=torch.Generator().manual_seed(0)).t()
    wide = make.upcast({"x": x})["x"]
    assert wide.dtype == torch.complex128
    assert torch.equal(wide.to(x.dtype), x)
    moved = make.jitter(pair(inputs={"x": tensor("n", "m")}), {"x": x}, 0, "a", 2.0**-20)["x"]
    assert moved.stride() == x.stride()
    for part, before in ((moved.real, x.real), (moved.imag, x.imag)):
        change = (part / before - 1).abs().max()
        assert 2.0**-23 < float(change) < 2.0**-19


def test_jitter_moves_subnormals_as_much_as_the_smallest_normal_number() -> None:
    of, tiny = pair(inputs={"x": tensor("n")}), torch.finfo(torch.float32).tiny
    x = torch.cat([torch.full((500,), tiny / 16), torch.zeros(4)])
    moved = (make.jitter(of, {"x": x}, 0, "a", 2.0**-10)["x"] - x).double() / tiny
    assert 2.0**-11 < float(moved.abs().max()) <= 2.0**-10
    assert not moved[500:].any()


def test_leaf_spec_is_found_in_nests() -> None:
    leaf = tensor("n", values=floats(0, 1))
    assert isinstance(leaf, TensorSpec)
    assert isinstance(leaf.values, Floats)
    for nest in (leaf, [leaf], {"a": (constant(1), leaf)}, listof(2, leaf)):
        assert tensor_spec(nest) == leaf
    assert tensor_spec(constant(1)) is None
    assert dict(flatten({"a": [1, None]})) == {"output['a'][0]": 1, "output['a'][1]": None}


@pytest.mark.parametrize(
    ("make_values", "found"),
    [
        (lambda generator, shape, dtype: torch.zeros(2, *shape, dtype=dtype), "shape (2, 4)"),
        (lambda generator, shape, dtype: [0.0] * 4, "a list"),
    ],
)
def test_sampled_function_that_returns_another_shape_is_an_error(make_values: Any, found: str) -> None:
    of = pair(inputs={"x": tensor("n", values=sampled(make_values))})
    with pytest.raises(PairError, match=re.escape(f"input 'x': the function in values=sampled(…) gives {found}")):
        make.build(of, case(n=4), "cpu")


def test_sampled_function_that_returns_a_sparse_tensor_is_an_error() -> None:
    of = pair(inputs={"x": tensor("n", values=sampled(lambda generator, shape, dtype: torch.ones(shape).to_sparse()))})
    with pytest.raises(PairError, match=r"gives a tensor of the layout torch\.sparse_coo, and only dense inputs are"):
        make.build(of, Case(dtype="float32", sizes={"n": 4}, inputs={}, seed=0), "cpu")
