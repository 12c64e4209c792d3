"""Flower's SecAgg+ for secure.py, in an environment that has flwr: DEVICES ELEMENTS NEIGHBOURS
THRESHOLD LOST. Writes what it cost as JSON.

Its own server code (SecAggPlusWorkflow) and its own client code (secaggplus_mod) talk in this
process, so that no bytes travel. The last LOST devices vanish after they have shared their keys.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterable
from copy import deepcopy
from importlib.metadata import version
from statistics import median
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.common import (
    Code,
    FitIns,
    FitRes,
    Status,
    ndarrays_to_parameters,
    parameters_to_ndarrays,
)
from flwr.compat.common import recorddict_compat as compat
from flwr.server.compat.legacy_context import LegacyContext
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD, Key
from flwr.supercore.task_identity import TaskIdentity


class Proxy:
    """What the strategy chooses: a device by its number."""

    def __init__(self, node_id: int) -> None:
        self.node_id = node_id


class EveryDevice:
    """A strategy that asks all devices, and keeps what comes out."""

    def __init__(self, devices: int, parameters: Any) -> None:
        self.chosen = [(Proxy(node), FitIns(parameters, {})) for node in range(1, devices + 1)]
        self.made: list[Any] = []

    def configure_fit(self, *given: Any) -> list[Any]:
        return self.chosen

    def aggregate_fit(self, round: int, results: Any, failures: Any) -> tuple[Any, dict[str, Any]]:
        self.made = parameters_to_ndarrays(results[0][1].parameters)
        return results[0][1].parameters, {}


class Devices:
    """Stands in for Flower's grid: devices answer at once."""

    def __init__(self, devices: int, lost: int, update: Any) -> None:
        self.gone = {*range(devices - lost + 1, devices + 1)}
        self.contexts: dict[int, Context] = {}
        self.update = update
        self.cpu: dict[int, float] = {}
        self.sent: dict[int, int] = {}
        self.stage = 0
        self.seconds = 0.0

    def num_available(self) -> int:
        return len(self.contexts)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: Any = None
    ) -> list[Message]:
        began = time.process_time()
        self.stage += 1
        replies = []
        for message in messages:
            node = message.metadata.dst_node_id
            if self.stage > 2 and node in self.gone:
                continue
            message.content = deepcopy(message.content)  # as if it had travelled
            TaskIdentity.node_id = node
            own = time.process_time()
            context = self.contexts.setdefault(node, Context(1, node, {}, RecordDict(), {}))
            reply = secaggplus_mod(message, context, self.train)
            self.cpu[node] = self.cpu.get(node, 0.0) + time.process_time() - own
            self.sent[node] = self.sent.get(node, 0) + size_of(reply)
            replies.append(reply)
        self.seconds += time.process_time() - began
        return replies

    def train(self, message: Message, context: Context) -> Message:
        result = FitRes(Status(Code.OK, ""), self.update, 1000, {})
        return Message(compat.fitres_to_recorddict(result, True), reply_to=message)


def size_of(message: Message) -> int:
    """Return the bytes of what a device sends in its records."""
    total = 0
    for record in message.content.config_records.values():
        for value in record.values():
            each = value if isinstance(value, list) else [value]
            total += sum(len(one) if isinstance(one, (bytes, str)) else 8 for one in each)
    return total


def main(devices: int, elements: int, neighbours: int, threshold: int, lost: int) -> None:
    logging.disable(logging.CRITICAL)
    TaskIdentity.run_id = TaskIdentity.task_id = 1
    TaskIdentity.node_id = 0
    random = np.random.default_rng(1)
    update = random.standard_normal(elements).astype(np.float32)
    update *= 0.9 / np.linalg.norm(update)
    parameters = ndarrays_to_parameters([update])
    grid = Devices(devices, lost, parameters)
    state = RecordDict()
    state.config_records[MAIN_CONFIGS_RECORD] = ConfigRecord({Key.CURRENT_ROUND: 1})
    state.array_records[MAIN_PARAMS_RECORD] = compat.parameters_to_arrayrecord(parameters, True)
    strategy: Any = EveryDevice(devices, parameters)
    available: Any = grid
    context = LegacyContext(
        Context(1, 0, {}, state, {}), strategy=strategy, client_manager=available
    )
    workflow = SecAggPlusWorkflow(neighbours + 1, threshold, clipping_range=1.0)
    began = time.process_time()
    workflow(available, context)
    server = time.process_time() - began - grid.seconds
    if not strategy.made or np.abs(strategy.made[0] - update).max() > 1e-3:
        raise RuntimeError("Flower's sum is not the devices' mean")
    stayed = grid.cpu.keys() - grid.gone
    figures = {
        "version": version("flwr"),
        "bytes_up": median(grid.sent[node] for node in stayed),
        "device_ms": 1e3 * median(grid.cpu[node] for node in stayed),
        "coordinator_s": server,
        "neighbours": neighbours,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
