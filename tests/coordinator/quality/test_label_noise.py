"""Wrong labels, as far as accuracy tells."""

from __future__ import annotations

import numpy as np
import pytest
from fleetlearn_coordinator.quality.label_noise import label_noise


@pytest.mark.parametrize("share", [0.0, 0.2, 0.6])
@pytest.mark.parametrize("classes", [2, 10])
def test_the_share_that_was_planted_is_found(share: float, classes: int) -> None:
    generator = np.random.default_rng(11)
    examples, right = 20_000, 0.9
    truth = generator.integers(0, classes, examples)
    wrong = (truth + generator.integers(1, classes, examples)) % classes
    predicted = np.where(generator.random(examples) < right, truth, wrong)
    replaced = (truth + generator.integers(1, classes, examples)) % classes
    labels = np.where(generator.random(examples) < share, replaced, truth)
    found = label_noise(float((predicted == labels).mean()), examples, right, classes)
    assert found is not None
    assert abs(found.share - share) < 4 * found.error
    assert found.error < 0.01


def test_a_hand_worked_case() -> None:
    """90 % on the others, 50 % here, two classes: each wrong label costs .9 - .1."""
    found = label_noise(0.5, 100, 0.9, 2)
    assert found is not None
    assert found.share == pytest.approx(0.5)
    assert found.error == pytest.approx(0.05 / 0.8)


def test_a_model_that_knows_nothing_tells_nothing() -> None:
    assert label_noise(0.5, 100, 0.5, 2) is None
    assert label_noise(0.1, 100, 0.09, 10) is None
