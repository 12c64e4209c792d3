"""The models of step.py: those of the tests' zoo that have the sizes that people use, and batches for them."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parents[1] / "tests/support"))
import zoo

BATCH = 20
BATCHES = 10
STEPS = {"softmax": 4000, "mlp": 2000, "mcmahan": 60, "inverted-residual": 100, "gru": 300, "transformer": 300}
"""How many make a good measurement."""
make = zoo.make


def write_batches(name: str, file: Path) -> None:
    """Random ones: one array for each of the batch's, with the batches on the first axis."""
    case = make(name)
    drawn = [case.batch(BATCH, seed) for seed in range(BATCHES)]
    np.savez(file, *(np.stack([value.numpy() for value in values]) for values in zip(*drawn, strict=True)))
