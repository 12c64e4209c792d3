"""Run a device in a process that kills itself with SIGKILL at a named point of a masked task, the
N-th time that it comes by. MISTAKE: one of those below is planted in it.

python crash_secure_device.py POINT N MISTAKE run --coordinator URL ...
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

from dying import Point, signal_at
from fleetlearn_device.__main__ import main
from fleetlearn_device.storage import device_key
from fleetlearn_device.storage.outbox import Outbox
from fleetlearn_device.storage.update_counts import UpdateCounts
from fleetlearn_device.training import masking, secure_update, trainer
from fleetlearn_protocol.frames import pack_chunk

POINTS = {
    "nowhere": None,
    "the device's key is made": Point(device_key, "_make", True),
    "the update is trained and not counted": Point(UpdateCounts, "add", False),
    "it is counted and not saved": Point(UpdateCounts, "add", True),
    "it is masked at once and not counted": Point(trainer, "masked_report", True),
    "it is saved and nothing is said": Point(Outbox, "save", True),
    "it is known what it counts": Point(secure_update, "masked_report", False),
    "it is masked and not saved": Point(masking, "mask_words", True),
    "the masked update is being saved": Point(Outbox, "_write_report", False),
    "its report is saved and the unmasked one is there": Point(Outbox, "_write_report", True),
    "the masked update is saved": Point(Outbox, "save_masked", True),
    "the masked update is being sent": Point(Outbox, "chunks", False),
    "it is accepted and not forgotten": Point(Outbox, "drop", False),
    "it is forgotten": Point(Outbox, "drop", True),
}


def _loses_the_update() -> None:
    """What is saved is not found at the next start, and nobody remembers that it was made."""
    Outbox.load = lambda self: None  # type: ignore[method-assign]
    Outbox.load_unmasked = lambda self: None  # type: ignore[method-assign]
    UpdateCounts.made = lambda self, task_id: False  # type: ignore[method-assign]


def _sends_from_memory() -> None:
    """The masked update is sent without being saved: the unmasked one stays, for the next start."""
    made: list[bytes] = []

    def save_masked(self: Outbox, report: object, content: bytes) -> None:
        made[:] = [bytes(content)]

    def chunks(self: Outbox, transfer: int, offset: int, size: int = 0) -> Iterator[bytes]:
        yield pack_chunk(transfer, offset, made[0][offset:])

    Outbox.save_masked, Outbox.chunks = save_masked, chunks  # type: ignore[method-assign,assignment]


MISTAKES: dict[str, Callable[[], None]] = {
    "none": lambda: None,
    "loses the update": _loses_the_update,
    "sends from memory": _sends_from_memory,
}

if __name__ == "__main__":
    MISTAKES[sys.argv[3]]()
    point = POINTS[sys.argv[1]]
    if point is not None:
        signal_at(point, int(sys.argv[2]))
    sys.exit(main(sys.argv[4:]))
