"""Which files leak, every file's segments in one batch (leak_cnn, techniques 001.8 and 001.F1)."""

import torch

from suite.leak_cnn.classes import LEAK
from suite.leak_cnn.file_level import THRESHOLD, Forward, check_mels, windows_needed

# Of 80 segments each: 10,240 in a batch fill a GPU, and their activations take some 0.6 GB in float32.
FILES = 128


@torch.no_grad()
def file_level_eval(
    forward: Forward, mels: torch.Tensor, threshold: float = THRESHOLD, files_at_once: int = FILES
) -> tuple[torch.Tensor, torch.Tensor]:
    """The probability of LEAK of each long window [files, longs], and whether each file leaks, bool [files].

    A segment's probability is half its softmax at LEAK and half the sigmoid of its leak logit, a long window's the
    mean over its short ones. A file leaks if at least ceil(longs / 2) of its long windows reach the threshold; one that
    is NaN does not.

    The model runs on the segments of `files_at_once` files together, which bounds its memory; nothing waits for the
    device.

    forward  segments [N, 1, mels, frames] → logits [N, classes] and [N], in evaluation mode
    mels     [files, longs, shorts, mels, frames], where the model is and as it takes them

    PerfsuiteError for mels of another form, or without a window.

    Source: leak_cnn, techniques 001.8 and 001.F1.
    """
    check_mels(mels)
    files, longs, shorts = mels.shape[:3]
    probabilities = mels.new_empty(files, longs)
    for start in range(0, files, max(1, files_at_once)):
        part = mels[start : start + max(1, files_at_once)]
        logits, leak = forward(part.reshape(-1, 1, *mels.shape[3:]))
        p = (logits.softmax(1)[:, LEAK] + leak.sigmoid()).mul_(0.5)
        probabilities[start : start + len(part)] = p.view(-1, longs, shorts).mean(2)
    # In float64, as the threshold is: rounded to the probabilities' own precision it would admit what is below it.
    reached = (probabilities.double() >= threshold).sum(1)
    return probabilities, reached >= windows_needed(longs)


@torch.no_grad()
def file_level_eval_preallocated(
    forward: Forward, mels: torch.Tensor, threshold: float = THRESHOLD
) -> tuple[torch.Tensor, torch.Tensor]:
    """`file_level_eval` as the source has it (001.8): a file at a time still, into a list of known length."""
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
