"""Reading a training bundle from disk: a directory, or the same directory as one stored (uncompressed) zip."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple
from zlib import error as zlib_error

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as load_safetensors

from fleetlearn_protocol.errors import BundleError, Code
from fleetlearn_protocol.manifest import (
    INFER,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    PARAMETERS,
    Manifest,
    read_manifest,
)
from fleetlearn_protocol.vector import Vector, check_finite, digest, flatten


class Bundle(NamedTuple):
    """A bundle whose files were checked against the manifest."""

    path: Path
    """The directory or zip."""
    manifest: Manifest
    sha256: str
    """Of manifest.json: the bundle's name in the protocol."""

    def read(self, file: str) -> bytes:
        """The bytes of one file of the manifest (or manifest.json itself), checked. Raises BundleError."""
        if file == MANIFEST:
            return _read(self.path, file)
        entry = self.manifest.file(file)
        content = _read(self.path, file)
        if len(content) != entry.size:
            raise BundleError(
                Code.WRONG_LENGTH,
                f"{self.path}: {file} has {len(content)} bytes; the manifest says {entry.size}",
            )
        if digest(content) != entry.sha256:
            raise BundleError(Code.WRONG_HASH, f"{self.path}: {file} was changed: its SHA-256 is not the manifest's")
        return content

    def parameters(self) -> Vector:
        """The initial global model, float32, shape (P,). Raises BundleError."""
        try:
            return flatten(load_safetensors(self.read(PARAMETERS)), self.manifest.parameters)
        except (SafetensorError, ValueError) as error:
            raise BundleError(Code.BAD_MESSAGE, f"{self.path}: {PARAMETERS} does not fit: {error}") from None


def open_bundle(path: str | os.PathLike[str], *, files: Iterable[str] | None = None) -> Bundle:
    """Open a bundle and check its files (all of them, or those named) against the manifest's sizes and hashes.

    Raises BundleError: no such path, not a bundle, newer format, missing, truncated or changed file.
    """
    path = Path(path).expanduser()
    content = _read(path, MANIFEST)
    if len(content) > MAX_MANIFEST_BYTES:
        raise BundleError(Code.TOO_LARGE, f"{path}: {MANIFEST} has {len(content)} bytes; limit {MAX_MANIFEST_BYTES}")
    try:
        bundle = Bundle(path, read_manifest(content), digest(content))
    except BundleError as error:
        raise BundleError(error.code, f"{path}: {error.text}") from None
    for file in bundle.manifest.files if files is None else files:
        bundle.read(file)
    return bundle


def pack_bundle(path: str | os.PathLike[str], target: str | os.PathLike[str]) -> Path:
    """Write the bundle at ``path`` as one stored zip, the same bytes each time. Returns ``target``."""
    bundle = open_bundle(path)
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as archive:
        for file in (MANIFEST, *sorted(bundle.manifest.files)):
            archive.writestr(zipfile.ZipInfo(file), bundle.read(file))
    return Path(target)


def write_inference_model(bundle: Bundle, vector: Vector) -> bytes:
    """infer.onnx with ``vector`` (float32, shape (P,)) as its parameters: a file that any ONNX Runtime runs.

    Raises ValueError on another shape or dtype, ProtocolError (not-finite), BundleError.
    """
    manifest = bundle.manifest
    if vector.shape != (manifest.size,) or vector.dtype != np.float32:
        raise ValueError(f"a {vector.dtype} vector of shape {vector.shape}; expected float32 ({manifest.size},)")
    check_finite(vector)
    content = bytearray(bundle.read(INFER))
    for row in manifest.parameters:
        if row.infer_offset is None:
            continue
        raw = vector[row.offset : row.offset + int(np.prod(row.shape))].tobytes()
        if row.infer_offset + len(raw) > len(content):
            raise BundleError(Code.WRONG_LENGTH, f"parameter {row.name} would end behind the end of {INFER}")
        content[row.infer_offset : row.infer_offset + len(raw)] = raw
    return bytes(content)


def _read(path: Path, file: str) -> bytes:
    try:
        if path.is_dir():
            return (path / file).read_bytes()
        with zipfile.ZipFile(path) as archive:
            return archive.read(file)
    except (FileNotFoundError, KeyError, NotADirectoryError):
        what = f"{path} does not exist" if not path.exists() else f"{path} has no {file}: not a bundle, or damaged"
        raise BundleError(Code.UNKNOWN_CONTENT, what) from None
    except (zipfile.BadZipFile, zlib_error, NotImplementedError) as error:
        raise BundleError(Code.BAD_MESSAGE, f"{path} is neither a bundle's folder nor its zip: {error}") from None
