"""The blobs of a run in an object store, such as S3. The data directory has a copy of what is in
use.

Bytes are written to the data directory first, as in file_blobs.py, and to the object store before
the rows that make them count. So what counts is there, whatever becomes of the machine; uploads
that are still arriving are on the machine alone. Who takes the run over on another machine fetches
what it needs. The object ``owner`` says whose copy is the newest: another process's copy, in
another data directory, is thrown away before it is used.

The objects: ``uploads/slot-NNNN.G``, accepted updates; ``sums/a.G`` and ``sums/b.G``, the
aggregator's state in turns, and ``sums/begun``; ``models/vNNNNNNNN.safetensors.G``; ``owner``. G is
the generation of the coordinator that wrote it (object_generations.py). ``arrived/NUMBER`` are
updates that gateways on other machines put there (arrived.py). ``served/SHA256`` is what devices
may fetch (served_objects.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

from fleetlearn_protocol.errors import Code, FleetError
from fleetlearn_protocol.frames import Buffer
from numpy.typing import NDArray

from fleetlearn_coordinator.storage.arrived import (
    ARRIVED,
    PARTIAL,
    arrived_key,
    first_number,
    is_arrived,
    partial_key,
)
from fleetlearn_coordinator.storage.blobs import PARAMETERS, PART_BYTES, Tensors
from fleetlearn_coordinator.storage.errors import StoreError, StoreUnavailableError
from fleetlearn_coordinator.storage.file_blobs import (
    MODELS,
    SUMS,
    SUMS_FOLDER,
    UPLOADS,
    FileBlobs,
    FileModels,
    model_path,
    spool_path,
)
from fleetlearn_coordinator.storage.file_bytes import FileBytes
from fleetlearn_coordinator.storage.object_generations import NewestObjects, OwnObjects
from fleetlearn_coordinator.storage.object_store import Objects
from fleetlearn_coordinator.storage.served_objects import ServedObjects

OWNER = "owner"
"""The object, and the file ``objects-owner`` of the data directory: the generation and a random
name of the process that wrote last."""
BEGUN = f"{SUMS_FOLDER}/begun"
"""An object that is there as long as the aggregator's saved state may count."""
AT_A_TIME = 8
"""Updates that are written to the object store at a time."""
WHOLE = 2**24
"""Bytes of an update that is read as a whole to be written. A longer one is read in parts."""


def _model_key(version: int) -> str:
    return f"{MODELS}/{model_path(Path(), version).name}"


class ObjectModels(FileModels):
    """``StoredModels`` of an object store, for a process that only reads. What it reads is copied
    to a folder: the data directory where that has the newest copy, else one that goes with this
    object."""

    def __init__(self, folder: Path, objects: Objects) -> None:
        """Raises StoreUnavailableError."""
        owner = objects.read(OWNER)
        if owner is None or _owner_of(folder) != owner:
            folder = Path(mkdtemp(prefix="fleetlearn-models-"))
            weakref.finalize(self, rmtree, folder, ignore_errors=True)
            (folder / MODELS).mkdir()
        super().__init__(folder)
        self.objects = NewestObjects(objects)

    def model_versions(self) -> list[int]:
        self.objects.look()
        return _versions(self.objects)

    def model_size(self, version: int) -> int | None:
        return self._newest(version).size(_model_key(version))

    def _newest(self, version: int) -> NewestObjects:
        """Return the objects, with this version's where it was made meanwhile."""
        if _model_key(version) not in self.objects.generations:
            self.objects.look()
        return self.objects

    def load_model(self, version: int, sha256: str) -> dict[str, NDArray[Any]]:
        _have_model(self._newest(version), self.folder, version)
        return super().load_model(version, sha256)

    def open_tensor(self, version: int, name: str = PARAMETERS) -> FileBytes:
        _have_model(self._newest(version), self.folder, version)
        return super().open_tensor(version, name)

    def where_model(self, version: int) -> str:
        return self.objects.name(_model_key(version))


class ObjectBlobs(FileBlobs):
    """``Blobs`` in an object store."""

    is_slow = True

    def __init__(
        self,
        folder: Path,
        objects: Objects,
        *,
        power: bool = False,
        spool_files: int = 64,
        check: Callable[[], object] = lambda: None,
    ) -> None:
        """The parameters of ``FileBlobs``, whose folder has the copy. Raises
        StoreUnavailableError."""
        owner = objects.read(OWNER)
        if owner is not None and _owner_of(folder) != owner:
            _forget_copy(folder)
        self.objects = OwnObjects(objects, 1 + _generation_of(owner))
        name = f"{self.objects.generation} {token_hex(16)}".encode()
        check()
        objects.put(OWNER, name)  # before the copy changes: it is nobody's newest from here on
        self.objects.drop_replaced()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"objects-{OWNER}").write_bytes(name)
        for kind in (MODELS, UPLOADS, SUMS_FOLDER):  # of processes that were killed as they fetched
            for draft in (folder / kind).glob("*.*.draft"):
                draft.unlink(missing_ok=True)
        super().__init__(folder, power=power, spool_files=spool_files, check=check)
        self.served = ServedObjects(objects, check)
        self._versions = {*_versions(self.objects)}
        self._to_fetch: set[int] = set()
        """Spool files with updates that an earlier process accepted: their bytes are in the object
        store."""
        self._begun: set[int] = set()
        """Spool files with uploads that an earlier process began: their bytes are here alone."""
        self._arrived: set[int] = set()
        """Numbers of accepted updates that gateways on other machines put into the store."""
        self._writers = ThreadPoolExecutor(AT_A_TIME, "objects")

    def close(self) -> None:
        self._writers.shutdown()
        super().close()

    # --- spool files ---

    def reserve_spool_file(self, number: int) -> None:
        if is_arrived(number):
            self._arrived.add(number)
            return
        super().reserve_spool_file(number)
        if number not in self._begun:
            self._to_fetch.add(number)

    def checkpoints(self) -> dict[int, bytes]:
        # Accepted updates, which may have a checkpoint still, are taken back before.
        found = super().checkpoints()
        self._begun = {*found}
        return found

    def free_spool_file(self, number: int) -> None:
        if is_arrived(number):
            self._arrived.discard(number)
            super().free_spool_file(number)
            self._writers.submit(self._remove_arrived, number)
            return
        self._to_fetch.discard(number)
        self._begun.discard(number)
        super().free_spool_file(number)

    def write_spool_file(self, number: int, offset: int, content: Buffer) -> None:
        self._to_fetch.discard(number)  # it has an upload that goes on here
        super().write_spool_file(number, offset, content)

    def read_spool_file(
        self, number: int, size: int, begin: int = 0, part_bytes: int = PART_BYTES
    ) -> Iterator[memoryview]:
        if is_arrived(number):
            if not self._spool_path(number).exists():
                self.objects.objects.fetch(arrived_key(number), self._spool_path(number))
        elif number in self._to_fetch:
            self._to_fetch.discard(number)
            self._fetch_spool_file(number)
        return super().read_spool_file(number, size, begin, part_bytes)

    def _fetch_spool_file(self, number: int) -> None:
        fetched = spool_path(self.folder, number).with_suffix(".fetched")
        self.objects.fetch(_spool_key(number), fetched)
        with fetched.open("rb") as file:
            place = 0
            while part := file.read(2**20):
                self.write_spool_file(number, place, part)
                place += len(part)
        fetched.unlink()

    def settle_spool_files(self, sizes: Mapping[int, int]) -> None:
        sizes = {number: size for number, size in sizes.items() if not is_arrived(number)}
        super().settle_spool_files(sizes)
        list(self._writers.map(self._put_spool_file, sizes, sizes.values()))

    def _put_spool_file(self, number: int, size: int) -> None:
        self._to_fetch.discard(number)  # an upload whose bytes all came to an earlier process
        parts = map(bytes, super().read_spool_file(number, size))
        content = b"".join(parts) if size <= WHOLE else parts
        self._check()
        self.objects.put(_spool_key(number), content)

    # Objects that gateways on other machines put (arrived.py)

    @property
    def generation(self) -> int:
        return self.objects.generation

    @property
    def where_objects(self) -> str:
        return self.objects.objects.where

    def has_arrived(self, number: int, size: int, *, fetch: bool) -> bool:
        objects = self.objects.objects
        if objects.size(arrived_key(number)) != size:
            return False
        return not fetch or _fetch_if_there(objects, arrived_key(number), self._spool_path(number))

    def take_arrived(self, number: int) -> None:
        self._arrived.add(number)

    def check_owner(self) -> None:
        self._check()

    def fetch_partial_sum(self, number: int, path: Path) -> None:
        self.objects.objects.fetch(partial_key(number), path)
        with suppress(StoreError):  # it is an orphan then
            self.objects.objects.remove([partial_key(number)])

    def drop_orphans(self, live: Container[int], sums: Container[int] = ()) -> None:
        there = [int(key) for key in self.objects.objects.keys(PARTIAL) if key.isdecimal()]
        gone = [number for number in there if number not in sums]
        self._check()
        self.objects.objects.remove(map(partial_key, gone))
        found = (int(key) for key in self.objects.objects.keys(ARRIVED) if key.isdecimal())
        needed = self._arrived
        newer = first_number(self.generation + 1, 0)  # of whoever has the run after this process
        orphans = [n for n in found if n < newer and n not in needed and n not in live]
        self._check()
        self.objects.objects.remove(map(arrived_key, orphans))
        for path in (self.folder / UPLOADS).glob("slot-*"):
            number = path.name.removeprefix("slot-")
            is_copy = number.isdecimal() and is_arrived(int(number))
            if is_copy and int(number) not in self._arrived and int(number) not in live:
                path.unlink(missing_ok=True)

    def _remove_arrived(self, number: int) -> None:
        with suppress(FleetError):  # it is an orphan then
            self._check()
            self.objects.objects.remove([arrived_key(number)])

    def where_spool_file(self, number: int) -> str:
        if is_arrived(number):
            return self.objects.objects.name(arrived_key(number))
        return f"{self._spool_path(number)} ({self.objects.name(_spool_key(number))})"

    # --- the aggregator's state ---

    def has_aggregator(self) -> bool:
        return self.objects.objects.size(BEGUN) is not None

    def open_aggregator(self) -> None:
        super().open_aggregator()
        if not self.has_aggregator():
            self._check()
            self.objects.objects.put(BEGUN, b"remove this object to give up the open round\n")

    def save_aggregator(self, turn: int, tensors: Tensors) -> int:
        crc32 = super().save_aggregator(turn, tensors)
        self._check()
        self.objects.put(_sum_key(turn), self._sum_path(turn))
        return crc32

    def load_aggregator(self, turn: int, like: Tensors, crc32: int) -> dict[str, NDArray[Any]]:
        path = self._sum_path(turn)
        path.parent.mkdir(exist_ok=True)
        if path.exists() and path.stat().st_size:
            with suppress(StoreError):  # such as after a loss of power
                return super().load_aggregator(turn, like, crc32)
        fetched = path.with_suffix(".fetched")
        self.objects.fetch(_sum_key(turn), fetched)
        path.write_bytes(fetched.read_bytes())  # into the file that may be open already
        fetched.unlink()
        return super().load_aggregator(turn, like, crc32)

    def where_aggregator(self) -> str:
        return self.objects.objects.name(BEGUN)

    # --- models ---

    def model_versions(self) -> list[int]:
        return sorted(self._versions)

    def model_size(self, version: int) -> int | None:
        found = super().model_size(version)
        if found is None and version in self._versions:
            found = self.objects.size(_model_key(version))
        return found

    def load_model(self, version: int, sha256: str) -> dict[str, NDArray[Any]]:
        _have_model(self.objects, self.folder, version)
        try:
            return super().load_model(version, sha256)
        except StoreError as error:
            if error.code is not Code.WRONG_HASH:
                raise
        model_path(self.folder, version).unlink()  # such as after a loss of power
        _have_model(self.objects, self.folder, version)
        return super().load_model(version, sha256)

    def open_tensor(self, version: int, name: str = PARAMETERS) -> FileBytes:
        _have_model(self.objects, self.folder, version)
        return super().open_tensor(version, name)

    def save_model(self, version: int, tensors: Tensors) -> None:
        super().save_model(version, tensors)
        self._check()
        self.objects.put(_model_key(version), model_path(self.folder, version))
        self._versions.add(version)

    def drop_models(self, versions: Iterable[int]) -> None:
        dropped = [version for version in versions if version in self._versions]
        super().drop_models(dropped)
        self.objects.remove(map(_model_key, dropped))
        self._versions.difference_update(dropped)


def fetch_models(folder: Path, objects: Objects) -> None:
    """Let a data directory that has the newest copy of all else have all models, too, and the
    updates that gateways on other machines put: who took the run over has fetched what was needed.
    Raises StoreError where it has not."""
    owner = objects.read(OWNER)
    if owner is not None and _owner_of(folder) != owner:
        text = (
            f"{folder} has no complete copy of the run: another coordinator, with another data "
            f"directory, wrote to {objects.where} since. Make the copy where that one is"
        )
        raise StoreError(Code.OUT_OF_TURN, text)
    newest = NewestObjects(objects)
    for version in _versions(newest):
        _have_model(newest, folder, version)
    for number in map(int, filter(str.isdecimal, objects.keys(ARRIVED))):
        path = spool_path(folder, number)
        if not path.exists():
            with suppress(FileNotFoundError):  # no update counts yet, and there is no folder
                _fetch_if_there(objects, arrived_key(number), path)


def _spool_key(number: int) -> str:
    return f"{UPLOADS}/{spool_path(Path(), number).name}"


def _sum_key(turn: int) -> str:
    return f"{SUMS_FOLDER}/{SUMS[turn]}"


def _owner_of(folder: Path) -> bytes | None:
    """Return the name of the process whose copy a data directory has."""
    with suppress(FileNotFoundError):
        return (folder / f"objects-{OWNER}").read_bytes()
    return None


def _forget_copy(folder: Path) -> None:
    """Remove the bytes that a data directory has: they may be older than the object store's."""
    for name in (MODELS, UPLOADS, SUMS_FOLDER):
        with suppress(FileNotFoundError):
            rmtree(folder / name)


def _generation_of(owner: bytes | None) -> int:
    """Return the generation of a name that OWNER has."""
    number = b"" if owner is None else owner.partition(b" ")[0]
    return int(number) if number.isdigit() else 0


def _versions(objects: NewestObjects) -> list[int]:
    names = map(Path, objects.names(MODELS))
    return sorted(int(name.stem[1:]) for name in names if name.suffix == ".safetensors")


def _fetch_if_there(objects: Objects, key: str, path: Path) -> bool:
    """Fetch an object, unless it was removed meanwhile. Returns whether it is here."""
    try:
        objects.fetch(key, path)
    except StoreUnavailableError:
        raise
    except StoreError:
        return False
    return True


def _have_model(objects: NewestObjects, folder: Path, version: int) -> None:
    """Let the folder have a model. What is missing everywhere is missing there, too."""
    path = model_path(folder, version)
    if path.exists():
        return
    try:
        objects.fetch(_model_key(version), path)
    except StoreUnavailableError:
        raise
    except StoreError:
        return
