"""`serve --gateways`, with real processes: the model is one process's, whoever is killed."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from secrets import token_hex

import psutil
import pytest
from fleetlearn_coordinator.service.training_run import pre_sums
from gateway_processes import check_model, part_of, serve, take_part, write_run
from object_server import BUCKET, killed_object_server
from postgres_server import PostgresServer
from processes import Processes, free_port
from random_kills import Devices

KILLS = 6


@pytest.mark.slow
@pytest.mark.parametrize("gateways", [1, 2])
def test_a_run_of_twenty_devices(run: Processes, tmp_path: Path, gateways: int) -> None:
    file, url = write_run(tmp_path, 3, 20)
    supervisor = serve(run, file, gateways)
    devices = Devices(url, [f"device-{number}" for number in range(20)])
    asyncio.run(take_part(devices, supervisor))
    assert supervisor.returncode == 0, run.log("coordinator")
    check_model(tmp_path, file, devices, 3)
    assert "is away" not in run.log("coordinator"), "nobody is alarmed by an orderly end"


async def kill_some(
    run: Processes,
    file: Path,
    devices: Devices,
    luck: random.Random,
    gateways: int,
    others: Mapping[str, Callable[[], None]] = {},
) -> Counter[str]:
    """Serve a plan to these devices, and kill gateways, the engine process or the supervisor at
    random, until the run is finished. Returns how many of each were killed. ``others``: kill
    something else, and start it again; each is killed at least once."""
    usual = ["gateway", "gateway", "--engine", "--engine", "supervisor", *others]
    to_kill = [*others, *luck.choices(usual, k=KILLS - len(others))]
    luck.shuffle(to_kill)
    killed: Counter[str] = Counter()
    async with asyncio.timeout(240), asyncio.TaskGroup() as group:
        for name in devices.names:
            group.create_task(devices.take_part(name))
        supervisor = serve(run, file, gateways)
        while supervisor.poll() is None:
            devices.alive.clear()
            while not devices.alive.is_set() and supervisor.poll() is None:
                await asyncio.sleep(0.01)
            await asyncio.sleep(luck.uniform(0, 0.3))
            if to_kill and (word := to_kill[-1]) in others:
                killed[to_kill.pop()] += 1
                await asyncio.to_thread(others[word])
            elif to_kill and supervisor.poll() is None:
                victims = [supervisor] if word == "supervisor" else part_of(supervisor, word)
                parts = part_of(supervisor, "fleetlearn_coordinator")
                if victims:
                    killed[to_kill.pop()] += 1
                    luck.choice(victims).send_signal(signal.SIGKILL)
                if word == "supervisor":
                    await asyncio.to_thread(supervisor.wait)
                    supervisor = serve(run, file, gateways)  # at once
                    # what the one before had started ends by itself
                    await asyncio.to_thread(psutil.wait_procs, parts, 30)
                    assert not any(each.is_running() for each in parts)
            assert supervisor.poll() in (None, 0), run.log("coordinator")
        devices.over = True
    return killed


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_processes_are_killed(run: Processes, tmp_path: Path, seed: int) -> None:
    rounds = 60
    file, url = write_run(tmp_path, rounds, 6)
    devices = Devices(url, [f"device-{number}" for number in range(6)])
    killed = asyncio.run(kill_some(run, file, devices, random.Random(seed), 2))
    print(dict(killed))
    check_model(tmp_path, file, devices, rounds)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_processes_are_killed_that_add_up_updates(
    run: Processes, tmp_path: Path, seed: int
) -> None:
    """The model is so large, and its rounds have so many updates, that gateways add them up."""
    rounds, count, size, gateways = 12, 16, 2**18, 1
    assert 4 * size >= pre_sums.SMALLEST
    if not pre_sums.pays_off(count, gateways):
        pytest.skip("gateways add up updates where each has a core beside that of the run: needs 2")
    file, url = write_run(tmp_path, rounds, count, size)
    devices = Devices(url, [f"device-{number}" for number in range(count)], size=size)
    killed = asyncio.run(kill_some(run, file, devices, random.Random(seed), gateways))
    print(dict(killed))
    check_model(tmp_path, file, devices, rounds)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("ledger", ["sqlite", "postgresql"])
def test_processes_and_the_object_store_are_killed(
    run: Processes,
    tmp_path: Path,
    ledger: str,
    seed: int,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rounds, luck = 40, random.Random(seed)
    file, url = write_run(tmp_path, rounds, 6)
    elsewhere = f'blobs = "s3://{BUCKET}/runs"\n'
    if ledger == "postgresql":
        server: PostgresServer = request.getfixturevalue("postgres")
        name = token_hex(8)
        server.make_database(name)
        elsewhere += f'ledger = "{server.url(name)}"\n'
    with (tmp_path / "service.toml").open("a") as service:
        service.write(elsewhere)
    devices = Devices(url, [f"device-{number}" for number in range(6)])
    with killed_object_server(tmp_path) as objects:
        for variable, value in objects.environment.items():
            monkeypatch.setenv(variable, value)

        def kill_it() -> None:
            objects.stop()
            time.sleep(luck.choice([0.0, 1.0]))
            objects.start()

        others = {"store": kill_it}
        killed = asyncio.run(kill_some(run, file, devices, luck, 2, others))
        print(dict(killed))
        assert killed["store"], "the run did not end before"
        check_model(tmp_path, file, devices, rounds)
        assert any("/uploads/" in name for name in objects.names())


@pytest.mark.slow
def test_what_a_gateway_cannot_use_is_said_once(run: Processes, tmp_path: Path) -> None:
    service = tmp_path / "service.toml"
    plan, _ = write_run(tmp_path, 1, 1)
    tls = '[tls]\ncertificate = "none.pem"\nkey = "none.key"\n'
    service.write_text(f"port = {free_port()}\n{tls}")
    done = run.command("serve", plan, "--service", service, "--gateways", "2", expected=1)
    assert done.stderr.count("none.pem does not exist") == 1
