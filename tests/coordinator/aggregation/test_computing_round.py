"""A round whose devices report sums: blocks of any size, in any order, make the same state."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from computing import masked_sums, reports_of_sums
from fleetlearn_coordinator.aggregation.computations.registry import BadTotalError
from fleetlearn_coordinator.aggregation.computations.statistics import result
from fleetlearn_coordinator.aggregation.model_state import make_state
from fleetlearn_coordinator.aggregation.modular_sum import UnmaskError
from fleetlearn_coordinator.aggregation.open_round import OpenRound
from fleetlearn_coordinator.aggregation.updates import MaskedArray
from fleetlearn_coordinator.plan.plan import Plan
from fleetlearn_protocol.computations.settings import NumberColumn, Statistics
from fleetlearn_protocol.errors import Code
from plans import SECURE
from statistics_bundle import PLAN, statistics_bundle

ASKED = Statistics(numbers=(NumberColumn("age", range=(0.0, 8.0), bins=2),))


MASKED = f"{PLAN}minimum = 2\n{SECURE.replace('clip = 0.5', '')}"


def begun(folder: Path, plan: str = PLAN) -> tuple[OpenRound, np.ndarray]:
    """Return a round over the first state, and the sums of three devices: 2, 3 and 4 rows."""
    bundle = statistics_bundle(folder, ASKED)
    rules = Plan.parse(plan, folder).round_rules(bundle.manifest)
    state = make_state(
        rules, None, version=0, model=bundle.parameters(), optimizer_state={}, vectors={}
    )
    sums = np.zeros((3, bundle.manifest.elements_of("sums")), np.int64)
    sums[:, 0] = [2, 3, 4]
    return OpenRound(rules, state), sums


def test_blocks_and_single_reports_make_the_same_state(tmp_path: Path) -> None:
    models = []
    for blocks in (
        [slice(0, 3)],
        [slice(2, 3), slice(0, 2)],
        [slice(1, 2), slice(0, 1), slice(2, 3)],
    ):
        round_, sums = begun(tmp_path)
        for block in blocks:
            received = round_.receive(reports_of_sums(sums[block]))
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
    round_.accept(reports_of_sums(sums))
    with pytest.raises(ValueError, match="3 reports count; the sums of 0 are added"):
        round_.commit(1, round_.summary({}))


def test_the_first_report_that_is_too_large_is_refused(tmp_path: Path) -> None:
    round_, sums = begun(tmp_path)
    sums[1, 0] = 2**61
    received = round_.receive(reports_of_sums(sums))
    assert received.refusal is not None
    assert (received.refusal.row, len(received.accepted)) == (1, 1)


@pytest.mark.parametrize("place", [0, 1], ids=["fewer than no rows", "more of a kind than rows"])
def test_a_report_that_can_be_of_no_rows_is_refused(tmp_path: Path, place: int) -> None:
    """Alone and among others. It was accepted, and ended the round of all devices, and the next one
    with this device too."""
    round_, sums = begun(tmp_path)
    sums[1, place] = (-100, 4)[place]
    received = round_.receive(reports_of_sums(sums))
    assert received.refusal is not None
    assert (received.refusal.row, len(received.accepted)) == (1, 1)
    alone = round_.receive(reports_of_sums(sums[1:2]))
    assert alone.refusal is not None
    assert alone.refusal.error.code == Code.OUT_OF_RANGE
    assert "the sums are of no rows" in alone.refusal.error.text
    assert round_.receive(reports_of_sums(sums[2:])).refusal is None


def test_a_total_that_can_be_none_is_said(tmp_path: Path) -> None:
    round_, sums = begun(tmp_path)
    sums[0, 0] = -100
    round_.accept(reports_of_sums(sums))
    round_.add(reports_of_sums(sums))
    with pytest.raises(BadTotalError, match="sums of -93 rows were given"):
        round_.commit(1, round_.summary({}))


def test_masked_sums_make_the_state_of_plain_ones(tmp_path: Path) -> None:
    plain, sums = begun(tmp_path)
    plain.accept(reports_of_sums(sums))
    plain.add(reports_of_sums(sums))
    expected, _ = plain.commit(1, plain.summary({}))
    round_, _ = begun(tmp_path, MASKED)
    columns, masks = masked_sums(sums)
    received = round_.receive(columns)
    assert received.refusal is None
    round_.accept(received.accepted)
    round_.add(received.accepted)
    made, summary = round_.commit(1, round_.summary({}), masks=masks)
    assert made.model.tobytes() == expected.model.tobytes()
    assert summary["computation"] == "measured on 9 rows of 3 devices"


def test_masked_sums_are_taken_off_and_saved(tmp_path: Path) -> None:
    """Without the third device, after the state was saved and read again: 5 rows of 2 devices."""
    round_, sums = begun(tmp_path, MASKED)
    columns, _ = masked_sums(sums)
    round_.accept(columns)
    round_.add(columns)
    round_.sums.add_waiting()
    round_.sums.load_tensors(round_.sums.to_tensors())
    kept, masks = masked_sums(sums[:2])
    rest = round_.without([kept])
    third = replace(
        columns.first(1),
        parts={"sums": [MaskedArray(columns.parts["sums"][2])]},  # type: ignore[index]
    )
    rest.subtract(third)
    assert rest.commit(1, {}, masks=masks).summary["computation"] == (
        "measured on 5 rows of 2 devices"
    )
    other, _ = begun(tmp_path)
    with pytest.raises(ValueError, match="no total of sums"):
        other.sums.load_tensors(round_.sums.to_tensors())


def test_masks_that_are_not_theirs_make_no_state(tmp_path: Path) -> None:
    round_, sums = begun(tmp_path, MASKED)
    columns, masks = masked_sums(sums)
    round_.accept(columns)
    round_.add(columns)
    for wrong, said in (
        (masks + np.uint32(2**31), "A mask was not taken off"),
        (masks[:-1], "masks of shape"),
        (None, "needs the sum of their masks"),
    ):
        with pytest.raises(ValueError, match=said):
            round_.commit(1, round_.summary({}), masks=wrong)


def test_a_device_can_spoil_a_masked_total_and_impossible_ones_are_said(tmp_path: Path) -> None:
    """Nobody sees the one device's sum of -100 rows, but the total can be none."""
    round_, sums = begun(tmp_path, MASKED)
    sums[0, 0] = -100
    columns, masks = masked_sums(sums)
    assert round_.receive(columns).refusal is None
    round_.accept(columns)
    round_.add(columns)
    with pytest.raises(BadTotalError, match="sums of -93 rows were given"):
        round_.commit(1, round_.summary({}), masks=masks)
    sums[0, 0] = 2**62
    columns, masks = masked_sums(sums)
    round_, _ = begun(tmp_path, MASKED)
    round_.accept(columns)
    round_.add(columns)
    with pytest.raises(UnmaskError, match="a device added up what it may not"):
        round_.commit(1, round_.summary({}), masks=masks)


def test_more_devices_than_a_round_has_make_no_total(tmp_path: Path) -> None:
    round_, sums = begun(tmp_path, MASKED)
    columns, masks = masked_sums(np.concatenate([sums] * 3))
    round_.accept(columns)
    round_.add(columns)
    with pytest.raises(UnmaskError, match="9 devices are added; a round has"):
        round_.commit(1, round_.summary({}), masks=masks)


def test_a_report_of_another_length_adds_nothing(tmp_path: Path) -> None:
    round_, sums = begun(tmp_path, MASKED)
    columns, _ = masked_sums(sums[:, :-1])
    round_.accept(columns)
    round_.add(columns)
    with pytest.raises(ValueError, match="the sum is of shape"):
        round_.sums.add_waiting()


def test_the_difference_of_two_totals_tells_of_the_device_that_left(tmp_path: Path) -> None:
    """What secure aggregation does not hide: 9 rows of three devices, and 5 of two of them."""
    counted = []
    for devices in (3, 2):
        round_, sums = begun(tmp_path, MASKED)
        columns, masks = masked_sums(sums[:devices])
        round_.accept(columns)
        round_.add(columns)
        made, _ = round_.commit(1, round_.summary({}), masks=masks)
        counted.append(result(made.model, ASKED)["rows"])
    assert counted[0] - counted[1] == sums[2, 0] == 4
