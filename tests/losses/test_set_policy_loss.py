import itertools
import math

import pytest
import torch
from scale import draws, some
from torch.nn import functional

from optimized.kernels import INTERPRETED, triton_reason
from optimized.losses import set_policy_loss as module
from optimized.losses.set_policy_loss import set_policy_loss as optimized
from optimized.losses.set_policy_loss import set_policy_loss_triton
from perfsuite import Cost, Pair, Workload, compiled, floats, integers, sampled, side, size, tensor
from reference.diversity.pairwise_cosine import pairwise_cosine
from reference.losses.set_policy_loss import set_policy_loss as reference
from suite.polychromic import advantages as advantages_of


def sampled_tokens(generator, shape, dtype):
    """Mark replies with gaps, some without any token; at the timed sizes mark all tokens, as the cost assumes."""
    share = (0.5, 0.8, 1.0)[int(torch.randint(0, 3, (), generator=generator))]
    return torch.rand(shape, generator=generator) < (1.0 if math.prod(shape) >= 1024 else share)


def traffic(bytes_of_a_logit):
    """Return the function that counts bytes: logits are read forward and backward, their gradients written."""

    def of_a_call(sets, n, length, vocabulary, direction):
        logits = bytes_of_a_logit * sets * n * length * vocabulary
        return logits * {"forward": 1, "backward": 2, "both": 3}[direction]

    return of_a_call


def bfloat16_reason():
    """Return why the kernels cannot run in bfloat16 here, or None."""
    if INTERPRETED:
        return "Triton's interpreter is wrong in bfloat16; the kernels are compiled in it, and run on a GPU"
    return triton_reason()


def inputs(values):
    return {
        "logits": tensor("sets * n", "length", "vocabulary", values=values),
        "tokens": tensor("sets * n", "length", dtype="int64", values=integers(0, "vocabulary")),
        "mask": tensor("sets * n", "length", dtype="bool", values=sampled(sampled_tokens)),
        "advantages": tensor("sets", "n", values=floats(-2, 2), differentiable=False),
    }


# Each position is a program, which takes Triton's interpreter milliseconds. If nothing is sampled, or the vocabulary
# has one token, the loss is 0. Such cases are tested below: many of them here would prove nothing.
SIZES = {"sets": size(1, 3), "n": size(1, 3), "length": size(1, 4), "vocabulary": size(2, 30)}
RIVALS = {"compile": compiled(side(reference, devices=("cuda",)))}
# 12 replies and 48, of 100 tokens; the vocabularies of SmolLM2 and of Llama 3.
REAL = {"n": 3, "length": 100, "direction": "both", "device": "cuda", "host_syncs": 0}
SMOLLM2, LLAMA3 = 49152, 128256
MIB = 1 << 20

# The optimized side holds the gradient, 225 MiB here and 450 in bfloat16. The reference also holds log p of every token
# of the vocabulary, and its gradient, in float32.
set_policy_loss = Pair(
    reference=reference,
    optimized=optimized,
    # NaN and infinities are tested below: where the mask is False, the reference's gradient of them is NaN.
    inputs=inputs(floats(nonfinite=False)),
    max_examples=draws(cpu=10, otherwise=25),
    sizes=SIZES,
    rivals=RIVALS,
    variants={"triton": side(set_policy_loss_triton, available=triton_reason)},
    workloads=[
        Workload("replies12", **REAL, sets=4, vocabulary=SMOLLM2, speedup=1.5, peak_bytes=240 * MIB),
        Workload("cpu", sets=2, n=3, length=8, vocabulary=8192, clock="wall", direction="both", device="cpu"),
    ],
    cost=Cost(bytes=traffic(4)),
)

set_policy_loss_bfloat16 = Pair(
    reference=reference,
    optimized=optimized,
    # The logits are as large as a language model's; float32 draws those of any size.
    inputs=inputs(floats(-30, 30)),
    max_examples=draws(cpu=10, otherwise=25),
    sizes=SIZES,
    dtypes=("bfloat16",),
    rivals=RIVALS,
    variants={"triton": side(set_policy_loss_triton, available=bfloat16_reason)},
    workloads=[
        Workload("replies48", **REAL, sets=16, vocabulary=SMOLLM2, dtype="bfloat16", speedup=2, peak_bytes=480 * MIB),
        Workload("llama3", **REAL, sets=4, vocabulary=LLAMA3, dtype="bfloat16", speedup=2),
    ],
    cost=Cost(bytes=traffic(2)),
)


SIDES = [reference, optimized, pytest.param(set_policy_loss_triton, marks=pytest.mark.interpreted)]


def drawn(sets=2, n=3, length=4, vocabulary=11):
    generator = torch.Generator().manual_seed(0)
    shape = (sets * n, length)
    logits = torch.randn(*shape, vocabulary, generator=generator)
    tokens = torch.randint(vocabulary, shape, generator=generator)
    mask = torch.rand(shape, generator=generator) < 0.7
    return logits, tokens, mask, torch.randn(sets, n, generator=generator)


def differentiated(call, logits, *others):
    leaf = logits.detach().clone().requires_grad_()
    loss = call(leaf, *others)
    return loss.detach(), *torch.autograd.grad(3 * loss, leaf)


@pytest.mark.parametrize("call", SIDES)
def test_loss_of_equal_logits_matches_hand_computation(call):
    """Each token's log p is -log 4. The sets have 3 and 2 tokens of advantages 1 and 2, and 0 and 1 of 5 and -1."""
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [0, 0, 0], [0, 1, 0]]).bool()
    advantages = torch.tensor([[1.0, 2.0], [5.0, -1.0]])
    loss = call(torch.ones(4, 3, 4), torch.zeros(4, 3, dtype=torch.int64), mask, advantages)
    assert loss.item() == pytest.approx(math.log(4) * (3 + 4 - 1) / 2)


@pytest.mark.parametrize("call", SIDES)
def test_a_positive_advantage_makes_a_reply_more_likely(call):
    logits, tokens, mask, _ = drawn()
    _, d_logits = differentiated(call, logits, tokens, mask, torch.ones(2, 3))
    own = d_logits.gather(-1, tokens[..., None]).squeeze(-1)
    assert bool((own[mask] < 0).all())
    assert not d_logits[~mask].any()


@pytest.mark.parametrize("call", SIDES[1:])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nonfinite_logits_of_unsampled_positions_are_ignored(call, value):
    logits, tokens, mask, advantages = drawn()
    logits[~mask] = value
    for own, other in zip(
        differentiated(call, logits, tokens, mask, advantages),
        differentiated(reference, logits.masked_fill(~mask[..., None], 0.0), tokens, mask, advantages),
        strict=True,
    ):
        torch.testing.assert_close(own, other)


SPECIAL = list(itertools.product([math.nan, math.inf, -math.inf, 1.0], repeat=2))


@pytest.mark.parametrize("call", SIDES[1:])
@pytest.mark.filterwarnings("ignore:All-NaN slice")  # numpy's, in Triton's interpreter
@pytest.mark.parametrize("values", some(SPECIAL, SPECIAL[1::3]))
def test_nonfinite_logits_of_sampled_positions_match_the_reference(call, values, monkeypatch):
    """The values are adjacent, a block apart, at the sampled token, and throughout a position."""
    monkeypatch.setattr(module, "BLOCK", 4)
    logits, tokens, mask, advantages = drawn(length=5)
    mask[:] = True
    tokens[:] = 2
    for position, places in enumerate(([0, 1], [0, 7], [2, 9], [8, 2])):
        logits[:, position, places] = torch.tensor(values)
    logits[:, 4] = values[0]
    for position in range(5):
        given = [t[:, position : position + 1] for t in (logits, tokens, mask)]
        for own, other in zip(
            differentiated(call, *given, advantages), differentiated(reference, *given, advantages), strict=True
        ):
            torch.testing.assert_close(own, other, equal_nan=True)


@pytest.mark.parametrize("call", SIDES[1:])
def test_a_token_outside_the_nucleus_has_no_probability_and_no_gradient(call, monkeypatch):
    # The first blocks contain only -inf.
    monkeypatch.setattr(module, "BLOCK", 4)
    logits, tokens, mask, advantages = drawn()
    tokens.clamp_(min=9)
    logits[..., :9] = -torch.inf
    found = differentiated(call, logits, tokens, mask, advantages)
    inside = differentiated(reference, logits[..., 9:], tokens - 9, mask, advantages)
    torch.testing.assert_close(found[0], inside[0])
    torch.testing.assert_close(found[1], functional.pad(inside[1], (9, 0)))


@pytest.mark.parametrize("call", SIDES)
@pytest.mark.parametrize(("sets", "n", "length"), [(0, 2, 3), (0, 0, 0), (2, 0, 3), (2, 2, 0)])
def test_loss_of_empty_sets_is_0_and_of_zero_sets_nan(call, sets, n, length):
    drawn_of = drawn(sets=sets, n=n, length=length)
    loss, d_logits = differentiated(call, *drawn_of)
    assert loss.dtype == torch.float32
    assert loss.isnan() if sets == 0 else loss == 0
    assert d_logits.shape == drawn_of[0].shape


@pytest.mark.parametrize("call", SIDES)
def test_loss_and_gradient_without_sampled_tokens_are_0(call):
    logits, tokens, mask, advantages = drawn()
    loss, d_logits = differentiated(call, logits, tokens, torch.zeros_like(mask), advantages)
    assert loss == 0
    assert not d_logits.any()


@pytest.mark.parametrize("call", SIDES)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_nonfinite_advantage_of_a_reply_without_tokens_makes_the_loss_nan(call, value):
    mask = torch.tensor([[True, True], [False, False]])
    logits, tokens = torch.zeros(2, 2, 3), torch.zeros(2, 2, dtype=torch.int64)
    assert call(logits, tokens, mask, torch.tensor([[1.0, value]])).isnan()


@pytest.mark.parametrize("call", SIDES)
def test_float64_advantages_leave_the_loss_in_float32(call):
    logits, tokens = torch.zeros(2, 2, 3), torch.zeros(2, 2, dtype=torch.int64)
    mask, advantages = torch.ones(2, 2, dtype=torch.bool), torch.ones(1, 2, dtype=torch.float64)
    assert call(logits, tokens, mask, advantages).dtype == torch.float32


@pytest.mark.parametrize("call", SIDES)
def test_advantages_get_no_gradient(call):
    logits, tokens, mask, advantages = drawn()
    advantages.requires_grad_()
    assert not call(logits, tokens, mask, advantages).requires_grad


@pytest.mark.parametrize("call", SIDES)
@pytest.mark.parametrize("shape", [(6,), (2, 2), (1, 2, 3)])
def test_advantages_of_a_wrong_shape_raise_value_error(call, shape):
    logits, tokens, mask, _ = drawn()
    with pytest.raises(ValueError, match=r"for 6 replies: give \[sets, n\]"):
        call(logits, tokens, mask, torch.ones(shape))


@pytest.mark.interpreted
@pytest.mark.parametrize("token", [-100, -1, 11, 10**6])
def test_token_outside_the_vocabulary_gives_nan_only_if_it_was_sampled(token):
    logits, tokens, mask, advantages = drawn()
    tokens[~mask] = token
    assert set_policy_loss_triton(logits, tokens, mask, advantages).isfinite()
    tokens[mask.nonzero()[0][0], mask.nonzero()[0][1]] = token
    assert set_policy_loss_triton(logits, tokens, mask, advantages).isnan()


@pytest.mark.interpreted
@pytest.mark.parametrize("vocabulary", some([1, 3, 4, 5, 8, 11], [3, 4, 11]))
@pytest.mark.parametrize("positions", ["contiguous", "reply's end", "every second"])
def test_kernels_process_a_position_in_blocks(vocabulary, positions, monkeypatch, fences):
    monkeypatch.setattr(module, "BLOCK", 4)
    monkeypatch.setattr(module, "FINISH_BLOCK", 8)
    logits, tokens, mask, advantages = drawn(length=3, vocabulary=vocabulary)
    padded = torch.full((6, 8, vocabulary + 2), torch.nan)
    place = {"reply's end": padded[:, 5:, 1:-1], "every second": padded[:, 1:7:2, 2:]}.get(positions, logits)
    given = place.copy_(logits).requires_grad_()
    loss = set_policy_loss_triton(given, tokens, mask, advantages)
    (d_logits,) = torch.autograd.grad(3 * loss, given)
    assert fences.intact()
    for own, other in zip((loss, d_logits), differentiated(reference, logits, tokens, mask, advantages), strict=True):
        torch.testing.assert_close(own, other)


@pytest.mark.parametrize("call", SIDES[1:])
def test_large_logits_neither_overflow_nor_lose_precision(call):
    logits, tokens, mask, advantages = drawn()
    logits += 1e4
    truth = differentiated(reference, logits.double(), tokens, mask, advantages.double())
    for own, other in zip(differentiated(call, logits, tokens, mask, advantages), truth, strict=True):
        torch.testing.assert_close(own.double(), other, atol=1e-6, rtol=1e-6)


def test_sums_over_bfloat16_logits_are_in_float32():
    logits, tokens, mask, advantages = drawn(sets=40, length=20)
    logits = logits.bfloat16()
    loss, d_logits = differentiated(optimized, logits, tokens, mask, advantages)
    truth, d_truth = differentiated(reference, logits.double(), tokens, mask, advantages.double())
    assert (loss.dtype, d_logits.dtype) == (torch.float32, torch.bfloat16)
    torch.testing.assert_close(loss.double(), truth)
    torch.testing.assert_close(d_logits.double(), d_truth, atol=0.0, rtol=2**-8)


END = 0
REPLIES = torch.tensor([[0, 0], [1, 0], [1, 1], [1, 2], [2, 0], [2, 1], [2, 2]])
"""All replies of up to two tokens from a vocabulary of three; the first ends at once, with one token."""
SAMPLED = torch.tensor([[1, 0]] + [[1, 1]] * 6).bool()


class Exact:
    """A policy over the replies with its parameters, all sets of n replies, and their diversity."""

    def __init__(self, n, nucleus):
        generator = torch.Generator().manual_seed(3)
        first, second, embeddings = (
            torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((3,), (3, 3), (7, 4))
        )
        self.parameters = [first.requires_grad_(), second.requires_grad_()]
        self.outside = torch.tensor([[False, True, False]]) if nucleus else torch.zeros(1, 3, dtype=torch.bool)
        self.sets = torch.tensor(list(itertools.product(range(7), repeat=n)))
        self.distances = pairwise_cosine(embeddings)[self.sets[:, :, None], self.sets[:, None, :]]
        i, j = torch.triu_indices(n, n, offset=1)
        self.diversity = self.distances[:, i, j].mean(1)

    def logits(self, replies):
        """Return the logits [*, 2, 3] to sample from; token 1 may be outside the nucleus at the second position."""
        first, second = self.parameters
        later = second[REPLIES[replies, 0]].masked_fill(self.outside, -torch.inf)
        return torch.stack((first.expand_as(later), later), -2)

    def probabilities(self):
        """Return the probability of each set; differentiable."""
        log_p = self.logits(torch.arange(7)).log_softmax(-1).gather(-1, REPLIES[..., None]).squeeze(-1)
        return torch.where(SAMPLED, log_p, 0.0).sum(-1).exp()[self.sets].prod(1)

    def gradient(self, value):
        return torch.cat([g.flatten() for g in torch.autograd.grad(value, self.parameters)])

    def truth(self):
        """Return the gradient of minus the expected diversity."""
        return self.gradient(-(self.probabilities() * self.diversity).sum())

    def estimated(self, call, sets, probabilities, advantages):
        """Return the expectation of the estimator's gradient: that of each draw, weighted with its probability.

        sets [draws, S, n], probabilities [draws], advantages [draws, S, n]. The loss is linear in the advantages and
        the mean over the sets, so one call on all draws with weighted advantages gives the expectation of all calls.
        """
        possible = probabilities > 0
        sets, advantages = (
            sets[possible],
            advantages[possible] * (probabilities[possible] * possible.sum())[:, None, None],
        )
        replies = sets.flatten()
        loss = call(self.logits(replies), REPLIES[replies], SAMPLED[replies], advantages.flatten(0, 1))
        return self.gradient(loss)


FLOAT64 = [reference, optimized]


@pytest.mark.parametrize("nucleus", [False, True])
@pytest.mark.parametrize("call", FLOAT64)
def test_gradient_is_unbiased_with_a_baseline_of_earlier_steps(call, nucleus):
    exact = Exact(2, nucleus)
    advantages = advantages_of.of_sets(exact.diversity[:, None], torch.tensor(0.7, dtype=torch.float64))
    found = exact.estimated(
        call, exact.sets[:, None], exact.probabilities().detach(), advantages[..., None].expand(-1, 1, 2)
    )
    truth = exact.truth()
    assert float(truth.norm()) > 0.05
    torch.testing.assert_close(found, truth)


def two_sets(exact):
    """Return all draws of two sets, their probabilities and diversities."""
    which = torch.cartesian_prod(*[torch.arange(len(exact.sets))] * 2)
    return exact.sets[which], exact.probabilities().detach()[which].prod(1), exact.diversity[which]


@pytest.mark.parametrize("call", FLOAT64)
def test_gradient_is_unbiased_with_the_other_sets_as_the_baseline(call):
    exact = Exact(2, nucleus=False)
    sets, probabilities, diversity = two_sets(exact)
    advantages = advantages_of.of_sets(diversity)[..., None].expand(-1, 2, 2)
    torch.testing.assert_close(exact.estimated(call, sets, probabilities, advantages), exact.truth())


def test_gradient_is_halved_with_the_mean_of_both_sets_as_the_baseline():
    exact = Exact(2, nucleus=False)
    sets, probabilities, diversity = two_sets(exact)
    advantages = (diversity - diversity.mean(1, keepdim=True))[..., None].expand(-1, 2, 2)
    torch.testing.assert_close(exact.estimated(reference, sets, probabilities, advantages), exact.truth() / 2)


@pytest.mark.parametrize("call", FLOAT64)
def test_gradient_is_unbiased_with_the_set_without_the_reply_as_the_baseline(call):
    exact = Exact(3, nucleus=False)
    advantages = advantages_of.without_own_reply(exact.distances)[:, None]
    found = exact.estimated(call, exact.sets[:, None], exact.probabilities().detach(), advantages)
    torch.testing.assert_close(found, exact.truth())


def test_gradient_is_biased_with_a_baseline_that_depends_on_the_reply():
    """A biased baseline is detected: the diversity of the pairs that contain the reply depends on the reply."""
    exact = Exact(3, nucleus=False)
    advantages = exact.diversity[:, None] - exact.distances.sum(-1) / 2
    found = exact.estimated(reference, exact.sets[:, None], exact.probabilities().detach(), advantages[:, None])
    assert float((found - exact.truth()).norm()) > 0.1 * float(exact.truth().norm())


def test_objective_of_the_source_has_only_the_gradient_of_cross_entropy():
    """L = CE - lambda * D with D a float has the gradient of CE alone, although E[D] has a gradient, too."""
    exact = Exact(3, nucleus=False)
    gradients = []
    for weight in (0.0, 0.3):
        logits = exact.logits(torch.arange(7))
        cross_entropy = functional.cross_entropy(logits[SAMPLED], REPLIES[SAMPLED])
        drawn_set = torch.multinomial(exact.probabilities().detach(), 1, generator=torch.Generator().manual_seed(0))
        diversity = exact.diversity[drawn_set].item()
        assert diversity > 0
        gradients.append(exact.gradient(cross_entropy - weight * diversity))
    assert torch.equal(*gradients)
    assert exact.truth().any()
