"""The clipping of many updates at once, against what a device does with its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from fleetlearn_device.training.clipping import encode_clipped
from fleetlearn_protocol.encodings import FLOAT32, SLAB, find_encoding
from fleetlearn_simulator.fleet import clipped_updates
from fleetlearn_simulator.fleet.clipped_updates import CLIPPED, clip_rows, row_norms
from fleetlearn_simulator.fleet.running_tasks import RunningTasks
from fleetlearn_simulator.fleet.sent_updates import DeviceNoise, as_sent
from fleetlearn_simulator.training.trained_devices import TrainedDevice, TrainedDevices, from_rows

CLIP = 0.5


def updates(count: int = 300, size: int = 37) -> np.ndarray:
    """Some are within the bound, some are far longer, and some are just at it."""
    random = np.random.default_rng(3)
    rows = random.standard_normal((count, size)).astype(np.float32)
    rows *= (random.exponential(0.2, (count, 1))).astype(np.float32)
    rows[0] = 0.0
    rows[1] *= np.float32(CLIP / np.linalg.norm(rows[1].astype(np.float64)))
    return rows


def reader_of(rows: np.ndarray) -> Any:
    trained = [
        TrainedDevice(row, {}, 10, 1, 10, True, 0.5, float(np.abs(row).max())) for row in rows
    ]
    found = from_rows(trained, rows.shape[1], [])

    def read(indices: Sequence[int]) -> TrainedDevices:
        return found.select(indices).copy()

    return read


def tasks(count: int) -> RunningTasks:
    columns: dict[str, Any] = {name: [0] * count for name in RunningTasks._fields}
    return RunningTasks(**columns | {"device": [*range(count)], "seed": [*range(count)]})


@pytest.mark.parametrize("together", [2**16, 100])
def test_each_row_has_the_bits_of_a_device_that_clips(
    monkeypatch: pytest.MonkeyPatch, together: int
) -> None:
    monkeypatch.setattr(clipped_updates, "ROWS_TOGETHER", together)
    rows = updates()
    found = rows.copy()
    clipped = clip_rows(found, CLIP)
    alone = [encode_clipped(FLOAT32, row, None, 0, CLIP) for row in rows]
    assert found.tobytes() == np.array([each.meant for each in alone]).tobytes()
    assert clipped.tolist() == [each.clipped for each in alone]
    assert 100 < clipped.sum() < 250
    assert row_norms(found).max() <= CLIP
    assert row_norms(found)[clipped].min() > CLIP * (1 - 1e-6)


def test_a_row_that_is_not_finite_is_not_changed_and_has_diverged() -> None:
    rows = updates(4)
    rows[2, 1] = np.inf
    found = as_sent(FLOAT32, None, reader_of(rows), tasks(4), clip=CLIP)(range(4))
    assert found.updates[2].tobytes() == rows[2].tobytes()
    assert found.diverged.tolist() == [False, False, True, False]


def test_larger_rows_than_a_device_adds_together_are_refused() -> None:
    with pytest.raises(ValueError, match="one by one"):
        clip_rows(np.ones((1, SLAB + 1), np.float32), CLIP)


@pytest.mark.parametrize(
    "name", ["float32", "float16", "int8", "int4", "topk-0.25", "topk-0.25-int8"]
)
def test_what_is_sent_is_within_the_bound_in_every_encoding(name: str) -> None:
    rows = updates(60)
    encoding = find_encoding(name)
    found = as_sent(encoding, None, reader_of(rows), tasks(60), clip=CLIP)(range(60))
    assert row_norms(found.updates).max() <= CLIP
    expected = [encode_clipped(encoding, row, None, seed, CLIP) for seed, row in enumerate(rows)]
    assert found.updates.tobytes() == np.array([each.meant for each in expected]).tobytes()
    assert found.vectors[CLIPPED][:, 0].tolist() == [each.clipped for each in expected]
    assert found.largest == pytest.approx(np.abs(found.updates).max(axis=1), rel=1e-3)


def test_large_updates_are_clipped_one_by_one() -> None:
    rows = np.ones((2, SLAB + 5), np.float32)
    rows[1] *= np.float32(1e-6)
    found = as_sent(FLOAT32, None, reader_of(rows), tasks(2), clip=CLIP)(range(2))
    assert np.linalg.norm(found.updates[0].astype(np.float64)) == pytest.approx(CLIP, rel=1e-6)
    assert found.updates[1].tobytes() == rows[1].tobytes()
    assert found.vectors[CLIPPED].tolist() == [[1.0], [0.0]]


@pytest.mark.parametrize("name", ["float32", "float16"])
def test_noise_of_the_devices_is_added_to_what_is_clipped_and_the_same_in_each_run(
    name: str,
) -> None:
    """40 x 37 elements: their mean square is the variance, within five standard errors. Another
    seed, device or task has other noise."""
    rows, deviation = updates(40), 2.0
    encoding, noise = find_encoding(name), DeviceNoise(2.0, seed=5)
    found = as_sent(encoding, None, reader_of(rows), tasks(40), clip=CLIP, noise=noise)(range(40))
    clipped = rows.copy()
    clip_rows(clipped, CLIP)
    added = (found.updates - clipped).astype(np.float64)
    assert (added**2).mean() == pytest.approx(deviation**2, rel=5 * np.sqrt(2 / added.size))
    again = as_sent(encoding, None, reader_of(rows), tasks(40), clip=CLIP, noise=noise)([7])
    assert again.updates[0].tobytes() == found.updates[7].tobytes()
    assert abs(np.corrcoef(added[:-1].ravel(), added[1:].ravel())[0, 1]) < 5 / np.sqrt(1400)
    assert found.largest == pytest.approx(np.abs(found.updates).max(axis=1))
