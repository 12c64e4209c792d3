"""What devices are told and asked in a private run, over real connections."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from fleetlearn_coordinator.privacy.accounting import gaussian_epsilon
from fleetlearn_protocol.messages import CheckIn, PrivacyNote, Welcome
from peers import PlanMaker, fleet, update_of

PRIVATE: dict[str, Any] = {
    "privacy__noise": 4.0,
    "privacy__epsilon": 8.0,
    "privacy__delta": 1e-6,
    "privacy__population": 100,
    "privacy__clip": 0.5,
    "privacy__participations": 3,
    "round__goal": 1,
    "stop__rounds": 3,
}


def run_async(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run an async test, with pytest's arguments."""

    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        asyncio.run(test(*arguments, **named))

    return run


@run_async
async def test_a_task_says_the_clip_norm_and_what_is_spent(make_plan: PlanMaker) -> None:
    """Before the first release nothing is; after it what one Gaussian mechanism spends."""
    async with fleet(make_plan("dp-fedavg", **PRIVATE)) as (_, join):
        a = await join("a")
        task = await a.do_round(update_of(1.0))
        assert (task.clip, task.local_noise) == (0.5, None)
        assert task.privacy == PrivacyNote(0.0, 1e-6, 8.0)
        again = await a.task()
        assert again.privacy is not None
        assert again.privacy.spent == pytest.approx(gaussian_epsilon(1 / 4, 1e-6))


@run_async
async def test_a_clip_norm_that_follows_the_updates_is_the_one_that_is_asked_for(
    make_plan: PlanMaker,
) -> None:
    more = {"round__goal": 40, "privacy__clip_quantile": 0.5, "privacy__noise": 1.0}
    plan = make_plan("dp-fedavg", **PRIVATE | more)
    async with fleet(plan) as (coordinator, join):
        devices = [await join(f"d{number}") for number in range(40)]
        tasks = [await device.do_round(update_of(1.0)) for device in devices]
        assert {task.clip for task in tasks} == {0.5}
        after = await devices[0].task()
        state = coordinator.run.models.newest.privacy
        assert state is not None
        assert after.clip == state.clip != 0.5


@run_async
async def test_noise_on_the_device_is_asked_of_those_that_can(make_plan: PlanMaker) -> None:
    plan = make_plan("dp-fedavg", **PRIVATE | {"privacy__mechanism": "local"})
    async with fleet(plan) as (coordinator, join):
        old, new = await join("old", check_in=False), await join("new", check_in=False)
        await old.send(CheckIn(1, "old", 10, privacy=("clip",)))
        assert "devices add the noise" in (await old.expect(Welcome)).ineligible
        await new.send(CheckIn(1, "new", 10, privacy=("clip", "local-noise")))
        assert (await new.expect(Welcome)).ineligible == ""
        task = await new.task()
        assert (task.clip, task.local_noise) == (0.5, 2.0)
        assert [*coordinator.engine.leases] == ["new"]


@pytest.mark.parametrize("private", [False, True])
@run_async
async def test_an_owner_s_wish_for_privacy_is_heard(make_plan: PlanMaker, private: bool) -> None:
    plan = make_plan("dp-fedavg", **PRIVATE) if private else make_plan(round__goal=1)
    async with fleet(plan) as (_, join):
        a = await join("a", check_in=False)
        await a.send(CheckIn(1, "a", 10, privacy=("clip", "required")))
        why = (await a.expect(Welcome)).ineligible
        assert why == (
            ""
            if private
            else "the device's owner lets it take part only in runs with differential privacy, and "
            "this run's plan has no [privacy]"
        )


@run_async
async def test_without_privacy_a_task_says_nothing_of_it(make_plan: PlanMaker) -> None:
    async with fleet(make_plan(round__goal=1)) as (_, join):
        task = await (await join("a")).task()
        assert (task.clip, task.local_noise, task.privacy) == (None, None, None)
