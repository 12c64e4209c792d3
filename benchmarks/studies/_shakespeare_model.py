"""The networks of shakespeare.py: embedding, LSTM layers, and a linear layer to the characters."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import NamedTuple

from _shakespeare_data import PADDING, UNROLL, characters

EMBEDDING = 8


class Size(NamedTuple):
    units: int
    layers: int


PAPER = Size(256, 2)
"""McMahan et al., section 3."""
SMALL = Size(64, 1)
"""The comparisons' own: a fifteenth of the work of PAPER."""
TINY = Size(8, 1)
"""Of --quick."""


def export(folder: Path, size: Size) -> Path:
    """Write the bundle of a network, unless it is there.

    Metrics of a sequence: ``correct``, its characters that were predicted, and ``characters``,
    those that there are. Their quotient over a test set is the accuracy.
    """
    bundle = folder / f"{size.units}x{size.layers}.bundle"
    if bundle.exists():
        return bundle
    import torch  # here, since the worker processes do not need it
    from fleetlearn_export import export_bundle
    from torch import Tensor, nn

    class Network(nn.Module):
        def __init__(self, known: int) -> None:
            super().__init__()
            self.embedding = nn.Embedding(known, EMBEDDING)
            self.lstm = nn.LSTM(EMBEDDING, size.units, size.layers, batch_first=True)
            self.characters = nn.Linear(size.units, known)
            for layer in range(size.layers):
                # TensorFlow's cells begin with open forget gates, and the paper's were such.
                bias = getattr(self.lstm, f"bias_ih_l{layer}")
                nn.init.ones_(bias[size.units : 2 * size.units])

        def forward(self, x: Tensor) -> Tensor:
            hidden, _ = self.lstm(self.embedding(x))
            scores: Tensor = self.characters(hidden)
            return scores

    def loss(outputs: Tensor, y: Tensor) -> Tensor:
        rows = outputs.flatten(0, 1)
        return nn.functional.cross_entropy(rows, y.flatten(), ignore_index=PADDING)

    def correct(outputs: Tensor, y: Tensor) -> Tensor:
        return ((outputs.argmax(2) == y) & (y != PADDING)).float().sum(1)

    def present(outputs: Tensor, y: Tensor) -> Tensor:
        return (y != PADDING).float().sum(1)

    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")  # of the exporters that it calls
        torch.manual_seed(0)
        example = torch.randint(1, characters(), (2, 10, UNROLL))
        export_bundle(
            Network(characters()),
            loss,
            (example[0], example[1]),
            bundle,
            metrics={"correct": correct, "characters": present},
        )
    return bundle
