"""Transfer of a batch of mel spectrograms to the device, converted on the host (leak_cnn, technique 001.7)."""

import torch

from suite.leak_cnn.batch import check_mel


def prepare_mel_batch(
    mel: torch.Tensor, device: torch.device | str, channels_last: bool = True, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return the batch on the device as the network's input, [B, 1, mels, frames].

    The host changes the memory format and the dtype, and then copies the batch to the device.

    mel            [B, mels, frames], of a floating dtype
    channels_last  whether the result is in channels-last memory format
    dtype          of the result; None: that of `mel`

    PerfsuiteError if `mel` has another number of dimensions or is not floating.

    Source: leak_cnn, technique 001.7.
    """
    check_mel(mel)
    mel = mel.unsqueeze(1)
    if channels_last:
        mel = mel.contiguous(memory_format=torch.channels_last)
    if dtype is not None:
        mel = mel.to(dtype)
    return mel.to(device, non_blocking=True)
