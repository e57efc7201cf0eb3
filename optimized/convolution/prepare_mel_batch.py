"""Transfer of a batch of mel spectrograms to the device, in one asynchronous copy (leak_cnn, technique 001.7)."""

import torch

from suite.leak_cnn.batch import check_mel


def prepare_mel_batch(
    mel: torch.Tensor, device: torch.device | str, channels_last: bool = True, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return the batch on the device as the network's input, [B, 1, mels, frames].

    A pinned batch is copied to a GPU as it is stored, and the GPU changes its memory format and dtype; the host does
    not wait. A batch that is not pinned is first copied to pinned memory, in the smaller of the two dtypes.

    mel            [B, mels, frames], of a floating dtype
    channels_last  whether the result is in channels-last memory format
    dtype          of the result; None: that of `mel`

    PerfsuiteError if `mel` has another number of dimensions or is not floating.

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
