from __future__ import annotations

from pathlib import Path

import pytest
from fleetlearn_coordinator.service.allowed_functions import why_no_function
from fleetlearn_protocol.bundle import open_bundle
from fleetlearn_protocol.computations.bundle import write_computation_bundle
from fleetlearn_protocol.messages import CheckIn
from own_functions import MEAN
from statistics_bundle import statistics_bundle


@pytest.mark.parametrize(
    ("functions", "text"),
    [
        ((), "the device's owner allows none. Where the function is installed, --allow-function"),
        (
            ("median", "a:b"),
            "this run computes by the function mean; the device's owner allows ",
        ),
        (("median", "mean"), ""),
    ],
)
def test_the_owner_is_told_which_function_is_missing(
    tmp_path: Path, functions: tuple[str, ...], text: str
) -> None:
    bundle = open_bundle(write_computation_bundle(tmp_path / "a.bundle", "mean", MEAN))
    check_in = CheckIn(2, "a", 5, functions=functions)
    why = why_no_function(bundle.manifest, check_in)
    assert text in why
    assert bool(why) == bool(text)
    assert not why_no_function(statistics_bundle(tmp_path).manifest, check_in)
