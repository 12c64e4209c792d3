"""The cache of contents: bundles, the last task's vectors, and downloads that are still arriving.

::

    bundles/SHA/     training bundles by their manifest's SHA-256, the last MAX_BUNDLES used; only
                     files that are needed (a file that two bundles have in common is fetched once,
                     and is on the disk once)
    models/SHA       the last task's vectors, such as the round's model, where they are too large to
                     be held in memory                                  (vectors_in_memory.py)
    partial/SHA      a content that is still arriving: a download goes on from the file's length

A content is checked against its SHA-256 when it has arrived, and again when a process first uses
it. Therefore none of these files is synced.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
from fleetlearn_protocol.deltas import apply_delta
from fleetlearn_protocol.errors import BundleError, Code, FleetError, ProtocolError
from fleetlearn_protocol.frames import Buffer
from fleetlearn_protocol.manifest import (
    EVAL,
    FROZEN,
    INFER,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    OF_FEATURES,
    ORT_TRAINING,
    PARAMETERS,
    PERSONAL,
    PUBLIC,
    STATE,
    TRAIN,
    Manifest,
)
from fleetlearn_protocol.manifest_file import read_manifest
from fleetlearn_protocol.messages import (
    MAX_VECTORS,
    ContentSelection,
    Delta,
    Question,
    Task,
    VectorReference,
)
from fleetlearn_protocol.sparse_rows import selected_bytes
from fleetlearn_protocol.vector import digest, stream_digest
from msgspec import UNSET

from fleetlearn_device.session.commands import Wanted
from fleetlearn_device.storage.errors import CacheFullError, os_errors_as_state_errors
from fleetlearn_device.storage.files import WRITTEN
from fleetlearn_device.storage.vectors_in_memory import VectorsInMemory

MAX_BUNDLES = 3
"""Most bundles in the cache where it has no quota."""

Choose = Callable[[Manifest, VectorReference], "ContentSelection | None"]
"""The task's bundle, a vector of the task -> the pieces of it that the device needs; None: all."""

log = logging.getLogger("fleetlearn.device")


def choose_all(manifest: Manifest, vector: VectorReference) -> ContentSelection | None:
    return None


class ContentCache:
    """The folders bundles/, models/ and partial/ of the state directory ``path``."""

    def __init__(self, path: Path) -> None:
        self._path, self._memory = path, VectorsInMemory()
        self.quota: int | None = None
        """Most bytes of bundles, what is still to be fetched for the task included. None: no limit.
        """
        self._selected: dict[str, str] = {}
        """SHA-256 of a vector of the task -> the name of the pieces of it that the task needs."""
        self._intact: set[Path] = set()
        """Files of the cache whose SHA-256 was checked since the process began."""
        for folder in ("bundles", "models", "partial"):
            (path / folder).mkdir(exist_ok=True)

    def bundle_path(self, sha256: str) -> Path:
        """Return the folder of a bundle, which may lack files."""
        return self._path / "bundles" / sha256

    def vector_path(self, sha256: str) -> Path:
        """Return the file of a task's vector, which is absent where it is held in memory."""
        return self._path / "models" / sha256

    def vector(self, sha256: str) -> bytes | bytearray:
        """Return the bytes of a task's vector, not to be changed. Raises OSError where it is
        lacking."""
        content = self._memory.get(sha256)
        return self.vector_path(sha256).read_bytes() if content is None else content

    def selected_vector(self, sha256: str) -> bytes | bytearray | None:
        """Return the bytes of the pieces of a vector that the task needs, not to be changed. None:
        it needs all of it. Raises OSError where they are lacking."""
        name = self._selected.get(sha256)
        return None if name is None else self.vector(name)

    def _pieces(self, vector: VectorReference, selection: ContentSelection) -> Wanted:
        name = digest(vector.sha256.encode() + msgspec.json.encode(selection))
        self._selected[vector.sha256] = name
        size = selected_bytes(selection)
        whole = vector.sha256, f"the {vector.name}"
        return Wanted(
            vector.sha256,
            f"the {vector.name}'s rows",
            f"models/{name}",
            size,
            size,
            instead=Wanted(*whole, f"models/{vector.sha256}", vector.size, vector.size),
            selection=selection,
            name_of_pieces=name,
        )

    def lacking(
        self,
        task: Task | Question,
        kind: str,
        from_features: bool = False,
        infer: bool = False,
        choose: Choose = choose_all,
    ) -> list[Wanted]:
        """Return what the task needs and the cache lacks, the manifest first: only the manifest
        names the other files.

        from_features: whether the device trains from features if the bundle has any. infer: whether
        it needs infer.onnx as well. choose: says which pieces of a vector the device needs.

        Marks the bundle as used last, and deletes the bundles beyond ``MAX_BUNDLES`` or the quota,
        other vectors, and downloads that the task does not need. Raises BundleError on a manifest
        that this version cannot read or that lacks the files of this runtime, CacheFullError where
        the task needs more than the quota, StateError.
        """
        with os_errors_as_state_errors(self._path):
            if task.bundle is None:  # a question that is answered without a model
                return []
            folder = f"bundles/{task.bundle}"
            self._make_room(task, self.bundle_path(task.bundle))
            manifest: Manifest | None = None
            wanted = [
                Wanted(task.bundle, MANIFEST, f"{folder}/{MANIFEST}", None, MAX_MANIFEST_BYTES)
            ]
            if self._has(wanted[0]):
                manifest = read_manifest((self._path / wanted[0].place).read_bytes())
                for file in needed_files(manifest, kind, from_features, infer):
                    entry = manifest.file(file)
                    wanted.append(
                        Wanted(entry.sha256, file, f"{folder}/{file}", entry.size, entry.size)
                    )
            self._selected = {}
            # Which pieces of a vector are needed is known once the manifest is here.
            known = manifest is not None or choose is choose_all
            for vector in task.vectors if known else ():
                selection = None if manifest is None else choose(manifest, vector)
                whole = Wanted(vector.sha256, "", f"models/{vector.sha256}", None, 0)
                # All of it is there where the coordinator could not give the pieces.
                if selection is not None and not self._has(whole):
                    wanted.append(self._pieces(vector, selection))
                    continue
                path = f"models/{vector.sha256}"
                # two vectors may be the same, such as zeros
                if all(path != other.place for other in wanted):
                    wanted.append(
                        Wanted(vector.sha256, f"the {vector.name}", path, vector.size, vector.size)
                    )
            lacking = [
                content for content in wanted if not (self._has(content) or self._link(content))
            ]
            coming = (each.size or 0 for each in lacking if each.place.startswith(f"{folder}/"))
            self._keep_quota(self.bundle_path(task.bundle), sum(coming))
            deltas = {vector.sha256: vector.delta for vector in task.vectors}
            return self._resume(
                [
                    content
                    if content.selection is not None
                    else self._smaller(content, deltas.get(content.sha256))
                    for content in lacking
                ]
            )

    def append(self, wanted: Wanted, offset: int, payload: Buffer) -> None:
        """Write the next bytes of a partial content; ``offset`` 0 begins it again. Raises
        StateError."""
        if self._belongs_in_memory(wanted):
            self._memory.append(wanted.key, offset, payload)
            return
        path = self._partial(wanted)
        with os_errors_as_state_errors(path), path.open("r+b" if offset else "wb") as file:
            file.seek(offset)
            file.write(payload)
        WRITTEN.add(payload)

    def finish(self, wanted: Wanted) -> bool:
        """Move a complete content, or the vector that a difference gives, to its place. Deletes it
        and returns False where the SHA-256 is wrong.

        Raises StateError.
        """
        if self._belongs_in_memory(wanted):
            return self._finish_in_memory(wanted)
        source, target = self._partial(wanted), self._path / wanted.place
        with os_errors_as_state_errors(target):
            if not source.exists() and wanted.size in (0, None):
                source.touch()  # a content without bytes comes in no chunk
            if _digest(source) != wanted.expected:
                source.unlink()
                return False
            if wanted.base is not None and not self._apply(source, wanted):
                source.unlink()
                return False
            target.parent.mkdir(parents=True, exist_ok=True)
            source.replace(target)
            self._intact.add(target)
            return True

    def _belongs_in_memory(self, wanted: Wanted) -> bool:
        """Return whether this content is not to be written to the disk. What the version before
        began there is finished there."""
        return self._memory.takes(wanted) and not self._partial(wanted).exists()

    def _finish_in_memory(self, wanted: Wanted) -> bool:
        content: bytes | bytearray | None = self._memory.arrived(wanted.key, wanted.expected)
        if content is not None and wanted.base is not None:
            with os_errors_as_state_errors(self._path):
                content = self._differing(content, wanted)
        if content is None:
            return False
        name = Path(wanted.place).name
        # What was selected has another name than its SHA-256.
        return self._memory.put(
            name, content, name if wanted.selection is None else wanted.expected
        )

    def models(self) -> tuple[str, ...]:
        """Return the SHA-256 of the vectors that later ones may come as differences from. Raises
        StateError."""
        with os_errors_as_state_errors(self._path):
            files = {path.name for path in (self._path / "models").iterdir()}
            pieces = {*self._selected.values()}
            return tuple(sorted((files | self._memory.names()) - pieces)[:MAX_VECTORS])

    def _smaller(self, content: Wanted, delta: Delta | None) -> Wanted:
        """Return the difference that gives this content, if there is one, and the device has what
        it differs from."""
        if delta is None or not self._has(
            Wanted(delta.base, "the earlier model", f"models/{delta.base}", None, 0)
        ):
            return content
        name = f"the difference of {content.name}"
        return Wanted(
            delta.sha256,
            name,
            content.place,
            delta.size,
            delta.size,
            base=delta.base,
            instead=content,
        )

    def _apply(self, source: Path, wanted: Wanted) -> bool:
        """Replace the difference in this file by the vector that it gives. Returns False if that is
        another one than is wanted."""
        content = self._differing(source.read_bytes(), wanted)
        if content is None or f"models/{digest(content)}" != wanted.place:
            return False
        source.write_bytes(content)
        WRITTEN.add(content)
        return True

    def _differing(self, difference: Buffer, wanted: Wanted) -> bytes | None:
        """Return the vector that a difference gives, or None where it cannot be worked out."""
        assert wanted.base is not None
        try:
            return apply_delta(self.vector(wanted.base), difference)
        except (ProtocolError, FileNotFoundError) as error:
            log.warning("%s is of no use: %s", wanted.name, error)
            return None

    def recheck_bundle(self, sha256: str) -> None:
        """Check the SHA-256 of a bundle's files again when they are needed next.

        Only damaged files are then fetched again: the others would arrive with the same bytes.
        """
        self._intact = {
            path for path in self._intact if self.bundle_path(sha256) not in path.parents
        }

    def delete_bundle(self, sha256: str) -> None:
        """Delete a bundle's files."""
        self.recheck_bundle(sha256)
        shutil.rmtree(self.bundle_path(sha256), ignore_errors=True)

    def _has(self, wanted: Wanted) -> bool:
        path = self._path / wanted.place
        if wanted.place.startswith("models/") and path.name in self._memory.names():
            return True
        if not path.exists():
            return False
        # Only the coordinator knows the SHA-256 of what was selected: another process's is fetched
        # again.
        if path not in self._intact and _digest(path) != wanted.expected:
            log.warning("%s is damaged and is fetched again", path)
            path.unlink()
            return False
        self._intact.add(path)
        return True

    def _link(self, wanted: Wanted) -> bool:
        """Take a bundle's file from another bundle that has the same one. Returns False if none has
        it intact."""
        target = self._path / wanted.place
        for folder in bundles_by_use(self._path):
            for source in _files_with_hash(folder, wanted.sha256):
                if source == target or (
                    source not in self._intact and _digest(source) != wanted.sha256
                ):
                    continue
                target.parent.mkdir(parents=True, exist_ok=True)
                try:
                    os.link(source, target)
                except OSError:  # a file system without links, such as FAT
                    shutil.copyfile(source, self._partial(wanted))
                    WRITTEN.count += source.stat().st_size
                    self._partial(wanted).replace(target)
                self._intact.add(target)
                log.info("%s is the same file as in bundle %s", wanted.name, folder.name[:12])
                return True
        return False

    def _resume(self, lacking: list[Wanted]) -> list[Wanted]:
        """Return ``lacking`` with the bytes that arrived before; delete the partial contents that
        are not in it."""
        names = {wanted.key for wanted in lacking}
        self._memory.keep(self._memory.names(), names)
        have = self._memory.sizes()
        for path in (self._path / "partial").iterdir():
            have[path.name] = path.stat().st_size
            if path.name not in names:
                path.unlink()
        resumed = []
        for wanted in lacking:
            size = have.get(wanted.key, 0)
            resumed.append(replace(wanted, have=size) if size <= wanted.limit else wanted)
        return resumed

    def _make_room(self, task: Task | Question, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        # The folder's time says when the bundle was last used: `bundles_by_use`.
        os.utime(folder)
        if self.quota is None:
            for old in bundles_by_use(self._path)[MAX_BUNDLES:]:
                self.delete_bundle(old.name)
        needed = {vector.sha256 for vector in task.vectors} | {*self._selected.values()}
        needed |= {vector.delta.base for vector in task.vectors if vector.delta is not None}
        self._memory.keep(needed, self._memory.sizes())
        for path in (self._path / "models").iterdir():
            if path.name not in needed:
                path.unlink()
                self._intact.discard(path)

    def _keep_quota(self, own: Path, coming: int) -> None:
        """Delete the bundles that were not used for longest, never ``own``, until those that are
        there and ``coming`` bytes more keep the quota. Raises CacheFullError."""
        if self.quota is None:
            return
        while (total := _bytes_of_bundles(self._path) + coming) > self.quota:
            others = [folder for folder in bundles_by_use(self._path) if folder != own]
            if not others:
                raise CacheFullError(
                    Code.TOO_LARGE,
                    f"the task's bundle takes {total / 2**20:.1f} MiB of the disk, and this device "
                    f"allows {self.quota / 2**20:.1f} MiB for bundles (limits.cache)",
                )
            self.delete_bundle(others[-1].name)

    def _partial(self, wanted: Wanted) -> Path:
        return self._path / "partial" / wanted.key


def cached_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of the bundle that the device used last, or None: also where this user
    may not read it."""
    try:
        folders = bundles_by_use(folder)
    except OSError:
        return None
    for each in folders:
        try:
            return read_manifest((each / MANIFEST).read_bytes())
        except (FleetError, OSError):
            continue
    return None


def needed_files(
    manifest: Manifest, kind: str, from_features: bool = False, infer: bool = False
) -> list[str]:
    """Return the files of a bundle that a runtime of this kind (``onnx``, ``ort-training``,
    ``auto``) reads in a round; of the kind ``infer``: what predictions need alone.

    from_features: whether it trains from features if the bundle has any. infer: whether infer.onnx
    is needed as well. The bundle's initial parameters are needed only where some are personal: the
    round's model has all others.
    """
    if manifest.computation is not UNSET:
        return []  # the task's vector is the state, and there are no graphs
    if manifest.public is not UNSET:
        return [PUBLIC]
    frozen = [FROZEN] if FROZEN in manifest.files else []
    inference = [INFER] if infer else []
    if kind == "infer":
        return [INFER]
    if kind == "ort-training":
        return [EVAL, *frozen, *inference, *(f"ort_training/{file}" for file in ORT_TRAINING)]
    own = PERSONAL if PERSONAL in manifest.files else PARAMETERS
    initial = [own] if manifest.local_size > manifest.size else []
    graphs = OF_FEATURES if from_features and manifest.computed_features else (TRAIN, EVAL)
    return [*graphs, *frozen, *inference, *initial, *([STATE] if STATE in manifest.files else [])]


def _files_with_hash(folder: Path, sha256: str) -> list[Path]:
    """Return the files in a bundle's folder that have this hash, as far as its manifest says."""
    try:
        files = read_manifest((folder / MANIFEST).read_bytes()).files
    except (OSError, BundleError):  # not fetched yet, damaged, or of a newer version
        return []
    found = (folder / path for path, entry in files.items() if entry.sha256 == sha256)
    return [path for path in found if path.is_file()]


def _bytes_of_bundles(path: Path) -> int:
    """Return how many bytes the bundles have; a file that several have in common counts once."""
    found = [file.stat() for file in (path / "bundles").glob("*/**/*") if file.is_file()]
    return sum({(each.st_dev, each.st_ino): each.st_size for each in found}.values())


def bundles_by_use(path: Path) -> list[Path]:
    """Return the folders of the bundles in the state directory ``path``, the last used first."""
    return sorted(
        (path / "bundles").iterdir(), key=lambda folder: folder.stat().st_mtime_ns, reverse=True
    )


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return stream_digest(file)
