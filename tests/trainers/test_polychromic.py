"""The polychromic trainers: equal curves, 4-bit weights, the objective, checkpoints and configuration."""

from __future__ import annotations

import dataclasses
import functools
import json
import math

import pytest
import scale
import torch
from curves import NEIGHBOURS, a_rounding_away, deviation_of, first_points, share_of_rule
from states import same, through_a_file

from optimized.diversity import pairwise_cosine_cuda
from optimized.trainers import polychromic as optimized_module
from optimized.trainers.polychromic import Trainer as Optimized
from perfsuite import Cost, Pair, PerfsuiteError, Workload, floats, integers, sampled, scalar, size, stateful, tensor
from reference.trainers import polychromic as reference_module
from reference.trainers.polychromic import Trainer as Reference
from suite.polychromic import data, drawn, sentences
from suite.polychromic.batches import Prompts, groups_of, packed
from suite.polychromic.chat import Encoded
from suite.polychromic.config import TECHNIQUES, TrainConfig, without_techniques
from suite.polychromic.data import Data, Steps, load
from suite.polychromic.lora import places_of
from suite.polychromic.objective import nucleus, rows_of

pytest.importorskip("tokenizers", reason="tokenizers is not installed: pip install 'perfsuite[train]'")

SMALL = TrainConfig(
    length=48,
    batch_size=2,
    accumulation=2,
    prompts=2,
    replies=3,
    new_tokens=6,
    steps=12,
    learning_rate=2e-2,
    rank=4,
    alpha=8.0,
    diversity=0.5,
)
DATA = Data(synthetic=24, length=48, batch_size=2, accumulation=2, steps=12)
LONG, DAY = scale.count(quick=8, full=DATA.steps), scale.count(quick=4, full=8)
"""Number of steps over which both sides are compared."""
"""Number of steps that are compared if a technique is switched."""


@pytest.fixture(scope="module")
def given():
    return load(DATA).trainer_data


# --- the pair -------------------------------------------------------------------------------------------------------

MODELS = {shape.width: name for name, shape in drawn.SHAPES.items()}


@functools.cache
def given_for(model):
    """Return the data for this model, which does not depend on the pair's other inputs."""
    return load(dataclasses.replace(DATA, model=model)).trainer_data


def steps(kind):
    """Return a pair's side with a given embedding. A step returns losses, gradient norm and the RMS of each weight."""

    def make(embedding, accumulation, prompts, replies, new_tokens, rate, diversity, seed):
        config = dataclasses.replace(
            SMALL,
            accumulation=accumulation,
            prompts=prompts,
            replies=replies,
            new_tokens=new_tokens,
            learning_rate=rate,
            diversity=diversity,
            seed=seed,
        )
        given = given_for(MODELS[embedding.shape[1]])
        dtypes = () if kind is Optimized else (embedding.dtype,)
        trainer = kind(config, given, embedding.device, *dtypes)
        with torch.no_grad():
            trainer.model.model.embed_tokens.weight.copy_(embedding)

        def step():
            trainer.train_window({})
            report = trainer.last_report()
            figures = [report.cross_entropy, report.diversity, report.norm]
            figures = torch.tensor(figures, dtype=embedding.dtype, device=embedding.device)
            return figures, torch.stack([w.detach().square().mean().sqrt() for w in trainer.weights.values()])

        return step

    return make


def embeddings(generator, shape, dtype):
    """Draw embeddings like a model's; at other scales all tokens would be equally likely, or one certain."""
    return (0.1 * torch.randn(shape, generator=generator, device=generator.device)).to(dtype)


def flops(V, D, accumulation, prompts, replies, new_tokens):
    """Count operations with the weights: two per token forward, four backward, with about 40 tokens an example."""
    shape = drawn.SHAPES[MODELS[D]]
    attention = (2 * shape.heads + 2 * shape.kv_heads) * shape.head_width
    weights = V * D + shape.layers * D * (attention + 3 * shape.hidden)
    examples = SMALL.batch_size * accumulation + prompts * replies
    return 40 * weights * (4 * examples + 2 * prompts * replies) + 2 * weights * prompts * replies * new_tokens


polychromic = Pair(
    reference=stateful(steps(Reference)),
    optimized=stateful(steps(Optimized)),
    inputs={
        "embedding": tensor("V", "D", values=sampled(embeddings), differentiable=False),
        "accumulation": scalar(integers(1, scale.count(quick=2, full=3))),
        "prompts": scalar(integers(1, 2)),
        "replies": scalar(integers(3, 4)),
        "new_tokens": scalar(integers(1, scale.count(quick=4, full=6))),
        "rate": scalar(floats(1e-4, 2e-2)),
        "diversity": scalar(floats(0.1, 2)),
        "seed": scalar(integers(0, 1000)),
    },
    gradients=False,
    sizes={"V": size(258, 258), "D": size(32, 32)},
    steps=(1, 2),
    max_examples=scale.draws(cpu=3, otherwise=scale.count(quick=4, full=8)),
    workloads=[
        Workload(
            "smollm2",
            V=49152,
            D=576,
            accumulation=8,
            prompts=4,
            replies=3,
            new_tokens=20,
            rate=2e-4,
            diversity=0.3,
            seed=0,
            clock="wall",
            device="cuda",
        ),
        Workload(
            "cpu",
            V=258,
            D=32,
            accumulation=2,
            prompts=2,
            replies=3,
            new_tokens=6,
            rate=5e-3,
            diversity=0.3,
            seed=0,
            clock="wall",
            device="cpu",
        ),
    ],
    cost=Cost(flops=flops, precision="float32"),
    time_limit=600,
)


# --- loss curves ----------------------------------------------------------------------------------------------------


def trained(kind, given, config=SMALL, count=3, **options):
    trainer = kind(config, given, "cpu", **options)
    for _ in range(count):
        trainer.train_window({})
    return trainer


def curve(trainer, windows=LONG):
    """Return cross-entropy and diversity, [steps, 2]."""
    found = []
    for _ in range(windows):
        trainer.train_window({})
        report = trainer.last_report()
        found.append([report.cross_entropy, report.diversity])
    return torch.tensor(found, dtype=torch.float64)


@pytest.fixture(scope="module")
def known(given):
    """Return (truth, largest deviation from the truth up to each step)."""
    truth = curve(Reference(SMALL, given, "cpu", torch.float64))
    runs = [curve(Reference(SMALL, given, "cpu"))]
    runs += [curve(a_rounding_away(Reference(SMALL, given, "cpu"), seed)) for seed in range(NEIGHBOURS)]
    return truth, deviation_of(runs, truth)


def share_of_budget(found, known):
    """Return the largest error as a fraction of the error that the rule allows."""
    return max(share_of_rule(found[:, n], known[0][:, n], known[1][:, n], torch.float32) for n in range(2))


def test_optimized_curves_match_the_reference(given, known):
    assert share_of_budget(curve(Optimized(SMALL, given, "cpu")), known) <= 1


def test_reference_loss_falls_and_all_weights_change(given, known):
    """The curves change and so do the weights; otherwise agreement would show nothing."""
    assert known[0][-3:, 0].mean() < known[0][:3, 0].mean() - 0.1
    assert known[1].max() < 1e-4  # all runs sampled the same tokens
    trainer = Reference(SMALL, given, "cpu")
    before = trainer.state_dict()["weights"]
    for _ in range(2):  # lora_b begins at 0, so that lora_a gets no gradient in the first step
        trainer.train_window({})
    after = trainer.state_dict()["weights"]
    assert not any(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize("name", TECHNIQUES)
def test_switching_one_technique_off_or_on_alone_keeps_the_curves(name, given, known):
    off = dataclasses.replace(SMALL, **{name: False})
    alone = dataclasses.replace(without_techniques(SMALL), **{name: True})
    for config in (off, alone) if scale.FULL else (off,):
        assert share_of_budget(curve(Optimized(config, given, "cpu"), DAY), first_points(known, DAY)) <= 1


def test_pairwise_cosine_cuda_is_called_and_keeps_the_curves(given, known, monkeypatch):
    called = []
    own = pairwise_cosine_cuda.pairwise_cosine_cuda
    monkeypatch.setattr(pairwise_cosine_cuda, "pairwise_cosine_cuda", lambda e: called.append(len(e)) or own(e))
    found = curve(Optimized(dataclasses.replace(SMALL, pairwise_cosine_cuda=True), given, "cpu"), DAY)
    assert share_of_budget(found, first_points(known, DAY)) <= 1
    assert called == [SMALL.replies] * SMALL.prompts * DAY


@pytest.mark.parametrize(
    ("kind", "module", "block"),
    [(Reference, reference_module, "_block"), (Optimized, optimized_module, "_attending")],
    ids=["reference", "optimized"],
)
def test_activation_checkpoint_recomputes_blocks_and_keeps_the_weights(kind, module, block, given, monkeypatch):
    calls, weights, own = [], [], getattr(module, block)
    monkeypatch.setattr(module, block, lambda *arguments: calls.append(1) or own(*arguments))
    counts = []
    for config in (SMALL, dataclasses.replace(SMALL, activation_checkpoint=True)):
        calls.clear()
        kind(dataclasses.replace(config, diversity=0.0), given, "cpu").train_window({})
        counts.append(len(calls))
        weights.append(trained(kind, given, config).state_dict()["weights"])
    assert counts[1] == 2 * counts[0] > 0
    assert same(*weights)


def test_bfloat16_training_does_not_round_the_cross_entropy_to_bfloat16(given):
    """Near the loss, 5.5, neighbouring bfloat16 numbers differ by 1/32."""
    config = dataclasses.replace(SMALL, dtype="bfloat16", dropout=0.0)
    reports = [trained(kind, given, config, 1).last_report() for kind in (Reference, Optimized)]
    exact = trained(Reference, given, dataclasses.replace(config, dtype="float32"), 1).last_report()
    for report in reports:
        assert report.cross_entropy == pytest.approx(exact.cross_entropy, abs=5e-3)
        assert report.cross_entropy != torch.tensor(report.cross_entropy).bfloat16().item()
    plain, fast = (curve(kind(config, given, "cpu"), DAY)[:, 0] for kind in (Reference, Optimized))
    truth = curve(Reference(dataclasses.replace(config, dtype="float32"), given, "cpu"), DAY)[:, 0]
    assert share_of_rule(fast, truth, deviation_of([plain], truth), torch.bfloat16) <= 1


# --- frozen weights in 4 bits

QUANTIZED = dataclasses.replace(SMALL, quantization="nf4")


@pytest.fixture
def given_wide(monkeypatch):
    """Return the data for a model whose layers have a multiple of 64 inputs."""
    wide = dataclasses.replace(drawn.SHAPES["tiny"], width=64, head_width=16)
    monkeypatch.setattr(drawn, "SHAPES", {**drawn.SHAPES, "wide": wide})
    return load(dataclasses.replace(DATA, model="wide")).trainer_data


@pytest.mark.parametrize("fused", [True, False])
def test_optimized_curves_match_the_reference_with_4_bit_weights(fused, given_wide):
    truth = curve(Reference(QUANTIZED, given_wide, "cpu", torch.float64), DAY)
    runs = [curve(Reference(QUANTIZED, given_wide, "cpu"), DAY)]
    runs += [curve(a_rounding_away(Reference(QUANTIZED, given_wide, "cpu"), seed), DAY) for seed in range(NEIGHBOURS)]
    found = curve(Optimized(dataclasses.replace(QUANTIZED, fused_lora=fused), given_wide, "cpu"), DAY)
    assert share_of_budget(found, (truth, deviation_of(runs, truth))) <= 1
    dense = curve(Reference(SMALL, given_wide, "cpu"), DAY)
    assert (dense - truth)[:, 0].abs().max() > 1e-3  # quantization changes the weights


@pytest.mark.parametrize("kind", [Reference, Optimized])
def test_quantized_layers_keep_no_dense_weight(kind, given_wide):
    trainer = kind(QUANTIZED, given_wide, "cpu")
    for layer in trainer.adapters.values():
        kept = {**layer._parameters, **layer._buffers, **vars(layer)}
        floating = {n for n, t in kept.items() if torch.is_tensor(t) and t.is_floating_point()}
        assert floating == {"absmax", "lora_a", "lora_b"}
        assert layer.codes.numel() * 2 == layer.weight.numel()


@pytest.mark.parametrize("kind", [Reference, Optimized])
def test_nf4_rejects_layers_whose_inputs_are_no_multiple_of_64(kind, given):
    with pytest.raises(PerfsuiteError, match="quantization: 32 inputs: NF4 takes multiples of 64; use another model"):
        kind(QUANTIZED, given, "cpu")


@pytest.mark.parametrize(("tokens", "groups"), [(1, 4), (96, 2)])
def test_gradients_do_not_depend_on_packed_tokens(tokens, groups, given, monkeypatch):
    made = []
    monkeypatch.setattr(optimized_module, "packed", lambda *a: made.append(len(a[0])) or packed(*a))
    found = [trained(Optimized, given, dataclasses.replace(SMALL, packed_tokens=n), 1)._sums for n in (tokens, 10_000)]
    assert (len(made), made[-1]) == (groups + 1, 4)
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)


def test_packed_examples_are_concatenated_and_padded():
    examples = [Encoded((5, 6, 7, 8), 2), Encoded((9, 3), 1)]
    found = packed(examples, 4, 0, 8, "cpu")
    assert found.tokens.tolist() == [5, 6, 7, 8, 9, 3, 0, 0]
    assert found.targets.tolist() == [-100, 7, 8, -100, 3, -100, -100, -100]
    assert found.positions.tolist() == [0, 1, 2, 3, 0, 1, 0, 1]
    assert found.places.tolist()[:6] == [*places_of(4, (1, 4))[0].tolist(), *places_of(5, (1, 2))[0].tolist()]
    assert (found.offsets.tolist(), found.count) == ([0, 4, 6, 8], 3)
    assert groups_of(examples, 6) == [range(2)]
    assert groups_of(examples, 5) == [range(1), range(1, 2)]


@pytest.mark.parametrize("diversity", [0.0, 0.5])
@pytest.mark.parametrize("kind", [Reference, Optimized])
def test_dropout_is_off_after_a_step(kind, diversity, given):
    trainer = trained(kind, given, dataclasses.replace(SMALL, diversity=diversity), 1)
    assert all(adapter.dropout is None for adapter in trainer.adapters.values())


@pytest.mark.parametrize("kind", [Reference, Optimized])
def test_halved_optimizer_scale_does_not_change_the_first_moments(kind, given):
    """Non-finite gradients halve the scale, by which the optimizer divides the next gradients."""
    halved, whole = kind(SMALL, given, "cpu"), kind(SMALL, given, "cpu")
    halved.optimizer.scale.fill_(0.5)
    for trainer in (halved, whole):
        trainer.train_window({})
    first, second = (trainer.state_dict()["optimizer"]["first"] for trainer in (halved, whole))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("kind", [Reference, Optimized])
def test_as_written_objective_has_no_diversity_gradient(kind, given):
    written = trained(kind, given, dataclasses.replace(SMALL, objective="as_written"))
    without = trained(kind, given, dataclasses.replace(SMALL, diversity=0.0))
    assert same(written.state_dict()["weights"], without.state_dict()["weights"])
    assert written.last_report().diversity > 0 == without.last_report().diversity
    assert not same(written.state_dict()["weights"], trained(kind, given).state_dict()["weights"])


def test_policy_gradient_matches_autograd_of_the_written_out_objective(given):
    """The test computes the objective without the modules, in float64, with λ, temperature and nucleus."""
    config = dataclasses.replace(SMALL, dropout=0.0, clip=1e9)
    trainer = Reference(config, given, "cpu", torch.float64)
    for adapter in trainer.adapters.values():  # at lora_b = 0, lora_a would get no gradient
        adapter.lora_b.data.normal_(std=0.1, generator=torch.Generator().manual_seed(adapter.number))
    examples = data.examples_of(config, given, 0, {})[: config.prompts]
    diversity, _, grads = trainer._policy_gradient(examples)
    prompts = [torch.tensor(e.tokens[: e.prompt]) for e in examples]
    numbers = data.uniforms(config.seed, 0, (2, 3, config.new_tokens), "cpu")
    loss, found = 0.0, []
    for prompt, of_prompt in zip(prompts, numbers, strict=True):
        log_p, said = [], []
        for of_reply in of_prompt.tolist():
            sequence, total = prompt, torch.zeros((), dtype=torch.float64)
            for number in of_reply:
                p = (trainer.model(sequence[None])[0, -1] / config.temperature).softmax(0)
                order = p.argsort(descending=True)
                keep = order[: 1 + int((p[order].cumsum(0) < config.top_p).sum())].sort().values
                kept = p[keep] / p[keep].sum()
                token = keep[int((kept.cumsum(0) <= number).sum().clamp(max=len(keep) - 1))]
                total = total + kept[keep == token].log().squeeze()
                sequence = torch.cat((sequence, token[None]))
                if int(token) == given.chat.end:
                    break
            log_p.append(total)
            said.append(given.chat.decode(sequence[len(prompt) :].tolist()))
        e = trainer.sentences.encoder(*trainer.sentences.tokenized(said, "cpu"))
        distances = 1 - torch.nn.functional.cosine_similarity(e[:, None], e[None], dim=-1)
        d = [distances[i, j] for i, j in ((1, 2), (0, 2), (0, 1))]
        whole = sum(d) / 3
        found.append(float(whole))
        loss = loss - config.diversity / 2 * sum((whole - rest) * own for rest, own in zip(d, log_p, strict=True))
    assert diversity == pytest.approx(sum(found) / 2)
    expected = torch.autograd.grad(loss, list(trainer.weights.values()))
    for got, right in zip(grads, expected, strict=True):
        torch.testing.assert_close(got, right, atol=1e-10, rtol=1e-7)
    assert max(float(g.abs().max()) for g in grads) > 1e-4


@pytest.mark.parametrize("kind", [Reference, Optimized])
def test_resuming_is_bit_identical(kind, given):
    whole = trained(kind, given, count=4)
    other = kind(SMALL, given, "cpu")
    other.load_state_dict(through_a_file(trained(kind, given, count=2)))
    for _ in range(2):
        other.train_window({})
    assert same(whole.state_dict(), other.state_dict())


def test_each_trainer_resumes_from_a_checkpoint_of_the_other(given, known):
    for first, second in ((Reference, Optimized), (Optimized, Reference)):
        trainer = second(SMALL, given, "cpu")
        trainer.load_state_dict(through_a_file(trained(first, given, count=4)))
        rest = torch.cat((known[0][:4], curve(trainer, 4)))
        assert share_of_budget(rest, first_points(known, 8)) <= 1


def test_checkpoint_with_another_adapter_rank_is_rejected(given):
    state = trained(Reference, given, count=1).state_dict()
    with pytest.raises(ValueError, match="lora_a has shape"):
        Optimized(dataclasses.replace(SMALL, rank=2), given, "cpu").load_state_dict(state)


def test_rows_hold_each_prompt_followed_by_its_reply():
    prompts = Prompts(torch.tensor([[5, 6, 0], [7, 8, 9]]), torch.tensor([2, 3]))
    rows = rows_of(prompts, torch.tensor([[[3, 4], [1, 1]], [[4, 1], [-1, 1]]]), end=1)
    assert rows.tokens.tolist() == [[5, 6, 3, 4, 1], [5, 6, 1, 1, 1], [7, 8, 9, 4, 1], [7, 8, 9, 0, 1]]
    assert rows.before.tolist() == [[1, 2], [1, 2], [2, 3], [2, 3]]
    assert rows.sampled.tolist() == [[True, True], [True, False], [True, True], [True, True]]


def test_nucleus_always_contains_the_sampled_token():
    logits = torch.tensor([[4.0, 3.0, 2.0, 1.0]]).log()
    for drawn_token, kept in ((0, [0, 1]), (3, [0, 1, 3])):
        found = nucleus(logits, torch.tensor([drawn_token]), temperature=0.5, top_p=0.7)
        assert [n for n in range(4) if found[0, n] > -math.inf] == kept
        torch.testing.assert_close(found.softmax(-1)[0, kept], (2 * logits[0, kept]).softmax(-1))
    found = nucleus(torch.tensor([[40.0, 39.0]]), torch.tensor([0]), temperature=1e-37, top_p=0.9)
    assert found.softmax(-1).tolist() == [[1, 0]]


def test_step_number_other_than_the_next_is_rejected(given):
    with pytest.raises(ValueError, match="step 5 was given to a trainer that has made 0"):
        Reference(SMALL, given, "cpu").train_window({"step": torch.tensor(5)})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"replies": 2}, "replies=2: a reply's part in the diversity needs 3 or more"),
        ({"prompts": 5}, r"prompts=5: a step has 4 examples \(batch_size x accumulation\)"),
        ({"top_p": 0.0}, "top_p=0.0: use a number above 0, at most 1"),
        ({"temperature": 0.0}, "temperature=0.0: use"),
        ({"diversity": -1.0}, "diversity=-1.0: use 0 or more"),
        ({"dropout": 1.0}, "dropout=1.0"),
        ({"quantization": "int8"}, "quantization='int8': use none or nf4"),
    ],
)
def test_invalid_config_field_is_named(fields, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(SMALL, **fields)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model": "no/such"}, r"model=no/such: it is neither a folder nor a size \(tiny, 135m, 8b\)"),
        ({"length": 600}, "length=600: the model has 512 positions; lower length"),
        (
            {"new_tokens": 500},
            "new_tokens=500: the longest prompt has .* and the model 512 positions; lower new_tokens",
        ),
        ({"length": 4}, "length=4: the shortest prompt alone has"),
        ({"synthetic": 0, "data": "no/such.jsonl"}, "cannot read no/such.jsonl"),
        ({"encoder": "no/such"}, "no/such is no folder; name one that has a sentence encoder"),
    ],
)
def test_invalid_data_setting_is_named(fields, words):
    with pytest.raises(PerfsuiteError, match=words):
        load(dataclasses.replace(DATA, **fields)).trainer_data.sentences("cpu")


def test_data_position_from_other_examples_is_rejected(given):
    steps = Steps(given, 4, 12, 0)
    state = steps.state_dict()
    steps.load_state_dict(state)
    with pytest.raises(PerfsuiteError, match="the data has changed"):
        Steps(load(dataclasses.replace(DATA, synthetic=30)).trainer_data, 4, 12, 0).load_state_dict(state)


def test_sentence_encoder_is_loaded_from_a_folder(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    made = drawn.sentences(3, "cpu")
    state = {f"bert.{name}": t for name, t in made.encoder.state_dict().items()}
    safetensors.save_file({**state, "bert.pooler.dense.bias": torch.zeros(3)}, tmp_path / "model.safetensors")
    made.tokenizer.save(str(tmp_path / "tokenizer.json"))
    shape = drawn.TINY_ENCODER
    config = {
        "model_type": "bert", "vocab_size": shape.vocabulary, "hidden_size": shape.width,
        "intermediate_size": shape.hidden, "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads,
        "max_position_embeddings": shape.positions,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(str(config).replace("'", '"'))
    found = sentences.load(tmp_path, "cpu")
    given = made.tokenized(["Hello.", ""], "cpu")
    assert given[1].tolist() == [6, 1]
    assert torch.equal(found.encoder(*found.tokenized(["Hello.", ""], "cpu")), made.encoder(*given))
    for heads, words in ((shape.width - 1, "is no multiple of"), (0, "ZeroDivisionError")):
        (tmp_path / "config.json").write_text(json.dumps({**config, "num_attention_heads": heads}))
        with pytest.raises(PerfsuiteError, match=rf"config\.json is damaged: .*{words}"):
            sentences.load(tmp_path, "cpu")
    (tmp_path / "config.json").write_text('{"model_type": "roberta"}')
    with pytest.raises(PerfsuiteError, match="model_type is 'roberta'; only encoders of BERT's architecture"):
        sentences.load(tmp_path, "cpu")


@pytest.mark.filterwarnings("ignore::FutureWarning")  # raised by transformers, through PEFT
def test_conventional_set_up_has_the_same_first_cross_entropy(given):
    """The weights are equal, and the adapters begin at 0."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("peft", reason="PEFT is not installed")
    from suite.polychromic.conventional import Conventional

    with pytest.raises(PerfsuiteError, match="the conventional set-up has no weights in 4 bits"):
        Conventional(QUANTIZED, given, "cpu", compiles=False)
    config = dataclasses.replace(SMALL, dropout=0.0)
    ours = Reference(config, given, "cpu")
    state = given.language_model(torch.float32, "cpu").state_dict()
    theirs = Conventional(config, given, "cpu", compiles=False)
    theirs.model.get_base_model().load_state_dict(
        {name.replace("_proj.weight", "_proj.base_layer.weight"): value for name, value in state.items()}, strict=False
    )
    ours.train_window({})
    theirs.train_window({})
    assert theirs.last["cross_entropy"] == pytest.approx(ours.last_report().cross_entropy, rel=1e-5)
    assert 0 < theirs.last["diversity"] < 1
