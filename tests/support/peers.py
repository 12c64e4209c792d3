"""For tests: a coordinator in the test's own event loop, and a device that speaks the protocol by
hand."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from fleetlearn_coordinator import Plan, ServiceSettings
from fleetlearn_coordinator.service.serve import running
from fleetlearn_coordinator.service.server import RunServer
from fleetlearn_protocol import open_bundle, write_bundle
from fleetlearn_protocol.encodings import FLOAT32
from fleetlearn_protocol.frames import Chunk, pack_chunk, pack_chunks, unpack_chunk
from fleetlearn_protocol.manifest import (
    EVAL,
    FORMAT,
    FORMAT_VERSION,
    INFER,
    PARAMETERS,
    TRAIN,
    Hyper,
    Input,
    LocalStep,
    Manifest,
    Parameter,
)
from fleetlearn_protocol.messages import (
    OLDEST_PROTOCOL_VERSION,
    PROTOCOL_NAME,
    PROTOCOL_VERSION,
    Accepted,
    CheckIn,
    Content,
    Evaluation,
    Fetch,
    FromCoordinator,
    FromDevice,
    Grant,
    Held,
    Part,
    Report,
    Task,
    Uploaded,
    Welcome,
    decode_from_coordinator,
    encode,
)
from fleetlearn_protocol.vector import Vector
from safetensors.numpy import save
from websockets.asyncio.client import ClientConnection, connect
from websockets.typing import Subprotocol

SIZE = 70_000
"""Elements of the model: 280,000 bytes, two full chunks and a part of one."""
PERSONAL = 1000
BUFFERED_ELEMENTS = 1000
"""Elements of the model that are personal in ``write_personal_bundle``."""


def write_test_bundle(folder: Path, size: int = SIZE) -> Path:
    """A bundle as the coordinator sees one: it runs no graph, so the graphs are bytes like any
    others."""
    vector = np.linspace(-1, 1, size, dtype=np.float32)
    contents = {
        TRAIN: b"train" * 50_000,
        EVAL: b"eval",
        INFER: b"head" + vector.tobytes() + b"tail",
        PARAMETERS: save({"w": vector}),
    }
    manifest = Manifest(
        format=FORMAT,
        version=FORMAT_VERSION,
        name="test",
        parameters=(Parameter("w", (size,), 0, infer_offset=4),),
        batch=(Input("x", "float32", (4,)), Input("y", "int64", ())),
        outputs=(Input("output", "float32", (3,)),),
        hyper=(Hyper("lr", 0.1), Hyper("mu", 0.0)),
        step=LocalStep("sgd", proximal=True),
        references=("anchor",),
        metrics=("accuracy",),
        files={},
    )
    return write_bundle(folder, manifest, contents)


def write_personal_bundle(folder: Path) -> Path:
    """The same with its last PERSONAL elements personal, and a step with a correction."""
    bundle = open_bundle(write_test_bundle(folder))
    vector, begin = bundle.parameters(), SIZE - PERSONAL
    rows = (
        Parameter("w", (begin,), 0, infer_offset=4),
        Parameter("head", (PERSONAL,), begin, personal=True, infer_offset=4 + 4 * begin),
    )
    step = LocalStep(correction=True)
    manifest = msgspec.structs.replace(
        bundle.manifest, parameters=rows, step=step, references=("correction",)
    )
    contents = {file: bundle.read(file) for file in bundle.manifest.files}
    contents[PARAMETERS] = save({"w": vector[:begin], "head": vector[begin:]})
    return write_bundle(folder, manifest, contents)


def write_buffered_bundle(folder: Path) -> Path:
    """The same with its last BUFFERED_ELEMENTS elements a buffer."""
    bundle = open_bundle(write_test_bundle(folder))
    vector, begin = bundle.parameters(), SIZE - BUFFERED_ELEMENTS
    rows = (
        Parameter("w", (begin,), 0, infer_offset=4),
        Parameter("seen", (BUFFERED_ELEMENTS,), begin, buffer=True, infer_offset=4 + 4 * begin),
    )
    manifest = msgspec.structs.replace(bundle.manifest, parameters=rows)
    contents = {file: bundle.read(file) for file in bundle.manifest.files}
    contents[PARAMETERS] = save({"w": vector[:begin], "seen": vector[begin:]})
    return write_bundle(folder, manifest, contents)


PlanMaker = Callable[..., Plan]


def plan_text(bundle: Path, data_dir: Path | str, recipe: str = "fedavg", **settings: Any) -> str:
    """A plan as TOML: ``round__goal=3`` for key goal of table round, and so on. None: the key is
    left out."""
    lines = [
        'name = "test"',
        f'recipe = "{recipe}"',
        f'bundle = "{bundle}"',
        f'data_dir = "{data_dir}"',
    ]
    tables: dict[str, dict[str, Any]] = {
        "round": {
            "goal": 2,
            "over_selection": 1,
            "minimum": 1,
            "deadline": 30.0,
            "grace": 5.0,
            "gather": 0.05,
        },
        "stop": {"rounds": 1000},
    }
    for key, value in settings.items():
        table, name = key.split("__")
        tables.setdefault(table, {})[name] = value
    for table, values in tables.items():
        lines.append(f"[{table}]")
        lines += [f"{name} = {_toml(value)}" for name, value in values.items() if value is not None]
    return "\n".join(lines)


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key} = {_toml(each)}' for key, each in value.items())}}}"
    return json.dumps(value)


BUFFERED: dict[str, Any] = {
    "recipe": "fedbuff",
    "round__goal": 2,
    "round__concurrency": 3,
    "round__minimum": None,
    "round__over_selection": None,
    "round__gather": None,
}
"""Settings of ``plan_text`` for asynchronous rounds."""


class Peer:
    """A device that does what it is told to, in the order that the test wants."""

    def __init__(self, name: str, connection: ClientConnection) -> None:
        self.name, self.connection = name, connection
        self.chunks: list[Chunk] = []

    async def send(self, message: FromDevice | str | bytes) -> None:
        await self.connection.send(message if isinstance(message, str | bytes) else encode(message))

    async def receive(self) -> FromCoordinator:
        """The next control message; chunks before it are kept in ``chunks``."""
        async with asyncio.timeout(10):
            while isinstance(message := await self.connection.recv(), bytes):
                self.chunks.append(unpack_chunk(message))
        return decode_from_coordinator(message)

    async def expect(self, kind: type[Any]) -> Any:
        message = await self.receive()
        assert isinstance(message, kind), f"{message} came; {kind.__name__} was expected"
        return message

    async def closed(self) -> int | None:
        """Wait for the end of the connection; its closing code."""
        async with asyncio.timeout(10):
            await self.connection.wait_closed()
        return self.connection.close_code

    async def check_in(self, held: Held | None = None, **stated: Any) -> None:
        stated = {"newest_protocol": PROTOCOL_VERSION} | stated
        await self.send(CheckIn(OLDEST_PROTOCOL_VERSION, self.name, 10, held=held, **stated))
        await self.expect(Welcome)

    async def task(self) -> Task:
        return await self.expect(Task)  # type: ignore[no-any-return]

    async def fetch(self, sha256: str, offset: int = 0) -> bytes:
        await self.send(Fetch(sha256, offset))
        content: Content = await self.expect(Content)
        received = bytearray()
        async with asyncio.timeout(10):
            while offset + len(received) < content.size:
                chunk = unpack_chunk(await self.connection.recv(decode=False))
                assert (chunk.transfer, chunk.offset) == (content.transfer, offset + len(received))
                received += chunk.payload
        return bytes(received)

    async def upload(
        self, task: Task, update: Vector, /, buffers: Vector | None = None, **fields: Any
    ) -> Any:
        """Report, be granted, send everything; returns the coordinator's answer. ``buffers``: their
        values, where the model has any."""
        if buffers is not None:
            rows = {"update": update, "buffers": buffers}
            fields["parts"] = tuple(FLOAT32.part(name, row.tobytes()) for name, row in rows.items())
        await self.send(report_of(task, update, **fields))
        grant: Grant = await self.expect(Grant)
        if buffers is not None:  # no chunk holds bytes of two parts
            await self.send(pack_chunk(grant.transfer, 0, update.tobytes()))
            await self.send(pack_chunk(grant.transfer, update.nbytes, buffers.tobytes()))
            await self.send(Uploaded(grant.task))
        else:
            await self.send_update(grant, update)
        return await self.receive()

    async def send_update(self, grant: Grant, update: Vector) -> None:
        for chunk in pack_chunks(grant.transfer, update.tobytes(), grant.offset):
            await self.send(chunk)
        await self.send(Uploaded(grant.task))

    async def do_round(self, update: Vector, **fields: Any) -> Task:
        task = await self.task()
        assert isinstance(await self.upload(task, update, **fields), Accepted)
        return task


def report_of(task: Task, update: Vector, /, **fields: Any) -> Report:
    """A report of the update; ``fields`` are what is to be otherwise, of its part or of the
    report."""
    otherwise = {name: fields.pop(name) for name in Part.__struct_fields__ if name in fields}
    part = msgspec.structs.replace(FLOAT32.part("update", update.tobytes()), **otherwise)
    values: dict[str, Any] = {
        "task": task.task,
        "round": task.round,
        "parts": (part,),
        "examples": 10,
        "steps": 5,
        "epochs": 1.0,
        "complete": True,
        "loss": 0.5,
        "evaluation": Evaluation(10, 7.0, {"accuracy": 5.0}),
    }
    return Report(**(values | fields))


Connect = Callable[..., Awaitable[Peer]]


def serving(plan: Plan, **service: Any) -> AbstractAsyncContextManager[RunServer]:
    """A running coordinator on any free port; ``service``: further settings of its process."""
    return running(plan, ServiceSettings.read({"port": 0, **service}))


@asynccontextmanager
async def fleet(plan: Plan, **service: Any) -> Any:
    """The same, and a function that connects a device to it (``check_in=False``: no further)."""
    async with serving(plan, **service) as coordinator:
        connections: list[ClientConnection] = []

        async def join(name: str, *, check_in: bool = True, held: Held | None = None) -> Peer:
            connection = await connect(
                coordinator.host.address,
                subprotocols=[Subprotocol(PROTOCOL_NAME)],
                compression=None,
                max_size=None,
            )
            connections.append(connection)
            peer = Peer(name, connection)
            if check_in:
                await peer.check_in(held)
            return peer

        try:
            yield coordinator, join
        finally:
            for connection in connections:
                connection.transport.abort()


def update_of(value: float, size: int = SIZE) -> Vector:
    return np.full(size, value, np.float32)
