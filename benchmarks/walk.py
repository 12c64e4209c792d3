"""The way of an update through the coordinator, from its report to the device's next task.

A coordinator and one device run in this process; each round is one update's. In the last round
every call of a function of the coordinator is noted. Shown are the files that it is in, how often
the way changes from one sub-package to another, and how often it enters ``service/``. With
``--calls`` it prints each step of the way. No figure here depends on the machine.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import _measure as measure
import _websocket_device
import fleetlearn_coordinator
from _servers import ASYNCHRONOUS, PLAN, SYNCHRONOUS, write_placeholder_bundle
from fleetlearn_coordinator import Plan, ServiceSettings
from fleetlearn_coordinator.service.serve import running
from fleetlearn_protocol.frames import CHUNK_BYTES, pack_chunk
from fleetlearn_protocol.messages import (
    PROTOCOL_NAME,
    PROTOCOL_VERSION,
    Accepted,
    CheckIn,
    Grant,
    Task,
    Uploaded,
    Welcome,
    decode_from_coordinator,
    encode,
)
from websockets.asyncio.client import ClientConnection, connect
from websockets.typing import Subprotocol

PACKAGE = Path(str(fleetlearn_coordinator.__file__)).parent
SIZE = 70_000
"""Parameters of the model: an update of three chunks."""
ROUNDS = 3
"""Rounds before the one that is noted: what happens once is over then."""


class Step(NamedTuple):
    """A call of a function of the coordinator."""

    file: str
    """Below the package."""
    function: str

    @property
    def part(self) -> str:
        """The sub-package."""
        return self.file.partition("/")[0]


@contextmanager
def noted(steps: list[Step]) -> Iterator[None]:
    """Note each call of a function of the coordinator, in this thread."""
    root = f"{PACKAGE}/"

    def note(frame: FrameType, event: str, argument: Any) -> None:
        file = frame.f_code.co_filename
        # A generator or coroutine that goes on is called as well; a comprehension is no step.
        if event == "call" and file.startswith(root) and not frame.f_code.co_name.startswith("<"):
            steps.append(Step(file.removeprefix(root), frame.f_code.co_qualname))

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)


def figures(steps: Sequence[Step]) -> dict[str, int]:
    """Return what is counted of a way."""
    parts = [part for part, _ in groupby(step.part for step in steps)]
    return {
        "calls": len(steps),
        "functions": len({*steps}),
        "files": len({step.file for step in steps}),
        "changes of sub-package": max(0, len(parts) - 1),
        "entries of service/": parts.count("service"),
    }


async def expect(connection: ClientConnection, kind: type[Any]) -> Any:
    """Return the next message, which must be of this kind."""
    message = decode_from_coordinator(await connection.recv())
    if not isinstance(message, kind):
        raise RuntimeError(f"{message} came; {kind.__name__} was expected")
    return message


async def send_update(
    connection: ClientConnection, task: Task, update: _websocket_device.Update
) -> Task:
    """Report and upload, and return the next task."""
    await connection.send(encode(_websocket_device.report(task, update)))
    grant = await expect(connection, Grant)
    for place in range(0, len(update.content), CHUNK_BYTES):
        part = update.content[place : place + CHUNK_BYTES]
        await connection.send(pack_chunk(grant.transfer, place, part))
    await connection.send(encode(Uploaded(task.task)))
    await expect(connection, Accepted)
    following: Task = await expect(connection, Task)
    return following


async def walk(folder: Path, *, asynchronous: bool) -> list[Step]:
    """Return the way of one update."""
    write_placeholder_bundle(folder / "bundle", SIZE)
    rounds = SYNCHRONOUS.format(over_selection=1, deadline=600, late="discard")
    text = PLAN.format(
        bundle="bundle",
        local="",
        devices=1,
        minimum=1,
        rounds=ROUNDS + 2,
        deadline=600,
        durable="process",
        encoding="float32",
        participation=ASYNCHRONOUS.format(devices=1) if asynchronous else rounds,
    )
    update, steps = _websocket_device.make_update(SIZE), list[Step]()
    settings = ServiceSettings.read({"port": 0})
    async with (
        running(Plan.parse(text, folder), settings) as server,
        connect(
            server.host.address, subprotocols=[Subprotocol(PROTOCOL_NAME)], compression=None
        ) as connection,
    ):
        await connection.send(encode(CheckIn(PROTOCOL_VERSION, "device", 100)))
        await expect(connection, Welcome)
        task = await expect(connection, Task)
        for _ in range(ROUNDS):
            task = await send_update(connection, task, update)
        with noted(steps):
            await send_update(connection, task, update)
    return steps


def main() -> None:
    options = measure.parser(__doc__)
    options.add_argument("--calls", action="store_true", help="print each step of the way")
    chosen = options.parse_args()
    results = {}
    for name in ("synchronous", "asynchronous"):
        with measure.scratch() as folder:
            steps = asyncio.run(walk(folder, asynchronous=name == "asynchronous"))
        results[name] = figures(steps)
        if chosen.calls:
            for (part, file), calls in groupby(steps, lambda step: (step.part, step.file)):
                print(f"{part:14}{file:48}{' '.join(step.function for step in calls)}")
    rows = [["figure", *results]]
    rows += [[name, *(str(each[name]) for each in results.values())] for name in figures([])]
    print(measure.table(rows))
    measure.write_json(chosen.json, {"size": SIZE}, results)


if __name__ == "__main__":
    main()
