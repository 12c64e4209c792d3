"""Makes the graphs with which a device computes what is frozen once for each example, and trains
from that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import onnx
from fleetlearn_protocol.manifest import EVAL_FROM_FEATURES, FEATURES, TRAIN_FROM_FEATURES, Input

from fleetlearn_export.checks.feature_rows import Tried, find_again, try_rows
from fleetlearn_export.checks.graph_checks import check_eval, check_train
from fleetlearn_export.emission.constants import Constants
from fleetlearn_export.emission.emit import Call, Emission
from fleetlearn_export.errors import ExportError
from fleetlearn_export.export_settings import ExportSettings
from fleetlearn_export.graphs.coded_weights import code_weights
from fleetlearn_export.graphs.conversion import check_standard, serialised
from fleetlearn_export.graphs.feature_split import (
    BATCH,
    PRODUCTS,
    SEED,
    TRAINED,
    arrays_read,
    candidates,
    computed_from,
    cut,
    dependencies,
    features_part,
    rest_of_step,
)
from fleetlearn_export.model.source_locations import location_of_node
from fleetlearn_export.model.train_step import TrainStep
from fleetlearn_export.model.user_model import UserModel, evaluation_mode, training_mode


class FoundFeatures(NamedTuple):
    """The features of a training step, before the graph is split."""

    step: onnx.ModelProto
    values: dict[str, str]
    """Value of the step's graph -> the feature's name."""
    tried: Tried


class FeatureGraphs(NamedTuple):
    """The graphs of a bundle whose features can be kept, compared with PyTorch."""

    files: dict[str, bytes]
    table: tuple[Input, ...]
    """The manifest's features."""
    difference: float
    """The largest difference from PyTorch."""


def find_features(
    user: UserModel, step: onnx.ModelProto, emission: Emission | None, constants: Constants | None
) -> FoundFeatures:
    """Find what the frozen part of the model makes of an example.

    step: the graph of a training step. emission: how it was written, for locations in the user's
    code. constants: those that the graph has kept apart. Raises ExportError if no feature would be
    worth keeping, or a part that is frozen could not be kept; the text names the operator.
    """
    tried = try_rows(user, step, candidates(step), constants)
    values = cut(step, tried.rows)
    _check(user, step, values, emission, constants)
    names = iter(f"feature{number}" for number in range(len(values) + len(user.batch)))
    free = (name for name in names if name not in user.batch)
    return FoundFeatures(step, dict(zip(values, free, strict=False)), tried)


def feature_graphs(
    user: UserModel,
    step: TrainStep,
    features: FoundFeatures,
    evaluation: onnx.ModelProto,
    batch: Sequence[Input],
    settings: ExportSettings,
) -> FeatureGraphs:
    """Make features.onnx and the graphs that read what it computes. Raises ExportError.

    evaluation: the graph of eval.onnx. What it computes of the features is cut off too. batch: the
    manifest's rows. Arrays that are read beside the features are in the manifest's features.
    """
    constants = settings.constants
    again = find_again(
        evaluation, candidates(evaluation), features.tried, list(features.values), constants
    )
    of_evaluation = {
        again[value]: name for value, name in features.values.items() if value in again
    }
    computed = [
        msgspec.structs.replace(features.tried.rows[value], name=name)
        for value, name in features.values.items()
    ]
    read = arrays_read(features.step, features.values) | arrays_read(evaluation, of_evaluation)
    table = (*computed, *(row for row in batch if row.name in read))
    graphs = {
        FEATURES: features_part(features.step, table, features.values),
        TRAIN_FROM_FEATURES: rest_of_step(features.step, table, features.values),
        EVAL_FROM_FEATURES: rest_of_step(evaluation, table, of_evaluation),
    }
    for graph in graphs.values():
        check_standard(graph)
    files = {
        path: serialised(code_weights(graph, settings.frozen, constants), constants)
        for path, graph in graphs.items()
    }
    settings.progress("training and evaluating from features against PyTorch")
    with training_mode(user.model):
        trained = check_train(
            user,
            step,
            files[TRAIN_FROM_FEATURES],
            settings.features,
            before=files[FEATURES],
            constants=constants,
        )
    with evaluation_mode(user.model):
        difference = check_eval(
            user,
            files[EVAL_FROM_FEATURES],
            step.values,
            before=files[FEATURES],
            constants=constants,
        )
    return FeatureGraphs(files, table, max(trained.difference, difference))


def _check(
    user: UserModel,
    step: onnx.ModelProto,
    values: list[str],
    emission: Emission | None,
    constants: Constants | None,
) -> None:
    """Raise ExportError unless all products of the frozen part are before the features."""
    kinds = dependencies(step)
    computed = computed_from(step, values)
    missed = [
        node.output[0]
        for node in step.graph.node
        if node.op_type in PRODUCTS
        and BATCH in kinds[node.output[0]]
        and TRAINED not in kinds[node.output[0]]
        and node.output[0] not in computed
    ]
    if missed:
        before = computed_from(step, missed)
        made = [
            name
            for node in step.graph.node
            for name in node.output
            if name in before and BATCH in kinds[name]
        ]
        random = next((name for name in made if SEED in kinds[name]), None)
        mixing = set() if random else try_rows(user, step, made, constants).mixing
        first = random or next((name for name in made if name in mixing), None)
        if first is None:
            raise ExportError(
                f"cache_features: {_described(missed[0], emission)} is frozen, and neither its "
                "result nor what follows before the first trained parameter has a row for each "
                "example, so a device cannot keep it by examples"
            )
        product = next(name for name in missed if first in computed_from(step, [name]))
        then = f", comes before {_described(product, emission)}, which is frozen"
        if random:
            raise ExportError(
                "cache_features: dropout, or what else draws random "
                f"numbers{_location(random, emission)}{then}: its results differ from step to "
                "step, so a device cannot keep them. Switch it off, or move it behind what is "
                "frozen"
            )
        raise ExportError(
            f"cache_features: {_described(first, emission)}{then}: its result for one example "
            "depends on the other examples of the batch, as batch normalisation's in training mode "
            "does, so a device cannot keep it. Put that module into evaluation mode"
        )
    if not values:
        raise ExportError(
            "cache_features: no convolution, matrix product or recurrent layer lies before the "
            "first trained parameter, so there is nothing that a device could compute once and "
            "keep. Leave cache_features out, or train less"
        )


def _described(value: str, emission: Emission | None) -> str:
    """Return the operator that makes the value, with its location in the user's code where that is
    known."""
    call = _call(value, emission)
    return (
        f"the operator that makes {value}"
        if call is None
        else f"operator {call.node.target}{location_of_node(call.node)}"
    )


def _location(value: str, emission: Emission | None) -> str:
    call = _call(value, emission)
    return "" if call is None else location_of_node(call.node)


def _call(value: str, emission: Emission | None) -> Call | None:
    """Return the call of the traced graph that wrote the value."""
    if emission is None:
        return None
    order = {
        made: index for index, node in enumerate(emission.model.graph.node) for made in node.output
    }
    index = order.get(value, len(order))
    return next(
        (
            call
            for call in emission.calls
            if max((order.get(name or "", -1) for name in call.results), default=-1) >= index
        ),
        None,
    )
