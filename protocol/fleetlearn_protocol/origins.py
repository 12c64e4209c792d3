"""Where own algorithms come from: the version of their package, and the source that they use."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import msgspec

from fleetlearn_protocol import extensions
from fleetlearn_protocol.extensions import ExtensionPoint
from fleetlearn_protocol.source_files import source_files


class Origin(NamedTuple):
    """Where an extension comes from. A run remembers it, and says when it has changed."""

    name: str
    """As it was named."""
    version: str
    """Of the distribution that has its module; empty where no installed distribution has it."""
    source: str
    """The first 16 hexadecimal digits of a SHA-256: of the one file that it is in, or, where there
    are more, of a line for each, ``SHA-256  module``, in the order of the modules' names. Empty: it
    has no file."""

    def __str__(self) -> str:
        return " ".join([self.name, *filter(None, [self.version, self.source])])


def origin(point: ExtensionPoint[Any], name: str, where: str) -> Origin:
    """Return where the extension comes from, which imports its module. ``where`` is for errors.
    Raises ExtensionError."""
    return origin_of(used_files(point, name, where), point, name, where)


def origin_of(
    files: Mapping[str, Path], point: ExtensionPoint[Any], name: str, where: str
) -> Origin:
    """Return the same of an extension whose ``used_files`` are known."""
    home = _file(extensions.home(extensions.find(point, name, where)))
    return Origin(name, "" if home is None else _version(home), _digest(files))


def used_files(point: ExtensionPoint[Any], name: str, where: str) -> dict[str, Path]:
    """Return the files that the extension's code is in: module -> file. ``where`` is for errors.
    Raises ExtensionError.

    They are those of the module that is named and of the one that defines the function, and of
    what these import of the same top-level package, or from a folder that ``allow`` was given.
    """
    factory = extensions.find(point, name, where)
    known = dict[str, Path]()
    for module in (extensions.module_of(point, name), extensions.home(factory)):
        if module is not None and (file := _file(module)) is not None:
            known[module] = file
    return source_files(known, known, extensions.folders())


def _file(module: str) -> Path | None:
    name = getattr(sys.modules.get(module), "__file__", None)
    return None if name is None else Path(name).absolute()


def _digest(files: Mapping[str, Path]) -> str:
    rows = []
    for module, file in sorted(files.items()):
        try:
            state = file.stat()
            rows.append(f"{_digest_of(file, state.st_mtime_ns, state.st_size)}  {module}")
        except OSError:  # gone since it was imported
            rows.append(f"absent  {module}")
    if len(rows) < 2:
        return rows[0][:16] if rows else ""
    return hashlib.sha256("".join(f"{row}\n" for row in rows).encode()).hexdigest()[:16]


@lru_cache(maxsize=1024)
def _digest_of(file: Path, modified: int, size: int) -> str:
    """Return a file's SHA-256, which is read once for all that use it."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _version(file: Path) -> str:
    """Return the version of the installed distribution that has a module's file; empty: none."""
    edited = []
    for each in metadata.distributions():
        root = Path(str(each.locate_file(""))).absolute()  # a folder, or an archive
        if file.is_relative_to(root):
            relative = file.relative_to(root).as_posix()
            # The text is searched, since reading all lists of files as such takes half a second.
            record = each.read_text("RECORD")
            if record is not None and f"\n{relative}," in f"\n{record}":
                return each.version
            top = (each.read_text("top_level.txt") or "").split() if record is None else []
            if relative.partition("/")[0].partition(".")[0] in top:
                return each.version
        if (folder := _edited(each.read_text("direct_url.json"))) and file.is_relative_to(folder):
            edited.append((len(folder.parts), each.version))
    return max(edited)[1] if edited else ""


class _DirectUrl(msgspec.Struct):
    """What pip writes of a package that it installed from a folder (PEP 610)."""

    url: str = ""
    dir_info: dict[str, Any] = {}


def _edited(text: str | None) -> Path | None:
    """Return the folder that a distribution is used in place from; None: from none."""
    try:
        found = msgspec.json.decode(text or "{}", type=_DirectUrl)
    except msgspec.DecodeError:
        return None
    if not found.dir_info.get("editable") or not found.url.startswith("file:"):
        return None
    return Path(unquote(urlsplit(found.url).path))
