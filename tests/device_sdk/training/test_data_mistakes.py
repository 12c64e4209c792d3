"""Mistakes in a device's data, and the words for them: both SDKs say the same.

``data_mistakes.json`` has the batch's arrays (``inputs``; those below where a case has none), what
is given, and how the message begins. The SDK for browsers reads it in
device_sdk/web/test/data/mistakes.test.ts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleetlearn_device.runtimes.checks import Arrays, DataError, find_nonfinite
from fleetlearn_device.training.data import ArrayData
from fleetlearn_protocol.manifest import Input

CASES = json.loads((Path(__file__).parents[1] / "data_mistakes.json").read_text("ascii"))
INPUTS = (Input("x", "float32", (2,)), Input("y", "int64", (), below=3, ignored=-100))


def complaint(case: dict[str, Any]) -> str | None:
    """What the device says of the data."""
    inputs = INPUTS
    if "inputs" in case:
        inputs = tuple(Input(**row | {"shape": tuple(row["shape"])}) for row in case["inputs"])
    given = {
        name: np.array([*map(float if dtype.startswith("float") else int, values)], dtype).reshape(
            shape
        )
        for name, (dtype, shape, values) in case["arrays"].items()
    }
    try:
        data = ArrayData(given).fit(inputs)
    except DataError as error:
        return str(error)
    batch: Arrays = tuple(map(np.asarray, next(data.batches(0, None))))
    return find_nonfinite(batch, inputs)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_the_words_are_the_table_s(case: dict[str, Any]) -> None:
    said = complaint(case)
    assert said is not None
    assert said.startswith(case["words"]), said
