import math

import pytest
import torch

from optimized.geometry.rotor_update import rotor_update as optimized
from optimized.geometry.rotor_update import rotor_update_triton, rotor_update_vectorised
from optimized.kernels import triton_reason
from perfsuite import Cost, Pair, Workload, compiled, floats, integers, side, tensor
from reference.geometry.rotor_update import rotor_update as reference

rotor_update = Pair(
    reference=reference,
    optimized=optimized,
    inputs={
        "theta": tensor("k", values=floats(-4, 4), period=2 * math.pi),
        "velocity": tensor("n"),
        "index": tensor("P", 3, dtype="int64", values=integers(0, ["n", "n", "k"], outside=True)),
        "loss_delta": tensor(),
    },
    mutates={"theta"},
    gradients=False,
    rivals={"compile": compiled(side(rotor_update_vectorised, devices=("cuda",)))},
    variants={
        "triton": side(rotor_update_triton, available=triton_reason),
        "vectorised": rotor_update_vectorised,
    },
    workloads=[
        Workload("window64", k=6, n=8, P=8, clock="wall", device="cuda", speedup=20.0, host_syncs=0, launches=1),
        Workload("cpu", k=6, n=8, P=8, clock="wall", device="cpu"),
    ],
    cost=Cost(bytes=lambda k, n, P: 8 * k + 4 * n + 24 * P),
)

SIDES = [reference, optimized, rotor_update_vectorised]
if triton_reason() is None and not torch.cuda.is_available():
    SIDES.append(rotor_update_triton)


def update(call, theta, velocity, index, loss_delta=-1.0):
    """Return the angles after one update with eta = 10: a pair turns by 0.1 * (-loss_delta) * angle * length."""
    theta = torch.tensor(theta)
    index = torch.tensor(index, dtype=torch.int64).reshape(-1, 3)
    returned = call(theta, torch.tensor(velocity), index, torch.tensor(loss_delta))
    assert returned is theta
    return theta.tolist()


@pytest.mark.parametrize("call", SIDES)
def test_known_values(call):
    turned = update(call, [0.0, 1.0], [0.0, 2.0], [[0, 1, 0], [1, 0, 1]])
    assert turned == pytest.approx([0.1 * math.pi / 2 * 2, 1.0], abs=1e-6)


@pytest.mark.parametrize("call", SIDES)
def test_repeated_slots_accumulate(call):
    turned = update(call, [0.5], [0.0, 1.0], [[0, 1, 0]] * 3)
    assert turned == pytest.approx([0.5 + 3 * 0.1 * math.pi / 2], abs=1e-6)


@pytest.mark.parametrize("call", SIDES)
@pytest.mark.parametrize(
    ("velocity", "row"),
    [
        ([0.0, 9e-7], [0, 1, 0]),
        ([math.nan, 1.0], [0, 1, 0]),
        ([1.0, math.inf], [0, 1, 0]),
        ([-math.inf, 1.0], [0, 1, 0]),
        ([3e38, 3e38], [0, 1, 0]),  # the length overflows
        ([0.0, 1.0], [0, 2, 0]),
        ([0.0, 1.0], [-1, 1, 0]),
        ([0.0, 1.0], [0, 1, 1]),
        ([0.0, 1.0], [0, 1, -(2**40)]),
    ],
)
def test_skipped_rows_leave_the_angle_unchanged(call, velocity, row):
    assert update(call, [0.25], velocity, [row]) == [0.25]


@pytest.mark.parametrize("call", SIDES)
def test_row_just_above_the_minimum_length_turns_the_angle(call):
    least = torch.nextafter(torch.tensor(1e-6), torch.tensor(1.0)).item()
    assert update(call, [0.0], [0.0, least], [[0, 1, 0]]) == pytest.approx([0.1 * math.pi / 2 * least], rel=1e-5)


@pytest.mark.parametrize("call", SIDES)
def test_float32_row_just_below_the_minimum_length_is_skipped(call):
    assert update(call, [0.25], [0.0, 1e-6], [[0, 1, 0]]) == [0.25]


@pytest.mark.parametrize("call", [reference, optimized, rotor_update_vectorised])
def test_row_of_exactly_the_minimum_length_turns_the_angle(call):
    # In float64 a length can equal the limit exactly.
    theta, velocity = torch.zeros(1, dtype=torch.float64), torch.tensor([0.0, 1e-6], dtype=torch.float64)
    call(theta, velocity, torch.tensor([[0, 1, 0]]), torch.tensor(-1.0, dtype=torch.float64))
    assert theta.item() == pytest.approx(0.1 * math.pi / 2 * 1e-6, rel=1e-9)


@pytest.mark.parametrize("call", SIDES)
@pytest.mark.parametrize("row", [[2, 1, 0], [1, 2, 0], [-1, 1, 0], [1, -1, 0], [0, 1, 1], [0, 1, -1]])
def test_an_index_one_beyond_an_end_reads_and_writes_nothing(call, row):
    # A read beyond an end, or at the end instead, would change the angle: the tensors are windows of longer ones, and
    # any two of the components have an angle.
    whole_theta, whole_velocity = torch.tensor([9.0, 0.25, 9.0]), torch.tensor([5.0, 2.0, 1.0, 5.0])
    call(whole_theta[1:2], whole_velocity[1:3], torch.tensor([row]), torch.tensor(-1.0))
    assert whole_theta.tolist() == [9.0, 0.25, 9.0]


@pytest.mark.parametrize("call", SIDES)
@pytest.mark.parametrize("delta", [math.nan, math.inf, -math.inf])
def test_nonfinite_loss_delta_changes_nothing(call, delta):
    assert update(call, [0.25], [0.0, 1.0], [[0, 1, 0]], delta) == [0.25]


@pytest.mark.parametrize("call", SIDES)
def test_angles_are_wrapped_to_the_half_open_interval(call):
    pi = float(torch.tensor(math.pi))
    wrapped = update(call, [pi, -pi, 4.0, -4.0, 3.0], [1.0], [])
    assert all(-pi <= angle < pi for angle in wrapped)
    assert wrapped == pytest.approx([-pi, -pi, 4 - 2 * math.pi, 2 * math.pi - 4, 3.0], abs=1e-6)
    assert wrapped[4] == 3.0


@pytest.mark.parametrize("call", SIDES)
def test_angles_near_odd_multiples_of_pi_are_wrapped_into_the_interval(call):
    odd = (torch.arange(-201, 202, 2) * math.pi).float()
    up, down = odd, odd
    angles = [odd]
    for _ in range(3):
        up, down = (torch.nextafter(a, torch.full_like(odd, end)) for a, end in ((up, math.inf), (down, -math.inf)))
        angles += [up, down]
    wrapped = torch.tensor(update(call, torch.cat(angles).tolist(), [1.0], []))
    pi = torch.tensor(math.pi)
    assert ((wrapped >= -pi) & (wrapped < pi)).all()


@pytest.mark.parametrize("call", [reference, optimized, rotor_update_vectorised])
def test_every_float16_angle_is_wrapped_into_the_interval(call):
    # These include the few angles that round to an end of the interval, and large angles.
    every = torch.arange(2**16).to(torch.int32).to(torch.int16).view(torch.float16)
    theta = every[every.isfinite()]
    one = torch.ones((), dtype=torch.float16)
    wrapped = call(theta, one.reshape(1), torch.empty(0, 3, dtype=torch.int64), one)
    pi = torch.tensor(math.pi, dtype=torch.float16)
    assert ((wrapped >= -pi) & (wrapped < pi)).all()


@pytest.mark.parametrize("call", SIDES)
def test_sign_of_zero_determines_the_angle(call):
    assert update(call, [0.0], [-1.0, -0.0], [[0, 1, 0]]) == pytest.approx([-0.1 * math.pi], abs=1e-6)
    assert update(call, [0.0], [-1.0, 0.0], [[0, 1, 0]]) == pytest.approx([0.1 * math.pi], abs=1e-6)


@pytest.mark.parametrize("call", [reference, optimized, rotor_update_vectorised])
@pytest.mark.parametrize(
    "dtypes", [(torch.float32, torch.float64), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)]
)
def test_velocity_may_have_another_dtype_than_theta(call, dtypes):
    of_theta, of_velocity = dtypes
    theta = torch.zeros(1, dtype=of_theta)
    found = call(theta, torch.tensor([0.0, 2.0], dtype=of_velocity), torch.tensor([[0, 1, 0]]), torch.tensor(-1.0))
    torch.testing.assert_close(found.double(), torch.tensor([0.1 * math.pi]).double(), rtol=2**-7, atol=0.0)


def test_many_slots_and_pairs_match_the_reference():
    generator = torch.Generator().manual_seed(0)
    slots, pairs = 5000, 4000
    theta = torch.rand(slots, generator=generator, dtype=torch.float64)
    velocity = torch.randn(64, generator=generator, dtype=torch.float64)
    bounds = torch.tensor([64, 64, slots])
    index = (torch.rand(pairs, 3, generator=generator, dtype=torch.float64) * bounds).long()
    loss_delta = torch.tensor(0.3, dtype=torch.float64)
    turned = optimized(theta.clone(), velocity, index, loss_delta)
    torch.testing.assert_close(turned, reference(theta.clone(), velocity, index, loss_delta))


@pytest.mark.parametrize(
    ("gpu", "slots", "pairs", "path"),
    [
        (True, 6, 8, "kernel"),
        (True, 0, 0, "kernel"),
        (True, 2**12, 2**12, "kernel"),
        (True, 2**12, 2**12 + 1, "vectorised"),
        (True, 2**12 + 1, 2**12, "vectorised"),
        (False, 6, 8, "vectorised"),
    ],
)
def test_kernel_is_used_on_a_gpu_up_to_the_maximum_comparisons(gpu, slots, pairs, path, monkeypatch):
    module = "optimized.geometry.rotor_update"
    asked = []
    monkeypatch.setattr(f"{module}.use_triton", lambda *tensors: asked.extend(tensors) or gpu)
    monkeypatch.setattr(f"{module}.rotor_update_triton", lambda *arguments: ("kernel", *arguments))
    monkeypatch.setattr(f"{module}.rotor_update_vectorised", lambda *arguments: ("vectorised", *arguments))
    theta, velocity, loss_delta = torch.empty(slots), torch.empty(8), torch.tensor(0.5)
    arguments = (theta, velocity, torch.empty((pairs, 3), dtype=torch.int64), loss_delta, 3.0)
    served, *given = optimized(*arguments)
    assert served == path
    assert all(a is b for a, b in zip(given, arguments, strict=True))
    # The indices are not passed, because they are integers.
    assert [id(t) for t in asked] == [id(t) for t in (theta, velocity, loss_delta)]
