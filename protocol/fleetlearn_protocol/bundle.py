"""A training bundle on disk: a directory, or the same directory as one stored (uncompressed)
zip."""

from __future__ import annotations

import hashlib
import os
import shutil
import struct
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import IO, Annotated, NamedTuple

import msgspec
import numpy as np

from fleetlearn_protocol.errors import BundleError, Code, ProtocolError, in_words
from fleetlearn_protocol.frames import Buffer
from fleetlearn_protocol.manifest import (
    INFER,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    PARAMETERS,
    PERSONAL,
    STATE,
    File,
    Manifest,
)
from fleetlearn_protocol.manifest_file import read_manifest, write_manifest
from fleetlearn_protocol.paths import in_home
from fleetlearn_protocol.vector import (
    TableRow,
    Vector,
    check_finite,
    digest,
    empty_vector,
    stream_digest,
    views,
)

NonNegative = Annotated[int, msgspec.Meta(ge=0)]


class Bundle(NamedTuple):
    """A bundle whose files were checked against the manifest."""

    path: Path
    """The directory or zip."""
    manifest: Manifest
    sha256: str
    """SHA-256 of manifest.json: the bundle's name in the protocol."""

    def read(self, file: str) -> bytes:
        """Return the checked bytes of one file of the manifest (or of manifest.json itself). Raises
        BundleError."""
        size, sha256 = self._entry(file)
        content = _read(self.path, file, size)
        self._compare(file, digest(content), sha256)
        return content

    def check(self, file: str) -> None:
        """Check the file's size and hash, without holding its bytes in memory. Raises
        BundleError."""
        size, sha256 = self._entry(file)
        with _opened(self.path, file, size) as (stream, _):
            found = stream_digest(stream)
        self._compare(file, found, sha256)

    def _entry(self, file: str) -> tuple[int | None, str]:
        """Return the file's size (None for the manifest itself) and SHA-256. Raises BundleError."""
        if file == MANIFEST:
            return None, self.sha256
        entry = self.manifest.file(file)
        return entry.size, entry.sha256

    def _compare(self, file: str, found: str, sha256: str) -> None:
        if found != sha256:
            raise BundleError(
                Code.WRONG_HASH,
                f"{self.path}: {file} was changed: it has another SHA-256 than it had",
            )

    def parameters(self) -> Vector:
        """Return the initial model, float32, shape (local_size,): the P elements that travel, then
        the personal ones. Raises BundleError."""
        return self._vector(PARAMETERS, self.manifest.parameters)

    def personal_parameters(self) -> Vector:
        """Return the initial values of the personal parameters alone, float32, shape (local_size -
        P,). Raises BundleError."""
        size = self.manifest.size
        if PERSONAL not in self.manifest.files:
            return self.parameters()[size:]
        personal = [row for row in self.manifest.parameters if row.personal]
        table = [msgspec.structs.replace(row, offset=row.offset - size) for row in personal]
        return self._vector(PERSONAL, table)

    def state(self) -> Vector:
        """Return the initial state, float32, shape (state_size,). Raises BundleError."""
        if STATE not in self.manifest.files:
            return np.zeros(self.manifest.state_size, np.float32)
        return self._vector(STATE, self.manifest.state)

    def _vector(self, file: str, table: Sequence[TableRow]) -> Vector:
        size, sha256 = self._entry(file)
        hashed = hashlib.sha256()
        with _opened(self.path, file, size) as (stream, length):
            try:
                vector = _read_tensors(stream, length, table, hashed.update)
            except ValueError as error:
                self.check(file)  # a file that was changed is said to be that
                raise BundleError(
                    Code.BAD_MESSAGE, f"{self.path}: {file} does not fit: {error}"
                ) from None
        self._compare(file, hashed.hexdigest(), sha256)
        try:
            check_finite(vector)
        except ProtocolError as error:
            raise BundleError(error.code, f"{self.path}: {file}: {error.text}") from None
        return vector


class _Tensor(msgspec.Struct):
    """A tensor's entry in the header of a safetensors file."""

    dtype: str
    shape: tuple[NonNegative, ...]
    data_offsets: tuple[NonNegative, NonNegative]
    """Where its bytes begin and end, behind the header."""


def _read_tensors(
    stream: IO[bytes], length: int, table: Sequence[TableRow], hashed: Callable[[Buffer], object]
) -> Vector:
    """Read a safetensors file of float32 tensors into one vector, each to the place that the table
    has for it.

    length: the file's. hashed: gets all bytes. Raises ValueError. The file's bytes beside the
    vector, and the library's two copies of each tensor, took three times the parameters' bytes
    more.
    """

    def read(count: int) -> bytes:
        content = stream.read(count)
        hashed(content)
        return content

    # safetensors: the header's length as a little-endian u64, the header as JSON, the tensors'
    # bytes.
    start = 8 + int.from_bytes(read(8), "little")
    if length < start:
        raise ValueError(f"it has {length} bytes, and its header alone {start}")
    header = msgspec.json.decode(read(start - 8), type=dict[str, msgspec.Raw])
    header.pop("__metadata__", None)
    tensors = {}
    for name, raw in header.items():
        row = tensors[name] = msgspec.json.decode(raw, type=_Tensor)
        if row.dtype != "F32":
            raise ValueError(f"tensor {name} is of {row.dtype}; expected F32, float32")
        begin, end = row.data_offsets
        if not begin <= end <= length - start or end - begin != 4 * prod(row.shape):
            raise ValueError(
                f"tensor {name} of shape {row.shape} is said to be at bytes {begin} to {end}"
            )
    vector = empty_vector({name: tensor.shape for name, tensor in tensors.items()}, table)
    places, place = views(vector, table), 0
    # The format allows no gaps and no overlaps: there is one file for the same tensors.
    for name, row in sorted(tensors.items(), key=lambda pair: pair[1].data_offsets):
        if row.data_offsets[0] != place:
            raise ValueError(
                f"tensor {name} begins at byte {row.data_offsets[0]}, where {place} is the next"
            )
        content = places[name].reshape(-1).view(np.uint8).data
        stream.readinto(content)  # type: ignore[attr-defined]  # files, and members of a zip, have it
        hashed(content)
        place = row.data_offsets[1]
    if place != length - start:
        raise ValueError(f"its {length - start} bytes behind the header are not its tensors' bytes")
    return vector


def open_bundle(path: str | os.PathLike[str], *, files: Iterable[str] | None = None) -> Bundle:
    """Open a bundle and check its files (all of them, or those named) against the manifest's sizes
    and hashes.

    Raises BundleError: no such path, not a bundle, newer format, missing, truncated or changed
    file.
    """
    try:
        path = in_home(path)
    except ValueError as error:
        raise BundleError(Code.UNKNOWN_CONTENT, str(error)) from None
    content = _read(path, MANIFEST, None)
    try:
        bundle = Bundle(path, read_manifest(content), digest(content))
    except BundleError as error:
        raise BundleError(error.code, f"{path}: {error.text}") from None
    for file in bundle.manifest.files if files is None else files:
        bundle.check(file)
    return bundle


def write_bundle(folder: Path, manifest: Manifest, contents: Mapping[str, bytes | Path]) -> Path:
    """Write a bundle's files (path below the bundle -> bytes, or a file that is moved there) and
    its manifest into ``folder``, which is returned.

    The manifest's table of files is made from ``contents``. Nothing is checked: ``open_bundle``
    does that.
    """
    table = {path: _entry(content) for path, content in contents.items()}
    made = write_manifest(msgspec.structs.replace(manifest, files=table))
    for path, content in {**contents, MANIFEST: made}.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, Path):
            shutil.move(content, folder / path)
        else:
            (folder / path).write_bytes(content)
    return folder


def _entry(content: bytes | Path) -> File:
    if isinstance(content, bytes):
        return File(digest(content), len(content))
    with content.open("rb") as stream:
        return File(stream_digest(stream), content.stat().st_size)


def pack_bundle(path: str | os.PathLike[str], target: str | os.PathLike[str]) -> Path:
    """Write the bundle at ``path`` as one stored zip, the same bytes each time. Returns ``target``.

    ``target`` appears whole or not at all, and may be ``path``. Raises BundleError, OSError.
    """
    bundle, target = open_bundle(path, files=()), Path(target)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as folder:
        packed = Path(folder, "packed")
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_STORED) as archive:
            for file in (MANIFEST, *sorted(bundle.manifest.files)):
                # Its date is 1980 unless another is given: the same bundle makes the same bytes.
                entry = zipfile.ZipInfo(file)
                # on every system as on Unix
                entry.create_system, entry.external_attr = 3, 0o100644 << 16
                archive.writestr(entry, bundle.read(file))
        packed.replace(target)
    return target


def inference_files(manifest: Manifest) -> tuple[str, ...]:
    """Return the bundle's files that ``write_inference_model`` reads, beside the manifest."""
    return (INFER,) if manifest.has_graphs else ()


def write_inference_model(bundle: Bundle, vector: Vector) -> bytes:
    """Return infer.onnx with ``vector`` as its parameters: a file that any ONNX Runtime runs. Of a
    bundle with a computation, ``vector`` is the state, and the file what predicts by it.

    ``vector`` is float32. With shape (P,) personal parameters keep their initial values; with shape
    (local_size,) it is a device's whole model.

    Raises ValueError on another shape or dtype, ProtocolError (not-finite), BundleError.
    """
    manifest = bundle.manifest
    sizes = sorted({manifest.size, manifest.local_size})
    if vector.ndim != 1 or vector.size not in sizes or vector.dtype != np.float32:
        expected = " or ".join(f"({size},)" for size in sizes)
        raise ValueError(
            f"a {vector.dtype} vector of shape {vector.shape}; expected float32 {expected}"
        )
    check_finite(vector)
    if manifest.computation is not msgspec.UNSET:
        return _computed_model(manifest, vector)
    if manifest.public is not msgspec.UNSET:
        raise BundleError(
            Code.UNKNOWN_CONTENT,
            f"bundle {manifest.name} has public examples and no model: each device has a model of "
            "its own, which it keeps",
        )
    content = bytearray(bundle.read(INFER))
    for parameter in manifest.parameters:
        if parameter.infer_offset is not None and parameter.offset < vector.size:
            raw = vector[parameter.offset : parameter.offset + prod(parameter.shape)].tobytes()
            content[parameter.infer_offset : parameter.infer_offset + len(raw)] = raw
    return bytes(content)


def _computed_model(manifest: Manifest, state: Vector) -> bytes:
    # What computations are is imported where a bundle has one.
    from fleetlearn_protocol.computations.kinds import KINDS
    from fleetlearn_protocol.computations.settings import kind_of

    assert manifest.computation is not msgspec.UNSET
    name = kind_of(manifest.computation)
    infer = KINDS[name].infer
    if infer is None:
        raise BundleError(
            Code.UNKNOWN_CONTENT,
            f"bundle {manifest.name} computes {name}, which predicts nothing: there is no model "
            "to write",
        )
    return infer(manifest.computation, state)


def _read(path: Path, file: str, size: int | None) -> bytes:
    """Return the file's bytes. ``size`` is their expected number; None: at most
    MAX_MANIFEST_BYTES."""
    with _opened(path, file, size) as (stream, found):
        return stream.read(found)


@contextmanager
def _opened(path: Path, file: str, size: int | None) -> Iterator[tuple[IO[bytes], int]]:
    """Open a file of the bundle. Yields a stream and the file's length, which is checked before
    anything is read.

    Raises BundleError, also for what reading the stream raises.
    """
    try:
        if path.is_dir():
            if not (path / file).is_file():  # a pipe or a device would block, or never end
                raise FileNotFoundError
            with (path / file).open("rb") as stream:
                yield stream, _checked_size(path, file, os.fstat(stream.fileno()).st_size, size)
            return
        if not path.is_file():
            raise FileNotFoundError
        with zipfile.ZipFile(path) as archive:
            entry = archive.getinfo(file)
            # A compressed member could become any size when it is read.
            if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
                raise BundleError(
                    Code.BAD_MESSAGE,
                    f"{path}: {file} is compressed or encrypted; a bundle's zip is stored "
                    "(pack_bundle writes it)",
                )
            if entry.compress_size != entry.file_size or entry.file_size > path.stat().st_size:
                raise zipfile.BadZipFile(f"{file} claims {entry.file_size} bytes")
            with archive.open(entry) as stream:
                yield stream, _checked_size(path, file, entry.file_size, size)
    except (FileNotFoundError, KeyError):
        what = (
            f"{path} has no {file}: not a bundle, or damaged"
            if path.exists()
            else f"{path} does not exist"
        )
        raise BundleError(Code.UNKNOWN_CONTENT, what) from None
    except OSError as error:
        raise BundleError(
            Code.BAD_MESSAGE, f"{path}: {file} cannot be read: {in_words(error)}"
        ) from None
    except (zipfile.BadZipFile, NotImplementedError, EOFError, ValueError, struct.error) as error:
        raise BundleError(
            Code.BAD_MESSAGE,
            f"{path} is damaged, or neither a bundle's folder nor its zip: {error}",
        ) from None


def _checked_size(path: Path, file: str, size: int, expected: int | None) -> int:
    if expected is None and size > MAX_MANIFEST_BYTES:
        raise BundleError(
            Code.TOO_LARGE, f"{path}: {file} has {size} bytes; the limit is {MAX_MANIFEST_BYTES}"
        )
    if expected is not None and size != expected:
        raise BundleError(
            Code.WRONG_LENGTH, f"{path}: {file} has {size} bytes; the manifest says {expected}"
        )
    return size
