"""Metrics of an epoch, gathered on the device and read once (leak_cnn, technique 001.1)."""

import torch

from suite.leak_cnn.metrics import EpochMetrics, accuracy, examples, macro_f1


class DeviceMetrics:
    """Mean loss, accuracy, macro-F1 and confusion matrix of an epoch, kept on the device.

    `add` never waits for the device and its state is changed in place alone, so that it may be captured in a CUDA
    graph; `value` is one copy and one wait.

    Source: leak_cnn, technique 001.1.
    """

    def __init__(self, classes: int, device: torch.device | str) -> None:
        self.classes = classes
        # All in one buffer, so that one copy reads it: the sum of losses, in float64 as Python would add it up, lies
        # in the first element's bytes.
        self.whole = torch.zeros(1 + classes**2, dtype=torch.int64, device=device)
        self._loss = self.whole[0].view(torch.float64)
        self._counts = self.whole[1:]
        self._one = torch.ones(1, dtype=torch.int64, device=device)

    def reset(self) -> None:
        """Begin an epoch."""
        self.whole.zero_()

    @torch.no_grad()
    def add(self, loss: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Count a batch.

        loss    0-d, the batch's mean
        logits  [B, classes]; the largest one is the prediction, NaN above all
        labels  int64 [B], 0 to classes - 1
        """
        self._loss.add_(loss, alpha=len(labels))
        cell = torch.add(logits.argmax(1), labels, alpha=self.classes)
        self._counts.scatter_add_(0, cell, self._one.expand_as(cell))

    def value(self) -> EpochMetrics:
        """The metrics since the last reset; PerfsuiteError where no example was added."""
        return self.read(self.whole.cpu())

    def read(self, whole: torch.Tensor) -> EpochMetrics:
        """The metrics from a copy of `whole` on the host, which may be part of a larger copy."""
        confusion = whole[1:].view(self.classes, self.classes).tolist()
        loss = whole[:1].clone().view(torch.float64).item() / examples(confusion)
        return EpochMetrics(loss, accuracy(confusion), macro_f1(confusion), confusion)
