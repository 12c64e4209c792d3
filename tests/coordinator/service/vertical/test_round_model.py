"""What the parts of a round come to."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from fleetlearn_coordinator.service.vertical.round_model import RoundSum, WholeModel
from fleetlearn_protocol.errors import ProtocolError


def model(seed: int, size: int = 50) -> WholeModel:
    random = np.random.default_rng(seed)
    return WholeModel(*(random.normal(size=n).astype(np.float32) for n in (size, 3, size + 1, 2)))


START = model(0)


def test_bottoms_and_tops_are_averaged_by_rows_in_any_order() -> None:
    parts = [(model(seed), rows) for seed, rows in ((1, 300), (2, 7), (3, 96))]
    found = []
    for order in permutations(parts):
        total = RoundSum(START, carries_state=False)
        for part, rows in order:
            total.add(part, rows)
        found.append(total.mean())
    for name in ("bottom", "top"):
        vectors = [getattr(each, name) for each in found]
        assert all(np.array_equal(vector, vectors[0]) for vector in vectors)
        exact = sum(getattr(part, name).astype(float) * rows for part, rows in parts) / 403
        assert np.abs(vectors[0] - exact).max() < 1e-7
    # Each round begins with the optimizers' initial state.
    assert found[0].bottom_state is START.bottom_state
    assert found[0].top_state is START.top_state


def test_a_turns_model_is_the_devices_own_to_the_last_bit() -> None:
    total = RoundSum(START, carries_state=True)
    tiny = model(1)._replace(bottom=np.full(50, 1e-30, np.float32))
    total.add(tiny, 3)
    assert total.mean() is tiny
    with pytest.raises(ValueError, match="a turn has one device"):
        total.add(tiny, 3)


def test_weights_that_no_mean_can_hold_are_refused_and_change_nothing() -> None:
    total = RoundSum(START, carries_state=False)
    with pytest.raises(ProtocolError, match="largest element"):
        total.add(model(1)._replace(top=np.full(51, np.inf, np.float32)), 3)
    total.add(model(2), 3)
    assert np.array_equal(total.mean().top, model(2).top)


@pytest.mark.parametrize("name", ["bottom_state", "top_state"])
def test_a_turn_does_not_hand_on_a_state_that_is_not_finite(name: str) -> None:
    total = RoundSum(START, carries_state=True)
    with pytest.raises(ProtocolError, match="must be finite"):
        total.add(model(1)._replace(**{name: np.array([1, np.inf], np.float32)}), 3)
    total.add(model(2), 3)
    assert np.array_equal(total.mean().top_state, model(2).top_state)


def test_a_checkpoint_has_both_parts_and_their_states() -> None:
    part = model(4).as_part(17)
    assert part.step == 17
    back = START.of_part(part)
    for found, expected in zip(back, model(4), strict=True):
        assert np.array_equal(found, expected)
