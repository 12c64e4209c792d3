"""Making a backup of a run or a host while it is served, and restoring it.

Both are made under another name beside the target, and renamed when they are whole: a process that
is killed leaves no half of them.
"""

from __future__ import annotations

import shutil
import time
from contextlib import closing
from importlib.metadata import version
from pathlib import Path

from fleetlearn_protocol.errors import Code

from fleetlearn_coordinator.service.backup_contents import (
    BackupContents,
    RunPlaces,
    find_contents,
    plain,
    with_relative_paths,
)
from fleetlearn_coordinator.service.backup_manifest import (
    FILES,
    BackedUpFile,
    BackedUpRun,
    BackupManifest,
    files_below,
    make_safe,
    sha256_of,
    verify_backup,
    verify_files,
    write_manifest,
)
from fleetlearn_coordinator.storage.draft_folder import draft_folder
from fleetlearn_coordinator.storage.errors import StoreError
from fleetlearn_coordinator.storage.find_storage import find_storage
from fleetlearn_coordinator.storage.identities import open_identities
from fleetlearn_coordinator.storage.run_storage import CopiedRun
from fleetlearn_coordinator.storage.runs import Runs


def back_up(
    source: Path, target: Path, *, service: Path | None = None, keys: bool = False
) -> BackupManifest:
    """Write a backup into the folder ``target``, which must not be there, or be empty.

    ``source``: a plan, a service file that names a folder of runs, or a data directory.
    ``service``: the service file with which a plan is served. ``keys``: copy private keys, too.
    Raises BackupError, StoreError, PlanError, ServiceError, OSError, and leaves nothing behind.
    """
    contents = find_contents(source, service, keys=keys)
    with draft_folder(plain(target)) as draft:
        tree = _Tree(contents.base(), draft / FILES)
        # The runs come before the identities: what is done to a run is logged there afterwards,
        # and a row that is in the audit log already is not written again.
        if contents.run_folder is not None:
            plans = {run.name: tree.copy_of(run.plan) for run in contents.runs if run.plan}
            with closing(Runs(contents.run_folder)) as wanted:
                wanted.copy_to(tree.copy_of(contents.run_folder), plans)
        runs = [_copy_run(run, tree) for run in contents.runs]
        for file, keys_of in contents.toml.items():
            text = with_relative_paths(file.read_text("utf-8"), file, keys_of)
            tree.copy_of(file).write_text(text, "utf-8")
        for file in contents.files:
            shutil.copyfile(file, tree.copy_of(file))
        if contents.identities is not None:
            with closing(open_identities(contents.identities)) as identities:
                identities.copy_to(tree.copy_of(contents.identities))
        manifest = BackupManifest(
            time.time(),
            version("fleetlearn"),
            tree.name_of(contents.serve),
            tree.name_of(contents.service),
            runs,
            _files(contents, tree),
            [path.relative_to(tree.base).as_posix() for path in contents.left_out],
        )
        write_manifest(draft, manifest)
        _close_to_others(draft)
        make_safe(draft)
    return manifest


class _Tree:
    """Where the files of a backup lie: below ``folder`` as the originals below ``base``."""

    def __init__(self, base: Path, folder: Path) -> None:
        self.base, self.folder = base, folder

    def copy_of(self, path: Path) -> Path:
        """Return the place of a file's or a folder's copy, in a folder that is there."""
        copy = self.folder / path.relative_to(self.base)
        copy.parent.mkdir(parents=True, exist_ok=True)
        return copy

    def name_of(self, path: Path | None) -> str | None:
        """Return where a file or folder is in the backup."""
        return None if path is None else path.relative_to(self.base).as_posix()


def _copy_run(run: RunPlaces, tree: _Tree) -> BackedUpRun:
    try:
        copied = find_storage(run.data).copy_to(tree.copy_of(run.data))
    except StoreError as error:
        # a run that was added, and was not served yet
        if run.plan is None or error.code is not Code.UNKNOWN_CONTENT:
            raise
        copied = CopiedRun(None, None, None, 0, given_up=False)
    data = run.data.relative_to(tree.base).as_posix()
    return BackedUpRun(run.name, tree.name_of(run.plan), data, *copied)


def _files(contents: BackupContents, tree: _Tree) -> list[BackedUpFile]:
    secret = {tree.folder / path.relative_to(tree.base) for path in contents.secret}
    found = []
    for name in files_below(tree.folder):
        path = tree.folder / name
        is_secret = not secret.isdisjoint((path, *path.parents))
        found.append(BackedUpFile(name, path.stat().st_size, sha256_of(path), is_secret))
    return found


def _close_to_others(folder: Path) -> None:
    for path in folder.rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)


def restore(backup: Path, target: Path) -> BackupManifest:
    """Write what a backup has into the folder ``target``, which must not be there, or be empty.
    Everything is verified, before and after it is copied.

    Raises BackupError (it is no backup, or damaged), StoreError (``target`` is in use or not
    empty), OSError, and leaves nothing behind.
    """
    backup = plain(backup)
    with draft_folder(plain(target)) as draft:
        manifest = verify_backup(backup)
        shutil.copytree(backup / FILES, draft, dirs_exist_ok=True)
        verify_files(manifest, draft)
        _close_to_others(draft)
        make_safe(draft)
    return manifest
