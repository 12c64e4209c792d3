"""The coordinator's log as JSON. Names of events are stable: docs/operate/monitoring.md has them in
a table, which a test holds to the code."""

from __future__ import annotations

from fleetlearn_protocol.json_log import NOTE, JsonLines, said

__all__ = ["NOTE", "PEER", "PEERS", "json_lines", "said"]

PEER = "peer"
"""The event of records about a connection that have no name of their own."""
PEERS = "fleetlearn.coordinator.peers"


def json_lines() -> JsonLines:
    """Return what writes the log's lines."""
    return JsonLines({PEERS: PEER})
