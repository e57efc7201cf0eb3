"""Claims C40 to C46 of polychromic, each with its measurement. C45 does not exist."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from perfsuite.report import units
from suite import ablation
from suite.ablation import Ratio
from suite.claims.measuring import interleaved, largest, typical, within
from suite.claims.record import CONFIRMED, DEPENDS, EXCEEDED, REFUTED, UNMEASURED, Answer, Checks
from suite.polychromic.config import DTYPES, TrainConfig
from suite.polychromic.data import Data, load
from suite.polychromic.drawn import SHAPES
from suite.polychromic.trial import MINILM, language_model, sentence_encoder
from suite.techniques import implementation

CHECKS = Checks()
WIDTH = MINILM["heads"] * MINILM["head_width"]
"""Width of an embedding of all-MiniLM-L6-v2."""
REPLIES = (3, 10, 128, 1024)
LENGTHS = (128, 512, 2048)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Device, model and configuration of the measurements."""

    device: torch.device
    model: str = "135m"
    config: TrainConfig = dataclasses.field(default_factory=lambda: TrainConfig(dtype="bfloat16"))
    rounds: int = 7
    steps: int = 3
    """Steps of a run whose weights are compared."""
    prompts: int = 64
    """Number of prompts; both implementations draw three replies to each."""
    drawn_tokens: int = 20
    """Tokens of each of these replies."""


def setting(device: torch.device) -> Setting:
    """Return the source's step with a model of 135 million parameters on a GPU, and with a tiny model elsewhere."""
    if device.type == "cuda":
        return Setting(device=device)
    small = TrainConfig(length=48, batch_size=2, accumulation=2, prompts=2, new_tokens=6, rank=4, learning_rate=5e-3)
    return Setting(device=device, model="tiny", config=small, rounds=3, prompts=16)


# --- the objective --------------------------------------------------------------------------------------------------


@CHECKS("C40", "The diversity term shapes the training.")
def shapes(s: Setting) -> Answer:
    few = dataclasses.replace(s.config, prompts=min(2, s.config.examples), new_tokens=min(8, s.config.new_tokens))
    arms = {
        "without": dataclasses.replace(few, diversity=0.0),
        "written": dataclasses.replace(few, objective="as_written"),
        "policy": few,
    }
    ends = {name: _weights_after(s, config) for name, config in arms.items()}
    written, policy = (_furthest(ends[name], ends["without"]) for name in ("written", "policy"))
    text = (
        f"as the source writes it, the diversity is a number without a gradient: after {s.steps} steps with λ = "
        f"{few.diversity} and with λ = 0 the weights {_differ(written)}. With the gradient of its expectation they "
        f"{_differ(policy)}"
    )
    return (REFUTED if written == 0 < policy else CONFIRMED if written else UNMEASURED), text


# --- where the time goes --------------------------------------------------------------------------------------------


@CHECKS("C41", "Generation is 70% of the overhead, and the diversity 20%.", gpu=True)
def shares(s: Setting) -> Answer:
    config = s.config
    generate = implementation("generation.batched_generation", "batched_generation", optimized=False)
    model = _model(s)
    prompt, length = torch.zeros(1, 32, dtype=torch.int64, device=s.device), torch.tensor([32], device=s.device)
    numbers = torch.rand(1, 1, config.new_tokens, generator=torch.Generator().manual_seed(0)).to(s.device)
    one = functools.partial(_ungraded, generate, model, prompt, length, numbers, end=-1)
    generating = interleaved(s.device, 2, {"reply": one}, count=1)["reply"]
    encoder, embedded = sentence_encoder(**MINILM).to(s.device), _sets(config, s.device)
    found = interleaved(s.device, s.rounds, {"diversity": functools.partial(_diversity, encoder, *embedded)}, count=5)
    replies = config.prompts * config.replies
    generation, diversity = replies * median(generating), median(found["diversity"])
    share = 100 * diversity / (generation + diversity)
    text = (
        f"{replies} replies of {config.new_tokens} tokens, one after another and without a cache, take "
        f"{units.seconds(generation)}; their embeddings by an encoder of all-MiniLM-L6-v2's size, set by set, with all "
        f"distances {units.seconds(diversity)}: {share:.2g}% of both"
    )
    return (CONFIRMED if 10 <= share <= 30 else REFUTED), text


@CHECKS("C42", "A Triton kernel for the pairwise distances is 2 to 3 times as fast.", gpu=True)
def kernel(s: Setting) -> Answer:
    gains, rows = {}, []
    for count in REPLIES:
        embeddings = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(0)).to(s.device)
        calls = {
            name: functools.partial(implementation("diversity.pairwise_cosine", "pairwise_cosine", optimized=on), x)
            for name, on, x in (("plain", False, embeddings), ("fast", True, embeddings))
        }
        found = interleaved(s.device, s.rounds, calls)
        gains[count] = ablation.paired(found["plain"], found["fast"])
        rows.append(
            f"{count} replies take {typical(found['plain'])} and {typical(found['fast'])}, {_times(gains[count])}"
        )
    text = f"{'; '.join(rows)}. A few replies take the time of a launch"
    verdict, text = within(gains[10].low, gains[10].high, 2, 3, text, nothing=1)
    if verdict in (REFUTED, EXCEEDED) and any(2 <= gain.value <= 3 for gain in gains.values()):
        return DEPENDS, f"on how many replies a set has: {text}"
    return verdict, text


@CHECKS("C43", "FlashAttention trains 1.5 to 2 times as fast.", gpu=True)
def attention(s: Setting) -> Answer:
    shape, dtype = SHAPES[s.model], DTYPES[s.config.dtype]
    rows = []
    for length in LENGTHS:
        q, k, v = (
            torch.randn(2, heads, length, shape.head_width, device=s.device, dtype=dtype).requires_grad_()
            for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
        )
        calls = {
            name: functools.partial(
                _both_ways, implementation("attention.flash_attention", "flash_attention", optimized=on), q, k, v
            )
            for name, on in (("plain", False), ("flash", True))
        }
        found = interleaved(s.device, s.rounds, calls)
        rows.append(f"{length} tokens {_times(ablation.paired(found['plain'], found['flash']))}")
    steps = {}
    others: dict[str, Any] = dict.fromkeys(
        ("fused_blocks", "packed_examples", "cuda_graph_step"), False
    )  # these need flash_attention
    for name, on in (("plain", False), ("flash", True)):
        config = dataclasses.replace(s.config, flash_attention=on, **others)
        steps[name] = functools.partial(_trainer(s, config).train_window, {})
    found = interleaved(s.device, s.rounds, steps, count=1)
    gain = ablation.paired(found["plain"], found["flash"])
    text = (
        f"a step takes {typical(found['plain'])} without it and {typical(found['flash'])} with it, {_times(gain)}. "
        f"Attention alone, forward and backward, of two rows: {'; '.join(rows)}"
    )
    return within(gain.low, gain.high, 1.5, 2, text, nothing=1)


# --- when, and which replies ----------------------------------------------------------------------------------------


@CHECKS("C44", "Generation runs during evaluation, too.")
def in_evaluation(s: Setting) -> Answer:
    try:
        calls = _losses_in_evaluation()
    except ImportError as error:
        return UNMEASURED, f"transformers' Trainer cannot be imported: {str(error).strip().splitlines()[0]}"
    text = (
        f"transformers' Trainer, which the source's is made from, calls compute_loss {calls} times to evaluate 4 "
        "examples one by one: a loss that draws replies draws them there. Here the held-out loss draws none, and the "
        "held-out diversity is measured apart"
    )
    return (CONFIRMED if calls else REFUTED), text


@CHECKS("C46", "Batched generation gives what sequential generation gives.")
def same_replies(s: Setting) -> Answer:
    torch.manual_seed(0)
    model = language_model(vocabulary=512, layers=2, groups=2, kv_heads=2, pairs=16).to(s.device)
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 17, (s.prompts,), generator=generator).to(s.device)
    prompts = torch.randint(512, (s.prompts, 16), generator=generator).to(s.device)
    numbers = torch.rand(s.prompts, 3, s.drawn_tokens, generator=generator).to(s.device)
    apart = {}
    for name, top_p in (("drawn", 0.9), ("greedy", 1e-6)):
        plain, fast = (
            _ungraded(
                implementation("generation.batched_generation", "batched_generation", optimized=on),
                model, prompts, lengths, numbers, top_p=top_p, end=-1,
            )
            for on in (False, True)
        )  # fmt: skip
        apart[name] = int((plain != fast).any(-1).sum())
    count = 3 * s.prompts
    text = (
        f"with the same random numbers {apart['drawn']} of {count} replies of {s.drawn_tokens} tokens differ, in "
        f"float32, and {apart['greedy']} of as many greedy ones"
    )
    if apart["greedy"]:
        return REFUTED, text
    return (CONFIRMED if apart["drawn"] <= count // 1000 else DEPENDS), text


# --- helpers --------------------------------------------------------------------------------------------------------


def _trainer(s: Setting, config: TrainConfig, *, optimized: bool = True) -> Any:
    examples = max(40, 2 * config.examples)
    data = Data(
        model=s.model, synthetic=examples, length=config.length, batch_size=config.batch_size,
        accumulation=config.accumulation, steps=config.steps, new_tokens=config.new_tokens,
    )  # fmt: skip
    make = implementation("trainers.polychromic", "Trainer", optimized=optimized)
    return make(config, load(data).trainer_data, s.device)


def _weights_after(s: Setting, config: TrainConfig) -> dict[str, torch.Tensor]:
    """Train the reference, whose kernels are bit-reproducible, and return its weights."""
    trainer = _trainer(s, config, optimized=False)
    for _ in range(s.steps):
        trainer.train_window({})
    return {name: weight.detach().clone() for name, weight in trainer.weights.items()}


def _furthest(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> float:
    """Return the largest absolute difference between two sets of weights."""
    return largest(float((some[name] - others[name]).abs().max()) for name in some)


def _differ(most: float) -> str:
    return f"differ by up to {most:.2g}" if most else "are the same, bit for bit"


def _times(ratio: Ratio) -> str:
    return f"{ratio.value:.3g} times as fast ({ratio.low:.3g} to {ratio.high:.3g})"


def _model(s: Setting) -> Any:
    return load(Data(model=s.model, synthetic=16)).trainer_data.language_model(DTYPES[s.config.dtype], s.device)


@torch.no_grad()
def _ungraded(call: Callable[..., torch.Tensor], *given: Any, **options: Any) -> torch.Tensor:
    return call(*given, **options)


def _both_ways(call: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> None:
    torch.autograd.grad(call(*inputs).sum(), inputs)


def _sets(config: TrainConfig, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random tokens [sets, replies, tokens] for the sets of a step, and their lengths [sets, replies]."""
    shape = (config.prompts, config.replies, config.new_tokens)
    tokens = torch.randint(MINILM["vocabulary"], shape, generator=torch.Generator().manual_seed(0))
    return tokens.to(device), torch.full(shape[:2], config.new_tokens, device=device)


def _diversity(encoder: Any, tokens: torch.Tensor, lengths: torch.Tensor) -> list[float]:
    """Compute the reference's diversity of each set; the host reads each result."""
    embed = implementation("diversity.encoder_batching", "encoder_batching", optimized=False)
    distances = implementation("diversity.pairwise_cosine", "pairwise_cosine", optimized=False)
    count = tokens.shape[1]
    return [float(distances(of_set).sum()) / (count * (count - 1)) for of_set in embed(encoder, tokens, lengths)]


def _losses_in_evaluation() -> int:
    """Return how often transformers' Trainer calls compute_loss to evaluate four examples one by one."""
    import transformers

    class Counting(transformers.Trainer):  # type: ignore[misc]  # it may not be installed
        called = 0

        def compute_loss(self, *given: Any, **options: Any) -> Any:
            self.called += 1
            return super().compute_loss(*given, **options)

    shape = transformers.LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    rows = [{"input_ids": torch.arange(4), "labels": torch.arange(4)} for _ in range(4)]
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(None):
        arguments = transformers.TrainingArguments(
            output_dir=folder, per_device_eval_batch_size=1, report_to=[], use_cpu=True, disable_tqdm=True
        )
        trainer = Counting(transformers.LlamaForCausalLM(shape), arguments, eval_dataset=rows)
        trainer.evaluate()
        return trainer.called
