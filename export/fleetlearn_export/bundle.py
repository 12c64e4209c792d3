"""From a PyTorch model to a training bundle on disk."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from itertools import accumulate
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
    STATE,
    TRAIN,
    TRAIN_MANY,
    Hyper,
    Input,
    LocalStep,
    Many,
    Parameter,
    State,
)
from fleetlearn_protocol.vector import flatten
from safetensors.numpy import save as save_safetensors
from torch import Tensor, nn

from fleetlearn_export.check import check_eval, check_infer, check_train
from fleetlearn_export.errors import ExportError
from fleetlearn_export.graph import IR_VERSION, OPSET, parameter_offsets, serialised, to_onnx, with_parameters
from fleetlearn_export.many import check_block, check_many, many_program, seldom_picked
from fleetlearn_export.operators import decompositions, inference_decompositions
from fleetlearn_export.ort_training import make_artifacts
from fleetlearn_export.places import explained
from fleetlearn_export.ranges import ranges
from fleetlearn_export.source import Source, array_row, make_source, named_outputs, training
from fleetlearn_export.steps import Function
from fleetlearn_export.trace import check_source, eval_program, infer_program, train_program
from fleetlearn_export.train_step import TrainStep, make_train_step


class Exported(NamedTuple):
    """What ``export_bundle`` wrote and found."""

    bundle: Bundle
    difference: float
    """The largest difference from PyTorch found in the checks: of a parameter, loss, metric, sum or output."""
    batch_of_one: bool
    """Whether a step may have a single example; BatchNorm may forbid it, in PyTorch as in the bundle."""
    without_ort_training: str | None
    """Why the bundle has no ``ort_training/``; None where it has."""
    frozen: int
    """Elements of the model's frozen parameters, which are constants of the graphs."""


def export_bundle(
    model: nn.Module,
    loss: Function,
    example: Sequence[Any],
    path: str | PathLike[str],
    *,
    step: LocalStep | Function | None = None,
    metrics: Mapping[str, Function] | None = None,
    names: Sequence[str] | None = None,
    targets: int = 1,
    hyper: Mapping[str, float | None] | None = None,
    features: Function | None = None,
    personal: Sequence[str] = (),
    state: Mapping[str, Any] | None = None,
    kept: Sequence[str] = (),
    many: Many | None = None,
    name: str | None = None,
    progress: Callable[[str], None] = lambda stage: None,
) -> Exported:
    """Write ``model``, and how it is trained, as a training bundle: a folder at ``path``.

    model: in whatever mode; it is the same afterwards. Parameters with ``requires_grad`` (float32) are trained and
        travel; frozen ones become constants of the graphs. Buffers that training changes travel too. Tied weights
        are one parameter. Dropout and other randomness come from a seed that is an input of the graph.
    loss: ``loss(outputs, *targets)``, where ``outputs`` is what the model returns: a scalar, the mean over the batch.
    example: arrays or tensors such as ``(x, y)``: the model's inputs, then the loss's ``targets`` (how many of them
        come last). The first axis of each is the examples' and is free in the bundle; other axes, and dtypes, are
        fixed by the example. Two rows of real data are enough, but the checks train on these rows.
    step: the optimizer step compiled into the bundle; SGD alone unless given. Or a step of your own, a function
        ``(params, state, batch, hyper) -> params, state, metrics`` in PyTorch; ``fleetlearn_export.steps`` says more.
    metrics: name -> ``metric(outputs, *targets)``: a scalar, the mean over the batch, or a value for each example.
    names: of the example's arrays; ``x`` and ``y`` unless given, numbered (``x0``, ``x1``) where there are several.
    hyper: default values of the step's hyper-parameters. Of a LocalStep's ``lr`` has none, so that a plan must say it.
        Of a step of your own these are all that it has; None is one that a plan must say.
    features: of a contrastive step: ``features(outputs)``, the float tensor (n, ...) of what the model returns.
    personal: parameters, and buffers that training changes, that never leave the device (FedPer's head, FedBN's
        norms): names, names with wildcards, or modules' names.
    state: of a step of your own: the initial values (float32) of what it hands from one step to the next.
    kept: names of ``state`` that outlive a task; a device's next task begins with them.
    many: adds train_many.onnx, the same step for a block of devices at once, several steps in a call; for simulating.
    name: the bundle's name for people; the path's stem unless given.
    progress: called with a few words at the beginning of each stage.

    The graphs' gradients, a few steps, sums and outputs are compared with PyTorch first. The folder appears complete
    or not at all; an older bundle at ``path`` is replaced.

    Raises ExportError: the text names the operator or parameter, its place in the user's code, and what to do.
    """
    target = _target(path)
    check_block(many)
    source = make_source(model, loss, example, dict(metrics or {}), names, targets)
    with training(model, mode=False):
        outputs = _outputs(source)
    with training(model):
        progress("tracing the model")
        chosen = step if step is not None else LocalStep()
        made = make_train_step(
            source, chosen, features=features, personal=personal, state=state, kept=kept, hyper=hyper
        )
        origin = check_source(source)
        program = train_program(made, origin)
        progress("converting the training step to ONNX")
        train = serialised(to_onnx(program, decompositions(program.exported.graph)))
        progress("training some steps against PyTorch")
        trained = check_train(source, made, train, features)
        block, differences = {}, [trained.difference]
        if many is not None:
            progress(f"the same for {many.devices} devices at once")
            block_program = many_program(made, program.exported, many, origin)
            graph = to_onnx(block_program, decompositions(block_program.exported.graph))
            block[TRAIN_MANY] = serialised(seldom_picked(graph, many))
            differences.append(check_many(source, made, block[TRAIN_MANY], many))
        progress("making ONNX Runtime's own training artifacts")
        artifacts = make_artifacts(source, made)
    with training(model, mode=False):
        progress("converting evaluation and inference")
        programs = (
            eval_program(source, made.values),
            infer_program(source, made.values, [row.name for row in outputs]),
        )
        graphs = [to_onnx(program, inference_decompositions(program.origin)) for program in programs]
        evaluation, infer = serialised(graphs[0]), with_parameters(graphs[1], made.values)
        progress("evaluating against PyTorch")
        differences.append(check_eval(source, evaluation, made.values))
        differences.append(check_infer(source, infer, made.values))

    files = {TRAIN: train, EVAL: evaluation, INFER: infer, **block, **artifacts.files}
    files[PARAMETERS] = save_safetensors({row: value.numpy() for row, value in made.values.items()})
    if any(bool(value.any()) for value in made.state.values()):
        files[STATE] = save_safetensors({row: value.numpy() for row, value in made.state.items()})
    manifest = Manifest(
        format=FORMAT,
        version=FORMAT_VERSION,
        name=name or target.stem,
        parameters=_table(made, parameter_offsets(infer, made.values)),
        batch=tuple(
            array_row(row, value, found)
            for (row, value), found in zip(source.batch.items(), ranges(origin, len(source.batch)), strict=True)
        ),
        outputs=tuple(outputs),
        hyper=tuple(Hyper(row, value) for row, value in made.hyper.items()),
        step=made.rule,
        metrics=tuple(source.metrics),
        files={},  # the table is made when they are written
        state=_state_table(made),
        references=made.references,
        random=made.random,
        many=many,
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
    frozen = sum(value.numel() for value in model.parameters() if not value.requires_grad)
    return Exported(bundle._replace(path=target), max(differences), trained.batch_of_one, artifacts.reason, frozen)


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


def _table(step: TrainStep, offsets: Mapping[str, int]) -> tuple[Parameter, ...]:
    places = _places(step.values)
    return tuple(
        Parameter(
            name, tuple(value.shape), places[name], name in step.buffers, name in step.personal, offsets.get(name)
        )
        for name, value in step.values.items()
    )


def _state_table(step: TrainStep) -> tuple[State, ...]:
    places = _places(step.state)
    return tuple(State(name, tuple(value.shape), places[name], name in step.kept) for name, value in step.state.items())


def _places(values: Mapping[str, Tensor]) -> dict[str, int]:
    """Where each tensor begins in the flat vector, in elements."""
    ends = list(accumulate((value.numel() for value in values.values()), initial=0))
    return dict(zip(values, ends, strict=False))


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
