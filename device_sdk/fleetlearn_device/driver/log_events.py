"""The events of the device's log, by names that stay the same for programs. The text of a line may
change. docs/start/device-service.md has them in a table, which a test holds to this one."""

from __future__ import annotations

from collections.abc import Mapping

EVENTS: Mapping[str, str] = {
    "started": "the process begins to serve",
    "connected": "the connection is open",
    "checked-in": "the coordinator welcomed the device",
    "not-eligible": "the coordinator gives this device no task, and says why",
    "warned": "what went wrong with the last update after it was accepted",
    "no-task": "there was no task for a while: after 10 minutes, 20, 40, then once a day",
    "task-given": "the coordinator gave a task",
    "fetching": "a file of the bundle, or a model, is fetched",
    "no-http": "a file or a model is fetched by the WebSocket, since its URL was of no use",
    "training": "the training of a task began",
    "trained": "the training of a task ended",
    "masking": "the update is masked, as it is known now what it counts",
    "uploading": "the update is being sent",
    "update-accepted": "the coordinator has the update",
    "answer-accepted": "the coordinator has the answer to a question, such as a measurement",
    "task-uncounted": "the work does not count: the round was over, or the update was refused",
    "task-failed": "the device gave the task back, and says why",
    "mixed": "a peer mixed its model with its neighbours'",
    "closing": "the device closes the connection, and says why",
    "disconnected": "the connection ended",
    "not-connected": "an attempt to connect failed",
    "stopping": "a signal ends the process",
    "ended": "the process ends, and says why",
    "note": "any other line",
}
"""Event -> when there is a line of it."""
