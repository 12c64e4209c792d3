"""Answers to HTTP requests from the files of a folder: which may be read, their types, and how long
browsers keep them.

What is served is a regular file below the folder, by a path without a dot at the beginning of any
part; a symbolic link counts as where it leads.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from io import BytesIO
from pathlib import Path
from stat import S_ISREG
from typing import BinaryIO, NamedTuple

from fleetlearn_protocol.errors import Code, FleetError

from fleetlearn_coordinator.network.http_port import RefusedError

CHUNK = 64 * 1024
"""Bytes that are read of a file, and sent, at a time."""
INDEX = "index.html"
"""The file that stands for the folder."""
TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".ico": "image/vnd.microsoft.icon",
    ".jpg": "image/jpeg",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".map": "application/json",
    ".mjs": "text/javascript; charset=utf-8",
    ".onnx": "application/octet-stream",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
    ".wasm": "application/wasm",
    ".webmanifest": "application/manifest+json",
    ".webp": "image/webp",
    ".woff2": "font/woff2",
}
"""By the end of the name; others are ``application/octet-stream``. Not the system's table, which
differs."""
HASHED = re.compile(r"[.-](?:(?=[^.]*[0-9])[0-9a-f]{8,64}|[A-Z2-7]{8})\.")
"""A hash of the content in a file's name: as hexadecimal digits, or as esbuild writes it."""
FOR_EVER = "public, max-age=31536000, immutable"
"""How long a file is kept whose name has its hash. Others are asked for again, and answered with
304 while the same."""


class FileResponse(NamedTuple):
    """What a request is answered. Close its content."""

    status: HTTPStatus
    headers: list[tuple[str, str]]
    size: int
    """Bytes of ``content``."""
    content: BinaryIO


def document(
    content: bytes, status: HTTPStatus = HTTPStatus.OK, kind: str = "application/json"
) -> FileResponse:
    """Return an answer that is made for this request, and kept by nobody."""
    headers = [
        ("Content-Type", kind),
        ("Content-Length", str(len(content))),
        ("Cache-Control", "no-store"),
    ]
    return FileResponse(status, headers, len(content), BytesIO(content))


class StaticFolder:
    """A folder whose files anybody may read."""

    def __init__(self, path: Path) -> None:
        """Raises FleetError (unknown-content) where it is no folder with an index.html."""
        self._root = path.resolve()
        if not (self._root / INDEX).is_file():
            raise FleetError(
                Code.UNKNOWN_CONTENT, f"page.folder = {path} is no folder with a file {INDEX}"
            )

    def find(self, path: tuple[str, ...], headers: Mapping[bytes, bytes]) -> FileResponse:
        """Return the file at a path, or that it is the same as before. ``headers``: the request's,
        lower case.

        Blocks while the file is opened. Raises RefusedError (not found), OSError (it cannot be
        read)."""
        *folders, name = path if path != ("",) else (INDEX,)
        file, packed = self._below([*folders, name]), self._below([*folders, f"{name}.gz"])
        if file is None:
            raise RefusedError(HTTPStatus.NOT_FOUND, "there is no such file")
        answer = [("Cache-Control", FOR_EVER if HASHED.search(name) else "no-cache")]
        # not left over from before
        if packed is not None and packed.stat().st_mtime_ns >= file.stat().st_mtime_ns:
            answer.append(("Vary", "Accept-Encoding"))
            if _takes_gzip(headers.get(b"accept-encoding", b"")):
                answer.append(("Content-Encoding", "gzip"))
                file = packed
        content = _open(file)
        found = os.fstat(content.fileno())
        tag = f'"{found.st_mtime_ns:x}-{found.st_size:x}"'
        answer.append(("ETag", tag))
        if _is_same(tag, headers.get(b"if-none-match", b"")):
            return FileResponse(HTTPStatus.NOT_MODIFIED, answer, 0, content)
        kind = TYPES.get(Path(name).suffix.lower(), "application/octet-stream")
        answer += [("Content-Type", kind), ("Content-Length", str(found.st_size))]
        return FileResponse(HTTPStatus.OK, answer, found.st_size, content)

    def _below(self, path: Iterable[str]) -> Path | None:
        """Return where a path leads, if that is in the folder, and no part of its name is
        hidden."""
        if not all(map(_is_name, path)):
            return None
        try:
            found = self._root.joinpath(*path).resolve(strict=True)
            parts = found.relative_to(self._root).parts
        except (OSError, ValueError, RuntimeError):  # not there; elsewhere; a circle of links
            return None
        return found if all(map(_is_name, parts)) else None


def _is_name(part: str) -> bool:
    return bool(part) and not part.startswith(".") and not set(part) & {"/", "\\", "\0"}


def _open(file: Path) -> BinaryIO:
    """Open a file. Raises RefusedError where it is a folder, a pipe or the like, OSError."""
    # a pipe would wait for its writer
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    if S_ISREG(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb", buffering=0)
    os.close(descriptor)
    raise RefusedError(HTTPStatus.NOT_FOUND, "there is no such file")


def _takes_gzip(accepted: bytes) -> bool:
    """Return whether Accept-Encoding has gzip, and not with the weight 0 (RFC 9110, 12.5.3)."""
    for each in accepted.decode("latin-1").lower().split(","):
        coding, _, weight = each.replace(" ", "").partition(";q=")
        if coding == "gzip":
            return not re.fullmatch(r"0(\.0*)?", weight)
    return False


def _is_same(tag: str, known: bytes) -> bool:
    """Return whether If-None-Match names the tag (RFC 9110, 13.1.2: the weak comparison)."""
    tags = {each.strip().removeprefix("W/") for each in known.decode("latin-1").split(",")}
    return tag in tags or "*" in tags
