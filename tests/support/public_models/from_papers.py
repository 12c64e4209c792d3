"""Models that are in no package, written from their papers."""

# A call of a module has no type.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import torch
import zoo
from torch import Tensor, nn
from torch.nn import functional


def ds_cnn() -> zoo.Case:
    """Spot one of 12 keywords in a second of speech: float32 (n, 1, 49 frames, 10 MFCC features).

    DS-CNN-S of Zhang et al. 2017, Hello Edge (arXiv 1711.07128): a 10 x 4 convolution with 64
    channels, then four depthwise separable ones, padded as TensorFlow does ("SAME").
    """
    first = (
        nn.ZeroPad2d((1, 1, 4, 5)),
        nn.Conv2d(1, 64, (10, 4), 2, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
    )
    separable = [layer for _ in range(4) for layer in _separable(64)]
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 12)
    return zoo.classifier(nn.Sequential(*first, *separable, *head), zoo.numbers(1, 49, 10), 12)


def _separable(channels: int) -> tuple[nn.Module, ...]:
    depthwise = nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=False)
    pointwise = nn.Conv2d(channels, channels, 1, bias=False)
    return (
        depthwise,
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        pointwise,
        nn.BatchNorm2d(channels),
        nn.ReLU(),
    )


class WordPieces(nn.Module):
    """The prediction network of an RNN-T and a softmax over its word pieces: int64 (n, t) -> (n, t,
    pieces)."""

    def __init__(self, pieces: int, width: int, projection: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(pieces, projection)
        self.lstm = nn.LSTM(projection, width, layers, batch_first=True, proj_size=projection)
        self.output = nn.Linear(projection, pieces)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.lstm(self.embedding(x))[0])


def each_word(outputs: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(outputs.flatten(0, 1), y.flatten())


def rnnt_lstm() -> zoo.Case:
    """Predict each next word piece of 4,096: two layers of 2,048 cells, projected to 640.

    The prediction network of He et al. 2018, Streaming End-to-end Speech Recognition For Mobile
    Devices (arXiv 1811.06621); 29 million parameters.
    """
    return zoo.case(
        WordPieces(4096, 2048, 640, 2), each_word, zoo.classes(4096, 10), zoo.classes(4096, 10)
    )


class Characters(nn.Module):
    """The next of each character: int64 (n, t) -> (n, t, characters)."""

    def __init__(self, characters: int, embedding: int, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, embedding)
        self.lstm = nn.LSTM(embedding, width, layers, batch_first=True)
        self.output = nn.Linear(width, characters)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.lstm(self.embedding(x))[0])


def shakespeare() -> zoo.Case:
    """Predict each next character of 80, of Shakespeare's plays: two layers of 256 cells.

    McMahan et al. 2017 (arXiv 1602.05629), section 3; 0.82 million parameters with an alphabet
    of 90.
    """
    return zoo.case(Characters(90, 8, 256, 2), each_word, zoo.classes(90, 80), zoo.classes(90, 80))


class UNet(nn.Module):
    """Ronneberger et al. 2015 (arXiv 1505.04597), figure 1, with padded convolutions and BatchNorm.

    float32 (n, 1, h, w) -> (n, classes, h, w); h and w are multiples of 16.
    """

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(5)]
        self.down = nn.ModuleList(_twice(a, b) for a, b in zip([1, *widths], widths, strict=False))
        pairs = list(zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.enlarge = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, 2) for a, b in pairs)
        self.up = nn.ModuleList(_twice(a, b) for a, b in pairs)
        self.output = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept: list[Tensor] = []
        for level in self.down:
            x = level(functional.max_pool2d(x, 2) if kept else x)
            kept.append(x)
        for enlarge, level, other in zip(self.enlarge, self.up, kept[-2::-1], strict=True):
            x = level(torch.cat([other, enlarge(x)], 1))
        return self.output(x)


def _twice(inputs: int, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for size in (inputs, outputs):
        layers += [
            nn.Conv2d(size, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
        ]
    return nn.Sequential(*layers)


def unet() -> zoo.Case:
    """Segment images, float32 (n, 1, 64, 64), in two classes; 9.8 million parameters."""
    return zoo.case(
        UNet(36, 2), functional.cross_entropy, zoo.numbers(1, 64, 64), zoo.classes(2, 64, 64)
    )
