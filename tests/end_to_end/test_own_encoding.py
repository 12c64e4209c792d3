"""Own encodings between real processes: ours written as own ones make our models to the bit, also
where the coordinator or gateways are killed; a device that does not allow one sends float32."""

from __future__ import annotations

import asyncio
import random
import runpy
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fleetlearn_coordinator import Plan, read_model, read_status
from fleetlearn_protocol import extensions
from fleetlearn_protocol.encodings import FAMILIES, OWN_FAMILY, find_encoding
from fleetlearn_protocol.frames import pack_chunk
from fleetlearn_protocol.messages import FromCoordinator, Grant, Task, Uploaded
from gateway_processes import accepted_in, write_run
from own_formats import BLOCKS, OURS_AS_OWN
from peers import BUFFERED, Peer, plan_text, report_of, write_test_bundle
from processes import Processes, free_port, processes, service_file
from random_kills import Devices, by_hand, kill_at_random, update_for

CRASH = Path(__file__).with_name("crash_coordinator.py")
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(CRASH.parent))
    kill_some = runpy.run_path(str(CRASH.with_name("test_gateways.py")))["kill_some"]
DEVICES = 3
ROUNDS = 3
OWN: dict[str, dict[str, Any]] = {
    "int8": {"encoding__up": "own_formats_here:int8"},
    "topk-0.25": {
        "encoding__up": "own_formats_here:top_k",
        "encoding__parameters": {"percent": 25},
        "encoding__residual": True,
    },
}
"""Ours -> the same as an own encoding."""


def train(
    run: Processes,
    bundle: Path,
    shards: list[Path],
    encoding: dict[str, Any],
    crash: tuple[str, int] | None = None,
    allowed: int = DEVICES,
) -> bytes:
    """Three rounds of all devices, and the final model's bytes. ``crash``: where the coordinator
    dies before it is started again. ``allowed``: how many devices allow the encoding."""
    settings = {"local__lr": 0.1, "local__epochs": 1, "round__goal": DEVICES}
    settings |= {"round__minimum": DEVICES, "round__gather": 30.0, "round__grace": 30.0}
    plan, port = run.folder / "plan.toml", free_port()
    more = {"stop__rounds": ROUNDS, "server__optimizer": "adam", "server__lr": 0.05}
    plan.write_text(plan_text(bundle, run.folder / "run", **{**settings, **more, **encoding}))
    module, _, _ = encoding["encoding__up"].partition(":")
    service = service_file(plan, port)
    service.write_text(service.read_text() + f'[plugins]\nmodules = ["{module}"]\n')
    if module == "own_formats_here":
        (run.folder / f"{module}.py").write_text(OURS_AS_OWN)
    elif module == "thin_updates":
        (run.folder / f"{module}.py").write_text(BLOCKS[module])
    else:
        service.write_text(service.read_text().partition("[plugins]")[0])
    names = [f"device-{number}" for number in range(DEVICES)]
    for number, (name, shard) in enumerate(zip(names, shards, strict=False)):
        command = ["-m", "fleetlearn_device", "run", "--coordinator", f"ws://127.0.0.1:{port}"]
        command += ["--data", shard, "--state", run.folder / f"{name}.state", "--name", name]
        command += ["--until-finished"]
        if ":" in encoding["encoding__up"] and number < allowed:
            command += ["--allow-function", encoding["encoding__up"]]
        run.start(name, sys.executable, *command, cwd=run.folder)
    if crash is not None:
        process = run.coordinator(plan, CRASH, crash[0], str(crash[1]), plan)
        assert process.wait(60) == -9, f"it was to die at {crash}: {run.log('coordinator')}"
    assert run.coordinator(plan).wait(60) == 0, run.log("coordinator")
    version, model = read_model(run.folder / "run")
    assert version == ROUNDS
    rounds = read_status(run.folder / "run").rounds
    assert [row.summary["reports"] for row in rounds] == [DEVICES] * ROUNDS
    for name in names:
        assert run.wait(name) == 0, run.log(name)
    return model.tobytes()


@pytest.fixture(scope="session")
def ours(
    tmp_path_factory: pytest.TempPathFactory, warm: Path, bundle_path: Path, shards: list[Path]
) -> Callable[[str], bytes]:
    """Return a function of one of our encodings, which returns the undisturbed run's model."""

    @cache
    def model(name: str) -> bytes:
        with processes(tmp_path_factory.mktemp(name), warm) as run:
            return train(run, bundle_path, shards, {"encoding__up": name})

    return model


@pytest.mark.parametrize("name", ["topk-0.25", pytest.param("int8", marks=pytest.mark.slow)])
def test_ours_as_an_own_one_makes_our_model_to_the_bit(
    run: Processes, bundle_path: Path, shards: list[Path], ours: Callable[[str], bytes], name: str
) -> None:
    assert train(run, bundle_path, shards, OWN[name]) == ours(name)
    assert "does not know encoding.up" not in run.log("coordinator")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("point", "turn"),
    [
        ("a chunk is spooled", 4),
        ("an update is recorded but not acknowledged", 5),
        ("an update is acknowledged but not summed", 2),
        ("an update is half summed", 3),
        ("the new model is made but not written", 2),
    ],
)
@pytest.mark.parametrize("name", OWN)
def test_the_coordinator_killed_changes_nothing(
    run: Processes,
    bundle_path: Path,
    shards: list[Path],
    ours: Callable[[str], bytes],
    name: str,
    point: str,
    turn: int,
) -> None:
    """SIGKILL, and a new start, which reads the bytes on its disk: the same model, bit for bit."""
    assert train(run, bundle_path, shards, OWN[name], (point, turn)) == ours(name)


def test_a_device_that_does_not_allow_it_sends_float32(
    run: Processes, bundle_path: Path, shards: list[Path]
) -> None:
    encoding = {"encoding__up": "thin_updates:signs", "encoding__parameters": {"block": 256}}
    train(run, bundle_path, shards, {**encoding, "encoding__residual": True}, allowed=2)
    said = 'device device-2 does not know encoding.up = "thin_updates:signs" (its owner allows no'
    assert run.log("coordinator").count(said) == 1
    assert run.log("coordinator").count("does not know encoding.up") == 1
    rounds = read_status(run.folder / "run").rounds
    size = len(read_model(run.folder / "run")[1])
    for row in rounds:
        assert 4 * size < row.summary["bytes_up"] < 4.5 * size, "two of them took little"


class OwnDevices(Devices):
    """Devices that know an own encoding, and send what it writes."""

    def __init__(self, url: str, names: list[str], function: str) -> None:
        knows = {"encodings": (*FAMILIES, OWN_FAMILY), "functions": (function,)}
        super().__init__(url, names, stated=lambda name: knows)

    def _content(self, task: Task) -> tuple[Any, memoryview]:
        own = find_encoding(task.parts["update"])
        assert own.name.startswith("own-")
        return own, own.encode(update_for(task.task, self.size))

    async def _report(self, peer: Peer, task: Task) -> None:
        own, content = self._content(task)
        report = report_of(task, update_for(task.task, self.size))
        parts = (own.part("update", content),)
        await peer.send(msgspec.structs.replace(report, parts=parts))

    async def _go_on(self, peer: Peer, held: Task | None, message: FromCoordinator) -> Task | None:
        if not isinstance(message, Grant) or held is None:
            return await super()._go_on(peer, held, message)
        own, content = self._content(held)
        most = 4096 // own.block_bytes * own.block_bytes
        for offset in range(message.offset, len(content), most):
            await peer.send(pack_chunk(message.transfer, offset, content[offset : offset + most]))
        await peer.send(Uploaded(held.task))
        return held


@pytest.mark.slow
def test_gateways_and_the_engine_killed_change_nothing(run: Processes, tmp_path: Path) -> None:
    name = "thin_updates:signs"
    settings = {"encoding__up": name, "encoding__parameters": {"block": 512}}
    file, url = write_run(tmp_path, 12, 6, 300_000, **settings)  # gateways add up 1 MiB and more
    service = service_file(file)
    service.write_text(service.read_text() + '[plugins]\nmodules = ["thin_updates"]\n')
    (tmp_path / "thin_updates.py").write_text(BLOCKS["thin_updates"])
    with extensions.apart():
        extensions.allow(["thin_updates"], tmp_path)
        own = Plan.load(file).up
        devices = OwnDevices(url, [f"device-{number}" for number in range(6)], name)
        devices.size = 300_000
        killed = asyncio.run(kill_some(run, file, devices, random.Random(3), 2))
        version, model = read_model(tmp_path / "run")
        found = accepted_in(tmp_path / "run")
        print(f"killed: {killed}")
        assert version == 12
        assert {*devices.acknowledged} <= {task for task, _, _ in found}
        made = by_hand(
            Plan.load(file),
            found,
            version,
            meant=lambda update: own.decode(own.encode(update), update.size),
        )
    assert made.tobytes() == model.tobytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "settings"),
    [
        ("fedbuff", {**BUFFERED, "round__goal": 4, "round__concurrency": 8}),
        ("fedavg", {"round__goal": 4, "round__over_selection": 2, "round__late": "carry"}),
    ],
)
def test_stale_updates_count_over_kills(
    run: Processes, tmp_path: Path, recipe: str, settings: dict[str, Any]
) -> None:
    """Asynchronous rounds, and late updates that are carried, of a coordinator that is killed at
    random: each update counts as what its bytes mean."""
    name, port, file = "thin_updates:signs", free_port(), tmp_path / "plan.toml"
    bundle = write_test_bundle(tmp_path / "test.bundle")
    (tmp_path / "thin_updates.py").write_text(BLOCKS["thin_updates"])
    own = {"encoding__up": name, "encoding__parameters": {"block": 128}, "stop__rounds": 40}
    values = {key: value for key, value in settings.items() if key != "recipe"}
    file.write_text(plan_text(bundle, tmp_path / "run", recipe, **{**values, **own}))
    service = service_file(file, port)
    service.write_text(service.read_text() + '[plugins]\nmodules = ["thin_updates"]\n')
    with extensions.apart():
        extensions.allow(["thin_updates"], tmp_path)
        encoding = Plan.load(file).up
        devices = OwnDevices(f"ws://127.0.0.1:{port}", [f"device-{n}" for n in range(8)], name)
        killed = asyncio.run(kill_at_random(run, file, devices, random.Random(7), least=40))
        version, model = read_model(tmp_path / "run")
        found = accepted_in(tmp_path / "run")
        print(f"{killed} kills, {version} versions, {sum(row[2] > 0 for row in found)} stale")
        assert {*devices.acknowledged} <= {task for task, _, _ in found}
        made = by_hand(
            Plan.load(file),
            found,
            version,
            10,
            meant=lambda update: encoding.decode(encoding.encode(update), update.size),
        )
    assert made.tobytes() == model.tobytes()
    assert any(staleness for _, _, staleness in found)
