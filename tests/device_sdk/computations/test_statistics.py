"""A device's sums, beside those that plain Python works out a row at a time (the protocol's
vectors), and their additivity."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from computing import texts
from fleetlearn_device.computations.registry import sum_up
from fleetlearn_device.computations.statistics import compute
from fleetlearn_protocol.computations.bundle import read_settings
from fleetlearn_protocol.computations.settings import Statistics
from fleetlearn_protocol.computations.statistics import first_state, sums_layout

CASES: dict[str, Any] = json.loads(
    (Path(__file__).parents[3] / "protocol" / "vectors" / "computations.json").read_text("ascii")
)["statistics"]


def settings() -> Statistics:
    found = read_settings(CASES["settings"])
    assert isinstance(found, Statistics)
    return found


def rows() -> dict[str, np.ndarray]:
    told = CASES["rows"]
    numbers = {name: np.array(told[name], np.float64) for name in ("age", "height")}
    return {**numbers, **{name: texts(told[name], 8) for name in ("smoker", "city")}}


@pytest.mark.parametrize("case", CASES["cases"], ids=lambda case: case["name"])
def test_the_protocol_s_rows_add_up(case: dict[str, Any]) -> None:
    state = np.frombuffer(bytes.fromhex(case["state"]), np.float32)
    sums = compute(state, rows(), settings())
    assert len(sums) == case["count"]
    assert [[int(place), int(sums[place])] for place in np.flatnonzero(sums)] == case["sums"]


def test_each_row_adds_its_own_part() -> None:
    whole, asked = rows(), settings()
    for case in CASES["cases"]:
        state = np.frombuffer(bytes.fromhex(case["state"]), np.float32)
        alone = [{name: values[at : at + 1] for name, values in whole.items()} for at in range(8)]
        assert (sum_up(state, alone, asked) == compute(state, whole, asked)).all()


def test_no_rows_add_nothing() -> None:
    asked = settings()
    none = {name: values[:0] for name, values in rows().items()}
    assert not compute(first_state(asked), none, asked).any()
    assert sum_up(first_state(asked), [], asked).shape == (sums_layout(asked).size,)


def test_a_state_of_something_else_is_refused() -> None:
    asked = settings()
    with pytest.raises(ValueError, match="a state of shape"):
        compute(first_state(asked)[1:], rows(), asked)
    damaged = first_state(asked)
    damaged[0] = 0.5
    with pytest.raises(ValueError, match="it is damaged"):
        compute(damaged, rows(), asked)
