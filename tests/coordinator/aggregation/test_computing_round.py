"""A round whose devices report sums: blocks of any size, in any order, make the same state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleetlearn_coordinator.aggregation.computations.registry import BadTotalError
from fleetlearn_coordinator.aggregation.model_state import make_state
from fleetlearn_coordinator.aggregation.open_round import OpenRound
from fleetlearn_coordinator.aggregation.reports import ReportColumns
from fleetlearn_coordinator.plan.plan import Plan
from fleetlearn_protocol.computations.settings import NumberColumn, Statistics
from statistics_bundle import PLAN, statistics_bundle

ASKED = Statistics(numbers=(NumberColumn("age", range=(0.0, 8.0), bins=2),))


def begun(folder: Path) -> tuple[OpenRound, np.ndarray]:
    """Return a round over the first state, and the sums of three devices: 2, 3 and 4 rows."""
    bundle = statistics_bundle(folder, ASKED)
    rules = Plan.parse(PLAN, folder).round_rules(bundle.manifest)
    state = make_state(
        rules, None, version=0, model=bundle.parameters(), optimizer_state={}, vectors={}
    )
    sums = np.zeros((3, bundle.manifest.elements_of("sums")), np.int64)
    sums[:, 0] = [2, 3, 4]
    return OpenRound(rules, state), sums


def reports(sums: np.ndarray) -> ReportColumns:
    count = len(sums)
    ones: Any = np.ones(count, np.int64)
    return ReportColumns(
        weights=ones,
        examples=ones,
        steps=ones,
        complete=ones > 0,
        loss=np.zeros(count),
        metrics={},
        largest={"sums": np.abs(sums).max(axis=1).astype(np.float64)},
        parts={"sums": sums},
    )


def test_blocks_and_single_reports_make_the_same_state(tmp_path: Path) -> None:
    models = []
    for blocks in (
        [slice(0, 3)],
        [slice(2, 3), slice(0, 2)],
        [slice(1, 2), slice(0, 1), slice(2, 3)],
    ):
        round_, sums = begun(tmp_path)
        for block in blocks:
            received = round_.receive(reports(sums[block]))
            assert received.refusal is None
            round_.accept(received.accepted)
            round_.add(received.accepted)
        made, summary = round_.commit(1, round_.summary({}))
        assert made.version == 1
        assert summary["computation"] == "measured on 9 rows of 3 devices"
        assert (summary["metrics"], summary["reports"]) == ({}, 3)
        models.append(made.model.tobytes())
    assert models[0] == models[1] == models[2]
    assert round_.state.version == 0, "the round itself stays as it was"


def test_a_report_that_counts_and_is_not_added_is_a_fault(tmp_path: Path) -> None:
    round_, sums = begun(tmp_path)
    round_.accept(reports(sums))
    with pytest.raises(ValueError, match="3 reports count; the sums of 0 are added"):
        round_.commit(1, round_.summary({}))


def test_the_first_report_that_is_too_large_is_refused(tmp_path: Path) -> None:
    round_, sums = begun(tmp_path)
    sums[1, 0] = 2**61
    received = round_.receive(reports(sums))
    assert received.refusal is not None
    assert (received.refusal.row, len(received.accepted)) == (1, 1)


def test_a_total_that_can_be_none_is_said(tmp_path: Path) -> None:
    round_, sums = begun(tmp_path)
    sums[0, 0] = -100
    round_.accept(reports(sums))
    round_.add(reports(sums))
    with pytest.raises(BadTotalError, match="a total of -93 rows"):
        round_.commit(1, round_.summary({}))
