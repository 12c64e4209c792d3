"""Makes a training bundle from a PyTorch model, checks it and writes it to disk."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from importlib.metadata import version
from itertools import accumulate
from os import PathLike
from pathlib import Path
from secrets import token_hex
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import msgspec
import torch
from fleetlearn_protocol import Bundle, BundleError, Manifest, open_bundle, write_bundle
from fleetlearn_protocol.manifest import (
    EVAL,
    FORMAT,
    FORMAT_VERSION,
    FROZEN,
    FROZEN_VERSION,
    GRADIENT,
    INFER,
    PARAMETERS,
    PERSONAL,
    PREPROCESSING_VERSION,
    SPLIT_VERSION,
    STATE,
    TRAIN,
    Hyper,
    Input,
    Parameter,
    State,
    TrainMany,
)
from fleetlearn_protocol.paths import in_home
from fleetlearn_protocol.preprocessing import Preprocessing, read_preprocessing
from safetensors.numpy import save as save_safetensors
from torch import Tensor, nn

from fleetlearn_export.checked_graphs import CheckedGraphs, evaluation_graphs, training_graphs
from fleetlearn_export.checks.compared_steps import CheckedStep
from fleetlearn_export.checks.graph_checks import check_infer
from fleetlearn_export.checks.memory import give_back_freed_memory
from fleetlearn_export.checks.sub_model_check import check_sub_model
from fleetlearn_export.emission.constants import Constants
from fleetlearn_export.errors import ExportError
from fleetlearn_export.export_settings import ExportSettings
from fleetlearn_export.feature_graphs import FeatureGraphs, feature_graphs
from fleetlearn_export.graphs.conversion import IR_VERSION, OPSET
from fleetlearn_export.graphs.free_rows import with_free_rows
from fleetlearn_export.graphs.frozen_file import with_frozen_file, write_safetensors
from fleetlearn_export.model.arguments import Targets, arranged, array_row
from fleetlearn_export.model.checked_user_model import make_user_model
from fleetlearn_export.model.fine_tuning import fine_tuning, freezing
from fleetlearn_export.model.frozen_weights import (
    effect_of_rounding,
    names_of_constants,
    rounded,
)
from fleetlearn_export.model.on_disk import on_disk
from fleetlearn_export.model.returned_loss import called_by_name
from fleetlearn_export.model.source_locations import as_export_error
from fleetlearn_export.model.sparse_tables import sparse_rows
from fleetlearn_export.model.steps import Function
from fleetlearn_export.model.train_step import TrainStep, make_train_step
from fleetlearn_export.model.user_model import UserModel, evaluation_mode, training_mode
from fleetlearn_export.ort_training.artifacts import Artifacts, make_artifacts
from fleetlearn_export.split_graphs import split_graphs


class ExportedParts(NamedTuple):
    """The bundles of a split model's parts, and what the checks found."""

    path: Path
    """The folder with ``NAME.bundle`` for each party, and ``top.bundle``."""
    bottoms: dict[str, Bundle]
    """Party -> its bottom."""
    top: Bundle
    difference: float
    """The largest difference from PyTorch in the checks of any part."""


class Exported(NamedTuple):
    """The bundle that ``export_bundle`` wrote, and what it found."""

    bundle: Bundle
    difference: float
    """The largest difference from PyTorch in the checks, of any parameter, loss, metric, sum or
    output."""
    batch_of_one: bool
    """Whether a step can train on a single example. BatchNorm may forbid it, in PyTorch and in the
    bundle."""
    without_ort_training: str | None
    """Why the bundle has no ``ort_training/``; None if it has."""
    frozen: int
    """Number of elements of the frozen parameters, which are constants of the graphs."""
    by_pytorch: Mapping[str, str]
    """Graph that PyTorch's ONNX exporter wrote, which takes longer -> why: the operator that our
    own table lacks."""
    effect_of_rounding: float | None
    """The largest change of an output of the model, on the example and in evaluation mode, because
    frozen weights are stored in fewer bits; relative to the largest output. None if they are
    float32. ``difference`` does not include it: the checks give PyTorch the same rounded
    weights."""
    operators: str | None
    """What the comparison of each operator of train.onnx with PyTorch's found; None if PyTorch's
    ONNX exporter wrote train.onnx."""
    without_gradient: tuple[str, ...]
    """Names of parameters that the export froze because the loss does not depend on them, as
    torch.optim skips them."""
    outputs_left_out: Mapping[str, str] = {}
    """Name of an output of the model -> why infer.onnx does not have it: it is no tensor with a row
    for each example. The loss may read it."""
    parts: ExportedParts | None = None
    """The bundles of the model's two parts, if ``split`` was given."""


def write_exported(
    model: nn.Module,
    loss: Function | None,
    example: Sequence[Any] | Mapping[str, Any],
    path: str | PathLike[str],
    settings: ExportSettings,
    *,
    metrics: Mapping[str, Function] | None = None,
    names: Sequence[str] | None = None,
    targets: Targets = None,
    preprocessing: Preprocessing | dict[str, Any] | str | PathLike[str] | None = None,
    name: str | None = None,
) -> Exported:
    """Make, check and write one bundle. The arguments are those of ``export_bundle``, and
    ``settings`` those that it puts together. Raises ExportError."""
    target = checked_target(path)
    settings.check()
    features, many, compute = settings.features, settings.many, settings.compute
    prepared = None if preprocessing is None else _checked_preprocessing(preprocessing)
    with ExitStack() as changed:
        # What is entered here lasts to the end: the model is then as it was before the export.
        given = arranged(example, names, targets, returns_loss=loss is None)
        if isinstance(model, nn.Module):
            changed.enter_context(called_by_name(model, given.by_name))
        changed.enter_context(fine_tuning(model, settings.train))
        user = make_user_model(
            model,
            loss,
            given.arrays,
            {} if metrics is None else metrics,
            given.names,
            given.targets,
            features,
        )
        if prepared is not None:
            split = settings.split
            of_data = [name for name in user.batch if split is None or name != GRADIENT]
            _check_arrays(prepared, of_data)
        changed.enter_context(freezing(model, user.without_gradient))
        unrounded = changed.enter_context(rounded(model, settings.frozen))
        elements = sum(value.numel() for value in model.parameters() if not value.requires_grad)
        settings = settings._replace(constants=Constants() if elements else None)
        outputs, left_out = _outputs(user)
        user = user._replace(outputs_left_out=left_out)
        train_step, training, checked, artifacts = _training(user, settings)
        # Parameters after the check's steps, with which infer.onnx is checked.
        after_steps = changed.enter_context(on_disk())
        for row, value in checked.values.items():
            after_steps.keep(row, value)
        checked = checked._replace(values={})
        user = user._replace(trains_on_one=checked.batch_of_one)
        folder = Path(changed.enter_context(TemporaryDirectory(prefix="fleetlearn-export-")))
        infer = folder / "infer.onnx"
        with evaluation_mode(model):
            evaluation = evaluation_graphs(user, train_step, outputs, infer, settings)
        rows = zip(user.batch.items(), training.ranges, strict=True)
        table = tuple(array_row(row, value, index_range) for (row, value), index_range in rows)
        cached = None
        if training.found is not None and evaluation.evaluation is not None:
            whole = evaluation.evaluation
            cached = feature_graphs(user, train_step, training.found, whole, table, settings)

        parts = None if settings.split is None else split_graphs(user, train_step, settings)
        made = [training, evaluation, artifacts, cached, parts]
        written = _files(user, train_step, settings, folder, made)
        written[INFER] = infer
        sparse, of_sub_model = None, 0.0
        if settings.sparse:
            settings.progress("training without the rows that the example does not name")
            sparse = sparse_rows(settings.sparse, train_step, table)
            graphs = dict[str, bytes]()
            for file in (TRAIN, EVAL):
                content = written[file]
                assert isinstance(content, bytes)
                graphs[file] = with_free_rows(content, sparse.tables, sparse.rows)
            written |= graphs
            if train_step.personal:
                own = {name: train_step.values[name].numpy() for name in train_step.personal}
                written[PERSONAL] = save_safetensors(own)
            of_sub_model = check_sub_model(
                user, train_step, graphs[TRAIN], graphs[EVAL], sparse, settings.constants
            )
        manifest = _manifest(
            name or target.stem,
            user,
            train_step,
            table,
            outputs,
            many,
            FROZEN in written,
            evaluation.infer_offsets,
        )
        if cached:
            manifest = msgspec.structs.replace(manifest, features=cached.table)
        if prepared is not None:
            manifest = msgspec.structs.replace(
                manifest, preprocessing=prepared, version=PREPROCESSING_VERSION
            )
        if sparse is not None:
            manifest = msgspec.structs.replace(manifest, sparse=sparse)
        if settings.split is not None:
            manifest = msgspec.structs.replace(
                manifest, split=settings.split, version=SPLIT_VERSION
            )
        if compute == "float16":
            manifest = msgspec.structs.replace(manifest, compute=compute)
        bundle, difference = _publish_checked(
            target, manifest, written, user, evaluation.infer_offsets, after_steps
        )
        return Exported(
            bundle,
            max(
                difference,
                training.difference,
                evaluation.difference,
                cached.difference if cached else 0.0,
                of_sub_model,
                parts.difference if parts else 0.0,
            ),
            checked.batch_of_one,
            artifacts.reason,
            elements,
            {**training.by_pytorch, **evaluation.by_pytorch},
            effect_of_rounding(user, unrounded),
            training.operators,
            user.without_gradient,
            left_out,
        )


def _checked_preprocessing(
    given: Preprocessing | dict[str, Any] | str | PathLike[str],
) -> Preprocessing:
    try:
        return read_preprocessing(given)
    except ValueError as error:
        raise ExportError(str(error)) from None


def _check_arrays(prepared: Preprocessing, names: Sequence[str]) -> None:
    if sorted(prepared.arrays) != sorted(names):
        raise ExportError(
            f"preprocessing= makes the arrays {', '.join(prepared.arrays)}; expected those of the "
            f"example: {', '.join(names)} (names= gives them other names)"
        )


def _training(
    user: UserModel, settings: ExportSettings
) -> tuple[TrainStep, CheckedGraphs, CheckedStep, Artifacts]:
    """Make the training step, its graphs, and ONNX Runtime's own artifacts for it. Raises
    ExportError."""
    with training_mode(user.model):
        settings.progress("tracing the model")
        step = make_train_step(
            user,
            settings.step,
            features=settings.features,
            personal=settings.personal,
            state=settings.state,
            kept=settings.kept,
            hyper=settings.hyper,
            scaled=settings.compute == "float16",
        )
        training, checked = training_graphs(user, step, settings)
        settings.progress("making ONNX Runtime's own training artifacts")
        return step, training, checked, make_artifacts(user, step)


def _files(
    user: UserModel,
    step: TrainStep,
    settings: ExportSettings,
    folder: Path,
    made: Iterable[CheckedGraphs | Artifacts | FeatureGraphs | None],
) -> dict[str, bytes | Path]:
    """Return the bundle's files, except infer.onnx and the manifest: name -> bytes, or a file in
    ``folder``."""
    files: dict[str, bytes] = {}
    for row in made:
        files |= row.files if row is not None else {}
    if any(bool(value.any()) for value in step.state.values()):
        files[STATE] = save_safetensors({name: value.numpy() for name, value in step.state.items()})
    written: dict[str, bytes | Path] = {**files}
    if settings.constants is not None:
        known = names_of_constants(user.model, settings.frozen)
        written = with_frozen_file(files, settings.constants, known, folder / "frozen")
    written[PARAMETERS] = write_safetensors(step.values, folder / "parameters")
    return written


def _publish_checked(
    target: Path,
    manifest: Manifest,
    files: Mapping[str, bytes | Path],
    user: UserModel,
    infer_offsets: Mapping[str, int],
    after_steps: Mapping[str, Tensor],
) -> tuple[Bundle, float]:
    """Write the bundle beside its place, check infer.onnx, and put the folder in its place.

    after_steps: parameters with which infer.onnx is checked. Returns the bundle, and the largest
    difference of infer.onnx from PyTorch. Raises ExportError, and then leaves what was there.
    """
    temporary = _name_beside(target, "part")
    infer = files[INFER]
    assert isinstance(infer, Path)
    try:
        bundle = open_bundle(write_bundle(temporary, manifest, files))
        with_steps = shutil.copyfile(temporary / INFER, infer)
        with with_steps.open("r+b") as stream:
            for name, offset in infer_offsets.items():
                stream.seek(offset)
                stream.write(after_steps[name].numpy().data)
        give_back_freed_memory()
        with evaluation_mode(user.model):
            difference = check_infer(user, with_steps, after_steps)
        publish(temporary, target)
    except BundleError as error:
        raise ExportError(f"the bundle does not fit its own format: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return bundle._replace(path=target), difference


def _manifest(
    name: str,
    user: UserModel,
    step: TrainStep,
    batch: tuple[Input, ...],
    outputs: Sequence[Input],
    many: TrainMany | None,
    has_frozen_file: bool,
    infer_offsets: Mapping[str, int],
) -> Manifest:
    return Manifest(
        format=FORMAT,
        version=FROZEN_VERSION if has_frozen_file else FORMAT_VERSION,
        name=name,
        parameters=_parameter_table(step, infer_offsets),
        batch=batch,
        outputs=tuple(outputs),
        hyper=tuple(Hyper(name, default) for name, default in step.hyper.items()),
        step=step.rule,
        metrics=tuple(user.metrics),
        files={},  # write_bundle fills it in
        state=_state_table(step),
        references=step.references,
        random=step.random,
        many=many,
        normalisation=tuple(row for row in step.values if row in step.normalisation)
        or msgspec.UNSET,
        opset=OPSET,
        ir_version=IR_VERSION,
        made_by=(
            f"fleetlearn {version('fleetlearn')}, torch {torch.__version__}, onnx {version('onnx')}"
        ),
    )


def _outputs(user: UserModel) -> tuple[list[Input], dict[str, str]]:
    """Return the manifest's rows for the model's outputs, and what is left out: name -> what it is.

    An output that is not a tensor with a row for each example is left out: the state of a recurrent
    layer, keys and values for a next call, the mean loss. Raises ExportError if nothing else is
    there.
    """
    left_out: dict[str, str] = {}
    outputs_alone: dict[str, Tensor] = {}
    # for two numbers of examples: a state of 2 layers has 2 rows too
    for rows, outputs in user.evaluated.items():
        for name, value in outputs.items():
            if not isinstance(value, Tensor):
                left_out.setdefault(name, f"the type {value}")
            elif not value.dim() or len(value) != rows:
                left_out.setdefault(name, f"shape {tuple(value.shape)} for {rows} examples")
            else:
                outputs_alone.setdefault(name, value)
    outputs_alone = {name: value for name, value in outputs_alone.items() if name not in left_out}
    if not outputs_alone:
        what = (
            "; ".join(f"{name} has {text}" for name, text in left_out.items())
            or "it returns nothing"
        )
        raise ExportError(
            f"the model has no output with a row for each example: {what}. Expected a tensor with "
            "the examples on the first axis, alone or in a tuple, list or dict: return what the "
            "loss reads, and leave means over the batch to the loss"
        )
    with as_export_error("the model's outputs do not fit a bundle"):
        return [array_row(name, value) for name, value in outputs_alone.items()], left_out


def _parameter_table(step: TrainStep, offsets: Mapping[str, int]) -> tuple[Parameter, ...]:
    begins = _offsets(step.values)
    return tuple(
        Parameter(
            name,
            tuple(value.shape),
            begins[name],
            name in step.buffers,
            name in step.personal,
            offsets.get(name),
        )
        for name, value in step.values.items()
    )


def _state_table(step: TrainStep) -> tuple[State, ...]:
    begins = _offsets(step.state)
    return tuple(
        State(name, tuple(value.shape), begins[name], name in step.kept)
        for name, value in step.state.items()
    )


def _offsets(values: Mapping[str, Tensor]) -> dict[str, int]:
    """Return where each tensor begins in the flat vector, in elements."""
    ends = list(accumulate((value.numel() for value in values.values()), initial=0))
    return dict(zip(values, ends, strict=False))


def checked_target(path: str | PathLike[str]) -> Path:
    """Return the absolute path. Raises ExportError if something other than a bundle is there."""
    try:
        target = in_home(path).resolve()
    except ValueError as error:
        raise ExportError(f"the bundle cannot be written: {error}") from None
    if not target.parent.is_dir():
        raise ExportError(
            f"{target.parent} is not a folder; the bundle {target.name} would be written into it"
        )
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        try:
            open_bundle(target, files=())
        except BundleError as error:
            raise ExportError(
                f"{target} exists and is not a training bundle, so it is not replaced: {error}"
            ) from None
        if not target.is_dir():
            raise ExportError(
                f"{target} is a bundle's zip; a folder does not replace it: choose another path"
            )
    return target


def _name_beside(target: Path, kind: str) -> Path:
    return target.with_name(f".{target.name}.{token_hex(4)}.{kind}")


def publish(temporary: Path, target: Path) -> None:
    """Move the finished folder to its place. No call replaces a folder in one step, so an older one
    moves first."""
    old = None
    if target.exists():
        old = _name_beside(target, "old")
        target.rename(old)
    try:
        temporary.rename(target)
    except OSError:
        if old:
            old.rename(target)
        raise
    if old:
        shutil.rmtree(old)
