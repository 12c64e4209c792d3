"""The peers of a run: their models, what they train on, and how long that takes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from fleetlearn_device.peers.mixing import MixingMatrix
from fleetlearn_protocol import Bundle
from fleetlearn_protocol.messages import BUFFERS
from fleetlearn_protocol.vector import gather, scatter
from numpy.typing import NDArray

from fleetlearn_simulator import keyed_random
from fleetlearn_simulator.data.sources import Source
from fleetlearn_simulator.errors import SimulatorError
from fleetlearn_simulator.peers.peer_rules import peer_problems
from fleetlearn_simulator.population.failures import TaskFates, sample_task_fates
from fleetlearn_simulator.population.traits import Ids, Ints
from fleetlearn_simulator.scenario.peers_section import PeersSection
from fleetlearn_simulator.scenario.scenario import Scenario
from fleetlearn_simulator.training.backend import Backend, Job, RoundInputs, steps_of
from fleetlearn_simulator.training.backend import local_settings as settings_of
from fleetlearn_simulator.training.kept_rows import RowFile
from fleetlearn_simulator.training.trained_devices import TrainedDevices

BYTES_OF_AN_ELEMENT = 4
Models = NDArray[np.float32]


class PeerStep(NamedTuple):
    """What happened until a line of the log: one mixing of all, or as many meetings as there are
    peers."""

    time: float
    """Seconds of virtual time at its end."""
    there: int
    """Peers that were online at its beginning. Gossip: at its end."""
    mixed: int
    """Peers that mixed. Gossip: trainings that ended with a meeting."""
    partial: int
    """Trainings that did fewer steps than they were to do, and were mixed."""
    causes: Mapping[str, int]
    """Cause -> trainings that were not mixed."""
    useful: float
    """Seconds that peers spent on what was mixed."""
    wasted: float
    sent: int
    """Models that a peer sent to another, who had it."""
    train: Mapping[str, float]
    """Loss and metrics in training, as means over the examples seen."""
    pull: float | None
    """How far apart the step's training pulled the models: sqrt(mean ||u_i - mean u||^2) over the
    changes u_i. None: not measured (gossip)."""


class PeerTotals:
    """Adds up a step."""

    def __init__(self) -> None:
        self.mixed = self.partial = self.sent = 0
        self.causes: Counter[str] = Counter()
        self.useful = self.wasted = 0.0
        self.pull: float | None = None
        self._sums: dict[str, float] = {}
        self._seen = 0

    def train(self, results: TrainedDevices, rows: NDArray[np.bool_]) -> None:
        """Add what these rows measured in training."""
        self._seen += int(results.seen[rows].sum())
        for name, values in {"loss": results.loss, **results.metrics}.items():
            total = float((values * results.seen)[rows].sum())
            self._sums[name] = self._sums.get(name, 0.0) + total

    def close(self, time: float, there: int) -> PeerStep:
        train = {name: total / self._seen for name, total in self._sums.items() if self._seen}
        return PeerStep(
            time,
            there,
            self.mixed,
            self.partial,
            dict(sorted(self.causes.items())),
            self.useful,
            self.wasted,
            self.sent,
            train,
            self.pull,
        )


class PeerFleet:
    """All peers. Raises SimulatorError where the scenario cannot be trained by peers."""

    def __init__(
        self,
        scenario: Scenario,
        bundle: Bundle,
        source: Source,
        backend: Backend,
        file: RowFile,
        note: Callable[[Sequence[Any]], None] = lambda rows: None,
    ) -> None:
        """``file``: where the back end reads the peers' models. ``note``: writes events."""
        check_peers(scenario, bundle)
        assert scenario.peers is not None
        self.section: PeersSection = scenario.peers
        # What a coordinator asks devices to measure before they train, peers leave out. A straggler
        # does some of the step's batches, where these are no whole epochs.
        epochs = scenario.plan.local.epochs if self.section.local_steps is None else 1
        local = msgspec.structs.replace(scenario.plan.local, evaluate=False, epochs=epochs)
        plan = msgspec.structs.replace(scenario.plan, local=local)
        self.scenario = msgspec.structs.replace(scenario, plan=plan)
        failures = msgspec.structs.replace(scenario.failures, outages=())
        self._without_outages = msgspec.structs.replace(self.scenario, failures=failures)
        self.manifest, self.backend, self.file, self.note = bundle.manifest, backend, file, note
        self.ids: Ids = np.arange(scenario.population.size, dtype=np.int64)
        self.matrices = matrices_of(scenario)
        begin = bundle.parameters()[: self.manifest.size]
        self.models: Models = np.repeat(begin[None], len(self.ids), axis=0)
        """float32, shape (peers, P). All begin with the bundle's model."""
        self.bytes = BYTES_OF_AN_ELEMENT * self.manifest.size
        """Of a model that is sent."""
        self._inputs = RoundInputs(begin, models=file)
        examples = source.examples(self.ids)
        self.has_data = examples > 0
        """Peers without examples mix and do not train."""
        steps = steps_of(settings_of(scenario.plan, bundle), examples)
        most = self.section.local_steps
        self.steps: Ints = steps if most is None else np.minimum(steps, most)

    def fates(self, ids: Ids, turn: int, now: float | None, models: Ints) -> TaskFates:
        """Draw what will happen to these peers in a step. ``now``: when it begins; None: that is
        not known, and outages are left out. ``models``: how many models each fetches, and sends."""
        transfer = models * self.bytes
        begin = now or 0.0
        return sample_task_fates(
            self._without_outages if now is None else self.scenario,
            ids,
            turn,
            now=begin,
            deadline=begin + self.section.deadline,
            steps=np.maximum(self.steps[ids], 1),
            down=transfer,
            up=transfer,
        )

    def keep(self, ids: Ids) -> None:
        """Let the next training of these peers begin with their models of now."""
        for peer in ids.tolist():
            self.file.write(peer, self.models[peer])

    def train(self, ids: Ids, turns: Ints, steps: Ints) -> tuple[Models, TrainedDevices]:
        """Train these peers, each from the model that it last kept. Returns what each changes in
        its model, with buffers, shape (peers, P), and the results. A peer whose training diverged
        changes nothing."""
        luck = keyed_random.uniform(self.scenario.seed, "peer task", ids, turns)
        seeds = (luck * 2.0**53).astype(np.int64).tolist()
        columns = zip(ids.tolist(), seeds, steps.tolist(), strict=True)
        results = self.backend.train(self._inputs, [Job(*column) for column in columns])
        changes = np.array(results.updates)
        if BUFFERS in results.vectors:
            places = self.manifest.buffers
            before = np.array([gather(self.file.read(peer), places) for peer in ids.tolist()])
            scatter(changes, places, results.vectors[BUFFERS] - before)
        changes[results.diverged] = 0.0
        return changes, results


def check_peers(scenario: Scenario, bundle: Bundle) -> None:
    """Raise SimulatorError if the scenario cannot be trained by peers."""
    for problem in peer_problems(scenario, bundle.manifest):
        raise SimulatorError(f"{scenario.file}: {problem}")


def matrices_of(scenario: Scenario) -> tuple[MixingMatrix, ...]:
    """Return the matrices that the scenario's peers mix by, by turns. Raises SimulatorError."""
    assert scenario.peers is not None
    try:
        return scenario.peers.graph(scenario.seed).matrices(scenario.population.size)
    except (ValueError, OSError) as error:
        where = f'{scenario.file}: peers.topology = "{scenario.peers.topology}"'
        raise SimulatorError(f"{where}: {error}") from None
