"""The coordinator's side of a transcript: says what the transcript says, and checks what the device
says."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import zlib
from collections.abc import Callable, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

from fleetlearn_protocol import Bundle
from fleetlearn_protocol.encodings import find_encoding
from fleetlearn_protocol.frames import CHUNK_BYTES, Chunk, pack_chunk, unpack_chunk
from fleetlearn_protocol.messages import decode_from_coordinator, decode_from_device, encode
from values import Mismatch, compare, fill, shown
from websockets.asyncio.server import ServerConnection
from websockets.exceptions import ConnectionClosed

if TYPE_CHECKING:
    from masks import Masks
    from signatures import Signer


def task_fields(bundle: Bundle, model: bytes) -> dict[str, Any]:
    """Return the fields of a task that a transcript may leave out."""
    return {
        "round": 1,
        "bundle": bundle.sha256,
        "vectors": [
            {
                "name": "model",
                "sha256": hashlib.sha256(model).hexdigest(),
                "size": len(model),
                "encoding": "float32",
            }
        ],
        "parts": dict.fromkeys(
            ["update", "buffers"] if bundle.manifest.buffers else ["update"], "float32"
        ),
        "hyper": {
            hyper.name: 0.01 if hyper.default is None else hyper.default
            for hyper in bundle.manifest.hyper
        },
        "epochs": 2,
        "batch_size": 8,
        "seed": 5,
        "deadline": 300,
    }


def question_fields(bundle: Bundle, model: bytes) -> dict[str, Any]:
    """Return the fields of a ``question`` that a transcript may leave out: those of an
    evaluation."""
    task = task_fields(bundle, model)
    return {"kind": "evaluation", **{key: task[key] for key in ("bundle", "vectors", "deadline")}}


def upload_size(report: dict[str, Any]) -> int:
    """Return how many bytes the report announces."""
    return sum(part["size"] for part in report["parts"])


def check_upload(report: dict[str, Any], upload: bytes) -> list[str]:
    """Return a line for each part of the upload whose checksum is not the one that the report
    announced."""
    lines, start = [], 0
    for part in report["parts"]:
        content = upload[start : start + part["size"]]
        lines += compare(
            part["crc32"], zlib.crc32(content), {}, f"the CRC-32 of the part {part['name']}"
        )
        start += part["size"]
    return lines


def check_norm(report: dict[str, Any], upload: bytes, most: float) -> None:
    """Raise Mismatch if the bytes of the part ``update`` mean a vector of a greater L2 norm."""
    start = 0
    for part in report["parts"]:
        content = upload[start : start + part["size"]]
        start += part["size"]
        if part["name"] == "update":
            vector = find_encoding(part["encoding"]).decode(content)
            norm = math.sqrt(math.fsum(float(value) ** 2 for value in vector))
            if norm > most:
                raise Mismatch(f"the update's norm is {norm}; expected at most {most}")


DEFAULTS: dict[str, dict[str, Any]] = {
    "welcome": {"coordinator": "transcripts", "heartbeat": 5, "chunk_bytes": CHUNK_BYTES},
    "cancel": {"code": "round-over"},
    "refused": {"text": "the transcript says so"},
}
"""Type of message -> the fields that a transcript may leave out, besides those of a task."""


WEB_PAGE = 3000
"""What a web page adds to a closing code that browsers do not let it use (PROTOCOL.md, section
8)."""


class Coordinator:
    """The side that the transcript's ``coordinator`` steps speak for.

    ``patience`` is how long the device may take for a step, in seconds. ``signer``: signs what the
    device is to do, if the device was given its key to trust. ``masks``: looks at masked updates,
    if the device is held to those.
    """

    def __init__(
        self,
        bundle: Bundle,
        patience: float,
        signer: Signer | None = None,
        masks: Masks | None = None,
    ) -> None:
        self.bundle, self.signer, self.masks = bundle, signer, masks
        contents = [bundle.read("manifest.json"), *map(bundle.read, bundle.manifest.files)]
        self.contents = {hashlib.sha256(content).hexdigest(): content for content in contents}
        self.patience = patience
        self.path = "/"
        """The path of the address that the device's process was given: another one for each
        process."""
        self._new: asyncio.Queue[ServerConnection] = asyncio.Queue()
        self._left: dict[ServerConnection, asyncio.Event] = {}
        self.begin()

    def begin(self) -> None:
        """Begin a transcript."""
        self.connection: ServerConnection | None = None
        self.bound: dict[str, Any] = {} if self.signer is None else self.signer.placeholders
        if self.masks is not None:
            self.bound |= self.masks.placeholders
        self.task: dict[str, Any] = {}
        self.check_in: dict[str, Any] = {}
        self.report: dict[str, Any] = {}
        self.upload = bytearray()
        self.fetch: dict[str, Any] = {}
        self.answers_fetches = True
        self._granted: dict[int, int] = {}
        self._transfers = count(100)  # the transcripts' own numbers are smaller

    async def connected(self, connection: ServerConnection) -> None:
        """Keep a connection that the device made, until a step asks for it and a later one ends
        it."""
        if connection.request is None or connection.request.path != self.path:
            return  # a process that was killed since had made it
        self._left[connection] = asyncio.Event()
        self._new.put_nowait(connection)
        await self._left[connection].wait()

    def leave(self) -> None:
        """Cut all connections."""
        while not self._new.empty():
            self._new.get_nowait()
        for connection in list(self._left):
            self._release(connection)

    def _release(self, connection: ServerConnection) -> None:
        """Cut a connection as a cable would: without a close handshake."""
        connection.transport.abort()
        self._left.pop(connection).set()
        self.connection = None

    async def expect_no_connection(self, seconds: float, running: Callable[[], bool]) -> None:
        """Raise Mismatch if the device connects within this many seconds. Returns at once if its
        process ends."""
        for _ in range(round(seconds / 0.05)):
            if not self._new.empty():
                raise Mismatch("the device connected again")
            if not running():
                return
            await asyncio.sleep(0.05)

    async def do(self, step: dict[str, Any], running: Callable[[], bool]) -> None:
        """Do a step. Raises Mismatch."""
        try:
            async with asyncio.timeout(self.patience):
                await self._do(step, running)
        except TimeoutError:
            raise Mismatch(f"the device did nothing for {self.patience:g} s") from None
        except ConnectionClosed as closed:
            code = closed.rcvd.code if closed.rcvd is not None else "none"
            raise Mismatch(f"the device closed the connection (code {code})") from None

    async def _do(self, step: dict[str, Any], running: Callable[[], bool]) -> None:
        match step:
            case {"checks in": fields}:
                check_in = {
                    "type": "check-in",
                    "protocol": 1,
                    "device": "$device",
                    "held": None,
                    **fields,
                }
                await self._connects(running)
                await self._expect(check_in)
                await self._say({"type": "welcome", **step.get("welcome", {})})
            case {"uploads": task}:
                transfer = next(self._transfers)
                await self._say({"type": "grant", "task": task, "transfer": transfer, "offset": 0})
                await self._chunks(transfer, name=step.get("as"))
                if "norm at most" in step:
                    check_norm(self.report, bytes(self.upload), step["norm at most"])
                if "masked by" in step:
                    self._check_masked(step["masked by"])
                await self._expect({"type": "uploaded", "task": task})
                await self._say({"type": "accepted", "task": task})
            case {"connects": _}:
                await self._connects(running)
            case {"coordinator": message}:
                await self._say(message, step.get("model", 0), step.get("signed"))
            case {"coordinator sends": frame}:
                await self._open().send(
                    frame if isinstance(frame, str) else bytes.fromhex(frame["hex"])
                )
            case {"fetches are answered": answers}:
                self.answers_fetches = answers
            case {"content": how}:
                await self._content(**how)
            case {"device": expected}:
                await self._expect(expected, step.get("may come first", ()), step.get("as"))
            case {"chunks": how}:
                await self._chunks(**how)
            case {"cut": _}:
                self._release(self._open())
            case {"closed": code}:
                await self._closed(code)
            case _:
                raise Mismatch("the transcript has a step that this program does not know")

    def _check_masked(self, factor: float) -> None:
        if self.masks is None:
            raise Mismatch("a masked update is to be looked at: run this with --masked")
        self.masks.check(self.task, self.check_in, self.report, bytes(self.upload), factor)

    def _open(self) -> ServerConnection:
        if self.connection is None:
            raise Mismatch("the transcript has no connection here")
        return self.connection

    async def _connects(self, running: Callable[[], bool]) -> None:
        while self._new.empty():
            if not running():
                raise Mismatch("the device's process has ended")
            await asyncio.sleep(0.02)
        self.connection = self._new.get_nowait()
        if self.connection.subprotocol is None:
            raise Mismatch("the device connected without the subprotocol")

    async def _say(
        self, message: dict[str, Any], model: int = 0, signed: str | None = None
    ) -> None:
        kind = message["type"]
        fields = self._task(kind, model) if kind in ("task", "question") else DEFAULTS.get(kind, {})
        filled = fill({**fields, **message}, self.bound)
        text = json.dumps(filled)
        decode_from_coordinator(text)  # what a transcript says must be in the protocol, too
        if kind == "task":
            self.task = filled
        if filled["type"] == "grant":
            self._granted.setdefault(filled["transfer"], filled["offset"])
        if (
            self.signer is not None
            and kind in ("task", "question", "trust")
            and signed != "not at all"
        ):
            text = self.signer.sign(text, self.check_in, signed)
        await self._open().send(text)

    def _task(self, kind: str, number: int) -> dict[str, Any]:
        """Return the fields of a task or a ``question``, with the bundle's model or, where
        ``number`` is not 0, with another one."""
        values = self.bundle.parameters()[: self.bundle.manifest.size].copy()
        values[0] += number
        model = values.tobytes()
        sha256 = hashlib.sha256(model).hexdigest()
        self.contents[sha256] = model
        self.bound["$model"] = sha256
        return (task_fields if kind == "task" else question_fields)(self.bundle, model)

    async def _hear(self) -> dict[str, Any] | Chunk:
        """The device's next message, which by itself is as the protocol says, or its next chunk."""
        frame = await self._open().recv()
        if isinstance(frame, bytes):
            return unpack_chunk(frame)
        # with its defaults filled in
        came: dict[str, Any] = json.loads(encode(decode_from_device(frame)))
        return came

    async def _expect(
        self, expected: Any, first: Sequence[str] = (), name: str | None = None
    ) -> None:
        """Wait for a message. Heartbeats, fetches that are answered, and the kinds in ``first`` may
        come before it."""
        expected = self.bound[expected] if isinstance(expected, str) else expected
        while True:
            came = await self._hear()
            kind = "chunk" if isinstance(came, Chunk) else came["type"]
            if kind == expected["type"]:
                lines = compare(expected, came, self.bound)
            else:
                lines = [f"a {kind} is not a {expected['type']}"]
            if isinstance(came, dict) and not lines:
                break
            if kind not in first and not await self._passes(came, expected):
                raise Mismatch(
                    "\n    ".join(
                        [f"expected: {shown(expected)}", f"came:     {said(came)}", *lines]
                    )
                )
        if kind == "check-in":
            self.check_in = came
        if kind == "report":
            self.report = came
        if kind == "fetch":
            self.fetch = came
        if name is not None:
            self.bound[name] = came

    async def _passes(self, came: dict[str, Any] | Chunk, expected: dict[str, Any]) -> bool:
        """Return whether the device may say this before what is expected; answer it, if it is a
        fetch."""
        if isinstance(came, dict) and came["type"] == "fetch" and self.answers_fetches:
            if came["sha256"] == fill(expected.get("sha256"), self.bound):
                return False
            self.fetch = came
            await self._content()
            return True
        return isinstance(came, dict) and came["type"] == "heartbeat"

    async def _content(
        self, size: int | None = None, chunk: int = CHUNK_BYTES, skip: int = 0, wrong: bool = False
    ) -> None:
        """Answer the last fetch: with ``size`` bytes only, without the first ``skip`` bytes, or
        with a wrong byte."""
        sha256, start = self.fetch["sha256"], self.fetch["offset"]
        if sha256 not in self.contents:
            raise Mismatch(
                f"the device asks for {sha256}, which is neither of the bundle nor the task's model"
            )
        content, transfer = self.contents[sha256], 1 + list(self.contents).index(sha256)
        if wrong:
            content = bytes([content[0] ^ 1]) + content[1:]
        head = {
            "type": "content",
            "transfer": transfer,
            "sha256": sha256,
            "size": len(content),
            "offset": start,
        }
        await self._say(head)
        end = len(content) if size is None else min(len(content), start + size)
        for offset in range(start + skip, end, chunk):
            await self._open().send(
                pack_chunk(transfer, offset, content[offset : min(offset + chunk, end)])
            )

    async def _chunks(
        self, transfer: int, size: int | None = None, name: str | None = None
    ) -> None:
        """Take chunks of a granted upload, in order: all that are left, or ``size`` bytes or a
        little more."""
        del self.upload[self._granted[transfer] :]
        end = whole = upload_size(self.report)
        if size is not None:
            end = min(whole, len(self.upload) + size)
        while len(self.upload) < end:
            came = await self._hear()
            if isinstance(came, Chunk):
                place = {"transfer": transfer, "offset": len(self.upload)}
                if lines := compare(place, came._asdict(), {}, "the chunk"):
                    raise Mismatch("\n    ".join(lines))
                self.upload += came.payload
            elif not await self._passes(came, {}):
                raise Mismatch(
                    f"expected: a chunk from byte {len(self.upload)} on\n    came:     {said(came)}"
                )
        if size is None:
            lines = check_upload(self.report, bytes(self.upload))
            if name is not None:
                lines += compare(name, self.upload.hex(), self.bound, "the upload")
            if lines:
                raise Mismatch("\n    ".join(lines))

    async def _closed(self, code: int | None) -> None:
        try:
            while True:
                await self._open().recv()
        except ConnectionClosed as closed:
            came = closed.rcvd.code if closed.rcvd is not None else None
            self._release(self._open())
            if code is not None and came not in (code, code + WEB_PAGE):
                raise Mismatch(f"the device closed with code {came}; expected {code}") from None


def said(came: dict[str, Any] | Chunk) -> str:
    """Return what came, for people."""
    return (
        f"a chunk of {len(came.payload)} bytes at {came.offset}"
        if isinstance(came, Chunk)
        else shown(came)
    )
