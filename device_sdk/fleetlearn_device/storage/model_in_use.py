"""predict/: the shared model that the device uses, for predictions in any process, without a
network.

::

    current.json         which model it is; replaced whenever the device takes a newer one
    SHA                  the model's vector, as it was sent
    bundle-SHA/          manifest.json of its bundle, and infer.onnx, if it has graphs

The files of a model are there before current.json names it, and those of the model before go
afterwards. So a process that finds a file missing reads current.json again.
"""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import msgspec
from fleetlearn_protocol.bundle import Bundle, inference_files, open_bundle
from fleetlearn_protocol.encodings import find_encoding
from fleetlearn_protocol.errors import BundleError
from fleetlearn_protocol.frames import Buffer
from fleetlearn_protocol.manifest import MANIFEST
from fleetlearn_protocol.messages import Digest, Identifier
from fleetlearn_protocol.vector import Vector, digest

from fleetlearn_device.storage.checked_json import checked_json, read_checked_json
from fleetlearn_device.storage.errors import StateError, os_errors_as_state_errors
from fleetlearn_device.storage.files import write_durably

FOLDER, FILE = "predict", "current.json"
TRIES = 5
"""How often a process reads current.json again, since the device replaced the model meanwhile."""

log = logging.getLogger("fleetlearn.device")


class ModelInUse(msgspec.Struct, frozen=True):
    """The contents of current.json."""

    bundle: Digest
    """SHA-256 of the bundle's manifest."""
    name: str
    """The bundle's name."""
    model: Digest
    """SHA-256 of the vector's bytes."""
    encoding: Identifier
    """The vector's."""
    since: float
    """When the device took it, in seconds since 1970."""
    loss: float | None = None
    """Its mean loss on the local hold-out, where the device has one."""


class NoModelError(StateError):
    """There is no model to predict with yet."""


class ModelsInUse:
    """The folder predict/ of the state directory ``path``, as the device that owns it writes it.
    Each method raises StateError."""

    def __init__(self, path: Path) -> None:
        self._path = path / FOLDER

    def current(self) -> ModelInUse | None:
        """Return the model in use; None where there is none, or it is damaged, which is said."""
        found = self._read()
        return None if found is None else found[0]

    def vector(self) -> Vector | None:
        """Return the vector of the model in use, float32, shape (P,); None as above."""
        found = self._read()
        return None if found is None else found[1]

    def _read(self) -> tuple[ModelInUse, Vector] | None:
        with os_errors_as_state_errors(self._path):
            if not (self._path / FILE).exists():
                return None
            try:
                model, _, vector = _read_once(self._path)
            except (OSError, BundleError, msgspec.DecodeError, ValueError) as error:
                log.warning(
                    "the model for predictions in %s is damaged (%s); the next one takes its place",
                    self._path,
                    error,
                )
                return None
            return model, vector

    def take(self, model: ModelInUse, content: Buffer, bundle: Bundle) -> None:
        """Make this the model in use. ``content``: the vector's bytes. Raises BundleError where
        infer.onnx is damaged."""
        with os_errors_as_state_errors(self._path):
            self._path.mkdir(exist_ok=True)
            folder = self._path / f"bundle-{model.bundle}"
            if not _is_whole(folder):
                self._copy(bundle, folder)
            if not (self._path / model.model).exists():
                write_durably(self._path / model.model, content)
            write_durably(self._path / FILE, checked_json(model))
            for path in self._path.iterdir():
                if path.name not in (FILE, model.model, folder.name):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _copy(self, bundle: Bundle, folder: Path) -> None:
        """Make the folder of a bundle appear whole. Links take no room on the disk."""
        draft = folder.with_name(f"{folder.name}.tmp")
        shutil.rmtree(draft, ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)
        draft.mkdir()
        (draft / MANIFEST).write_bytes(bundle.read(MANIFEST))
        for file in inference_files(bundle.manifest):
            bundle.check(file)
            (draft / file).parent.mkdir(parents=True)
            try:
                os.link(bundle.path / file, draft / file)
            except OSError:  # a file system without links, such as FAT
                shutil.copyfile(bundle.path / file, draft / file)
        draft.replace(folder)


def version_of(folder: Path) -> tuple[int, int] | None:
    """Return what changes when the device of this state directory takes another model. None: there
    is no model."""
    return stamp_of(folder / FOLDER / FILE)


def stamp_of(path: Path) -> tuple[int, int] | None:
    """Return what changes when a file is replaced by another. None: there is no file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def read_model(folder: Path) -> tuple[ModelInUse, Bundle, Vector]:
    """Return the model in use of a state directory, its bundle with what predictions read alone,
    and its vector: float32, shape (P,). The directory may be in use.

    Raises NoModelError, StateError (damaged).
    """
    path = folder / FOLDER
    for left in reversed(range(TRIES)):
        try:
            with os_errors_as_state_errors(path):
                return _read_once(path)
        except (BundleError, msgspec.DecodeError, ValueError, StateError) as error:
            with os_errors_as_state_errors(path):
                found = (path / FILE).exists()
            if not found:
                raise NoModelError(
                    f"{folder} has no model for predictions: a device that runs with --keep-model "
                    "keeps one as soon as a model came"
                ) from None
            if not left:
                raise StateError(
                    f"{path} is damaged ({error}): delete it, and the device keeps the next model "
                    "that comes"
                ) from None
    raise AssertionError


def _read_once(path: Path) -> tuple[ModelInUse, Bundle, Vector]:
    model = read_checked_json((path / FILE).read_bytes(), ModelInUse)
    bundle = _open(path / f"bundle-{model.bundle}")
    if bundle.sha256 != model.bundle:
        raise ValueError(f"{bundle.path} has another manifest than its name says")
    content = (path / model.model).read_bytes()
    if digest(content) != model.model:
        raise ValueError(f"{path / model.model} has another SHA-256 than its name")
    return model, bundle, find_encoding(model.encoding).decode(content)


def _is_whole(folder: Path) -> bool:
    try:
        _open(folder)
    except BundleError:
        return False
    return True


def _open(folder: Path) -> Bundle:
    """Open a bundle's folder and check what predictions read of it. Raises BundleError."""
    bundle = open_bundle(folder, files=())
    for file in inference_files(bundle.manifest):
        bundle.check(file)
    return bundle
