"""The rules of a round: nothing that a device sends goes by the sum that a private round's noise is
for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fleetlearn_coordinator.aggregation import aggregators, optimizers
from fleetlearn_coordinator.aggregation.modular_sum import FixedPoint, modular_sum
from fleetlearn_coordinator.aggregation.privacy.rules import PrivacyRules
from fleetlearn_coordinator.aggregation.weighing.fair import fair
from fleetlearn_coordinator.aggregation.weighing.norm_bound import Enforced, NormBound
from fleetlearn_coordinator.aggregation.weighing.normalised import normalised
from fleetlearn_coordinator.aggregation.weighing.weighing import PLAIN, Weighing
from fleetlearn_protocol.messages import CONTROL, UPDATE
from round_reports import masked_rules_of, private_rules_of

RULES = private_rules_of(4)
BOUND = RULES.weighing.bound
MEAN = aggregators.make("mean")


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ({"aggregators": {UPDATE: MEAN, CONTROL: MEAN}}, "the parts update, control"),
        ({"aggregators": {UPDATE: aggregators.make("median")}}, "the aggregator median"),
        (
            {"optimizer": optimizers.make("sgd")._replace(buffers=[slice(1, 2)])},
            "buffers that devices report",
        ),
        ({"weighing": Weighing(fair(1.0, 0.1), BOUND)}, "updates that are fair"),
        ({"weighing": Weighing(normalised("sgd", 0.0, 0.0), BOUND)}, "updates that are normalised"),
        ({"mixing_rate": 0.6}, "a server that mixes models"),
        ({"devices": 10}, "a share of devices"),
        ({"adaptive_mu": True}, "a mu that follows the loss"),
        ({"weighing": PLAIN}, "not clipped"),
        ({"weighing": Weighing(bound=NormBound(1.0, "clip"))}, "not clipped"),
        ({"weighing": Weighing(bound=NormBound(2.0, "clip", enforced=Enforced(1, 4)))}, "norm 1 "),
        ({"weighing": Weighing(bound=NormBound(1.0, "clip", enforced=Enforced(9, 4)))}, "norm 1 "),
    ],
)
def test_a_private_round_has_no_way_around_the_bounded_sum(more: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        replace(RULES, **more)
    if "weighing" not in more:
        assert replace(RULES, privacy=None, **more).privacy is None, "others may have it"


MASKED = masked_rules_of()
PRIVATE = PrivacyRules(mechanism="gaussian", noise=1.0, goal=4, participations=4, clip=1.0)
MODULAR = modular_sum(FixedPoint(1.0, 20, equal=True))


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ({"aggregators": {UPDATE: MODULAR, CONTROL: MEAN}}, "the parts update, control"),
        ({"aggregators": {UPDATE: MEAN}}, "the aggregator mean: it takes the modular sum"),
        ({"aggregators": {UPDATE: aggregators.make("median")}}, "the aggregator median"),
        ({"optimizer": optimizers.make("sgd")._replace(buffers=[slice(1, 2)])}, "not masked"),
        ({"weighing": Weighing(fair(1.0, 0.1))}, "updates that are fair"),
        ({"weighing": Weighing(bound=NormBound(1.0, "clip"))}, "a bound on norms"),
        ({"mixing_rate": 0.6}, "a server that mixes models"),
        ({"devices": 10}, "a share of devices"),
        ({"adaptive_mu": True}, "a mu that follows the loss"),
        ({"privacy": replace(PRIVATE, mechanism="local")}, "noise of each device"),
        ({"privacy": replace(PRIVATE, clip_quantile=0.5)}, "a clip norm that follows"),
        ({"privacy": replace(PRIVATE, metrics=True)}, "metrics of single devices"),
        ({"privacy": replace(PRIVATE, clip=2.0)}, "clip to 1, where its noise is for 2"),
        ({"privacy": replace(PRIVATE, mechanism="distributed")}, "without the devices' own noise"),
        (
            {"privacy": PRIVATE, "secure": FixedPoint(1.0, 20, True, 50.0)},
            '"gaussian" and masked updates with the devices\' own noise',
        ),
    ],
)
def test_a_round_of_masked_updates_looks_at_none_of_them(more: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        replace(MASKED, **more)


def test_a_round_of_masked_updates_may_be_private_and_only_such_a_round_adds_words() -> None:
    assert replace(MASKED, privacy=PRIVATE).privacy == PRIVATE
    assert replace(MASKED, privacy=replace(PRIVATE, mechanism="dp-ftrl")).secure is not None
    with pytest.raises(ValueError, match="is for rounds of masked updates alone"):
        replace(MASKED, secure=None)
