"""A coordinator as a function call, and what it refuses to start with."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
from contextlib import closing
from functools import partial

import pytest
from fleetlearn_coordinator import (
    Plan,
    PlanError,
    RunResult,
    ServiceSettings,
    StoreError,
    read_status,
    serve,
    serve_async,
)
from fleetlearn_coordinator.service.run_clock import Clocks
from fleetlearn_coordinator.service.training_run.run import Run
from fleetlearn_coordinator.storage.errors import StoreUnavailableError
from fleetlearn_coordinator.storage.sqlite_ledger import DATABASE
from fleetlearn_coordinator.storage.store import open_store
from fleetlearn_protocol import BundleError, open_bundle
from fleetlearn_protocol.messages import UPDATE
from peers import Peer, PlanMaker, report_of, serving, update_of
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus
from websockets.typing import Subprotocol

ANY_PORT = ServiceSettings(port=0)


async def two_rounds(plan: Plan) -> None:
    """A device that does two rounds, once there is a coordinator."""
    while (address := address_of(plan)) is None:
        await asyncio.sleep(0.01)
    async with connect(
        address, subprotocols=[Subprotocol("fleetlearn.v1")], compression=None
    ) as connection:
        peer = Peer("a", connection)
        await peer.check_in()
        for _ in range(2):
            await peer.do_round(update_of(1.0))


def address_of(plan: Plan) -> str | None:
    try:
        return read_status(plan.data_dir).address
    except StoreError:
        return None


@pytest.mark.parametrize(
    "threaded", [False, True], ids=["in this loop", "in another thread, where no signals arrive"]
)
def test_serve_returns_when_the_training_is_finished(make_plan: PlanMaker, threaded: bool) -> None:
    plan = make_plan(round__goal=1, stop__rounds=2)

    async def both() -> RunResult:
        async with asyncio.timeout(30):
            function = partial(asyncio.to_thread, serve) if threaded else serve_async
            result, _ = await asyncio.gather(function(plan, service=ANY_PORT), two_rounds(plan))
        return result

    assert asyncio.run(both()) == RunResult("2 rounds done", True, 2)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_serve_async_gives_signals_back_when_a_signal_has_ended_it(
    make_plan: PlanMaker, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    plan, number = make_plan(), getattr(signal, name)
    caplog.set_level("INFO")
    own: list[int] = []

    async def stopped_by_a_signal() -> RunResult:
        serving = asyncio.ensure_future(serve_async(plan, service=ANY_PORT))
        while address_of(plan) is None:
            await asyncio.sleep(0.01)
        os.kill(os.getpid(), number)
        return await serving

    async def test() -> None:
        async with asyncio.timeout(30):
            assert (await stopped_by_a_signal()).reason == f"stopped by {name}"
        os.kill(os.getpid(), number)
        await asyncio.sleep(0)

    before = signal.signal(number, lambda *caught: own.append(caught[0]))
    try:
        asyncio.run(test())
    finally:
        signal.signal(number, before)
    assert own == [number]
    assert f"{name}: telling the devices to come back later, then stopping" in caplog.messages


def test_an_ipv6_address_is_written_as_devices_need_it(make_plan: PlanMaker) -> None:
    async def test() -> None:
        async with serving(make_plan(round__goal=1), host="::1") as coordinator:
            assert coordinator.host.address.startswith("ws://[::1]:")
            async with connect(
                coordinator.host.address, subprotocols=[Subprotocol("fleetlearn.v1")]
            ) as connection:
                await Peer("a", connection).check_in()

    asyncio.run(asyncio.wait_for(test(), 30))


def test_serve_in_a_running_loop_says_what_to_await(make_plan: PlanMaker) -> None:
    async def notebook() -> None:
        serve(make_plan())

    with pytest.raises(
        RuntimeError, match=r"event loop runs already.*Write `await serve_async\(\.\.\.\)`"
    ):
        asyncio.run(notebook())


def test_a_start_that_finishes_the_last_round(make_plan: PlanMaker) -> None:
    """Killed between the last report and the last commit: the next start makes the model, and ends
    well."""
    plan = make_plan(round__goal=1, stop__rounds=1)
    bundle, now, update = open_bundle(plan.bundle), Clocks(0.0, 1000.0), update_of(1.0)
    store = open_store(plan.data_dir, bundle.sha256)
    run = Run(plan, bundle, store, now, ANY_PORT.heartbeat)
    (lease,) = run.record(run.engine.check_in("a", None, 0.0), now)
    spool_file = store.blobs.take_spool_file()
    store.blobs.write_spool_file(spool_file, 0, update.tobytes())
    run.save_update(lease.device, report_of(lease, update), spool_file, {UPDATE: 1.0})  # type: ignore[arg-type]
    store.close()
    for _ in range(2):
        assert serve(plan, service=ANY_PORT) == RunResult("1 rounds done", True, 1)


def test_a_missing_bundle_is_named(make_plan: PlanMaker) -> None:
    plan = make_plan()
    with pytest.raises(BundleError, match=r"nowhere\.bundle does not exist"):
        serve(
            type(plan)(
                **{name: getattr(plan, name) for name in plan.__struct_fields__}
                | {"bundle": "nowhere.bundle"}
            )
        )


def test_a_private_run_without_a_budget_for_one_release_does_not_start(
    make_plan: PlanMaker,
) -> None:
    """Nothing is written: noise 1 costs 4.8866 for one release."""
    plan = make_plan(
        privacy__noise=1.0, privacy__delta=1e-6, privacy__population=1000, privacy__clip=0.5,
        privacy__epsilon=4.0,
    )  # fmt: skip
    with pytest.raises(PlanError, match=r"privacy\.epsilon = 4 does not allow one release"):
        serve(plan, service=ANY_PORT)
    assert not plan.data_dir.exists()


def test_poisson_sampling_is_not_served(make_plan: PlanMaker) -> None:
    plan = make_plan(
        privacy__noise=1.0, privacy__delta=1e-6, privacy__population=1000, privacy__clip=0.5,
        privacy__sampling="poisson",
    )  # fmt: skip
    with pytest.raises(PlanError, match='"poisson" is for the simulator'):
        serve(plan, service=ANY_PORT)


def test_a_client_of_another_protocol_is_turned_away(make_plan: PlanMaker) -> None:
    async def test() -> None:
        async with serving(make_plan()) as coordinator:
            with pytest.raises(InvalidStatus):
                await connect(coordinator.host.address)

    asyncio.run(test())


def test_an_error_ends_a_coordinator_that_stays(make_plan: PlanMaker) -> None:
    plan = make_plan(round__goal=1, stop__rounds=2)

    async def break_it() -> None:
        await two_rounds(plan)
        while read_status(plan.data_dir).finished is None:
            await asyncio.sleep(0.01)
        with closing(sqlite3.connect(plan.data_dir / DATABASE, timeout=10.0)) as database:
            database.execute("DROP TABLE meta")

    async def both() -> None:
        async with asyncio.timeout(10) as bound:
            with pytest.raises(StoreUnavailableError, match="no such table"):
                await asyncio.gather(serve_async(plan, service=ANY_PORT, stay=True), break_it())
        assert not bound.expired()

    asyncio.run(both())
