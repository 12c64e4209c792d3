"""The page's files, which come with the package, and the headers that they are served with."""

from __future__ import annotations

from functools import cache
from hashlib import sha256
from http import HTTPStatus
from importlib.resources import files
from pathlib import PurePosixPath

from fleetlearn_coordinator.network.admin_listener import HttpContent
from fleetlearn_coordinator.network.http_port import RefusedError
from fleetlearn_coordinator.network.static_files import INDEX, TYPES

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
"""What the page may load, and do: its own files alone, nothing inline, and no text becomes HTML
(Trusted Types, where the browser has them)."""
HEADERS = [
    ("Content-Security-Policy", POLICY),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Referrer-Policy", "no-referrer"),
    ("Permissions-Policy", "camera=(), microphone=(), geolocation=()"),
    ("Cache-Control", "no-cache"),
]


@cache
def page_files() -> dict[str, bytes]:
    """Return the page's files by name. All of them are small, and are read once."""
    folder = files("fleetlearn_coordinator.dashboard") / "page"
    return {each.name: each.read_bytes() for each in folder.iterdir() if each.is_file()}


def find_file(path: tuple[str, ...], known: str) -> HttpContent:
    """Return the page's file at a path. ``known``: the request's If-None-Match. Raises RefusedError
    where there is no such file."""
    name = INDEX if path == ("",) else path[-1] if len(path) == 2 and path[0] == "page" else ""
    content = page_files().get(name)
    if content is None:
        raise RefusedError(HTTPStatus.NOT_FOUND, f"there is no file /{'/'.join(path)}")
    tag = f'"{sha256(content).hexdigest()[:32]}"'
    headers = [*HEADERS, ("ETag", tag)]
    if tag == known:
        return HttpContent(HTTPStatus.NOT_MODIFIED, headers, b"")
    kind = TYPES[PurePosixPath(name).suffix]
    return HttpContent(HTTPStatus.OK, [*headers, ("Content-Type", kind)], content)
