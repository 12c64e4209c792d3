"""For tests: peers of small scenarios, in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fleetlearn_protocol import open_bundle
from fleetlearn_simulator.data.factory import source_of
from fleetlearn_simulator.peers.peer_fleet import PeerFleet
from fleetlearn_simulator.scenario.scenario import Scenario
from fleetlearn_simulator.training.backend import PerDevice, local_settings
from fleetlearn_simulator.training.kept_rows import PEER_MODELS, RowFile
from virtual import make_scenario

OF_PEERS = ("topology", "degree", "rows", "matrix", "mode", "local_steps", "deadline", "tested")


def scenario_of(folder: Path, bundle: Path, size: int, **settings: Any) -> Scenario:
    """A scenario with [peers]: keys of that table by their names, others as for ``write_scenario``.
    Devices of the bundle ``softmax`` have ten generated examples each."""
    peers = {key: settings.pop(key) for key in OF_PEERS if key in settings}
    if "softmax" in bundle.name and "data" not in settings:
        settings["data"] = {"kind": "synthetic", "alpha": 0.5, "beta": 0.5, "examples": 10}
    settings.setdefault("peers", {"topology": "ring", **peers})
    return make_scenario(folder, bundle, size, **settings)


def make_peers(
    scenario: Scenario,
    folder: Path,
    note: Callable[[Sequence[Any]], None] = lambda rows: None,
    backend: type[PerDevice] = PerDevice,
) -> PeerFleet:
    """Peers that train in this process, one after the other unless another back end is given."""
    folder.mkdir(exist_ok=True)
    bundle = open_bundle(scenario.plan.bundle)
    source, task = source_of(scenario, bundle), local_settings(scenario.plan, bundle)
    file = RowFile(folder / PEER_MODELS, bundle.manifest.size)
    return PeerFleet(scenario, bundle, source, backend(bundle, task, source), file, note)
