"""A bundle's contents and costs as lines of text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from math import prod
from typing import NamedTuple

import numpy as np
import onnx
from fleetlearn_protocol import Bundle, Manifest
from fleetlearn_protocol.manifest import (
    EVAL,
    FROZEN,
    INFER,
    TRAIN,
    TRAIN_FROM_FEATURES,
    Input,
    Parameter,
    SplitPart,
    State,
)

from fleetlearn_export.errors import ExportError
from fleetlearn_export.graphs.frozen_file import with_constants
from fleetlearn_export.graphs.micro_batches import joined
from fleetlearn_export.graphs.recompute import AGAIN
from fleetlearn_export.inspection import graph_costs, step_memory
from fleetlearn_export.model.source_locations import as_export_error

BATCH = 20
"""Examples in the batch for which costs are given, unless the user asks for another size."""

SWITCHES = {
    "proximal": "the proximal term",
    "correction": "drift correction",
    "contrastive": "the contrastive loss",
    "clip": "clipped gradients",
    "weight_decay": "weight decay",
}
REFERENCES = {
    "anchor": "anchor (the round's model)",
    "correction": "correction (c - c_k)",
    "previous": "previous (the model of the device's last task)",
}


class Line(NamedTuple):
    label: str
    """Empty if the text continues the line before."""
    text: str


def summary(
    bundle: Bundle,
    batch: int = BATCH,
    *,
    frozen: int | None = None,
    without_gradient: Sequence[str] = (),
    outputs_left_out: Mapping[str, str] | None = None,
    without_ort_training: str | None = None,
) -> list[list[Line]]:
    """Return groups of lines. Costs are for a batch of ``batch`` examples.

    frozen, without_gradient, outputs_left_out, without_ort_training: what ``Exported`` says and the
    bundle does not.

    Raises BundleError, and ExportError if a graph is not ONNX.
    """
    graphs = {name: _graph(bundle, name) for name in (TRAIN, EVAL, INFER)}
    return [
        _files(bundle, without_ort_training),
        _model(bundle.manifest, graphs[TRAIN], frozen, without_gradient, outputs_left_out or {}),
        _step(bundle.manifest),
        _running(bundle, graphs, batch),
    ]


def _graph(bundle: Bundle, name: str) -> onnx.ModelProto:
    with as_export_error(f"{bundle.path}: {name} is not an ONNX model"):
        model = onnx.load_model_from_string(bundle.read(name))
        return (
            with_constants(model, bundle.read(FROZEN)) if FROZEN in bundle.manifest.files else model
        )


def _files(bundle: Bundle, without_ort_training: str | None) -> list[Line]:
    manifest = bundle.manifest
    holds = ["graphs of standard ONNX operators"]
    if manifest.has_ort_training:
        holds.append("ONNX Runtime's own training artifacts (ort_training)")
    if manifest.many is not None:
        holds.append(
            f"train_many for {manifest.many.devices} devices, {manifest.many.steps} steps a call"
        )
    size = sum(file.size for file in manifest.files.values())
    lines = [
        Line("bundle", str(bundle.path)),
        Line("SHA-256", bundle.sha256),
        Line("made by", manifest.made_by or "unknown"),
        Line("files", f"{size:,} bytes in {len(manifest.files)} files"),
        *_lines("holds", holds),
    ]
    if not manifest.has_ort_training:
        why = f": {_first_line(without_ort_training)}" if without_ort_training else ""
        lines.append(Line("", f"no ort_training{why}"))
    return lines


def _model(
    manifest: Manifest,
    train: onnx.ModelProto,
    frozen: int | None,
    without_gradient: Sequence[str],
    outputs_left_out: Mapping[str, str],
) -> list[Line]:
    rows = manifest.parameters
    lines = [Line("parameters", f"{_elements(row for row in rows if not row.buffer)}, trained")]
    if personal := [row for row in rows if row.personal]:
        lines.append(Line("personal", f"{_elements(personal)}, never leave the device"))
    if buffers := [row for row in rows if row.buffer]:
        lines.append(
            Line("buffers", f"{_elements(buffers)}, changed by training without a gradient")
        )
    if frozen is not None:
        lines.append(Line("frozen", f"{frozen:,}, constants of the graphs" if frozen else "none"))
    elif constants := graph_costs.constants(train)[0]:
        lines.append(
            Line(
                "constants",
                f"{constants:,} in train.onnx: frozen parameters, and what the step needs",
            )
        )
    if without_gradient:
        names = ", ".join(without_gradient)
        lines.append(
            Line(
                "without gradient",
                f"{names}: frozen, as torch.optim skips what the loss does not read",
            )
        )
    return [
        *lines,
        Line("batch", "; ".join(map(_array, manifest.batch))),
        Line("outputs", "; ".join(map(_array, manifest.outputs))),
        *(Line("", f"not {name}: it has {what}") for name, what in outputs_left_out.items()),
        *travelling(manifest),
    ]


def travelling(manifest: Manifest) -> list[Line]:
    """Return what travels: a whole model with each round, activations of a split one with each row
    of a step."""
    if not isinstance(manifest.split, SplitPart):
        size = f"{4 * manifest.size:,}"
        return [Line("bytes per round", f"{size} down, {size} up, as float32")]
    split = manifest.split
    size = f"{sum(4 * prod(cut.activations.shape) for cut in split.cuts):,}"
    parties = ", ".join(cut.party for cut in split.cuts)
    return [
        Line("split model", f"its {split.part}, for {parties}"),
        Line("bytes per row", f"{size} up, {size} down in each step, as float32"),
    ]


def _step(manifest: Manifest) -> list[Line]:
    step = manifest.step
    switches = [words for name, words in SWITCHES.items() if getattr(step, name)]
    rule = "the user's own" if step.optimizer == "custom" else step.optimizer
    hyper = [
        f"{hyper.name} ({'the plan says' if hyper.default is None else hyper.default})"
        for hyper in manifest.hyper
    ]
    return [
        Line("step", rule + (f" with {_joined(switches)}" if switches else "")),
        Line("hyper-parameters", ", ".join(hyper) or "none"),
        Line("metrics", ", ".join(manifest.metrics) or "none"),
        *_lines("state", _state(manifest.state)),
        Line("references", ", ".join(REFERENCES[name] for name in manifest.references) or "none"),
        *_lines_if(
            manifest.compute == "float16",
            "products",
            "float16, computed in float32 where a device has no float16 kernels; the loss is "
            "scaled",
        ),
        Line("random", "yes, from the input seed" if manifest.random else "no"),
    ]


def _state(rows: tuple[State, ...]) -> list[str]:
    """Return a line for each state; its name is the first word of its tensors' names."""
    lines = []
    for slot, tensors in groupby(rows, key=lambda row: (row.name.split(".")[0], row.kept)):
        elements = sum(prod(tensor.shape) for tensor in tensors)
        lines.append(
            f"{slot[0]}: {4 * elements:,} bytes on the device"
            + (", kept between tasks" if slot[1] else "")
        )
    return lines or ["none"]


def _running(bundle: Bundle, graphs: dict[str, onnx.ModelProto], batch: int) -> list[Line]:
    manifest, whole = bundle.manifest, graphs[TRAIN]
    divided = joined(whole)
    if divided is not None:
        graphs = graphs | {TRAIN: divided.model}
    train = graphs[TRAIN]
    kinds = Counter(node.op_type for node in train.graph.node)
    operators = ", ".join(f"{name} {count}" for name, count in kinds.most_common())
    lines = [
        Line("train.onnx", f"{len(train.graph.node)} operators of {len(kinds)} kinds"),
        Line("operators", operators),
    ]
    try:
        values = {name: graph_costs.values(graph, batch) for name, graph in graphs.items()}
        estimate = step_memory.estimate(manifest, whole, batch)
    except ExportError as error:
        return [*lines, Line("costs", f"not measured: {error}")]
    flops = graph_costs.flops(train, values[TRAIN])
    share = (
        f", {100 * flops.products / flops.total:.0f} % in convolutions and matrix products"
        if flops.total
        else ""
    )
    again = sum(
        values[TRAIN][name].bytes
        for node in train.graph.node
        for name in node.output
        if name.endswith(AGAIN)
    )
    parts = ("runtime", "vectors and batch", "constants", "intermediates")
    sizes = zip(parts, estimate, strict=True)
    mebibytes = ", ".join(
        f"{name} {size / step_memory.MIB:.0f}"
        for name, size in sizes
        if size >= step_memory.MIB / 2
    )
    return [
        *lines,
        Line("ONNX Runtime", _lowest_runtime(graphs, values)),
        Line("FLOPs per step", f"{_with_unit(flops.total)} with a batch of {batch}{share}"),
        Line(
            "memory per step",
            f"about {estimate.total / step_memory.MIB:.0f} MiB at its peak: {mebibytes}",
        ),
        *_features(bundle, flops.total, batch),
        *_lines_if(
            divided, "micro-batches", f"{divided.size} examples at a time" if divided else ""
        ),
        *_lines_if(
            again,
            "to save memory",
            f"{again / step_memory.MIB:.0f} MiB of results are computed twice",
        ),
    ]


def _features(bundle: Bundle, step: int, batch: int) -> list[Line]:
    """Return what a device keeps of each example, and what a step from that costs. ``step``: FLOPs
    of a whole step."""
    rows = bundle.manifest.computed_features
    if not rows:
        return []
    size = sum(prod(row.shape) * np.dtype(row.dtype).itemsize for row in rows)
    rest = _graph(bundle, TRAIN_FROM_FEATURES)
    flops = graph_costs.flops(rest, graph_costs.values(rest, batch)).total
    return [
        Line(
            "features",
            f"{'; '.join(map(_array, rows))}; {size:,} bytes for each example, which a device may "
            "keep",
        ),
        Line(
            "",
            f"a step from them costs {_with_unit(flops)} FLOPs, {100 * flops / step:.2g} % of a "
            "whole step",
        ),
    ]


def _lowest_runtime(
    graphs: dict[str, onnx.ModelProto], values: dict[str, dict[str, graph_costs.ShapeAndDtype]]
) -> str:
    """Return the lowest ONNX Runtime that runs all of the device's graphs, with the reason."""
    try:
        needs = [
            (*graph_costs.lowest_runtime(graph, values[name]), name)
            for name, graph in graphs.items()
        ]
    except ValueError as error:
        return f"unknown: {error}"
    version, reason, graph = max(needs, key=lambda row: [int(part) for part in row[0].split(".")])
    return f"{version} or newer, for {reason}" + (f" in {graph}" if graph != TRAIN else "")


def _lines_if(shown: object, label: str, text: str) -> list[Line]:
    return [Line(label, text)] if shown else []


def _lines(label: str, texts: list[str]) -> list[Line]:
    return [Line("" if number else label, text) for number, text in enumerate(texts)]


def _elements(rows: Iterable[Parameter]) -> str:
    rows = list(rows)
    return f"{sum(prod(row.shape) for row in rows):,} in {len(rows)} tensor{'s' * (len(rows) != 1)}"


def _array(row: Input) -> str:
    return (
        f"{row.name}: {row.dtype} ({', '.join(map(str, ('n', *row.shape)))}{',' * (not row.shape)})"
    )


def _joined(words: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _with_unit(number: int) -> str:
    """Return three digits and a unit of thousands."""
    for power, unit in ((12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if number >= 10**power:
            return f"{number / 10**power:.3g} {unit}"
    return str(number)


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else ""
