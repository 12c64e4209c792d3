"""pending/: the finished update that the coordinator has not acknowledged, and what the device
keeps of its task.

::

    CRC.bin             the bytes of the report's parts; its name has the CRC-32 of each part,
                        with - between them
    report.json         its report; the update exists from the moment this file appears
    unmasked.bin        in place of these two, an update that is not masked yet
    unmasked.json       (unmasked.py); it exists from the moment this file appears
    kept-TASK.BUNDLE    the task's kept state, until it is moved to kept/
    tied-TASK.BUNDLE    the task's tied vectors, until they are moved to tied/
    own-TASK.BUNDLE     the personal model after the task, until it is moved to kept/
    NAME.reserved       room on the disk for one of these files, which a running training holds

The update of a task and what is kept of it appear together. What is kept is written to pending/
first, report.json (or unmasked.json) makes all exist, and only then, or when a process next opens
the directory, is it moved to its place. With report.json there is no unmasked update any more: what
is left of it is deleted before anything is sent.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path

import msgspec
from fleetlearn_protocol.encodings import chunk_unit
from fleetlearn_protocol.frames import CHUNK_BYTES, Buffer, pack_chunk
from fleetlearn_protocol.messages import Report
from fleetlearn_protocol.stored_report import read_report as decode_report
from fleetlearn_protocol.vector import Vector, checksum

from fleetlearn_device.storage import kept_states, tied_vectors, unmasked
from fleetlearn_device.storage.checked_json import checked_json, intact_json
from fleetlearn_device.storage.errors import StateError, os_errors_as_state_errors
from fleetlearn_device.storage.files import allocate, sync_folder, write_durably
from fleetlearn_device.storage.kept_states import KeptStates, personal_name
from fleetlearn_device.storage.tied_vectors import TiedVectors
from fleetlearn_device.storage.unmasked import UnmaskedUpdate, read_unmasked, read_update

_REPORT_BYTES = 64 * 2**10
"""Room for report.json: no control message is larger."""

log = logging.getLogger("fleetlearn.device")


class Outbox:
    """The folder pending/, which holds at most one update. Opening it finishes what an earlier
    process began."""

    def __init__(self, path: Path, kept: KeptStates, tied: TiedVectors) -> None:
        self._path, self._kept_states, self._tied_vectors = path, kept, tied
        path.mkdir(exist_ok=True)
        self._settle()

    def reserve(
        self,
        update_bytes: int,
        state_bytes: int,
        tied_bytes: int = 0,
        personal_bytes: int = 0,
        unmasked_bytes: int = 0,
    ) -> None:
        """Hold room on the disk for an update and what is kept with it, so that a full disk shows
        before the training.

        state_bytes: of the kept state. tied_bytes: of the file of tied vectors. personal_bytes: of
        the personal model. unmasked_bytes: of the update before it is masked, if it waits for that
        here. Raises StateError.
        """
        sizes = {
            "update": update_bytes,
            "kept": kept_states.file_size(state_bytes),
            "tied": tied_bytes,
            "own": kept_states.file_size(personal_bytes),
            "report": _REPORT_BYTES,
        }
        if unmasked_bytes:
            sizes |= {"unmasked.bin": unmasked_bytes, "unmasked.json": 2 * _REPORT_BYTES}
        try:
            with os_errors_as_state_errors(self._path):
                for name, size in sizes.items():
                    allocate(self._reserved(name), size)
        except StateError as error:
            self.release()
            size = update_bytes + state_bytes + tied_bytes + personal_bytes + unmasked_bytes
            text = f"there is no room for an update of {size} bytes: {error}"
            raise type(error)(text) from error

    def release(self) -> None:
        """Give back the room that ``reserve`` holds. Raises StateError."""
        with os_errors_as_state_errors(self._path):
            for path in self._path.glob("*.reserved"):
                path.unlink()

    def save(
        self,
        report: Report,
        contents: Sequence[Buffer],
        bundle: str = "",
        kept_state: Vector | None = None,
        tied: Mapping[str, Vector] | None = None,
        personal: Vector | None = None,
        later: UnmaskedUpdate | None = None,
    ) -> None:
        """Make an update durable, and with it what the device keeps for the next task of
        ``bundle``, if anything.

        ``contents`` holds the bytes of each of the report's parts. ``later``: the update is not
        masked yet, and nothing of it is to be sent; ``report`` is ``later.report``. After a crash
        the update, the kept state, the tied vectors and the personal model are all there, or none
        is. Raises StateError.
        """
        files: dict[str, tuple[Buffer, ...]] = {}
        if kept_state is not None and kept_state.size:
            files["kept"] = kept_states.file_contents(kept_state)
        if tied:
            files["tied"] = tied_vectors.file_contents(tied)
        if personal is not None:
            files["own"] = kept_states.file_contents(personal)
        with os_errors_as_state_errors(self._path):
            # The report comes last: it makes the files before it count. A process that dies earlier
            # leaves files that no report names, and `_settle` deletes these.
            if later is None:
                write_durably(self._update(report), *contents, into=self._reserved("update"))
            else:
                # An earlier update is over when another one is saved; its report would count.
                (self._path / "report.json").unlink(missing_ok=True)
                self._write(unmasked.BYTES, *contents)
            for name, pieces in files.items():
                write_durably(
                    self._path / f"{name}-{report.task}.{bundle}",
                    *pieces,
                    into=self._reserved(name),
                )
            if later is None:
                self._write_report(report)
            else:
                self._write(unmasked.FILE, checked_json(later))
            self._settle()

    def save_masked(self, report: Report, content: Buffer) -> None:
        """Put a masked update in the place of the unmasked one of the same task. After a crash one
        of them is there, and never both. Raises StateError.

        content: the bytes of the report's one part.
        """
        with os_errors_as_state_errors(self._path):
            write_durably(self._update(report), content, into=self._reserved("update"))
            self._write_report(report)
            self._settle()
            # Nothing is sent before the unmasked one is gone, after a power cut too.
            sync_folder(self._path)

    def load_unmasked(self) -> UnmaskedUpdate | None:
        """Return the update that is not masked yet. Returns None, and deletes the update, where it
        is damaged. Raises StateError."""
        with os_errors_as_state_errors(self._path):
            found = read_unmasked(self._path)
            if found is not None and read_update(self._path, found.report) is None:
                task_id = found.task.task
                log.warning("the unmasked update of task %s is damaged; it is dropped", task_id)
                self.drop(task_id)
                return None
            return found

    def unmasked_update(self, task_id: str) -> tuple[UnmaskedUpdate, Vector]:
        """Return the update of this task that is not masked yet: float32, shape (P,). Raises
        StateError where it is damaged or gone."""
        with os_errors_as_state_errors(self._path):
            found = read_unmasked(self._path)
            update = None if found is None else read_update(self._path, found.report)
        if found is None or update is None or found.task.task != task_id:
            raise StateError(f"{self._path} does not hold the update of task {task_id} any more")
        return found, update

    def load(self) -> Report | None:
        """Return the report of the update that an earlier process left. Returns None, and deletes
        the update, where it is damaged. Raises StateError."""
        with os_errors_as_state_errors(self._path):
            report = read_report(self._path)
            if report is not None:
                if _is_intact(self._update(report), report):
                    return report
                log.warning("the saved update of task %s is damaged; it is dropped", report.task)
                self.drop(report.task)
            return None

    def drop(self, task_id: str) -> None:
        """Delete the update if it is this task's. Raises StateError."""
        with os_errors_as_state_errors(self._path):
            report, waits = read_report(self._path), read_unmasked(self._path)
            ours = [report is not None and report.task == task_id]
            ours.append(waits is not None and waits.task.task == task_id)
            if any(ours):
                # In this order: without the report, an unmasked update would be masked once more.
                (self._path / unmasked.FILE).unlink(missing_ok=True)
                (self._path / "report.json").unlink(missing_ok=True)
                self._settle()

    def chunks(self, transfer: int, offset: int, chunk_bytes: int = CHUNK_BYTES) -> Iterator[bytes]:
        """Yield the update's bytes from ``offset`` on, as binary frames, each with whole blocks of
        one part.

        Raises StateError.
        """
        with os_errors_as_state_errors(self._path):
            report = read_report(self._path)
            if report is None:
                raise StateError(f"{self._path} holds no finished update")
            path, ends = self._update(report), accumulate(part.size for part in report.parts)
            for part, end in zip(report.parts, ends, strict=True):
                block = chunk_unit(part.encoding)
                most = max(1, chunk_bytes // block) * block
                while offset < end and (payload := _read(path, offset, min(most, end - offset))):
                    yield pack_chunk(transfer, offset, payload)
                    offset += len(payload)

    def _update(self, report: Report) -> Path:
        return self._path / ("-".join(f"{part.crc32:08x}" for part in report.parts) + ".bin")

    def _reserved(self, name: str) -> Path:
        return self._path / f"{name}.reserved"

    def _write(self, name: str, *contents: Buffer) -> None:
        write_durably(self._path / name, *contents, into=self._reserved(name))

    def _write_report(self, report: Report) -> None:
        path = self._path / "report.json"
        write_durably(path, checked_json(report), into=self._reserved("report"))

    def _settle(self) -> None:
        """Move what is kept of the report's task to its place, and delete every file that belongs
        to no report: the files of an update whose report was not written yet, or was deleted
        already."""
        report, stays = read_report(self._path), {"report.json"}
        if report is not None:
            stays.add(self._update(report).name)
        elif (waits := read_unmasked(self._path)) is not None:
            report = waits.report
            # The room for the masked update is held until it is there.
            stays |= {unmasked.FILE, unmasked.BYTES, "update.reserved", "report.reserved"}
        names = (
            None
            if report is None
            else re.compile(rf"(kept|tied|own)-{re.escape(report.task)}\.([0-9a-f]{{64}})")
        )
        for path in self._path.iterdir():
            match = names and names.fullmatch(path.name)
            if report is not None and match:
                kind, bundle = match.groups()
                match kind:
                    case "kept":
                        self._kept_states.take(path, bundle)
                    case "own":
                        self._kept_states.take(path, personal_name(bundle))
                    case _:
                        self._tied_vectors.take(path, bundle, report.task)
            elif path.name not in stays:
                path.unlink()


def read_report(pending: Path) -> Report | None:
    """Return the report of the update in the folder pending/; None where there is none, or it is
    damaged."""
    path = pending / "report.json"
    try:
        return decode_report(intact_json(path.read_bytes()))
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        log.warning("%s is damaged and is ignored: %s", path, error)
        return None


def _read(path: Path, offset: int, size: int) -> bytes:
    """Read a part of a file, which is not held open: Windows deletes no file that is, and an upload
    that is stopped may still wait between two chunks when its update is dropped."""
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(size)


def _is_intact(path: Path, report: Report) -> bool:
    """Return whether the file holds the bytes that the report describes."""
    if not path.exists() or path.stat().st_size != report.size:
        return False
    with path.open("rb") as file:
        return all(checksum(file.read(part.size)) == part.crc32 for part in report.parts)
