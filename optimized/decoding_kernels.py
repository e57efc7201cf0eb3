"""Decoding step for one more token of each row, in a few launches per layer, for models of Llama's architecture.

A step reads every weight once and does little arithmetic with it. In PyTorch operations a layer takes about forty
launches, each of which takes longer than its arithmetic. Here, one launch computes the input of linear layers, by a
norm or a gate, and the products of this input with the adapters' first factors. A second launch computes all products
with the input, and adds those of the adapters' second factors and the residual.
"""

from typing import NamedTuple

import torch

from optimized.kernels import ceil_div, has_descriptors, jit, launching, tl, use_triton
from suite.polychromic.llama import Llama
from suite.polychromic.lora import LAYERS, LoRALinear
from suite.polychromic.lora_nf4 import NF4LoRALinear

DTYPES = (torch.float32, torch.bfloat16)
MOST_ROWS = 64
# `_linear_kernel`: outputs of a tile, inputs of an iteration in bfloat16 and in float32, warps, stages. Not yet swept.
OUTPUTS, INPUTS, WIDE_INPUTS, LINEAR_WARPS, LINEAR_STAGES = 64, 128, 32, 4, 5
# `_prepare_kernel`: elements of the adapters' first factors per program, most inputs per program, warps.
FACTORS, PREPARED, PREPARING_WARPS = 16384, 1024, 8
# `_attention_kernel`: keys of an iteration, warps.
KEYS, ATTENTION_WARPS = 64, 4
# Whether a kernel is launched before the previous one has ended (programmatic dependent launch of Hopper GPUs).
DEPENDENT = True
# tl.dot needs at least 16 rows, columns and terms.
LEAST = 16


class Adapters(NamedTuple):
    """Adapters of layers with the same input: a [layers, rank, inputs]; b [outputs of all layers, rank], scaled."""

    a: torch.Tensor
    b: torch.Tensor


class Linear(NamedTuple):
    """Linear layers with the same input, whose outputs are adjacent."""

    weights: tuple[torch.Tensor, ...]
    adapters: Adapters | None


class Layer(NamedTuple):
    """Linear layers of a block, and the weights of its norms."""

    qkv: Linear
    o: Linear
    up: Linear
    down: Linear
    before_attention: torch.Tensor
    before_mlp: torch.Tensor


def is_served(model: Llama, rows: int) -> bool:
    """Return whether these kernels can compute a step of the model for this number of rows."""
    layers = [layer for block in model.model.layers for layer in _linear_layers(block)]
    if rows > MOST_ROWS or not all(_is_dense(layer) for layer in layers):
        return False
    tensors = [model.lm_head.weight, *(layer.weight for layer in layers)]
    return use_triton(*tensors, dtypes=DTYPES) and all(t.is_contiguous() for t in tensors)


def _is_dense(layer):
    adapted = isinstance(layer, LoRALinear) and not isinstance(layer, NF4LoRALinear)
    return adapted or type(layer) is torch.nn.Linear


class Step:
    """Decoding step for one more token of each row; the caller passes the cache of keys and values."""

    def __init__(self, model: Llama, rows: int, size: int, cos: torch.Tensor, sin: torch.Tensor) -> None:
        weight = model.lm_head.weight
        self.shape, self.cos, self.sin = model.shape, cos.contiguous(), sin.contiguous()
        self.rows, self.size, self.given = rows, size, {"dtype": weight.dtype, "device": weight.device}
        self.adapted: list[LoRALinear] = []
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.layers = [self._layer(block) for block in model.model.layers]
        self.head, self.norm = Linear((weight,), None), model.model.norm.weight
        shape, D = model.shape, model.shape.head_width
        self.states = torch.empty(2, rows, shape.width, **self.given)
        self.qkv = torch.empty(rows, (shape.heads + 2 * shape.kv_heads) * D, **self.given)
        self.wide = torch.empty(rows, 2 * shape.hidden, **self.given)
        # Inputs of linear layers, padded with rows of zeros.
        filled = _block(rows)
        self.normed, self.attended, self.gated = (
            torch.zeros(filled, n, **self.given) for n in (shape.width, shape.heads * D, shape.hidden)
        )
        # Products of the inputs with the adapters' first factors, one partial sum for each part of the inputs.
        self.rank = max((layer.qkv.adapters.a.shape[1] for layer in self.layers if layer.qkv.adapters), default=0)
        self.part = min(PREPARED, FACTORS // _block(max(self.rank, 1)))
        self.low = torch.zeros(
            ceil_div(max(shape.width, shape.heads * D, shape.hidden), self.part),
            3,
            filled,
            self.rank,
            dtype=torch.float32,
            device=weight.device,
        )
        self.launch = {"launch_pdl": True} if DEPENDENT and weight.is_cuda and has_descriptors(weight) else {}

    def take_adapters(self) -> None:
        """Copy the current adapters, in the dtype of the weights and with scaled second factors (0 if switched off)."""
        if self.adapted:
            given = ((layer.lora_a, layer.lora_b) for layer in self.adapted)
            first, second = (list(copies) for copies in zip(*self.copies, strict=True))
            sources = [list(parts) for parts in zip(*given, strict=True)]
            torch._foreach_copy_([*first, *second], [*sources[0], *sources[1]])
            torch._foreach_mul_(second, [0.0 if layer.is_off else layer.scale for layer in self.adapted])

    def __call__(
        self, x: torch.Tensor, positions: torch.Tensor, cache: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> torch.Tensor:
        """Return the logits [rows, vocabulary] after embedded tokens x [rows, width] at their positions [rows]."""
        states = self.states
        for layer, (keys, values) in zip(self.layers, cache, strict=True):
            self._prepare(x, self.normed, layer.qkv, norm=layer.before_attention)
            self._linear(layer.qkv, self.normed, self.qkv)
            self._attend(keys, values, positions)
            if layer.o.adapters:
                self._prepare(self.attended[: self.rows], None, layer.o)
            self._linear(layer.o, self.attended, states[0], residual=x)
            self._prepare(states[0], self.normed, layer.up, norm=layer.before_mlp)
            self._linear(layer.up, self.normed, self.wide)
            self._prepare(self.wide, self.gated, layer.down)
            self._linear(layer.down, self.gated, states[1], residual=states[0])
            x = states[1]
        self._prepare(x, self.normed, self.head, norm=self.norm)
        return self._linear(self.head, self.normed, torch.empty(self.rows, self.shape.vocabulary, **self.given))

    def _prepare(
        self, x: torch.Tensor, out: torch.Tensor | None, linear: Linear, norm: torch.Tensor | None = None
    ) -> None:
        """Compute the input of the linear layers in `out`, and its products with the adapters' first factors in `low`.

        With a norm, the input is x normalized. Without one, it is the gated product of the two halves of x. If `out` is
        None, the input is x itself.
        """
        inputs = linear.weights[0].shape[1]
        adapters = linear.adapters
        with launching(x):
            _prepare_kernel[(self.rows, ceil_div(inputs, self.part), len(linear.weights) if adapters else 1)](
                x,
                norm,
                adapters.a if adapters else None,
                out,
                self.low,
                inputs,
                self.low.shape[2],
                self.shape.eps,
                self.rank,
                NORMED=norm is not None,
                GATED=norm is None and out is not None,
                ADAPTED=adapters is not None,
                WRITES=out is not None,
                WHOLE=_block(inputs),
                INPUTS=self.part,
                RANK=_block(max(self.rank, 1)),
                DEPENDENT=bool(self.launch),
                num_warps=PREPARING_WARPS,
                **self.launch,
            )

    def _linear(
        self, linear: Linear, x: torch.Tensor, out: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Write the adjacent outputs of the linear layers to `out`, with the residual added; return `out`."""
        weights, adapters = linear
        sizes = [len(weight) for weight in weights]
        first, second, third = (*weights, *[weights[0]] * (3 - len(weights)))
        n0, n1, n2 = (*sizes, *[0] * (3 - len(sizes)))
        inputs = weights[0].shape[1]
        step = INPUTS if x.dtype == torch.bfloat16 else WIDE_INPUTS
        with launching(x):
            _linear_kernel[(sum(ceil_div(n, OUTPUTS) for n in sizes),)](
                x,
                first,
                second,
                third,
                self.low,
                adapters.b if adapters else None,
                residual,
                out,
                self.rows,
                inputs,
                n0,
                n1,
                n2,
                self.rank,
                ADAPTED=adapters is not None,
                ADDS=residual is not None,
                EVEN=inputs % step == 0,
                ROWS=len(x),
                OUTPUTS=OUTPUTS,
                INPUTS=step,
                RANK=_block(max(self.rank, 1)),
                PARTS=ceil_div(inputs, self.part),
                DEPENDENT=bool(self.launch),
                num_warps=LINEAR_WARPS,
                num_stages=LINEAR_STAGES,
                **self.launch,
            )
        return out

    def _attend(self, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor) -> None:
        shape = self.shape
        groups = shape.heads // shape.kv_heads
        with launching(self.qkv):
            _attention_kernel[(self.rows, shape.kv_heads)](
                self.qkv,
                keys,
                values,
                self.cos,
                self.sin,
                positions,
                self.attended,
                self.size,
                shape.head_width**-0.5,
                KV_HEADS=shape.kv_heads,
                GROUPS=groups,
                QUERIES=_block(groups),
                WIDTH=shape.head_width,
                COLUMNS=_block(shape.head_width),
                KEYS=KEYS,
                DEPENDENT=bool(self.launch),
                num_warps=ATTENTION_WARPS,
                **self.launch,
            )

    def _layer(self, block: torch.nn.Module) -> Layer:
        q, k, v, o, gate, up, down = _linear_layers(block)
        together = [self._together(*own) for own in ((q, k, v), (o,), (gate, up), (down,))]
        return Layer(*together, block.input_layernorm.weight, block.post_attention_layernorm.weight)

    def _together(self, *layers: torch.nn.Module) -> Linear:
        weights = tuple(layer.weight for layer in layers)
        if not isinstance(layers[0], LoRALinear):
            return Linear(weights, None)
        rank, inputs = layers[0].lora_a.shape
        a = torch.empty(len(layers), rank, inputs, **self.given)
        b = torch.empty(sum(len(w) for w in weights), rank, **self.given)
        self.adapted += layers
        self.copies += zip(a, b.split([len(w) for w in weights]), strict=True)
        return Linear(weights, Adapters(a, b))


def _linear_layers(block):
    """Return the linear layers of a block, in the order of LAYERS."""
    return [getattr(block.self_attn, name, None) or getattr(block.mlp, name) for name in LAYERS]


def _block(size):
    return max(LEAST, 1 << (size - 1).bit_length())


@jit
def _wait(DEPENDENT: tl.constexpr):
    """Wait for the previous kernel, which may still run, and let the next one start."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@jit
def _prepare_kernel(
    x_ptr, norm_ptr, a_ptr, out_ptr, low_ptr,
    inputs, low_rows, eps, rank,
    NORMED: tl.constexpr, GATED: tl.constexpr, ADAPTED: tl.constexpr, WRITES: tl.constexpr, WHOLE: tl.constexpr,
    INPUTS: tl.constexpr, RANK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Compute out = x / sqrt(mean(x^2) + eps) * norm (NORMED) or silu(gate) * up (GATED) or x, and low = a @ out.

    Program (row, part, layer) computes INPUTS inputs of one row, and their products with the [RANK, INPUTS] tile of the
    layer's first factor `a`. `_linear_kernel` adds up the parts of `low`. Only layer 0 stores `out`.
    """
    row = tl.program_id(0)
    part = tl.program_id(1)
    layer = tl.program_id(2)
    k = tl.arange(0, RANK)
    x_ptr += row.to(tl.int64) * inputs * (2 if GATED else 1)
    dtype = x_ptr.dtype.element_ty
    i = part * INPUTS + tl.arange(0, INPUTS)
    inside = i < inputs
    if ADAPTED:
        a = tl.load(
            a_ptr + (layer * rank + k)[:, None] * inputs + i[None, :],
            mask=(k < rank)[:, None] & inside[None, :],
            other=0.0,
        )
    _wait(DEPENDENT)
    x = tl.load(x_ptr + i, mask=inside, other=0.0)
    if NORMED:
        # Each program computes the norm of the whole row, which takes less time than another launch.
        whole = tl.arange(0, WHOLE)
        squares = tl.load(x_ptr + whole, mask=whole < inputs, other=0.0).to(tl.float32)
        factor = tl.rsqrt(tl.sum(squares * squares, 0) / inputs + eps)
        norm = tl.load(norm_ptr + i, mask=inside, other=0.0).to(tl.float32)
        x = ((x.to(tl.float32) * factor).to(dtype).to(tl.float32) * norm).to(dtype)
    if GATED:
        gate = x.to(tl.float32)
        up = tl.load(x_ptr + inputs + i, mask=inside, other=0.0).to(tl.float32)
        x = ((gate * tl.sigmoid(gate)).to(dtype).to(tl.float32) * up).to(dtype)
    if WRITES:
        tl.store(out_ptr + row.to(tl.int64) * inputs + i, x, mask=inside & (layer == 0))
    if ADAPTED:
        low = tl.sum(a.to(tl.float32) * x.to(tl.float32)[None, :], 1)
        tl.store(low_ptr + ((part * 3 + layer) * low_rows + row) * rank + k, low, mask=k < rank)


@jit
def _linear_kernel(
    x_ptr, first_ptr, second_ptr, third_ptr, low_ptr, b_ptr, residual_ptr, out_ptr,
    rows, inputs, n0, n1, n2, rank,
    ADAPTED: tl.constexpr, ADDS: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr, RANK: tl.constexpr, PARTS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Compute out = W @ x + b @ low + residual for up to three weights W, whose outputs are adjacent in `out`.

    A program computes OUTPUTS outputs of one weight for all rows, as the tile [OUTPUTS, ROWS]. It loops over the inputs
    in steps of INPUTS.
    """
    tile = tl.program_id(0)
    tiles_0, tiles_1 = tl.cdiv(n0, OUTPUTS), tl.cdiv(n1, OUTPUTS)
    w_ptr, outputs, before, part, layer = first_ptr, n0, 0, tile, 0
    if tile >= tiles_0 + tiles_1:
        w_ptr, outputs, before, part, layer = third_ptr, n2, n0 + n1, tile - tiles_0 - tiles_1, 2
    elif tile >= tiles_0:
        w_ptr, outputs, before, part, layer = second_ptr, n1, n0, tile - tiles_0, 1
    r = tl.arange(0, ROWS)
    o = part * OUTPUTS + tl.arange(0, OUTPUTS)
    i = tl.arange(0, INPUTS)
    # Past the last output, the first output is computed again and not stored. The loads then need no mask.
    w_row = w_ptr + tl.where(o < outputs, o, 0).to(tl.int64)[:, None] * inputs
    x_row = x_ptr + r[:, None] * inputs
    k = tl.arange(0, RANK)[None, :]
    if ADAPTED:
        b = tl.load(b_ptr + (before + o)[:, None] * rank + k, mask=(o < outputs)[:, None] & (k < rank), other=0.0)
    _wait(DEPENDENT)
    if ADAPTED:
        low = tl.zeros((ROWS, RANK), tl.float32)
        for p in tl.static_range(PARTS):
            low += tl.load(low_ptr + ((p * 3 + layer) * ROWS + r)[:, None] * rank + k, mask=k < rank, other=0.0)
    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for start in range(0, inputs, INPUTS):
        at = (start + i)[None, :]
        if EVEN:
            w, x = tl.load(w_row + at), tl.load(x_row + at)
        else:
            w = tl.load(w_row + at, mask=at < inputs, other=0.0)
            x = tl.load(x_row + at, mask=at < inputs, other=0.0)
        total = tl.dot(w, tl.trans(x), total, input_precision="ieee")
    if ADAPTED:
        total = tl.dot(b, tl.trans(low.to(b.dtype)), total, input_precision="ieee")
    place = r.to(tl.int64)[None, :] * (n0 + n1 + n2) + (before + o)[:, None]
    inside = (r < rows)[None, :] & (o < outputs)[:, None]
    if ADDS:
        total += tl.load(residual_ptr + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=inside)


@jit
def _rotated(x_ptr, at, cos, sin, mask, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Return heads rotated to their position, in float32."""
    d = tl.arange(0, COLUMNS)
    half = WIDTH // 2
    other = tl.where(d < half, d + half, d - half)
    x = tl.load(x_ptr + at + d, mask=mask, other=0.0).to(tl.float32)
    beside = tl.load(x_ptr + at + other, mask=mask, other=0.0).to(tl.float32)
    return x * cos + tl.where(d < half, -beside, beside) * sin


@jit
def _attention_kernel(
    qkv_ptr, keys_ptr, values_ptr, cos_ptr, sin_ptr, positions_ptr, out_ptr,
    size, scale,
    KV_HEADS: tl.constexpr, GROUPS: tl.constexpr, QUERIES: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    KEYS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Compute out = softmax(scale * q k') v for one token of each row, and store its key and value in the cache.

    Queries and the new key are rotated first. Program (row, head) computes all GROUPS query heads of one key head. It
    loops over the earlier tokens in tiles of KEYS, with an online softmax.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    _wait(DEPENDENT)
    position = tl.load(positions_ptr + row)
    d = tl.arange(0, COLUMNS)[None, :]
    g = tl.arange(0, QUERIES)[:, None]
    dtype = keys_ptr.dtype.element_ty
    of_column = d < WIDTH
    cos = tl.load(cos_ptr + position * WIDTH + d, mask=of_column, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + position * WIDTH + d, mask=of_column, other=0.0).to(tl.float32)
    first = row * (GROUPS + 2) * KV_HEADS * WIDTH
    heads = GROUPS * KV_HEADS
    of_query = (g < GROUPS) & of_column
    q = _rotated(qkv_ptr, first + (head * GROUPS + g) * WIDTH, cos, sin, of_query, WIDTH, COLUMNS).to(dtype)
    key = _rotated(qkv_ptr, first + (heads + head) * WIDTH, cos, sin, of_column, WIDTH, COLUMNS).to(dtype)
    value = tl.load(qkv_ptr + first + (heads + KV_HEADS + head) * WIDTH + d, mask=of_column, other=0.0)
    cache = (row * KV_HEADS + head) * size
    tl.store(keys_ptr + (cache + position) * WIDTH + d, key, mask=of_column)
    tl.store(values_ptr + (cache + position) * WIDTH + d, value, mask=of_column)
    # The sums begin with the token's own key and value. Loading them again would race with the stores of other threads.
    most = tl.sum(q.to(tl.float32) * key.to(tl.float32), 1) * scale
    weights = tl.full((QUERIES,), 1.0, tl.float32)
    total = tl.zeros((QUERIES, COLUMNS), tl.float32) + value.to(tl.float32)
    for start in range(0, position, KEYS):
        j = start + tl.arange(0, KEYS)
        at = (cache + j)[:, None] * WIDTH + d
        inside = (j < position)[:, None] & of_column
        k = tl.load(keys_ptr + at, mask=inside, other=0.0)
        v = tl.load(values_ptr + at, mask=inside, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where((j < position)[None, :], scores, float("-inf"))
        larger = tl.maximum(most, tl.max(scores, 1))
        shrunk = tl.exp(most - larger)
        p = tl.exp(scores - larger[:, None])
        weights = weights * shrunk + tl.sum(p, 1)
        total = tl.dot(p.to(dtype), v, total * shrunk[:, None], input_precision="ieee")
        most = larger
    place = row * heads * WIDTH + (head * GROUPS + g) * WIDTH + d
    tl.store(out_ptr + place, (total / weights[:, None]).to(dtype), mask=of_query)
