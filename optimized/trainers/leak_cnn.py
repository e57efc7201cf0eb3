"""The optimized trainer of leak_cnn, with a switch for each technique.

Its epochs equal those of `reference/trainers/leak_cnn.py`, up to rounding. A step has no arguments: its batch, weights,
counters and metrics are tensors with fixed addresses. So one CUDA graph can replay forward, loss, backward, clipping,
AdamW and metrics, and another one a validation. The learning rate is written once per epoch. Dropout is hashed from a
counter on the device. An epoch's report is copied to pinned memory, and the host waits for it while the device computes
the next epoch. With the default switches an epoch has no other wait.

Source: leak_cnn.
"""

from __future__ import annotations

import functools
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from optimized.compilation.compiled_function import compile_if_possible, replay_begins
from optimized.convolution.conv_relu_pool import conv_relu_pool, conv_relu_pool_vectorised
from optimized.data.resident_dataset import ResidentDataset
from optimized.graphs.cuda_graph_step import cuda_graph_step
from optimized.memory.channels_last import laid_out, with_channels_last
from optimized.synchronization.sync_free_scaler_step import ScalerStep
from suite.backends import deterministic_convolutions
from suite.leak_cnn.classes import CLASSES
from suite.leak_cnn.config import TrainConfig
from suite.leak_cnn.dataset import Audio
from suite.leak_cnn.dropout import STRIDE, dropout_counter, dropout_mask
from suite.leak_cnn.features import MELS
from suite.leak_cnn.loss import class_weights, leak_cnn_loss
from suite.leak_cnn.metrics import EpochMetrics
from suite.leak_cnn.model import POOLED_ROWS, Weights, convolution, features, head, make_weights
from suite.leak_cnn.report import Report, Validation
from suite.leak_cnn.state import best_f1_of, restore, state_of, stops
from suite.techniques import implementation

AHEAD = 1
"""Epochs that may be queued or running on the device when the host starts the next one."""
FREE_SHARE = 2
"""The segments may use 1 / FREE_SHARE of the device's free memory; the rest is for activations and graphs."""


class Trainer:
    """The optimized trainer. Its checkpoints are interchangeable with the reference trainer's.

    data  the data set, opened and checked by `suite.leak_cnn.dataset.open_data`

    A data set that does not fit on the device is streamed, with a RuntimeWarning. PerfsuiteError if there are fewer
    training segments than one batch has.
    """

    window_name = "epoch"

    def __init__(self, config: TrainConfig, data: Audio, device: torch.device | str) -> None:
        self.config, self.data, self.device = config, data, torch.device(device)
        first = {k: w.to(self.device) for k, w in make_weights(config.seed, config.channels, config.hidden).items()}
        first = laid_out(first) if config.use_channels_last else first
        self.weights = {name: w.requires_grad_() for name, w in first.items()}
        self.balance = class_weights(data.counts("train")).to(self.device)
        self.lr = torch.zeros((), device=self.device)
        self.optimizer = self._made_optimizer()
        self.steps = 0
        self.best = {name: w.detach().clone() for name, w in self.weights.items()}
        self.best_f1 = torch.full((), -1.0, dtype=torch.float64, device=self.device)
        self.best_epoch = self._counter(0)
        self.steps_of_epoch = data.segments("train") // config.batch_size
        self._choose()
        self._allocate()
        self._reports = _Reports(self.device)

    def train_window(self, batch: Mapping[str, torch.Tensor]) -> None:
        """Train one epoch, `batch["epoch"]` (int64 [] on the CPU, from 0), and validate if a validation is due."""
        config, epoch = self.config, int(batch["epoch"])
        first_step, rate = self.steps, config.rate(epoch)
        with (
            torch.no_grad(),
            self._products(),
            self._algorithms(),
            deterministic_convolutions(),
        ):
            self.lr.fill_(rate)
            self._epoch.fill_(epoch + 1)
            self._place.zero_()
            self._training.reset()
            for _ in self._batches(epoch):
                self._step()
                self._rest_of_step()
                self.steps += 1
            validates = config.validates(epoch)
            if validates:
                self._validate()
            self._report(epoch, rate, first_step, validates)

    def metrics(self) -> Mapping[str, float] | None:
        """Return the metrics of the last report that has arrived, named as by `suite.leak_cnn.report.Report`.

        The result is None before the first report has arrived. Never waits.
        """
        report = self._reports.latest()
        return None if report is None else report.metrics()

    def last_metrics(self) -> Mapping[str, float] | None:
        """Wait for the last epoch's report; return its metrics."""
        report = self.last_report()
        return None if report is None else report.metrics()

    def last_report(self) -> Report | None:
        """Wait for the last epoch's report and return it."""
        return self._reports.wait(0)

    def validation(self) -> Validation | None:
        """Wait for the last epoch's report; return the last validation, or None before the first."""
        self._reports.wait(0)
        return self._reports.validation

    def state_dict(self) -> dict[str, Any]:
        """Return the checkpoint: all state that training changes, and the configuration."""
        return state_of(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a checkpoint's state. ValueError if a shape differs."""
        restore(self, state)
        self.steps = state["steps"]
        self._dropped.fill_(dropout_counter(self.config.seed, self.steps))
        self.best_f1.fill_(best_f1_of(state))
        self.best_epoch.fill_(state["best"]["epoch"])

    def stops(self) -> str | None:
        """Return why training should end now; None if it should go on. Waits for the device if `patience` is set."""
        return stops(self)

    # --- parts of the trainer

    def _made_optimizer(self) -> Any:
        config = self.config
        kind: Any = implementation("synchronization.sync_free_scaler_step", "ScalerStep", optimized=False)
        if config.sync_free_scaler_step:
            kind = ScalerStep
        elif config.fused_adamw:
            kind = _ReadScalerStep
        return kind(
            list(self.weights.values()),
            self.lr,
            weight_decay=config.weight_decay,
            max_norm=config.clip,
            scaling=config.scaling,
        )

    def _choose(self) -> None:
        """Choose the implementation of each technique: optimized if its switch is on, otherwise the reference."""
        config = self.config

        def of(module: str, function: str, on: bool) -> Callable[..., Any]:
            return implementation(module, function, optimized=on)

        self._prepare = of("convolution.prepare_mel_batch", "prepare_mel_batch", config.prepare_mel_batch)
        self._file_level = of("evaluation.file_level_eval", "file_level_eval", config.file_level_eval)
        metrics = of("synchronization.device_metrics", "DeviceMetrics", config.device_metrics)
        self._training, self._validating = (metrics(len(CLASSES), self.device) for _ in range(2))
        self._products = of("precision.tf32", "products", config.tf32)
        self._algorithms = of("precision.cudnn_autotune", "algorithms", config.cudnn_autotune)
        form = _form(config, self.device)
        if config.use_compile:
            graphs = config.compile_mode == "reduce-overhead" and not config.use_cudagraphs
            graphs = graphs and self.device.type == "cuda"
            self._loss, self._judge = (
                _compiled(form, config.fullgraph_model, graphs, training) for training in (True, False)
            )
        else:
            self._loss, self._judge = functools.partial(_loss, form), functools.partial(_judge, form)
        self._step, self._validate = self._step_on_device, self._validation_on_device
        if config.use_cudagraphs:
            self._step = self._captured(self._step)
            if config.file_level_eval and config.device_metrics:  # otherwise the host reads values during a validation
                self._validate = self._captured(self._validate)

    def _captured(self, call: Callable[[], None]) -> Any:
        return cuda_graph_step(call, warmup=self.config.warmup_steps, device=self.device)

    def _allocate(self) -> None:
        """Allocate all tensors that a step and a validation read and write."""
        config, data, on = self.config, self.data, {"device": self.device}
        B = config.batch_size
        self._resident: ResidentDataset | None = None
        if config.resident_dataset:
            self._resident = self._made_resident()
            self._mels, self._labels = self._resident.batch
            count = len(self._resident)
        else:
            self._loader = self._made_loader()
            self._mels = torch.zeros(B, 1, MELS, 1, **on)
            self._labels = torch.zeros(B, dtype=torch.int64, **on)
            count = len(self._loader)
        self._grads = [torch.zeros_like(w) for w in self.weights.values()]
        self._loss_now = torch.zeros((), **on)
        self._classes = torch.zeros(B, len(CLASSES), **on)
        self._losses = torch.zeros(count, dtype=torch.float64, **on)
        self._place = torch.zeros(1, dtype=torch.int64, **on)
        self._epoch = self._counter(0)
        self._dropped = self._counter(dropout_counter(config.seed, 0))
        if not config.validate_every:
            return
        split = data.read("validation")
        mels, leaks = split.by_file()
        self._files = torch.zeros(4, dtype=torch.int64, **on)
        self._ones = torch.ones(len(leaks), dtype=torch.int64, **on)
        self._leaks = leaks.to(self.device, torch.int64)
        self._all_mels, self._all_labels = mels.to(self.device, torch.float32), split.labels.to(self.device)

    def _made_resident(self) -> ResidentDataset:
        config, split = self.config, self.data.read("train")
        limit = config.limit_bytes
        if limit is None and self.device.type == "cuda":
            limit = torch.cuda.mem_get_info(self.device)[0] // FREE_SHARE
        made = ResidentDataset(
            (split.features.squeeze(1), split.labels),
            config.batch_size,
            self.device,
            seed=config.seed,
            drop_last=True,
            limit_bytes=limit,
        )
        if made.reason:
            warnings.warn(f"leak_cnn: {made.reason}", RuntimeWarning, stacklevel=4)
        return made

    def _made_loader(self) -> Any:
        config = self.config
        kind = implementation("data.loader", "Loader", optimized=config.loader)
        options = {"prefetch": config.prefetch_factor} if config.loader else {}
        return kind(
            self.data.examples("train"),
            config.batch_size,
            workers=config.num_workers,
            seed=config.seed,
            drop_last=True,
            **options,
        )

    def _counter(self, value: int) -> torch.Tensor:
        return torch.full((), value, dtype=torch.int64, device=self.device)

    # --- a step

    def _batches(self, epoch: int) -> Iterator[None]:
        """Copy each batch of an epoch into the buffers that a step reads; yield after each."""
        if self._resident is not None:
            for _ in self._resident.epoch(epoch):
                yield
            return
        for mel, labels, _ in self._loader.epoch(epoch):
            self._mels.copy_(self._prepare(mel, self.device, self.config.use_channels_last, torch.float32))
            self._labels.copy_(labels, non_blocking=True)
            yield
        if self.config.loader and not self.config.persistent_workers:
            self._loader.close()

    def _step_on_device(self) -> None:
        """Run the part of a step that can be captured in a CUDA graph; `_rest_of_step` runs the rest."""
        segments = self._mels
        if self._resident is not None:
            segments = self._prepare(segments, self.device, self.config.use_channels_last, torch.float32)
        leaves = list(self.weights.values())
        with torch.enable_grad():
            loss, classes = self._loss(self.weights, self._laid(segments), self._labels, self.balance, self._dropped)
            grads = torch.autograd.grad(loss * self.optimizer.scale, leaves)
        self._loss_now.copy_(loss)
        self._classes.copy_(classes)
        if self.config.sync_free_scaler_step:
            self.optimizer(grads)
        else:
            for own, grad in zip(self._grads, grads, strict=True):
                own.copy_(grad)
        if self.config.device_metrics:
            self._training.add(self._loss_now, self._classes, self._labels)
        self._losses.index_copy_(0, self._place, self._loss_now.double().view(1))
        self._place.add_(1)
        self._dropped.add_(STRIDE)

    def _rest_of_step(self) -> None:
        if not self.config.sync_free_scaler_step:
            self.optimizer(self._grads)
        if not self.config.device_metrics:
            self._training.add(self._loss_now, self._classes, self._labels)

    def _laid(self, segments: torch.Tensor) -> torch.Tensor:
        return with_channels_last(segments) if self.config.use_channels_last else segments

    # --- a validation

    def _validation_on_device(self) -> None:
        """Evaluate every segment and every file, and keep the weights if they are the best so far."""
        seen: list[tuple[torch.Tensor, torch.Tensor]] = []

        def forward(segments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            logits = self._judge(self.weights, self._laid(segments))
            # With torch.compile's own CUDA graphs, the next call would overwrite the logits.
            seen.append((logits[0].clone(), logits[1].clone()))
            return seen[-1]

        _, taken = self._file_level(forward, self._all_mels, self.config.threshold)
        self._validating.reset()
        if self.config.file_level_eval:
            every = [torch.cat(logits) for logits in zip(*seen, strict=True)]
            parts = zip(*(t.split(self.config.val_batch_size) for t in (*every, self._all_labels)), strict=True)
        else:
            parts = self._segments_again()
        for classes, leak, labels in parts:
            self._validating.add(leak_cnn_loss(classes, leak, labels, self.balance), classes, labels)
        self._files.zero_().scatter_add_(0, 2 * self._leaks + taken, self._ones)
        self._keep_best()

    def _segments_again(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yield (class logits, leak logits, labels) of the validation segments, read from the file by batches."""
        for mel, labels, _ in DataLoader(self.data.examples("validation"), self.config.val_batch_size):
            segments = self._prepare(mel, self.device, self.config.use_channels_last, torch.float32)
            yield *self._judge(self.weights, self._laid(segments)), labels.to(self.device)

    def _keep_best(self) -> None:
        f1 = _macro_f1(self._files)
        better = f1 > self.best_f1
        for name, weight in self.weights.items():
            self.best[name].copy_(torch.where(better, weight, self.best[name]))
        self.best_f1.copy_(torch.where(better, f1, self.best_f1))
        self.best_epoch.copy_(torch.where(better, self._epoch, self.best_epoch))

    def _report(self, epoch: int, rate: float, first_step: int, validates: bool) -> None:
        """Send the epoch's report, in one copy if the metrics are on the device. Wait for reports beyond AHEAD."""
        on_device = self.config.device_metrics
        kinds = (self._training, self._validating) if validates else (self._training,)
        parts = [self._losses.view(torch.int64), *([self._files] if validates else [])]
        parts += [kind.whole for kind in kinds] if on_device else []
        known = [] if on_device else [kind.value() for kind in kinds]
        sizes = [len(p) for p in parts]

        def read(whole: torch.Tensor) -> Report:
            losses, *rest = whole.split(sizes)
            files = rest.pop(0).view(2, 2).tolist() if validates else None
            segments: list[EpochMetrics] = known or [k.read(w) for k, w in zip(kinds, rest, strict=True)]
            return Report(
                epoch=epoch + 1,
                rate=rate,
                losses=losses.clone().view(torch.float64).tolist(),
                first_step=first_step,
                training=segments[0],
                validation=Validation(segments=segments[1], files=files) if files is not None else None,
            )

        self._reports.send(torch.cat(parts), read)
        self._reports.wait(AHEAD)


def _macro_f1(files: torch.Tensor) -> torch.Tensor:
    """Compute `suite.leak_cnn.metrics.macro_f1` on the device, bit for bit, if both classes occur.

    files  int64 [4], counts by (true class, predicted class)
    """
    counts = files.view(2, 2)
    both = (counts.sum(0) + counts.sum(1)).double()
    scores = 2 * counts.diagonal().double() / both
    return scores.sum() / 2


class _ReadScalerStep(ScalerStep):
    """The fused step, before which the host reads whether the gradients are finite, as with `GradScaler`."""

    def __call__(self, grads: Sequence[torch.Tensor]) -> None:
        torch.stack([g.isfinite().all() for g in grads]).all().item()
        super().__call__(grads)


@dataclass
class _Sent:
    buffer: torch.Tensor
    event: torch.cuda.Event | None
    read: Callable[[torch.Tensor], Report]


class _Reports:
    """The epochs' reports in transit from the device to the host."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._sent: deque[_Sent] = deque()
        self._free: list[torch.Tensor] = []
        self._latest: Report | None = None
        self.validation: Validation | None = None

    def send(self, whole: torch.Tensor, read: Callable[[torch.Tensor], Report]) -> None:
        fit = [i for i, b in enumerate(self._free) if b.shape == whole.shape]
        buffer = self._free.pop(fit[0]) if fit else torch.empty(whole.shape, dtype=whole.dtype, pin_memory=self._cuda)
        buffer.copy_(whole, non_blocking=self._cuda)
        event = None
        if self._cuda:
            event = torch.cuda.Event()
            event.record()
        self._sent.append(_Sent(buffer, event, read))

    def latest(self) -> Report | None:
        """Return the last report that has arrived. One with a loss that is not finite stays. Never waits."""
        while self._sent and ((event := self._sent[0].event) is None or event.query()):
            sent = self._sent.popleft()
            report = sent.read(sent.buffer)
            self._free.append(sent.buffer)
            self.validation = report.validation or self.validation
            if self._latest is None or self._latest.wrong() is None:  # several may arrive at once
                self._latest = report
        return self._latest

    def wait(self, ahead: int) -> Report | None:
        """Return the same, after waiting until at most `ahead` reports are in transit."""
        if len(self._sent) > ahead and (event := self._sent[-1 - ahead].event) is not None:
            event.synchronize()
        return self.latest()


# --- the network ----------------------------------------------------------------------------------------------------


class _Form(NamedTuple):
    """Options of the network. They are constants of its compiled functions."""

    device: str
    dropout: float
    relu: Callable[[torch.Tensor], torch.Tensor]
    pool: Callable[..., torch.Tensor] | None
    checkpoint: bool
    precision: Callable[[str], AbstractContextManager[object]]
    """Context of the network's dtype, given the type of the device."""
    tf32: bool
    """Part of the cache key, because torch.compile reads this setting of PyTorch's."""


def _form(config: TrainConfig, device: torch.device) -> _Form:
    pool = None
    if config.conv_relu_pool:  # the compiler can optimize PyTorch operations, not the kernel
        pool = conv_relu_pool_vectorised if config.use_compile else conv_relu_pool
    low = "autocast_fp16" if config.autocast_fp16 else "autocast_bf16"
    return _Form(
        device=device.type,
        dropout=config.dropout,
        relu=implementation("memory.inplace_activation", "relu", optimized=config.inplace_activation),
        pool=pool,
        checkpoint=config.activation_checkpoint,
        precision=implementation(f"precision.{low}", "context", optimized=getattr(config, low)),
        tf32=config.tf32,
    )


@functools.cache
def _compiled(form: _Form, fullgraph: bool, graphs: bool, training: bool) -> Callable[..., Any]:
    """Compile `_loss` or `_judge` once for all trainers, since they depend only on their arguments."""
    body: Callable[..., Any] = _loss if training else _judge

    def call(*tensors: Any) -> Any:
        return body(form, *tensors)

    # Dynamo caches only a few specialisations per code object, so each form gets its own code object.
    call.__code__ = call.__code__.replace()
    options = {"triton.cudagraphs": True} if graphs else None
    what = "leak_cnn's step" if training else "leak_cnn's validation"
    compiled = compile_if_possible(call, what, fullgraph=fullgraph, dynamic=False, options=options)
    if not graphs:
        return compiled

    def marked(*tensors: Any) -> Any:
        replay_begins()
        return compiled(*tensors)

    return marked


def _loss(
    form: _Form,
    weights: Weights,
    segments: torch.Tensor,
    labels: torch.Tensor,
    balance: torch.Tensor,
    counter: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the loss of a batch with dropout, 0-d, and its class logits."""
    width = POOLED_ROWS * weights["conv3.weight"].shape[0]
    keep = dropout_mask(counter, segments.shape[0], width, form.dropout, balance.dtype)
    classes, leak = _judge(form, weights, segments, keep)
    return leak_cnn_loss(classes, leak, labels, balance), classes


def _judge(
    form: _Form, weights: Weights, segments: torch.Tensor, keep: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply the network: segments [N, 1, 32, 1] → class logits [N, 5] and leak logits [N], in float32.

    keep  [N, features]: dropout mask, by which the features are multiplied; None drops nothing
    """
    with form.precision(form.device):
        if form.checkpoint:
            x = checkpoint(_features, form, weights, segments, use_reentrant=False, preserve_rng_state=False)
        else:
            x = _features(form, weights, segments)
        classes, leak = head(weights, x, keep, form.relu)
    return classes.float(), leak.float()


def _features(form: _Form, weights: Weights, segments: torch.Tensor) -> torch.Tensor:
    if form.pool is None:
        return features(weights, segments, form.relu)
    x = form.relu(convolution(weights, "conv1", segments))
    x = form.pool(x, weights["conv2.weight"], weights["conv2.bias"])
    return form.pool(x, weights["conv3.weight"], weights["conv3.bias"])
