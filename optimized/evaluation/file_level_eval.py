"""File-level leak detection with the segments of many files in one batch (leak_cnn, techniques 001.8 and 001.F1)."""

import torch

from suite.leak_cnn.classes import LEAK
from suite.leak_cnn.file_level import THRESHOLD, Forward, check_mels, windows_needed

# Files in a batch. With 80 segments per file, a batch has 10,240 segments, which fill a GPU. Their activations need
# about 0.6 GB in float32.
FILES = 128


@torch.no_grad()
def file_level_eval(
    forward: Forward, mels: torch.Tensor, threshold: float = THRESHOLD, files_at_once: int = FILES
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each long window's probability of LEAK, [files, longs], and whether each file leaks, bool [files].

    A segment's probability is the mean of its softmax at LEAK and the sigmoid of its leak logit. A long window's
    probability is the mean over its short windows, which are the segments. A file leaks if at least ceil(longs / 2) of
    its long windows reach the threshold; a NaN does not reach it.

    The model runs on the segments of `files_at_once` files at a time, which bounds its memory. The host does not wait
    for the device.

    forward  segments [N, 1, mels, frames] → class logits [N, classes] and leak logits [N], in evaluation mode
    mels     [files, longs, shorts, mels, frames], on the model's device and in its dtype

    PerfsuiteError if `mels` has another number of dimensions, or no window.

    Source: leak_cnn, techniques 001.8 and 001.F1.
    """
    check_mels(mels)
    files, longs, shorts = mels.shape[:3]
    means = [mels.new_empty(0, longs)]
    for start in range(0, files, max(1, files_at_once)):
        part = mels[start : start + max(1, files_at_once)]
        logits, leak = forward(part.reshape(-1, 1, *mels.shape[3:]))
        p = (logits.softmax(1)[:, LEAK] + leak.sigmoid()).mul_(0.5)
        means.append(p.view(-1, longs, shorts).mean(2))
    # In the dtype of the model's results, which may be wider than that of mels.
    probabilities = torch.cat(means)
    # Compare in float64, the threshold's precision. Rounded to the probabilities' dtype, the threshold could become
    # smaller, and a probability below it would count.
    reached = (probabilities.double() >= threshold).sum(1)
    return probabilities.to(mels.dtype), reached >= windows_needed(longs)


@torch.no_grad()
def file_level_eval_preallocated(
    forward: Forward, mels: torch.Tensor, threshold: float = THRESHOLD
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `file_level_eval` as the source does (001.8): one file at a time, with a preallocated list."""
    check_mels(mels)
    files, longs, shorts = mels.shape[:3]
    probabilities, leaks = mels.new_empty(files, longs), [False] * files
    for i in range(files):
        logits, leak = forward(mels[i].reshape(longs * shorts, 1, *mels.shape[3:]))
        p = (0.5 * logits.softmax(1)[:, LEAK] + 0.5 * leak.sigmoid()).view(longs, shorts)
        long_windows = [0.0] * longs
        for j in range(longs):
            long_windows[j] = p[j].mean().item()
        probabilities[i] = probabilities.new_tensor(long_windows)
        leaks[i] = sum(value >= threshold for value in long_windows) >= windows_needed(longs)
    return probabilities, torch.tensor(leaks, dtype=torch.bool, device=mels.device)
