"""A coordinator whose ledger is in PostgreSQL, as real processes: what people see of it, its server
killed, the coordinator paused, and one that stands by."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import sys
import time
from functools import partial
from secrets import token_hex

import pytest
from fleetlearn_coordinator import read_model, read_status
from fleetlearn_coordinator.storage.sqlite_ledger import DATABASE
from postgres_runs import (
    GOAL,
    buffered_run,
    check_updates,
    fleet,
    live_through,
    more,
    serve,
    storage_of,
    write_run,
)
from postgres_server import PASSWORD, USER, PostgresServer, postgres_server
from processes import Processes, free_port, wait_for

pytestmark = pytest.mark.slow


def has_begun(run: Processes, name: str) -> bool:
    return any(word in run.log(name) for word in ("standing by", "listening"))


@pytest.fixture
def database(postgres: PostgresServer) -> str:
    name = token_hex(8)
    postgres.make_database(name)
    return postgres.url(name)


def test_commands_find_the_run_by_its_plan(run: Processes, database: str) -> None:
    folder = run.folder
    plan, service, url = buffered_run(folder, database)
    before = run.command("doctor", plan, "--service", service).stdout
    assert "PostgreSQL" in before
    assert "is not there yet" in before
    serve(run, "coordinator", plan, service)
    devices = fleet(url)
    asyncio.run(live_through(devices, lambda: more(devices, 2 * GOAL)))
    assert "a coordinator runs at" in run.command("doctor", plan).stdout
    status = json.loads(run.command("status", plan, "--json").stdout)
    assert status["running"]
    assert status["version"] >= 2
    run.command("evaluate", plan)
    run.command("export-model", plan, "--output", folder / "model.safetensors")
    run.command("backup", plan, folder.parent / "copy")
    second = serve(run, "second", plan, service)
    assert second.wait(60) == 1
    assert run.log("second").endswith(
        f"error: {storage_of(folder / 'run').run.where} is in use by another coordinator; stop "
        "that one first\n"
    )
    run.running["coordinator"].terminate()
    assert run.wait("coordinator") == 0, run.log("coordinator")
    assert not json.loads(run.command("status", plan, "--json", expected=3).stdout)["running"]
    check_updates(folder / "run", plan, devices.acknowledged)
    run.command("backup", "--verify", folder.parent / "copy")
    run.command("restore", folder.parent / "copy", folder.parent / "restored")
    version, restored = read_model(folder.parent / "restored" / "run")
    assert restored.tobytes() == read_model(folder / "run", version)[1].tobytes()
    assert (folder.parent / "restored" / "run" / DATABASE).exists()
    assert {path.name for path in (folder / "run").iterdir()} == {
        "models", "sums", "uploads", "stores.toml", "lock-1",
    }  # fmt: skip


def test_runs_of_one_service_keep_their_ledgers_in_one_database(
    run: Processes, database: str
) -> None:
    """Served, stopped and served again by one process."""
    folder = run.folder
    service, port = folder / "service.toml", free_port()
    service.write_text(f'port = {port}\nledger = "{database}"\nruns = "runs"\n')
    command = (sys.executable, "-m", "fleetlearn_coordinator", "serve", service)
    coordinator = run.start("coordinator", *command)
    names = ("one", "other")
    for name in names:
        (folder / name).mkdir()
        plan, _, _ = buffered_run(folder / name, database)
        run.command("run", "add", service, name, plan)
    wait_for(lambda: run.log("coordinator").count("is served") == 2, "both runs to be served")
    assert "in use" not in run.command("doctor", service).stdout
    coordinator.terminate()
    assert coordinator.wait(60) == 0, run.log("coordinator")
    again = run.start("again", *command)
    wait_for(lambda: run.log("again").count("is served") == 2, "both runs to be served again")
    again.terminate()
    assert again.wait(60) == 0, run.log("again")
    schemas = {storage_of(folder / name / "run").run.schema for name in names}
    assert schemas == {"fleetlearn_one", "fleetlearn_other"}


def test_errors_at_the_start_are_one_line(
    run: Processes, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = f"127.0.0.1:{postgres.port}"
    monkeypatch.setenv("PGPASSWORD", "not the secret")
    cases = {
        f"postgresql://{USER}@127.0.0.1:1/fleet": "check that the server runs",
        f"postgresql://{USER}@{host}/fleet": "password authentication failed",
        f"postgresql://{USER}:{PASSWORD}@{host}/fleet": "this address has a password",
        postgres.url("nothing"): "createdb",
    }
    for number, (url, said) in enumerate(cases.items()):
        folder = run.folder / str(number)
        folder.mkdir()
        plan, service, _ = write_run(folder, url)
        name = f"coordinator-{number}"
        assert serve(run, name, plan, service).wait(60) == 1
        (line,) = run.log(name).splitlines()
        assert line.startswith("error: ")
        assert said in line
        assert PASSWORD not in line
        assert not (folder / "run" / "models").exists()
        found = run.command("doctor", plan, "--service", service, expected=6)
        assert said in " ".join(found.stdout.split() + found.stderr.split())
        assert PASSWORD not in found.stdout + found.stderr


def test_a_coordinator_whose_server_dies_says_so_and_goes_on_at_its_next_start(
    run: Processes,
) -> None:
    with postgres_server() as server:
        plan, service, url = buffered_run(run.folder, server.url())
        devices = fleet(url)

        def disturb() -> None:
            for number in range(3):
                name = f"coordinator-{number}"
                coordinator = serve(run, name, plan, service)
                more(devices)
                server.kill()
                assert coordinator.wait(60) == 1
                last = run.log(name).splitlines()[-1]
                assert last.startswith("error: postgresql://"), run.log(name)
                assert "Traceback" not in run.log(name)
                server.start()
            serve(run, "coordinator", plan, service)
            more(devices)
            run.running["coordinator"].terminate()
            assert run.wait("coordinator") == 0, run.log("coordinator")

        asyncio.run(live_through(devices, disturb))
        check_updates(run.folder / "run", plan, devices.acknowledged)


@pytest.mark.parametrize("seed", range(3))
def test_a_pair_goes_on_whoever_is_killed(run: Processes, seed: int) -> None:
    """Server and coordinators die at random; one of the pair stands by, at the same port."""
    luck = random.Random(seed)
    with postgres_server() as server:
        plan, service, url = buffered_run(run.folder, server.url())
        devices = fleet(url)

        def disturb() -> None:
            names = [f"coordinator-{number}" for number in range(2)]
            for name in names:
                serve(run, name, plan, service, "--standby")
            more(devices, 10)
            for number in range(12):
                if luck.random() < 0.5:
                    server.kill()
                    time.sleep(luck.uniform(0, 0.5))
                    server.start()
                else:
                    run.kill(names.pop(luck.randrange(2)))
                    names.append(f"coordinator-{2 + number}")
                    serve(run, names[-1], plan, service, "--standby")
                more(devices, luck.randrange(1, 20))
            for name in names:
                wait_for(partial(has_begun, run, name), "both to stand by or serve")
                run.running[name].terminate()
            for name in names:
                assert run.wait(name) == 0, run.log(name)
                assert "Traceback" not in run.log(name)

        asyncio.run(live_through(devices, disturb))
        check_updates(run.folder / "run", plan, devices.acknowledged)


def test_a_coordinator_that_was_paused_while_another_took_over_writes_nothing(
    run: Processes, database: str
) -> None:
    plan, service, url = buffered_run(run.folder, database)
    other, port = run.folder / "other.toml", free_port()
    other.write_text(f'port = {port}\nledger = "{database}"\n')
    devices = fleet(url)

    def disturb() -> None:
        first = serve(run, "first", plan, service)
        more(devices)
        serve(run, "second", plan, other, "--standby")
        wait_for(lambda: "standing by" in run.log("second"), "the second to stand by")
        first.send_signal(signal.SIGSTOP)
        paused = time.monotonic()
        devices.url = f"ws://127.0.0.1:{port}"
        wait_for(lambda: "listening" in run.log("second"), "the second to take over")
        print(f"taken over {time.monotonic() - paused:.1f} s after the pause")
        more(devices)
        first.send_signal(signal.SIGCONT)
        assert first.wait(60) == 1
        assert "the lock of the run is lost" in run.log("first").splitlines()[-1]
        more(devices)
        run.running["second"].terminate()
        assert run.wait("second") == 0, run.log("second")

    asyncio.run(live_through(devices, disturb))
    check_updates(run.folder / "run", plan, devices.acknowledged)


def test_who_stands_by_goes_on_at_once(run: Processes, database: str) -> None:
    plan, service, url = buffered_run(run.folder, database)
    devices = fleet(url)

    def disturb() -> None:
        serve(run, "first", plan, service)
        more(devices)
        serve(run, "second", plan, service, "--standby")
        wait_for(lambda: "standing by" in run.log("second"), "the second to stand by")
        run.kill("first")
        killed = time.monotonic()
        wait_for(lambda: "listening" in run.log("second"), "the second to take over")
        print(f"listening {time.monotonic() - killed:.2f} s after the kill")
        more(devices)
        print(f"{GOAL} updates {time.monotonic() - killed:.2f} s after the kill")
        third = serve(run, "third", plan, service, "--standby")
        wait_for(lambda: "standing by" in run.log("third"), "the third to stand by")
        third.terminate()
        assert third.wait(60) == 0
        run.running["second"].terminate()
        assert run.wait("second") == 0, run.log("second")

    asyncio.run(live_through(devices, disturb))
    check_updates(run.folder / "run", plan, devices.acknowledged)
    assert read_status(run.folder / "run").finished is None
