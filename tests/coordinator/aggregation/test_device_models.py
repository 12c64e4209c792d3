"""The models that devices trained, one by one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fleetlearn_coordinator.aggregation.device_models import DeviceModel, device_model
from fleetlearn_coordinator.aggregation.updates import ALIGNMENT, ArrayUpdate
from fleetlearn_protocol.messages import BUFFERS
from fleetlearn_protocol.vector import Vector
from round_reports import reports_of_rows


def vector(seed: int, size: int) -> Vector:
    return np.random.default_rng(seed).normal(size=size).astype(np.float32)


def test_a_model_is_read_in_parts() -> None:
    """Buffers lie across the borders of the parts."""
    size, places = 2 * ALIGNMENT + 10, [slice(3, 5), slice(ALIGNMENT - 2, ALIGNMENT + 1)]
    base, update, values = vector(1, size), vector(2, size), vector(3, 5)
    expected = base + update
    expected[3:5], expected[ALIGNMENT - 2 : ALIGNMENT + 1] = values[:2], values[2:]
    model = DeviceModel(base, ArrayUpdate(update), places, values)
    assert np.array_equal(model.read(0, size), expected)
    parts = [model.read(start, min(start + ALIGNMENT, size)) for start in range(0, size, ALIGNMENT)]
    assert np.array_equal(np.concatenate(parts), expected)
    assert np.array_equal(base, vector(1, size)), "the round's model stays as it is"


@pytest.mark.parametrize("one_by_one", [False, True])
def test_each_report_is_a_model(one_by_one: bool) -> None:
    base = np.array([10.0, 20.0, 5.0], np.float32)
    parts = {BUFFERS: [[7.0], [9.0]]}
    updates = [[4.0, 8.0, 0.0], [0.0, 1.0, 0.0]]
    reports = reports_of_rows(updates, [1, 3], parts=parts, one_by_one=one_by_one)
    models = [device_model(base, reports, row, [slice(2, 3)]) for row in (0, 1)]
    found = [model.read(0, 3).tolist() for model in models if model is not None]
    assert found == [[14.0, 28.0, 7.0], [10.0, 21.0, 9.0]]


def test_a_report_whose_parts_were_added_up_is_no_model() -> None:
    reports = replace(reports_of_rows([[1.0]], [1]), parts={})
    assert device_model(np.zeros(1, np.float32), reports, 0, []) is None
