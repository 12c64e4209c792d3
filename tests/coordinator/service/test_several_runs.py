"""A host with several runs, against devices that speak the protocol by hand: who serves which, and
what ends alone."""

from __future__ import annotations

import asyncio
import errno
import gc
import json
import logging
import shutil
import threading
import weakref
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import numpy as np
import pytest
from fleetlearn_coordinator import read_model, read_status
from fleetlearn_coordinator.aggregation import open_round
from fleetlearn_coordinator.aggregation.exact_mean import USUAL
from fleetlearn_coordinator.service import several_runs as module
from fleetlearn_coordinator.service.held_out import HeldOut
from fleetlearn_coordinator.storage.administrators import Administrators
from fleetlearn_coordinator.storage.identities import Identities
from fleetlearn_coordinator.storage.runs import Population
from fleetlearn_protocol import Code, ProtocolError
from fleetlearn_protocol.messages import (
    Accepted,
    Cancel,
    CheckIn,
    ComeBack,
    Failed,
    Grant,
    Held,
    Refused,
    Task,
    Welcome,
)
from peers import Peer, plan_text, report_of, write_test_bundle
from several import SIZE, UPDATE, nothing_comes, run_async, settled, several

# Who serves which run


@run_async
async def test_a_device_serves_the_runs_in_turn(folder: Path) -> None:
    async with several(folder) as host:
        for name in ("a", "b", "c"):
            await host.add(name)
        peer = await host.join("d")
        served = [host.of(await peer.do_round(UPDATE)) for _ in range(9)]
        assert sorted(served[:3]) == ["a", "b", "c"]
        assert served == served[:3] * 3
        await settled(peer)
        assert {server.engine.version for _, server in host.hosted.servers()} == {3}


@run_async
async def test_no_device_has_two_tasks_whatever_happens(folder: Path) -> None:
    """Three runs of other kinds, twelve devices that come, go, fail, and report, and a look at all
    books after each."""
    async with several(folder) as host:
        await host.add(
            "a", round__goal=4, round__minimum=2, round__over_selection=1.5, round__gather=0.01
        )
        await host.add("b", round__goal=2, round__gather=0.01)
        await host.add(
            "c", recipe="fedbuff", round__goal=2, round__concurrency=5, round__minimum=None,
            round__over_selection=None, round__gather=None,
        )  # fmt: skip
        rng = np.random.default_rng(0)
        end = asyncio.get_running_loop().time() + 2.5
        tasks = list[str]()

        def check() -> None:
            for device, shared in host.hosted.host.turns.devices.items():  # type: ignore[union-attr]
                books = [
                    name
                    for name, server in host.hosted.servers()
                    if device in server.engine.leases and device not in server.engine.book.absent
                ]
                assert len(books) <= 1, f"{device} has tasks of {books}"
                assert shared.serves is None or books in ([], [shared.serves.port.name])

        async def device(name: str) -> None:
            while asyncio.get_running_loop().time() < end:
                peer = await host.join(name)
                for _ in range(int(rng.integers(1, 6))):
                    try:
                        async with asyncio.timeout(0.3):
                            message = await peer.receive()
                    except TimeoutError:
                        break
                    check()
                    if not isinstance(message, Task):
                        continue
                    tasks.append(message.task)
                    if rng.random() < 0.2:
                        break  # it goes, with the task
                    try:
                        await peer.upload(message, UPDATE)
                    except AssertionError:  # its round is over: no grant came
                        break
                    check()
                await peer.connection.close()

        await asyncio.gather(*(device(f"d{number}") for number in range(12)))
        check()
        assert all(server.engine.version > 2 for _, server in host.hosted.servers())
        assert len({task.partition("-")[0] for task in tasks}) == 3


@run_async
async def test_a_new_connection_is_no_new_budget(folder: Path) -> None:
    """A device that connects again and again would else fetch the bundle each time."""
    async with several(folder) as host:
        server = await host.add("one")
        for number in range(3):
            peer = await host.join("a")
            task = await peer.task()
            connection = host.hosted.host.devices["a"].connection
            of_task = sum(vector.size for vector in task.vectors)
            assert (connection.downloads.tokens > of_task + 1) == (number == 0)
            assert server.download > of_task
            connection.downloads.tokens = connection.downloads.rate = 1e-9
            await peer.connection.close()
            while "a" in host.hosted.host.devices:
                await asyncio.sleep(0.01)


@run_async
async def test_a_run_that_needs_all_devices_is_not_starved(folder: Path) -> None:
    async with several(folder) as host:
        greedy = await host.add(
            "greedy", recipe="fedbuff", round__goal=1, round__concurrency=10, round__minimum=None,
            round__over_selection=None, round__gather=None,
        )  # fmt: skip
        large = await host.add("large", round__goal=4, round__minimum=4, round__gather=30.0)
        peers = [await host.join(f"d{number}") for number in range(4)]

        async def work(peer: Peer) -> None:
            while large.engine.version < 3:
                task = await peer.receive()
                if isinstance(task, Task):
                    await peer.upload(task, UPDATE)

        workers = [asyncio.create_task(work(peer)) for peer in peers]
        while large.engine.version < 3:
            await asyncio.sleep(0.01)
        for worker in workers:
            worker.cancel()
        assert greedy.engine.version >= 3, "the other one had its turns too"


@run_async
async def test_a_run_that_cannot_gather_does_not_keep_devices_for_ever(folder: Path) -> None:
    async with several(folder) as host:
        await host.add("paused")
        held = await host.join("held")
        await held.task()
        await host.want("paused", "paused")  # so this task does not end
        await host.add("large", round__goal=3, round__minimum=3)
        one, two = await host.join("1"), await host.join("2")
        await host.add("other", round__goal=2, round__minimum=2)
        await nothing_comes(one)
        for _, server in host.hosted.servers():
            server.patience = 0.05  # type: ignore[attr-defined]
        await asyncio.sleep(0.06)
        host.hosted.host.sweep(1.0)
        assert [host.of(await peer.task()) for peer in (one, two)] == ["other", "other"]


@run_async
async def test_a_population_is_found_by_tags_tier_runtime_and_share(folder: Path) -> None:
    async with several(folder) as host:
        await host.add("eu", Population(tags=("eu",)))
        await host.add("phones", Population(tiers=("phone",), runtimes=("onnx",)))
        eu, phone = (
            await host.join("e", tags=("eu", "x")),
            await host.join("p", tier="phone", runtime="onnx 1.2"),
        )
        for _ in range(2):
            assert host.of(await eu.do_round(UPDATE)) == "eu"
            assert host.of(await phone.do_round(UPDATE)) == "phones"
        none = await host.connect("n")
        await none.send(CheckIn(1, "n", 10, tier="phone", runtime="other 1"))
        welcome: Welcome = await none.expect(Welcome)
        assert welcome.ineligible == (
            "eu: the run is for devices with the tag eu; phones: the run is for devices that train "
            "with onnx"
        )
        await nothing_comes(none)


@run_async
async def test_a_device_that_no_run_wants_is_sent_away(folder: Path) -> None:
    async with several(folder) as host:
        pace = {
            "pace__connected": 1,
            "pace__check_ins": 100.0,
            "round__goal": 1,
            "round__deadline": 30.0,
        }
        await host.add("a", **pace)
        first = await host.join("first")
        await first.task()
        await host.add("b", **pace)
        second, third = await host.join("second"), await host.join("third")
        await second.task()  # of b
        assert isinstance(await third.receive(), ComeBack)


# What comes and goes


@run_async
async def test_a_run_is_added_and_removed_while_devices_stay_connected(folder: Path) -> None:
    async with several(folder) as host:
        peer = await host.join("d")
        await nothing_comes(peer)
        await host.add("a")
        task = await peer.task()
        assert host.of(task) == "a"
        host.wanted.remove("a")
        await host.add("b")
        cancel: Cancel = await peer.expect(Cancel)
        assert (cancel.task, cancel.text) == (task.task, "the run a is removed")
        assert host.of(await peer.do_round(UPDATE)) == "b"
        assert read_status(folder / "a.run").running is False


@run_async
async def test_a_paused_run_counts_what_is_out_and_gives_nothing(folder: Path) -> None:
    async with several(folder) as host:
        server = await host.add(
            "a", round__goal=2, round__minimum=1, round__deadline=0.5, round__over_selection=1
        )
        one, two = await host.join("1"), await host.join("2")
        tasks = await one.task(), await two.task()
        await host.want("a", "paused")
        await asyncio.sleep(0.6)  # the deadline is over by another clock
        assert isinstance(await one.upload(tasks[0], UPDATE), Accepted)
        await two.connection.close()
        two = await host.join("2", held=Held(tasks[1].task, 1))
        assert isinstance(await two.upload(tasks[1], UPDATE), Accepted)
        await settled(two)
        assert server.engine.version == 1, "the round came to its end"
        await nothing_comes(one)
        await host.want("a", "running")
        assert (await one.task()).round == 2
        assert read_model(folder / "a.run")[0] == 1


@run_async
async def test_devices_that_are_kept_for_a_run_serve_others_while_it_is_paused(
    folder: Path,
) -> None:
    async with several(folder) as host:
        await host.add("other", round__goal=2)
        await host.add("large", round__goal=2, round__minimum=2)
        first = await host.join("1")
        assert host.of(await first.task()) == "other"
        second = await host.join("2")
        await nothing_comes(second)  # it is kept
        await host.want("large", "paused")
        assert host.of(await second.task()) == "other"


@pytest.mark.parametrize("state", ["paused", "stopped"])
def test_a_device_that_only_the_paused_or_stopped_run_wanted_is_sent_away(
    tmp_path: Path, state: str
) -> None:
    async def test(folder: Path) -> None:
        async with several(folder) as host:
            await host.add("full", pace__connected=1, pace__check_ins=100.0)
            first = await host.join("1")
            await first.task()
            await host.add("large", round__goal=3, round__minimum=3)
            second = await host.join("2")
            await nothing_comes(second)  # it waits for the run that gathers
            await host.want("large", state)
            assert isinstance(await second.receive(), ComeBack)

    run_async(test)(tmp_path)


@run_async
async def test_a_device_is_offered_again_to_a_run_that_had_enough(folder: Path) -> None:
    async with several(folder) as host:
        full = await host.add("full", pace__connected=1, pace__check_ins=100.0)
        first = await host.join("1")
        await first.task()
        await host.add("large", round__goal=3, round__minimum=3)
        second = await host.join("2")
        await nothing_comes(second)
        turns = host.hosted.host.turns
        assert turns is not None
        (after,) = turns.devices["2"].declined.values()
        asked = list[str]()
        full.join = lambda check_in, now: asked.append(check_in.device)  # type: ignore[method-assign]
        host.hosted.host.sweep(1.0)
        assert asked == [], "it is too early"
        turns.devices["2"].declined = dict.fromkeys(turns.devices["2"].declined, after - 1000000.0)
        host.hosted.host.sweep(1.0)
        assert asked == ["2"]


@run_async
async def test_a_drained_run_ends_with_its_round(folder: Path) -> None:
    async with several(folder) as host:
        await host.add("a", round__goal=2, round__minimum=2)
        one, two = await host.join("1"), await host.join("2")
        first, second = await one.task(), await two.task()
        await host.want("a", "draining")
        assert isinstance(await one.upload(first, UPDATE), Accepted)
        await host.hosted.look()
        assert host.row("a").wanted == "draining"
        assert isinstance(await two.upload(second, UPDATE), Accepted)
        await settled(two)
        await host.hosted.look()
        assert host.row("a").wanted == "stopped"
        assert read_model(folder / "a.run")[0] == 1
        assert not dict(host.hosted.servers())


@run_async
async def test_a_stopped_run_goes_on_with_its_leases(folder: Path) -> None:
    async with several(folder) as host:
        await host.add("a", round__goal=2, round__minimum=2)
        one, two = await host.join("1"), await host.join("2")
        first, second = await one.task(), await two.task()
        assert isinstance(await one.upload(first, UPDATE), Accepted)
        await host.want("a", "stopped")
        assert (await two.expect(Cancel)).task == second.task
        assert not read_status(folder / "a.run").running
        await host.want("a", "running")
        again = await two.task()
        assert again.task == second.task
        assert isinstance(await two.upload(again, UPDATE), Accepted)
        await settled(two)
        assert host.server("a").engine.version == 1


@run_async
async def test_an_update_of_another_run_reaches_the_run_that_gave_its_task(folder: Path) -> None:
    async with several(folder) as host:
        await host.add("a", round__goal=2, round__minimum=2)
        other, peer = await host.join("other"), await host.join("d")
        await other.task()
        task = await peer.task()
        await peer.connection.close()
        await host.add("b")
        back = await host.join("d", held=Held(task.task, task.round))
        assert isinstance(await back.upload(task, UPDATE), Accepted)
        assert host.of(await back.do_round(UPDATE)) == "b"
        assert host.server("a").engine.has_counted("d", task.task)


@run_async
async def test_an_update_of_a_run_that_is_not_served_is_refused(folder: Path) -> None:
    async with several(folder) as host:
        await host.add("a")
        peer = await host.join("d")
        task = await peer.task()
        await peer.connection.close()
        await host.want("a", "stopped")
        back = await host.join("d", held=Held(task.task, task.round))
        await back.send(report_of(task, UPDATE))
        refused: Refused = await back.expect(Refused)
        assert (refused.code, refused.task) == (Code.STALE_ROUND, task.task)
        await host.add("b")
        assert host.of(await back.do_round(UPDATE)) == "b"


@run_async
async def test_nobody_is_heard_at_the_start_before_all_runs_have_begun(folder: Path) -> None:
    """A device that comes back with a task of an earlier process finds the run that gave it."""
    async with several(folder) as host:
        for name in ("a", "b"):
            await host.add(name)
    async with several(folder) as host:
        served = list[int]()
        asyncio.get_running_loop().call_soon(lambda: served.append(len([*host.hosted.servers()])))
        await host.hosted.look()
        await asyncio.sleep(0)
        assert served == [2]


@run_async
async def test_devices_serve_the_other_runs_while_one_begins(folder: Path) -> None:
    """A large model takes seconds to read. Here that waits until another run's rounds are done."""
    async with several(folder) as host:
        await host.add("large")
        peer = await host.join("d")
        task = await peer.task()
        await peer.connection.close()
        await host.want("large", "stopped")
        await host.add("small")
        begun, go_on, open_run = threading.Event(), threading.Event(), module.open_run

        def open_later(*arguments: Any, **more: Any) -> Any:
            begun.set()
            assert go_on.wait(20), "nobody let it go on"
            return open_run(*arguments, **more)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "open_run", open_later)
            beginning = asyncio.create_task(host.want("large", "running"))
            try:
                await asyncio.to_thread(begun.wait, 20)
                back = await host.join("d", held=Held(task.task, task.round))
                for _ in range(3):
                    assert host.of(await back.do_round(UPDATE)) == "small"
            finally:
                go_on.set()
            await beginning
        small = await back.task()
        await host.want("small", "paused")
        assert isinstance(await back.upload(small, UPDATE), Accepted)
        assert (await back.task()).task == task.task, "it is free for the run whose task it had"


@run_async
async def test_what_is_as_large_as_the_model_is_freed_when_a_run_ends(folder: Path) -> None:
    """The garbage collector runs rarely: a run that is stopped and resumed would have two models in
    memory, or more."""
    async with several(folder) as host:
        server = await host.add("a", server__optimizer="adam", server__lr=0.1)
        gc.collect()
        gc.disable()
        try:
            peer = await host.join("d")
            task = await peer.task()
            await peer.fetch(task.vector("model").sha256)
            assert isinstance(await peer.upload(task, UPDATE), Accepted)
            await peer.task()
            sums = server.run.reports.round.sums.states["update"]
            newest = server.run.models.newest
            arrays = [newest.model, *newest.optimizer_state.values(), sums.bin_of(USUAL)]
            assert len(arrays) == 4, "Adam's two moments, and a number for each element's sum"
            there = [weakref.ref(each) for each in arrays]
            del sums, newest, arrays, task
            await host.want("a", "stopped")
            assert [each for each in there if each() is not None] == []

            def diverge(*arguments: Any) -> Any:
                there.extend(
                    weakref.ref(each) for each in arguments if isinstance(each, np.ndarray)
                )
                raise ProtocolError(Code.NOT_FINITE, "training has diverged")

            await host.add("b")
            await peer.expect(Cancel)
            with pytest.MonkeyPatch.context() as patch:
                # the model from before
                patch.setattr(open_round, "next_model", lambda *given: diverge(given[4]))
                await peer.do_round(UPDATE)
                await settled(peer)
                await host.hosted.look()
            assert "training has diverged" in host.row("b").failed
            assert len(there) == 5
            assert [each for each in there if each() is not None] == []
        finally:
            gc.enable()


# What fails


@run_async
async def test_a_run_that_fails_ends_alone(folder: Path) -> None:
    identities = Identities(folder / "identities")
    async with several(folder) as host:
        host.hosted._identities = identities
        good = await host.add("good")
        bad = await host.add("bad")
        good_version = good.engine.version

        def diverge(*args: Any) -> Any:
            raise ValueError("the model is not finite")

        bad.run.reports.round.commit = diverge  # type: ignore[method-assign]
        peer = await host.join("d")
        for _ in range(2):  # one of each
            await peer.do_round(UPDATE)
        await settled(peer)
        await host.hosted.look()
        assert host.row("bad").failed == "the model is not finite"
        assert host.row("good").failed == ""
        for _ in range(2):
            assert host.of(await peer.do_round(UPDATE)) == "good"
        await settled(peer)
        assert good.engine.version == good_version + 3
        assert not read_status(folder / "bad.run").running
        assert ("failed", "bad") in [(row.what, row.about["run"]) for row in identities.events()]
        await host.want("bad", "running")  # its update was accepted, and is still there
        assert host.server("bad").engine.version == 1
        assert host.row("bad").failed == ""
    identities.close()


def test_lines_of_the_log_name_their_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "fleetlearn")
    write_test_bundle(tmp_path / "bundle", SIZE)

    async def test() -> None:
        async with asyncio.timeout(60), several(tmp_path) as host:
            await host.add("digits", round__goal=2)
            await host.add("roofs", Population(("roof",)))
            first, second, third = (
                await host.join("a"),
                await host.join("b"),
                await host.join("r", tags=("roof",)),
            )
            task = await first.task()
            await first.send(Failed(task.task, "diverged", "the loss is NaN"))
            await settled(first)
            await second.do_round(UPDATE)
            await third.do_round(UPDATE)
            await settled(third)

    asyncio.run(test())
    said = caplog.messages
    assert (
        f"run digits is served (running), data in {tmp_path / 'digits.run'}: it begins at model "
        "version 0"
    ) in said
    assert any(text.startswith("device a, run digits: failed task ") for text in said)
    assert any(text.startswith("run roofs: round 1 committed: ") for text in said)


@run_async
async def test_a_run_that_fails_while_a_device_uploads_ends_alone(folder: Path) -> None:
    async with several(folder) as host:
        bad = await host.add("bad", round__goal=2, round__minimum=2)
        peer, other = await host.join("d"), await host.join("e")
        await other.task()
        task = await peer.task()
        await host.add("good", round__goal=2, round__minimum=2)

        def full(*args: Any, **kwargs: Any) -> Any:
            raise OSError(28, "No space left on device")

        bad.run.save_update = full  # type: ignore[method-assign]
        answer = await peer.upload(task, UPDATE)
        assert isinstance(answer, Cancel), answer
        await other.expect(Cancel)
        await other.task()
        await host.hosted.look()
        assert "no space left on device" in host.row("bad").failed
        message = await peer.task()
        assert (await peer.expect(Refused)).task == task.task
        assert isinstance(await peer.upload(message, UPDATE), Accepted)


@pytest.mark.parametrize("call", ["take_spool_file", "write_spool_file"])
def test_a_full_disk_ends_its_run_alone(tmp_path: Path, call: str) -> None:
    async def test(folder: Path) -> None:
        async with several(folder) as host:
            bad = await host.add("bad", round__goal=2, round__minimum=2)
            peer, other = await host.join("d"), await host.join("e")
            task = await peer.task()
            await other.task()
            good = await host.add("good", round__goal=2, round__minimum=2)

            def full(*args: Any, **kwargs: Any) -> Any:
                raise OSError(28, "No space left on device")

            setattr(bad.run.store.blobs, call, full)
            await peer.send(report_of(task, UPDATE))
            if call == "write_spool_file":
                await peer.send_update(await peer.expect(Grant), UPDATE)
            assert (await peer.expect(Cancel)).task == task.task
            following = await peer.task()
            assert host.of(following) == "good"
            assert (await other.expect(Cancel)).text.startswith("the run was stopped by an error")
            await host.hosted.look()
            assert "no space left on device" in host.row("bad").failed
            await settled(peer)
            peer = await host.join("d")  # what else came of the failed run is of no interest
            again = await peer.task()
            assert again.task == following.task
            for one, its in ((peer, again), (other, await other.task())):
                assert isinstance(await one.upload(its, UPDATE), Accepted)
            await settled(other)
            assert good.engine.version == 1
            assert not host.hosted.host.failure.done()

    run_async(test)(tmp_path)


@run_async
async def test_a_plan_that_cannot_be_served_fails_and_can_be_tried_again(folder: Path) -> None:
    async with several(folder) as host:
        await host.add("a")
        plan = folder / "b.toml"
        text = plan_text(folder / "bundle", folder / "b.run", round__goal=1, round__minimum=1)
        plan.write_text(text)
        host.wanted.add("b", plan)
        plan.write_text("nonsense")
        await host.hosted.look()
        assert "this is not TOML" in host.row("b").failed
        assert [name for name, _ in host.hosted.servers()] == ["a"]
        plan.write_text(text)
        await host.hosted.look()
        assert len(dict(host.hosted.servers())) == 1, "nobody has asked for it again"
        await host.want("b", "running")
        assert len(dict(host.hosted.servers())) == 2


@run_async
async def test_a_finished_run_is_closed_and_devices_go_on(folder: Path) -> None:
    async with several(folder) as host:
        await host.add("short", stop__rounds=1)
        await host.add("long")
        peer = await host.join("d")
        await peer.do_round(UPDATE)
        await peer.do_round(UPDATE)
        await settled(peer)
        await host.hosted.look()
        assert [name for name, _ in host.hosted.servers()] == ["long"]
        assert read_status(folder / "short.run").finished is not None
        assert host.of(await peer.do_round(UPDATE)) == "long"


def test_a_finished_run_whose_last_model_cannot_be_measured_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = asyncio.Event()

    async def measure(held_out: HeldOut) -> None:
        await broken.wait()
        raise OSError(errno.ENOSPC, "No space left on device")

    async def test(folder: Path) -> None:
        (folder / "held.npz").touch()
        async with several(folder) as host:
            server = await host.add("a", stop__rounds=1, evaluation__data=str(folder / "held.npz"))
            peer = await host.join("d")
            await peer.do_round(UPDATE)
            await settled(peer)
            await host.hosted.look()
            assert [name for name, _ in host.hosted.servers()] == ["a"], (
                "its last model is not measured yet"
            )
            broken.set()
            while not server.ended:
                await asyncio.sleep(0)
            await host.hosted.look()
            assert not host.hosted.servers()
            assert read_status(folder / "a.run").running is False

    monkeypatch.setattr(HeldOut, "run", measure)
    run_async(test)(tmp_path)


@run_async
async def test_a_copied_data_directory_is_refused(folder: Path) -> None:
    async with several(folder) as host:
        await host.add("a")
        shutil.copytree(folder / "a.run", folder / "b.run")
        (folder / "b.toml").write_text(
            plan_text(folder / "bundle", folder / "b.run", round__goal=1, round__minimum=1)
        )
        host.wanted.add("b", folder / "b.toml")
        await host.hosted.look()
        assert "is a copy of" in host.row("b").failed
        assert [name for name, _ in host.hosted.servers()] == ["a"]
        peer = await host.join("d")
        assert host.of(await peer.do_round(UPDATE)) == "a"


# Rolled back


@run_async
async def test_a_run_is_rolled_back_with_its_devices_connected(folder: Path) -> None:
    identities = Identities(folder / "identities")
    async with several(folder) as host:
        host.hosted._identities = identities
        server = await host.add("a")
        await host.add("b", round__goal=9, round__minimum=9)
        peer = await host.join("d")
        for _ in range(2):
            await peer.do_round(UPDATE)
        given = await peer.task()
        host.roll_back("a", 1)
        await host.hosted.look()
        assert (await peer.expect(Cancel)).task == given.task
        again = await peer.task()
        assert (host.of(again), again.round, server.engine.version) == ("a", 4, 3)
        np.testing.assert_array_equal(
            read_model(folder / "a.run", 3)[1], read_model(folder / "a.run", 1)[1]
        )
        assert isinstance(await peer.upload(again, UPDATE), Accepted)
        await settled(peer)
        assert server.engine.version == 4
        (row,) = [row for row in identities.events() if row.what == "rolled back"]
        assert row.about == {"run": "a", "version": 1, "as": 3, "who": "test"}
    identities.close()


@run_async
async def test_a_private_run_ends_at_its_budget_and_a_change_of_it_is_in_the_audit_log(
    folder: Path,
) -> None:
    private = {
        "recipe": "dp-fedavg",
        "privacy__noise": 4.0,
        "privacy__epsilon": 1.6,
        "privacy__delta": 1e-6,
        "privacy__population": 100,
        "privacy__clip": 1.0,
    }
    identities = Identities(folder / "identities")
    async with several(folder) as host:
        host.hosted._identities = identities
        server = await host.add("a", **private)
        await host.add("b", round__goal=9, round__minimum=9)
        peer = await host.join("d")
        for _ in range(2):
            await peer.do_round(UPDATE, evaluation=None)
        await settled(peer)
        assert server.run.finished is not None
        assert "the privacy budget is spent: epsilon 1.55 of 1.6 after 2" in server.run.finished
        await host.want("a", "stopped")
        text = (folder / "a.toml").read_text()
        (folder / "a.toml").write_text(text.replace("epsilon = 1.6", "epsilon = 2.3"))
        await host.want("a", "running")
        assert host.server("a").run.finished is None
        (row,) = [row for row in identities.events() if row.what == "privacy changed"]
        assert row.about["run"] == "a"
        assert row.about["change"].startswith("epsilon 1.6 at delta 1e-06 (gaussian, noise 4, ")
        await host.want("a", "stopped")
        without = text[: text.index("[privacy]")].replace("dp-fedavg", "fedavg")
        (folder / "a.toml").write_text(without)
        await host.want("a", "running")
        assert "has made 2 releases under [privacy]" in host.row("a").failed
        assert [name for name, _ in host.hosted.servers()] == ["b"], "the others go on"
    identities.close()


@run_async
async def test_a_version_that_is_asked_for_is_kept_however_many_rounds_come_first(
    folder: Path,
) -> None:
    """By default the last three are kept, and the host looks for what is asked once a second."""
    async with several(folder) as host:
        server = await host.add("a")
        peer = await host.join("d")
        for _ in range(2):
            await peer.do_round(UPDATE)
        await settled(peer)
        earlier = read_model(folder / "a.run", 1)[1]
        host.roll_back("a", 1)
        for _ in range(5):
            await peer.do_round(UPDATE)
        await settled(peer)
        await host.hosted.look()
        assert server.engine.version == 8
        np.testing.assert_array_equal(read_model(folder / "a.run")[1], earlier)


@run_async
async def test_a_paused_run_is_rolled_back_and_stays_paused(folder: Path) -> None:
    async with several(folder) as host:
        server = await host.add("a")
        peer = await host.join("d")
        for _ in range(2):
            await peer.do_round(UPDATE)
        given = await peer.task()
        await host.want("a", "paused")
        host.roll_back("a", 0)
        await host.hosted.look()
        assert (await peer.expect(Cancel)).task == given.task
        await nothing_comes(peer)
        assert server.engine.version == 3
        await host.want("a", "running")
        assert (await peer.task()).round == 4


@run_async
async def test_a_finished_run_goes_on_from_an_earlier_version(folder: Path) -> None:
    async with several(folder) as host:
        await host.add("a", stop__epsilon=1e9)
        await host.add("b", round__goal=9, round__minimum=9)
        peer = await host.join("d")
        await peer.do_round(UPDATE)
        await settled(peer)
        await host.hosted.look()
        assert [name for name, _ in host.hosted.servers()] == ["b"]
        host.roll_back("a", 0)
        await host.hosted.look()
        assert host.server("a").engine.version == 2
        task = await peer.task()
        assert (host.of(task), task.round) == ("a", 2)
        assert read_status(folder / "a.run").finished is None


@run_async
async def test_a_host_has_a_port_for_administrators(folder: Path) -> None:
    addresses: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: addresses.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("fleetlearn.coordinator")
    logger.addHandler(handler)
    before = logger.level
    logger.setLevel(logging.INFO)
    try:
        async with several(folder, identities=str(folder / "ids"), admin={"port": 0}) as host:
            await host.add("a")
            (address,) = (
                line.split()[-1] for line in addresses if line.startswith("administrators: ")
            )
            token = Administrators(folder / "ids").add("vera", "view", None, 0.0)
            request = Request(f"{address}/v1/runs", headers={"Authorization": f"Bearer {token}"})
            answer = await asyncio.to_thread(lambda: urlopen(request, timeout=30).read())
            assert [(run["name"], run["wanted"]) for run in json.loads(answer)] == [
                ("a", "running")
            ]
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)
