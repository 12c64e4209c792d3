"""The models of step.py: those of the tests' zoo that have the sizes that people use, some that people bring, and
batches for them."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parents[1] / "tests/support"))
import zoo
from public_models import table

BATCH = 20
BATCHES = 10
OF_THE_ZOO = {"softmax": 4000, "mlp": 2000, "mcmahan": 60, "inverted-residual": 100, "gru": 300, "transformer": 300}
PUBLIC = {"ds_cnn": 60, "squeezenet1_1": 30, "mobilenet_v2": 10, "mobilenet_v3_small": 20, "resnet18": 10}
"""On images of 64 x 64. torchvision makes all but the first."""
STEPS = {**OF_THE_ZOO, **PUBLIC}
"""How many make a good measurement."""


def make(name: str) -> zoo.Case:
    return table.make(name) if name in PUBLIC else zoo.make(name)


def write_batches(name: str, file: Path, size: int = BATCH) -> None:
    """Random ones of ``size``: one array for each of the batch's, with the batches on the first axis."""
    case = make(name)
    drawn = [case.batch(size, seed) for seed in range(BATCHES)]
    np.savez(file, *(np.stack([value.numpy() for value in values]) for values in zip(*drawn, strict=True)))
