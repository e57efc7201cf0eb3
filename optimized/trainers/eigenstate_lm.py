"""The optimized trainer of eigenstate_lm, with a switch for each technique.

Its steps equal those of `reference/trainers/eigenstate_lm.py`, up to rounding and the random choice of dropped
elements. The scan and the loss have their own kernels. The rest of a block is compiled, and all blocks share the
compiled functions. With the default switches a step does not wait for the device, which computes the learning rate,
clipping, the optimizer step and the report. The host reads a report once its copy has arrived. `train_window` waits
only for older reports, so that at most AHEAD are outstanding, and for a validation.

Source: eigenstate_lm.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Subset

from optimized.compilation.compiled_function import compile_if_possible
from optimized.data.loader import Loader
from optimized.data.packed_tokens import PackedTokens
from optimized.precision.fp8_linear import fp8_linear
from suite.backends import need_fp8
from suite.eigenstate_lm.config import TrainConfig
from suite.eigenstate_lm.data import Text, next_rows
from suite.eigenstate_lm.held_out import HeldOut
from suite.eigenstate_lm.memory import naming_the_remedy
from suite.eigenstate_lm.model import (
    Linear,
    Project,
    Weights,
    block_weights,
    driven,
    fed,
    first_states,
    make_weights,
    mixed,
    scanned_by,
)
from suite.eigenstate_lm.report import Report, Throughput
from suite.eigenstate_lm.state import restore, state_of
from suite.runtime.reports import Reports
from suite.stepping import QueuesReports
from suite.techniques import implementation

AHEAD = 2
"""Steps that may be queued or running on the device when the host starts the next one."""


class Trainer(QueuesReports):
    """The optimized trainer. Its checkpoints are interchangeable with the reference trainer's.

    text  the sequences, as `suite.eigenstate_lm.data.load` opens them

    PerfsuiteError if a step needs more memory than the device has, or FP8 products and the device has none.
    """

    window_name = "step"

    def __init__(self, config: TrainConfig, text: Text, device: torch.device | str) -> None:
        self.config, self.text, self.device = config, text, torch.device(device)
        if config.fp8_linear:
            need_fp8(self.device)
        with naming_the_remedy(config, text.vocabulary, self.device):
            first = make_weights(config.seed, config.sizes(text.vocabulary))
            self.weights = {name: w.to(self.device).requires_grad_() for name, w in first.items()}
        self.lr = torch.zeros((), device=self.device)
        self.steps = 0
        self._count = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.held_out = HeldOut(config, text, self.weights)
        self._form = _form(config, self.device)
        self._choose()
        # `_whole_step` clips the gradients, so the optimizer must not clip them again.
        self.optimizer = self._scaler_step(
            list(self.weights.values()),
            self.lr,
            weight_decay=config.weight_decay,
            max_norm=float("inf"),
            scaling=config.scaling,
        )
        self._loader: _Prefetched | None = None
        if config.loader and config.packed_tokens:
            self._loader = _Prefetched(config, text)
        else:
            self._sequences = text.packed() if config.packed_tokens else text.encoded()
        self._validation = text.packed() if self.held_out.is_on else None
        self._step = self._cleanup(self._whole_step, config.cleanup_every)
        self.throughput = Throughput(config, text.vocabulary, self.device)
        self._reports: Reports[Report] = Reports(self.device, Report.stays)

    def train_window(self, batch: Mapping[str, torch.Tensor]) -> None:
        """Train one step on the next sequences, as determined by the number of steps made.

        `batch["step"]`, if given, must be that number, counted from 0; otherwise ValueError.
        """
        config, rows = self.config, next_rows(self.config, self.text, self.steps, batch)
        with naming_the_remedy(config, self.text.vocabulary, self.device), self._products():
            self._step(rows)
        self._reports.wait(AHEAD)
        if self.held_out.is_due(self.steps):
            self.held_out.validate(self.steps, self._validation, self.device, self.held_out_loss)

    def stops(self) -> str | None:
        """Return why training should end now; None if it should go on."""
        return self.held_out.stops()

    @torch.no_grad()
    def held_out_loss(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of sequences [B, T] without dropout, 0-d."""
        form = self._form._replace(dropout=0.0)
        before, after = (functools.partial(part, form) for part in (_before, _after))
        with self._products():
            return self._mean_loss(self.weights, inputs, labels, before, after)

    def state_dict(self) -> dict[str, Any]:
        """Return the checkpoint: all state that training changes, the configuration and the tokenizer."""
        return state_of(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a checkpoint's state. ValueError if a shape differs."""
        restore(self, state)
        self.steps = state["steps"]
        self._count.fill_(self.steps)

    def _choose(self) -> None:
        """Choose the implementation of each technique: optimized if its switch is on, otherwise the reference."""
        config = self.config

        def of(module: str, function: str, on: bool) -> Callable[..., Any]:
            return implementation(module, function, optimized=on)

        self._scan = of("recurrence.eigenstate_scan", "eigenstate_scan", config.eigenstate_scan)
        self._cross_entropy = of("losses.chunked_cross_entropy", "chunked_cross_entropy", config.chunked_cross_entropy)
        self._accumulated = of(
            "optimizers.gradient_accumulation", "gradient_accumulation", config.gradient_accumulation
        )
        self._clip = of("optimizers.clip_grad_norm", "clip_grad_norm", config.clip_grad_norm)
        self._one_cycle = of("optimizers.one_cycle", "one_cycle", config.one_cycle)
        self._scaler_step = of("synchronization.sync_free_scaler_step", "ScalerStep", config.sync_free_scaler_step)
        self._cleanup = of("memory.adaptive_cleanup", "adaptive_cleanup", config.adaptive_cleanup)
        self._products = of("precision.tf32", "products", config.tf32)
        parts = (_before, _mixed, _fed, _after)
        self._before, self._mixed, self._fed, self._after = (
            _compiled(self._form, part) if config.use_compile else functools.partial(part, self._form) for part in parts
        )

    # --- a step

    def _whole_step(self, rows: torch.Tensor) -> None:
        config = self.config
        inputs, labels = self._batch(rows)
        leaves, scale = list(self.weights.values()), self.optimizer.scale.clone()
        loss, grads = self._accumulated(self._loss, leaves, (inputs, labels), config.batch_size)
        with torch.no_grad():
            # The scale can differ from 1 in every precision: after a step with non-finite gradients, or if a run in
            # float16 is resumed.
            torch._foreach_div_(grads, scale)
            norm = self._clip(grads, config.clip)
            torch._foreach_mul_(grads, scale)
            count = self._count.clamp(max=config.steps - 1)  # after the schedule's end, keep its last rate
            self.lr.copy_(self._one_cycle(count, config.steps, config.learning_rate)[0])
            self.optimizer(grads)
        self._count.add_(1)
        self.steps += 1
        step = self.steps

        def read(whole: torch.Tensor) -> Report:
            values = whole.tolist()
            return Report(step=step, loss=values[0], rate=values[1], norm=values[2], scale=values[3])

        self._reports.send(torch.stack((loss / scale, self.lr, norm, scale)), read)

    def _batch(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (inputs, labels), int64 [rows, T] each, on the device."""
        found = self._loader.batch(self.steps) if self._loader is not None else self._sequences.batch(rows)
        inputs, labels = map(self._to_device, found)
        return inputs, labels

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy to the device asynchronously, from pinned memory.

        A copy from pageable memory would wait for all queued work.
        """
        pinned = tensor if self.device.type == "cpu" else tensor.pin_memory()
        return pinned.to(self.device, non_blocking=True)

    def _loss(self, leaves: Sequence[torch.Tensor], inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of sequences [B, T], times the loss scale, 0-d."""
        weights = dict(zip(self.weights, leaves, strict=True))
        after = self._recomputed if self.config.activation_checkpoint else self._after
        return self._mean_loss(weights, inputs, labels, self._before, after) * self.optimizer.scale

    def _recomputed(self, own: Weights, x: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        """Apply the part of a block after the scan; the backward pass recomputes its two linear layers."""
        x = self._mixed(own, x, real)
        again: torch.Tensor = checkpoint(
            self._fed, own, x, use_reentrant=False, preserve_rng_state=self.config.dropout > 0
        )
        return again

    def _mean_loss(
        self,
        weights: Weights,
        inputs: torch.Tensor,
        labels: torch.Tensor,
        before: Callable[..., torch.Tensor],
        after: Callable[..., torch.Tensor],
    ) -> torch.Tensor:
        x = functional.embedding(inputs, weights["embedding"])
        states = first_states(self.config.sizes(self.text.vocabulary), len(inputs), self.device)
        for layer, state in enumerate(states):
            own = block_weights(weights, layer)
            real, _ = self._scan(before(own, x), scanned_by(own), state)
            x = after(own, x, real)
        with self._form.precision(self._form.device):
            loss = self._cross_entropy(x.flatten(0, 1), weights["embedding"], labels.flatten())
        mean: torch.Tensor = loss.float()
        return mean

    def _metrics_of(self, report: Report | None) -> Mapping[str, float] | None:
        """Return the metrics of a step and of the last validation; None without a report."""
        found = super()._metrics_of(report)
        return None if found is None else {**found, **self.held_out.metrics()}


def _training(text: Text) -> Any:
    """Return the training sequences as a map-style data set."""
    every = PackedTokens(text.pack.path, text.length)
    return Subset(every, text.training.tolist()) if text.held_out else every


class _Prefetched:
    """Batches in step order, prefetched by persistent workers."""

    def __init__(self, config: TrainConfig, text: Text) -> None:
        self._loader = Loader(
            _training(text),
            config.sequences,
            workers=config.num_workers,
            seed=config.seed,
            drop_last=True,
            prefetch=config.prefetch_factor,
        )
        self._next = -1
        self._batches: Iterator[tuple[torch.Tensor, ...]] = iter(())

    def batch(self, step: int) -> tuple[torch.Tensor, ...]:
        """Return (inputs, labels) of a step, counted from 0.

        If it is not the next step, its epoch is restarted, and the steps before it are skipped.
        """
        epoch, place = divmod(step, len(self._loader))
        if step != self._next or not place:
            self._batches = self._loader.epoch(epoch)
            for _ in range(place):
                next(self._batches)
        self._next = step + 1
        return next(self._batches)


# --- the network ----------------------------------------------------------------------------------------------------


class _Form(NamedTuple):
    """Options of a block. They are constants of its compiled function."""

    device: str
    dropout: float
    project: Project
    linear: Linear
    """The two linear layers of a block's second half."""
    precision: Callable[[str], AbstractContextManager[object]]
    """Context of the network's dtype, given the type of the device."""
    tf32: bool
    """Part of the cache key, because torch.compile reads this setting of PyTorch's."""


def _form(config: TrainConfig, device: torch.device) -> _Form:
    low = "autocast_fp16" if config.autocast_fp16 else "autocast_bf16"
    project = implementation(
        "recurrence.fused_output_projection", "fused_output_projection", optimized=config.fused_output_projection
    )
    return _Form(
        device=device.type,
        dropout=config.dropout,
        project=project,
        linear=_in_fp8 if config.fp8_linear else functional.linear,
        precision=implementation(f"precision.{low}", "context", optimized=getattr(config, low)),
        tf32=config.tf32,
    )


@functools.cache
def _compiled(form: _Form, part: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """Compile a part of a block once for all trainers, since it depends only on its arguments."""

    def call(*tensors: Any) -> torch.Tensor:
        return part(form, *tensors)

    # Dynamo caches only a few specialisations per code object, so each form gets its own code object.
    call.__code__ = call.__code__.replace()
    # `deterministic` turns off autotuning, with which a resumed run could choose a kernel that rounds differently.
    # Without `mix_order_reduction`, layer norm's two reductions are separate kernels, and its backward takes a third of
    # the time.
    options = {"deterministic": True, "triton.mix_order_reduction": False}
    return compile_if_possible(
        call, "eigenstate_lm's blocks", quiet_calls=True, fullgraph=True, dynamic=False, options=options
    )


def _before(form: _Form, own: Weights, x: torch.Tensor) -> torch.Tensor:
    """Compute the scan's inputs."""
    with form.precision(form.device):
        return driven(own, x)


def _mixed(form: _Form, own: Weights, x: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    with form.precision(form.device):
        return mixed(own, x, real, form.project, functools.partial(_drop, form))


def _fed(form: _Form, own: Weights, x: torch.Tensor) -> torch.Tensor:
    with form.precision(form.device):
        return fed(own, x, functools.partial(_drop, form), form.linear)


def _after(form: _Form, own: Weights, x: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """Compute the part of a block after the scan."""
    return _fed(form, own, _mixed(form, own, x, real))


def _in_fp8(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return fp8_linear(x.bfloat16(), weight.bfloat16(), bias.bfloat16())


def _drop(form: _Form, x: torch.Tensor) -> torch.Tensor:
    return functional.dropout(x, form.dropout) if form.dropout else x
