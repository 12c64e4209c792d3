"""manifest.json: what a training bundle is. Its SHA-256 names the bundle; it holds the SHA-256 of every other file.

Names inside the graphs (all float32 unless the manifest says otherwise; the first axis of a batch is dynamic):

train.onnx   inputs  ``param.NAME``, ``anchor.NAME`` (where proximal), ``state.SLOT.NAME``, ``batch.NAME``,
                     ``hyper.NAME``
             outputs ``next.param.NAME``, ``next.state.SLOT.NAME``, ``loss``, ``metric.NAME`` (means over the batch)
eval.onnx    inputs  ``param.NAME``, ``batch.NAME``
             outputs ``loss_sum``, ``metric_sum.NAME``, ``examples``
infer.onnx   the user's input names to ``output`` names, parameters as initializers

ONNX graphs are in single-assignment form: an output cannot carry its input's name, hence ``next.``.
"""

from __future__ import annotations

from itertools import pairwise
from math import prod
from pathlib import PurePosixPath
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from fleetlearn_protocol.errors import BundleError, Code
from fleetlearn_protocol.messages import Digest, Name, Number

FORMAT = "fleetlearn.bundle"
FORMAT_VERSION = 1
MAX_MANIFEST_BYTES = 16 * 2**20
MANIFEST = "manifest.json"
TRAIN, EVAL, INFER = "graphs/train.onnx", "graphs/eval.onnx", "graphs/infer.onnx"
PARAMETERS = "parameters.safetensors"
ORT_TRAINING = ("training_model.onnx", "eval_model.onnx", "optimizer_model.onnx", "checkpoint")
"""The files below ``ort_training/``."""

TensorName = Annotated[str, Meta(min_length=1, max_length=256)]
Size = Annotated[int, Meta(ge=1, le=2**31)]
Bytes = Annotated[int, Meta(ge=0, le=2**43)]


class Parameter(msgspec.Struct, frozen=True):
    """One row of the parameter table: a tensor that travels."""

    name: TensorName
    shape: tuple[Size, ...]
    offset: Annotated[int, Meta(ge=0, le=2**31)]
    """Of its first element in the flat vector, in elements."""
    buffer: bool = False
    """Takes no gradient (BatchNorm's running statistics)."""
    infer_offset: Bytes | None = None
    """Where its raw bytes begin in infer.onnx, so that a trained model is written by replacing bytes in place."""


class Input(msgspec.Struct, frozen=True):
    """One array of a batch, or of the model's outputs; the first axis is the examples' and is not in ``shape``."""

    name: TensorName
    dtype: Literal["float32", "float64", "int64", "int32", "uint8", "bool"]
    shape: tuple[Annotated[int, Meta(ge=0, le=2**31)], ...]


class Hyper(msgspec.Struct, frozen=True):
    """A scalar float32 input of the step; ``default`` None means that the plan must give it."""

    name: Name
    default: Number | None = None


class LocalStep(msgspec.Struct, frozen=True):
    """The update rule compiled into train.onnx."""

    optimizer: Literal["sgd"]
    proximal: bool = False
    """Whether mu * (w - anchor) is added to the gradient: the penalty mu/2 * ||w - anchor||^2."""


class File(msgspec.Struct, frozen=True):
    sha256: Digest
    size: Bytes


class Manifest(msgspec.Struct, frozen=True):
    """The bundle's table of contents. ``read_manifest`` checks what types alone cannot say."""

    format: str
    version: int
    name: Annotated[str, Meta(min_length=1, max_length=100)]
    parameters: Annotated[tuple[Parameter, ...], Meta(min_length=1, max_length=100_000)]
    batch: Annotated[tuple[Input, ...], Meta(min_length=1, max_length=64)]
    outputs: Annotated[tuple[Input, ...], Meta(min_length=1, max_length=64)]
    hyper: Annotated[tuple[Hyper, ...], Meta(max_length=64)]
    step: LocalStep
    metrics: Annotated[tuple[Name, ...], Meta(max_length=64)]
    files: Annotated[dict[str, File], Meta(max_length=64)]
    """Path below the bundle's folder, with forward slashes -> hash and size."""
    slots: Annotated[tuple[Name, ...], Meta(max_length=16)] = ()
    """Optimizer state slots; each has one tensor for each parameter that is not a buffer."""
    opset: int = 0
    ir_version: int = 0
    made_by: Annotated[str, Meta(max_length=200)] = ""

    @property
    def size(self) -> int:
        """P, the elements of the flat vector."""
        return sum(prod(parameter.shape) for parameter in self.parameters)

    @property
    def has_ort_training(self) -> bool:
        return f"ort_training/{ORT_TRAINING[0]}" in self.files

    def file(self, path: str) -> File:
        """The entry of a file. Raises BundleError where the bundle has none."""
        if path not in self.files:
            raise BundleError(Code.UNKNOWN_CONTENT, f"bundle {self.name} has no {path}; it has {sorted(self.files)}")
        return self.files[path]


class _Envelope(msgspec.Struct):
    format: str
    version: int


def write_manifest(manifest: Manifest) -> bytes:
    """The manifest as the bytes of manifest.json: the same manifest gives the same bytes."""
    return msgspec.json.format(msgspec.json.encode(manifest, order="deterministic"), indent=1) + b"\n"


def read_manifest(content: bytes) -> Manifest:
    """Read and check manifest.json. Raises BundleError, naming what is wrong and what was expected."""
    if len(content) > MAX_MANIFEST_BYTES:
        raise BundleError(Code.TOO_LARGE, f"a manifest of {len(content)} bytes; the limit is {MAX_MANIFEST_BYTES}")
    try:
        envelope = msgspec.json.decode(content, type=_Envelope)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BundleError(Code.BAD_MESSAGE, f"{MANIFEST} is not a bundle's manifest: {error}") from None
    if envelope.format != FORMAT:
        raise BundleError(Code.BAD_MESSAGE, f"{MANIFEST} is of format {envelope.format!r}; expected {FORMAT!r}")
    if envelope.version != FORMAT_VERSION:
        raise BundleError(
            Code.BAD_VERSION,
            f"the bundle is of version {envelope.version}; this fleetlearn reads version {FORMAT_VERSION}. "
            + ("Update fleetlearn." if envelope.version > FORMAT_VERSION else "Export the model again."),
        )
    try:
        manifest = msgspec.json.decode(content, type=Manifest)
    except msgspec.DecodeError as error:
        raise BundleError(Code.BAD_MESSAGE, f"{MANIFEST} is damaged: {error}") from None
    for problem in _problems(manifest):
        raise BundleError(Code.BAD_MESSAGE, f"{MANIFEST} contradicts itself: {problem}")
    return manifest


def _problems(manifest: Manifest) -> list[str]:
    found = []
    for what, names in (
        ("parameter", [row.name for row in manifest.parameters]),
        ("batch array", [row.name for row in manifest.batch]),
        ("output", [row.name for row in manifest.outputs]),
        ("hyper-parameter", [row.name for row in manifest.hyper]),
        ("metric", list(manifest.metrics)),
    ):
        found += [f"{what} {name} is there twice" for name, after in pairwise(sorted(names)) if name == after]
    place = 0
    for row in manifest.parameters:
        if row.offset != place:
            found.append(f"parameter {row.name} begins at element {row.offset}; the ones before it end at {place}")
            break
        place += prod(row.shape)
    if place > 2**31:
        found.append(f"the parameters have {place} elements; the limit is {2**31}")
    for path in manifest.files:
        pure = PurePosixPath(path)
        if pure.is_absolute() or ".." in pure.parts or "\\" in path or str(pure) != path or path == MANIFEST:
            found.append(f"file path {path!r} is not a plain path below the bundle")
    found += [f"{path} is missing" for path in (TRAIN, EVAL, INFER, PARAMETERS) if path not in manifest.files]
    return found
