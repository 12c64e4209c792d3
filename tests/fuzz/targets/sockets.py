"""Target: peers before a listening coordinator, through real sockets to its host, with a real run
behind it.

Besides the steps of scripts.py: ``+`` connects and does the handshake with the device's credential,
``o`` opens a TCP connection alone, ``=GET / HTTP/1.1\\r\\n`` sends bytes (escaped),
``*8 1 2 255 0`` sends a frame (opcode, fin, size, byte, reserved bits), ``_`` closes one direction,
``-`` closes, ``x`` resets the connection. A first line ``%2`` chooses the plan (PLANS).
"""

from __future__ import annotations

import asyncio
import base64
import os
import shutil
import socket
import struct
import tempfile
import time
from contextlib import AsyncExitStack, ExitStack, suppress
from pathlib import Path
from typing import Any
from unittest import mock

from fleetlearn_coordinator import Plan, ServiceSettings
from fleetlearn_coordinator.network import connection as connections
from fleetlearn_coordinator.rounds.reliability import Reliability
from fleetlearn_coordinator.service.serve import running
from fleetlearn_coordinator.service.server import RunServer
from fleetlearn_protocol.frames import pack_chunk
from fleetlearn_protocol.messages import decode_from_coordinator
from peers import plan_text, write_test_bundle

from tests.fuzz.targets.decoders import scratch
from tests.fuzz.targets.good_device import GoodDevice
from tests.fuzz.targets.scripts import Step, binary, count, escaped, filled, integers, number, steps

ELEMENTS = 50
DEVICES = ("dev-0", "dev-1", "dev-2", "dev-0")
"""The device of each actor: two are the same."""
LINGER = 0.05
"""Seconds, in place of the real ones, so that an input is over soon."""
QUIET = 20.0
"""Seconds in which a coordinator must have forgotten connections that are gone."""
INPUTS_OF_A_SERVER = 500
PLANS: tuple[dict[str, Any], ...] = (
    {},
    {
        "recipe": "fedbuff",
        "round__over_selection": None,
        "round__gather": None,
        "round__concurrency": 3,
        "staleness__max": 1,
        "evaluation__every": 1,
        "evaluation__devices": 1,
        "server__optimizer": "adam",
    },
    {
        "recipe": "krum",
        "round__goal": 3,
        "round__minimum": 3,
        "round__over_selection": 1,
        "aggregation__hostile": 0.0,
        "aggregation__max_norm": 2.0,
        "evaluation__every": 1,
        "evaluation__devices": 2,
        "evaluation__minimum": 1,
    },
    {
        "recipe": "fedprox-adaptive",
        "selection__strategy": "oort",
        "round__late": "carry",
        "encoding__down": "delta",
    },
    {
        "recipe": "q-fedavg",
        "encoding__up": "topk-0.3-int8",
        "pace__connected": 3,
        "selection__strategy": "power-of-choice",
    },
    {
        "recipe": "fednova",
        "encoding__up": "int4",
        "encoding__down": "float16",
        "local__evaluate": True,
        "aggregation__max_norm": 1.0,
        "aggregation__norm_action": "refuse",
    },
)
"""Settings of ``plan_text``: an input is played against a run of one of them."""
FILES = 80
"""Files that one coordinator may have open: its databases, those of updates, and of a few
models."""


def secret_of(device: str) -> str:
    return base64.urlsafe_b64encode(device.encode() * 10).decode()[:43]


def handshake(device: str) -> bytes:
    """Return the request that opens a device's connection."""
    lines = [
        "GET / HTTP/1.1", "Host: 127.0.0.1", "Upgrade: websocket", "Connection: Upgrade",
        "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==", "Sec-WebSocket-Version: 13",
        "Sec-WebSocket-Protocol: fleetlearn.v1", f"Authorization: Bearer {secret_of(device)}",
    ]  # fmt: skip
    return "\r\n".join([*lines, "", ""]).encode()


def frame(opcode: int, payload: bytes, *, fin: bool = True, reserved: int = 0) -> bytes:
    """Return a client's frame, with a mask of zeros."""
    size = len(payload)
    length = bytes([128 | size]) if size < 126 else b"\xfe" + struct.pack(">H", size)
    return (
        bytes([(128 if fin else 0) | (reserved & 7) << 4 | opcode & 15])
        + length
        + bytes(4)
        + payload
    )


class Wire:
    """The peer's end of a connection."""

    def __init__(self, address: tuple[str, int], good: GoodDevice) -> None:
        self.good, self._address = good, address
        self.socket = socket.socket()
        self.socket.setblocking(False)
        with suppress(BlockingIOError):
            self.socket.connect(address)
        self._heard = b""
        self._in_frames = False

    def send(self, data: bytes) -> None:
        with suppress(OSError):
            self.socket.send(data)

    def hear(self) -> None:
        """Read what the coordinator said."""
        with suppress(OSError):
            while data := self.socket.recv(1 << 16):
                self._heard += data
        if not self._in_frames:
            head, end, rest = self._heard.partition(b"\r\n\r\n")
            if not end or b" 101 " not in head[:20]:
                return
            self._in_frames, self._heard = True, rest
        while (found := _server_frame(self._heard)) is not None:
            opcode, payload, self._heard = found
            if opcode == 1:
                # it says nothing that the protocol does not have
                self.good.hear(decode_from_coordinator(payload))

    def close(self, *, reset: bool = False) -> None:
        self.good.disconnected()
        with suppress(OSError):
            if reset:
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()


def _server_frame(data: bytes) -> tuple[int, bytes, bytes] | None:
    """Return the first frame (opcode, payload) and what follows; None while it is not complete."""
    if len(data) < 2:
        return None
    size, begin = data[1], 2
    if size > 125:
        begin = 4 if size == 126 else 10
        size = int.from_bytes(data[2:begin], "big")
    end = begin + size
    return (data[0] & 15, data[begin:end], data[end:]) if len(data) >= max(begin, end) else None


class Served:
    """A coordinator in this process, which serves many inputs."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings
        self._files_before = _open_files()
        self.loop = asyncio.new_event_loop()
        self._stack = AsyncExitStack()
        self.server: RunServer = self.loop.run_until_complete(self._begin())
        self.server.loop.set_exception_handler(lambda _, context: self.errors.append(context))
        self.errors: list[dict[str, Any]] = []
        self.inputs = 0
        host, _, port = self.server.host.address.removeprefix("ws://").rpartition(":")
        self.address = host, int(port)

    async def _begin(self) -> RunServer:
        folder = Path(tempfile.mkdtemp(dir=scratch()))
        self._stack.callback(shutil.rmtree, folder, ignore_errors=True)
        bundle = write_test_bundle(folder / "test.bundle", ELEMENTS)
        rounds = {
            "goal": 1,
            "over_selection": 3,
            "minimum": 1,
            "deadline": 600.0,
            "grace": 0.02,
            "gather": 0.0,
        }
        changes = {f"round__{key}": value for key, value in rounds.items()}
        text = plan_text(
            bundle, folder / "run", **{"stop__rounds": 10**6, **changes, **self._settings}
        )
        service = ServiceSettings.read(
            {"port": 0, "uploads": 2, "identities": str(folder / "identities")}, folder
        )
        server = await self._stack.enter_async_context(running(Plan.parse(text, folder), service))
        gate, bucket = server.host._gate, server.host._listener._short_lives
        assert gate is not None
        token = gate.identities.make_token(100, 4e9, (), 0.0)
        for device in {*DEVICES}:
            gate.identities.enrol(device, secret_of(device), token, 0.0)
        bucket.burst = bucket.tokens = 1e12  # all these connections are short
        return server

    def close(self) -> None:
        self.loop.run_until_complete(self._stack.aclose())
        self.loop.close()

    def play(self, data: bytes) -> None:
        self.inputs += 1
        with ExitStack() as patches:
            for name in ("LINGER", "CLOSE_TIMEOUT"):
                patches.enter_context(mock.patch.object(connections, name, LINGER))
            self.loop.run_until_complete(self._play(data))

    async def _play(self, data: bytes) -> None:
        run, selection = self.server.run, self.server.engine.selection
        selection.reliability = Reliability()  # the devices of other inputs are others
        selection.end_rest()
        good = [GoodDevice(device, ELEMENTS, 64) for device in DEVICES]
        before, saved = (
            (run.models.newest.digest, run.engine.version),
            mock.Mock(wraps=run.save_update),
        )
        wires: dict[int, Wire] = {}
        with mock.patch.object(run, "save_update", saved):
            try:
                for step in steps(data):
                    await self._do(step, wires, good)
            finally:
                for wire in wires.values():
                    wire.close()
                await self._become_quiet()
        if not saved.call_count:
            assert (run.models.newest.digest, run.engine.version) == before, (
                "the model changed without an update"
            )

    async def _do(self, step: Step, wires: dict[int, Wire], good: list[GoodDevice]) -> None:
        actor, sign = step.actor, step.sign
        if sign == "%":
            return
        if sign == "~":
            await asyncio.sleep(number(step.text, 0.02))
            return
        wire = wires.get(actor)
        if sign in "+o" or wire is None:
            if wire is not None:
                wire.close()
            wire = wires[actor] = Wire(self.address, good[actor])
            await self._turns()
            if sign == "o":
                return
            wire.send(handshake(DEVICES[actor]))
            await self._turns()
            wire.hear()
            if sign == "+":
                return
        match sign:
            case "-" | "x":
                wire.close(reset=sign == "x")
                del wires[actor]
            case "_":
                with suppress(OSError):
                    wire.socket.shutdown(socket.SHUT_WR)
            case "=":
                wire.send(escaped(step.text))
            case "*":
                opcode, fin, size, fill, reserved = integers(step.text, 5)
                wire.send(
                    frame(
                        opcode,
                        bytes([fill % 256]) * (abs(size) % 5000),
                        fin=bool(fin),
                        reserved=reserved,
                    )
                )
            case "#":
                wire.send(frame(2, binary(step.text)))
            case "^":
                transfer, offset, size, fill = integers(step.text, 4)
                device = wire.good
                payload = bytes([fill % 256]) * (1 + abs(size) % 300)
                place = (device.offset + offset) % 2**64
                wire.send(
                    frame(2, pack_chunk((device.transfer + transfer) % 2**32, place, payload))
                )
                device.offset = (device.offset + len(payload)) % 2**32
            case "!":
                wire.send(frame(1, wire.good.lie(step.text).encode("utf-8", "replace")[:60_000]))
            case ">":
                for _ in range(count(step.text, 15)):
                    said = wire.good.next()
                    wire.send(
                        frame(2, said) if isinstance(said, bytes) else frame(1, said.encode())
                    )
                    await self._turns()
                    wire.hear()
            case _:
                wire.send(frame(1, filled(step.text, wire.good.told())[:60_000]))
        await self._turns()
        for each in wires.values():
            each.hear()

    async def _turns(self) -> None:
        """Let the coordinator handle what has arrived."""
        for _ in range(5):
            await asyncio.sleep(0)

    async def _become_quiet(self) -> None:
        """Wait until nothing is left of the connections."""
        host, engine, begin = self.server.host, self.server.engine, time.monotonic()
        while host._listener.connections or engine.leases or host.shared.connections:
            await asyncio.sleep(0.002)
            since = time.monotonic() - begin
            # a peer that is over its budget is not read from: the sweep ends it
            if since > 4 * LINGER:
                for driver in list(host.connections):
                    driver.connection.transport.abort()
            assert since < QUIET, f"{len(host.connections)} connections, leases {engine.leases}"
        await self._turns()
        assert not self.errors, self.errors
        assert not self.server.done.done(), self.server.done
        assert not host.devices
        assert not host.uploads.places.held
        assert not host.downloads.places.held
        assert not list(host.downloads.places.waiting)
        assert not host.downloads._stalled
        assert not host.uploads._spoiled or len(host.uploads._spoiled) < 10
        tasks = [task for task in asyncio.all_tasks() if "_send_content" in repr(task.get_coro())]
        assert not tasks, tasks
        opened = _open_files() - self._files_before
        assert opened <= FILES * max(1, len(_served)), f"{opened} files and sockets were left open"


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0  # noqa: PTH208, PTH112


_served: dict[int, Served] = {}
"""Number of a plan -> its coordinator."""


def sockets(data: bytes) -> None:
    """Peers before a listening coordinator. In the end nothing is left of them."""
    kind = count(data[1:].split(b"\n")[0], 1000) % len(PLANS) if data[:1] == b"%" else 0
    if kind in _served and _served[kind].inputs >= INPUTS_OF_A_SERVER:
        _served.pop(kind).close()
    if kind not in _served:
        _served[kind] = Served(PLANS[kind])
    try:
        _served[kind].play(data)
    except BaseException:
        with suppress(Exception):
            _served.pop(kind).close()
        raise


def stop() -> None:
    """End all coordinators."""
    while _served:
        _served.popitem()[1].close()
