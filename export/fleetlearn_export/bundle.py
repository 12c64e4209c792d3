"""From a PyTorch model to a training bundle on disk."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from os import PathLike
from pathlib import Path
from secrets import token_hex
from typing import Any, NamedTuple

import torch
from fleetlearn_protocol import Bundle, BundleError, Manifest, open_bundle, write_bundle, write_inference_model
from fleetlearn_protocol.manifest import (
    EVAL,
    FORMAT,
    FORMAT_VERSION,
    INFER,
    PARAMETERS,
    TRAIN,
    Hyper,
    Input,
    LocalStep,
    Parameter,
)
from fleetlearn_protocol.vector import flatten
from safetensors.numpy import save as save_safetensors
from torch import Tensor, nn

from fleetlearn_export.check import check_eval, check_infer, check_train
from fleetlearn_export.errors import ExportError
from fleetlearn_export.graph import IR_VERSION, OPSET, parameter_offsets, serialised, to_onnx, with_parameters
from fleetlearn_export.operators import decompositions, inference_decompositions
from fleetlearn_export.ort_training import make_artifacts
from fleetlearn_export.places import explained
from fleetlearn_export.source import Function, Source, array_row, hyper_defaults, make_source, named_outputs, training
from fleetlearn_export.trace import Joint, eval_program, infer_program, joint_program, train_program
from fleetlearn_export.update import hyper_names


class Exported(NamedTuple):
    """What ``export_bundle`` wrote and found."""

    bundle: Bundle
    difference: float
    """The largest difference from PyTorch found in the checks: of a parameter, loss, metric, sum or output."""
    batch_of_one: bool
    """Whether a step may have a single example; BatchNorm may forbid it, in PyTorch as in the bundle."""
    without_ort_training: str | None
    """Why the bundle has no ``ort_training/``; None where it has."""


def export_bundle(
    model: nn.Module,
    loss: Function,
    example: Sequence[Any],
    path: str | PathLike[str],
    *,
    step: LocalStep | None = None,
    metrics: Mapping[str, Function] | None = None,
    names: Sequence[str] | None = None,
    targets: int = 1,
    hyper: Mapping[str, float] | None = None,
    name: str | None = None,
) -> Exported:
    """Write ``model``, and how it is trained, as a training bundle: a folder at ``path``.

    model: in whatever mode; it is the same afterwards. Parameters with ``requires_grad`` (float32) are trained and
        travel; frozen ones become constants of the graphs. Buffers that training changes travel too.
    loss: ``loss(outputs, *targets)``, where ``outputs`` is what the model returns: a scalar, the mean over the batch.
    example: arrays or tensors such as ``(x, y)``: the model's inputs, then the loss's ``targets`` (how many of them
        come last). The first axis of each is the examples' and is free in the bundle; other axes, and dtypes, are
        fixed by the example. Two rows of real data are enough, but the checks train on these rows.
    step: the optimizer step compiled into the bundle; SGD without proximal term unless given.
    metrics: name -> ``metric(outputs, *targets)``: a scalar, the mean over the batch, or a value for each example.
    names: of the example's arrays; ``x`` and ``y`` unless given, numbered (``x0``, ``x1``) where there are several.
    hyper: default values of the step's hyper-parameters: ``lr`` has none, so that a plan must say it; ``mu`` is 0.
    name: the bundle's name for people; the path's stem unless given.

    The graphs' gradients, a few steps, sums and outputs are compared with PyTorch first. The folder appears complete
    or not at all; an older bundle at ``path`` is replaced.

    Raises ExportError: the text names the operator or parameter, its place in the user's code, and what to do.
    """
    target = _target(path)
    step = step or LocalStep()
    if not isinstance(step, LocalStep):
        raise ExportError(f"the step is a {type(step).__name__}; expected a LocalStep")
    if step.optimizer != "sgd":
        raise ExportError(f"optimizer {step.optimizer!r}; this version compiles 'sgd'")
    defaults = hyper_defaults(hyper or {}, hyper_names(step))
    source = make_source(model, loss, example, dict(metrics or {}), names, targets)

    with training(model, mode=False):
        outputs = _outputs(source)
    with training(model):
        joint = joint_program(source)
        train = serialised(to_onnx(train_program(source, joint, step), decompositions(joint.exported.graph)))
        trained = check_train(source, step, train, joint.values, joint.buffers)
        artifacts = make_artifacts(source, joint.values, joint.buffers)
    with training(model, mode=False):
        programs = (
            eval_program(source, joint.values),
            infer_program(source, joint.values, [row.name for row in outputs]),
        )
        graphs = [to_onnx(program, inference_decompositions(program.origin)) for program in programs]
        evaluation, infer = serialised(graphs[0]), with_parameters(graphs[1], joint.values)
        differences = [
            trained.difference,
            check_eval(source, evaluation, joint.values),
            check_infer(source, infer, joint.values),
        ]

    initial = {row: value.numpy() for row, value in joint.values.items()}
    files = {TRAIN: train, EVAL: evaluation, INFER: infer, PARAMETERS: save_safetensors(initial), **artifacts.files}
    manifest = Manifest(
        format=FORMAT,
        version=FORMAT_VERSION,
        name=name or target.stem,
        parameters=_table(joint, parameter_offsets(infer, joint.values)),
        batch=tuple(array_row(row, value) for row, value in source.batch.items()),
        outputs=tuple(outputs),
        hyper=tuple(Hyper(row, value) for row, value in defaults.items()),
        step=step,
        metrics=tuple(source.metrics),
        files={},  # the table is made when they are written
        opset=OPSET,
        ir_version=IR_VERSION,
        made_by=f"fleetlearn {version('fleetlearn')}, torch {torch.__version__}, onnx {version('onnx')}",
    )
    temporary = _beside(target, "part")
    try:
        bundle = open_bundle(write_bundle(temporary, manifest, files))
        with training(model, mode=False):
            vector = flatten({row: value.numpy() for row, value in trained.values.items()}, manifest.parameters)
            differences.append(check_infer(source, write_inference_model(bundle, vector), trained.values))
        _publish(temporary, target)
    except BundleError as error:
        raise ExportError(f"the bundle does not fit its own format: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Exported(bundle._replace(path=target), max(differences), trained.batch_of_one, artifacts.reason)


def _outputs(source: Source) -> list[Input]:
    """The manifest's rows for what the model returns. Raises ExportError where that is not one row an example."""
    inputs = source.inputs()
    with explained("in evaluation mode the model fails in PyTorch itself"):
        rows = named_outputs(source.model(*(value.clone() for value in inputs.values())))
    size = len(next(iter(inputs.values())))
    for name, value in rows.items():
        if not isinstance(value, Tensor) or not value.dim() or len(value) != size:
            what = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"the type {type(value).__name__}"
            raise ExportError(
                f"the model's {name} has {what} for {size} examples; expected tensors with the examples on the first "
                "axis, alone or in a tuple, list or dict"
            )
    with explained("the model's outputs do not fit a bundle"):
        return [array_row(name, value) for name, value in rows.items()]


def _table(joint: Joint, offsets: Mapping[str, int]) -> tuple[Parameter, ...]:
    rows, place = [], 0
    for name, value in joint.values.items():
        rows.append(Parameter(name, tuple(value.shape), place, name in joint.buffers, offsets.get(name)))
        place += value.numel()
    return tuple(rows)


def _target(path: str | PathLike[str]) -> Path:
    """The path in full. Raises ExportError where something stands there that is not a bundle."""
    target = Path(path).expanduser().resolve()
    if not target.parent.is_dir():
        raise ExportError(f"{target.parent} is not a folder; the bundle {target.name} would be written into it")
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        try:
            open_bundle(target, files=())
        except BundleError as error:
            raise ExportError(f"{target} exists and is not a training bundle, so it is not replaced: {error}") from None
        if not target.is_dir():
            raise ExportError(f"{target} is a bundle's zip; a folder does not replace it: choose another path")
    return target


def _beside(target: Path, kind: str) -> Path:
    return target.with_name(f".{target.name}.{token_hex(4)}.{kind}")


def _publish(temporary: Path, target: Path) -> None:
    """Move the finished folder to its place. A folder cannot be replaced in one step: an older one steps aside."""
    old = None
    if target.exists():
        old = _beside(target, "old")
        target.rename(old)
    try:
        temporary.rename(target)
    except OSError:
        if old:
            old.rename(target)
        raise
    if old:
        shutil.rmtree(old)
