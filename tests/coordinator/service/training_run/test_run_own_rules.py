"""An own stop rule and an own strategy in a run: rounds, roll backs and restarts in any order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from answering import NOW, Fleet, leases
from fleetlearn_coordinator import Choice, PastRound, Plan
from fleetlearn_coordinator.plan.own_algorithms import SELECTION_STRATEGY, STOP_RULE
from fleetlearn_coordinator.rounds.own_stop_rule import OwnRuleError
from fleetlearn_coordinator.storage.find_storage import find_storage
from fleetlearn_protocol import extensions
from fleetlearn_protocol.messages import Evaluation
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from peers import PlanMaker, plan_text, update_of, write_test_bundle

OWN: dict[str, Any] = {
    "round__goal": 1,
    "round__gather": 0.0,
    "models__last": 50,
    "stop__rounds": 50,
    "stop__rule": "enough-loss",
    "stop__parameters": {"most": 3.0},
    "selection__strategy": "last-name",
}


def enough_loss(most: float) -> Any:
    """Stop when the losses of the rounds add up to more."""

    def decide(past: Sequence[PastRound]) -> str | None:
        total = sum(each.metrics["loss"] for each in past)
        return f"{total:.1f} is more than {most}" if total > most else None

    return decide


def last_name() -> Any:
    return lambda choice: [device.name for device in reversed(choice.devices)]


def broken() -> Any:
    def strategy(choice: Choice) -> Sequence[str]:
        raise KeyError("no such label")

    return strategy


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    with extensions.apart():
        extensions.register(STOP_RULE, "enough-loss", enough_loss)
        extensions.register(SELECTION_STRATEGY, "last-name", last_name)
        extensions.register(SELECTION_STRATEGY, "broken", broken)
        yield


def train(fleet: Fleet, loss: float) -> None:
    (lease,) = leases(fleet.check_in("a")) or leases(fleet.check_in("a"))
    fleet.report(lease, update_of(1.0), evaluation=Evaluation(10, 10 * loss, {"accuracy": 1.0}))


def restarted(fleet: Fleet, plan: Plan) -> Fleet:
    fleet.store.close()
    fleet = Fleet(plan)
    fleet.run.resume(NOW)
    return fleet


def test_a_finished_run_goes_on_without_the_rule(make_plan: PlanMaker) -> None:
    plan = make_plan(**OWN)
    fleet = Fleet(plan)
    for loss in (1.0, 1.5, 1.0):
        assert fleet.run.finished is None
        train(fleet, loss)
    assert fleet.run.finished == "3.5 is more than 3.0"
    fleet = restarted(fleet, plan)
    assert fleet.run.finished == "3.5 is more than 3.0"
    more = make_plan(**OWN | {"stop__parameters": {"most": 4.0}})
    fleet = restarted(fleet, more)
    assert fleet.run.finished is None
    train(fleet, 1.0)
    assert fleet.run.finished == "4.5 is more than 4.0"
    fleet.store.close()


def test_a_strategy_that_fails_stops_the_run_which_goes_on_when_it_is_mended(
    make_plan: PlanMaker,
) -> None:
    fleet = Fleet(make_plan(**OWN | {"selection__strategy": "broken"}))
    with pytest.raises(OwnRuleError, match=r"selection\.strategy failed: KeyError"):
        fleet.check_in("a")
    fleet = restarted(fleet, make_plan(**OWN))
    train(fleet, 0.5)
    assert fleet.run.engine.version == 1
    fleet.store.close()


class AnyOrder(RuleBasedStateMachine):
    """The run's rule has the rounds since the last roll back, whatever happened."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory()
        base = Path(self.folder.name)
        bundle = write_test_bundle(base / "test.bundle")
        self.plan = Plan.parse(plan_text(bundle, base / "run", **OWN), base)
        self.fleet = Fleet(self.plan)
        self.losses: list[float] = []

    @property
    def is_over(self) -> bool:
        return self.fleet.run.finished is not None

    @precondition(lambda self: not self.is_over)
    @rule(loss=st.sampled_from([0.25, 0.5, 1.0]))
    def train(self, loss: float) -> None:
        train(self.fleet, loss)
        self.losses.append(loss)

    @rule()
    def restart(self) -> None:
        self.fleet = restarted(self.fleet, self.plan)

    @precondition(lambda self: not self.is_over and self.losses)
    @rule(data=st.data())
    def roll_back(self, data: st.DataObject) -> None:
        run = self.fleet.run
        version = data.draw(st.integers(0, run.engine.version - 1))
        find_storage(self.plan.data_dir).requests.ask_for_roll_back(version, "command")
        assert run.roll_backs.look(NOW.wall)
        run.work.do_work(NOW)
        self.losses.clear()

    @invariant()
    def the_rule_has_the_rounds(self) -> None:
        own = self.fleet.run.work.own_stop
        assert own is not None
        assert [each.metrics["loss"] for each in own.rounds] == self.losses
        assert self.is_over == (sum(self.losses) > 3.0)

    def teardown(self) -> None:
        self.fleet.store.close()
        self.folder.cleanup()


# Few: each restart looks for the function's version among all installed packages.
USUAL = settings(
    max_examples=4, stateful_step_count=12, deadline=None, suppress_health_check=[*HealthCheck]
)
LONG = settings(USUAL, max_examples=60, stateful_step_count=30)


@pytest.mark.parametrize(
    "usual", [USUAL, pytest.param(LONG, marks=pytest.mark.slow)], ids=["", "for long"]
)
def test_any_order(usual: settings) -> None:
    run_state_machine_as_test(AnyOrder, settings=usual)
