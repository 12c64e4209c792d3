"""A local socket by which any program on the board uses the device: JSON lines, both ways.

Each line is an object with ``do``, which says what is asked; each answer is one line, in the order
of the questions: ``{"ok": true, ...}``, or ``{"ok": false, "error": TEXT}``. An ``id`` comes back
with the answer. The socket is its owner's alone.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import stat
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
from fleetlearn_protocol.errors import in_words
from fleetlearn_protocol.user_errors import in_one_line
from numpy.typing import ArrayLike

from fleetlearn_device.data.buffer_source import open_layout
from fleetlearn_device.data.buffer_writer import BufferWriter
from fleetlearn_device.driver.timeouts import timeout
from fleetlearn_device.predictor import Predicted, Which
from fleetlearn_device.storage.errors import StateError
from fleetlearn_device.storage.status import read_status
from fleetlearn_device.training.source_data import SourceData

MAX_LINE = 2**20
"""Most bytes of a line, its end included."""
MAX_CLIENTS = 16
"""Programs that may be connected at a time."""
PATIENCE = 10.0
"""Seconds after which a program that does not read its answers is left."""

Verb = Callable[[dict[str, Any]], Awaitable[Mapping[str, Any]]]
"""The question without ``do`` and ``id`` -> what the answer says. Raises whatever the answer's
``error`` is to say."""

log = logging.getLogger("fleetlearn.device")


class AgentError(ValueError):
    """A question that cannot be answered. The text says what was given and what was expected."""


class Agent:
    """Answers questions at a UNIX socket.

    path: of the socket. verbs: what can be asked, by the name in ``do``.
    """

    def __init__(self, path: Path, verbs: Mapping[str, Verb]) -> None:
        self._path, self._verbs = path, verbs
        self._server: asyncio.Server | None = None
        self._clients: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen. Raises OSError: the path cannot be had, or another process listens there."""
        if sys.platform == "win32":  # pragma: no cover
            raise OSError("a UNIX socket was asked for; Windows' Python has none")
        _remove_stale(self._path)
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listening.bind(str(self._path))
            # Nobody can connect before it listens, so there is no moment without the permissions.
            self._path.chmod(stat.S_IRUSR | stat.S_IWUSR)
            self._server = await asyncio.start_unix_server(
                self._connected, sock=listening, limit=MAX_LINE
            )
        except BaseException:
            listening.close()
            raise
        log.info("programs on this machine can use the device at %s", self._path)

    async def close(self) -> None:
        """Stop listening, leave the programs, and remove the socket."""
        if self._server is None:
            return
        self._server.close()
        for client in self._clients:
            client.cancel()
        await asyncio.gather(*self._clients, return_exceptions=True)
        self._path.unlink(missing_ok=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._clients.add(task)
        try:
            if len(self._clients) > MAX_CLIENTS:
                await _say(writer, _refusal(f"{MAX_CLIENTS} programs are connected already"))
                return
            await self._converse(reader, writer)
        except (OSError, TimeoutError) as error:
            log.debug("a program at the socket is left: %s", error)
            writer.transport.abort()  # closing would wait for what it does not read
        except asyncio.CancelledError:
            pass  # the device stops; asyncio would write a traceback of a handler that is cancelled
        finally:
            self._clients.discard(task)
            writer.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            try:
                line = await reader.readline()
            except ValueError:  # where the next line begins is not known
                await _say(writer, _refusal(f"a line has more than {MAX_LINE} bytes"))
                return
            if not line.endswith(b"\n"):  # the program has gone
                return
            if line.strip():
                await _say(writer, await self.answer(line))

    async def answer(self, line: bytes) -> bytes:
        """Return the answer to a line."""
        asked: dict[str, Any] = {}
        try:
            asked = _read(line)
            number = asked.pop("id", None)
            name = asked.pop("do", None)
            if not isinstance(name, str) or name not in self._verbs:
                raise AgentError(f"do is {name!r}; expected one of {', '.join(self._verbs)}")
        except (AgentError, RecursionError) as error:
            return _refusal(str(error), asked.get("id"))
        try:
            said = await self._verbs[name](asked)
            return _line({"ok": True, **said}, number)
        except Exception as error:  # such as DataError, StateError, NoModelError
            return _refusal(in_one_line(error), number)


class UsedDevice(Protocol):
    """What programs use of a ``Device``."""

    @property
    def state_dir(self) -> Path: ...
    @property
    def data(self) -> object: ...
    @property
    def paused(self) -> bool: ...
    def predict(self, x: Mapping[str, ArrayLike], *, which: Which) -> Predicted: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def stop(self) -> None: ...


@asynccontextmanager
async def serve_programs(path: Path | None, device: UsedDevice) -> AsyncIterator[None]:
    """Let programs use the device at the socket while the block runs. ``path``: None: at none.
    Raises StateError where the socket cannot be had."""
    if path is None:
        yield
        return
    verbs = DeviceVerbs(device)
    agent = Agent(path, verbs.by_name())
    try:
        await agent.start()
    except OSError as error:
        raise StateError(f"the socket {path} cannot be had: {in_words(error)}") from None
    try:
        yield
    finally:
        await agent.close()
        verbs.close()


class DeviceVerbs:
    """What programs can ask of a device."""

    def __init__(self, device: UsedDevice) -> None:
        self._device = device
        self._writer: BufferWriter | None = None
        self._appending = threading.Lock()

    def by_name(self) -> dict[str, Verb]:
        """Return the questions by the name in ``do``."""
        device = self._device
        return {
            "status": self.status,
            "predict": self.predict,
            "append": self.append,
            "pause": partial(_act, device.pause),
            "resume": partial(_act, device.resume),
            "stop": partial(_act, device.stop),
        }

    def close(self) -> None:
        """Let another process append."""
        with self._appending:
            if self._writer is not None:
                self._writer.close()
                self._writer = None

    async def status(self, asked: Mapping[str, Any]) -> Mapping[str, Any]:
        """Answer with what ``fleetlearn-device status`` reads."""
        found = await asyncio.to_thread(read_status, self._device.state_dir)
        return {"paused": self._device.paused, "status": found}

    async def predict(self, asked: Mapping[str, Any]) -> Mapping[str, Any]:
        """Answer with the outputs by name, or of a model with one output alone."""
        arrays, which = arrays_of(asked.get("arrays")), asked.get("which", "personal")
        found = await asyncio.to_thread(partial(self._device.predict, arrays, which=which))
        return {"outputs": found}

    async def append(self, asked: Mapping[str, Any]) -> Mapping[str, Any]:
        """Append a record to the live buffer that is the device's data. Answer with its number."""
        arrays, at = arrays_of(asked.get("arrays")), asked.get("time")
        if at is not None and (isinstance(at, bool) or not isinstance(at, int | float)):
            raise AgentError(f"time is {at!r}; expected seconds since 1970")
        return {"number": await asyncio.to_thread(self._append, at, arrays)}

    def _append(self, at: float | None, arrays: Mapping[str, Any]) -> int:
        with self._appending:
            if self._writer is None:
                self._writer = _open_writer(self._device.data)
            return self._writer.append(time=at, **arrays)


async def _act(then: Callable[[], None], asked: Mapping[str, Any]) -> Mapping[str, Any]:
    then()
    return {}


def _open_writer(data: object) -> BufferWriter:
    """Return a writer of the live buffer that the data are. Raises AgentError where they are none,
    DataError where another process writes it."""
    if not isinstance(data, SourceData):
        raise AgentError("append needs a live buffer as the device's data, as --data buffer:PATH")
    path = Path(data.source.name)
    try:
        with path.open("rb", buffering=0) as file:
            layout = open_layout(file, path)
    except OSError as error:
        raise AgentError(
            f"{path} cannot be appended to ({in_words(error)}); expected a live buffer, which a "
            "BufferWriter makes"
        ) from None
    arrays = {row.name: (row.dtype, row.shape) for row in layout.arrays}
    return BufferWriter(path, arrays, layout.capacity, policy=layout.policy, durable=layout.durable)


def arrays_of(given: object) -> dict[str, Any]:
    """Return arrays by name, from lists of numbers by name. Raises AgentError."""
    if not isinstance(given, dict) or not given:
        raise AgentError(f"arrays is a {type(given).__name__}; expected lists of numbers by name")
    arrays = {}
    for name, value in given.items():
        try:
            array = np.asarray(value)
        except (ValueError, OverflowError):
            array = np.array([None])
        if array.dtype.kind not in "biuf":
            raise AgentError(f"array {name} is no list of numbers, or its rows differ in length")
        arrays[name] = array
    return arrays


def _read(line: bytes) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise AgentError(f"the line is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise AgentError(f"the line is a {type(found).__name__}; expected an object")
    return found


def _refusal(text: str, number: object = None) -> bytes:
    return _line({"ok": False, "error": text}, number)


def _line(content: Mapping[str, Any], number: object) -> bytes:
    said = content if number is None else {"id": number, **content}
    return msgspec.json.encode(said, enc_hook=_plain) + b"\n"


def _plain(value: Any) -> Any:
    """Return what JSON can say of an array: NaN and infinity become null."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} in an answer")


async def _say(writer: asyncio.StreamWriter, line: bytes) -> None:
    writer.write(line)
    async with timeout(PATIENCE):
        await writer.drain()


def _remove_stale(path: Path) -> None:
    """Remove the socket of a process that was killed. Raises OSError where another process listens,
    and where something else is in the way."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise FileExistsError(f"{path} is no socket, and is in the way of one")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        try:
            other.connect(os.fspath(path))
        except ConnectionRefusedError:
            path.unlink()
            return
    raise FileExistsError(f"another process listens at {path}")
