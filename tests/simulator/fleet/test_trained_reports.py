"""What simulated devices trained, as the reports that the coordinator's round takes."""

from __future__ import annotations

import numpy as np
import pytest
from fleetlearn_coordinator.aggregation.open_round import OpenRound
from fleetlearn_coordinator.aggregation.reports import columns_of
from fleetlearn_coordinator.aggregation.updates import ArrayUpdate
from fleetlearn_protocol.messages import CONTROL, UPDATE, Evaluation, Part, Report
from fleetlearn_simulator.fleet import trained_reports
from fleetlearn_simulator.fleet.trained_reports import Measured, parts_to_add, reports_of
from fleetlearn_simulator.fleet.update_file import FiledUpdate, UpdateFile
from fleetlearn_simulator.training.trained_devices import TrainedDevices
from round_reports import rules_of, state_of
from rounds import trained_device, trained_devices


def devices() -> TrainedDevices:
    found = trained_devices(
        trained_device([1.0, -2.0], 10, metrics={"accuracy": 0.5}, loss=1.0),
        trained_device([3.0, 0.0], 20, loss=3.0, complete=False),
    )
    found.vectors[CONTROL] = np.array([[1.0, -7.0], [0.5, 0.0]], np.float32)
    return found


def test_the_columns_are_the_devices() -> None:
    measured = [Measured(Evaluation(1, 2.0), None), Measured(None, None)]
    reports = reports_of(devices(), [CONTROL], np.array([1, 2]), [0, 1], measured)
    assert {part: column.tolist() for part, column in reports.largest.items()} == {
        UPDATE: [2.0, 3.0],
        CONTROL: [7.0, 0.5],
    }
    assert (reports.weights.tolist(), reports.examples.tolist()) == ([1, 2], [10, 20])
    assert (reports.evaluations, reports.personal) == ([Evaluation(1, 2.0), None], [None, None])
    assert reports.staleness == [0, 1]


def test_a_summary_is_the_coordinator_s_own_of_the_same_reports() -> None:
    found, rules = devices(), rules_of()
    ours, theirs = (OpenRound(rules, state_of(rules, [0.0, 0.0])) for _ in range(2))
    ours.accept(reports_of(found, [], np.array([10, 20])))
    part = (Part(UPDATE, "float32", 8, 0),)
    for report in (
        Report("a", 1, part, 10, 1, 1.0, True, 1.0, {"accuracy": 0.5}),
        Report("b", 1, part, 20, 1, 1.0, False, 3.0, {}),
    ):
        theirs.accept(columns_of(report, ["accuracy"], report.examples, {}, {}))
    assert ours.summary({}) == theirs.summary({})
    assert ours.summary({})["metrics"] == {"loss": (10 * 1.0 + 20 * 3.0) / 30, "accuracy": 0.5}


def test_small_updates_stay_arrays_and_large_ones_are_added_where_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reports = reports_of(devices(), [CONTROL], np.array([1, 2]))
    assert parts_to_add(reports, None) == reports.parts
    monkeypatch.setattr(trained_reports, "LARGE_UPDATE", 2)
    for file, kind in ((None, ArrayUpdate), (UpdateFile(2), FiledUpdate)):
        parts = parts_to_add(reports, file)
        updates = [parts[UPDATE][row] for row in range(2)]
        assert [type(update) for update in updates] == [kind, kind]
        assert [update.read(0, 2).tolist() for update in updates] == [[1.0, -2.0], [3.0, 0.0]]
        assert [update.read(0, 2).tolist() for update in parts[CONTROL]] == [
            [1.0, -7.0],
            [0.5, 0.0],
        ]
