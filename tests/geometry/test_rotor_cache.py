import pytest
import torch
from scale import draws, steps

from optimized.geometry import rotor_cache as module
from optimized.geometry.rotor_apply import rotor_apply
from optimized.geometry.rotor_cache import RotorCache, rotor_cache_triton
from optimized.geometry.rotor_cache import rotor_cache as optimized
from optimized.kernels import triton_reason
from perfsuite import Cost, Pair, Workload, compiled, floats, integers, side, size, stateful, tensor
from reference.geometry.rotor_apply import rotor_apply as plain_rotor
from reference.geometry.rotor_cache import RotorCache as ReferenceCache
from reference.geometry.rotor_cache import rotor_cache as reference

# Somewhat more than the range that the update wraps angles to.
ANGLES = floats(-4, 4)


def kernel_at_every_query(theta, coordinates):
    """Rotate with the fast rotor at every query, without a cache."""
    cache = RotorCache(theta, coordinates)

    def step(slots, written):
        cache.write(slots, written)
        return rotor_apply(theta, cache._coordinates)

    return step


# Theta stays constant, which is what the cache is for.
UNSUPPORTED = {"every_step": "what a step returns is the cache's own memory, valid until the next step"}

rotor_cache = Pair(
    reference=stateful(reference),
    optimized=stateful(optimized),
    inputs={"theta": tensor("k", values=ANGLES), "coordinates": tensor("M", "n", values=floats(-4, 4))},
    step_inputs={
        "slots": tensor("W", dtype="int64", values=integers(0, "M")),
        "written": tensor("W", "n"),
    },
    # There is at least one slot, because a write needs one.
    sizes={"k": size(0, 34), "M": size(1, 66), "n": size(0, 18, multiple_of=2), "W": size(0, 40)},
    rivals={
        "compile": compiled(stateful(side(reference, devices=("cuda",)))),
        "kernel_at_every_query": stateful(side(kernel_at_every_query, devices=("cuda",))),
    },
    variants={"triton": stateful(side(rotor_cache_triton, available=triton_reason))},
    steps=steps(cpu=(1, 2, 5), otherwise=(1, 2, 17)),
    max_examples=draws(cpu=10),
    unsupported=UNSUPPORTED,
    workloads=[
        Workload("m2048", k=6, M=2048, n=8, W=16, device="cuda", repeat=16, speedup=4.0, host_syncs=0, launches=1),
        Workload("cpu", k=6, M=2048, n=8, W=16, clock="wall", device="cpu"),
    ],
    # Each written row is read once, and stored twice.
    cost=Cost(bytes=lambda k, n, W: 12 * W * n + 8 * W + 4 * k),
)

# Theta changes at every step: the cache must notice it, and rotate everything again.
rotor_cache_turning = Pair(
    reference=stateful(reference),
    optimized=stateful(optimized),
    inputs={"first": tensor("k", values=ANGLES), "coordinates": tensor("M", "n", values=floats(-4, 4))},
    step_inputs={
        "slots": tensor("W", dtype="int64", values=integers(0, "M")),
        "written": tensor("W", "n"),
        "theta": tensor("k", values=ANGLES),
    },
    sizes={"k": size(0, 34), "M": size(1, 66), "n": size(0, 18, multiple_of=2), "W": size(0, 40)},
    variants={"triton": stateful(side(rotor_cache_triton, available=triton_reason))},
    steps=steps(cpu=(1, 2, 5), otherwise=(1, 2, 17)),
    max_examples=draws(cpu=10),
    unsupported=UNSUPPORTED,
    workloads=[
        Workload("m2048", k=6, M=2048, n=8, W=16, device="cuda", host_syncs=0),
        Workload("cpu", k=6, M=2048, n=8, W=16, clock="wall", device="cpu"),
    ],
    cost=Cost(bytes=lambda k, M, n, W: 8 * M * n + 12 * W * n + 8 * W + 12 * k),
)

CACHES = [ReferenceCache, RotorCache]
if triton_reason() is None and not torch.cuda.is_available():
    CACHES.append(module._TritonRotorCache)


@pytest.mark.parametrize("make", CACHES)
def test_a_cache_of_an_odd_number_of_coordinates_is_refused(make):
    with pytest.raises(ValueError, match="n must be even, not 3"):
        make(torch.zeros(2), torch.zeros(5, 3)).rotated()


@pytest.mark.parametrize("make", CACHES)
@pytest.mark.parametrize("W", [1, 5, 70])
def test_last_write_to_a_repeated_slot_wins(make, W):
    generator = torch.Generator().manual_seed(0)
    theta, coordinates = torch.randn(3, generator=generator), torch.randn(4, 4, generator=generator)
    slots = torch.randint(0, 3, (W,), generator=generator)
    written = torch.randn(W, 4, generator=generator)
    cache = make(theta, coordinates)
    cache.write(slots, written)
    expected = coordinates.clone()
    for slot, row in zip(slots.tolist(), written, strict=True):
        expected[slot] = row
    torch.testing.assert_close(cache.rotated(), plain_rotor(theta, expected))
    # The stored coordinates are also right after theta has changed.
    cache.set_theta(torch.zeros(3))
    torch.testing.assert_close(cache.rotated(), expected)


@pytest.mark.parametrize("make", CACHES)
def test_empty_write_changes_nothing(make):
    cache = make(torch.ones(2), torch.ones(3, 4))
    before = cache.rotated().clone()
    cache.write(torch.empty(0, dtype=torch.int64), torch.empty(0, 4))
    assert torch.equal(cache.rotated(), before)


@pytest.mark.parametrize("make", CACHES)
def test_cache_copies_theta_and_coordinates(make):
    theta, coordinates = torch.ones(2), torch.ones(3, 4)
    cache = make(theta, coordinates)
    before = cache.rotated().clone()
    # The cache ignores in-place changes, such as those of the rotor's update, until `set_theta`.
    theta.fill_(0.5)
    coordinates.zero_()
    cache.write(torch.tensor([1]), torch.ones(1, 4))
    torch.testing.assert_close(cache.rotated(), before)
    cache.set_theta(theta)
    torch.testing.assert_close(cache.rotated(), plain_rotor(theta, torch.ones(3, 4)))
    assert coordinates.tolist() == [[0.0] * 4] * 3


@pytest.mark.parametrize("make", CACHES)
@pytest.mark.parametrize("k", [0, 1, 2, 5])
def test_theta_may_have_another_number_of_angles(make, k):
    cache = make(torch.ones(3), torch.ones(2, 4))
    theta = torch.linspace(0.5, 1.5, k)
    cache.set_theta(theta)
    cache.write(torch.tensor([1]), torch.full((1, 4), 2.0))
    torch.testing.assert_close(cache.rotated(), plain_rotor(theta, torch.tensor([[1.0] * 4, [2.0] * 4])))


@pytest.mark.parametrize("make", CACHES[1:])
def test_query_does_not_rotate_again_while_theta_is_constant(make, monkeypatch):
    cache = make(torch.ones(2), torch.ones(3, 4))
    place = cache.rotated()
    for name in ("rotate", "rotate_into"):
        monkeypatch.setattr(module, name, lambda *arguments: pytest.fail("rotated again"))
    # A captured graph needs the same memory at each query.
    assert cache.rotated() is place


def test_write_rotates_only_the_written_rows(monkeypatch):
    cache = RotorCache(torch.ones(2), torch.ones(50, 4))
    rotated = []
    whole = module.rotate
    monkeypatch.setattr(module, "rotate", lambda theta, x: rotated.append(x.shape[0]) or whole(theta, x))
    cache.write(torch.tensor([4, 7]), torch.zeros(2, 4))
    assert rotated == [2]


@pytest.mark.interpreted
def test_out_of_range_slot_changes_nothing():
    # Without a GPU PyTorch's indexing raises; a kernel cannot raise, and must not write.
    cache = module._TritonRotorCache(torch.ones(2), torch.ones(3, 4))
    before = cache.rotated().clone()
    cache.write(torch.tensor([-1, 3, 2**40]), torch.zeros(3, 4))
    assert torch.equal(cache.rotated(), before)


@pytest.mark.parametrize("make", CACHES)
def test_rotated_coordinates_require_no_gradient(make):
    cache = make(torch.ones(2, requires_grad=True), torch.ones(3, 4, requires_grad=True))
    cache.write(torch.tensor([0]), torch.ones(1, 4, requires_grad=True))
    assert not cache.rotated().requires_grad


@pytest.mark.interpreted
@pytest.mark.parametrize(("rows", "k", "n"), [(1, 1, 2), (129, 7, 6), (300, 32, 16)])
def test_the_kernels_write_within_the_cache(rows, k, n, fences):
    cache = module._TritonRotorCache(torch.ones(k), torch.ones(rows, n))
    cache.write(torch.tensor([0, rows - 1, rows]), torch.ones(3, n))
    assert fences.intact()
