"""Makes a bundle's graphs, and compares them with PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import onnx
import torch
from fleetlearn_protocol.manifest import EVAL, INFER, TRAIN, TRAIN_MANY, Input
from torch import nn

from fleetlearn_export.checks.block_check import check_many
from fleetlearn_export.checks.compared_steps import CheckedStep
from fleetlearn_export.checks.comparison import ROWS_FOR_FEWER
from fleetlearn_export.checks.emission_check import StepChecked, check_emission, check_evaluation
from fleetlearn_export.checks.graph_checks import check_eval, check_train, check_train_in_float16
from fleetlearn_export.checks.memory import give_back_freed_memory
from fleetlearn_export.checks.micro_batch_check import check_micro_batches
from fleetlearn_export.checks.tracing_check import check_tracing
from fleetlearn_export.checks.training_in_place import trained_in_place
from fleetlearn_export.emission.constants import Constants
from fleetlearn_export.emission.emitter import EmissionError
from fleetlearn_export.emission.functional import without_writes
from fleetlearn_export.errors import ExportError
from fleetlearn_export.export_settings import ExportSettings
from fleetlearn_export.feature_graphs import FoundFeatures, find_features
from fleetlearn_export.graphs.batch_norm_folding import fold_batch_norms
from fleetlearn_export.graphs.coded_weights import code_weights
from fleetlearn_export.graphs.conversion import (
    check_standard,
    copied,
    serialised,
    to_onnx,
    write_with_parameters,
)
from fleetlearn_export.graphs.emitted import Emitted, drop_unused, emitted, part, written
from fleetlearn_export.graphs.half_precision import (
    in_float32,
    with_every_rounding,
    with_half_products,
)
from fleetlearn_export.graphs.micro_batches import part_size
from fleetlearn_export.graphs.scattered_sums import scatter_into_sums
from fleetlearn_export.graphs.small_vectors import put_vectors_together
from fleetlearn_export.graphs.train_many import (
    many_program,
    skip_selection_when_all_steps_done,
    trace_many,
)
from fleetlearn_export.inspection.memory_budget import train_elements, within_budget
from fleetlearn_export.model.arguments import IndexRange
from fleetlearn_export.model.frozen_weights import Stored
from fleetlearn_export.model.steps import Function, Tensors
from fleetlearn_export.model.train_step import TrainStep
from fleetlearn_export.model.user_model import UserModel
from fleetlearn_export.tracing.decompositions import (
    Decompositions,
    inference_decompositions,
    training_decompositions,
)
from fleetlearn_export.tracing.index_ranges import index_ranges
from fleetlearn_export.tracing.own_values import refuse_own_values
from fleetlearn_export.tracing.size_conditions import Cases
from fleetlearn_export.tracing.trace import (
    Program,
    Traced,
    eval_program,
    export_loss,
    infer_program,
    trace_evaluation,
    trace_step,
    train_program,
)

BATCH_NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm
RANDOM_PART = ROWS_FOR_FEWER
"""The least number of examples in a micro-batch of a step that draws random numbers: the check
trains on one."""


class CheckedGraphs(NamedTuple):
    """Graphs of a bundle, compared with PyTorch."""

    files: dict[str, bytes]
    difference: float
    """The largest difference."""
    ranges: Sequence[IndexRange | None] = ()
    """The integers that each array of the batch may hold, where the loss tells it. Training graphs
    have this."""
    by_pytorch: Mapping[str, str] = {}
    """Graph that PyTorch's ONNX exporter wrote -> why it was not written straight from the traced
    graph."""
    operators: str | None = None
    """What the comparison of train.onnx's operators found."""
    found: FoundFeatures | None = None
    """The features that a device may keep, if they are asked for. Training graphs have this."""
    evaluation: onnx.ModelProto | None = None
    """eval.onnx before its weights were coded, if features are asked for. Evaluation graphs have
    this."""
    infer_offsets: Mapping[str, int] = {}
    """Where each parameter's bytes begin in infer.onnx. Evaluation graphs have this."""


def training_graphs(
    user: UserModel, step: TrainStep, settings: ExportSettings
) -> tuple[CheckedGraphs, CheckedStep]:
    """Make train.onnx, and train_many.onnx if asked for. The model is in training mode. Raises
    ExportError."""
    constants, progress, many = settings.constants, settings.progress, settings.many
    located = cache(partial(export_loss, user))
    program = cache(lambda: train_program(step, located()))
    cases = Cases(located)
    progress("converting the training step to ONNX")
    trace = partial(trace_step, step, take_cases=cases.take)
    graph, written, reason = _written(trace, program, training_decompositions, constants)
    if written:
        refuse_own_values(written.traced, user.model, step.values)
    by_pytorch = {TRAIN: reason} if reason else {}
    step_graph = written.traced.graph if written else program().located_step
    assert step_graph is not None
    ranges = index_ranges(step_graph, step.inputs())
    graph = scatter_into_sums(fold_batch_norms(graph, constants))
    features = None
    if settings.cache_features:
        progress("looking for what a device can compute once")
        features = find_features(
            user, copied(graph), written.emission if written else None, constants
        )
    graph = _fitted_step(graph, step, settings)
    step_graphs = _serialised_step(graph, settings)
    del graph  # before the checks, which take the most memory of an export
    traced = written.traced if written and many else None

    operators = None
    progress("training the model in place")
    with trained_in_place(user, step, settings.features) as trained:
        if written:
            progress("computing each operator of the training step in PyTorch")
            checked_step = _check_operators(
                user, trained, written, cases, settings.features, located
            )
            operators = checked_step.operators.described()
            user = user._replace(trains_on_one=checked_step.batch_of_one)
        del written
        give_back_freed_memory()
        checked = _check_steps(user, trained, step_graphs, settings)

    files, difference = {TRAIN: step_graphs.train}, checked.difference
    del step_graphs
    if many is not None:
        progress(f"the same for {many.devices} devices at once")
        block = cache(lambda: many_program(step, program().exported, many, located()))
        if traced is not None:
            trace_block = partial(trace_many, step, traced, many)
            graph, _, reason = _written(trace_block, block, training_decompositions, constants)
        else:
            graph = to_onnx(block(), training_decompositions(block().exported.graph))
        by_pytorch |= {TRAIN_MANY: reason} if reason else {}
        graph = skip_selection_when_all_steps_done(graph, many)
        files[TRAIN_MANY] = serialised(code_weights(graph, settings.frozen, constants), constants)
        del graph
        of_many = check_many(user, step, files[TRAIN_MANY], many, constants)
        difference = max(difference, of_many)
    return CheckedGraphs(files, difference, ranges, by_pytorch, operators, features), checked


def _fitted_step(
    graph: onnx.ModelProto, step: TrainStep, settings: ExportSettings
) -> onnx.ModelProto:
    """Return the training step with coded weights, within the device's memory where a budget is
    given."""
    constants, progress, budget = settings.constants, settings.progress, settings.budget
    graph = put_vectors_together(code_weights(graph, settings.frozen, constants))
    if budget is None:
        return graph
    progress("fitting the training step to the memory")
    means = partial(step_with_means, step, settings.frozen, constants)
    smallest = RANDOM_PART if step.random else 1
    graph = within_budget(graph, means, train_elements(step), budget, progress, smallest)
    # A step of micro-batches comes from another trace, in which no vectors are together.
    return graph if part_size(graph) is None else put_vectors_together(graph)


class _StepGraphs(NamedTuple):
    """The training step as it is published, and as it is compared with PyTorch."""

    train: bytes
    """train.onnx."""
    compared: bytes
    """The same with products in float32; train.onnx itself unless it has products in float16."""
    rounding: bytes | None
    """With products in float16: the same with each rounding written out, since ONNX Runtime on a
    CPU computes such products in float32."""
    micro_batch: int | None
    """Examples in a micro-batch. None: the step takes the whole batch at once."""


def _serialised_step(graph: onnx.ModelProto, settings: ExportSettings) -> _StepGraphs:
    constants, micro_batch = settings.constants, part_size(graph)
    if settings.compute != "float16":
        train = serialised(graph, constants)
        return _StepGraphs(train, train, None, micro_batch)
    graph = with_half_products(graph)
    check_standard(graph)
    rounding = serialised(with_every_rounding(graph), constants)
    train = serialised(graph, constants)
    return _StepGraphs(train, serialised(in_float32(graph), constants), rounding, micro_batch)


def _check_operators(
    user: UserModel,
    trained: TrainStep,
    written: Emitted,
    cases: Cases,
    features: Function | None,
    located: Callable[[], torch.fx.Graph],
) -> StepChecked:
    """Compare the trace with PyTorch, also for other numbers of examples, and each operator."""
    with cases.explained():
        checked = check_emission(user, trained, written.traced, written.emission, features, located)
        for case in cases.graphs:
            check_tracing(user, trained, without_writes(case), features)
    return checked


def _check_steps(
    user: UserModel, trained: TrainStep, graphs: _StepGraphs, settings: ExportSettings
) -> CheckedStep:
    """Compare some steps with PyTorch's."""
    features, constants, progress = settings.features, settings.constants, settings.progress
    progress("training some steps against PyTorch")
    if trained.random and graphs.micro_batch is not None:
        # Each micro-batch draws other numbers. PyTorch can draw those of the first one, so the
        # comparison has one micro-batch alone.
        first = {name: value[: graphs.micro_batch] for name, value in user.batch.items()}
        user = user._replace(batch=first)
    checked = check_train(user, trained, graphs.compared, features, constants=constants)
    if graphs.rounding is not None:
        progress("training some steps with products in float16")
        check_train_in_float16(user, trained, graphs.rounding, features, constants)
    return checked


def step_with_means(
    step: TrainStep, frozen: Stored, constants: Constants | None = None
) -> onnx.ModelProto:
    """Return the training step as ``split_batch`` takes it. Raises ExportError if it cannot have
    micro-batches."""
    norms = [
        name
        for name, module in step.objective.model.named_modules()
        if isinstance(module, BATCH_NORMS)
    ]
    whole = [name for name in norms if step.objective.model.get_submodule(name).training]
    if whole or step.buffers:
        raise ExportError(f"{min([*whole, *step.buffers])} takes its statistics of the whole batch")
    try:
        model = emitted(partial(trace_step, step, with_means=True), constants).model
    except EmissionError as error:
        raise ExportError(f"PyTorch's exporter writes the graph ({error})") from None
    code_weights(fold_batch_norms(model, constants), frozen, constants)
    check_micro_batches(step, model, constants)
    return model


def evaluation_graphs(
    user: UserModel,
    step: TrainStep,
    outputs: Sequence[Input],
    infer: Path,
    settings: ExportSettings,
) -> CheckedGraphs:
    """Make eval.onnx and infer.onnx. The model is in evaluation mode.

    infer: where infer.onnx is written, which has all weights. Raises ExportError.
    """
    constants, progress = settings.constants, settings.progress
    progress("converting evaluation and inference")
    graphs, reason = _evaluation_graphs(
        user, step.values, [output.name for output in outputs], constants
    )
    files: dict[str, bytes] = {}
    offsets: dict[str, int] = {}
    uncoded = None
    for name, make in graphs.items():
        graph = fold_batch_norms(make(), constants)
        if name == EVAL and settings.cache_features:
            uncoded = copied(graph)
        code_weights(graph, settings.frozen, constants, for_people=name == INFER)
        if name == INFER:
            drop_unused(graph, user.labels())
            offsets = write_with_parameters(graph, step.values, constants, infer)
        else:
            files[name] = serialised(graph, constants)
        del graph
        give_back_freed_memory()
    by_pytorch = dict.fromkeys(graphs, reason) if reason else {}
    progress("evaluating against PyTorch")
    difference = check_eval(user, files[EVAL], step.values, constants=constants)
    return CheckedGraphs(
        files, difference, (), by_pytorch, evaluation=uncoded, infer_offsets=offsets
    )


def _evaluation_graphs(
    user: UserModel, values: Tensors, outputs: list[str], constants: Constants | None
) -> tuple[dict[str, Callable[[], onnx.ModelProto]], str | None]:
    """Return functions that make the graphs of eval.onnx and infer.onnx, and why PyTorch's ONNX
    exporter writes them, unless they are written straight from one trace."""
    program = cache(partial(eval_program, user, values))
    cases = Cases(program)
    try:
        traced, emission, _ = written(
            partial(trace_evaluation, user, values, outputs, take_cases=cases.take), constants
        )
    except EmissionError as error:
        reason = str(error)
    else:
        refuse_own_values(traced, user.model, values)
        with cases.explained():
            check_evaluation(
                user, values, traced, emission, [without_writes(case) for case in cases.graphs]
            )
        parameters = {f"param.{name}": f"param.{name}" for name in values}
        batch = {f"batch.{name}": f"batch.{name}" for name in user.batch}
        inputs = {f"batch.{name}": name for name in user.inputs()}
        return {
            EVAL: partial(part, emission, parameters | batch, user.sum_names()),
            INFER: partial(part, emission, parameters | inputs, outputs),
        }, None

    def converted(found: Program) -> onnx.ModelProto:
        return to_onnx(found, inference_decompositions(found.located))

    return {
        EVAL: lambda: converted(program()),
        INFER: lambda: converted(infer_program(user, values, outputs)),
    }, reason


def _written(
    trace: Callable[[Decompositions], Traced],
    program: Callable[[], Program],
    table: Callable[[torch.fx.Graph], Decompositions],
    constants: Constants | None,
) -> tuple[onnx.ModelProto, Emitted | None, str | None]:
    """Return the graph, written straight from the trace, or by PyTorch's ONNX exporter and then the
    reason for that."""
    try:
        written = emitted(trace, constants)
    except EmissionError as reason:
        try:
            traced_program = program()
            return to_onnx(traced_program, table(traced_program.exported.graph)), None, str(reason)
        except ExportError as error:
            if isinstance(reason.__cause__, ExportError) or "has no counterpart in ONNX" in str(
                error
            ):
                raise
            raise ExportError(
                f"{reason} is not in our table of operators, and PyTorch's ONNX exporter fails: "
                f"{error}. Write that part of the model with other operators"
            ) from error
    give_back_freed_memory()
    return written.model, written, None
