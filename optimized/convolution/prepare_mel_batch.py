"""A batch of mel spectrograms as the network takes it, by one transfer (leak_cnn, technique 001.7)."""

import torch

from suite.leak_cnn.batch import check_mel


def prepare_mel_batch(
    mel: torch.Tensor, device: torch.device | str, channels_last: bool = True, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """[B, mels, frames] → [B, 1, mels, frames] on the device, in channels-last memory, of that dtype (None: its own).

    From pinned memory the batch goes to a GPU as it is stored, and is arranged and converted there: the host waits for
    nothing. What is not pinned is copied there first, in the smaller of the two dtypes. PerfsuiteError for a tensor of
    another form.

    Source: leak_cnn, technique 001.7.
    """
    check_mel(mel)
    dtype = mel.dtype if dtype is None else dtype
    if torch.device(device).type == "cuda" and not mel.is_cuda and not mel.is_pinned():
        mel = torch.empty(mel.shape, dtype=_smaller(mel.dtype, dtype), pin_memory=True).copy_(mel)
    mel = mel.to(device, non_blocking=True).unsqueeze(1)
    return mel.to(dtype, memory_format=torch.channels_last if channels_last else torch.preserve_format)


def _smaller(stored: torch.dtype, wanted: torch.dtype) -> torch.dtype:
    return wanted if wanted.itemsize < stored.itemsize else stored
