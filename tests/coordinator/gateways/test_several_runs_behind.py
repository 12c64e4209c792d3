"""Several runs behind gateways: a device serves one after the other, whichever gateway has its
connection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from fleetlearn_coordinator.gateways.engine_host import SOCKET
from fleetlearn_coordinator.gateways.gateway import gateway_running
from fleetlearn_coordinator.plan.service_settings import ServiceSettings
from fleetlearn_coordinator.service.several_runs import hosting
from fleetlearn_protocol.errors import Code
from fleetlearn_protocol.frames import pack_chunks
from fleetlearn_protocol.messages import Accepted, Cancel, Grant, Refused, Uploaded
from gateways import SeveralBehindGateways, several_behind_gateways
from peers import Peer, report_of, update_of
from several import SIZE, UPDATE, run_async


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


@run_async
async def test_a_device_serves_runs_in_turn(folder: Path) -> None:
    """It fetches what each of them serves, and its updates reach the run that gave the task."""
    async with several_behind_gateways(folder) as host:
        for name in ("a", "b"):
            await host.add(name)
        peer, served = await host.join("device"), []
        for _ in range(4):
            task = await peer.task()
            served.append(host.of(task))
            assert len(await peer.fetch(task.vectors[0].sha256)) == task.vectors[0].size
            assert isinstance(await peer.upload(task, UPDATE), Accepted)
        assert served in (["a", "b"] * 2, ["b", "a"] * 2)
        await until(lambda: [host.server(name).engine.version for name in "ab"] == [2, 2])


@run_async
async def test_a_full_disk_of_a_gateway_ends_its_run_alone(folder: Path) -> None:
    async with several_behind_gateways(folder, 1) as host:
        await host.add("bad")
        peer = await host.join("device")
        task = await peer.task()
        await peer.send(report_of(task, UPDATE))
        grant = await peer.expect(Grant)
        (there,) = host.gateways[0].link.runs.values()

        def fail(*arguments: object) -> None:
            raise OSError(28, "No space left on device")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(there.spool, "write_spool_file", fail)
            await peer.send_update(grant, UPDATE)
            assert (await peer.expect(Refused)).code == Code.STALE_ROUND
            await until(host.server("bad").done.done)
        await host.hosted.look()
        assert "no space left on device" in (host.row("bad").failed or "")
        await host.add("good")
        assert not host.hosted.host.failure.done()
        while isinstance(message := await peer.receive(), Cancel | Refused):
            pass
        assert host.of(message) == "good"
        assert isinstance(await peer.upload(message, UPDATE), Accepted)
        assert [*host.gateways[0].link.runs] == [host.server("good").task_prefix]


def begin(peer: Peer, grant: Grant) -> list[bytes]:
    return list(pack_chunks(grant.transfer, update_of(1.0, SIZE).tobytes()))


def test_the_engine_process_is_there_again(tmp_path: Path) -> None:
    """Devices stay connected; the run of an upload under way goes on with its bytes."""

    @run_async
    async def test(folder: Path) -> None:
        given = {"port": 0, "runs": str(folder / "runs"), "gateways": 1}
        settings = ServiceSettings.read(given)
        assert settings.runs is not None
        async with gateway_running(settings, 0, 1, settings.runs / SOCKET) as gateway:
            async with hosting(settings) as runs:
                await runs._stop_sweeping()
                host = SeveralBehindGateways(folder, settings, runs)
                host.gateways = [gateway]
                for name in ("a", "b"):
                    await host.add(name, round__goal=2, round__minimum=2, round__deadline=60.0)
                peers = [await host.join(name) for name in ("one", "two")]
                tasks = [await peer.task() for peer in peers]
                assert host.of(tasks[0]) == host.of(tasks[1])
                name = host.of(tasks[0])
                await peers[0].send(report_of(tasks[0], UPDATE))
                grant = await peers[0].expect(Grant)
                chunks = begin(peers[0], grant)
                await peers[0].send(chunks[0])
            await gateway.link.over.wait()
            for chunk in chunks[1:]:
                await peers[0].send(chunk)
            await peers[0].send(Uploaded(tasks[0].task))
            await peers[1].send(report_of(tasks[1], UPDATE))
            async with hosting(settings) as runs:
                again = SeveralBehindGateways(folder, settings, runs)
                assert isinstance(await peers[0].expect(Accepted), Accepted)
                await peers[1].send_update(await peers[1].expect(Grant), UPDATE)
                await peers[1].expect(Accepted)
                await until(lambda: again.server(name).engine.version == 1)
                again.close()
            host.close()

    test(tmp_path)
