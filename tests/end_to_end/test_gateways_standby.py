"""Two groups of engine process and gateways, of which one serves and the other stands by: killed,
paused, and without their database."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex
from typing import Any

import psutil
import pytest
from gateway_processes import check_model, part_of, write_run
from postgres_runs import buffered_run, check_updates, fleet, live_through, more
from postgres_server import PostgresServer
from processes import Processes, free_port, wait_for
from random_kills import Devices

pytestmark = pytest.mark.slow
GATEWAYS = "2"


@pytest.fixture
def database(postgres: PostgresServer) -> str:
    name = token_hex(8)
    postgres.make_database(name)
    return postgres.url(name)


def stand_by(run: Processes, name: str, plan: Path, service: Path) -> Any:
    words = ("serve", plan, "--service", service, "--gateways", GATEWAYS, "--standby")
    return run.start(name, sys.executable, "-m", "fleetlearn_coordinator", *words)


def other_port(service: Path) -> tuple[Path, str]:
    """Write a service file that differs by its port alone. Returns it, and the address."""
    port, file = free_port(), service.with_name("other.toml")
    lines = [line for line in service.read_text().splitlines() if not line.startswith("port")]
    file.write_text("\n".join([f"port = {port}", *lines]) + "\n")
    return file, f"ws://127.0.0.1:{port}"


def group(supervisor: Any) -> list[psutil.Process]:
    """Return all processes of a group; the supervisor is the first."""
    first = psutil.Process(supervisor.pid)
    return [first, *first.children(recursive=True)]


@contextmanager
def ended(*supervisors: Any) -> Iterator[None]:
    """Leave no process of these groups behind, paused or not."""
    try:
        yield
    finally:
        for supervisor in supervisors:
            if supervisor.poll() is None:
                for each in group(supervisor):
                    each.kill()
                supervisor.wait()


def test_the_other_group_goes_on_after_a_kill(run: Processes, tmp_path: Path) -> None:
    """Of a run in a plain data directory, on one machine and one port."""
    rounds = 60
    plan, url = write_run(tmp_path, rounds, 4)
    service = tmp_path / "service.toml"
    devices = Devices(url, [f"device-{number}" for number in range(4)])
    first = stand_by(run, "first", plan, service)
    wait_for(lambda: "listening" in run.log("first"), "the first to serve")
    second = stand_by(run, "second", plan, service)
    wait_for(lambda: "standing by" in run.log("second"), "the second to stand by")
    assert not part_of(second, "gateway"), "a standby has no gateways"

    def disturb() -> None:
        more(devices, 40)
        for each in group(first):
            each.kill()
        killed = time.monotonic()
        wait_for(lambda: "listening" in run.log("second"), "the second to take over")
        print(f"listening {time.monotonic() - killed:.2f} s after the kill")
        assert second.wait(60) == 0, run.log("second")

    with ended(first, second):
        asyncio.run(live_through(devices, disturb))
    check_model(tmp_path, plan, devices, rounds)
    assert [each.name for each in (tmp_path / "run").glob("*.sock")] == [
        f"gateways-{first.pid}.sock"
    ], "of the one that was killed; the next that stands by removes it"


def test_a_group_that_was_paused_while_the_other_took_over_does_no_harm(
    run: Processes, database: str
) -> None:
    plan, service, url = buffered_run(run.folder, database)
    other, other_url = other_port(service)
    devices = fleet(url)
    first = stand_by(run, "first", plan, service)
    wait_for(lambda: "listening" in run.log("first"), "the first to serve")
    second = stand_by(run, "second", plan, other)
    wait_for(lambda: "standing by" in run.log("second"), "the second to stand by")

    def disturb() -> None:
        more(devices)
        paused = group(first)
        for each in paused:
            each.suspend()
        began = time.monotonic()
        devices.url = other_url
        wait_for(lambda: "listening" in run.log("second"), "the second to take over")
        print(f"taken over {time.monotonic() - began:.1f} s after the pause")
        more(devices)
        for each in paused:
            each.resume()
        wait_for(lambda: "standing by" in run.log("first"), "the first to stand by")
        wait_for(lambda: not part_of(first, "gateway"), "its gateways to end")
        more(devices)
        first.terminate()
        assert run.wait("first") == 0, run.log("first")
        more(devices)
        second.terminate()
        assert run.wait("second") == 0, run.log("second")

    with ended(first, second):
        asyncio.run(live_through(devices, disturb))
    check_updates(run.folder / "run", plan, devices.acknowledged)


def test_a_group_whose_database_is_away_goes_on_after_it(
    run: Processes, postgres: PostgresServer, database: str
) -> None:
    """Devices stay connected where it is away for a moment only."""
    plan, service, url = buffered_run(run.folder, database)
    devices = fleet(url)
    group_of = stand_by(run, "only", plan, service)
    wait_for(lambda: "listening" in run.log("only"), "it to serve")

    def disturb() -> None:
        more(devices)
        gateways = {each.pid for each in part_of(group_of, "gateway")}
        postgres.kill()
        wait_for(lambda: "standing by" in run.log("only"), "it to stand by")
        postgres.start()
        more(devices)
        assert {each.pid for each in part_of(group_of, "gateway")} == gateways
        postgres.kill()
        wait_for(lambda: not part_of(group_of, "gateway"), "its gateways to end")
        postgres.start()
        more(devices)
        group_of.send_signal(signal.SIGTERM)
        assert run.wait("only") == 0, run.log("only")

    with ended(group_of):
        asyncio.run(live_through(devices, disturb))
    check_updates(run.folder / "run", plan, devices.acknowledged)


def test_gateways_that_stand_by_need_a_port(run: Processes, tmp_path: Path) -> None:
    plan, _ = write_run(tmp_path, 1, 1)
    (tmp_path / "service.toml").write_text("port = 0\n")
    words = ("--service", tmp_path / "service.toml", "--gateways", "1", "--standby")
    assert "Give it a number" in run.command("serve", plan, *words, expected=1).stderr
