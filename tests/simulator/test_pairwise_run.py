"""Scenarios whose plans have pairwise masks: their rounds have three exchanges, and end without a
model where too few devices stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleetlearn_simulator.errors import SimulatorError
from virtual import Driven, drive, make_scenario, simulate_in_parts

PAIRWISE = {"mode": "pairwise", "clip": 0.5, "degree": 4, "threshold": 3}
HELPER = {
    "mode": "helper",
    "helper": "https://helper.example:8770",
    "key": "a" * 64,
    "certificate": "b" * 64,
    "clip": 0.5,
}
ROUND = {"goal": 8, "minimum": 5, "over_selection": 1.0, "deadline": 1000.0}
LOSSES = {"failures": {"crash": 0.15}, "tiers": {"device": {"latency": 5.0, "spread": 0.3}}}


def run(folder: Path, bundle: Path, secure: dict[str, Any], size: int = 8, **more: Any) -> Driven:
    usual = {"plan__round": ROUND, "plan__stop": {"rounds": 4}, "plan__secure": secure}
    return drive(make_scenario(folder, bundle, size, **(usual | more)))


def test_the_models_are_those_of_a_helpers_sums(tmp_path: Path, private_line: Path) -> None:
    """Everybody takes part in each round: the sums of both ways are the same, bit for bit."""
    pairwise, helper = (run(tmp_path, private_line, secure) for secure in (PAIRWISE, HELPER))
    assert pairwise.model.tobytes() == helper.model.tobytes()
    phases = [
        (row["phase"], row["devices"])
        for row in pairwise.fleet.exchanges.summaries["pairwise"]
        if "phase" in row
    ]
    assert phases == [(2, 8), (3, 8)] * 4
    sent = [[row["bytes"]["up"] for row in found.rounds] for found in (pairwise, helper)]
    # of each of 8 devices: keys and their signature, 4 sealed pairs of shares, 4 shares; in digits
    more = 8 * (2 * 128 + 4 * (16 + 2 * 82) + 4 * (16 + 2 * 33))
    assert np.subtract(*sent).tolist() == [more] * 4


def test_devices_that_are_lost_leave_rounds_without_a_model_by_name(
    tmp_path: Path, private_line: Path
) -> None:
    found = run(
        tmp_path,
        private_line,
        PAIRWISE,
        12,
        **LOSSES,
        plan__stop={"rounds": 15},
        plan__round=ROUND | {"goal": 12},
    )
    texts = [row["text"] for row in found.events if row["event"] == "abandoned"]
    assert any("too few" in text or "are the minimum" in text for text in texts), texts
    committed = [row for row in found.rounds if row["how"] == "committed"]
    assert len(committed) == 15
    assert any(row["reports"] < 12 for row in committed), "some were lost, and the sum was made"
    assert np.isfinite(found.model).all()


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_to_the_same_bits(
    tmp_path: Path, private_line: Path
) -> None:
    usual = LOSSES | {"plan__stop": {"rounds": 5}, "plan__round": ROUND, "plan__secure": PAIRWISE}
    given = make_scenario(tmp_path, private_line, 10, **usual)
    whole = drive(given)
    parts = simulate_in_parts(given, tmp_path / "parts")
    assert parts.model.tobytes() == whole.model.tobytes()


def test_a_helper_adds_no_pairwise_masks_up(tmp_path: Path, private_line: Path) -> None:
    with pytest.raises(SimulatorError, match=r'needs a plan with \[secure\] and mode = "helper"'):
        run(tmp_path, private_line, PAIRWISE, coordinator={"masks": True})
