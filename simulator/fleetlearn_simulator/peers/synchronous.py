"""Synchronous steps: all peers train, then all mix by one matrix.

The peers are in lock step: a step ends when its slowest peer is done, or at the deadline if one
vanished. A peer that vanishes, or is offline, leaves the matrix for this step (``without``), and
goes on with the model that it had. One that is late, or goes offline before it is done, keeps what
it trained, and mixes with nobody.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from fleetlearn_device.peers.mixing import mix_all, without

from fleetlearn_simulator.errors import SimulatorError
from fleetlearn_simulator.peers.peer_fleet import PeerFleet, PeerStep, PeerTotals
from fleetlearn_simulator.peers.peer_measures import consensus_error
from fleetlearn_simulator.population.availability import next_online, online, until
from fleetlearn_simulator.population.failures import CAUSES
from fleetlearn_simulator.population.traits import Ids

LATE, OFFLINE, DIVERGED = "late", "offline", "diverged"
ANSWERED = ("straggler", "out-of-time")
"""Causes after which a peer is still connected, so that its neighbours know of it."""


def synchronous_steps(fleet: PeerFleet) -> Iterator[PeerStep]:
    """Do a step of all peers for each that is asked for."""
    now, step = 0.0, 0
    while True:
        there = online(fleet.scenario, fleet.ids, now)
        if not there.any():
            now = float(next_online(fleet.scenario, fleet.ids, now).min())
            if not np.isfinite(now):
                raise SimulatorError(f"in step {step} no peer is online, and none will be again")
            continue
        now, result = _step(fleet, step, now, np.flatnonzero(there))
        yield result
        step += 1


def _step(fleet: PeerFleet, step: int, now: float, ids: Ids) -> tuple[float, PeerStep]:
    """Do one step of the peers that are online. Returns when it ends."""
    totals = PeerTotals()
    matrix = fleet.matrices[step % len(fleet.matrices)]
    fates = fleet.fates(ids, step, now, np.diff(matrix.starts)[ids])
    cause: Any = np.array(CAUSES, "U12")[fates.cause]
    cause[(cause == "") & (fates.seconds > fleet.section.deadline)] = LATE
    cause[(cause == "") & (until(fleet.scenario, ids, now) < now + fates.seconds)] = OFFLINE
    trains = np.isin(cause, ("", LATE, OFFLINE)) & fleet.has_data[ids]
    if trains.any():
        own = ids[trains]
        fleet.keep(own)
        changes, results = fleet.train(own, np.full(len(own), step), fates.steps[trains])
        cause[np.flatnonzero(trains)[results.diverged]] = DIVERGED
        fleet.models[own] += changes
        totals.pull = consensus_error(changes)
        mixes = cause[trains] == ""
        totals.train(results, mixes)
        totals.partial = int((results.steps < fleet.steps[own])[mixes].sum())
    present = np.zeros(len(fleet.ids), bool)
    present[ids[cause == ""]] = True
    left = without(matrix, np.flatnonzero(~present))
    fleet.models[:] = mix_all(fleet.models, left)
    seconds = np.minimum(fates.seconds, fleet.section.deadline)
    totals.mixed, totals.sent = int(present.sum()), len(left.weights)
    totals.useful = float(seconds[cause == ""].sum())
    totals.wasted = float(seconds[cause != ""].sum())
    names, counts = np.unique(cause[cause != ""], return_counts=True)
    totals.causes.update(dict(zip(names.tolist(), counts.tolist(), strict=True)))
    # The others wait for a peer that says nothing any more, as real ones do.
    silent = np.isin(cause, ("", DIVERGED, *ANSWERED), invert=True).any()
    end = now + (fleet.section.deadline if silent else float(seconds.max()))
    fleet.note(
        [
            {"time": end, "event": "gone", "peer": peer, "step": step, "cause": why}
            for peer, why in zip(ids.tolist(), cause.tolist(), strict=True)
            if why
        ]
    )
    fleet.note([{"time": end, "event": "mixed", "step": step, "peers": totals.mixed}])
    return end, totals.close(end, len(ids))
