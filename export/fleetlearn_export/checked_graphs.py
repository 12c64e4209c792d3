"""Makes a bundle's graphs, and compares them with PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import NamedTuple

import onnx
import torch
from fleetlearn_protocol.manifest import EVAL, INFER, TRAIN, TRAIN_MANY, Input, TrainMany
from torch import nn

from fleetlearn_export.checks.block_check import check_many
from fleetlearn_export.checks.emission_check import check_emission, check_evaluation
from fleetlearn_export.checks.graph_checks import check_eval, check_train, check_train_in_float16
from fleetlearn_export.checks.memory import give_back_freed_memory
from fleetlearn_export.checks.micro_batch_check import check_micro_batches
from fleetlearn_export.checks.training_comparison import CheckedStep
from fleetlearn_export.emission.emitter import EmissionError
from fleetlearn_export.errors import ExportError
from fleetlearn_export.feature_graphs import FoundFeatures, find_features
from fleetlearn_export.graphs.batch_norm_folding import fold_batch_norms
from fleetlearn_export.graphs.coded_weights import code_weights
from fleetlearn_export.graphs.conversion import check_standard, copied, serialised, to_onnx, with_parameters
from fleetlearn_export.graphs.emitted import Emitted, emitted, emitted_parts
from fleetlearn_export.graphs.half_precision import Compute, in_float32, with_every_rounding, with_half_products
from fleetlearn_export.graphs.train_many import many_program, skip_selection_when_all_steps_done, trace_many
from fleetlearn_export.inspection.memory_budget import Budget, train_elements, within_budget
from fleetlearn_export.model.frozen_weights import Stored
from fleetlearn_export.model.steps import Function, Tensors
from fleetlearn_export.model.train_step import TrainStep
from fleetlearn_export.model.user_model import IndexRange, UserModel
from fleetlearn_export.tracing.decompositions import Decompositions, inference_decompositions, training_decompositions
from fleetlearn_export.tracing.index_ranges import index_ranges
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


class CheckedGraphs(NamedTuple):
    """Graphs of a bundle, compared with PyTorch."""

    files: dict[str, bytes]
    difference: float
    """The largest difference."""
    ranges: Sequence[IndexRange | None] = ()
    """Of the training graphs: the integers that each array of the batch may hold, where the loss tells it."""
    by_pytorch: Mapping[str, str] = {}
    """Graph that PyTorch's ONNX exporter wrote -> why it was not written straight from the traced graph."""
    operators: str | None = None
    """What the comparison of train.onnx's operators found."""
    found: FoundFeatures | None = None
    """Of the training graphs: the features that a device may keep, if they are asked for."""
    evaluation: onnx.ModelProto | None = None
    """Of the evaluation graphs: eval.onnx before its weights were coded, if features are asked for."""


def training_graphs(
    user: UserModel,
    step: TrainStep,
    features: Function | None,
    frozen: Stored,
    many: TrainMany | None,
    budget: Budget | None,
    cache_features: bool,
    compute: Compute,
    progress: Callable[[str], None],
) -> tuple[CheckedGraphs, CheckedStep]:
    """Make train.onnx, and train_many.onnx if asked for. The model is in training mode. Raises ExportError."""
    located = export_loss(user)
    ranges = index_ranges(located, len(user.batch))
    progress("converting the training step to ONNX")
    program = cache(partial(train_program, step, located))
    graph, written, reason = _written(partial(trace_step, step), program, training_decompositions)
    by_pytorch = {TRAIN: reason} if reason else {}
    graph = fold_batch_norms(graph)
    found = None
    if cache_features:
        progress("looking for what a device can compute once")
        found = find_features(user, copied(graph), written.emission if written else None)
    graph = code_weights(graph, frozen)
    if budget is not None:
        progress("fitting the training step to the memory")
        graph = within_budget(graph, partial(step_with_means, step, frozen), train_elements(step), budget, progress)
    operators = None
    if written:
        progress("computing each operator of the training step in PyTorch")
        operators = check_emission(user, step, written.traced, written.emission, features, located).described()
    whole = graph
    if compute == "float16":
        graph = with_half_products(whole)
        check_standard(graph)
        whole = in_float32(graph)
    files = {TRAIN: serialised(graph)}
    compared = serialised(whole)
    traced = written.traced if written and many else None
    rounding = serialised(with_every_rounding(graph)) if compute == "float16" else None
    del graph, whole, written  # they hold all frozen weights
    give_back_freed_memory()
    progress("training some steps against PyTorch")
    checked = check_train(user, step, compared, features)
    if rounding is not None:
        progress("training some steps with products in float16")
        check_train_in_float16(user, step, rounding, features)
    del compared, rounding
    if many is None:
        return CheckedGraphs(files, checked.difference, ranges, by_pytorch, operators, found), checked
    progress(f"the same for {many.devices} devices at once")
    block = cache(lambda: many_program(step, program().exported, many, located))
    if traced is not None:
        trace_block = partial(trace_many, step, traced, many)
        graph, _, reason = _written(trace_block, block, training_decompositions)
        by_pytorch |= {TRAIN_MANY: reason} if reason else {}
    else:
        graph = to_onnx(block(), training_decompositions(block().exported.graph))
        by_pytorch[TRAIN_MANY] = by_pytorch[TRAIN]
    files[TRAIN_MANY] = serialised(code_weights(skip_selection_when_all_steps_done(graph, many), frozen))
    difference = max(checked.difference, check_many(user, step, files[TRAIN_MANY], many))
    return CheckedGraphs(files, difference, ranges, by_pytorch, operators, found), checked


def step_with_means(step: TrainStep, frozen: Stored) -> onnx.ModelProto:
    """Return the training step as ``split_batch`` takes it. Raises ExportError if it cannot have micro-batches."""
    norms = [name for name, module in step.objective.model.named_modules() if isinstance(module, BATCH_NORMS)]
    whole = [name for name in norms if step.objective.model.get_submodule(name).training]
    if whole or step.buffers:
        raise ExportError(f"{min([*whole, *step.buffers])} takes its statistics of the whole batch")
    try:
        model = emitted(partial(trace_step, step, with_means=True)).model
    except EmissionError as error:
        raise ExportError(f"PyTorch's exporter writes the graph ({error})") from None
    code_weights(fold_batch_norms(model), frozen)
    check_micro_batches(step, model)
    return model


def evaluation_graphs(
    user: UserModel,
    step: TrainStep,
    outputs: Sequence[Input],
    frozen: Stored,
    cache_features: bool,
    progress: Callable[[str], None],
) -> CheckedGraphs:
    """Make eval.onnx and infer.onnx. The model is in evaluation mode. Raises ExportError."""
    progress("converting evaluation and inference")
    names = [row.name for row in outputs]
    graphs, reason = _evaluation_graphs(user, step.values, names)
    files: dict[str, bytes] = {}
    uncoded = None
    while graphs:  # each graph holds all frozen weights, so none is kept longer than it is needed
        name, graph = graphs.popitem()
        fold_batch_norms(graph)
        if name == EVAL and cache_features:
            uncoded = copied(graph)
        code_weights(graph, frozen, for_people=name == INFER)
        files[name] = with_parameters(graph, step.values) if name == INFER else serialised(graph)
        del graph
        give_back_freed_memory()
    by_pytorch = dict.fromkeys((EVAL, INFER), reason) if reason else {}
    progress("evaluating against PyTorch")
    difference = check_eval(user, files[EVAL], step.values)
    return CheckedGraphs(files, difference, (), by_pytorch, evaluation=uncoded)


def _evaluation_graphs(
    user: UserModel, values: Tensors, outputs: list[str]
) -> tuple[dict[str, onnx.ModelProto], str | None]:
    """Return the graphs of eval.onnx and infer.onnx, written straight from one trace, or by PyTorch's ONNX exporter
    with the reason for that."""
    reason = None
    # PyTorch's exporter writes a recurrent layer as one operator, which is faster than the steps of a traced one.
    if not any(isinstance(module, nn.RNNBase) for module in user.model.modules()):
        parameters = {f"param.{name}": f"param.{name}" for name in values}
        ways = {
            EVAL: (parameters | {f"batch.{name}": f"batch.{name}" for name in user.batch}, user.sum_names()),
            INFER: (parameters | {f"batch.{name}": name for name in user.inputs()}, outputs),
        }
        try:
            graphs, traced, emission = emitted_parts(
                partial(trace_evaluation, user, values, outputs), list(ways.values())
            )
            check_evaluation(user, values, traced, emission)
            return dict(zip(ways, graphs, strict=True)), None
        except EmissionError as error:
            reason = str(error)
    programs = {EVAL: eval_program(user, values), INFER: infer_program(user, values, outputs)}
    return {name: to_onnx(found, inference_decompositions(found.located)) for name, found in programs.items()}, reason


def _written(
    trace: Callable[[Decompositions], Traced],
    program: Callable[[], Program],
    table: Callable[[torch.fx.Graph], Decompositions],
) -> tuple[onnx.ModelProto, Emitted | None, str | None]:
    """Return the graph, written straight from the trace, or by PyTorch's ONNX exporter and then the reason for that."""
    try:
        written = emitted(trace)
    except EmissionError as reason:
        found = program()
        return to_onnx(found, table(found.exported.graph)), None, str(reason)
    give_back_freed_memory()
    return written.model, written, None
