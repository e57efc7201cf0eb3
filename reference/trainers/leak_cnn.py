"""The reference trainer of leak_cnn, a small CNN that detects leaks by their sound; plain and eager.

An epoch reads the training segments one by one from the file, in its own random order, and runs an AdamW step on each
batch. Then it evaluates every validation segment and file. The host reads the metrics after every batch.

The source leaves some choices open. This trainer makes them as follows:

* An epoch has whole batches only (7 of 5632 in 40,000 segments, as the source counts them). The segments that are left
  out differ from epoch to epoch. Validation leaves none out.
* The learning rate decays along a cosine, epoch by epoch, and reaches 0 after the last one.
* Dropout masks are hashes of the seed and the step number, so a resumed run drops the same elements as an uninterrupted
  one.
* A step with non-finite gradients changes no weight and no moment, as with `GradScaler`, in every precision.
* Both trainers share the functions for dropout, the initial weights and the class weights. This file has its own
  network and loss; those of the optimized trainer are in `suite.leak_cnn.model` and `suite.leak_cnn.loss`.
* The best weights are those with the largest macro-F1 of the validation files; on a tie, the earliest.

Source: leak_cnn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional
from torch.utils.data import DataLoader

from reference.convolution.prepare_mel_batch import prepare_mel_batch
from reference.data.loader import Loader
from reference.evaluation.file_level_eval import file_level_eval
from reference.synchronization.device_metrics import DeviceMetrics
from reference.synchronization.sync_free_scaler_step import ScalerStep
from suite.backends import deterministic_convolutions, tf32_products
from suite.leak_cnn.classes import CLASSES, LEAK
from suite.leak_cnn.config import TrainConfig
from suite.leak_cnn.dataset import Audio
from suite.leak_cnn.dropout import dropout_counter, dropout_mask
from suite.leak_cnn.loss import class_weights
from suite.leak_cnn.metrics import macro_f1
from suite.leak_cnn.model import make_weights
from suite.leak_cnn.report import Report, Validation
from suite.leak_cnn.state import best_f1_of, restore, state_of, stops

ROWS = 16
"""Rows after the adaptive pooling. A segment has 8 rows before it, so each appears twice, as in the source."""


class Trainer:
    """The reference trainer. `train_window` runs one epoch; `metrics` returns its metrics.

    data   the data set, opened and checked by `suite.leak_cnn.dataset.open_data`
    dtype  working precision: float32, or float64 for the ground truth

    PerfsuiteError if there are fewer training segments than one batch has.
    """

    window_name = "epoch"

    def __init__(
        self, config: TrainConfig, data: Audio, device: torch.device | str, dtype: torch.dtype = torch.float32
    ) -> None:
        self.config, self.data, self.device, self.dtype = config, data, torch.device(device), dtype
        initial = make_weights(config.seed, config.channels, config.hidden)
        self.weights = {name: w.to(self.device, dtype).requires_grad_() for name, w in initial.items()}
        self.balance = class_weights(data.counts("train")).to(self.device, dtype)
        self.lr = torch.zeros((), device=self.device, dtype=dtype)
        self.optimizer = ScalerStep(
            list(self.weights.values()),
            self.lr,
            weight_decay=config.weight_decay,
            max_norm=config.clip,
            scaling=config.scaling,
        )
        self.loader = Loader(
            data.examples("train"), config.batch_size, workers=config.num_workers, seed=config.seed, drop_last=True
        )
        self.steps = 0
        self.best = {name: w.detach().clone() for name, w in self.weights.items()}
        self.best_f1, self.best_epoch = -1.0, 0
        self.steps_of_epoch = data.segments("train") // config.batch_size
        self.report: Report | None = None
        self.validated: Validation | None = None

    def train_window(self, batch: Mapping[str, torch.Tensor]) -> None:
        """Train one epoch, `batch["epoch"]` (int64 [], from 0), and validate if a validation is due."""
        config, epoch = self.config, int(batch["epoch"])
        first_step, losses = self.steps, []
        metrics = DeviceMetrics(len(CLASSES), self.device)
        with tf32_products(allowed=False), deterministic_convolutions():
            self.lr.fill_(config.rate(epoch))
            for mel, labels, _ in self.loader.epoch(epoch):
                losses.append(self._step(mel, labels, metrics))
            validation = self._validation(epoch) if config.validates(epoch) else None
        self.validated = validation or self.validated
        self.report = Report(
            epoch=epoch + 1,
            rate=config.rate(epoch),
            losses=losses,
            first_step=first_step,
            training=metrics.value(),
            validation=validation,
        )

    def metrics(self) -> Mapping[str, float] | None:
        """Return the last epoch's metrics, named as by `suite.leak_cnn.report.Report`; None before the first epoch."""
        return None if self.report is None else self.report.metrics()

    def last_report(self) -> Report | None:
        """Return the last epoch's report; None before the first epoch."""
        return self.report

    def validation(self) -> Validation | None:
        """Return the last validation; None before the first."""
        return self.validated

    def state_dict(self) -> dict[str, Any]:
        """Return the checkpoint: all state that training changes, and the configuration."""
        return state_of(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a checkpoint's state. ValueError if a shape differs."""
        restore(self, state)
        self.steps = state["steps"]
        self.best_f1, self.best_epoch = best_f1_of(state), state["best"]["epoch"]

    def stops(self) -> str | None:
        """Return why training should end now; None if it should go on."""
        return stops(self)

    # --- an epoch

    @torch.enable_grad()
    def _step(self, mel: torch.Tensor, labels: torch.Tensor, metrics: DeviceMetrics) -> float:
        """Train one step on mels [B, 32, 1]; return its loss."""
        config = self.config
        segments = prepare_mel_batch(mel, self.device, channels_last=False, dtype=self.dtype)
        labels = labels.to(self.device)
        counter = torch.tensor(dropout_counter(config.seed, self.steps), device=self.device)
        keep = dropout_mask(counter, len(segments), ROWS * config.channels[2], config.dropout, self.dtype)
        classes, leak = self._logits(segments, keep)
        loss = _loss(classes, leak, labels, self.balance)
        self.optimizer(torch.autograd.grad(loss * self.optimizer.scale, list(self.weights.values())))
        self.steps += 1
        metrics.add(loss.detach(), classes.detach(), labels)
        return loss.item()

    def _logits(self, segments: torch.Tensor, keep: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Apply the network, under autocast if configured, and return the logits in `self.dtype`, as `_network`."""
        half = torch.float16 if self.config.autocast_fp16 else torch.bfloat16
        is_autocast = self.config.autocast_fp16 or self.config.autocast_bf16
        with torch.autocast(self.device.type, half, enabled=is_autocast):
            classes, leak = _network(self.weights, segments, keep)
        return classes.to(self.dtype), leak.to(self.dtype)

    @torch.no_grad()
    def _validation(self, epoch: int) -> Validation:
        """Evaluate every validation segment and file, and keep the weights if their F1 is the best so far."""
        metrics = DeviceMetrics(len(CLASSES), self.device)
        for mel, labels, _ in DataLoader(self.data.examples("validation"), self.config.val_batch_size):
            classes, leak = self._logits(prepare_mel_batch(mel, self.device, channels_last=False, dtype=self.dtype))
            labels = labels.to(self.device)
            metrics.add(_loss(classes, leak, labels, self.balance), classes, labels)
        mels, leaks = self.data.read("validation").by_file()
        _, predictions = file_level_eval(self._logits, mels.to(self.device, self.dtype), self.config.threshold)
        confusion = [[0, 0], [0, 0]]
        for is_leak, predicted in zip(leaks.tolist(), predictions.tolist(), strict=True):
            confusion[is_leak][predicted] += 1
        f1 = macro_f1(confusion)
        if f1 > self.best_f1:
            self.best_f1, self.best_epoch = f1, epoch + 1
            for name, weight in self.weights.items():
                self.best[name].copy_(weight)
        return Validation(segments=metrics.value(), files=confusion)


def _network(
    weights: Mapping[str, torch.Tensor], x: torch.Tensor, keep: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the class logits [N, 5] and the leak logits [N] of segments [N, 1, 32, 1].

    keep  [N, features]: dropout mask, by which the features are multiplied; None drops nothing
    """

    def layer(function: Callable[..., torch.Tensor], name: str, x: torch.Tensor, **options: int) -> torch.Tensor:
        return function(x, weights[f"{name}.weight"], weights[f"{name}.bias"], **options)

    x = functional.relu(layer(functional.conv2d, "conv1", x, padding=1))
    for name in ("conv2", "conv3"):
        x = functional.max_pool2d(functional.relu(layer(functional.conv2d, name, x, padding=1)), (2, 1))
    x = functional.adaptive_avg_pool2d(x, (ROWS, 1)).flatten(1)
    x = functional.relu(layer(functional.linear, "hidden", x if keep is None else x * keep))
    return layer(functional.linear, "classes", x), layer(functional.linear, "leak", x).squeeze(1)


def _loss(classes: torch.Tensor, leak: torch.Tensor, labels: torch.Tensor, balance: torch.Tensor) -> torch.Tensor:
    """Compute the cross-entropy of the classes, weighted by `balance`, plus half the binary cross-entropy of LEAK."""
    is_leak = (labels == LEAK).to(leak.dtype)
    binary = functional.binary_cross_entropy_with_logits(leak, is_leak)
    return functional.cross_entropy(classes, labels, weight=balance) + 0.5 * binary
