"""PyTorch's stft: the Fourier transforms of windows of a signal. PyTorch itself reads the windows
with as_strided."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

aten = torch.ops.aten


def stft(
    x: Tensor,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Tensor | None = None,
    normalized: bool = False,
    onesided: bool | None = None,
    return_complex: bool | None = None,
    align_to_window: bool | None = None,
) -> Tensor:
    """Return (n, frequencies, windows) of the signals ``x`` (n, time), or of one signal without the
    first axis.

    ``torch.stft`` pads the signal before it comes here.
    """
    hop = hop_length or n_fft // 4
    length = n_fft if win_length is None else win_length
    if window is None:
        window = torch.ones(length, dtype=x.dtype)
    before = (n_fft - length) // 2
    window = functional.pad(window, [before, n_fft - length - before])
    rows = x.unfold(-1, n_fft, hop) * window
    norm = "ortho" if normalized else "backward"
    transform: Any = torch.fft.fft if onesided is False else torch.fft.rfft
    spectrum: Tensor = transform(rows, norm=norm).transpose(-1, -2)
    return spectrum if return_complex else torch.view_as_real(spectrum)


FORMULAS = {aten.stft.default: stft}
