"""A wrong declaration of a pair or a workload raises a one-line error that names the fault and the remedy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from perfsuite import Cost, Pair, Workload, compiled, floats, listof, recorded, scalar, side, size, stateful, tensor
from perfsuite.declare.sides import Side, as_side
from perfsuite.errors import PairError


def identity(*args: Any) -> Any:
    return args[0]


def pair(**fields: Any) -> Pair:
    return Pair(**{"reference": identity, "optimized": identity, "inputs": {"x": tensor("n")}, "name": "p", **fields})


@pytest.mark.parametrize(
    ("declare", "match"),
    [
        (lambda: Workload("w", clock="cpu"), "workload 'w': clock='cpu' is not one of device, wall"),
        (lambda: Workload("w", direction="up"), "direction='up' is not one of forward, backward, both"),
        (lambda: Workload("w", dtype="int8"), "dtype='int8' is not one of float64, float32, bfloat16, float16"),
        (lambda: Workload("w", device="tpu"), "device='tpu' is not one of cpu, cuda"),
        (lambda: Workload("w", speedup=0), "workload 'w': speedup=0 must be a number above 0"),
        (lambda: Workload("w", speedup=float("nan")), "speedup=nan must be a number above 0"),
        (lambda: pair(mutates={"y"}), r"mutates=\{'y'\}: there is no such input; the inputs are x"),
        (lambda: pair(mutates={"y": "written"}), r"mutates=\{'y'\}: there is no such input"),
        (lambda: pair(writes={"y"}), r'writes= is spelled mutates=\{"y": "written"\}'),
        (
            lambda: pair(mutates={"x": "read"}),
            r"""mutates=\{'x': 'read'\}: say "changed", "written" of an output only""",
        ),
        (lambda: pair(inputs={"x-1": tensor("n")}), "input 'x-1' is not a Python name; rename it"),
        (lambda: pair(inputs={"class": tensor("n")}), "input 'class' is not a Python name"),
        (lambda: pair(dtypes=("float31",)), "dtype 'float31' is not one of"),
        (lambda: pair(dtypes=("tf32",)), "dtype 'tf32' is not one of"),
        (lambda: pair(dtypes=()), "dtypes is empty; name at least one precision"),
        (lambda: pair(rivals={"optimized": identity}), "may not be called 'optimized'; choose another name"),
        (lambda: pair(variants={"reference": identity}), "may not be called 'reference'"),
        (lambda: pair(reference=stateful(identity)), r"one side is stateful\(...\) and the other is not; wrap both"),
        (
            lambda: pair(
                reference=stateful(identity),
                optimized=stateful(identity),
                step_inputs={"g": [tensor("n"), scalar(floats(0, 1))]},
            ),
            r"step input 'g' is a scalar, which is drawn once .*; use .* without dimensions, g=tensor\(values=…\)",
        ),
        (lambda: pair(inputs={"x": {"a": tensor("n"), "b": scalar(floats(0, 1))}}), "input 'x' holds a scalar, which"),
        (lambda: pair(inputs={"x": listof("n", scalar(floats(0, 1)))}), "input 'x' holds a scalar, which has no name"),
        (lambda: stateful(identity, settle=0), r"stateful\(settle=0\): name a number of calls, 1 or more"),
        (lambda: stateful(identity, settle=True), r"stateful\(settle=True\)"),
        (lambda: stateful(identity, settle=1.5), r"stateful\(settle=1.5\)"),
        (lambda: pair().validate(), r"pair 'p' has no workload, so that nothing of it is timed; add workloads=\[Work"),
        (
            lambda: pair(workloads=[Workload("w", n=1), Workload("w", n=2)]).validate(),
            "pair 'p' has two workloads called 'w'; rename one",
        ),
        (
            lambda: pair(workloads=[Workload("w")]).validate(),
            "pair 'p', workload 'w': size 'n' has no value; give n=… in the workload",
        ),
        (
            lambda: pair(
                inputs={"x": tensor("n"), "s": scalar(floats(0, 1))}, workloads=[Workload("w", n=1)]
            ).validate(),
            "input 's' has no value",
        ),
        (
            lambda: Workload("w", n=1, launches="0"),  # type: ignore[arg-type]  # wrong on purpose
            "workload 'w': launches='0' must be a whole number, 0 or more",
        ),
        (lambda: Workload("w", n=1, host_syncs=-1), "host_syncs=-1 must be a whole number, 0 or more"),
        (lambda: Workload("w", n=1, speedup=math.inf), "speedup=inf must be a number above 0"),
        (
            lambda: Workload("w", n=1, speedup="5"),  # type: ignore[arg-type]  # wrong on purpose
            "speedup='5' must be a number above 0",
        ),
        (
            lambda: Workload("w", n=1, margin="0.1"),  # type: ignore[arg-type]  # wrong on purpose
            "margin='0.1' must be between 0 and 1",
        ),
        (
            lambda: Workload("w", n=1, repeat=2.5),  # type: ignore[arg-type]  # wrong on purpose
            "repeat=2.5 must be a whole number, 1 or more",
        ),
        (lambda: pair(sizes={"n": (1, 4)}), r"sizes=\{'n': \(1, 4\)\}: write size\(low, high\), as size\(1, 33\)"),
        (
            lambda: pair(sizes={"N": size(1, 4)}).validate(),
            r"sizes=\{'N': …\} is the size of no input; the sizes are n",
        ),
        (lambda: size(17, 20, multiple_of=16), "no multiple of 16 lies in the range"),
        (lambda: pair(workloads=[{"n": 4}]), r"workloads= has \{'n': 4\}; write each as Workload"),
        (lambda: tensor("n", dtype="fp32"), "tensor: dtype='fp32' is not one of float64, float32"),
        (lambda: tensor("n", dtype="int64", values=floats(0, 3)), "holds whole numbers; give values=integers"),
        (lambda: tensor("n", -4), "tensor: a dimension of -4; give 0 or more"),
        (lambda: tensor("n", least=-1), "tensor: least=-1; give 0 or more"),
        (lambda: pair(unsupported={"autocast"}), r"unsupported=\{'autocast'\}: write a dict"),
        (lambda: pair(rivals=[identity]), "rivals=.*: write a dict"),
        (lambda: pair(gradients="no"), "gradients='no': write True or False"),
        (lambda: pair(mutates="x"), r"mutates='x': write a set, mutates=\{'x'\}"),
        (lambda: pair(steps=(0,)), r"steps=\(0,\): give numbers of calls, each 1 or more"),
        (lambda: pair(time_limit=-1), "time_limit=-1: give seconds, above 0"),
        (
            lambda: pair(workloads=[Workload("w", n=-3)]).validate(),
            "workload 'w': n=-3 must be a whole number, 0 or more",
        ),
        (lambda: pair(workloads=[Workload("w", n=64.0)]).validate(), "n=64.0 must be a whole number"),
        (
            lambda: Cost(bytes=4),  # type: ignore[arg-type]  # wrong on purpose
            "cost: bytes=4 must be a function of the sizes",
        ),
        (
            lambda: Cost(precision="fp32"),
            "cost: precision='fp32' is not one of float64, float32, bfloat16, float16, tf32",
        ),
        (
            lambda: pair(workloads=[Workload("w", n=1)], cost=Cost(bytes=lambda m: m)).validate(),
            r"pair 'p': cost=Cost\(bytes=…\) names 'm', which is no size and no scalar of its inputs",
        ),
        (
            lambda: pair(workloads=[Workload("w", n=1, batch=2)]).validate(),
            "pair 'p', workload 'w': no input has a size 'batch'; the sizes are n",
        ),
    ],
)
def test_a_wrong_declaration_raises_a_one_line_error(declare: Callable[[], Any], match: str) -> None:
    with pytest.raises(PairError, match=match) as caught:
        declare()
    assert "\n" not in str(caught.value)


def test_a_complete_pair_is_valid() -> None:
    made = pair(
        inputs={"x": tensor("n"), "s": scalar(floats(0, 1))},
        step_inputs={"g": listof("l", tensor("n", "m"))},
        mutates=["x"],
        workloads=Workload("one", n=4, s=0.5, l=2, m=3, clock="wall", speedup=0.5, host_syncs=0),
    )
    made.validate()
    assert made.mutates == {"x": "changed"}
    assert made.symbols == {"n", "m", "l"}
    assert made.workloads[0].promises.host_syncs == 0
    assert repr(made.workloads[0]) == "Workload('one', n=4, s=0.5, l=2, m=3)"
    assert not made.is_recorded
    assert pair(inputs={"x": recorded("x.pt")}).is_recorded


def test_wrappers_of_a_side_may_be_applied_in_any_order() -> None:
    inner = side(identity, devices=["cuda"], available=lambda: "no")
    for wrapped in (compiled(stateful(inner), mode="max-autotune"), stateful(compiled(inner, mode="max-autotune"))):
        assert wrapped.call is identity
        assert wrapped.devices == ("cuda",)
        assert wrapped.available is inner.available
        assert wrapped.compile == {"mode": "max-autotune"}
        assert wrapped.stateful
        assert wrapped.settle == 1
    assert compiled(stateful(inner, settle=4)).settle == 4
    assert as_side(identity) == Side(call=identity)
    assert as_side(inner) is inner
    assert compiled(identity).compile == {}
    assert pair(reference=stateful(identity), optimized=stateful(identity)).is_stateful


def test_cost_is_given_the_sizes_it_names_and_the_direction() -> None:
    cost = Cost(bytes=lambda n, direction: n * (2 if direction == "both" else 1), flops=lambda n, m: n * m)
    assert cost.of({"n": 3, "m": 5}, "both") == (6.0, 15.0)
    assert cost.of({"n": 3, "m": 5}, "forward") == (3.0, 15.0)
    assert Cost().of({"n": 3}, "forward") == (0.0, 0.0)


def test_a_size_may_have_the_name_of_a_workload_parameter() -> None:
    assert Workload("w", sizes={"repeat": 16}, repeat=5).described == {"repeat": 16, "Workload.repeat": 5}
    assert Workload("w", sizes={"ranks": 2}, ranks=2).described == {"ranks": 2}


def test_a_cost_may_take_all_sizes() -> None:
    assert Cost(bytes=lambda **sizes: 8 * sizes["n"]).of({"n": 3}, "forward") == (24.0, 0.0)
