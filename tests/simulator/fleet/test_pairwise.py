"""Pairwise masks in a simulation: the exchanges of each round, with devices that vanish."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from fleetlearn_protocol.secure.pairwise_messages import PAIRWISE
from virtual import Driven, drive, make_scenario

CLIP = 0.5
SLOW = {"latency": 1.0, "download": 1e12, "upload": 1e12}
MASKED: dict[str, Any] = {"plan__secure": {"mode": "pairwise", "clip": CLIP}}
USUAL = {
    "goal": 8,
    "minimum": 4,
    "over_selection": 1.0,
    "deadline": 1000.0,
    "weighting": "uniform",
}


def run(folder: Path, bundle: Path, devices: int = 8, **more: Any) -> Driven:
    rules = {"plan__stop": {"rounds": 3}, "plan__round": USUAL}
    return drive(make_scenario(folder, bundle, devices, **(rules | more)))


def test_the_models_are_those_of_clipped_updates(tmp_path: Path, private_line: Path) -> None:
    plain = run(tmp_path, private_line, plan__aggregation={"max_norm": CLIP})
    masked = run(tmp_path, private_line, **MASKED)
    difference = masked.fleet.coordinator.model - plain.fleet.coordinator.model
    assert np.abs(difference).max() < 1e-4
    found = masked.fleet.exchanges.summaries[PAIRWISE]
    assert [(row.get("phase", 1), row["outcome"], row["devices"]) for row in found] == 3 * [
        (1, "valid", 8),
        (2, "valid", 8),
        (3, "valid", 8),
    ]


def test_who_vanishes_in_an_exchange_is_missing_in_the_next(
    tmp_path: Path, private_line: Path
) -> None:
    vanishing = {"failures": {"download": 0.15, "upload": 0.15}, "tiers": {"device": SLOW}}
    masked = run(tmp_path, private_line, 12, **MASKED, **vanishing)
    found = masked.fleet.exchanges.summaries[PAIRWISE]
    for before, after in pairwise(found):
        if after.get("phase", 1) > before.get("phase", 1):
            assert after["devices"] <= before["devices"]
    assert any(row["dropped"] for row in found)
