"""A host with a canary, against devices that speak the protocol by hand: who serves which run, what
becomes of the models, and what a restart finds."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from family_plans import family_text
from fleetlearn_coordinator import read_model
from fleetlearn_coordinator.service.canary.about import about_of, state_of
from fleetlearn_coordinator.service.canary.acts import act_on, find_canary
from fleetlearn_coordinator.service.canary.begin import CanaryAsked, begin_canary
from fleetlearn_coordinator.service.live_page import LivePage
from fleetlearn_coordinator.service.monitoring.catalogue import Sample
from fleetlearn_coordinator.service.several.operations import Operations
from fleetlearn_coordinator.service.several.population import place
from fleetlearn_coordinator.storage.canaries import CanaryRow
from fleetlearn_coordinator.storage.errors import StoreError
from fleetlearn_protocol.errors import FleetError
from fleetlearn_protocol.messages import Accepted, Cancel, Failed, Grant, Refused, Task
from live_schema import validator
from masked_peers import SECURE
from peers import Peer, plan_text, report_of, write_test_bundle
from safetensors.numpy import save_file
from several import SIZE, UPDATE, Several, run_async, settled, several
from statistics_bundle import statistics_bundle

NAMES = [f"d{number}" for number in range(12)]
FAST: dict[str, Any] = {
    "steps": [0.25, 0.5, 1.0],
    "tasks": 10,
    "hold": 0.0,
    "probation": 0.0,
    "patience": 1000.0,
}
ASYNCHRONOUS: dict[str, Any] = {
    "recipe": "fedbuff",
    "round__goal": 1,
    "round__concurrency": 50,
    "round__minimum": None,
    "round__over_selection": None,
    "round__gather": None,
}
"""Tasks at any time for each device, so that a test can say who works."""


def operations(host: Several) -> Operations:
    return Operations(host._service, host.wanted, None, "test")


async def begin(host: Several, *, take_over: Any = None, **settings: Any) -> CanaryRow:
    """Begin a canary of the run ``a``, with another bundle of the same model."""
    bundle = write_test_bundle(host.folder / "other" / "bundle", SIZE)
    (bundle / "note").write_text("another")
    asked = CanaryAsked(bundle=str(bundle), take_over=take_over, settings={**FAST, **settings})
    begin_canary(operations(host), "a", asked)
    await host.hosted.look()
    return row(host)


def bundle_of(host: Several, name: str) -> str:
    return str(write_test_bundle(host.folder / name / "bundle", SIZE))


def row(host: Several) -> CanaryRow:
    return find_canary(host.wanted, "a")


def inside(found: CanaryRow, names: list[str] = NAMES) -> set[str]:
    key = f"canary {found.run}"
    return {name for name in names if place(key, name) < found.share or name in found.devices}


async def work(host: Several, peers: dict[str, Peer], names: set[str]) -> dict[str, str]:
    """Let these devices do a task each. Returns device -> the run that gave it."""
    served = {}
    for name in sorted(names):
        task: Task | None = await next_task(peers[name])
        while task is not None:
            run, task = host.of(task), await finish(peers[name], task)
        served[name] = run
        await settled(peers[name])
    await host.hosted.look()
    return served


async def finish(peer: Peer, task: Task) -> Task | None:
    """Do a task. Returns the one that follows where this one was cancelled; None: it counts."""
    await peer.send(report_of(task, UPDATE))
    while True:
        match await peer.receive():
            case Grant(of) as grant if of == task.task:
                await peer.send_update(grant, UPDATE)
            case Accepted(of) if of == task.task:
                return None
            case Task() as following:
                return following


async def next_task(peer: Peer) -> Task:
    """Return the device's next task. One that it had may be cancelled first."""
    while not isinstance(message := await peer.receive(), Task):
        assert isinstance(message, Cancel | Refused), message
    return message


async def joined(host: Several) -> dict[str, Peer]:
    return {name: await host.join(name) for name in NAMES}


@run_async
async def test_a_canary_reaches_all_devices_and_takes_the_old_runs_place(folder: Path) -> None:
    async with several(folder) as host:
        await host.add("a", **ASYNCHRONOUS)
        peers = await joined(host)
        await work(host, peers, {NAMES[0]})
        first = await begin(host, tasks=30)
        for share in (0.25, 0.5):
            found = row(host)
            assert found.share == share
            canaries = inside(found)
            assert 0 < len(canaries) < len(NAMES)
            await work(host, peers, {*NAMES})  # what they have from before
            served = await work(host, peers, {*NAMES})
            assert {name for name, run in served.items() if run == "a.canary"} == canaries
            for _ in range(30):
                if row(host).share == share:
                    await work(host, peers, {min(canaries)})
            assert canaries <= inside(row(host)), "the same devices, and more"
        last = row(host)
        assert (last.share, last.run) == (1.0, first.run)
        assert host.row("a").wanted == "paused"
        await work(host, peers, {*NAMES})
        old = read_model(folder / "a.run")
        served = await work(host, peers, {*NAMES})
        assert {*served.values()} == {"a.canary"}
        await work(host, peers, {*NAMES})
        await host.hosted.look()
        assert row(host).phase == "finished"
        assert {run.name: run.wanted for run in host.wanted.runs()} == {
            "a.before": "stopped",
            "a": "running",
        }
        assert host.row("a").number == first.run
        await work(host, peers, {NAMES[0]})
        assert host.server("a").engine.version > old[0], "the numbers go on"
        assert read_model(folder / "a.run")[0] == old[0]


@run_async
async def test_a_canary_whose_devices_vanish_goes_back(folder: Path) -> None:
    async with several(folder) as host:
        await host.add("a", **ASYNCHRONOUS, round__grace=0.0)
        peers = await joined(host)
        canaries = inside(await begin(host))
        assert len(canaries) == 3
        await work(host, peers, {*NAMES})
        await work(host, peers, {*NAMES} - canaries)
        before = read_model(folder / "a.run")[0]
        for name in canaries:
            await next_task(peers[name])
            await peers[name].connection.close()
        while any(name in host.hosted.host.devices for name in canaries):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0)
        await host.hosted.look()
        found = row(host)
        assert found.phase == "back"
        assert "lost: " in state_of(found).why
        await host.hosted.look()
        assert [name for name, _ in host.hosted.servers()] == ["a"]
        assert read_model(folder / "a.run")[0] == before
        peers |= {name: await host.join(name) for name in canaries}
        served = await work(host, peers, {*NAMES})
        assert {*served.values()} == {"a"}, "it has all its devices again"
        with pytest.raises(StoreError, match="a canary that went back"):
            operations(host).change("a.canary", "resumed")


@run_async
async def test_a_canary_whose_devices_fail_goes_back(folder: Path) -> None:
    async with several(folder) as host:
        await host.add("a", **ASYNCHRONOUS)
        peers = await joined(host)
        canaries = inside(await begin(host))
        await work(host, peers, {*NAMES})
        await work(host, peers, {*NAMES} - canaries)
        for _ in range(6):
            for name in canaries:
                if row(host).phase == "running":
                    task = await next_task(peers[name])
                    await peers[name].send(Failed(task.task, "diverged", "nan"))
                    await settled(peers[name])
                    await host.hosted.look()
        assert row(host).phase == "back"
        assert "failed: 3 of 3" in state_of(row(host)).why


@run_async
async def test_what_was_before_the_canary_is_not_compared_with(folder: Path) -> None:
    async with several(folder) as host:
        await host.add("a", **ASYNCHRONOUS)
        peers = await joined(host)
        for _ in range(2):
            await work(host, peers, {*NAMES})
        await begin(host)
        assert state_of(row(host)).control.ended == 0
        await work(host, peers, {*NAMES} - inside(row(host)))
        found = state_of(row(host)).control
        assert found.ended == found.done == len(NAMES) - len(inside(row(host)))


@run_async
async def test_a_canary_replaces_no_file_and_no_run_by_its_name(folder: Path) -> None:
    async with several(folder) as host:
        await host.add("a", **ASYNCHRONOUS)
        await host.add("b", **ASYNCHRONOUS)
        kept = host.wanted.path.parent
        files = {name: kept / f"{name}.toml" for name in ("b", "other")}
        for file in files.values():
            file.write_text("# a plan that somebody wrote")
        bundle = str(write_test_bundle(host.folder / "new" / "bundle", SIZE))
        for name in files:
            with pytest.raises(FleetError, match=f"{name}.*--name"):
                begin_canary(operations(host), "a", CanaryAsked(bundle=bundle, name=name))
        assert {each.read_text() for each in files.values()} == {"# a plan that somebody wrote"}
        assert [run.name for run in host.wanted.runs()] == ["a", "b"]


@run_async
async def test_a_canary_whose_training_ends_before_the_last_step_goes_back(folder: Path) -> None:
    async with several(folder) as host:
        await host.add("a", **ASYNCHRONOUS, stop__rounds=8)
        peers = await joined(host)
        canaries = inside(await begin(host, tasks=1000))
        name = min(canaries)
        while row(host).phase == "running" and "a.canary" in dict(host.hosted.servers()):
            await work(host, peers, {name})
        await host.hosted.look()
        assert row(host).phase == "back"
        assert "its training is finished" in state_of(row(host)).why
        assert host.row("a").split is None, "the old run has its devices again"


@run_async
async def test_time_counts_when_the_training_ends_in_the_last_step(folder: Path) -> None:
    async with several(folder) as host:
        await host.add("a", **ASYNCHRONOUS, stop__rounds=4)
        peers = await joined(host)
        await begin(host, steps=[1.0], tasks=10)
        await host.hosted.look()
        while "a.canary" in dict(host.hosted.servers()):
            await work(host, peers, {NAMES[0]})
        await host.hosted.look()
        before = host.hosted._canaries.state(row(host)).seconds
        await host.hosted.look()
        assert row(host).phase == "running", "it waits for its tasks"
        assert host.hosted._canaries.state(row(host)).seconds > before


@run_async
async def test_of_two_that_begin_a_canary_at_once_one_is_refused(folder: Path) -> None:
    async with several(folder) as host:
        await host.add("a", **ASYNCHRONOUS)
        both = [CanaryAsked(bundle=bundle_of(host, name), name=name) for name in ("x", "y")]
        with pytest.MonkeyPatch.context() as patch:

            def meanwhile(*_: object) -> None:
                patch.undo()
                begin_canary(operations(host), "a", both[1])

            patch.setattr("fleetlearn_coordinator.service.canary.begin._check_new", meanwhile)
            with pytest.raises(StoreError, match="the run a has a canary"):
                begin_canary(operations(host), "a", both[0])
        assert [run.name for run in host.wanted.runs()] == ["a", "y"]
        assert len(host.wanted.canaries.rows()) == 1
        assert not (host.wanted.path.parent / "x.toml").exists(), "nothing is left of it"


@run_async
async def test_one_device_is_reached_where_the_share_has_none(folder: Path) -> None:
    """One of two that are connected, and none of those that come later."""
    async with several(folder) as host:
        await host.add("a", **ASYNCHRONOUS)
        for name in NAMES[:2]:
            await host.join(name)
        await begin(host, steps=[1e-9, 1.0])
        await host.hosted.look()
        assert len(inside(row(host))) == 1
        for name in NAMES[2:]:
            await host.join(name)
        await host.hosted.look()
        assert len(inside(row(host))) == 1
        before = row(host)
        await host.hosted.look()
        assert row(host) == before._replace(state=row(host).state), "and no further one"
        host.hosted._canaries._connected = lambda: pytest.fail("all devices were looked through")
        await host.hosted.look()


@run_async
async def test_a_device_that_the_canary_kills_is_not_replaced_by_another(folder: Path) -> None:
    async with several(folder) as host:
        await host.add("a", **ASYNCHRONOUS)
        peers = await joined(host)
        await begin(host, steps=[1e-9, 1.0])
        await host.hosted.look()
        (first,) = inside(row(host))
        await work(host, peers, {first})  # the old run's task that it has
        await next_task(peers[first])
        await host.hosted.look()
        await peers[first].connection.close()
        while first in host.hosted.host.devices:
            await asyncio.sleep(0.01)
        for _ in range(3):
            await host.hosted.look()
        assert inside(row(host)) == {first}


@run_async
async def test_the_plan_is_made_for_the_devices_of_the_step(folder: Path) -> None:
    async with several(folder) as host:
        await host.add("a", round__goal=8, round__minimum=5)
        await begin(host)
        found = []
        for _ in range(3):
            settings = host.server("a.canary").engine.settings
            found.append((settings.goal, settings.minimum))
            if row(host).share < 1:
                act_on(operations(host), "a", "widen")
                await host.hosted.look()
                await host.hosted.look()
        assert found == [(2, 2), (4, 3), (8, 5)]
        assert host.server("a").engine.settings.goal == 8


@run_async
async def test_a_restart_finds_the_step_and_what_both_arms_did(folder: Path) -> None:
    async with several(folder) as host:
        await host.add("a", **ASYNCHRONOUS)
        peers = await joined(host)
        canaries = inside(await begin(host, tasks=1000))
        await work(host, peers, {*NAMES})  # the old run's tasks that they have
        await work(host, peers, {*NAMES})
        before = row(host)
        assert state_of(before).canary.done == len(canaries)
        assert state_of(before).control.done == 2 * len(NAMES) - len(canaries)
    async with several(folder) as host:
        await host.hosted.look()
        peers = await joined(host)
        assert inside(row(host)) == canaries
        served = await work(host, peers, {*NAMES})
        assert {name for name, run in served.items() if run == "a.canary"} == canaries
        assert state_of(row(host)).canary.done == 2 * len(canaries)
        act_on(operations(host), "a.canary", "back")
    async with several(folder) as host:
        await host.hosted.look()
        assert [name for name, _ in host.hosted.servers()] == ["a"]
        assert state_of(row(host)).why == "asked by test"


@run_async
async def test_the_canary_begins_from_the_old_runs_newest_model(folder: Path) -> None:
    async with several(folder) as host:
        await host.add("a", **ASYNCHRONOUS)
        peers = await joined(host)
        await work(host, peers, {*NAMES[:3]})
        await begin(host, tasks=1000)
        version, old = read_model(folder / "a.run")
        found, new = read_model(folder / "runs" / "a.canary.run")
        assert (found, new.tobytes()) == (version, old.tobytes())
        act_on(operations(host), "a", "widen")
        act_on(operations(host), "a", "widen")
        await work(host, peers, {NAMES[3]})
        await host.hosted.look()
        newest = read_model(folder / "runs" / "a.canary.run")[0]
        assert newest >= version + 1


@run_async
async def test_the_last_step_goes_on_from_the_old_runs_newest_or_its_own(folder: Path) -> None:
    for take_over in ("newest", "own"):
        home = folder / take_over
        home.mkdir()
        write_test_bundle(home / "bundle", SIZE)
        async with several(home) as host:
            await host.add("a", **ASYNCHRONOUS)
            peers = await joined(host)
            await begin(host, take_over=take_over, tasks=1000)
            canaries = inside(row(host))
            await work(host, peers, {*NAMES})
            await work(host, peers, {*NAMES})
            _, own = read_model(home / "runs" / "a.canary.run")
            act_on(operations(host), "a", "widen")
            act_on(operations(host), "a", "widen")
            await host.hosted.look()
            _, old = read_model(home / "a.run")
            _, found = read_model(home / "runs" / "a.canary.run")
            expected = old if take_over == "newest" else own
            assert found.tobytes() == expected.tobytes()
            assert old.tobytes() != own.tobytes(), canaries
            version = read_model(home / "runs" / "a.canary.run")[0]
        async with several(home) as host:
            await host.hosted.look()
            assert "a.canary" in dict(host.hosted.servers())
            assert read_model(home / "runs" / "a.canary.run")[0] == version, "it is taken once"


@run_async
async def test_a_model_from_a_file_or_of_an_earlier_version(folder: Path) -> None:
    async with several(folder) as host:
        await host.add("a", **ASYNCHRONOUS)
        peers = await joined(host)
        await work(host, peers, {*NAMES[:3]})
        wanted = np.linspace(0, 1, SIZE, dtype=np.float32)
        save_file({"w": wanted}, folder / "new.safetensors")
        asked = CanaryAsked(model=str(folder / "new.safetensors"), settings=FAST)
        begun = begin_canary(operations(host), "a", asked)
        assert begun.first.take_over == "own"
        await host.hosted.look()
        assert read_model(folder / "runs" / "a.canary.run")[1].tobytes() == wanted.tobytes()
        act_on(operations(host), "a", "back")
        await host.hosted.look()
        begun = begin_canary(operations(host), "a", CanaryAsked(model="0", settings=FAST))
        assert begun.name == "a.canary-2"
        await host.hosted.look()
        version, model = read_model(folder / "runs" / "a.canary-2.run")
        assert model.tobytes() == read_model(folder / "a.run", 0)[1].tobytes()
        assert version == read_model(folder / "a.run")[0] + 1


@run_async
async def test_what_cannot_be_a_canary(folder: Path) -> None:
    async with several(folder) as host:
        await host.add("a", **ASYNCHRONOUS)
        acts = operations(host)

        def refused(words: str, **asked: Any) -> None:
            with pytest.raises(FleetError, match=words):
                begin_canary(acts, "a", CanaryAsked(**asked))
            assert [run.name for run in host.wanted.runs()] == ["a"]

        refused("what is new")
        refused("does not have version 7; it keeps 0", model="7")
        refused("no key of", model="0", settings={"stepps": [1.0]})
        refused(r"canary.tasks = 0 is refused", model="0", settings={"tasks": 0})
        refused("rise and end with 1", model="0", settings={"steps": [0.5]})
        refused("same data_dir", plan=str(folder / "a.toml"))
        write_test_bundle(folder / "large", 2 * SIZE)
        refused("does not fit", bundle=str(folder / "large"), model="0")
        refused("cannot go on from the old", bundle=str(folder / "large"), take_over="newest")
        save_file({"v": np.zeros(SIZE, np.float32)}, folder / "v.safetensors")
        refused("missing .'w'.", model=str(folder / "v.safetensors"))
        begun = begin_canary(acts, "a", CanaryAsked(bundle=str(folder / "large"), settings=FAST))
        assert "parameter w has shape" in begun.remark
        assert begun.first.words == "the initial values of its bundle"
        for name in ("a", "a.canary"):
            with pytest.raises(StoreError, match="canary"):
                begin_canary(acts, name, CanaryAsked(model="0"))
            with pytest.raises(StoreError, match="cannot be removed before"):
                acts.remove(name)
            with pytest.raises(StoreError, match="cannot be stopped before"):
                acts.change(name, "stopped")
        with pytest.raises(StoreError, match=r"25 % of the devices have it"):
            act_on(acts, "a", "finish")
        act_on(acts, "a", "back")
        with pytest.raises(StoreError, match="went back: asked by test"):
            act_on(acts, "a", "widen")
        acts.remove("a.canary")
        with pytest.raises(StoreError, match="has no canary"):
            find_canary(host.wanted, "a")


@run_async
async def test_devices_with_a_tag_have_it_first(folder: Path) -> None:
    async with several(folder) as host:
        await host.add("a", **ASYNCHRONOUS)
        asked = CanaryAsked(model="0", tags=("beta",), settings={**FAST, "steps": [0.999999, 1.0]})
        begin_canary(operations(host), "a", asked)
        await host.hosted.look()
        beta, other = await host.join("b", tags=("beta",)), await host.join("c")
        assert host.of(await beta.do_round(UPDATE)) == "a.canary"
        assert host.of(await other.do_round(UPDATE)) == "a"
        act_on(operations(host), "a", "widen")
        await host.hosted.look()
        assert host.of(await other.do_round(UPDATE)) == "a"  # it had that already
        assert host.of(await next_task(other)) == "a.canary"


@run_async
async def test_a_run_that_fails_sends_the_canary_back(folder: Path) -> None:
    async with several(folder) as host:
        await host.add("a", **ASYNCHRONOUS)
        asked = CanaryAsked(model="0", settings=FAST)
        begin_canary(operations(host), "a", asked)
        (folder / "runs" / "a.canary.toml").write_text("name = 1")
        await host.hosted.look()
        await host.hosted.look()
        found = row(host)
        assert found.phase == "back"
        assert "the canary's run failed: " in state_of(found).why


def test_a_canary_keeps_its_settings(tmp_path: Path) -> None:
    write_test_bundle(tmp_path / "bundle", SIZE)

    async def run() -> None:
        async with several(tmp_path, canary={"tasks": 17}) as host:
            await host.add("a")
            begin_canary(operations(host), "a", CanaryAsked(model="0", settings={"hold": 3.0}))
            settings = about_of(row(host)).settings
            assert (settings.tasks, settings.hold, settings.margin) == (17, 3.0, 0.05)

    asyncio.run(run())


@run_async
async def test_metrics_and_the_page_are_told_of_it(folder: Path) -> None:
    async with several(folder, metrics={"port": 0}) as host:
        await host.add("a", **ASYNCHRONOUS)
        peers = await joined(host)
        canaries = inside(await begin(host, tasks=1000))
        await work(host, peers, {*NAMES})
        await work(host, peers, canaries)
        monitor, page = host.hosted.monitor, LivePage(host.hosted.host)
        assert monitor is not None
        page.are_wanted(host.wanted.runs(), host.hosted._canaries.views)
        for name in ("run/a", "run/a.canary"):
            glance = page._look()[name]
            validator("Glance").validate(glance)
            assert glance["canary"]["phase"] == "running"
            assert glance["canary"]["canary"]["done"] == len(canaries)
        samples = await monitor.samples()
        assert samples["fleetlearn_canary_devices_ratio"] == [Sample(("a.canary",), 0.25)]
        assert Sample(("a.canary", "canary", "done"), 3.0) in samples["fleetlearn_canary_tasks"]
        assert samples["fleetlearn_canary_went_back"] == [Sample(("a.canary",), 0.0)]
        act_on(operations(host), "a", "back")
        await host.hosted.look()
        samples = await monitor.samples()
        assert samples["fleetlearn_canary_devices_ratio"] == [Sample(("a.canary",), 0.0)]
        assert samples["fleetlearn_canary_went_back"] == [Sample(("a.canary",), 1.0)]
        page.are_wanted(host.wanted.runs(), host.hosted._canaries.views)
        assert page._look()["run/a"]["canary"]["next"] == "asked by test"


@run_async
async def test_each_step_is_an_event_of_the_log_once(folder: Path) -> None:
    told = list[tuple[str, Any]]()

    class Events(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            event, known = getattr(record, "event", ""), getattr(record, "fields", {})
            if event.startswith("canary"):
                told.append((event, known.get("share", known.get("why"))))

    handler, logger = Events(), logging.getLogger("fleetlearn.coordinator")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        async with several(folder) as host:
            await host.add("a")
            await begin(host)
            await host.hosted.look()
            act_on(operations(host), "a", "widen")
            await host.hosted.look()
            act_on(operations(host), "a", "back")
            for _ in range(2):
                await host.hosted.look()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert told == [
        ("canary-step", 0.25), ("canary-step", 0.5), ("canary-back", "asked by test")
    ]  # fmt: skip


PRIVATE: dict[str, Any] = {
    "recipe": "dp-fedavg",
    "privacy__noise": 1.0,
    "privacy__delta": 1e-6,
    "privacy__population": 100,
    "privacy__clip": 1.0,
}


@run_async
async def test_neither_run_of_a_canary_can_be_private(folder: Path) -> None:
    """Each would have a budget of its own for the same devices."""
    async with several(folder) as host:
        await host.add("a", **PRIVATE)
        await host.add("b", **ASYNCHRONOUS)
        text = plan_text(folder / "bundle", folder / "new.run", **PRIVATE)
        (folder / "new.toml").write_text(text)
        new = CanaryAsked(plan=str(folder / "new.toml"))
        for old, asked in (("a", new), ("b", new), ("a", CanaryAsked(model="0", settings=FAST))):
            with pytest.raises(FleetError, match=r"toml: with \[privacy\] there is no canary"):
                begin_canary(operations(host), old, asked)
        assert [run.name for run in host.wanted.runs()] == ["a", "b"]


@run_async
async def test_neither_run_of_a_canary_can_have_masked_updates(folder: Path) -> None:
    """The same devices would train the same model for two sums."""
    secure = SECURE | {"secure__helper": "https://127.0.0.1:1", "round__goal": 2}
    async with several(folder) as host:
        await host.add("a", **secure)
        await host.add("b", **ASYNCHRONOUS)
        (folder / "new.toml").write_text(
            plan_text(folder / "bundle", folder / "new.run", "fedavg", **secure)
        )
        new = CanaryAsked(plan=str(folder / "new.toml"))
        for old, asked in (("a", new), ("b", new), ("a", CanaryAsked(model="0", settings=FAST))):
            with pytest.raises(FleetError, match=r"toml: with \[secure\] there is no canary"):
                begin_canary(operations(host), old, asked)


@run_async
async def test_neither_run_of_a_canary_can_have_several_models(folder: Path) -> None:
    """The devices of the two runs would train different models."""
    async with several(folder) as host:
        await host.add("b", **ASYNCHRONOUS)
        (folder / "new.toml").write_text(family_text(folder))
        new = CanaryAsked(plan=str(folder / "new.toml"))
        with pytest.raises(FleetError, match=r"toml: with \[family\] there is no canary"):
            begin_canary(operations(host), "b", new)
        assert [run.name for run in host.wanted.runs()] == ["b"]


@run_async
async def test_neither_run_of_a_canary_can_be_without_a_model(folder: Path) -> None:
    """Nothing of it could be compared."""
    bundle = statistics_bundle(folder)
    text = f'recipe = "statistics"\nname = "n"\nbundle = "{bundle.path}"\n[round]\ngoal = 2\n'
    async with several(folder) as host:
        await host.add("b", **ASYNCHRONOUS)
        (folder / "new.toml").write_text(text)
        new = CanaryAsked(plan=str(folder / "new.toml"))
        with pytest.raises(FleetError, match=r"toml: a run without a model has no canary"):
            begin_canary(operations(host), "b", new)
        assert [run.name for run in host.wanted.runs()] == ["b"]
