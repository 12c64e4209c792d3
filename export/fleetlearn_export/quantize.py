"""A trained model with its weights and activations in 8 bits: ONNX Runtime's static quantisation, and what it cost.

Post-training quantisation as in Jacob et al. 2018, "Quantization and Training of Neural Networks for Efficient
Integer-Arithmetic-Only Inference" (arXiv 1712.05877): ranges of the activations are measured on examples. The graph is
standard ONNX (QuantizeLinear and DequantizeLinear around the operators, opset 18), which ONNX Runtime fuses.
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
from fleetlearn_protocol.manifest import INFER
from numpy.typing import NDArray
from onnx import helper

from fleetlearn_export.errors import ExportError
from fleetlearn_export.model.source_locations import explained
from fleetlearn_export.silence import quiet

WEIGHED = ("Conv", "ConvTranspose", "Gemm", "MatMul", "Gather")
"""Operators whose weights get 8 bits; a Gather's table is an embedding."""
BETWEEN = ("AveragePool", "Clip", "MaxPool", "Relu", "Reshape", "Squeeze", "Transpose", "Unsqueeze")
"""Operators that leave a range as it is, so that what passes through them stays int8. Sums are not among them: what
a residual connection adds up over many layers keeps its precision."""
CALIBRATION = 512
"""Examples, drawn with a fixed seed, on which the ranges of activations are measured."""
BATCH = 64

Array = NDArray[Any]
Arrays = Mapping[str, Array]


class Score(NamedTuple):
    """How well an output agrees with the targets of the set."""

    name: str
    """``accuracy`` (share of examples whose largest output is the label's) or ``mean squared error``."""
    before: float
    after: float


class Quantized(NamedTuple):
    """An int8 model, and how it differs from the one that it was made of, over the whole set."""

    content: bytes
    """The ONNX file."""
    size_before: int
    """Bytes of the given file."""
    operators: dict[str, int]
    """Operators that now have weights of 8 bits, by kind."""
    elements: tuple[int, int]
    """Elements of weights that have 8 bits now, and of all the model's constant float32 tensors."""
    largest: float
    """Largest difference of an element of an output."""
    mean: float
    """Mean absolute difference of the outputs' elements."""
    magnitude: float
    """Largest absolute value among the outputs, to compare with."""
    scores: dict[str, Score]
    """By output; empty where the set has no targets that fit."""
    examples: int
    """In the set."""


def read_model(path: str | PathLike[str]) -> tuple[bytes, list[str] | None]:
    """infer.onnx of a bundle (a folder or zip), with the names of its targets; or the bytes of an ONNX file, and None.

    Raises BundleError, and ExportError where there is no such file.
    """
    path = Path(path)
    if path.is_dir() or zipfile.is_zipfile(path):
        bundle = open_bundle(path)
        content = bundle.read(INFER)
        inputs = {row.name for row in _model(content, str(path)).graph.input}
        return content, [row.name for row in bundle.manifest.batch if row.name not in inputs]
    try:
        return path.read_bytes(), None
    except OSError as error:
        raise ExportError(f"{path} cannot be read: {error.strerror}") from None


def read_data(path: str | PathLike[str]) -> dict[str, Array]:
    """The arrays of an .npz file. Raises ExportError."""
    try:
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            raise ExportError(f"{path} holds one array without a name; expected an .npz file (numpy.savez)")
        with loaded:
            return {name: loaded[name] for name in loaded.files}
    except OSError as error:
        raise ExportError(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, zipfile.BadZipFile, EOFError) as error:
        raise ExportError(f"{path} is not an .npz file of plain arrays: {error}") from None


def quantize(content: bytes, data: Arrays, targets: Sequence[str] | None = None) -> Quantized:
    """Make an int8 model of an infer.onnx, and compare the two on a set.

    content: the ONNX file: float32 parameters as initializers, the first axis of inputs and outputs the examples'.
    data: arrays named as the model's inputs, and the targets; as many rows in each.
    targets: which of ``data`` belong to the outputs, in their order; unless given, those that are no inputs, where
        there are as many as outputs, or ``y`` where there is one output.

    Weights are int8, of 7 bits and with a scale for each channel (so that products do not overflow the 16 bits in which
    x86 processors without VNNI add them up); activations uint8 with one scale, from their least to their greatest value
    on up to 512 examples of the set.

    Raises ExportError: not an ONNX model, a set that does not fit it, nothing to quantise.
    """
    model = _model(content, "the model")
    inputs = _inputs(model, data)
    examples = len(next(iter(inputs.values())))
    chosen = np.sort(np.random.default_rng(0).permutation(examples)[:CALIBRATION])
    with tempfile.TemporaryDirectory() as folder:
        prepared = _prepared(content, Path(folder, "prepared.onnx"))
        if not _weighed(prepared.graph):
            kinds = ", ".join(sorted({node.op_type for node in prepared.graph.node}))
            raise ExportError(
                f"nothing to quantise: the model has no {', '.join(WEIGHED[:-1])} or {WEIGHED[-1]} with constant "
                f"float32 weights; it has {kinds or 'no operators'}"
            )
        made = _quantized(Path(folder), prepared, {name: array[chosen] for name, array in inputs.items()})
    weighed = _weighed(made.graph)
    floats = [row for row in prepared.graph.initializer if row.data_type == onnx.TensorProto.FLOAT]
    after = made.SerializeToString(deterministic=True)
    outputs, changed = _run(content, inputs), _run(after, inputs)
    differences = [np.abs(outputs[name].astype(np.float64) - changed[name]) for name in outputs]
    return Quantized(
        content=after,
        size_before=len(content),
        operators=dict(Counter(node.op_type for node in weighed)),
        elements=(_elements(_stored(made.graph).values()), _elements(floats)),
        largest=max(float(row.max(initial=0)) for row in differences),
        mean=float(np.concatenate([row.ravel() for row in differences]).mean()),
        magnitude=max(float(np.abs(row).max(initial=0)) for row in outputs.values()),
        scores=_scores(outputs, changed, _targets(outputs, inputs, data, targets)),
        examples=examples,
    )


def _model(content: bytes, what: str) -> onnx.ModelProto:
    try:
        model = onnx.load_model_from_string(content)
        onnx.checker.check_model(model)
    except Exception as error:  # of protobuf, and of the checker
        raise ExportError(f"{what} is not an ONNX model, or damaged: {error}") from None
    return model


def _inputs(model: onnx.ModelProto, data: Arrays) -> dict[str, Array]:
    """The arrays for the model's inputs. Raises ExportError, saying what was expected."""
    constant = {row.name for row in model.graph.initializer}
    found: dict[str, Array] = {}
    for row in model.graph.input:
        if row.name in constant:
            continue
        kind = row.type.tensor_type
        dtype = np.dtype(helper.tensor_dtype_to_np_dtype(kind.elem_type))
        axes = [axis.dim_value if axis.HasField("dim_value") else None for axis in kind.shape.dim]
        expected = f"{row.name}: {dtype} ({', '.join('n' if size is None else str(size) for size in axes)})"
        if row.name not in data:
            raise ExportError(f"the set has no {row.name}; expected {expected}, and it has {sorted(data)}")
        array = found[row.name] = data[row.name]
        fits = array.ndim == len(axes) and all(
            size in (None, given) for size, given in zip(axes, array.shape, strict=True)
        )
        if array.dtype != dtype or not fits:
            raise ExportError(f"{row.name} of the set is {array.dtype} {array.shape}; expected {expected}")
    sizes = {len(array) for array in found.values()}
    if len(sizes) != 1 or 0 in sizes:
        counts = {name: len(array) for name, array in found.items()}
        raise ExportError(f"the set has {counts or 'no'} examples; expected at least one, and as many in each array")
    return found


def _prepared(content: bytes, path: Path) -> onnx.ModelProto:
    """The model with constants folded and batch normalisations taken into convolutions; written to ``path`` too."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(path)
    options.log_severity_level = 4
    with explained("ONNX Runtime cannot load the model"):
        onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    model = onnx.shape_inference.infer_shapes(onnx.load(path))
    # By these marks the quantiser knows that the model was prepared, and does not warn that it should be.
    helper.set_model_props(model, dict.fromkeys(("onnx.infer", "onnx.quant.pre_process"), "onnxruntime.quant"))
    onnx.save(model, path)
    return model


def _quantized(folder: Path, prepared: onnx.ModelProto, examples: dict[str, Array]) -> onnx.ModelProto:
    with quiet(), _no_log(), explained("ONNX Runtime cannot quantise the model"):
        quantization = _import_quantization()
        reader = quantization.CalibrationDataReader
        batches = _batches(examples)
        quantization.quantize_static(
            folder / "prepared.onnx",
            folder / "int8.onnx",
            type("Reader", (reader,), {"get_next": lambda self: next(batches, None)})(),
            quant_format=quantization.QuantFormat.QDQ,
            op_types_to_quantize=[*WEIGHED, *BETWEEN],
            nodes_to_exclude=_left_out(prepared),
            per_channel=True,
            reduce_range=True,
            activation_type=quantization.QuantType.QUInt8,
            weight_type=quantization.QuantType.QInt8,
            extra_options={"MatMulConstBOnly": True},
        )
    model = onnx.load(folder / "int8.onnx")
    used = {node.domain for node in model.graph.node}
    kept = [row for row in model.opset_import if row.domain in used]
    del model.opset_import[:], model.metadata_props[:], model.graph.value_info[:]
    model.opset_import.extend(kept)
    return model


def _left_out(model: onnx.ModelProto) -> list[str]:
    """Transposed convolutions in groups: ONNX Runtime's quantiser takes the weights' axis for that of the bias."""
    return [
        node.name
        for node in model.graph.node
        if node.op_type == "ConvTranspose" and any(row.name == "group" and row.i > 1 for row in node.attribute)
    ]


def _import_quantization() -> Any:
    """onnxruntime.quantization, which sets up the whole program's log when it is imported: that is taken back."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        return importlib.import_module("onnxruntime.quantization")
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


@contextmanager
def _no_log() -> Iterator[None]:
    """Without what the quantiser tells the root logger about its own doings."""
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
    """The outputs over the whole set."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    with explained("ONNX Runtime cannot run the model on the set"):
        session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        parts = [session.run(None, batch) for batch in _batches(inputs)]
    names = [row.name for row in session.get_outputs()]
    return {name: np.concatenate(rows) for name, rows in zip(names, zip(*parts, strict=True), strict=True)}


def _weighed(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """Operators of ``WEIGHED`` with a constant weight: float32 before, and after, 8 bits and a DequantizeLinear."""
    stored = _stored(graph)
    weights = stored or {row.name: row for row in graph.initializer if row.data_type == onnx.TensorProto.FLOAT}
    return [
        node
        for node in graph.node
        if node.op_type in WEIGHED and node.input[0 if node.op_type == "Gather" else 1] in weights
    ]


def _stored(graph: onnx.GraphProto) -> dict[str, onnx.TensorProto]:
    """The constant tensors of 8 bits, by the names of what is made of them."""
    constants = {
        row.name: row for row in graph.initializer if row.data_type in (onnx.TensorProto.INT8, onnx.TensorProto.UINT8)
    }
    return {
        node.output[0]: constants[node.input[0]]
        for node in graph.node
        if node.op_type == "DequantizeLinear" and node.input[0] in constants
    }


def _elements(tensors: Iterable[onnx.TensorProto]) -> int:
    return sum(prod(row.dims) for row in tensors if row.dims)


def _targets(outputs: Arrays, inputs: Arrays, data: Arrays, names: Sequence[str] | None) -> dict[str, Array]:
    """The array of the set that belongs to each output, where that is clear."""
    if names is None:
        names = [name for name in data if name not in inputs]
        if len(names) != len(outputs):
            names = ["y"] if len(outputs) == 1 else []
    if len(names) != len(outputs):
        return {}
    found = {output: data[name] for output, name in zip(outputs, names, strict=True) if name in data}
    examples = len(next(iter(inputs.values())))
    for output, name in zip(outputs, names, strict=True):
        if output in found and (not found[output].ndim or len(found[output]) != examples):
            raise ExportError(f"{name} of the set has shape {found[output].shape}; the inputs have {examples} examples")
    return found


def _scores(before: Arrays, after: Arrays, targets: Arrays) -> dict[str, Score]:
    scores = {}
    for name, target in targets.items():
        shape = before[name].shape
        if target.dtype.kind in "iu" and len(shape) > 1 and target.shape == (shape[0], *shape[2:]):
            found = [float((row[name].argmax(1) == target).mean()) for row in (before, after)]
            scores[name] = Score("accuracy", *found)
        elif target.dtype.kind == "f" and target.shape == shape:
            found = [float(((row[name] - target) ** 2).mean()) for row in (before, after)]
            scores[name] = Score("mean squared error", *found)
    return scores
