"""Metrics of an epoch, accumulated on the device and read once (leak_cnn, technique 001.1)."""

import torch

from suite.leak_cnn.metrics import EpochMetrics, accuracy, examples, macro_f1


class DeviceMetrics:
    """Mean loss, accuracy, macro-F1 and confusion matrix of an epoch, kept on the device.

    `add` never waits for the device and changes its state only in place, so it can be captured in a CUDA graph. `value`
    makes one copy to the host and waits for it once.

    Source: leak_cnn, technique 001.1.
    """

    def __init__(self, classes: int, device: torch.device | str) -> None:
        # One buffer, so that one copy reads all of it. The first element's bytes hold the sum of the losses in float64,
        # the precision in which Python would add them up. The other elements are the confusion matrix.
        self.__setstate__((classes, torch.zeros(1 + classes**2, dtype=torch.int64, device=device)))

    def __getstate__(self) -> tuple[int, torch.Tensor]:
        """Return the state without the views of the buffer: pickled, they would be tensors of their own."""
        return self.classes, self.whole

    def __setstate__(self, state: tuple[int, torch.Tensor]) -> None:
        self.classes, self.whole = state
        self._loss = self.whole[0].view(torch.float64)
        self._counts = self.whole[1:]
        self._one = torch.ones(1, dtype=torch.int64, device=self.whole.device)

    def reset(self) -> None:
        """Set all metrics to zero, at the start of an epoch."""
        self.whole.zero_()

    @torch.no_grad()
    def add(self, loss: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Add a batch to the metrics.

        loss    0-d, mean loss of the batch
        logits  [B, classes]; the prediction is the class with the largest logit, where NaN counts as the largest
        labels  int64 [B], 0 to classes - 1
        """
        self._loss.add_(loss, alpha=len(labels))
        cell = torch.add(logits.argmax(1), labels, alpha=self.classes)
        self._counts.scatter_add_(0, cell, self._one.expand_as(cell))

    def value(self) -> EpochMetrics:
        """Return the metrics since the last reset. PerfsuiteError if no example was added."""
        return self.read(self.whole.cpu())

    def read(self, whole: torch.Tensor) -> EpochMetrics:
        """Return the metrics from a host copy of `whole`, which may be a slice of a larger copy."""
        confusion = whole[1:].view(self.classes, self.classes).tolist()
        loss = whole[:1].clone().view(torch.float64).item() / examples(confusion)
        return EpochMetrics(loss, accuracy(confusion), macro_f1(confusion), confusion)
