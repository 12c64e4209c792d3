"""Each write of a coordinator finds the disk full, read-only or broken: it says so in one line and
ends, or goes on. The next start finishes the run with the undisturbed run's model, and what was
acknowledged counts."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import pytest
from faults import KINDS, Fault, counted
from fleetlearn_coordinator import read_model, read_status
from fleetlearn_coordinator.storage.identities import Identities
from fleetlearn_coordinator.storage.sqlite_ledger import DATABASE
from fleetlearn_device.driver.address import Enrolment
from peers import plan_text, write_test_bundle
from processes import Processes, free_port, processes
from random_kills import Devices

SIZE = 1000
"""Elements of the model."""
DEVICES = ("a", "b", "c")
ROUNDS = 2
SAMPLE = 4
"""Calls of each kind that fail in the usual tests, one after the other; the slow tests let each one
fail."""


class Undisturbed(NamedTuple):
    model: bytes
    calls: dict[str, list[tuple[str, Path]]]
    """Kind of fault -> the calls that it can happen to."""


def prepare(folder: Path) -> tuple[Path, dict[str, Enrolment]]:
    """Write a plan of ROUNDS rounds, durable even where power fails, and enrol its devices. What
    the coordinator writes is in the folder's disk/."""
    (folder / "disk").mkdir(parents=True)
    bundle, plan = write_test_bundle(folder / "test.bundle", SIZE), folder / "plan.toml"
    text = plan_text(
        bundle,
        folder / "disk" / "run",
        round__goal=len(DEVICES),
        round__minimum=len(DEVICES),
        round__gather=60.0,
        round__grace=60.0,
        stop__rounds=ROUNDS,
        server__optimizer="adam",
        server__lr=0.05,
    )
    plan.write_text(f'durable = "power"\n{text}')
    (folder / "service.toml").write_text(f'port = {free_port()}\nidentities = "disk/identities"\n')
    identities = Identities(folder / "disk" / "identities")
    token = identities.make_token(len(DEVICES), time.time() + 3600, [], time.time())
    identities.close()
    enrolments = {}
    for name in DEVICES:
        (folder / name).mkdir()
        enrolments[name] = Enrolment(folder / name, name, token)
    return plan, enrolments


def serve(
    run: Processes, plan: Path, devices: Devices, fault: Fault | None, *, in_thread: bool = False
) -> int:
    """Serve the plan to the devices until the coordinator ends. Returns its exit status."""
    env = ({} if fault is None else fault.env()) | ({"IN_THREAD": "yes"} if in_thread else {})

    async def serve_them() -> int:
        process = run.coordinator(plan, "-m", "few_spool_files", "serve", plan, env=env)
        devices.over = False
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            for name in devices.names:
                group.create_task(devices.take_part(name))
            status = await asyncio.to_thread(process.wait)
            devices.over = True
        return int(status)

    return asyncio.run(serve_them())


def train(run: Processes, fault: Fault | None, *, in_thread: bool = False) -> tuple[bytes, str]:
    """Serve the plan with a fault, and again without one if that ended it. Returns the model, and
    what was logged."""
    plan, enrolments = prepare(run.folder)
    port = int((run.folder / "service.toml").read_text().split()[2])
    devices = Devices(f"ws://127.0.0.1:{port}", DEVICES, enrolments=enrolments, size=SIZE)
    status = serve(run, plan, devices, fault, in_thread=in_thread)
    said = run.log("coordinator")
    if status:
        assert status == 1, said
        assert "Traceback" not in said, said
        assert said.splitlines()[-1].startswith("error: "), said
        assert serve(run, plan, devices, None) == 0, run.log("coordinator")
    data = run.folder / "disk" / "run"
    version, model = read_model(data)
    assert version == ROUNDS
    assert [row.summary["reports"] for row in read_status(data).rounds] == [len(DEVICES)] * ROUNDS
    with closing(sqlite3.connect(data / DATABASE)) as ledger:
        accepted = {
            task for (task,) in ledger.execute("SELECT task FROM tasks WHERE state='accepted'")
        }
    assert {*devices.acknowledged} <= accepted, "what was acknowledged counts"
    assert len(accepted) == ROUNDS * len(DEVICES)
    identities = Identities(run.folder / "disk" / "identities")
    assert identities.broken_at() is None
    assert [known.device for known in identities.devices()] == [*DEVICES]
    identities.close()
    return model.tobytes(), said


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, warm: Path) -> Undisturbed:
    models, calls = set(), {}
    for kind in KINDS:
        folder = tmp_path_factory.mktemp(f"undisturbed-{kind}")
        with processes(folder, warm) as run:
            models.add(train(run, Fault(folder / "disk", kind, log=folder / "calls"))[0])
        calls[kind] = counted(folder / "calls")
    (model,) = models
    return Undisturbed(model, calls)


def check_fault(
    folder: Path, warm: Path, kind: str, nth: int, undisturbed: Undisturbed, *, in_thread: bool
) -> str:
    """Let the N-th call fail. Returns what the coordinator said."""
    with processes(folder, warm) as run:
        folder.mkdir()
        model, said = train(
            run, Fault(folder / "disk", kind, nth, folder / "calls"), in_thread=in_thread
        )
    assert model == undisturbed.model, said
    shutil.rmtree(folder)
    return said


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind == "full" else pytest.mark.slow) for kind in KINDS]
)
def test_some_calls_fail(tmp_path: Path, warm: Path, undisturbed: Undisturbed, kind: str) -> None:
    number = len(undisturbed.calls[kind])
    for nth in range(1, number + 1, number // SAMPLE):
        check_fault(tmp_path / str(nth), warm, kind, nth, undisturbed, in_thread=nth % 2 == 0)


@pytest.mark.slow
@pytest.mark.parametrize("in_thread", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_each_call_fails(
    tmp_path: Path, warm: Path, undisturbed: Undisturbed, kind: str, in_thread: bool
) -> None:
    failed = {}
    for nth in range(1, len(undisturbed.calls[kind]) + 1):
        try:
            check_fault(tmp_path / str(nth), warm, kind, nth, undisturbed, in_thread=in_thread)
        except Exception as error:
            failed[nth] = error
    assert not failed
