"""What a device keeps on disk, so that a process that dies loses no more than the training it was in.

::

    lock             held while a process uses the directory
    identity.json    the device's name, made once
    bundles/SHA/     training bundles by their manifest's SHA-256, the last KEEP used; only files that are needed
    models/SHA       the last task's vectors: the round's model
    partial/SHA      a content that is still arriving: a download goes on from its length
    training.json    the task that is being trained, and how often its training was begun: it is there while a
                     training runs, and so tells the next process that this one was killed by it, or during it
    pending/         a finished update: CRC.bin, the bytes of its report's parts (all their CRC-32, with - between), and
                     report.json, whose appearing makes it exist;
                     NAME.reserved is room on the disk that a training under way holds for them
    kept/SHA         what the device keeps of its own from task to task of a bundle (kept.py): raw float32, its CRC-32
                     behind it. Personal parameters are the user's: nothing deletes them, not even when the bundle goes

Everything is written aside and renamed into place. Contents are checked against their SHA-256 when they arrive and
again when a process first uses them, so they need no fsync; the pending update, what is kept and the identity are
synced.

An update and what its task changed of the device's own appear together: the latter is written to pending/ first,
report.json makes both exist, and only then, or when a process next opens the directory, is it moved to its place.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import shutil
import struct
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec
import numpy as np
from fleetlearn_protocol.errors import FleetError
from fleetlearn_protocol.frames import CHUNK_BYTES, Buffer, pack_chunk
from fleetlearn_protocol.manifest import (
    EVAL,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    ORT_TRAINING,
    PARAMETERS,
    STATE,
    TRAIN,
    Manifest,
    read_manifest,
)
from fleetlearn_protocol.messages import FailureCode, Identifier, Report, Task
from fleetlearn_protocol.stored_report import read_report
from fleetlearn_protocol.vector import Vector, checksum

from fleetlearn_device.session.commands import Wanted

if sys.platform == "win32":  # pragma: no cover
    import msvcrt
else:
    import fcntl

KEEP = 3
"""Bundles in the cache."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_KEPT = "kept-"
"""Begins the name of what is to be moved to kept/: kept-TASK.BUNDLE."""
_CRC = struct.Struct("<I")
_REPORT_BYTES = 64 * 2**10
"""Room for report.json: no control message is larger."""

log = logging.getLogger("fleetlearn.device")


class StateError(Exception):
    """The state directory cannot be used; the text says why and what to do. ``code`` is the protocol's word for it."""

    def __init__(self, text: str, code: FailureCode = "runtime-error") -> None:
        super().__init__(text)
        self.code: FailureCode = code


class Identity(msgspec.Struct, frozen=True):
    device: Identifier


class Starts(msgspec.Struct, frozen=True):
    """training.json."""

    task: Identifier
    starts: int


class Summary(NamedTuple):
    """What a state directory holds, for people."""

    device: str | None
    bundles: list[tuple[str, str]]
    """(SHA-256 of the manifest, the bundle's name), the last used first."""
    pending: Report | None
    kept: list[tuple[str, int]]
    """(SHA-256 of the manifest, bytes) of what the device keeps of its own; the bundle itself may be gone."""


def needed_files(manifest: Manifest, kind: str) -> list[str]:
    """The files of a bundle that a runtime of this kind (``onnx``, ``ort-training``, ``auto``) needs in a round.

    The bundle's own parameters are among them only where some are personal: the round's model has all others.
    """
    if kind == "ort-training":
        return [EVAL, *(f"ort_training/{file}" for file in ORT_TRAINING)]
    own = [PARAMETERS] if manifest.local_size > manifest.size else []
    return [TRAIN, EVAL, *own, *([STATE] if STATE in manifest.files else [])]


class State:
    """An open state directory, locked against other processes until ``close``.

    ``name`` becomes the device's name if it has none yet, and must be its name otherwise. Raises StateError.
    """

    def __init__(self, path: str | os.PathLike[str], name: str | None = None) -> None:
        self.path = Path(path).expanduser()
        self._intact: set[Path] = set()
        with _clear_errors(self.path):
            for folder in ("bundles", "models", "partial", "pending", "kept"):
                (self.path / folder).mkdir(parents=True, exist_ok=True)
            self._lock = _lock(self.path)
        try:
            with _clear_errors(self.path):
                self.device = _identity(self.path / "identity.json", name)
                self._settle()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._lock.close()

    def bundle(self, sha256: str) -> Path:
        return self.path / "bundles" / sha256

    def vector(self, sha256: str) -> Path:
        return self.path / "models" / sha256

    # Contents

    def lacking(self, task: Task, kind: str) -> list[Wanted]:
        """What the task needs and the directory has not, the manifest first: only it tells what else there is.

        Marks the bundle as used last and deletes what the bounds of the cache leave no room for. Raises BundleError
        on a manifest that this version cannot read or that has no such runtime, StateError.
        """
        with _clear_errors(self.path):
            folder = f"bundles/{task.bundle}"
            self._prune(task)
            wanted = [Wanted(task.bundle, MANIFEST, f"{folder}/{MANIFEST}", None, MAX_MANIFEST_BYTES)]
            if self._has(wanted[0]):
                manifest = read_manifest((self.path / wanted[0].place).read_bytes())
                for file in needed_files(manifest, kind):
                    entry = manifest.file(file)
                    wanted.append(Wanted(entry.sha256, file, f"{folder}/{file}", entry.size, entry.size))
            for vector in task.vectors:
                place = f"models/{vector.sha256}"
                wanted.append(Wanted(vector.sha256, f"the {vector.name}", place, vector.size, vector.size))
            return self._resume([content for content in wanted if not self._has(content)])

    def append(self, wanted: Wanted, offset: int, payload: Buffer) -> None:
        """Write the next bytes of a partial content; ``offset`` 0 begins it anew. Raises StateError."""
        path = self._partial(wanted)
        with _clear_errors(path), path.open("r+b" if offset else "wb") as file:
            file.seek(offset)
            file.write(payload)

    def finish(self, wanted: Wanted) -> bool:
        """Put a complete content in its place; False, and delete it, where its SHA-256 is wrong. Raises StateError."""
        source, target = self._partial(wanted), self.path / wanted.place
        with _clear_errors(target):
            if not source.exists() and wanted.size in (0, None):
                source.touch()  # a content without bytes comes in no chunk
            if _digest(source) != wanted.sha256:
                source.unlink()
                return False
            target.parent.mkdir(parents=True, exist_ok=True)
            source.replace(target)
            self._intact.add(target)
            return True

    def doubt_bundle(self, sha256: str) -> None:
        """Check a bundle's files again when they are needed next. Only what is damaged is fetched again: the others
        would come with the same bytes."""
        self._intact = {path for path in self._intact if self.bundle(sha256) not in path.parents}

    def forget_bundle(self, sha256: str) -> None:
        """Delete a bundle."""
        self.doubt_bundle(sha256)
        shutil.rmtree(self.bundle(sha256), ignore_errors=True)

    def _has(self, wanted: Wanted) -> bool:
        path = self.path / wanted.place
        if not path.exists():
            return False
        if path not in self._intact and _digest(path) != wanted.sha256:
            log.warning("%s is damaged and is fetched again", path)
            path.unlink()
            return False
        self._intact.add(path)
        return True

    def _resume(self, lacking: list[Wanted]) -> list[Wanted]:
        """The same with the bytes that are there already; partial contents that nobody wants are deleted."""
        have = {}
        for path in (self.path / "partial").iterdir():
            have[path.name] = path.stat().st_size
            if path.name not in {wanted.sha256 for wanted in lacking}:
                path.unlink()
        found = []
        for wanted in lacking:
            size = have.get(wanted.sha256, 0)
            found.append(replace(wanted, have=size) if size <= wanted.limit else wanted)
        return found

    def _prune(self, task: Task) -> None:
        folder = self.bundle(task.bundle)
        folder.mkdir(exist_ok=True)
        os.utime(folder)
        for old in _bundles_by_use(self.path)[KEEP:]:
            self.forget_bundle(old.name)
        for path in (self.path / "models").iterdir():
            if path.name not in {vector.sha256 for vector in task.vectors}:
                path.unlink()

    def _partial(self, wanted: Wanted) -> Path:
        return self.path / "partial" / wanted.sha256

    # Training

    def starts(self, task: str) -> int:
        """How often the training of this task was begun by processes that ended during it."""
        path = self.path / "training.json"
        with _clear_errors(path):
            try:
                begun = msgspec.json.decode(path.read_bytes(), type=Starts)
            except (FileNotFoundError, msgspec.DecodeError):
                return 0
            return begun.starts if begun.task == task else 0

    def begin_training(self, task: str) -> None:
        """Count a start of the task's training durably, until ``end_training``. Raises StateError."""
        path = self.path / "training.json"
        with _clear_errors(path):
            _write_durably(path, msgspec.json.encode(Starts(task, self.starts(task) + 1)))

    def end_training(self) -> None:
        """The training ended, in whatever way, and the process lives. Raises StateError."""
        path = self.path / "training.json"
        with _clear_errors(path):
            path.unlink(missing_ok=True)

    # The pending update

    def reserve(self, update: int, kept: int) -> None:
        """Hold room on the disk for an update of this many bytes and for this many that the device keeps of its own,
        so that a full disk shows before training and not after it. Raises StateError."""
        sizes = {"update": update, "kept": kept + _CRC.size if kept else 0, "report": _REPORT_BYTES}
        try:
            with _clear_errors(self.path / "pending"):
                for name, size in sizes.items():
                    _allocate(self._reserved(name), size)
        except StateError as error:
            self.release()
            raise StateError(f"there is no room for an update of {update + kept} bytes: {error}", error.code) from error

    def release(self) -> None:
        """Give back what ``reserve`` holds. Raises StateError."""
        with _clear_errors(self.path / "pending"):
            for path in (self.path / "pending").glob("*.reserved"):
                path.unlink()

    def _reserved(self, name: str) -> Path:
        return self.path / "pending" / f"{name}.reserved"

    def save_pending(self, report: Report, content: Buffer, bundle: str = "", kept: Vector | None = None) -> None:
        """Make an update durable, and with it what the device keeps for its next task of ``bundle``, where that is
        anything: after a crash all of both is there or nothing. ``content`` is the bytes of the report's parts, one
        after the other. Raises StateError.
        """
        folder = self.path / "pending"
        with _clear_errors(folder):
            _write_durably(self._update(report), content, into=self._reserved("update"))
            if kept is not None and kept.size:
                target = folder / f"{_KEPT}{report.task}.{bundle}"
                _write_durably(target, kept.data.cast("B"), _CRC.pack(checksum(kept)), into=self._reserved("kept"))
            _write_durably(folder / "report.json", msgspec.json.encode(report), into=self._reserved("report"))
            self._settle()

    def load_kept(self, bundle: str, size: int) -> Vector | None:
        """What the device keeps of its own from its last task of the bundle: float32, shape (size,).

        None before the first task, or where ``size`` is 0. A damaged file is put aside with a warning, and None.
        Raises StateError.
        """
        path = self.path / "kept" / bundle
        with _clear_errors(path):
            if not size or not path.exists():
                return None
            content = path.read_bytes()
            values = memoryview(content)[: 4 * size]
            if len(content) == 4 * size + _CRC.size and _CRC.unpack(content[4 * size :]) == (checksum(values),):
                return np.frombuffer(values, "<f4")
            aside = path.with_name(f"{bundle}.damaged")
            path.replace(aside)
            log.warning("%s is damaged; it is put aside as %s, and the bundle's own values take its place", path, aside)
            return None

    def load_pending(self) -> Report | None:
        """The report of the update that an earlier process left; None where there is none or it is damaged."""
        with _clear_errors(self.path):
            report = _read_report(self.path)
            if report is not None:
                if _intact(self._update(report), report):
                    return report
                log.warning("the saved update of task %s is damaged; it is dropped", report.task)
                self.drop_pending(report.task)
            return None

    def drop_pending(self, task: str) -> None:
        """Delete the update if it is this task's. Raises StateError."""
        with _clear_errors(self.path):
            report = _read_report(self.path)
            if report is not None and report.task == task:
                (self.path / "pending" / "report.json").unlink()
                self._settle()

    def update_chunks(self, transfer: int, offset: int, chunk_bytes: int = CHUNK_BYTES) -> Iterator[bytes]:
        """The pending update's bytes from ``offset`` on, as binary frames. Each holds bytes of one part alone. Raises
        StateError."""
        with _clear_errors(self.path):
            report = _read_report(self.path)
            if report is None:
                raise StateError(f"{self.path} holds no finished update")
            with self._update(report).open("rb") as file:
                file.seek(offset)
                for end in accumulate(part.size for part in report.parts):
                    while offset < end and (payload := file.read(min(chunk_bytes, end - offset))):
                        yield pack_chunk(transfer, offset, payload)
                        offset += len(payload)

    def _update(self, report: Report) -> Path:
        return self.path / "pending" / ("-".join(f"{part.crc32:08x}" for part in report.parts) + ".bin")

    def _settle(self) -> None:
        """Bring pending/ in order: what came with the report goes to its place; what belongs to no report goes.

        An update whose report was not written yet, or was deleted already, is such.
        """
        report = _read_report(self.path)
        for path in (self.path / "pending").iterdir():
            task, _, bundle = path.name.rpartition(".")
            if report is not None and task == f"{_KEPT}{report.task}":
                path.replace(self.path / "kept" / bundle)
                _sync(self.path / "kept")
            elif path.name != "report.json" and (report is None or path != self._update(report)):
                path.unlink()


def describe(path: str | os.PathLike[str]) -> Summary:
    """What a state directory holds; it may be in use. Raises StateError."""
    state = Path(path).expanduser()
    if not (state / "bundles").is_dir():
        raise StateError(f"{state} is not a state directory: fleetlearn-device run makes one at its first start")
    with _clear_errors(state):
        identity = state / "identity.json"
        device = _read_identity(identity).device if identity.exists() else None
        bundles = []
        for folder in _bundles_by_use(state):
            try:
                bundles.append((folder.name, read_manifest((folder / MANIFEST).read_bytes()).name))
            except (FleetError, FileNotFoundError):
                bundles.append((folder.name, "(incomplete)"))
        kept = [(path.name, path.stat().st_size) for path in sorted(state.glob("kept/*"))]
        return Summary(device, bundles, _read_report(state), kept)


def _bundles_by_use(state: Path) -> list[Path]:
    """The cached bundles' folders, the last used first."""
    return sorted((state / "bundles").iterdir(), key=lambda path: path.stat().st_mtime_ns, reverse=True)


def _read_report(state: Path) -> Report | None:
    path = state / "pending" / "report.json"
    try:
        return read_report(path.read_bytes())
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        log.warning("%s is damaged and is ignored: %s", path, error)
        return None


def _intact(path: Path, report: Report) -> bool:
    """Whether the file holds the bytes that the report describes."""
    if not path.exists() or path.stat().st_size != report.size:
        return False
    with path.open("rb") as file:
        return all(checksum(file.read(part.size)) == part.crc32 for part in report.parts)


def _identity(path: Path, name: str | None) -> str:
    if path.exists():
        device = _read_identity(path).device
        if name is not None and name != device:
            raise StateError(
                f"{path} says that this device is {device}, not {name}: leave the name out, or give {name} a state "
                "directory of its own"
            )
        return device
    device = name if name is not None else str(uuid.uuid4())
    try:
        identity = msgspec.convert({"device": device}, Identity)
    except msgspec.ValidationError:
        raise StateError(
            f"the name {device!r} was given; a device's name has 1 to 64 letters, digits and . _ -, and begins with a "
            "letter or digit"
        ) from None
    _write_durably(path, msgspec.json.encode(identity))
    return device


def _read_identity(path: Path) -> Identity:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Identity)
    except msgspec.DecodeError as error:
        raise StateError(
            f'{path} is damaged ({error}); it should hold {{"device": NAME}}. Write it again with the name that the '
            "coordinator knows, or delete it and the device gets a new name"
        ) from None


def _write_durably(path: Path, *contents: Buffer, into: Path | None = None) -> None:
    """Write a file aside, ``into`` the room that is held for it where there is some, and rename it."""
    aside = into if into is not None and into.exists() else path.with_name(f"{path.name}.tmp")
    with aside.open("r+b" if aside is into else "wb") as file:
        for content in contents:
            file.write(content)
        file.truncate()
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
    _sync(path.parent)


def _allocate(path: Path, size: int) -> None:
    """Make a file of this size whose bytes have their place on the disk."""
    with path.open("wb") as file:
        if sys.platform == "linux" and size:
            try:
                os.posix_fallocate(file.fileno(), 0, size)
                return
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
                    raise
        block = bytes(2**20)
        for start in range(0, size, len(block)):
            file.write(block[: size - start])


def _sync(folder: Path) -> None:
    """Make the names in a folder durable."""
    if sys.platform != "win32":  # where a directory cannot be opened
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _lock(state: Path) -> BinaryIO:
    """The lock file, locked until it is closed or the process ends, however that happens."""
    file = (state / "lock").open("ab")
    try:
        if sys.platform == "win32":  # pragma: no cover
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        if error.errno not in (errno.EAGAIN, errno.EACCES, errno.EWOULDBLOCK, errno.EDEADLK):
            raise
        raise StateError(
            f"the state directory {state} is in use by another process: each device needs one of its own"
        ) from None
    return file


@contextmanager
def _clear_errors(path: Path) -> Iterator[None]:
    """Turn what the operating system says into what to do."""
    try:
        yield
    except OSError as error:
        advice = {
            errno.ENOSPC: "the disk is full: free some space",
            errno.EDQUOT: "the disk quota is used up: free some space",
            errno.EFBIG: "a file may not be as large as that: raise the limit (ulimit -f), or choose another disk",
            errno.EACCES: "it may not be written to: change its permissions or choose another state directory",
            errno.EPERM: "it may not be written to: change its permissions or choose another state directory",
            errno.EROFS: "its file system is read-only: choose another state directory",
            errno.ENOTDIR: "a part of the path is a file: choose another state directory",
            errno.EEXIST: "a file is in the way: choose another state directory",
        }.get(error.errno or 0, "check the disk and the path")
        where = error.filename or path
        code: FailureCode = "disk-full" if error.errno in _FULL else "runtime-error"
        text = f"cannot use the state directory: {where}: {error.strerror or error}; {advice}"
        raise StateError(text, code) from error
