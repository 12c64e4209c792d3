"""Where a plan takes functions of other packages, for its rounds and what becomes of updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fleetlearn_protocol import extensions
from fleetlearn_protocol.extensions import ExtensionPoint

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


def refuse_unknown_name(
    point: ExtensionPoint[Any], key: str, name: object, ours: Sequence[str], what: str
) -> None:
    """Raise ValueError unless the name is one of ours or may be an extension's. ``what``: what ours
    are, in words."""
    # The author of a plan may have given what is not hashable.
    if name not in ours and not extensions.is_extension(point, name):
        raise ValueError(
            f"{key} = {name!r} is not known{near(str(name), ours)} {what}: {', '.join(ours)}; or "
            f"an own {point.name}, such as my_package:my_function"
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
