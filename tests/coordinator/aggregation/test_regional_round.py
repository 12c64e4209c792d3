"""A round with regions: the bits of a round without, unless a region has failed or has a weight."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fleetlearn_coordinator.aggregation import aggregators
from fleetlearn_coordinator.aggregation.family_round import FamilyRules, MemberRules
from fleetlearn_coordinator.aggregation.model_state import ModelState
from fleetlearn_coordinator.aggregation.open_round import OpenRound
from fleetlearn_coordinator.aggregation.privacy.release import begin
from fleetlearn_coordinator.aggregation.regional_round import (
    AnyRound,
    RegionalRound,
    RegionalWeights,
    open_round,
)
from fleetlearn_coordinator.aggregation.reports import ReportColumns
from fleetlearn_coordinator.aggregation.round_rules import RoundRules
from fleetlearn_coordinator.aggregation.round_summary import describe_regions
from fleetlearn_coordinator.aggregation.weighing.fair import fair
from fleetlearn_coordinator.aggregation.weighing.weighing import Weighing
from fleetlearn_protocol.messages import CONTROL, UPDATE
from round_reports import private_rules_of, reports_of_rows, rules_of, state_of

NAMES = ("north", "south", "west")
BY_UPDATES = RegionalWeights(NAMES)


def opened(
    rules: RoundRules, state: ModelState, regions: RegionalWeights = BY_UPDATES
) -> RegionalRound:
    round = open_round(FamilyRules([MemberRules("", rules, state.model.size)]), state, regions)
    assert isinstance(round, RegionalRound)
    return round


def take(round: AnyRound, reports: ReportColumns) -> None:
    received = round.receive(reports)
    assert received.refusal is None
    round.accept(received.accepted)
    round.add(received.accepted)


def reports_in(region: str | None, updates: Any, weights: Any, **more: Any) -> ReportColumns:
    return replace(reports_of_rows(updates, weights, **more), region=region)


def random_reports(count: int, size: int, seed: int) -> tuple[Any, list[int]]:
    random = np.random.default_rng(seed)
    updates = random.normal(size=(count, size)) * 10.0 ** random.integers(-6, 6, (count, 1))
    return updates.astype(np.float32), random.integers(1, 1000, count).tolist()


@pytest.mark.parametrize("weighing", [None, fair(2.0, 0.1)], ids=["plain", "q-FedAvg"])
def test_the_model_is_that_of_a_round_without_regions_bit_for_bit(weighing: Any) -> None:
    rules = rules_of(**({} if weighing is None else {"weighing": Weighing(weighing)}))
    state = state_of(rules, [0.5] * 50)
    flat, regional = OpenRound(rules, state), opened(rules, state)
    for place, name in enumerate(NAMES):
        updates, weights = random_reports(7 + place, 50, place)
        loss = np.linspace(0.5, 3.0, len(weights))
        take(flat, reports_in(None, updates, weights, loss=loss))
        take(regional, reports_in(name, updates, weights, loss=loss))
    regional.end_regions(NAMES)
    assert len(regional) == len(flat) == 24
    expected = flat.commit(1, flat.summary({"lost": 1}))
    summary = regional.summary({"lost": 1})
    made = regional.commit(1, summary)
    assert made.state.digest == expected.state.digest
    regions = made.summary["regions"]
    assert regions == {
        "north": {"reports": 7, "done": True},
        "south": {"reports": 8, "done": True},
        "west": {"reports": 9, "done": True},
    }
    assert {k: v for k, v in made.summary.items() if k != "regions"} == expected.summary


def test_a_failed_region_contributes_nothing() -> None:
    rules = rules_of()
    state = state_of(rules, [1.0, 2.0])
    round = opened(rules, state)
    take(round, reports_in("north", [[3.0, 0.0], [0.0, 3.0]], [1, 2]))
    take(round, reports_in("south", [[1e6, 1e6]], [1000], loss=np.array([99.0])))
    round.end_regions({"north"})
    summary = round.summary({})
    assert (summary["reports"], len(round), round.staleness()) == (2, 2, [])
    assert summary["metrics"]["loss"] < 99.0
    assert describe_regions(summary) == [
        "reports of regions: north 2, south 1 (failed), west 0 (failed)"
    ]
    assert round.commit(1, summary).state.model.tolist() == [2.0, 4.0]


def test_regions_with_weights_count_by_them_and_not_by_their_updates() -> None:
    """North's mean is (1, 2), south's (4, 0), with weights 3 and 1: (1.75, 1.5)."""
    rules = rules_of()
    state = state_of(rules, [1.0, 2.0])
    weights = RegionalWeights(NAMES, {"north": 3.0, "south": 1.0, "west": 9.0})
    round = opened(rules, state, weights)
    take(round, reports_in("north", [[3.0, 0.0], [0.0, 3.0]], [1, 2]))
    take(round, reports_in("south", [[4.0, 0.0]], [500]))
    round.end_regions(("south", "north"))
    made = round.commit(1, round.summary({}))
    assert made.state.model.tolist() == [2.75, 3.5]


def test_buffers_and_sums_beside_the_update_go_on_too() -> None:
    """The buffer (the second element) has the weighted mean of the regions' values; SCAFFOLD's
    changes are a sum of all devices'."""
    mean = aggregators.make("mean")
    rules = rules_of(aggregators={UPDATE: mean, CONTROL: mean}, devices=4)
    control = np.zeros(2, np.float32)
    state = replace(state_of(rules, [0.0, 0.0]), vectors={CONTROL: control})
    for weights in (None, dict.fromkeys(NAMES, 1.0)):
        round = opened(rules, state, RegionalWeights(NAMES, weights))
        for name, change in (("north", 2.0), ("south", 6.0)):
            reports = reports_in(name, [[1.0, 1.0]], [1])
            parts = {**reports.parts, CONTROL: np.full((1, 2), change, np.float32)}
            largest = {**reports.largest, CONTROL: np.array([change])}
            take(round, replace(reports, parts=parts, largest=largest))
        round.end_regions(("north", "south"))
        made = round.commit(1, round.summary({}))
        assert made.state.vectors[CONTROL].tolist() == [2.0, 2.0]


def test_a_robust_aggregator_works_within_each_region() -> None:
    """The medians are (1, 1) and (5, 5); a device that lies moves neither."""
    rules = rules_of(aggregators={UPDATE: aggregators.make("median")})
    state = state_of(rules, [0.0, 0.0])
    round = opened(rules, state, RegionalWeights(NAMES, dict.fromkeys(NAMES, 1.0)))
    take(round, reports_in("north", [[1.0, 1.0], [1.0, 1.0], [1e6, -1e6]], [1, 1, 1]))
    take(round, reports_in("west", [[5.0, 5.0]], [1]))
    round.end_regions(("north", "west"))
    made = round.commit(1, round.summary({}))
    assert made.state.model.tolist() == [3.0, 3.0]


def test_a_private_round_has_its_noise_once() -> None:
    """On the sum of the regions that are done: the bits of a private round without regions."""
    rules = private_rules_of(3, clip=2.0, goal=4)
    assert rules.privacy is not None
    privacy = begin(rules.privacy, bytes(range(32)), 3)
    state = state_of(rules, [0.5, 1.0, 1.5], privacy=privacy)
    flat, regional = OpenRound(rules, state), opened(rules, state)
    for name, rows in (("north", [[1.0, 0.0, 0.5]]), ("south", [[0.0, 9.0, 0.0]])):
        take(flat, reports_in(None, rows, [1]))
        take(regional, reports_in(name, rows, [1]))
    take(regional, reports_in("west", [[1.0, 1.0, 1.0]], [1]))
    regional.end_regions(("north", "south"))
    expected = flat.commit(1, flat.summary({}))
    made = regional.commit(1, regional.summary({}))
    assert made.state.digest == expected.state.digest
    assert made.state.privacy is not None
    assert expected.state.privacy is not None
    assert made.state.privacy.releases == expected.state.privacy.releases == 1


def test_the_sums_of_all_regions_are_saved_and_read_again() -> None:
    rules = rules_of()
    state = state_of(rules, [1.0, 2.0])
    round, other = opened(rules, state), opened(rules, state)
    take(round, reports_in("north", [[3.0, 0.0]], [1]))
    take(round, reports_in("west", [[0.0, 3.0]], [2]))
    for each in round.rounds.values():
        each.sums.add_waiting()
    other.sums.load_tensors(round.sums.to_tensors())
    for name in ("north", "west"):
        other.rounds[name].accepted = round.rounds[name].accepted
    for each in (round, other):
        each.end_regions(("north", "west"))
    made = [each.commit(1, each.summary({})).state.digest for each in (round, other)]
    assert made[0] == made[1]


def test_without_regions_a_round_is_an_open_round() -> None:
    rules = rules_of()
    state = state_of(rules, [1.0])
    family = FamilyRules([MemberRules("", rules, 1)])
    assert type(open_round(family, state)) is OpenRound
