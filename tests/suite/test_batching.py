"""The permutation, which is identical on every device, and the bounds of batches."""

import pytest
import torch

from perfsuite import PerfsuiteError
from suite.batching import STEP, WORD, EpochSampler, bounds, check_batches, check_rows, mixed, permutation


@pytest.mark.parametrize("count", [0, 1, 2, 17, 1000])
def test_permutation_contains_every_row_once(count):
    assert permutation(count, 3, 5, "cpu").sort().values.tolist() == list(range(count))


def test_mixed_is_splitmix64():
    # The first outputs of the published algorithm for the state 1234567.
    state, drawn = 1234567, []
    for _ in range(3):
        state = state + STEP & WORD
        drawn.append(mixed(state))
    assert drawn == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.parametrize(("seed", "epoch"), [(0, 0), (0, 1), (1, 0), (2**63 + 5, 10**6), (-1, 3)])
def test_rows_are_sorted_by_their_key(seed, epoch):
    """The expected order is computed with Python's integers, which do not overflow."""
    start = mixed(mixed(seed & WORD) + epoch & WORD)
    keys = [mixed(start + i * STEP & WORD) for i in range(500)]
    signed = [k - (1 << 64) if k >> 63 else k for k in keys]
    assert permutation(500, seed, epoch, "cpu").tolist() == sorted(range(500), key=signed.__getitem__)


def test_each_seed_and_epoch_has_a_different_permutation():
    orders = {tuple(permutation(20, seed, epoch, "cpu").tolist()) for seed in range(20) for epoch in range(20)}
    assert len(orders) == 400
    assert torch.equal(permutation(20, 1, 2, "cpu"), permutation(20, 1, 2, "cpu"))


def test_each_row_comes_first_equally_often():
    """Each of 8 rows comes first in about 500 of 4000 epochs, within five standard errors."""
    first = torch.stack([permutation(8, 0, epoch, "cpu") for epoch in range(4000)])[:, 0].bincount(minlength=8)
    assert (first - 500).abs().max() < 5 * (4000 * (1 / 8) * (7 / 8)) ** 0.5


@pytest.mark.parametrize(
    ("count", "size", "drop_last", "expected"),
    [
        (7, 3, False, [(0, 3), (3, 6), (6, 7)]),
        (7, 3, True, [(0, 3), (3, 6)]),
        (6, 3, False, [(0, 3), (3, 6)]),
        (6, 3, True, [(0, 3), (3, 6)]),
        (2, 3, False, [(0, 2)]),
        (2, 3, True, []),
        (0, 3, False, []),
    ],
)
def test_bounds_returns_the_rows_of_each_batch(count, size, drop_last, expected):
    assert bounds(count, size, drop_last) == expected


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ([], "tensors: give one or more, each with a row for every example"),
        ([torch.zeros(3), torch.zeros(())], "tensors: give one or more, each with a row for every example"),
        ([torch.zeros(3), torch.zeros(4, 2)], "tensors: they have 3, 4 rows; give as many of each"),
    ],
)
def test_check_rows_reports_different_row_counts_in_one_line(tensors, said):
    with pytest.raises(PerfsuiteError) as error:
        check_rows(tensors)
    assert str(error.value) == said


@pytest.mark.parametrize(
    ("rows", "size", "drop_last", "said"),
    [
        (3, 0, False, "batch_size: 0 is out of range; give 1 or more"),
        (0, 1, False, "data: it has no example; give one or more"),
        (3, 4, True, "batch_size: 4 is more than the 3 examples, and drop_last leaves out what makes no whole batch; "),
    ],
)
def test_check_batches_reports_rows_that_fill_no_batch_in_one_line(rows, size, drop_last, said):
    with pytest.raises(PerfsuiteError) as error:
        check_batches(rows, size, drop_last)
    assert str(error.value).startswith(said)


def test_sampler_yields_the_permutation_of_its_epoch():
    sampler = EpochSampler(9, seed=4)
    assert len(sampler) == 9
    for epoch in (0, 3):
        sampler.epoch = epoch
        assert list(sampler) == list(sampler) == permutation(9, 4, epoch, "cpu").tolist()


@pytest.mark.gpu
def test_permutation_is_the_same_on_a_gpu(no_host_sync):
    with no_host_sync():
        there = permutation(40_000, 7, 3, "cuda")
    assert torch.equal(there.cpu(), permutation(40_000, 7, 3, "cpu"))
