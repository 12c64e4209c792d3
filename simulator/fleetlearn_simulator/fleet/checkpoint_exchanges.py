"""The part of a checkpoint for exchanges that are open: what was asked, and what was answered. What
the engine knows of them is in its own part."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from fleetlearn_protocol.exchanges import EXCHANGE_KINDS, fields_of
from numpy.typing import NDArray

from fleetlearn_simulator.fleet.exchanges import DeviceExchanges, RunningAnswer
from fleetlearn_simulator.fleet.simulated_exchange import OpenExchange
from fleetlearn_simulator.training.backend import RoundInputs

Tensors = dict[str, NDArray[Any]]
MODEL = "model."
"""Prefix of the models that open exchanges are about, before the kind."""


def snapshot(exchanges: DeviceExchanges) -> tuple[Tensors, dict[str, Any]]:
    """Return the open exchanges and who is asked, as tensors and plain values."""
    series, running = exchanges.tasks.coordinator.engine.exchanges, exchanges.running
    open_now = {kind: row for kind, row in exchanges.opened.items() if series[kind].is_open}
    tensors: Tensors = {"ends": np.array([row.ends for row in running.values()], np.float64)}
    for kind, exchange in open_now.items():
        if exchange.inputs is not None:
            tensors[f"{MODEL}{kind}"] = exchange.inputs.model
    state = {
        "running": [[device, row._replace(ends=0.0)] for device, row in running.items()],
        "open": {kind: _fields(exchange) for kind, exchange in open_now.items()},
    }
    return tensors, state


def restore(exchanges: DeviceExchanges, tensors: Tensors, state: dict[str, Any]) -> None:
    """Let devices that are asked nothing go on with what a checkpoint has. The ends of their
    answers are in the queue of events already."""
    rows = zip(state["running"], tensors["ends"].tolist(), strict=True)
    exchanges.running = {
        device: RunningAnswer(*saved)._replace(ends=ends) for (device, saved), ends in rows
    }
    for kind, fields in state["open"].items():
        model = tensors.get(f"{MODEL}{kind}")
        exchanges.opened[kind] = _exchange(kind, fields, model)


def _fields(exchange: OpenExchange) -> dict[str, Any]:
    contents = exchange.contents.items()
    return {
        "number": exchange.number,
        "version": exchange.version,
        "phase": exchange.phase,
        "opened": exchange.opened,
        "before": [(device, fields_of(content)) for device, content in exchange.before.items()],
        "contents": [(task, content and fields_of(content)) for task, content in contents],
        "accepted": [*exchange.accepted.items()],
    }


def _exchange(kind: str, fields: dict[str, Any], model: NDArray[Any] | None) -> OpenExchange:
    reply = EXCHANGE_KINDS[kind].reply
    before = {device: msgspec.convert(row, reply) for device, row in fields["before"]}
    contents = {task: row and msgspec.convert(row, reply) for task, row in fields["contents"]}
    return OpenExchange(
        **{
            **fields,
            "inputs": None if model is None else RoundInputs(model),
            "before": before,
            "contents": contents,
            "accepted": dict(fields["accepted"]),
        }
    )
