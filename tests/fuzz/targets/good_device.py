"""A device that does the right thing next: what scripts let actors do between the things that are
wrong."""

from __future__ import annotations

import json
import zlib
from contextlib import suppress

import msgspec
import numpy as np
from fleetlearn_protocol.encodings import find_encoding
from fleetlearn_protocol.errors import ProtocolError
from fleetlearn_protocol.exchanges import fields_of
from fleetlearn_protocol.formats.masked import words_to_bytes
from fleetlearn_protocol.frames import pack_chunk
from fleetlearn_protocol.messages import (
    Accepted,
    Cancel,
    CheckIn,
    Evaluation,
    FromCoordinator,
    FromDevice,
    Grant,
    Heartbeat,
    Held,
    Part,
    Question,
    Refused,
    Reply,
    Report,
    Task,
    TaskFinished,
    TaskWeighing,
    Uploaded,
    Waiting,
    decode_from_device,
    encode,
)
from fleetlearn_protocol.withheld import without_data


class GoodDevice:
    """What one device was told, and what it says next."""

    def __init__(self, name: str, elements: int, chunk: int = 16) -> None:
        """``chunk``: bytes of a chunk that it sends, or a block where that is more."""
        self.name, self._elements, self._chunk = name, elements, chunk
        self.lease: Task | Question | None = None
        self._content = b""
        self.report: Report | None = None
        self._reported = False
        self.checked_in = False
        self.transfer = 0
        self.offset = 0
        """Of the next byte to be sent."""
        self.factor: float | None = None
        """What staleness leaves of its update, where it must know that before it masks."""
        self.accepted: set[str] = set()
        self._scale = 1.0

    def hear(self, message: FromCoordinator) -> None:
        """The coordinator said this."""
        match message:
            case Task() | Question():
                self.lease, self.report, self._reported, self.transfer = message, None, False, 0
                self.factor = None
            case TaskWeighing():
                self.factor = message.factor
            case Grant():
                self.transfer, self.offset = message.transfer, message.offset
            case Accepted(task) | Cancel(task):
                if isinstance(message, Accepted):
                    self.accepted.add(task)
                self._forget(task)
            case Refused(task=str(task)):
                self._forget(task)
            case Waiting(task=str()):
                self._reported, self.transfer = False, 0

    def _forget(self, task: str) -> None:
        if self.lease is not None and self.lease.task == task:
            self.lease = self.report = None
            self.transfer = 0

    def disconnected(self) -> None:
        """Its connection is gone."""
        self.checked_in = self._reported = False
        self.transfer = 0

    def lie(self, text: bytes) -> str:
        """Return what it says next, with the fields of this JSON in place of its own. ``scale`` is
        of its update's elements."""
        try:
            lies = json.loads(text)
        except (ValueError, RecursionError):
            lies = {}
        if not isinstance(lies, dict):
            lies = {"type": lies}
        scale = lies.pop("scale", 1.0)
        self._scale = float(scale) if isinstance(scale, int | float) and abs(scale) < 1e300 else 1.0
        said = self.next()
        if isinstance(said, bytes):
            return text.decode("utf-8", "replace")
        said = json.dumps({**json.loads(said), **lies})
        with suppress(ProtocolError):
            message = decode_from_device(said)
            if isinstance(message, Report):
                self.report = message
        return said

    def next(self) -> str | bytes:
        """Return what it says next, to be sent at once."""
        if not self.checked_in:
            self.checked_in = True
            held = None if self.report is None else Held(self.report.task, self.report.round)
            known = {
                "exchanges": ("evaluation",),
                "algorithms": ("scaffold",),
                "encodings": ("float32", "int8", "topk", "masked"),
            }
            return encode(CheckIn(1, self.name, 5, held=held, **known))  # type: ignore[arg-type]
        return self._send() if self.transfer and self.report is not None else encode(self._say())

    def _say(self) -> FromDevice:
        if self.lease is None or self._reported:
            return Heartbeat(None if self.lease is None else self.lease.task, 1)
        if isinstance(self.lease, Question):
            return Reply(
                self.lease.task, "evaluation", fields_of(Evaluation(5, 2.5, {"accuracy": 3.0}))
            )
        asks = self.lease.secure is not None and self.lease.secure.least_factor is not None
        if asks and self.factor is None:
            return TaskFinished(self.lease.task)
        self._reported = True
        self.report = self.report or self._train(self.lease)
        return self.report

    def _train(self, task: Task) -> Report:
        parts, pieces = [], []
        with np.errstate(over="ignore"):
            vector = (self._scale * np.linspace(-1, 1, self._elements)).astype(np.float32)
        for name, encoding in task.parts.items():
            try:
                if encoding == "masked":
                    content = bytes(words_to_bytes(np.arange(self._elements + 1, dtype=np.uint32)))
                else:
                    content = bytes(find_encoding(encoding).encode(vector))
            except ProtocolError:  # not finite, or beyond what the encoding has
                content = b"\xff" * find_encoding(encoding).size(self._elements)
            pieces.append(content)
            parts.append(Part(name, encoding, len(content), zlib.crc32(content)))
        self._content = b"".join(pieces)
        report = Report(
            task.task, task.round, tuple(parts), 5, 3, 1.0, True, 0.5, evaluation=Evaluation(5, 2.5)
        )
        if task.secure is None:
            return report
        sealed = msgspec.structs.replace(report, sealed="5e" * 80, signature="a0" * 64)
        return without_data(sealed, task.epochs)

    def _send(self) -> str | bytes:
        assert self.report is not None
        begin = 0
        for part in self.report.parts:
            end = begin + part.size
            if begin <= self.offset < end:
                block = find_encoding(part.encoding).block_bytes
                most = max(1, self._chunk // block) * block
                payload = self._content[self.offset : min(self.offset + most, end)]
                chunk = pack_chunk(self.transfer, self.offset, payload)
                self.offset += len(payload)
                return chunk
            begin = end
        self.transfer = 0
        return encode(Uploaded(self.report.task))

    def told(self) -> dict[bytes, bytes]:
        """Return what placeholders stand for."""
        lease, report = self.lease, self.report
        model = lease.vectors[0].sha256 if lease is not None else "0" * 64
        part = report.parts[0] if report is not None else None
        return {
            b"$task": (lease.task if lease is not None else "none").encode(),
            b"$round": b"%d" % (lease.round if isinstance(lease, Task) else 1),
            b"$transfer": b"%d" % (self.transfer or 1),
            b"$offset": b"%d" % self.offset,
            b"$device": self.name.encode(),
            b"$model": model.encode(),
            b"$crc": b"%d" % (part.crc32 if part is not None else 0),
            b"$size": b"%d" % (part.size if part is not None else 4 * self._elements),
        }
