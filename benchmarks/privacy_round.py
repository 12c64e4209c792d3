"""What differential privacy costs a coordinator: rounds of 100 updates of 10^6 float32 parameters.

In turns: a coordinator as it is, and one whose plan has [privacy]. Both take the same updates by
websockets, spool them, add them up and make the next model; the private one also measures the norm
of each update, clips it, and adds noise to each sum. Half of the repeats begin with the one, half
with the other. The second table is of the release alone, in this process. The third is of the
rounds' bookkeeping alone, in this process: the engine with limits of participation beside the
engine without them, for 10,000 connected devices.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable

import _measure as measure
import numpy as np
from fleetlearn_coordinator.aggregation.privacy.release import begin, release
from fleetlearn_coordinator.aggregation.privacy.rules import PrivacyRules
from fleetlearn_coordinator.rounds.engine import Engine
from fleetlearn_coordinator.rounds.settings import Phase, Settings
from fleetlearn_protocol import discrete_gaussian
from rounds import fleetlearn

PRIVATE = """
[privacy]
noise = 1.0
delta = 1e-6
population = 1000
clip = 1.0
"""
SIGMA = 1.5 * 2**30
"""Of the noise, in steps of the grid."""


def parts_of(size: int) -> dict[str, Callable[[], object]]:
    """What a release consists of, each for a model of ``size`` elements, and what would take its
    place."""
    rules = PrivacyRules(mechanism="gaussian", noise=1.0, clip=1.0, goal=100, participations=1)
    state = begin(rules, bytes(32), size)
    total, random = np.linspace(-1, 1, size), np.random.default_rng(1)
    return {
        "a release": lambda: release(rules, state, total),
        "its noise": lambda: discrete_gaussian.sample(SIGMA, size, bytes(32)),
        "as many bytes of SHAKE-256": lambda: hashlib.shake_256(bytes(32)).digest(8 * size),
        "SHA-256 of the sum": lambda: hashlib.sha256(total.data).digest(),
        "NumPy's normal (floats, no secret)": lambda: random.standard_normal(size),
    }


def bookkeeping(devices: int, rounds: int, *, limited: bool) -> dict[str, float]:
    """Return the CPU of an engine in which a tenth of the devices reports in each round.
    ``limited``: whether a device takes part in every second release at most, and no more often than
    once in two of these rounds."""
    goal = max(1, devices // 10)
    settings = Settings(
        goal=goal, cohort=goal, minimum=goal, deadline=600.0, grace=60.0, gather=0.0, seed=1,
        separation=2 if limited else 0, participations=max(1, rounds // 2) if limited else None,
    )  # fmt: skip
    engine = Engine(settings)
    for number in range(devices):
        engine.check_in(f"d{number}", None, 0.0)
    began = time.process_time()
    for number in range(1, rounds + 1):
        for device, task in list(engine.leases.items()):
            engine.count_report(device, task, float(number))
        if engine.phase is not Phase.COMMITTING:
            raise RuntimeError(f"round {number} is {engine.phase}, and was to be committed")
        engine.committed(float(number), change=1.0, metrics={})
    seconds = time.process_time() - began
    return {
        "cpu_ms_per_round": 1e3 * seconds / rounds,
        "cpu_us_per_report": 1e6 * seconds / rounds / goal,
    }


def main() -> None:
    options = measure.parser(__doc__)
    options.add_argument("--devices", type=int, default=100)
    options.add_argument(
        "--size", type=int, default=1_000_000, help="parameters of the model, float32"
    )
    options.add_argument("--rounds", type=int, default=5, help="rounds that count")
    options.add_argument("--repeats", type=int, default=4)
    options.add_argument(
        "--connected", type=int, default=10_000, help="devices of the engine alone"
    )
    options.add_argument(
        "--limit", type=float, default=300.0, help="seconds that one repeat may take"
    )
    chosen = options.parse_args()
    sizes = chosen.devices, chosen.size, chosen.rounds, chosen.limit
    runs: dict[str, list[dict[str, float]]] = {"private": [], "as it is": []}
    for repeat in range(chosen.repeats):
        for one in sorted(runs, reverse=bool(repeat % 2)):
            figures, _ = fleetlearn(*sizes, tables=PRIVATE if one == "private" else "")
            figures["cpu_ms_per_round"] = chosen.devices * figures["cpu_ms_per_update"]
            runs[one].append(figures)
        print(".", end="", flush=True, file=sys.stderr)
    print(file=sys.stderr)
    results = measure.summary(runs)
    print(measure.side_by_side(results))
    rows = [("part", "CPU-ms")]
    for name, work in parts_of(chosen.size).items():
        values = []
        for _ in range(3 + chosen.repeats):
            began = time.process_time()
            work()
            values.append(1e3 * (time.process_time() - began))
        results[name] = measure.middle(values[3:])
        rows.append((name, measure.show(results[name])))
    print(f"\n{measure.table(rows)}")
    engines: dict[str, list[dict[str, float]]] = {"limits": [], "no limits": []}
    for _ in range(3 + chosen.repeats):
        for name, own in engines.items():
            own.append(bookkeeping(chosen.connected, 20, limited=name == "limits"))
    results["engine"] = measure.summary({name: own[3:] for name, own in engines.items()})
    print(f"\n{measure.side_by_side(results['engine'])}")
    settings = {key: value for key, value in vars(chosen).items() if key != "json"}
    measure.write_json(chosen.json, settings, results)


if __name__ == "__main__":
    main()
