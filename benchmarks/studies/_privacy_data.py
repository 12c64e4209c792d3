"""The devices of privacy.py that have handwritten digits: as many devices as are asked for share
scikit-learn's 1,438 training scans."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from examples import digits

EXAMPLES, LABELS = 10, 3
"""Scans of a device, and the most digits that they show."""
PIXELS = 64


@cache
def _by_label() -> list[NDArray[np.float32]]:
    data = digits.data()
    scans = data.x_train.reshape(-1, PIXELS)
    return [scans[data.y_train == label] for label in range(digits.CLASSES)]


def examples(device: int, seed: int) -> int:
    return EXAMPLES


def make(device: int, seed: int) -> dict[str, Any]:
    """Return a device's scans: ten, drawn with replacement from those of three digits. The same
    scan may be on many devices."""
    random = np.random.default_rng((seed, device))
    y = random.integers(digits.CLASSES, size=LABELS)[random.integers(LABELS, size=EXAMPLES)]
    places = random.random(EXAMPLES)
    scans = _by_label()
    x = [
        scans[label][int(place * len(scans[label]))] for label, place in zip(y, places, strict=True)
    ]
    return {"x": np.array(x, np.float32), "y": y.astype(np.int64)}


def test_scans() -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return the 359 scans on which nobody trains, and their labels."""
    data = digits.data()
    return data.x_test.reshape(-1, PIXELS), data.y_test
