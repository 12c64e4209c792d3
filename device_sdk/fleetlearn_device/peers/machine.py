"""What every peer's state machine has: its rules, its stage, training, the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf
from typing import NamedTuple

from fleetlearn_protocol.peer_messages import PeerFinished

from fleetlearn_device.peers.exchanges import Exchanges
from fleetlearn_device.peers.orders import (
    CommitModel,
    Orders,
    PeerNote,
    SendToPeer,
    TrainPeer,
    WriteResult,
)
from fleetlearn_device.peers.record import PeerRecord


class PeerRules(NamedTuple):
    """How a peer trains."""

    steps: int
    """The last step's number."""
    deadline: float
    """Seconds for which a step waits for neighbours."""
    take_after: int
    """A peer that is more steps than this behind its neighbours takes a neighbour's model."""
    weights: Callable[[int], Mapping[str, float]]
    """The neighbours of a step with their weights."""


class Working(NamedTuple):
    """The peer trains."""


class Collecting(NamedTuple):
    """The peer waits for its neighbours' models and votes."""

    until: float


class Lonely(NamedTuple):
    """The step is over. The peer waits for any neighbour before it trains on."""

    until: float
    """When it ends as if all neighbours were finished; infinity as long as none is."""


class Catching(NamedTuple):
    """The peer is far behind, and waits for a neighbour's model to begin with."""

    until: float


class Lingering(NamedTuple):
    """All steps are done. The peer waits for neighbours that need its votes yet."""

    until: float


class PeerEnded(NamedTuple):
    """Nothing is left to be done."""


Stage = Working | Collecting | Lonely | Catching | Lingering | PeerEnded


class PeerMachine:
    """What synchronous training and gossip have in common."""

    def __init__(self, record: PeerRecord, rules: PeerRules, neighbours: tuple[str, ...]) -> None:
        self.rules = rules
        self.exchanges = Exchanges(record, neighbours)
        self.stage: Stage = Working()

    @property
    def record(self) -> PeerRecord:
        """The durable state as it will be."""
        return self.exchanges.record

    @property
    def over(self) -> bool:
        """The process may end."""
        return isinstance(self.stage, PeerEnded)

    def votes_for(self, name: str) -> dict[str, int | bool]:
        """Return what the hello to a neighbour says of this peer: fields of ``PeerHello``."""
        edge = self.exchanges.edges[name].record
        return {
            "step": self.record.step,
            "have": edge.have,
            "voted": edge.voted,
            "finished": self.record.finished,
        }

    def due(self) -> float:
        """Return when ``tick`` is to be called; infinity: not without another event."""
        return getattr(self.stage, "until", inf)

    def _was_finished(self) -> bool:
        """Return whether an earlier process did all steps. If there are more of them now, the
        neighbours have more too."""
        record = self.record
        if record.finished and record.step < self.rules.steps:
            record.finished = False
            for edge in record.edges.values():
                edge.finished = False
        return record.finished

    def _train_or_finish(self, now: float) -> Orders:
        record = self.record
        if record.step < self.rules.steps and self.exchanges.all_finished():
            return [PeerNote("the neighbours have done all of their steps"), *self._finish(now)]
        return self._finish(now) if record.step >= self.rules.steps else self._train(None)

    def _train(self, take: str | None) -> Orders:
        self.stage = Working()
        return [TrainPeer(self.exchanges.begin_training(), self.record.trainings, take)]

    def _wait_alone(self, now: float) -> Orders:
        """Wait for a neighbour. Where one has done all of its steps, the others may be gone for
        good: the peer then waits no longer than in a step."""
        edges, orders = self.exchanges.edges.values(), Orders()
        until = self.stage.until if isinstance(self.stage, Lonely) else inf
        if any(edge.record.finished for edge in edges):
            until = min(until, now + self.rules.deadline)
        if self.exchanges.all_finished() or until <= now:
            return [PeerNote("the neighbours have done all of their steps"), *self._finish(now)]
        if not isinstance(self.stage, Lonely):
            text = f"step {self.record.step} is done, and no neighbour is there: waiting for one"
            orders = [PeerNote(text, warning=True)]
        self.stage = Lonely(until)
        return orders

    def _finish(self, now: float) -> Orders:
        """Mix for the last time, and let the neighbours know."""
        exchanges = self.exchanges
        differences = exchanges.commit()
        exchanges.record.finished = True
        self.stage = Lingering(now + self.rules.deadline)
        names = [name for name, edge in exchanges.edges.items() if edge.connected]
        return [
            CommitModel(exchanges.record.copy(), False, differences),
            WriteResult(),
            *(SendToPeer(name, PeerFinished()) for name in names),
            *self._linger(now),
        ]

    def _linger(self, now: float) -> Orders:
        """End, if nobody needs this peer any more."""
        if not isinstance(self.stage, Lingering):
            return []
        exchanges, orders = self.exchanges, Orders()
        if exchanges.pending():
            differences = exchanges.commit()
            orders = [CommitModel(exchanges.record.copy(), False, differences), WriteResult()]
        edges = exchanges.edges
        doubtful = [name for name, edge in edges.items() if edge.is_doubtful]
        waiting = any(
            edge.is_doubtful or (edge.connected and not edge.record.finished)
            for edge in edges.values()
        )
        if waiting and now < self.stage.until:
            return orders
        if doubtful:
            text = (
                f"it is not known whether the last exchange with {', '.join(doubtful)} counts: "
                "the model is without it. Start this peer again when they are there, to find out"
            )
            orders.append(PeerNote(text, warning=True))
        self.stage = PeerEnded()
        return orders
