"""Metrics of an epoch, read from the device after every batch (leak_cnn, technique 001.1)."""

import torch

from suite.leak_cnn.metrics import EpochMetrics, examples, macro_f1


class DeviceMetrics:
    """Mean loss, accuracy, macro-F1 and confusion matrix of an epoch, accumulated as Python numbers.

    `add` makes three copies to the host per batch, and each of them waits for the device. So does torch.bincount on
    CUDA.

    Source: leak_cnn, technique 001.1.
    """

    def __init__(self, classes: int, device: torch.device | str) -> None:
        self.classes = classes
        self.reset()

    def reset(self) -> None:
        """Set all metrics to zero, at the start of an epoch."""
        self.loss = 0.0
        self.correct = 0
        self.confusion = [[0] * self.classes for _ in range(self.classes)]

    @torch.no_grad()
    def add(self, loss: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Add a batch to the metrics.

        loss    0-d, mean loss of the batch
        logits  [B, classes]; the prediction is the class with the largest logit, where NaN counts as the largest
        labels  int64 [B], 0 to classes - 1
        """
        predictions = logits.argmax(1)
        self.loss += loss.item() * len(labels)
        self.correct += int((predictions == labels).sum().item())
        counts = torch.bincount(labels * self.classes + predictions, minlength=self.classes**2)
        for row, new in zip(self.confusion, counts.view(self.classes, self.classes).tolist(), strict=True):
            row[:] = [old + count for old, count in zip(row, new, strict=True)]

    def value(self) -> EpochMetrics:
        """Return the metrics since the last reset. PerfsuiteError if no example was added."""
        total = examples(self.confusion)
        confusion = [list(row) for row in self.confusion]
        return EpochMetrics(self.loss / total, self.correct / total, macro_f1(confusion), confusion)
