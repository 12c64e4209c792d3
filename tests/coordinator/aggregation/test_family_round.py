"""A family's round: each member is averaged by itself, to the bits of a round of its own."""

from __future__ import annotations

from math import hypot
from typing import Any

import numpy as np
import pytest
from fleetlearn_coordinator.aggregation import optimizers
from fleetlearn_coordinator.aggregation.family_round import (
    FamilyRound,
    FamilyRules,
    MemberRules,
    replace_models,
)
from fleetlearn_coordinator.aggregation.model_state import ModelState
from fleetlearn_coordinator.aggregation.open_round import OpenRound
from fleetlearn_coordinator.aggregation.reports import ReportColumns
from fleetlearn_coordinator.aggregation.weighing.fair import fair
from fleetlearn_coordinator.aggregation.weighing.norm_bound import NormBound
from fleetlearn_coordinator.aggregation.weighing.weighing import Weighing
from fleetlearn_protocol.errors import Code, FleetError
from fleetlearn_protocol.messages import UPDATE
from round_reports import masked_rules_of, reports_of_rows, rules_of, state_of

SMALL, LARGE = [1.0, 2.0], [3.0, 4.0, 5.0]
INITIAL = np.array(SMALL + LARGE, np.float32)


def family_of(**more: Any) -> FamilyRules:
    return FamilyRules(
        [MemberRules("small", rules_of(**more), 2), MemberRules("large", rules_of(**more), 3)]
    )


def first_of(family: FamilyRules, **more: Any) -> ModelState:
    usual: dict[str, Any] = {"version": 0, "optimizer_state": family.init(INITIAL), "vectors": {}}
    return family.make_state(None, model=INITIAL, **(usual | more))


def opened(family: FamilyRules, state: ModelState | None = None) -> FamilyRound:
    round = family.open_round(first_of(family) if state is None else state)
    assert isinstance(round, FamilyRound)
    return round


def take(round: FamilyRound | OpenRound, reports: ReportColumns) -> None:
    received = round.receive(reports)
    assert received.refusal is None
    round.accept(received.accepted)
    round.add(received.accepted)


def of_small(*updates: list[float], **more: Any) -> ReportColumns:
    return reports_of_rows(updates, [*range(1, 1 + len(updates))], **({"member": 0} | more))


def of_large(*updates: list[float], **more: Any) -> ReportColumns:
    return reports_of_rows(updates, [*range(1, 1 + len(updates))], **({"member": 1} | more))


def test_each_member_s_reports_are_averaged_by_themselves() -> None:
    """(3, 0) with weight 1 and (0, 3) with weight 2 have the mean (1, 2); the other member's only
    update counts whole."""
    round = opened(family_of())
    take(round, of_small([3.0, 0.0], [0.0, 3.0], loss=np.array([1.0, 4.0])))
    take(round, of_large([1.0, 1.0, 2.0], loss=np.array([9.0])))
    summary = round.summary({"lost": 1})
    assert (len(round), summary["reports"], summary["dropped"]) == (3, 3, {"lost": 1})
    assert summary["metrics"] == {"loss": (1 * 1.0 + 2 * 4.0 + 1 * 9.0) / 4}
    assert summary["members"]["small"]["metrics"] == {"loss": 3.0}
    assert summary["members"]["large"]["metrics"] == {"loss": 9.0}
    made = round.commit(1, summary)
    assert made.state.model.tolist() == [2.0, 4.0, 4.0, 5.0, 7.0]
    small, large = (made.summary["members"][name]["change"] for name in ("small", "large"))
    assert (small, large) == (pytest.approx(5**0.5), pytest.approx(6**0.5))
    assert made.summary["change"] == pytest.approx(hypot(small, large))
    assert made.state.version == 1
    assert [each.version for each in made.state.members] == [1, 1]


def test_members_equal_rounds_of_their_own_bit_for_bit() -> None:
    """Over three rounds, with the optimizer's state; in arrays and one by one."""
    weighing = Weighing(fair(0.5, 0.1), NormBound(2.0, "clip", 0.5))
    more = {"optimizer": optimizers.make("adam"), "weighing": weighing, "outlive": True}
    family = family_of(**more)
    state = first_of(family)
    alone = [state_of(rules_of(**more), SMALL), state_of(rules_of(**more), LARGE)]
    random = np.random.default_rng(0)
    for number in range(1, 4):
        round = opened(family, state)
        for member, size in enumerate((2, 3)):
            updates = random.standard_normal((4, size)).astype(np.float32).tolist()
            own = OpenRound(rules_of(**more), alone[member])
            more_of = {"loss": random.random(4) + 0.5, "staleness": [0, 1, 0, 2]}
            for each in (of_small, of_large)[member : member + 1]:
                take(round, each(*updates, one_by_one=True, **more_of))
                take(own, each(*updates, **more_of))
            made = own.commit(number, own.summary({}))
            alone[member] = made.state
        state = round.commit(number, round.summary({})).state
        assert len(state.members) == 2
        for found, expected in zip(state.members, alone, strict=True):
            assert found.model.tobytes() == expected.model.tobytes()
            assert found.weighing == expected.weighing
            for slot, values in expected.optimizer_state.items():
                assert found.optimizer_state[slot].tobytes() == values.tobytes()


def test_a_member_without_a_report_keeps_its_model_and_its_state() -> None:
    weighing = Weighing(fair(0.5, 0.1), NormBound(2.0, "clip", 0.5))
    family = family_of(optimizer=optimizers.make("momentum"), weighing=weighing)
    round = opened(family)
    take(round, of_large([1.0, 1.0, 2.0]))
    take(round, of_small([1.0, 1.0]))
    first = round.commit(1, round.summary({}))
    round = opened(family, first.state)
    take(round, of_large([1.0, 1.0, 2.0]))
    second = round.commit(2, round.summary({}))
    before, after = first.state.members[0], second.state.members[0]
    assert after.model.tolist() == before.model.tolist()
    assert after.optimizer_state["v"].tolist() == before.optimizer_state["v"].tolist()
    assert (after.version, after.weighing) == (2, before.weighing)
    assert second.summary["members"]["small"]["change"] == 0.0
    assert second.summary["members"]["small"]["reports"] == 0
    # what a restart makes of the summary is what this process has
    again = family.make_state(
        second.summary,
        version=2,
        model=second.state.model,
        optimizer_state=second.state.optimizer_state,
        vectors={},
    )
    assert [each.weighing for each in again.members] == [
        each.weighing for each in second.state.members
    ]


def test_the_members_arrays_are_parts_of_the_family_s() -> None:
    family = family_of(optimizer=optimizers.make("momentum"))
    round = opened(family)
    take(round, of_small([1.0, 1.0]))
    for state in (first_of(family), round.commit(1, round.summary({})).state):
        for own, place in zip(state.members, family.places, strict=True):
            assert np.shares_memory(own.model, state.model)
            assert own.model.tolist() == state.model[place].tolist()
            assert np.shares_memory(own.optimizer_state["v"], state.optimizer_state["v"])
    assert family.models_of(INITIAL)["large"].tolist() == LARGE
    assert family.size == 5


def test_saved_sums_are_loaded_by_the_members_names() -> None:
    whole, first, again = (opened(family_of()) for _ in range(3))
    for round in (whole, first):
        take(round, of_small([1.0, 5.0], one_by_one=True))
        take(round, of_large([1.0, 5.0, 2.0], one_by_one=True))
    tensors = first.sums.to_tensors()
    assert {name.partition("/")[0] for name in tensors} == {"small", "large"}
    assert first.sums.first_version_tensors() == {}
    again.sums.load_tensors({name: values.copy() for name, values in tensors.items()})
    for round, columns in ((again, of_small([1.0, 5.0])), (again, of_large([1.0, 5.0, 2.0]))):
        round.accept(columns)
    late = of_large([3.0, 3.0, 3.0], one_by_one=True)
    for round in (whole, again):
        take(round, late)
    models = [round.commit(1, round.summary({})).state.model for round in (whole, again)]
    assert models[0].tobytes() == models[1].tobytes()


def test_the_mixed_model_is_of_the_member_that_reported() -> None:
    family = family_of(outlive=True, mixing_rate=0.5, optimizer=optimizers.make("sgd", lr=0.5))
    round = opened(family)
    take(round, of_large([1.0, 1.0, 1.0], staleness=[1]))
    base = np.array([9.0, 9.0, 3.0, 4.0, 5.0], np.float32)
    made = round.commit(1, round.summary({}), base)
    assert made.state.model.tolist() == [1.0, 2.0, 3.25, 4.25, 5.25]
    assert made.summary["staleness"] == {"mean": 1.0, "max": 1, "stale": 1}


def test_a_report_of_another_size_is_none_of_the_member_s() -> None:
    round = opened(family_of())
    take(round, of_small([1.0, 1.0, 1.0]))  # waits with others, to be added together
    with pytest.raises(ValueError, match="shape"):
        round.commit(1, round.summary({}))


def test_a_refused_report_changes_nothing() -> None:
    round = opened(family_of())
    received = round.receive(of_large([1.0, 1.0, 1.0], [np.inf, 0.0, 0.0]))
    assert received.refusal is not None
    assert (received.accepted.member, len(received.accepted)) == (1, 1)
    with pytest.raises(ValueError, match="without a report"):
        round.commit(1, round.summary({}))


def test_one_model_alone_is_no_family() -> None:
    family = FamilyRules([MemberRules("", rules_of(), 5)])
    state = family.make_state(
        None, version=0, model=INITIAL, optimizer_state=family.init(INITIAL), vectors={}
    )
    assert state.members == ()
    assert type(family.open_round(state)) is OpenRound
    assert family.models_of(INITIAL)[""].tolist() == INITIAL.tolist()


def test_a_family_has_no_masks() -> None:
    with pytest.raises(ValueError, match="member a: a family's rounds have no privacy or masks"):
        FamilyRules([MemberRules("a", masked_rules_of(), 2)])


# Other models in the place of the averaged ones


def test_replaced_models_are_the_next_ones_and_their_change_is_stated() -> None:
    family = family_of(optimizer=optimizers.make("momentum"))
    round = opened(family)
    take(round, of_small([1.0, 1.0]))
    take(round, of_large([1.0, 1.0, 1.0]))
    averaged = round.commit(1, round.summary({}))
    model = np.array([6.0, 8.0, 5.0], np.float32)
    made = replace_models(family, averaged, round.state, {"large": model})
    assert made.state.model.tolist() == [2.0, 3.0, 6.0, 8.0, 5.0]
    assert made.state.members[1].model.tolist() == model.tolist()
    assert made.state.optimizer_state["v"].tolist() == [1.0] * 5
    assert made.summary["members"]["large"]["change"] == 5.0
    assert made.summary["change"] == pytest.approx(27**0.5)
    assert averaged.state.model.tolist() == [2.0, 3.0, 4.0, 5.0, 6.0]
    assert made.state.digest != averaged.state.digest


def test_the_one_model_of_a_run_is_replaced_too() -> None:
    family = FamilyRules([MemberRules("", rules_of(), 2)])
    round = family.open_round(state_of(rules_of(), SMALL))
    take(round, of_small([1.0, 1.0]))
    averaged = round.commit(1, round.summary({}))
    model = np.array([4.0, 6.0], np.float32)
    made = replace_models(family, averaged, round.state, {"": model})
    assert (made.state.model.tolist(), made.summary["change"]) == ([4.0, 6.0], 5.0)


@pytest.mark.parametrize(
    ("models", "error"),
    [
        ({"large": np.zeros(2, np.float32)}, ValueError),
        ({"large": np.zeros(3)}, ValueError),
        ({"other": np.zeros(3, np.float32)}, ValueError),
        ({"large": np.array([0.0, np.nan, 0.0], np.float32)}, FleetError),
    ],
)
def test_what_cannot_be_a_member_s_model_replaces_none(
    models: dict[str, Any], error: type[Exception]
) -> None:
    family = family_of()
    round = opened(family)
    take(round, of_small([1.0, 1.0]))
    averaged = round.commit(1, round.summary({}))
    with pytest.raises(error) as caught:
        replace_models(family, averaged, round.state, models)
    if isinstance(caught.value, FleetError):
        assert caught.value.code is Code.NOT_FINITE
    assert UPDATE in round.rounds[0].sums.states
