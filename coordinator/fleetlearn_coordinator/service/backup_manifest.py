"""What is in a backup: ``manifest.json`` beside its folder ``files``, with the checksum of each
file."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import msgspec
from fleetlearn_protocol.errors import Code
from fleetlearn_protocol.vector import stream_digest

from fleetlearn_coordinator.service.backup_contents import BackupError

MANIFEST, FILES = "manifest.json", "files"
FORMAT = 1


class BackedUpFile(msgspec.Struct, frozen=True):
    """A file of a backup."""

    path: str
    """Below ``files``, with ``/``."""
    size: int
    """In bytes."""
    sha256: str
    secret: bool
    """Whether it must not come into other hands: a private key, who the devices are, or what they
    sent."""


class BackedUpRun(msgspec.Struct, frozen=True):
    """A run in a backup. Paths are below ``files``."""

    name: str
    plan: str | None
    data: str
    version: int | None
    """Of its newest model. None: it has none yet."""
    sha256: str | None
    """Of that model's parameter vector."""
    round: int | None
    """The round that was open."""
    updates: int
    """Accepted updates of open rounds that are in spool files alone."""
    given_up: bool
    """Whether a start gives up the open round."""
    releases: int | None = None
    """How many releases a private run had made. None: the run is not private."""


class BackupManifest(msgspec.Struct, frozen=True):
    """A backup."""

    made: float
    """Unix time."""
    fleetlearn: str
    """The version that made it."""
    serve: str | None
    """The plan or service file that `serve` takes, below ``files``. None: a data directory
    alone."""
    service: str | None
    """The service file, below ``files``, if there is one."""
    runs: list[BackedUpRun]
    files: list[BackedUpFile]
    left_out: list[str]
    """Private keys that the service file names, and that are to be put there by hand."""
    format: int = FORMAT
    check: str = ""
    """SHA-256 of this manifest, with this field empty."""


def write_manifest(folder: Path, manifest: BackupManifest) -> None:
    """Write a backup's manifest."""
    whole = msgspec.structs.replace(manifest, check=_check(manifest))
    (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(whole), indent=2))


def read_manifest(folder: Path) -> BackupManifest:
    """Read a backup's manifest. Raises BackupError."""
    path = folder / MANIFEST
    try:
        content = path.read_bytes()
        number = msgspec.json.decode(content, type=dict[str, msgspec.Raw]).get("format", b"0")
        if int(bytes(number)) > FORMAT:
            text = (
                f"{folder} is a backup of format {int(bytes(number))}; this fleetlearn reads "
                f"format {FORMAT}. Update it."
            )
            raise BackupError(Code.BAD_VERSION, text)
        found = msgspec.json.decode(content, type=BackupManifest)
    except FileNotFoundError:
        text = f"{folder} is no backup: it has no {MANIFEST}"
        raise BackupError(Code.UNKNOWN_CONTENT, text) from None
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
        text = f"{path} is damaged: {error}"
        raise BackupError(Code.WRONG_HASH, text) from None
    if found.check != _check(found):
        raise BackupError(Code.WRONG_HASH, f"{path} was changed after it was written")
    return found


def _check(manifest: BackupManifest) -> str:
    content = msgspec.json.encode(msgspec.structs.replace(manifest, check=""))
    return hashlib.sha256(content).hexdigest()


def verify_backup(folder: Path) -> BackupManifest:
    """Read each file of a backup, and compare it with the manifest. Raises BackupError that names
    what is missing, damaged or not the backup's; OSError."""
    manifest = read_manifest(folder)
    verify_files(manifest, folder / FILES)
    return manifest


def verify_files(manifest: BackupManifest, folder: Path) -> None:
    """Compare the files below a folder with those of a backup. Raises BackupError, OSError."""
    wrong = []
    for file in manifest.files:
        path = folder / file.path
        if not path.is_file():
            wrong.append(f"{file.path} is missing")
        elif path.stat().st_size != file.size or sha256_of(path) != file.sha256:
            wrong.append(f"{file.path} is damaged")
    known = {file.path for file in manifest.files}
    wrong += [f"{path} is not the backup's" for path in files_below(folder) if path not in known]
    if wrong:
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        text = f"{folder} is not whole: {'; '.join(wrong[:5])}{more}. Take another backup"
        raise BackupError(Code.WRONG_HASH, text)


def files_below(folder: Path) -> list[str]:
    """Return the paths of all files below a folder, with ``/``, in order."""
    return sorted(
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()
    )


def sha256_of(path: Path) -> str:
    """Return a file's SHA-256 in hexadecimal. Raises OSError."""
    with path.open("rb") as file:
        return stream_digest(file)


def make_safe(folder: Path) -> None:
    """Let a folder and all below it survive a loss of power. Raises OSError."""
    for path in (*folder.rglob("*"), folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
