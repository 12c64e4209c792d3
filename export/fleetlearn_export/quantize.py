"""Quantisation of a trained model's weights and activations to 8 bits by ONNX Runtime, and what it
costs.

Post-training quantisation as in Jacob et al. 2018, "Quantization and Training of Neural Networks
for Efficient Integer-Arithmetic-Only Inference" (arXiv 1712.05877): ranges of the activations are
measured on examples. The graph is standard ONNX (QuantizeLinear and DequantizeLinear around the
operators, opset 18), which ONNX Runtime fuses.
"""

from __future__ import annotations

import importlib
import logging
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime
from fleetlearn_protocol import open_bundle
from fleetlearn_protocol.errors import in_words
from fleetlearn_protocol.manifest import INFER
from fleetlearn_protocol.npz import NpzError, read_npz
from numpy.typing import NDArray
from onnx import helper

from fleetlearn_export.errors import ExportError
from fleetlearn_export.model.source_locations import as_export_error
from fleetlearn_export.silence import silenced_python

WITH_WEIGHTS = ("Conv", "ConvTranspose", "Gemm", "MatMul", "Gather")
"""Operators whose weights are quantised to 8 bits; a Gather's weights are an embedding's table."""
RANGE_KEEPING = (
    "AveragePool",
    "Clip",
    "MaxPool",
    "Relu",
    "Reshape",
    "Squeeze",
    "Transpose",
    "Unsqueeze",
)
"""Operators that keep the range of their input, so that it stays int8 through them. Sums are not
among them: what a residual connection adds up over many layers keeps its precision."""
CALIBRATION = 512
"""The number of examples, drawn with a fixed seed, on which the ranges of activations are
measured."""
BATCH = 64

Array = NDArray[Any]
Arrays = Mapping[str, Array]


class Score(NamedTuple):
    """How well an output agrees with the targets of the set."""

    name: str
    """``accuracy`` (share of examples whose largest output is the label's) or
    ``mean squared error``."""
    before: float
    after: float


class Quantized(NamedTuple):
    """An int8 model, and how it differs from the given model over the whole set."""

    content: bytes
    """The ONNX file."""
    size_before: int
    """Bytes of the given file."""
    operators: dict[str, int]
    """Type of operator -> how many of them have 8-bit weights now."""
    elements: tuple[int, int]
    """Elements of weights that have 8 bits now; elements of all constant float32 tensors of the
    given model."""
    largest: float
    """Largest difference of an element of an output."""
    mean: float
    """Mean absolute difference of the outputs' elements."""
    magnitude: float
    """Largest absolute value of the given model's outputs, to compare with."""
    scores: dict[str, Score]
    """By output; empty if the set has no targets that fit."""
    examples: int
    """How many examples the set has."""


def read_model(path: str | PathLike[str]) -> tuple[bytes, list[str] | None]:
    """Read a bundle's infer.onnx (a folder or zip) and the names of its targets; or an ONNX file,
    and None.

    Raises BundleError, and ExportError if the file cannot be read.
    """
    path = Path(path)
    if path.is_dir() or zipfile.is_zipfile(path):
        bundle = open_bundle(path)
        content = bundle.read(INFER)
        inputs = {input_.name for input_ in _model(content, str(path)).graph.input}
        return content, [array.name for array in bundle.manifest.batch if array.name not in inputs]
    try:
        return path.read_bytes(), None
    except OSError as error:
        raise ExportError(f"{path} cannot be read: {in_words(error)}") from None


def read_data(path: str | PathLike[str]) -> dict[str, Array]:
    """Read the arrays of an .npz file. Raises ExportError."""
    try:
        return read_npz(path)
    except NpzError as error:
        raise ExportError(str(error)) from None


def quantize(content: bytes, data: Arrays, targets: Sequence[str] | None = None) -> Quantized:
    """Make an int8 model of an infer.onnx, and compare the two on a set.

    content: the ONNX file. Its parameters are float32 initializers; the first axis of inputs and
        outputs is the examples'.
    data: arrays named as the model's inputs, and the targets. All have the same number of rows.
    targets: names in ``data`` of the outputs' targets, in the outputs' order. Unless given: the
        arrays that are no inputs, if there are as many as outputs, else ``y`` if there is one
        output.

    Weights are int8 with a scale for each channel. They use 7 bits, so that products do not
    overflow the 16 bits in which x86 processors without VNNI add them up. Activations are uint8
    with one scale, from their least to their greatest value on up to 512 examples of the set.

    Raises ExportError if ``content`` is not an ONNX model, if the set does not fit it, or if
    nothing can be quantised.
    """
    model = _model(content, "the model")
    inputs = _inputs(model, data)
    examples = len(next(iter(inputs.values())))
    chosen = np.sort(np.random.default_rng(0).permutation(examples)[:CALIBRATION])
    with tempfile.TemporaryDirectory() as folder:
        prepared = _prepared(content, Path(folder, "prepared.onnx"))
        if not _with_weights(prepared.graph):
            kinds = ", ".join(sorted({node.op_type for node in prepared.graph.node}))
            raise ExportError(
                f"nothing to quantise: the model has no {', '.join(WITH_WEIGHTS[:-1])} or "
                f"{WITH_WEIGHTS[-1]} with constant float32 weights; it has "
                f"{kinds or 'no operators'}"
            )
        made = _quantized(
            Path(folder), prepared, {name: array[chosen] for name, array in inputs.items()}
        )
    weighed = _with_weights(made.graph)
    floats = [
        tensor
        for tensor in prepared.graph.initializer
        if tensor.data_type == onnx.TensorProto.FLOAT
    ]
    after = made.SerializeToString(deterministic=True)
    outputs, changed = _run(content, inputs), _run(after, inputs)
    differences = [np.abs(outputs[name].astype(np.float64) - changed[name]) for name in outputs]
    return Quantized(
        content=after,
        size_before=len(content),
        operators=dict(Counter(node.op_type for node in weighed)),
        elements=(_elements(_quantized_constants(made.graph).values()), _elements(floats)),
        largest=max(float(each.max(initial=0)) for each in differences),
        mean=float(np.concatenate([each.ravel() for each in differences]).mean()),
        magnitude=max(float(np.abs(row).max(initial=0)) for row in outputs.values()),
        scores=_scores(outputs, changed, _targets(outputs, inputs, data, targets)),
        examples=examples,
    )


def _model(content: bytes, what: str) -> onnx.ModelProto:
    try:
        model = onnx.load_model_from_string(content)
        onnx.checker.check_model(model)
    except Exception as error:  # protobuf's and the checker's
        raise ExportError(f"{what} is not an ONNX model, or damaged: {error}") from None
    return model


def _inputs(model: onnx.ModelProto, data: Arrays) -> dict[str, Array]:
    """Return the arrays for the model's inputs. Raises ExportError if one is missing or does not
    fit."""
    constant = {tensor.name for tensor in model.graph.initializer}
    arrays: dict[str, Array] = {}
    for row in model.graph.input:
        if row.name in constant:
            continue
        kind = row.type.tensor_type
        dtype = np.dtype(helper.tensor_dtype_to_np_dtype(kind.elem_type))
        axes = [axis.dim_value if axis.HasField("dim_value") else None for axis in kind.shape.dim]
        expected = (
            f"{row.name}: {dtype} "
            f"({', '.join('n' if size is None else str(size) for size in axes)})"
        )
        if row.name not in data:
            raise ExportError(
                f"the set has no {row.name}; expected {expected}, and it has {sorted(data)}"
            )
        array = arrays[row.name] = data[row.name]
        fits = array.ndim == len(axes) and all(
            size in (None, given) for size, given in zip(axes, array.shape, strict=True)
        )
        if array.dtype != dtype or not fits:
            raise ExportError(
                f"{row.name} of the set is {array.dtype} {array.shape}; expected {expected}"
            )
    sizes = {len(array) for array in arrays.values()}
    if len(sizes) != 1 or 0 in sizes:
        counts = {name: len(array) for name, array in arrays.items()}
        raise ExportError(
            f"the set has {counts or 'no'} examples; expected at least one, and as many in each "
            "array"
        )
    return arrays


def _prepared(content: bytes, path: Path) -> onnx.ModelProto:
    """Fold constants, and batch normalisations into convolutions. Writes the model to ``path`` and
    returns it."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(path)
    options.log_severity_level = 4
    with as_export_error("ONNX Runtime cannot load the model"):
        onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    model = onnx.shape_inference.infer_shapes(onnx.load(path))
    # These marks tell the quantiser that the model is prepared. Without them it warns.
    helper.set_model_props(
        model, dict.fromkeys(("onnx.infer", "onnx.quant.pre_process"), "onnxruntime.quant")
    )
    onnx.save(model, path)
    return model


def _quantized(
    folder: Path, prepared: onnx.ModelProto, examples: dict[str, Array]
) -> onnx.ModelProto:
    with (
        silenced_python(),
        _logging_disabled(),
        as_export_error("ONNX Runtime cannot quantise the model"),
    ):
        quantization = _import_quantization()
        reader = quantization.CalibrationDataReader
        batches = _batches(examples)
        quantization.quantize_static(
            folder / "prepared.onnx",
            folder / "int8.onnx",
            type("Reader", (reader,), {"get_next": lambda self: next(batches, None)})(),
            quant_format=quantization.QuantFormat.QDQ,
            op_types_to_quantize=[*WITH_WEIGHTS, *RANGE_KEEPING],
            nodes_to_exclude=_excluded(prepared),
            per_channel=True,
            reduce_range=True,
            activation_type=quantization.QuantType.QUInt8,
            weight_type=quantization.QuantType.QInt8,
            extra_options={"MatMulConstBOnly": True},
        )
    model = onnx.load(folder / "int8.onnx")
    used = {node.domain for node in model.graph.node}
    imports = [opset for opset in model.opset_import if opset.domain in used]
    del model.opset_import[:], model.metadata_props[:], model.graph.value_info[:]
    model.opset_import.extend(imports)
    return model


def _excluded(model: onnx.ModelProto) -> list[str]:
    """Return grouped transposed convolutions: ONNX Runtime's quantiser confuses the axes of their
    weights and bias."""
    return [
        node.name
        for node in model.graph.node
        if node.op_type == "ConvTranspose"
        and any(attribute.name == "group" and attribute.i > 1 for attribute in node.attribute)
    ]


def _import_quantization() -> Any:
    """Import onnxruntime.quantization. The import configures the whole program's log; this undoes
    that."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        return importlib.import_module("onnxruntime.quantization")
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


@contextmanager
def _logging_disabled() -> Iterator[None]:
    """Switch logging off: the quantiser reports its progress to the root logger."""
    before = logging.root.manager.disable
    logging.disable()
    try:
        yield
    finally:
        logging.disable(before)


def _batches(arrays: Arrays) -> Iterator[dict[str, Array]]:
    for start in range(0, len(next(iter(arrays.values()))), BATCH):
        yield {name: array[start : start + BATCH] for name, array in arrays.items()}


def _run(content: bytes, inputs: Arrays) -> dict[str, Array]:
    """Return the outputs for the whole set."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    with as_export_error("ONNX Runtime cannot run the model on the set"):
        session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        parts = [session.run(None, batch) for batch in _batches(inputs)]
    names = [output.name for output in session.get_outputs()]
    return {
        name: np.concatenate(rows)
        for name, rows in zip(names, zip(*parts, strict=True), strict=True)
    }


def _with_weights(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """Return the operators whose weight is constant: float32, or 8 bits behind a DequantizeLinear
    once quantised."""
    stored = _quantized_constants(graph)
    weights = stored or {
        tensor.name: tensor
        for tensor in graph.initializer
        if tensor.data_type == onnx.TensorProto.FLOAT
    }
    return [
        node
        for node in graph.node
        if node.op_type in WITH_WEIGHTS
        and node.input[0 if node.op_type == "Gather" else 1] in weights
    ]


def _quantized_constants(graph: onnx.GraphProto) -> dict[str, onnx.TensorProto]:
    """Return the constant tensors of 8 bits, by the names of their dequantised values."""
    constants = {
        tensor.name: tensor
        for tensor in graph.initializer
        if tensor.data_type in (onnx.TensorProto.INT8, onnx.TensorProto.UINT8)
    }
    return {
        node.output[0]: constants[node.input[0]]
        for node in graph.node
        if node.op_type == "DequantizeLinear" and node.input[0] in constants
    }


def _elements(tensors: Iterable[onnx.TensorProto]) -> int:
    return sum(prod(tensor.dims) for tensor in tensors if tensor.dims)


def _targets(
    outputs: Arrays, inputs: Arrays, data: Arrays, names: Sequence[str] | None
) -> dict[str, Array]:
    """Return each output's target from the set, if it is clear which array that is."""
    if names is None:
        names = [name for name in data if name not in inputs]
        if len(names) != len(outputs):
            names = ["y"] if len(outputs) == 1 else []
    if len(names) != len(outputs):
        return {}
    targets = {
        output: data[name] for output, name in zip(outputs, names, strict=True) if name in data
    }
    examples = len(next(iter(inputs.values())))
    for output, name in zip(outputs, names, strict=True):
        if output in targets and (not targets[output].ndim or len(targets[output]) != examples):
            raise ExportError(
                f"{name} of the set has shape {targets[output].shape}; the inputs have {examples} "
                "examples"
            )
    return targets


def _scores(before: Arrays, after: Arrays, targets: Arrays) -> dict[str, Score]:
    scores = {}
    for name, target in targets.items():
        shape = before[name].shape
        if target.dtype.kind in "iu" and len(shape) > 1 and target.shape == (shape[0], *shape[2:]):
            measured = [
                float((scores_of[name].argmax(1) == target).mean()) for scores_of in (before, after)
            ]
            scores[name] = Score("accuracy", *measured)
        elif target.dtype.kind == "f" and target.shape == shape:
            measured = [
                float(((scores_of[name] - target) ** 2).mean()) for scores_of in (before, after)
            ]
            scores[name] = Score("mean squared error", *measured)
    return scores
