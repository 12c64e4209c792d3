"""The kinds of computations, and what both sides must know of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from msgspec import UNSET, UnsetType

from fleetlearn_protocol.computations import (
    boosted_onnx,
    components_layout,
    private_trees,
    statistics,
    trees_layout,
)
from fleetlearn_protocol.computations.boosting_settings import BoostedComponents, BoostedTrees
from fleetlearn_protocol.computations.function_layout import (
    first_function_state,
    function_state,
    function_sums,
)
from fleetlearn_protocol.computations.function_settings import FunctionSums
from fleetlearn_protocol.computations.layout import Layout, SumsLayout
from fleetlearn_protocol.computations.private_sums import Groups
from fleetlearn_protocol.computations.settings import Statistics
from fleetlearn_protocol.manifest import Input
from fleetlearn_protocol.preprocessing import (
    ByteText,
    Cast,
    Codes,
    Index,
    Numeric,
    Operation,
    Preparation,
    Preprocessing,
)
from fleetlearn_protocol.vector import Vector


class ComputationKind(NamedTuple):
    """One kind. Each function takes the settings that the bundle has of it."""

    settings: type
    """Their type; its tag is the kind's name, which is the task's algorithm too."""
    state: Callable[[Any], Layout]
    """What the state is: the vector that travels as the model, P float32 elements."""
    sums: Callable[[Any], SumsLayout]
    """What a device adds up over its rows: S whole numbers, the same in each round."""
    first: Callable[[Any], Vector]
    """The state before the first round, float32, shape (P,)."""
    arrays: Callable[[Any], tuple[Input, ...]]
    """The arrays of a batch of rows."""
    preprocessing: Callable[[Any], Preprocessing | UnsetType] = lambda settings: UNSET
    """How they are made of a table, where the bundle's maker says nothing else."""
    infer: Callable[[Any, Vector], bytes] | None = None
    """A state as an ONNX file that predicts; None: nothing is predicted."""
    groups: Callable[[Any, Vector], Groups] | None = None
    """Settings, state -> how the sums of the next round are scaled and clipped with differential
    privacy. None: the kind's sums have no such bound."""
    no_sense_with_noise: Callable[[Any], str | None] = lambda settings: None
    """What of the settings would find nothing but noise, and what to do; None: nothing."""
    releases: Callable[[Any], int] | None = None
    """How many rounds there are at most with differential privacy. None: it is not known."""


def _statistics_arrays(settings: Statistics) -> tuple[Input, ...]:
    numbers = (Input(column.name, "float64", ()) for column in settings.numbers)
    texts = (Input(column.name, "uint8", (column.longest,)) for column in settings.categories)
    return (*numbers, *texts)


def _statistics_preprocessing(settings: Statistics) -> Preprocessing:
    arrays = {
        column.name: Preparation(column.name, steps=(Numeric(),)) for column in settings.numbers
    }
    for column in settings.categories:
        arrays[column.name] = Preparation(column.name, steps=(ByteText(column.longest),))
    return Preprocessing(arrays)


def _boosting_arrays(settings: BoostedTrees | BoostedComponents) -> tuple[Input, ...]:
    x = Input("x", "float32", (len(settings.columns),))
    if not settings.y_classes:
        return x, Input("y", "float32", ())
    return x, Input("y", "int64", (), below=settings.y_classes)


def _boosting_preprocessing(
    settings: BoostedTrees | BoostedComponents,
) -> Preprocessing | UnsetType:
    if not settings.label:
        return UNSET
    names = tuple(column.name for column in settings.columns)
    texts = tuple(
        column.categories if isinstance(column.categories, tuple) else ()
        for column in settings.columns
    )
    x: tuple[Operation, ...] = (Codes(texts),) if any(texts) else (Numeric(),)
    y: tuple[Operation, ...] = (Numeric(), Cast("int64")) if settings.y_classes else (Numeric(),)
    if settings.label_values:
        y = (Index(settings.label_values),)
    return Preprocessing(
        {"x": Preparation(names, steps=x), "y": Preparation(settings.label, steps=y)}
    )


def _function_arrays(settings: FunctionSums) -> tuple[Input, ...]:
    return tuple(Input(name, row.dtype, row.shape) for name, row in sorted(settings.rows.items()))


def _function_preprocessing(settings: FunctionSums) -> Preprocessing | UnsetType:
    if not any(row.columns for row in settings.rows.values()):
        return UNSET
    arrays = {}
    for name, row in settings.rows.items():
        # A row of one column that has an axis is made of several columns too, of one.
        columns = row.columns if row.shape else row.columns[0]
        steps: tuple[Operation, ...] = (Numeric(), Cast(row.dtype))
        arrays[name] = Preparation(columns, steps=steps)
    return Preprocessing(arrays)


KINDS: Mapping[str, ComputationKind] = {
    "statistics": ComputationKind(
        Statistics,
        statistics.state_layout,
        statistics.sums_layout,
        statistics.first_state,
        _statistics_arrays,
        _statistics_preprocessing,
        groups=statistics.private_groups,
        no_sense_with_noise=statistics.no_sense_with_noise,
        releases=lambda settings: settings.rounds,
    ),
    "boosted-trees": ComputationKind(
        BoostedTrees,
        trees_layout.trees_state,
        trees_layout.trees_sums,
        trees_layout.first_trees,
        _boosting_arrays,
        _boosting_preprocessing,
        boosted_onnx.trees_onnx,
        groups=private_trees.tree_groups,
        no_sense_with_noise=private_trees.no_sense_in_trees,
        releases=private_trees.releases_of_trees,
    ),
    "boosted-components": ComputationKind(
        BoostedComponents,
        components_layout.components_state,
        components_layout.components_sums,
        components_layout.first_components,
        _boosting_arrays,
        _boosting_preprocessing,
        boosted_onnx.components_onnx,
    ),
    "function": ComputationKind(
        FunctionSums,
        function_state,
        function_sums,
        first_function_state,
        _function_arrays,
        _function_preprocessing,
    ),
}
"""By the name that is the tag of the settings."""
