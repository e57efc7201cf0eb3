"""Metrics of an epoch, read from the device after every batch (leak_cnn, technique 001.1)."""

import torch

from suite.leak_cnn.metrics import EpochMetrics, examples, macro_f1


class DeviceMetrics:
    """Mean loss, accuracy, macro-F1 and confusion matrix of an epoch, kept as Python numbers.

    Three copies to the host a batch, each of which waits for the device.

    Source: leak_cnn, technique 001.1.
    """

    def __init__(self, classes: int, device: torch.device | str) -> None:
        self.classes = classes
        self.reset()

    def reset(self) -> None:
        """Begin an epoch."""
        self.loss = 0.0
        self.correct = 0
        self.confusion = [[0] * self.classes for _ in range(self.classes)]

    @torch.no_grad()
    def add(self, loss: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Count a batch.

        loss    0-d, the batch's mean
        logits  [B, classes]; the largest one is the prediction, NaN above all
        labels  int64 [B], 0 to classes - 1
        """
        predictions = logits.argmax(1)
        self.loss += loss.item() * len(labels)
        self.correct += int((predictions == labels).sum().item())
        counts = torch.bincount(labels * self.classes + predictions, minlength=self.classes**2)
        for row, new in zip(self.confusion, counts.view(self.classes, self.classes).tolist(), strict=True):
            row[:] = [old + count for old, count in zip(row, new, strict=True)]

    def value(self) -> EpochMetrics:
        """The metrics since the last reset; PerfsuiteError where no example was added."""
        total = examples(self.confusion)
        confusion = [list(row) for row in self.confusion]
        return EpochMetrics(self.loss / total, self.correct / total, macro_f1(confusion), confusion)
