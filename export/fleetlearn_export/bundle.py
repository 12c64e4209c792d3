"""From a PyTorch model to a training bundle on disk."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from os import PathLike
from pathlib import Path
from secrets import token_hex
from typing import NamedTuple

import msgspec
import torch
from fleetlearn_protocol import Bundle, Manifest, open_bundle, write_inference_model, write_manifest
from fleetlearn_protocol.manifest import (
    EVAL,
    FORMAT,
    FORMAT_VERSION,
    INFER,
    MANIFEST,
    PARAMETERS,
    TRAIN,
    File,
    Hyper,
    Input,
    LocalStep,
    Parameter,
)
from fleetlearn_protocol.vector import digest, flatten
from safetensors.numpy import save as save_safetensors
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fleetlearn_export.check import check_eval, check_infer, check_train
from fleetlearn_export.graph import IR_VERSION, OPSET, parameter_offsets, to_onnx, with_parameters
from fleetlearn_export.operators import decompositions
from fleetlearn_export.ort_training import make_artifacts
from fleetlearn_export.trace import (
    Function,
    Source,
    eval_program,
    infer_program,
    joint_program,
    tensor_table,
    train_program,
)
from fleetlearn_export.update import hyper_names


class Exported(NamedTuple):
    """What ``export_bundle`` wrote and found."""

    bundle: Bundle
    difference: float
    """The largest difference of a parameter, sum or output from PyTorch in the checks before publication."""
    without_ort_training: str | None
    """Why the bundle has no ``ort_training/``; None where it has."""


def export_bundle(
    model: nn.Module,
    loss: Function,
    example: Sequence[object],
    path: str | PathLike[str],
    *,
    step: LocalStep | None = None,
    metrics: Mapping[str, Function] | None = None,
    names: Sequence[str] | None = None,
    targets: int = 1,
    hyper: Mapping[str, float] | None = None,
    name: str | None = None,
) -> Exported:
    step = step or LocalStep("sgd")
    metrics = dict(metrics or {})
    arrays = [torch.as_tensor(array).clone() for array in example]
    if len(arrays[0]) < 2:
        arrays = [torch.cat([array, array]) for array in arrays]
    names = names or default_names(len(arrays) - targets, targets)
    source = Source(model, loss, metrics, dict(zip(names, arrays, strict=True)), targets)
    _, joint = joint_program(source)
    table = tensor_table(source, joint)
    values = {row: value.clone() for row, (value, _) in table.items()}
    buffers = {row for row, (_, buffer) in table.items() if buffer}
    train = to_onnx(train_program(source, joint, values, step), decompositions(joint.graph)).SerializeToString()
    difference, trained = check_train(source, step, train, values, buffers)
    artifacts = make_artifacts(source, values, buffers)
    model.eval()
    example_outputs = model(*source.inputs().values())
    flat = pytree.tree_leaves(example_outputs)
    outputs = ["output"] if isinstance(example_outputs, Tensor) else [f"output_{i}" for i in range(len(flat))]
    evaluation = to_onnx(eval_program(source, values)).SerializeToString()
    infer = with_parameters(to_onnx(infer_program(source, values, outputs)), values)
    offsets = parameter_offsets(infer, values)
    difference = max(difference, check_eval(source, evaluation, values), check_infer(source, infer, values))
    initial = {row: value.numpy() for row, value in values.items()}
    files = {TRAIN: train, EVAL: evaluation, INFER: infer, PARAMETERS: save_safetensors(initial), **artifacts.files}

    place, rows = 0, []
    for row, value in values.items():
        rows.append(Parameter(row, tuple(value.shape), place, row in buffers, offsets.get(row)))
        place += value.numel()
    defaults = {"mu": 0.0} | dict(hyper or {})
    manifest = Manifest(
        format=FORMAT,
        version=FORMAT_VERSION,
        name=name or Path(path).stem,
        parameters=tuple(rows),
        batch=tuple(_input(row, value) for row, value in source.batch.items()),
        outputs=tuple(_input(row, value) for row, value in zip(outputs, flat, strict=True)),
        hyper=tuple(Hyper(row, defaults.get(row)) for row in hyper_names(step)),
        step=step,
        metrics=tuple(metrics),
        files={row: File(digest(content), len(content)) for row, content in files.items()},
        opset=OPSET,
        ir_version=IR_VERSION,
        made_by=f"fleetlearn {version('fleetlearn')}, torch {torch.__version__}, onnx {version('onnx')}",
    )
    target = Path(path).expanduser().resolve()
    temporary = target.with_name(f".{target.name}.{token_hex(4)}.part")
    try:
        for row, content in {**files, MANIFEST: write_manifest(manifest)}.items():
            (temporary / row).parent.mkdir(parents=True, exist_ok=True)
            (temporary / row).write_bytes(content)
        bundle = open_bundle(temporary)
        vector = flatten({row: value.numpy() for row, value in trained.items()}, manifest.parameters)
        check_infer(source, write_inference_model(bundle, vector), trained)
        publish(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Exported(bundle._replace(path=Path(path)), difference, artifacts.reason)


def default_names(inputs: int, targets: int) -> list[str]:
    """x and y; x0, x1, ... where there are several inputs, and so for targets."""
    return [
        *(["x"] if inputs == 1 else [f"x{i}" for i in range(inputs)]),
        *(["y"] if targets == 1 else [f"y{i}" for i in range(targets)]),
    ]


def publish(temporary: Path, target: Path) -> None:
    """Move the finished folder to its place; an older bundle there is replaced, anything else refused."""
    old = None
    if target.is_dir() and any(target.iterdir()):
        old = target.with_name(f".{target.name}.{token_hex(4)}.old")
        target.rename(old)
    temporary.rename(target)
    if old:
        shutil.rmtree(old)


def _input(name: str, value: Tensor) -> Input:
    return msgspec.convert(
        {"name": name, "dtype": str(value.dtype).removeprefix("torch."), "shape": tuple(value.shape[1:])}, Input
    )
