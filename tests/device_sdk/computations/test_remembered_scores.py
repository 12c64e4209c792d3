from __future__ import annotations

import numpy as np
import pytest
from computing import computed
from fleetlearn_device.computations import boosted_trees
from fleetlearn_device.computations.remembered_scores import (
    Remembered,
    ScoreMemory,
    digest_of,
)
from fleetlearn_protocol.computations.boosting_settings import BoostColumn, BoostedTrees


def of_rows(rounds: int, trees: bytes = b"t") -> Remembered:
    return Remembered(trees, rounds, np.zeros((10, 2), np.int64), np.zeros((10, 1)))


def test_what_is_remembered_is_of_these_rows_and_these_trees() -> None:
    memory = ScoreMemory()
    memory.keep(b"rows", of_rows(3))
    found = memory.find(b"rows", lambda rounds: b"t" if rounds == 3 else b"")
    assert found is not None
    assert found.rounds == 3
    assert memory.find(b"others", lambda rounds: b"t") is None
    assert memory.find(b"rows", lambda rounds: b"other trees") is None


def test_the_oldest_rows_are_forgotten() -> None:
    memory = ScoreMemory(most_bytes=3 * 240)
    for row in (b"a", b"b", b"c", b"a", b"d"):
        memory.keep(row, of_rows(1))
    kept = [row for row in (b"a", b"b", b"c", b"d") if memory.find(row, lambda rounds: b"t")]
    assert kept == [b"a", b"c", b"d"]


def test_digests_tell_arrays_apart() -> None:
    some = np.arange(6, dtype=np.float32)
    assert digest_of(some) == digest_of(some.reshape(2, 3)[:, :])
    assert digest_of(some) != digest_of(some + 1)


def test_a_device_that_remembers_sends_the_same_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that was started again in the middle computes all scores again; the next one, whose
    memory is of another run over the same rows, must not be misled either."""
    rng = np.random.default_rng(7)
    x = rng.normal(size=(200, 3)).astype(np.float32)
    columns = tuple(map(BoostColumn, "abc"))
    runs = []
    for target in (x[:, 0] * 3, x[:, 1] ** 2):
        told = BoostedTrees(columns=columns, rounds=6, depth=2, bins=16)
        table = {"x": x, "y": target.astype(np.float32)}
        with monkeypatch.context() as patched:
            patched.setattr(boosted_trees, "MEMORY", ScoreMemory(most_bytes=0))
            _, forgetful = computed(told, [table])
        _, remembering = computed(told, [table])
        runs.append((forgetful, remembering))
    for forgetful, remembering in runs:
        assert all(map(np.array_equal, forgetful, remembering))


def test_what_is_remembered_of_other_settings_does_not_mislead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same rows, edges and scores, and a column that has another number of categories: its
    rows are in other bins."""
    rng = np.random.default_rng(8)
    x = rng.integers(0, 6, (200, 1)).astype(np.float32)
    table = {"x": x, "y": np.float32(x[:, 0] == 5)}
    found = []
    for categories in (3, 6):
        told = BoostedTrees(columns=(BoostColumn("a", categories),), rounds=1, depth=2)
        found.append(computed(told, [table])[1])
    monkeypatch.setattr(boosted_trees, "MEMORY", ScoreMemory())
    assert all(map(np.array_equal, found[1], computed(told, [table])[1]))
