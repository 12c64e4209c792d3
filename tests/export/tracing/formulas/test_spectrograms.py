"""stft and its gradient in ONNX, against PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support.emission_cases import check_emission, gradient_of

X = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "options",
    [
        {"n_fft": 16, "hop_length": 5, "window": torch.hann_window(16)},
        {
            "n_fft": 16,
            "win_length": 11,
            "window": torch.hamming_window(11),
            "center": False,
            "normalized": True,
        },
        {"n_fft": 9, "window": torch.ones(9), "onesided": False, "pad_mode": "constant"},
    ],
)
def test_stft_and_its_gradient(options: dict[str, object]) -> None:
    def sizes(x: Tensor) -> Tensor:
        return torch.stft(x, return_complex=True, **options).abs()  # type: ignore[arg-type]

    grad = torch.randn(sizes(X).shape, generator=torch.Generator().manual_seed(1))
    check_emission(
        None, lambda x, grad: (sizes(x), gradient_of(sizes)(x, grad)), X, grad, tolerance=1e-5
    )


def test_mel_bands_of_speech() -> None:
    """The logarithm of 8 bands of a spectrogram, as the front ends of networks for speech compute
    it."""
    bands = torch.rand(8, 33, generator=torch.Generator().manual_seed(2))

    def front_end(x: Tensor) -> Tensor:
        found = torch.stft(x, 64, 10, window=torch.hann_window(64), return_complex=True)
        return (bands @ found.abs().square()).clamp(min=1e-6).log()

    check_emission(None, front_end, X, tolerance=1e-5)
