"""``cached_export``: ``export_bundle`` for tests that need a bundle and are not about exporting it.

Exported bundles are kept in ``.test-cache/`` at the root of the repository (``make clean`` removes
it), for other files of tests, for other processes of one run, and for later runs. A bundle is found
again by what it was made from: the source of export/ and protocol/, the versions of the libraries,
and all arguments (``fingerprint``).
"""

from __future__ import annotations

import hashlib
import inspect
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import fleetlearn_export
import fleetlearn_protocol
import msgspec
import torch
from filelock import FileLock, Timeout
from fleetlearn_export import Exported
from fleetlearn_protocol import open_bundle
from torch import nn

ROOT = Path(__file__).parents[2]
DISTRIBUTIONS = (
    "fleetlearn",
    "torch",
    "onnx",
    "onnxscript",
    "onnxruntime",
    "onnxruntime-training-cpu",
    "numpy",
)
LIMIT = 256 * 2**20
"""Bytes of all kept bundles together."""
UNFINISHED = ".part"


def cached_export(*arguments: Any, **options: Any) -> Exported:
    """Take ``export_bundle``'s arguments and return the same; export only what no test has exported
    before."""
    return BundleCache(ROOT / ".test-cache" / "bundles").export(*arguments, **options)


class BundleCache:
    """Bundles in a folder, each under its key. Any number of processes may use the folder at the
    same time.

    exporter: called for what is not in the folder; ``export_bundle`` unless given.
    limit: bytes of all bundles together. Beyond it those that were not used for the longest time
    are removed.
    """

    def __init__(
        self, folder: Path, exporter: Callable[..., Exported] | None = None, limit: int = LIMIT
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.limit = folder, limit
        self.exporter = exporter or fleetlearn_export.export_bundle

    def export(
        self, model: nn.Module, loss: Any, example: Any, path: str | Path, **options: Any
    ) -> Exported:
        path = Path(path)
        options = dict(sorted({"name": path.stem, **options}.items()))
        key = hashlib.sha256(
            "\n".join(fingerprint([made_with(), model, loss, example, options])).encode()
        ).hexdigest()
        entry = self.folder / key
        with self._lock(key):  # a second process waits for the first instead of exporting too
            if not entry.exists():
                draft = self.folder / (key + UNFINISHED)
                shutil.rmtree(draft, ignore_errors=True)  # a process that exported was killed
                draft.mkdir()
                made = self.exporter(model, loss, example, draft / "bundle", **options)
                (draft / "exported.json").write_text(json.dumps({**made._asdict(), "bundle": None}))
                draft.rename(entry)
            entry.touch()
            shutil.copytree(entry / "bundle", path, dirs_exist_ok=True)
            found = json.loads((entry / "exported.json").read_text())
        self._remove_oldest()
        found["without_gradient"] = tuple(found["without_gradient"])
        return Exported(**{**found, "bundle": open_bundle(path.resolve())})

    def _lock(self, key: str) -> FileLock:
        """Return the lock of an entry. 256 files serve all entries, so that their number is
        bounded."""
        return FileLock(self.folder / f"{key[:2]}.lock")

    def _remove_oldest(self) -> None:
        entries = [
            row for row in self.folder.iterdir() if row.is_dir() and row.suffix != UNFINISHED
        ]
        used, total = {}, 0
        for entry in entries:
            with suppress(FileNotFoundError):  # another process removed it
                used[entry] = entry.stat().st_mtime_ns
        for entry in sorted(used, key=lambda row: used[row], reverse=True):
            total += sum(file.stat().st_size for file in entry.rglob("*") if file.is_file())
            if total > self.limit:
                # not one that is being copied
                with suppress(Timeout), self._lock(entry.name).acquire(timeout=0):
                    shutil.rmtree(entry, ignore_errors=True)


@cache
def made_with() -> tuple[str, ...]:
    """Return what every bundle depends on: versions, and the source of the two packages."""
    found = [sys.version]
    for name in DISTRIBUTIONS:
        with suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    for package in (fleetlearn_export, fleetlearn_protocol):
        folder = Path(inspect.getfile(package)).parent
        files = sorted(folder.rglob("*.py"))
        found += (
            f"{file.relative_to(folder)} {hashlib.sha256(file.read_bytes()).hexdigest()}"
            for file in files
        )
    return tuple(found)


def fingerprint(value: object, seen: dict[int, tuple[int, object]] | None = None) -> Iterator[str]:
    """Yield lines that are the same for two values only if the same bundle is exported from them.

    A function, and a module's class, count with the whole file that defines them; PyTorch's with
    their names. An object that occurs twice is told from two equal ones: tied weights are one
    parameter. Raises TypeError on other values.
    """
    seen = {} if seen is None else seen
    if value is None or isinstance(value, str | int | float | bytes | msgspec.Struct):
        yield repr(value)
        return
    if id(value) in seen:
        yield f"again {seen[id(value)][0]}"
        return
    seen[id(value)] = len(seen), value  # the value is kept, so that no other one gets its id
    yield type(value).__qualname__
    if isinstance(value, torch.Tensor):
        array = value.detach().cpu().contiguous()
        content = hashlib.sha256(array.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        yield f"{value.dtype} {tuple(value.shape)} {value.requires_grad} {content}"
    elif isinstance(value, nn.Module):
        yield from _defined_by(type(value), inspect.getfile(type(value)))
        yield from fingerprint(vars(value), seen)
    elif isinstance(value, Mapping):
        for key, row in value.items():
            yield from fingerprint(key, seen)
            yield from fingerprint(row, seen)
    elif isinstance(value, list | tuple):
        for row in value:
            yield from fingerprint(row, seen)
    elif isinstance(value, set | frozenset):
        yield from fingerprint(sorted(value), seen)
    elif inspect.isfunction(value):
        code = value.__code__
        yield from _defined_by(value, code.co_filename)
        yield f"{code.co_firstlineno} {code.co_code.hex()}"
        yield from fingerprint([value.__defaults__, value.__kwdefaults__], seen)
        yield from fingerprint([cell.cell_contents for cell in value.__closure__ or ()], seen)
    elif inspect.isbuiltin(value):
        yield from _defined_by(value, torch.__file__)
    else:
        raise TypeError(
            f"{value!r} was given; from a {type(value).__name__} no key of a cached bundle can be "
            "made"
        )


def _defined_by(thing: Any, file: str) -> Iterator[str]:
    yield f"{thing.__module__}.{thing.__qualname__}"
    if not Path(file).is_relative_to(Path(torch.__file__).parent):
        yield hashlib.sha256(Path(file).read_bytes()).hexdigest()
