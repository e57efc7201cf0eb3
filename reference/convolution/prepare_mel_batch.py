"""A batch of mel spectrograms as the network takes it, by one copy after the other (leak_cnn, technique 001.7)."""

import torch

from suite.leak_cnn.batch import check_mel


def prepare_mel_batch(
    mel: torch.Tensor, device: torch.device | str, channels_last: bool = True, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """[B, mels, frames] → [B, 1, mels, frames] on the device, in channels-last memory, of that dtype (None: its own).

    Arranged and converted on the host, then copied. PerfsuiteError for a tensor of another form.

    Source: leak_cnn, technique 001.7.
    """
    check_mel(mel)
    mel = mel.unsqueeze(1)
    if channels_last:
        mel = mel.contiguous(memory_format=torch.channels_last)
    if dtype is not None:
        mel = mel.to(dtype)
    return mel.to(device, non_blocking=True)
