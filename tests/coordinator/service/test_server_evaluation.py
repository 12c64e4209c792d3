"""Evaluations over real sockets: what devices are told, what is durable, and what people see of
it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import msgspec
import numpy as np
import pytest
from earlier_tables import make_version_6
from fleetlearn_coordinator import Plan, PlanError, read_model, read_status
from fleetlearn_coordinator.storage.file_requests import EVALUATION
from fleetlearn_coordinator.storage.find_storage import find_storage
from fleetlearn_coordinator.storage.sqlite_ledger import DATABASE
from fleetlearn_protocol import Code
from fleetlearn_protocol.exchanges import fields_of
from fleetlearn_protocol.messages import (
    Accepted,
    Cancel,
    CheckIn,
    ComeBack,
    Evaluation,
    Failed,
    Grant,
    Question,
    Refused,
    Reply,
    Task,
    Welcome,
)
from fleetlearn_protocol.vector import digest
from peers import Peer, PlanMaker, fleet, report_of, update_of

MEASURED = Evaluation(10, 7.0, {"accuracy": 9.0})


def run(test: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await test

    asyncio.run(bounded())


async def able(join: Any, name: str, tier: str | None = None) -> Peer:
    peer: Peer = await join(name, check_in=False)
    await peer.send(CheckIn(1, name, 10, exchanges=("evaluation",), tier=tier))
    await peer.expect(Welcome)
    return peer


async def serve(peer: Peer, evaluation: Evaluation = MEASURED) -> list[Question]:
    """Do what is asked until training is finished. Returns the evaluations."""
    found = []
    while True:
        match await peer.receive():
            case Task() as task:
                await peer.send(report_of(task, update_of(1.0)))
            case Grant() as grant:
                await peer.send_update(grant, update_of(1.0))
            case Question() as given:
                found.append(given)
                await peer.send(Reply(given.task, "evaluation", fields_of(evaluation)))
            case ComeBack():
                return found


def test_each_model_is_measured_and_the_last_one_before_the_run_finishes(
    make_plan: PlanMaker,
) -> None:
    plan = make_plan(evaluation__every=1, evaluation__devices=1, stop__rounds=2, round__minimum=2)

    async def test() -> None:
        async with fleet(plan) as (coordinator, join):
            old, new = await join("old"), await able(join, "new", "phone")
            asked = await asyncio.gather(serve(old), serve(new))
            assert asked[0] == []
            assert [given.vectors[0].sha256 for given in asked[1]] == [
                coordinator.run.models.digest_of(1),
                read(plan, 2),
            ]
            assert await coordinator.done == "2 rounds done"

    run(test())
    first, second = read_status(plan.data_dir).evaluations
    assert (first.number, first.version, first.outcome) == (1, 1, "valid")
    assert (second.number, second.version, second.outcome) == (2, 2, "valid")
    assert second.summary["metrics"] == {"accuracy": 0.9, "loss": 0.7}
    assert second.summary["devices"] == 1
    assert second.summary["tiers"] == {"phone": {"devices": 1}}


def read(plan: Plan, version: int) -> str:
    return digest(read_model(plan.data_dir, version)[1])


@pytest.mark.parametrize("earlier", [False, True])
def test_what_was_measured_survives_a_restart_and_counts_once(
    make_plan: PlanMaker, *, earlier: bool
) -> None:
    """``earlier``: the first process was of the version before, with other tables."""
    plan = make_plan(round__goal=9, round__minimum=9, evaluation__devices=2, evaluation__minimum=2)

    async def begin() -> str:
        async with fleet(plan) as (coordinator, join):
            a, b = await able(join, "a"), await able(join, "b")
            find_storage(plan.data_dir).requests.ask_for_evaluation()
            mine, other = await a.expect(Question), await b.expect(Question)
            content = np.frombuffer(await b.fetch(other.vectors[0].sha256), np.float32)
            np.testing.assert_array_equal(content, read_model(plan.data_dir, 0)[1])
            await a.send(Reply(mine.task, "evaluation", fields_of(MEASURED)))
            assert await a.receive() == Accepted(mine.task)
            assert coordinator.live()["exchanges"]["evaluation"]["devices"] == 1
            coordinator.end()  # as if killed
            return str(other.task)

    async def go_on(task: str) -> None:
        async with fleet(plan) as (coordinator, join):
            b = await able(join, "b")
            assert (await b.expect(Question)).task == task
            for _ in range(2):
                await b.send(
                    Reply(task, "evaluation", fields_of(Evaluation(30, 3.0, {"accuracy": 15.0})))
                )
                assert await b.receive() == Accepted(task)
            assert not coordinator.engine.exchanges["evaluation"].is_open
            coordinator.look_for_request()
            assert not (plan.data_dir / EVALUATION).exists(), "the request was carried out"
            coordinator.end()

    async def test() -> None:
        task = await begin()
        if earlier:
            make_version_6(plan.data_dir / DATABASE)
        await go_on(task)

    run(test())
    (found,) = read_status(plan.data_dir).evaluations
    assert found.summary["metrics"] == {
        "accuracy": pytest.approx(24 / 40),
        "loss": pytest.approx(10 / 40),
    }


def test_measurements_that_are_refused_failed_or_late(make_plan: PlanMaker) -> None:
    plan = make_plan(
        round__goal=9, round__minimum=9, evaluation__devices=3, evaluation__deadline=1.0
    )

    async def test() -> None:
        async with fleet(plan) as (coordinator, join):
            peers = [await able(join, name) for name in "abc"]
            await peers[0].send(Reply("t-e9-1", "evaluation", fields_of(MEASURED)))
            refused = await peers[0].expect(Refused)
            assert (refused.code, refused.task) == (Code.UNKNOWN_TASK, "t-e9-1")
            now = coordinator.loop.time()
            coordinator._carry_out(coordinator.engine.request_exchange("evaluation", now), now)
            given = [await peer.expect(Question) for peer in peers]
            await peers[0].send(Reply(given[0].task, "evaluation", fields_of(MEASURED)))
            assert isinstance(await peers[0].receive(), Accepted)
            await peers[1].send(Failed(given[1].task, "diverged", "the loss is nan"))
            cancelled = await peers[2].expect(Cancel)
            assert (cancelled.task, cancelled.code) == (given[2].task, Code.ROUND_OVER)
            coordinator.end()

    run(test())
    (found,) = read_status(plan.data_dir).evaluations
    assert found.outcome == "invalid", "two are the minimum of three"
    assert found.summary["dropped"] == {"failed: diverged": 1, "late": 1}


def test_a_finished_run_is_evaluated_on_request_and_finishes_again(make_plan: PlanMaker) -> None:
    plan = make_plan(round__goal=1, evaluation__devices=1, stop__rounds=1)

    async def start() -> list[Question]:
        async with fleet(plan) as (coordinator, join):
            found = await serve(await able(join, "a"))
            assert await coordinator.done == "1 rounds done"
            return found

    async def test() -> None:
        assert await start() == []
        find_storage(plan.data_dir).requests.ask_for_evaluation()
        assert len(await start()) == 1

    run(test())
    status = read_status(plan.data_dir)
    assert (status.finished, status.version) == ("1 rounds done", 1)
    assert [row.version for row in status.evaluations] == [1]


def test_an_evaluation_may_stop_the_run_and_a_higher_target_resumes_it(
    make_plan: PlanMaker,
) -> None:
    """One device's word does not stop it: the plan asks for two."""

    def plan(target: float) -> Plan:
        return make_plan(
            evaluation__every=1,
            evaluation__devices=2,
            evaluation__minimum=2,
            stop__rounds=12,
            stop__target=target,
            stop__metric="accuracy",
            stop__measured_by="evaluation",
            evaluation__deadline=5.0,
        )

    async def train(target: float, *accuracies: float) -> None:
        async with fleet(plan(target)) as (coordinator, join):
            peers = [await able(join, f"d{number}") for number in range(len(accuracies))]
            said = [Evaluation(10, 1.0, {"accuracy": total}) for total in accuracies]
            await asyncio.gather(*map(serve, peers, said))
            await coordinator.done

    async def test() -> None:
        await train(0.7, 8.0, 8.0)
        found = read_status(plan(0.7).data_dir)
        assert found.finished_by is not None
        assert (found.finished_by["rule"], found.finished_by["value"]) == (
            "metric",
            pytest.approx(0.8),
        )
        assert found.version < 12
        # 7 right of each one: that device is left out, and the other is not enough
        await train(0.9, 70.0, 9.5)
        again = read_status(plan(0.9).data_dir)
        assert again.finished_by is not None
        assert (again.finished_by["rule"], again.version) == ("rounds", 12)

    run(test())


def test_the_plan_says_what_does_not_fit(make_plan: PlanMaker) -> None:
    with pytest.raises(
        PlanError, match=r"evaluation\.minimum = 3 is more than evaluation\.devices = 2"
    ):
        make_plan(evaluation__devices=2, evaluation__minimum=3)
    with pytest.raises(PlanError, match=r'measured_by = "evaluation" needs evaluation\.every'):
        make_plan(stop__metric="accuracy", stop__target=0.9, stop__measured_by="evaluation")
    plan = make_plan(round__goal=7, round__deadline=33.0)
    assert msgspec.structs.astuple(plan.evaluation) == (None, 7, 4, 33.0, None, 1)
