"""A round of masked updates by hand: what it accepts, what it adds up to, what its summary says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fleetlearn_coordinator.aggregation.modular_sum import FixedPoint, modular_sum
from fleetlearn_coordinator.aggregation.open_round import OpenRound
from fleetlearn_coordinator.aggregation.privacy.release import begin
from fleetlearn_coordinator.aggregation.privacy.rules import PrivacyRules
from fleetlearn_coordinator.aggregation.reports import ReportColumns
from fleetlearn_coordinator.aggregation.updates import MaskedArray
from fleetlearn_protocol.messages import UPDATE, Evaluation
from fleetlearn_protocol.secure.distributed_noise import noisy_words
from fleetlearn_protocol.secure.fixed_point import Words, weighted_words
from round_reports import masked_rules_of, reports_of_rows, rules_of, state_of

UPDATES = np.array([[0.5, -0.25], [0.25, 0.75], [-1.0, 0.0]], np.float32)
SHARES = (1.0, 0.5, 0.25)
STEP = 2 / (2**20 - 1)


def masked(equal: bool = True, *, in_array: bool = False) -> tuple[ReportColumns, Words]:
    """Return three reports and the sum of their masks."""
    draw = np.random.default_rng(3)
    shares = (1.0, 1.0, 1.0) if equal else SHARES
    words = np.array(
        [
            weighted_words(update * np.float32(share), share, 1.0, 20, draw.random(3))
            for update, share in zip(UPDATES, shares, strict=True)
        ]
    )
    masks = draw.integers(0, 2**32, words.shape, np.uint32)
    words += masks
    reports = reports_of_rows(
        UPDATES.tolist(),
        [1, 1, 1],
        staleness=[0, 3, 0],
        evaluations=[Evaluation(10, 5.0, {"accuracy": 9.0}), None, None],
        personal=[None] * 3,
    )
    reports.largest = {UPDATE: np.zeros(3)}
    reports.parts = {UPDATE: words if in_array else list(map(MaskedArray, words))}
    return reports, masks.sum(axis=0, dtype=np.uint32)


def opened(rules: Any, reports: ReportColumns, **more: Any) -> OpenRound:
    round = OpenRound(rules, state_of(rules, [1.0, 2.0], **more))
    received = round.receive(reports)
    assert received.refusal is None
    round.accept(received.accepted)
    round.add(received.accepted)
    return round


@pytest.mark.parametrize("in_array", [False, True])
@pytest.mark.parametrize("equal", [True, False])
def test_the_model_moves_by_the_weighted_mean(equal: bool, in_array: bool) -> None:
    """A stale update counts as its device wrote it: what staleness leaves of it is under the
    mask."""
    reports, masks = masked(equal, in_array=in_array)
    round = opened(masked_rules_of(equal=equal), reports)
    shares = np.ones(3) if equal else np.array(SHARES)
    expected = np.array([1, 2]) + shares @ UPDATES / shares.sum()
    for _ in range(2):  # a commit changes nothing of the round
        made = round.commit(1, round.summary({}), masks=masks)
        assert made.state.model == pytest.approx(expected, abs=6 * STEP)


def test_a_round_is_not_committed_without_the_masks_of_its_own_reports() -> None:
    reports, masks = masked()
    round = opened(masked_rules_of(), reports)
    with pytest.raises(ValueError, match="needs the sum of their masks"):
        round.commit(1, round.summary({}))
    with pytest.raises(ValueError, match="A mask was not taken off"):
        round.commit(1, round.summary({}), masks=masks + np.uint32(1))
    round.accept(reports)  # and not added
    with pytest.raises(ValueError, match="6 reports count; 3 masked updates are added"):
        round.commit(1, round.summary({}), masks=masks)


def test_the_summary_says_nothing_of_what_single_devices_measured() -> None:
    reports, masks = masked()
    round = opened(masked_rules_of(), reports)
    made = round.commit(1, round.summary({"lost": 1}), masks=masks).summary
    assert made["reports"] == 3
    for key in ("train", "evaluation", "metrics", "behind"):
        assert made[key] == {}
    others = opened(rules_of(), reports_of_rows(UPDATES.tolist(), [1, 1, 1])).summary({})
    assert others["metrics"], "other rounds say it"


def test_noise_is_added_to_the_unmasked_sum_and_divided_by_the_goal() -> None:
    """The noise on a sum is 2^-9 of the most that an update adds: the sum shows, not exactly."""
    privacy = PrivacyRules(
        mechanism="gaussian", noise=2.0**-9, goal=4, participations=1, clip=1.0, largest_weight=5
    )
    rules = masked_rules_of(equal=False, privacy=privacy)
    reports, masks = masked(equal=False)
    round = opened(rules, reports, privacy=begin(privacy, bytes(range(32)), 2))
    made = round.commit(1, round.summary({}), masks=masks)
    moved = made.state.model - np.array([1, 2])
    exact = np.array(SHARES) @ UPDATES / 4
    assert 0 < np.abs(moved - exact).max() < 6 * 2.0**-9 / 4
    assert made.summary["privacy"] == {"release": 1, "clip": 1.0}
    again = round.commit(1, round.summary({}), masks=masks)
    np.testing.assert_array_equal(again.state.model, made.state.model)


def test_a_round_whose_devices_add_noise_is_divided_by_the_goal_and_gets_no_more_noise() -> None:
    """Goal 10, C = 1: the mean is a tenth of the sum that came out, to the last bit."""
    numbers = FixedPoint(1.0, 20, True, 4e5)
    privacy = PrivacyRules(mechanism="distributed", noise=1.0, goal=10, participations=10, clip=1.0)
    rules = masked_rules_of(
        aggregators={UPDATE: modular_sum(numbers)}, secure=numbers, privacy=privacy
    )
    draw = np.random.default_rng(4)
    words = np.array([noisy_words(each, 1.0, 20, 4e5, draw.bytes(32)) for each in UPDATES])
    masks = draw.integers(0, 2**32, words.shape, np.uint32)
    reports, _ = masked()
    reports.parts = {UPDATE: list(map(MaskedArray, words + masks))}
    round = opened(rules, reports, privacy=begin(privacy, bytes(32), 2))
    total = words[:, :-1].view(np.int32).sum(axis=0) / (2**19 - 1)
    assert (np.abs(total - UPDATES.sum(axis=0)) > 0.01).all(), "there is noise in it"
    made = round.commit(1, round.summary({}), masks=masks.sum(axis=0, dtype=np.uint32))
    expected = (np.array([1, 2]) + total / 10).astype(np.float32)
    assert made.state.model.tolist() == expected.tolist()
    assert made.state.privacy is not None
    assert made.state.privacy.releases == 1
