"""A round with regions: each has sums of its own, so that a region that has failed is left out of
the model as a whole.

By default each update weighs what it weighs in a round without regions. As sums are exact and
merge, the model is then the same, to the last bit, as the model of a round without regions that has
the same updates. Otherwise each region has a weight: the model moves by the weighted mean of the
regions' means (of their aggregators' results), whatever their numbers of updates are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import fsum
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
from fleetlearn_protocol.messages import UPDATE
from fleetlearn_protocol.secure.fixed_point import Words
from fleetlearn_protocol.vector import Vector

from fleetlearn_coordinator.aggregation.aggregators import Aggregator
from fleetlearn_coordinator.aggregation.family_round import FamilyRound, FamilyRules, FamilySums
from fleetlearn_coordinator.aggregation.model_state import ModelState
from fleetlearn_coordinator.aggregation.open_round import CommittedRound, OpenRound, Received
from fleetlearn_coordinator.aggregation.reports import ReportColumns
from fleetlearn_coordinator.aggregation.round_rules import RoundRules
from fleetlearn_coordinator.aggregation.round_summary import REGIONS
from fleetlearn_coordinator.aggregation.updates import Result

S = TypeVar("S")


@dataclass(frozen=True)
class RegionalWeights:
    """The regions of a run, and what each weighs in the model."""

    names: tuple[str, ...]
    """In the plan's order."""
    weights: Mapping[str, float] | None = None
    """Region -> its weight, above 0. None: its updates' weights are all that counts."""


class RegionalRound:
    """The reports of a round with regions: in the place of an ``OpenRound``, which has the meaning
    of each method. ``end_regions`` comes before ``summary`` and ``commit``."""

    def __init__(self, rules: RoundRules, state: ModelState, regions: RegionalWeights) -> None:
        self.rules, self.state, self.regions = rules, state, regions
        self.rounds = {name: OpenRound(rules, state) for name in regions.names}
        self.sums = FamilySums(self.rounds)
        """The sums of each region, by name."""
        self.done: tuple[str, ...] = ()
        """The regions that count."""

    def part_of(self, reports: ReportColumns) -> OpenRound:
        """Return the round of these reports' region."""
        assert reports.region is not None, "each report of a round with regions is of one of them"
        return self.rounds[reports.region]

    def receive(self, reports: ReportColumns) -> Received:
        return self.part_of(reports).receive(reports)

    def accept(self, reports: ReportColumns) -> None:
        self.part_of(reports).accept(reports)

    def add(self, reports: ReportColumns) -> None:
        self.part_of(reports).add(reports)

    def end_regions(self, done: Collection[str]) -> None:
        """Let the reports of these regions alone count."""
        self.done = tuple(name for name in self.regions.names if name in done)

    def __len__(self) -> int:
        """How many reports count."""
        return sum(len(self.rounds[name]) for name in self.done)

    def staleness(self) -> list[int]:
        return self._whole().staleness()

    def summary(self, dropped: Mapping[str, int]) -> dict[str, Any]:
        """Return what is known of the reports that count, and of each region in ``REGIONS``: how
        many reports it has, and whether it is done."""
        regions = {
            name: {"reports": len(round), "done": name in self.done}
            for name, round in self.rounds.items()
        }
        return self._whole().summary(dropped) | {REGIONS: regions}

    def commit(
        self,
        number: int,
        summary: Mapping[str, Any],
        base: Vector | None = None,
        masks: Words | None = None,
    ) -> CommittedRound:
        """Make the next model of the regions that are done. Their sums are used up: call once."""
        whole, weights = self._whole(), self.regions.weights
        if weights is None:
            for name in self.done:
                whole.sums.merge(self.rounds[name].sums)
        else:
            parts = [WeighedRegion(weights[name], self.rounds[name]) for name in self.done]
            _combine(whole, parts)
        return whole.commit(number, summary, base, masks)

    def _whole(self) -> OpenRound:
        """Return a round of the reports that count, without sums."""
        whole = OpenRound(self.rules, self.state)
        for name in self.done:
            whole.accepted += self.rounds[name].accepted
        return whole


AnyRound: TypeAlias = OpenRound | FamilyRound | RegionalRound


def open_round(
    rules: FamilyRules, state: ModelState, regions: RegionalWeights | None = None
) -> AnyRound:
    """Return a round of a run over this state, without reports. ``regions``: of a run with one
    model. None: its rounds have no regions."""
    if regions is None:
        return rules.open_round(state)
    assert not rules.is_family, "the plan's rules see to that"
    return RegionalRound(rules.members[0].rules, state, regions)


class WeighedRegion(NamedTuple):
    """A region that is done."""

    weight: float
    round: OpenRound


def _combine(whole: OpenRound, regions: Sequence[WeighedRegion]) -> None:
    """Let the updates of ``whole`` have the weighted mean of the regions' results. What devices
    report beside their updates, such as SCAFFOLD's changes, is a sum of all."""
    for region in regions:
        region.round.sums.add_waiting()
        for part, aggregator in whole.rules.aggregators.items():
            if part != UPDATE:
                aggregator.merge(whole.sums.states[part], region.round.sums.states[part])
    aggregator = whole.rules.aggregators[UPDATE]
    states = [(region.weight, region.round.sums.states[UPDATE]) for region in regions]
    of_all = {**whole.rules.aggregators, UPDATE: _mean_of(aggregator, states)}
    whole.rules = replace(whole.rules, aggregators=of_all)


def _mean_of(aggregator: Aggregator[S], states: Iterable[tuple[float, S]]) -> Aggregator[S]:
    """Return an aggregator whose result is the weighted mean of its results for these states."""
    states = [*states]
    total = fsum(weight for weight, _ in states)

    def result(_: S, present: Vector) -> Result:
        found = [(weight / total, aggregator.result(state, present)) for weight, state in states]
        delta = sum((share * each.delta for share, each in found), np.zeros(1))
        buffers = sum((share * each.buffers for share, each in found), np.zeros(1))
        return Result(delta, buffers)

    return aggregator._replace(result=result)
