"""Updates that are kept are read block by block, in an order of their own."""

from __future__ import annotations

import numpy as np
import pytest
from fleetlearn_coordinator.aggregation.robust import kept_updates
from fleetlearn_coordinator.aggregation.robust.kept_updates import ALIGNMENT, KeptUpdates, add
from fleetlearn_coordinator.aggregation.updates import ArrayUpdate
from fleetlearn_protocol.errors import Code, ProtocolError

SIZE = 2 * ALIGNMENT + 5
VECTORS = np.random.default_rng(0).normal(size=(4, SIZE)).astype(np.float32)


def kept_of(order: list[int]) -> KeptUpdates:
    kept = KeptUpdates(SIZE)
    for row in order:
        add(kept, ArrayUpdate(VECTORS[row]), 10 + row, 1.0, 1.0 if row else 0.5)
    return kept


def test_blocks_have_all_elements_times_their_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_updates, "BLOCK_BYTES", 8 * 4 * ALIGNMENT)
    found = list(kept_of([0, 1, 2, 3]).blocks())
    assert [place.start for place, _ in found] == [0, ALIGNMENT, 2 * ALIGNMENT]
    together = np.concatenate([values for _, values in found], axis=1)
    np.testing.assert_array_equal(together, VECTORS * np.array([[0.5], [1], [1], [1]]))


def test_the_order_does_not_depend_on_who_came_first() -> None:
    one, other = kept_of([0, 1, 2, 3]).in_order(), kept_of([2, 3, 1, 0]).in_order()
    assert [row.weight for row in one.updates] == [row.weight for row in other.updates]
    np.testing.assert_array_equal(one.weights(), other.weights())


def test_what_cannot_be_kept_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = kept_of([0])
    with pytest.raises(ProtocolError) as caught:
        add(kept, ArrayUpdate(VECTORS[1]), 1, np.inf, 1.0)
    assert caught.value.code is Code.NOT_FINITE
    monkeypatch.setattr(kept_updates, "MAX_KEPT", 1)
    with pytest.raises(ProtocolError, match="has 1 updates, and can keep no more"):
        add(kept, ArrayUpdate(VECTORS[1]), 1, 1.0, 1.0)
    assert len(kept) == 1
