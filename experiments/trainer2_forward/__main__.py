"""Time variants of trainer2's forward pass on a GPU: python -m experiments.trainer2_forward [--json FILE].

Every variant is captured into a CUDA graph. The graphs are replayed in turns, and the medians of the device's times are
printed beside the floor: the products and attention alone. *error*: the RMS error of the output against float64, in
multiples of that of the present forward pass. The last table lists the kernels of the present step.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from experiments.trainer2_forward import kernels
from optimized.trainers import trainer2
from suite.trainer2.config import TrainConfig
from suite.trainer2.model import make_field, make_weights

SIZES = {
    "B 16, T 128, D 256": TrainConfig(autocast_bf16=True),
    "B 64, T 512, D 512": TrainConfig(autocast_bf16=True, batch_size=64, sequence_length=512, width=512),
}
ROUNDS, REPLAYS = 25, 8
VOCABULARY = 512
Forward = Callable[[torch.Tensor], tuple[torch.Tensor, Any]]
Tensors = Mapping[str, torch.Tensor]


@torch.library.custom_op("perfsuite_experiments::add_product", mutates_args=("z",))
def add_product(z: torch.Tensor, a: torch.Tensor, w: torch.Tensor) -> None:
    """Add a @ w.T to z, float32 [M, N], without rounding the product to a's dtype first."""
    if a.is_cuda and a.dtype is not z.dtype:
        torch.addmm(z, a, w.t(), out_dtype=z.dtype, out=z)
    else:
        z.add_((a @ w.t()).to(z.dtype))


class Problem:
    """One size: weights, embedded tokens, mask and field, and the variants of the forward pass."""

    def __init__(self, config: TrainConfig, device: str) -> None:
        self.config, self.device = config, device
        generator = torch.Generator().manual_seed(0)
        self.weights = {name: w.to(device) for name, w in make_weights(config, VOCABULARY).items()}
        blocks = {name: w for name, w in self.weights.items() if name[0].isdigit() and "norm" not in name}
        self.low = {name: w.bfloat16() for name, w in blocks.items()} if config.autocast_bf16 else blocks
        shape = config.batch_size, config.sequence_length
        tokens = torch.randint(VOCABULARY, shape, generator=generator).to(device)
        self.embedded = self.weights["embedding"][tokens]
        self.mask = torch.ones(shape, device=device)
        self.field = torch.view_as_real(make_field(config)).to(device)
        self.shifts = self._shifts()

    def _shifts(self) -> torch.Tensor:
        """Return the sums of the biases that the residual stream lacks before each norm, [2 blocks + 1, D]."""
        names = [f"{i}.{name}.bias" for i in range(self.config.blocks) for name in ("project", "contract")]
        sums = torch.stack([torch.zeros_like(self.weights[names[0]]), *(self.weights[name] for name in names)])
        return sums.cumsum(0)

    def present(self, field: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the trainer's own forward pass."""
        config = self.config
        given = self.weights, self.low, config.heads, config.blocks, self.embedded, self.mask, field
        return trainer2._forward(*given)[:2]

    def residual(
        self,
        field: torch.Tensor,
        *,
        norm: Callable[..., torch.Tensor],
        expanded: Callable[..., torch.Tensor],
        normed_product: Callable[..., torch.Tensor] | None = None,
        attention: list[SDPBackend] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a forward pass whose products add to the residual stream, which holds the sum without biases.

        norm      (z, shift, scale, bias, dtype) → layer norm of z + shift
        expanded  (a, w, bias) → gelu(a @ w.T + bias)
        normed_product  replaces both: (z, shift, scale, bias, w, its bias, gelu) → the product of the norm
        """
        config, w, low = self.config, self.weights, self.low
        (B, T, D), heads = self.embedded.shape, config.heads
        density = torch.hypot(field[..., 0], field[..., 1]).mean((0, 1)).flatten()
        shifts = self.shifts + w["condition"] @ density
        z = self.embedded.reshape(B * T, D).clone()
        dtype = low["0.qkv"].dtype
        for i in range(config.blocks):
            first = z, shifts[2 * i], w[f"{i}.norm1"], w[f"{i}.norm1.bias"]
            of_qkv, of_expand = ((low[f"{i}.{name}"], low[f"{i}.{name}.bias"]) for name in ("qkv", "expand"))
            if normed_product is None:
                qkv = functional.linear(norm(*first, dtype), *of_qkv)
            else:
                qkv = normed_product(*first, *of_qkv, gelu=False)
            q, k, v = qkv.view(B, T, 3, heads, D // heads).permute(2, 0, 3, 1, 4)
            if attention is None:
                a = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            else:
                with sdpa_kernel(attention):
                    a = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            add_product(z, a.transpose(1, 2).reshape(B * T, D), low[f"{i}.project"])
            second = z, shifts[2 * i + 1], w[f"{i}.norm2"], w[f"{i}.norm2.bias"]
            if normed_product is None:
                grown = expanded(norm(*second, dtype), *of_expand)
            else:
                grown = normed_product(*second, *of_expand, gelu=True)
            add_product(z, grown, low[f"{i}.contract"])
        output = norm(z, shifts[2 * config.blocks], w["norm"], w["norm.bias"], torch.float32).view(B, T, D)
        return output, trainer2._masked_mean(output, self.mask)

    def floor(self, field: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Run the products and attention alone. All results are returned, or the compiler would leave them out."""
        del field
        config, low = self.config, self.low
        (B, T, D), heads = self.embedded.shape, config.heads
        x, results = self.embedded.reshape(B * T, D).to(low["0.qkv"].dtype), list[torch.Tensor]()
        for i in range(config.blocks):
            qkv = functional.linear(x, low[f"{i}.qkv"], low[f"{i}.qkv.bias"]).view(B, T, 3, heads, D // heads)
            a = functional.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4), is_causal=True)
            of_heads = a.transpose(1, 2).reshape(B * T, D)
            results.append(functional.linear(of_heads, low[f"{i}.project"], low[f"{i}.project.bias"]))
            grown = functional.linear(x, low[f"{i}.expand"], low[f"{i}.expand.bias"])
            results.append(functional.linear(grown, low[f"{i}.contract"], low[f"{i}.contract.bias"]))
        return x, results

    def truth(self) -> torch.Tensor:
        """Return the output in float64."""
        double = {name: w.double() for name, w in self.weights.items()}
        config = self.config
        given = double, double, config.heads, config.blocks, self.embedded.double(), self.mask, self.field.double()
        return trainer2._forward(*given)[0]

    def variants(self, *, triton: bool = True) -> dict[str, Forward]:
        """Return name → variant. Those with kernels of their own are left out without Triton."""
        compiled: dict[str, Any] = {"norm": plain_norm, "expanded": plain_gelu}
        found: dict[str, Forward] = {
            "present": self.present,
            "residual": lambda field: self.residual(field, **compiled),
            "residual, cuDNN attention": lambda field: self.residual(
                field, **compiled, attention=[SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
            ),
        }
        if triton:
            own = compiled | {"norm": kernels.shifted_norm}
            found["residual, own norm"] = lambda field: self.residual(field, **own)
            for name, tile in kernels.TILES.items():
                fused = own | {"expanded": lambda a, w, bias, tile=tile: kernels.product_gelu(a, w, bias, tile)}
                found[f"residual, own norm, GELU in the product ({name})"] = lambda field, fused=fused: self.residual(
                    field, **fused
                )
            for name, tile in kernels.NORMED_TILES.items():
                whole = own | {"normed_product": functools.partial(kernels.norm_product, tile=tile)}
                found[f"residual, norm and GELU in the product ({name})"] = lambda field, whole=whole: self.residual(
                    field, **whole
                )
        return found


def plain_norm(
    z: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor, dtype: torch.dtype
) -> Any:
    """Return the layer norm of z + shift in another dtype, by PyTorch."""
    return functional.layer_norm(z + shift, (z.shape[-1],), scale, bias).to(dtype)


def plain_gelu(a: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return gelu(a @ w.T + bias), by PyTorch."""
    return functional.gelu(functional.linear(a, w, bias))


def captured(call: Forward, field: torch.Tensor) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """Return a graph of the call, and its output."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            call(field)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        output, _ = call(field)
    graph.replay()
    return graph, output


def medians(graphs: Mapping[str, torch.cuda.CUDAGraph]) -> dict[str, float]:
    """Return the median milliseconds of a replay of each graph; the graphs take turns."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            for _ in range(REPLAYS):
                graph.replay()
            last.record()
            last.synchronize()
            times[name].append(first.elapsed_time(last) / REPLAYS)
    return {name: statistics.median(found) for name, found in times.items()}


def compared(size: str) -> dict[str, dict[str, float]]:
    """Print the table of one size; return variant → its figures."""
    problem, graphs, outputs = Problem(SIZES[size], "cuda"), {}, {}
    for name, call in {"floor": problem.floor, **problem.variants()}.items():
        torch._dynamo.reset()
        try:
            compiled = torch.compile(call, dynamic=False)
            graphs[name], outputs[name] = captured(compiled, problem.field)
        except Exception as error:  # one variant that does not run must not hide the others
            print(f"{name}: {type(error).__name__}: {str(error).strip().splitlines()[0][:200]}")
    truth, times = problem.truth(), medians(graphs)
    rms = {
        name: float((output.double() - truth).square().mean().sqrt())
        for name, output in outputs.items()
        if name != "floor"
    }
    found = {
        name: {"ms": ms, "of floor": ms / times["floor"], "error": rms.get(name, 0.0) / rms["present"]}
        for name, ms in times.items()
    }
    print(f"\n| {size} | ms | of floor | error |\n| --- | ---: | ---: | ---: |")
    for name, row in found.items():
        print(f"| {name} | {row['ms']:.4f} | {row['of floor']:.2f} | {row['error']:.2f} |")
    return found


def kernels_of_a_step(size: str) -> None:
    """Print the kernels of the present trainer's step, by their time."""
    config = SIZES[size]
    trainer = trainer2.Trainer(config, VOCABULARY, "cuda")
    shape = config.batch_size, config.sequence_length
    batch = {"input_ids": torch.randint(VOCABULARY, shape), "attention_mask": torch.ones(shape)}
    trainer._take(batch)
    with torch.no_grad():
        for _ in range(3):
            trainer._step()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(10):
                trainer._step()
            torch.cuda.synchronize()
    rows = sorted(profile.key_averages(), key=lambda row: -row.device_time_total)
    print(f"\n| {size}: kernel | calls | µs | µs a step |\n| --- | ---: | ---: | ---: |")
    for row in rows[:28]:
        each = row.device_time_total / max(row.count, 1)
        print(f"| {row.key[:90]} | {row.count / 10:g} | {each:.1f} | {row.device_time_total / 10:.1f} |")
    print(f"together {sum(row.device_time_total for row in rows) / 10:.0f} µs a step")


def main() -> int:
    """Time all sizes; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        print("experiments.trainer2_forward: no CUDA device here", file=sys.stderr)
        return 1
    with torch.no_grad():
        found = {size: compared(size) for size in SIZES}
    for size in SIZES:
        kernels_of_a_step(size)
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
