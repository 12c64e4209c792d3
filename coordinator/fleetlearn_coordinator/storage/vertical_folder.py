"""A vertical or a split run's data directory: what it is, which rows are common, and its newest
models: of a vertical run the top, of a split run bottom and top one after the other."""

from __future__ import annotations

import os
import re
from pathlib import Path
from secrets import token_hex

import msgspec
from fleetlearn_protocol.errors import Code
from fleetlearn_protocol.vertical.kept_part import KeptPart, PartKey, read_part, write_part

from fleetlearn_coordinator.storage.errors import StoreError
from fleetlearn_coordinator.storage.lock import LOCK, is_locked, lock
from fleetlearn_coordinator.storage.stored_json import decode

RUN, STATUS = "vertical.json", "status.json"
KEPT = 2
_NAME = re.compile(r"model-(\d{10})\.part")


class VerticalRecord(msgspec.Struct):
    """What is kept of a run, beside its tops."""

    run: str
    terms: str
    """SHA-256 of the run's terms: a plan with other terms is another run."""
    alignment: str | None = None
    rows: int = 0
    own: bytes = b""
    """A bit for each of the coordinator's own rows: which are common."""
    finished: bool = False


class VerticalStatus(msgspec.Struct, frozen=True):
    """How a vertical or a split run is."""

    run: str
    phase: str
    """waiting, aligning, training, finished or failed."""
    step: int
    """Steps that are done."""
    steps: int
    """How many the run has."""
    checkpoint: int
    """After how many steps the coordinator last kept the top."""
    rows: int
    """Rows that are common to all parties; 0: not known yet."""
    attempt: int
    """How often the parties have begun, or gone on, since the coordinator started."""
    parties: dict[str, bool]
    """Name -> whether the party is connected."""
    loss: float | None
    """Of the last step's rows."""
    metrics: dict[str, float]
    """The same."""
    why: str
    """Why the run failed, or a party stopped."""
    kind: str = "vertical"
    """vertical, splitfed or turns. Of the latter two, steps are rounds, or turns of all devices,
    and the loss is the mean over the last one's rows."""
    received: int = 0
    """Bytes of frames that parties have sent since the coordinator started."""
    sent: int = 0
    """Bytes of frames that were sent to parties."""
    served: bool = True
    """Whether a coordinator serves the run now."""


class VerticalFolder:
    """The folder, locked for this process. Raises StoreError where it is in use or damaged."""

    def __init__(self, folder: Path, terms: str) -> None:
        """``terms``: SHA-256 of the run's terms."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._lock = lock(folder / LOCK)
        try:
            path = folder / RUN
            if path.exists():
                self.record = decode(path.read_bytes(), VerticalRecord, str(path))
            else:
                self.record = VerticalRecord(token_hex(8), terms)
                self.save_record()
            if self.record.terms != terms:
                raise StoreError(
                    Code.BAD_MESSAGE,
                    f"{folder} has a run with other terms (bundle, parties, steps, batch_size, "
                    "seed, checkpoint_every, hyper or encoding): put them back, or begin a run of "
                    "its own with another data_dir",
                )
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Unlock the folder."""
        os.close(self._lock)

    def save_record(self) -> None:
        """Write the record durably."""
        _write(self._folder / RUN, msgspec.json.encode(self.record))

    def write_status(self, status: VerticalStatus) -> None:
        """Write what `status` shows. It need not survive a power cut."""
        path = self._folder / STATUS
        draft = path.with_suffix(".draft")
        draft.write_bytes(msgspec.json.encode(status))
        draft.replace(path)

    def checkpoints(self, key: PartKey) -> tuple[int, ...]:
        """Return after how many steps a whole top of this key is kept, in rising order."""
        return tuple(step for step in _steps(self._folder) if self.load(key, step) is not None)

    def load(self, key: PartKey, step: int) -> KeptPart | None:
        """Return the top after this many steps, or None if it is not kept, or damaged."""
        return _load(self._folder, key, step)

    def keep(self, key: PartKey, part: KeptPart) -> None:
        """Write a top durably, and remove those that are not needed any more."""
        _write(_path(self._folder, part.step), write_part(key, part))
        # Files of later steps are of an attempt that was given up.
        before = [step for step in _steps(self._folder) if step <= part.step]
        for step in {*_steps(self._folder)} - {*before[-KEPT:]}:
            _path(self._folder, step).unlink(missing_ok=True)


def read_vertical_status(folder: Path) -> VerticalStatus:
    """Return what a run last said of itself. Raises StoreError where there is no run."""
    path = folder / STATUS
    if not path.exists():
        raise StoreError(Code.UNKNOWN_CONTENT, f"{folder} has no run yet: it was never served")
    found = decode(path.read_bytes(), VerticalStatus, str(path))
    served = is_locked(folder / LOCK)
    parties = {name: there and served for name, there in found.parties.items()}
    return msgspec.structs.replace(found, served=served, parties=parties)


def newest_model(folder: Path, bundle: str) -> KeptPart:
    """Return the newest whole model of a run, also while it is served. ``bundle``: SHA-256 of the
    top's manifest. Raises StoreError."""
    path = folder / RUN
    if path.exists():
        record = decode(path.read_bytes(), VerticalRecord, str(path))
        key = PartKey(record.run, bundle, record.alignment or "0" * 64)
        for step in reversed(_steps(folder)):
            part = _load(folder, key, step)
            if part is not None:
                return part
    raise StoreError(Code.UNKNOWN_CONTENT, f"{folder} keeps no trained model of that bundle yet")


def _load(folder: Path, key: PartKey, step: int) -> KeptPart | None:
    try:
        part = read_part(_path(folder, step).read_bytes(), key)
    except FileNotFoundError:
        return None
    return part if part is not None and part.step == step else None


def _steps(folder: Path) -> list[int]:
    names = (_NAME.fullmatch(path.name) for path in folder.iterdir())
    return sorted(int(name[1]) for name in names if name)


def _path(folder: Path, step: int) -> Path:
    return folder / f"model-{step:010d}.part"


def _write(path: Path, content: bytes) -> None:
    """Write a file beside its place, sync it, and rename it."""
    draft = path.with_name(f"{path.name}.tmp")
    with draft.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
