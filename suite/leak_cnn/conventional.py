"""A good conventional training set-up for leak_cnn, which the trainers are timed against.

It uses a PyTorch DataLoader with persistent workers and prefetched, pinned batches. The network is in channels-last
format under torch.compile, with a fused AdamW, and in bfloat16 if `autocast_bf16` is on. The host does not wait for the
device within an epoch.

`AS_SOURCE` is the starting point of the source: segments read one by one from the file, and float16 with a gradient
scaler.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, TensorDataset

from suite.batching import EpochSampler
from suite.leak_cnn.config import TrainConfig
from suite.leak_cnn.dropout import STRIDE, dropout_counter, dropout_mask
from suite.leak_cnn.loss import class_weights, leak_cnn_loss
from suite.leak_cnn.model import POOLED_ROWS, forward, make_weights

Where = Literal["file", "memory", "batches"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SetUp:
    """Options for loading batches and compiling the network.

    where     "file": read segments one by one from the HDF5 file; "memory": keep the split in host memory and fetch
              segments one by one; "batches": keep the split in host memory and fetch a whole batch at once
    workers   number of worker processes of the DataLoader
    prefetch  batches that each worker prepares ahead of time
    mode      mode of torch.compile; None: eager execution
    float16   train in float16 with `torch.amp.GradScaler` and an AdamW that is not fused
    """

    where: Where = "memory"
    workers: int = 4
    prefetch: int = 2
    mode: str | None = "reduce-overhead"
    float16: bool = False

    def __str__(self) -> str:
        loading = f"{self.workers} workers, prefetch {self.prefetch}" if self.workers else "no workers"
        return f"{self.where}, {loading}, {self.mode or 'eager'}{', float16' if self.float16 else ''}"


AS_SOURCE = SetUp(where="file", workers=8, prefetch=4, float16=True)


class Conventional:
    """Trainer with the conventional set-up. Like the two trainers, it runs epoch by epoch, but without validation.

    `close` ends its workers.
    """

    def __init__(self, config: TrainConfig, data: Any, device: torch.device | str, set_up: SetUp) -> None:
        self.config, self.device, self.set_up = config, torch.device(device), set_up
        first = make_weights(config.seed, config.channels, config.hidden)
        self.weights = {
            name: w.to(self.device, memory_format=torch.channels_last if w.ndim == 4 else torch.contiguous_format)
            for name, w in first.items()
        }
        for weight in self.weights.values():
            weight.requires_grad_()
        self.balance = class_weights(data.counts("train")).to(self.device)
        self.optimizer = torch.optim.AdamW(
            self.weights.values(), config.learning_rate, weight_decay=config.weight_decay, fused=not set_up.float16
        )
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=set_up.float16)
        self.counter = torch.full((), dropout_counter(config.seed, 0), dtype=torch.int64, device=self.device)
        self.losses: list[float] = []
        """Losses of the steps of the last epoch."""
        split = data.read("train") if set_up.where != "file" else None
        examples = data.examples("train")
        if split is not None:
            examples = TensorDataset(split.features.squeeze(1), split.labels, split.leaks)
        self.sampler = EpochSampler(len(examples), config.seed)
        options: dict[str, Any] = {"num_workers": set_up.workers, "pin_memory": self.device.type == "cuda"}
        if set_up.workers:
            options |= {"prefetch_factor": set_up.prefetch, "persistent_workers": True}
        if set_up.where == "batches":
            by_batch: Any = BatchSampler(self.sampler, config.batch_size, drop_last=True)
            self.loader: DataLoader[Any] = DataLoader(_Rows(examples), sampler=by_batch, batch_size=None, **options)
        else:
            self.loader = DataLoader(examples, config.batch_size, sampler=self.sampler, drop_last=True, **options)
        low = torch.float16 if set_up.float16 else torch.bfloat16 if config.autocast_bf16 else None
        self._loss = _compiled(set_up.mode, config.dropout, low)

    def train_window(self, batch: Mapping[str, torch.Tensor]) -> None:
        """Train the epoch with number `batch["epoch"]`, counted from 0, and wait until it is finished."""
        epoch = int(batch["epoch"])
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.rate(epoch)
        self.sampler.epoch = epoch
        self.losses = torch.stack([self._step(mel, labels) for mel, labels in self._batches()]).tolist()

    def close(self) -> None:
        """End the persistent workers."""
        self.loader._iterator = None  # the workers end when their iterator is deleted

    def _batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for mel, labels, _ in self.loader:
            yield mel.to(self.device, non_blocking=True), labels.to(self.device, non_blocking=True)

    def _step(self, mel: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self._loss(self.weights, mel, labels, self.balance, self.counter)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.weights.values(), self.config.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.counter.add_(STRIDE)
        return loss.detach().clone()


@functools.cache
def _compiled(mode: str | None, dropout: float, low: torch.dtype | None) -> Callable[..., torch.Tensor]:
    """Return the loss function of a batch with dropout, compiled once for each mode, dropout rate and dtype."""

    def call(
        weights: Mapping[str, torch.Tensor],
        mel: torch.Tensor,
        labels: torch.Tensor,
        balance: torch.Tensor,
        counter: torch.Tensor,
    ) -> torch.Tensor:
        segments = mel.float().unsqueeze(1).to(memory_format=torch.channels_last)
        keep = dropout_mask(counter, len(mel), POOLED_ROWS * len(weights["conv3.weight"]), dropout, torch.float32)
        with torch.autocast(mel.device.type, low or torch.bfloat16, enabled=low is not None):
            classes, leak = forward(weights, segments, keep)
        return leak_cnn_loss(classes.float(), leak.float(), labels, balance)

    if mode is None:
        return call
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(call, mode=mode)

    def quietly(*arguments: Any) -> torch.Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings come from the compiler's own modules
            torch.compiler.cudagraph_mark_step_begin()
            loss: torch.Tensor = compiled(*arguments)
            return loss

    return quietly


class _Rows(Dataset[Any]):
    """Data set whose items are whole batches. The index is the list of the batch's rows."""

    def __init__(self, examples: TensorDataset) -> None:
        self.tensors = examples.tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, rows: list[int]) -> tuple[torch.Tensor, ...]:
        return tuple(t[rows] for t in self.tensors)
