"""Where a plan takes functions of other packages, for its rounds and what becomes of updates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from fleetlearn_protocol import extensions
from fleetlearn_protocol.algorithms import LOCAL_ALGORITHM
from fleetlearn_protocol.computations.function_settings import NEXT_STATE
from fleetlearn_protocol.extensions import ExtensionPoint
from fleetlearn_protocol.own_encodings import ENCODING

from fleetlearn_coordinator.aggregation.aggregators import AGGREGATORS, Aggregator, make
from fleetlearn_coordinator.aggregation.optimizers import Optimizer
from fleetlearn_coordinator.aggregation.own_aggregators import own_aggregator
from fleetlearn_coordinator.aggregation.robust.rules import Bounds
from fleetlearn_coordinator.aggregation.weighing.weighing import WeighingRule
from fleetlearn_coordinator.plan.toml_errors import near

SELECTION_STRATEGY: ExtensionPoint[Any] = ExtensionPoint(
    "selection strategy", object, is_callable=True
)
STOP_RULE: ExtensionPoint[Any] = ExtensionPoint("stop rule", object, is_callable=True)
AGGREGATOR: ExtensionPoint[Any] = ExtensionPoint("aggregator", object)
"""Its factory returns a function of ``RoundUpdates``, or an ``Aggregator``."""
SERVER_OPTIMIZER = ExtensionPoint("server optimizer", Optimizer)
STALENESS_FUNCTION: ExtensionPoint[Any] = ExtensionPoint(
    "staleness function", object, is_callable=True
)
WEIGHING_RULE = ExtensionPoint("weighing rule", WeighingRule)


class OwnName(NamedTuple):
    """A function of another package that a plan names."""

    point: ExtensionPoint[Any]
    name: str
    key: str
    """The plan's, which names it."""
    parameters: Mapping[str, Any]


POINTS: Mapping[str, ExtensionPoint[Any]] = {
    point.name: point
    for point in (
        SELECTION_STRATEGY,
        STOP_RULE,
        AGGREGATOR,
        SERVER_OPTIMIZER,
        STALENESS_FUNCTION,
        WEIGHING_RULE,
        ENCODING,
        LOCAL_ALGORITHM,
        NEXT_STATE,
    )
}
"""What a plan may name of other packages, by its name."""
ASKED_AT_ONCE = (SELECTION_STRATEGY, STOP_RULE)
"""What answers while devices wait. All others have a part in what becomes of updates."""


def register(kind: str, name: str, factory: Callable[..., Any]) -> None:
    """Let plans name a function by this short name, in this process, without a list of modules.

    ``kind``: a key of ``POINTS``, such as ``aggregator`` or ``server optimizer``. ``factory``: a
    function with keyword parameters that returns one. Raises ExtensionError, a ValueError, on
    another kind, or a name that is taken.
    """
    extensions.register(find_point(POINTS, kind), name, factory)


def find_point(points: Mapping[str, ExtensionPoint[Any]], kind: str) -> ExtensionPoint[Any]:
    """Return the point of this name. Raises ExtensionError."""
    if kind not in points:
        raise extensions.ExtensionError(
            f"{kind!r} is no kind of own algorithm{near(kind, points)} Kinds: {', '.join(points)}."
        )
    return points[kind]


def refuse_unknown_name(
    point: ExtensionPoint[Any], key: str, name: object, ours: Sequence[str], what: str
) -> None:
    """Raise ValueError unless the name is one of ours or may be an extension's. ``what``: what ours
    are, in words."""
    # The author of a plan may have given what is not hashable.
    if name not in ours and not extensions.is_extension(point, name):
        raise ValueError(
            f"{key} = {name!r} is not known{near(str(name), ours)} {what}: {', '.join(ours)}; or "
            f"{point.own}"
        )


def find_aggregator(
    name: str, bounds: Bounds, parameters: Mapping[str, Any], buffers: Sequence[slice]
) -> Aggregator[Any]:
    """Return the aggregator of updates that a plan names. ``bounds``, ``buffers``: as for
    ``aggregators.make``. ``parameters``: of an own one. Raises ExtensionError, and ValueError where
    an own one cannot have buffers."""
    if name in AGGREGATORS:
        return make(name, bounds, buffers)
    key = "aggregation.aggregator"
    made = extensions.make_once(AGGREGATOR, name, parameters, key)
    if not callable(made) and not isinstance(made, Aggregator):
        raise extensions.ExtensionError(
            f"{key} = {name!r}: a {type(made).__name__} was returned; an aggregator is a function "
            "of RoundUpdates, or an Aggregator"
        )
    return own_aggregator(name, made, buffers)
