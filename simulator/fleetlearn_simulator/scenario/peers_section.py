"""[peers] of a scenario: training without a coordinator."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from fleetlearn_coordinator.plan.toml_errors import Section
from fleetlearn_device.peers.topologies import Kind, Topology
from msgspec import Meta

from fleetlearn_simulator.scenario.sections import MAX_POPULATION, Span


class PeersSection(Section, frozen=True, kw_only=True):
    """[peers]: who mixes with whom, and when. ``fleetlearn-simulate peers`` reads it."""

    topology: Kind = "ring"
    """ring, torus, random-regular, exponential, complete; one-peer-exponential (another neighbour
    at each mixing); file."""
    degree: Annotated[int, Meta(ge=1, le=MAX_POPULATION)] = 4
    """random-regular: neighbours of each peer."""
    rows: Annotated[int, Meta(ge=1, le=MAX_POPULATION)] | None = None
    """torus: its rows. Default: the division of the peers that is nearest to a square."""
    matrix: Path | None = None
    """file: a CSV or .npy file with the weights of all pairs, a row for each peer."""
    mode: Literal["steps", "gossip"] = "steps"
    """steps: all peers train, then all mix with their neighbours by one matrix. gossip: a
    peer that has trained averages with one neighbour, drawn at random, and goes on."""
    local_steps: Annotated[int, Meta(ge=1, le=10**9)] | None = None
    """Most training steps between two mixings. Default: all of ``plan.local.epochs``."""
    deadline: Span = 600.0
    """Seconds after which a step goes on without the peers that are still missing. With gossip:
    seconds until a peer that vanished is back."""
    tested: Annotated[int, Meta(ge=0, le=MAX_POPULATION)] = 100
    """Peers whose own models are tested after a step, at most; after the last step all are."""

    def graph(self, seed: int) -> Topology:
        """Return the topology that the section names."""
        file = None if self.matrix is None else str(self.matrix)
        return Topology(self.topology, self.degree, self.rows, seed, file)
