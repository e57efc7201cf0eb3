"""Key-value cache of a language model, and the decoding step that adds one token to each row."""

import threading
import weakref
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.nn.functional import linear, scaled_dot_product_attention

from optimized.decoding_kernels import Step, is_served
from optimized.graphs.cuda_graph_step import CudaGraphs, CudaGraphStep
from suite.polychromic.llama import Llama, rotation, widened
from suite.polychromic.lora import LoRALinear

# The cache length is a multiple of this number of tokens, so that few lengths need their own CUDA graph.
ROUNDED_TO = 128
Then = Callable[..., Any] | None


class Caches:
    """The last cache of each live model, for each thread: threads may use one model at the same time.

    kernels  whether a step runs the kernels; None: where they are supported
    """

    def __init__(self, kernels: bool | None = None) -> None:
        self._kernels = kernels
        self._of_thread = threading.local()

    def of(self, model: Llama, rows: int, tokens: int) -> "Cache":
        """Return a cache for `rows` rows of at least `tokens` tokens each. The model's next cache may replace it."""
        size = -(-tokens // ROUNDED_TO) * ROUNDED_TO
        caches: WeakKeyDictionary[Llama, Cache] = self._of_thread.__dict__.setdefault("caches", WeakKeyDictionary())
        held = caches.get(model)
        if held is None or not held.fits(rows, size):
            caches.pop(model, None)  # frees its memory before the next one is allocated
            held = caches[model] = Cache(model, rows, size, self._kernels)
        return held


class Cache:
    """Keys and values of each layer, [rows, key heads, size, head width], at the positions of their tokens."""

    def __init__(self, model: Llama, rows: int, size: int, kernels: bool | None = None) -> None:
        self._model = weakref.ref(model)  # the cache does not keep the model alive
        shape, weight = model.shape, model.lm_head.weight
        held = torch.zeros(
            shape.layers, 2, rows, shape.kv_heads, size, shape.head_width, dtype=weight.dtype, device=weight.device
        )
        self.layers = [(keys, values) for keys, values in held]
        self._modules = [weakref.ref(module) for module in model.modules()]
        self._adapters = [known for known in self._modules if isinstance(known(), LoRALinear)]
        self._addresses, self._off = _addresses(model), frozenset[int]()
        self.rows = torch.arange(rows, device=weight.device)
        self.places = torch.arange(size, device=weight.device)
        self.kernels: Step | None = None
        if is_served(model, rows) if kernels is None else kernels:
            self.kernels = Step(model, rows, size, *rotation(shape, self.places, weight.dtype))
        # For `read` and `next`. Both are replayed as CUDA graphs that share memory, so their results are copies.
        pool = torch.cuda.graph_pool_handle() if weight.is_cuda else None
        given = {"device": weight.device, "backend": CudaGraphs(pool)}
        self._reading, self._going_on = CudaGraphStep(self._read, **given), CudaGraphStep(self._next, **given)

    @property
    def model(self) -> Llama:
        """The model, which the caller keeps alive."""
        found = self._model()
        assert found is not None
        return found

    def fits(self, rows: int, size: int) -> bool:
        """Return whether the size is the same, and the model's modules, weight addresses, dtype and device."""
        # A captured step, or one of kernels, keeps using the layers that it was built with.
        if [known() for known in self._modules] != list(self.model.modules()):
            return False
        if self._addresses != _addresses(self.model):
            return False
        weight = self.model.lm_head.weight
        held = self.layers[0][0] if self.layers else weight
        return (len(self.rows), len(self.places), held.dtype, held.device) == (rows, size, weight.dtype, weight.device)

    def read(self, prompts: torch.Tensor, lengths: torch.Tensor, times: int = 1) -> torch.Tensor:
        """Store the keys and values of prompts; return the logits after the last token of each row, [rows, vocabulary].

        The adapters are used as they are at this call.

        prompts  [rows / times, T]; each prompt fills `times` adjacent rows
        lengths  [rows / times], tokens of each prompt
        """
        self._off = frozenset(n for n, known in enumerate(self._adapters) if known().is_off)
        return self._reading(prompts, lengths, times, self._off)

    def next(self, tokens: torch.Tensor, positions: torch.Tensor, then: Then = None, *given: Any) -> Any:
        """Add a token to each row at its position, both [rows], and return `then(logits, *given)`.

        The logits, [rows, vocabulary], are those of the next token. If `then` is None, they are returned. A token of
        −1, which sampling returns if there is no distribution, is replaced by 0.
        """
        return self._going_on(tokens, positions, self._off, then, *given)

    def _read(self, prompts: torch.Tensor, lengths: torch.Tensor, times: int, _off: frozenset[int]) -> torch.Tensor:
        if self.kernels is not None:
            self.kernels.take_adapters()
        body = self.model.model
        x = body.embed_tokens(prompts)
        cos, sin = rotation(self.model.shape, self.places[: prompts.shape[1]], x.dtype)
        for block, (keys, values) in zip(body.layers, self.layers, strict=True):
            q, k, v = block.self_attn.heads(block.input_layernorm(x), cos, sin)
            keys[:, :, : prompts.shape[1]] = k.repeat_interleave(times, 0)
            values[:, :, : prompts.shape[1]] = v.repeat_interleave(times, 0)
            attended = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x = x + block.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
            x = x + block.mlp(block.post_attention_layernorm(x))
        last = x[torch.arange(len(prompts), device=prompts.device), lengths - 1]
        return self._logits(last).repeat_interleave(times, 0)

    def _next(
        self, tokens: torch.Tensor, positions: torch.Tensor, _off: frozenset[int], then: Then, *given: Any
    ) -> Any:
        logits = self._after(tokens.clamp(min=0), positions)
        return then(logits, *given) if then is not None else logits

    def _after(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        body, shape = self.model.model, self.model.shape
        x = body.embed_tokens(tokens)
        if (
            self.kernels is not None
            and x.dtype == self.layers[0][0].dtype
            and not torch.is_autocast_enabled(x.device.type)
        ):
            return self.kernels(x, positions, self.layers)
        cos, sin = (part[:, None, None] for part in rotation(shape, positions, x.dtype))
        unseen = (self.places > positions[:, None])[:, None, None]
        for block, (keys, values) in zip(body.layers, self.layers, strict=True):
            q, k, v = block.self_attn.heads(block.input_layernorm(x)[:, None], cos, sin)
            keys[self.rows, :, positions] = k[:, :, 0].to(keys.dtype)  # another dtype under autocast
            values[self.rows, :, positions] = v[:, :, 0].to(keys.dtype)
            # [rows, key heads, query heads of each, head width]: one product for all query heads of a key head.
            q = q.reshape(len(x), shape.kv_heads, -1, shape.head_width)
            scores = (q @ keys.mT * shape.head_width**-0.5).masked_fill(unseen, -torch.inf)
            weights = torch.softmax(widened(scores), -1).to(q.dtype)
            x = x + block.self_attn.o_proj((weights @ values).flatten(1))
            x = x + block.mlp(block.post_attention_layernorm(x))
        return self._logits(x)

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        return linear(self.model.model.norm(x), self.model.lm_head.weight)


def _addresses(model):
    """Return the addresses of the parameters: a CUDA graph keeps reading the captured addresses."""
    return [parameter.data_ptr() for parameter in model.parameters()]
