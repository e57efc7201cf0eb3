"""File-level leak detection, one file at a time (leak_cnn, techniques 001.8 and 001.F1)."""

import torch

from suite.leak_cnn.classes import LEAK
from suite.leak_cnn.file_level import THRESHOLD, Forward, check_mels, windows_needed


@torch.no_grad()
def file_level_eval(
    forward: Forward, mels: torch.Tensor, threshold: float = THRESHOLD
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each long window's probability of LEAK, [files, longs], and whether each file leaks, bool [files].

    A segment's probability is the mean of its softmax at LEAK and the sigmoid of its leak logit. A long window's
    probability is the mean over its short windows, which are the segments. A file leaks if at least ceil(longs / 2) of
    its long windows reach the threshold; a NaN does not reach it.

    forward  segments [N, 1, mels, frames] → class logits [N, classes] and leak logits [N], in evaluation mode
    mels     [files, longs, shorts, mels, frames], on the model's device and in its dtype

    PerfsuiteError if `mels` has another number of dimensions, or no window.

    Source: leak_cnn, techniques 001.8 and 001.F1.
    """
    check_mels(mels)
    files, longs, shorts = mels.shape[:3]
    probabilities, leaks = mels.new_empty(files, longs), []
    for i, file in enumerate(mels):
        logits, leak = forward(file.reshape(longs * shorts, 1, *file.shape[2:]))
        p = 0.5 * logits.softmax(1)[:, LEAK] + 0.5 * leak.sigmoid()
        long_windows: list[float] = []
        for short_windows in p.view(longs, shorts):
            long_windows.append(short_windows.mean().item())
        probabilities[i] = probabilities.new_tensor(long_windows)
        leaks.append(sum(value >= threshold for value in long_windows) >= windows_needed(longs))
    return probabilities, torch.tensor(leaks, dtype=torch.bool, device=mels.device)
