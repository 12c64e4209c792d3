"""Each file of a coordinator is cut short or has a byte changed while it does not run. The next
start names the file and says what to do, or finishes the run with the undisturbed run's model:
never another model in silence."""

from __future__ import annotations

import asyncio
import re
import shutil
import signal
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from faults import DAMAGES, damage
from fleetlearn_coordinator import read_model, read_status
from fleetlearn_coordinator.storage.identities import Identities
from fleetlearn_coordinator.storage.sqlite_ledger import DATABASE
from fleetlearn_device.driver.address import Enrolment
from fleetlearn_protocol.messages import Task
from peers import Peer, plan_text, write_test_bundle
from processes import Processes, free_port, processes, status_of
from random_kills import Devices

SIZE = 1000
DEVICES = ("a", "b", "c", "d", "e")
LATE = ("d", "e")
"""They report in the second round only when the coordinator has been started again."""
FILES = {
    "killed": (
        "coordinator.sqlite3",
        "coordinator.sqlite3-wal",
        "coordinator.sqlite3-shm",
        "models/v00000000.safetensors",
        "models/v00000001.safetensors",
        "sums/a",
        "sums/b",
        "uploads/slot-0000",
        "uploads/slot-0001",
        "uploads/slot-0002",
        "lock",
        "../identities/identities.sqlite3",
        "../identities/identities.sqlite3-wal",
    ),
    "stopped": ("coordinator.sqlite3", "../identities/identities.sqlite3"),
}
"""How the coordinator ended -> the files that it left, from its data directory."""
USUAL = "a byte in its middle"
"""The damage that the usual tests try."""


class Template(NamedTuple):
    """What a coordinator left that ended in its second round, when three of five devices had
    reported."""

    folder: Path
    acknowledged: list[str]


class LateDevices(Devices):
    released = False

    async def _report(self, peer: Peer, task: Task) -> None:
        if self.released or task.round == 1 or peer.name not in LATE:
            await super()._report(peer, task)


def prepare(folder: Path) -> tuple[Path, Devices]:
    bundle, plan = write_test_bundle(folder / "test.bundle", SIZE), folder / "plan.toml"
    text = plan_text(
        bundle,
        folder / "disk" / "run",
        round__goal=len(DEVICES),
        round__minimum=len(DEVICES),
        round__gather=60.0,
        round__grace=60.0,
        stop__rounds=2,
        server__optimizer="adam",
        server__lr=0.05,
    )
    plan.write_text(text)
    port = free_port()
    (folder / "service.toml").write_text(f'port = {port}\nidentities = "disk/identities"\n')
    token, enrolments = None, {}
    if not (folder / "disk" / "identities").exists():
        identities = Identities(folder / "disk" / "identities")
        token = identities.make_token(len(DEVICES), time.time() + 3600, [], time.time())
        identities.close()
    for name in DEVICES:
        (folder / name).mkdir(exist_ok=True)
        enrolments[name] = Enrolment(folder / name, name, token)
    return plan, LateDevices(f"ws://127.0.0.1:{port}", DEVICES, enrolments=enrolments, size=SIZE)


def three_reported(data: Path) -> bool:
    found = status_of(data)
    if found is None or found.version < 1:
        return False
    with closing(sqlite3.connect(data / DATABASE)) as ledger:
        (number,) = ledger.execute(
            "SELECT COUNT(*) FROM tasks WHERE state='accepted' AND round=2"
        ).fetchone()
    return bool(number == len(DEVICES) - len(LATE))


def serve(run: Processes, plan: Path, devices: Devices, number: int = 0) -> int:
    """Serve the plan to the devices until the coordinator ends, or gets this signal in its second
    round. Returns its exit status."""

    async def serve_them() -> int:
        process: Any = run.coordinator(plan, "-m", "few_spool_files", "serve", plan)
        async with asyncio.timeout(40), asyncio.TaskGroup() as group:
            for name in devices.names:
                group.create_task(devices.take_part(name))
            while process.poll() is None:
                await asyncio.sleep(0.02)
                if (
                    number
                    and three_reported(run.folder / "disk" / "run")
                    and len(devices.acknowledged) == 8
                ):
                    process.send_signal(number)
                    number_sent = await asyncio.to_thread(process.wait)
                    assert number_sent in (0, -number)
            devices.over = True
        return int(process.returncode)

    return asyncio.run(serve_them())


def make_template(folder: Path, warm: Path, number: int) -> Template:
    (folder / "disk").mkdir()
    plan, devices = prepare(folder)
    with processes(folder, warm) as run:
        assert serve(run, plan, devices, number) in (0, -signal.SIGKILL), run.log("coordinator")
    (folder / "coordinator.log").unlink()
    return Template(folder, devices.acknowledged)


@pytest.fixture(scope="session")
def templates(tmp_path_factory: pytest.TempPathFactory, warm: Path) -> dict[str, Template]:
    signals = {"killed": signal.SIGKILL, "stopped": signal.SIGTERM}
    return {
        how: make_template(tmp_path_factory.mktemp(how), warm, number)
        for how, number in signals.items()
    }


def finish(run: Processes, template: Template) -> bytes | str:
    """Start a copy of the template again. Returns the model of the finished run, or the error."""
    plan, devices = prepare(run.folder)
    assert isinstance(devices, LateDevices)
    devices.released = True
    if serve(run, plan, devices):
        return run.log("coordinator")
    data = run.folder / "disk" / "run"
    version, model = read_model(data)
    assert version == 2
    assert [row.summary["reports"] for row in read_status(data).rounds] == [len(DEVICES)] * 2
    with closing(sqlite3.connect(data / DATABASE)) as ledger:
        accepted = {
            task for (task,) in ledger.execute("SELECT task FROM tasks WHERE state='accepted'")
        }
    assert {*template.acknowledged, *devices.acknowledged} <= accepted, (
        "what was acknowledged counts"
    )
    return model.tobytes()


@pytest.fixture(scope="session")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory, templates: dict[str, Template], warm: Path
) -> bytes:
    found = []
    for template in templates.values():
        folder = tmp_path_factory.mktemp("undisturbed")
        shutil.copytree(template.folder, folder, dirs_exist_ok=True)
        with processes(folder, warm) as run:
            found.append(finish(run, template))
    assert found[0] == found[1]
    assert isinstance(found[0], bytes), found[0]
    return found[0]


CASES = [(ended, file, how) for ended, files in FILES.items() for file in files for how in DAMAGES]


@pytest.mark.parametrize(
    ("ended", "file", "how"),
    [case if case[2] == USUAL else pytest.param(*case, marks=pytest.mark.slow) for case in CASES],
)
def test_a_damaged_file(
    tmp_path: Path,
    warm: Path,
    templates: dict[str, Template],
    undisturbed: bytes,
    ended: str,
    file: str,
    how: str,
) -> None:
    shutil.copytree(templates[ended].folder, tmp_path, dirs_exist_ok=True)
    damage(tmp_path / "disk" / "run" / file, DAMAGES[how])
    with processes(tmp_path, warm) as run:
        found = finish(run, templates[ended])
    if isinstance(found, str):
        said = found.splitlines()[-1]
        print(said)
        assert "Traceback" not in found, found
        assert said.startswith("error: ")
        assert Path(file).name.removesuffix("-wal") in said or "sums" in said, said
        assert re.search("backup|remove", said), said
    else:
        assert found == undisturbed, "a wrong model in silence"
