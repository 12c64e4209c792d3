from __future__ import annotations

import random
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from fleetlearn_export import ExportError
from fleetlearn_export.model.other_random import without_other_random


def drawing(draw: Callable[[], object]) -> Callable[[], int]:
    def run() -> int:
        for _ in range(3):
            pass
        draw()
        return 7

    return run


@pytest.mark.parametrize(
    ("draw", "source"),
    [
        (random.random, "Python's random"),
        (lambda: random.choice([1, 2]), "Python's random"),
        (lambda: random.shuffle([1, 2, 3]), "Python's random"),
        (np.random.rand, r"numpy\.random"),
        (lambda: np.random.permutation(3), r"numpy\.random"),
        (lambda: (random.random(), np.random.normal()), r"Python's random and numpy\.random"),
    ],
)
def test_what_draws_is_named_with_its_line(draw: Callable[[], object], source: str) -> None:
    before = sys.gettrace()
    with pytest.raises(
        ExportError, match=rf"^the loss draws a random number from {source} at {__file__}:\d+ in "
    ):
        without_other_random(drawing(draw), "the loss")
    assert sys.gettrace() is before


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.rand(2),
        random.getstate,
        random.Random(3).random,
        np.random.default_rng(3).random,
    ],
)
def test_nothing_else_is_refused(draw: Callable[[], object]) -> None:
    """Not PyTorch's random numbers; and a generator of the user's own leaves no trace here."""
    assert without_other_random(drawing(draw), "the loss") == 7


def test_the_line_is_the_users_not_a_librarys() -> None:
    def augmented() -> None:
        random.sample(range(10), 3)

    line = augmented.__code__.co_firstlineno + 1
    with pytest.raises(ExportError, match=rf"at {__file__}:{line} in augmented"):
        without_other_random(augmented, "the loss")
