"""unmasked.json and unmasked.bin in pending/: a finished update that is masked when the coordinator
has said what it counts. It is in no report.json, so that no version of this software sends it as it
is."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import numpy as np
from fleetlearn_protocol.encodings import FLOAT32
from fleetlearn_protocol.frames import Buffer
from fleetlearn_protocol.messages import UPDATE, Report, Task
from fleetlearn_protocol.vector import Vector, checksum

from fleetlearn_device.storage.checked_json import read_checked_json

FILE, BYTES = "unmasked.json", "unmasked.bin"

log = logging.getLogger("fleetlearn.device")


class UnmaskedUpdate(msgspec.Struct, frozen=True):
    """The contents of unmasked.json."""

    task: Task
    """As it was given: what is signed, and how the update is masked."""
    share: float
    """The update's weight as a share of the largest one."""
    report: Report
    """What will be reported, but for the parts, the sealed seed and the signature. Its one part
    describes unmasked.bin: float32, clipped."""


def report_of_unmasked(report: Report, content: Buffer) -> Report:
    """Return the report for ``UnmaskedUpdate``. content: the bytes of the clipped update."""
    return msgspec.structs.replace(report, parts=(FLOAT32.part(UPDATE, content),))


def read_unmasked(pending: Path) -> UnmaskedUpdate | None:
    """Return what is known of the unmasked update in the folder pending/; None where there is none,
    or the file is damaged."""
    path = pending / FILE
    try:
        return read_checked_json(path.read_bytes(), UnmaskedUpdate)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        log.warning("%s is damaged and is ignored: %s", path, error)
        return None


def read_update(pending: Path, report: Report) -> Vector | None:
    """Return the unmasked update that a report describes, float32, shape (P,); None where it is
    damaged."""
    try:
        content = (pending / BYTES).read_bytes()
    except FileNotFoundError:
        return None
    part = report.part(UPDATE)
    if len(content) != part.size or checksum(content) != part.crc32:
        return None
    return np.frombuffer(content, "<f4")
