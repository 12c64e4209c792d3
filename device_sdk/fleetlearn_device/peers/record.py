"""What a peer keeps of its exchanges, so that a process that dies loses none of them."""

from __future__ import annotations

import msgspec
from fleetlearn_protocol.messages import Identifier, RoundNumber


class EdgeRecord(msgspec.Struct):
    """What a peer remembers of its exchanges with one neighbour."""

    voted: RoundNumber = 0
    """The newest exchange that the peer voted on."""
    have: RoundNumber = 0
    """The newest exchange for which it voted that it has the neighbour's model. The difference of
    the two models is then on the disk."""
    counted: bool | None = None
    """Whether exchange ``have`` counts. None: the neighbour's vote is not known."""
    applied: bool = True
    """The difference of exchange ``have`` is in the peer's model, or it never will be."""
    finished: bool = False
    """The neighbour has done all of its steps."""


class PeerRecord(msgspec.Struct):
    """The durable state of a peer, beside its model and the differences."""

    step: RoundNumber = 0
    """The peer's newest step: the number of the exchanges that it takes part in now."""
    trainings: RoundNumber = 0
    """How often the peer has trained. A peer that was away has trained less often than its step
    says."""
    finished: bool = False
    """All steps are done, and the model has the last mixing."""
    edges: dict[Identifier, EdgeRecord] = {}
    """By the neighbour's name."""

    def copy(self) -> PeerRecord:
        """Return a copy that changes by itself."""
        edges = {name: msgspec.structs.replace(edge) for name, edge in self.edges.items()}
        return msgspec.structs.replace(self, edges=edges)
