"""A whole run of peers, from a scenario to a folder with logs, the mean model and a summary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from itertools import islice
from math import fsum
from pathlib import Path
from typing import Any

import numpy as np
from fleetlearn_device.peers.spectrum import spectral_gap
from fleetlearn_device.runtimes.open_runtime import open_runtime
from fleetlearn_protocol import open_bundle
from fleetlearn_protocol.vector import digest, views
from threadpoolctl import threadpool_limits

from fleetlearn_simulator.data.made_of import made_of
from fleetlearn_simulator.errors import SimulatorError
from fleetlearn_simulator.peers.gossip import gossip_steps
from fleetlearn_simulator.peers.peer_fleet import PeerFleet, PeerStep, check_peers
from fleetlearn_simulator.peers.peer_measures import (
    consensus_error,
    mean_model,
    own_tests,
    peers_to_test,
)
from fleetlearn_simulator.peers.synchronous import synchronous_steps
from fleetlearn_simulator.results.model_tests import tested
from fleetlearn_simulator.results.run_folder import SUMMARY, RunLogs, save_model, write_json
from fleetlearn_simulator.run import (
    DEFAULT_OPTIONS,
    Options,
    Outcome,
    prepare,
    rare_garbage_collection,
)
from fleetlearn_simulator.scenario.scenario import Scenario
from fleetlearn_simulator.training.choice import (
    check_provider,
    choose_backends,
    start_backend,
    to_json,
    with_measured_step,
)
from fleetlearn_simulator.training.kept_rows import PEER_MODELS, RowFile
from fleetlearn_simulator.training.run_bundles import run_bundles


def simulate_peers(
    scenario: Scenario,
    folder: Path,
    options: Options = DEFAULT_OPTIONS,
    *,
    progress: Callable[[dict[str, Any]], None] = lambda row: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Outcome | None:
    """Let the peers of a scenario train for ``plan.stop.rounds`` steps.

    The folder has the files of a run (``results/run_folder.py``): a line of rounds.jsonl is a step,
    and has ``peers`` beside what a round has. ``peer_models.f32`` has each peer's model at the end,
    a row of float32 for each. The model of the run is the mean of all peers' models.

    Args:
        scenario: What is simulated. It has [peers].
        folder: Where the run is written. What is there of another run is replaced.
        options: How the run is carried out. There are no checkpoints, and no Ray.
        progress: Called with the line of each step.
        should_stop: Asked after each step. If it returns True, the run ends there, unfinished.

    Returns None if ``should_stop`` stopped the run. Raises SimulatorError, PlanError and
    BundleError.
    """
    if scenario.plan.family:
        raise SimulatorError(
            "plan.family: peers mix models of one bundle. Take a plan with one member's bundle"
        )
    check_peers(scenario, open_bundle(scenario.plan.bundle))
    (run,) = bundles = run_bundles(scenario)
    bundle, source = run.bundle, run.source
    if options.engine == "ray":
        raise SimulatorError("peers are trained on this machine; use engine 'processes'")
    check_provider(options.provider, options.engine)
    with ExitStack() as held:
        held.enter_context(rare_garbage_collection())
        held.enter_context(threadpool_limits(1))
        kinds, why = choose_backends(bundles, options.backend, options.provider)
        scenario = with_measured_step(scenario, bundles)
        file = RowFile(folder / PEER_MODELS, bundle.manifest.size)
        prepare(scenario, folder, options, made_of(scenario, {"": bundle}, source))
        file.path.unlink(missing_ok=True)
        backend = start_backend(
            scenario, bundles, kinds, options.workers, "processes", None, options.provider
        )
        held.callback(backend.close)
        logs = RunLogs(folder, events=options.events)
        held.callback(logs.close)
        fleet = PeerFleet(scenario, bundle, source, backend, file, logs.write_events)
        measures = _Measures(fleet, options, source.test())
        if measures.test is not None:
            measures.runtime = open_runtime(bundle, kind="onnx", provider=options.provider)
        does = gossip_steps if fleet.section.mode == "gossip" else synchronous_steps
        rows: list[dict[str, Any]] = []
        for step in islice(does(fleet), scenario.plan.stop.rounds):
            rows.append(measures.row(len(rows), step))
            logs.write_round(rows[-1])
            progress(rows[-1])
            if should_stop():
                return None
        fleet.keep(fleet.ids)
    model = mean_model(fleet.models)
    save_model(folder, views(model, bundle.manifest.travelling).items())
    summary = _summary(fleet, rows) | {
        "backend": to_json(kinds),
        "why": why,
        "model": digest(model),
    }
    write_json(folder / SUMMARY, summary)
    return Outcome(folder, summary, model)


class _Measures:
    """Measures the peers after each step, and makes the step's line."""

    def __init__(self, fleet: PeerFleet, options: Options, test: Any) -> None:
        self.fleet, self.every, self.test = fleet, options.test, test
        self.runtime: Any = None
        """Measures models. Set where there are test data."""
        self.before = 0.0

    def row(self, number: int, step: PeerStep) -> dict[str, Any]:
        fleet = self.fleet
        last = number + 1 == fleet.scenario.plan.stop.rounds
        peers: dict[str, Any] = {"consensus": consensus_error(fleet.models)}
        if step.pull is not None:
            peers["pull"] = step.pull
        row = {
            "round": number,
            "how": "committed",
            "time": step.time,
            "seconds": step.time - self.before,
            "connected": step.there,
            "reports": step.mixed,
            "partial": step.partial,
            "train": dict(step.train),
            "metrics": dict(step.train),
            "causes": dict(step.causes),
            "device_seconds": {"useful": step.useful, "wasted": step.wasted},
            "bytes": {"down": step.sent * fleet.bytes, "up": step.sent * fleet.bytes},
            "peers": peers,
        }
        self.before = step.time
        if self.test is not None and ((self.every and (number + 1) % self.every == 0) or last):
            row["test"] = tested(self.runtime, mean_model(fleet.models), self.test)
            most = len(fleet.ids) if last else fleet.section.tested
            ids = peers_to_test(len(fleet.ids), most, fleet.scenario.seed)
            own = own_tests(self.runtime, fleet.models, ids, self.test)
            peers |= {"tested": len(ids), "own": own}
        return row


def _summary(fleet: PeerFleet, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the run in a few numbers: those of any run, and ``peers``."""
    causes: Counter[str] = Counter()
    for row in rows:
        causes.update(row["causes"])
    tested_rows = [row["peers"] for row in rows if "own" in row["peers"]]
    own: dict[str, Any] = tested_rows[-1] if tested_rows else {}
    return {
        "reason": "rounds",
        "rounds": len(rows),
        "abandoned": 0,
        "time": rows[-1]["time"],
        "reports": sum(row["reports"] for row in rows),
        "lost": dict(sorted(causes.items())),
        "device_seconds": {
            key: fsum(row["device_seconds"][key] for row in rows) for key in ("useful", "wasted")
        },
        "bytes": {key: sum(row["bytes"][key] for row in rows) for key in ("down", "up")},
        "metrics": rows[-1]["metrics"],
        "test": next((row["test"] for row in reversed(rows) if "test" in row), {}),
        "devices": len(fleet.ids),
        "peers": {
            "topology": fleet.section.topology,
            "mode": fleet.section.mode,
            "gap": spectral_gap(fleet.matrices),
            "neighbours": float(np.mean([len(m.weights) / len(m) for m in fleet.matrices])),
            "consensus": rows[-1]["peers"]["consensus"],
            "tested": own.get("tested", 0),
            "own": own.get("own", {}),
        },
    }
