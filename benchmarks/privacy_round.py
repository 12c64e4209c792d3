"""What differential privacy costs a coordinator: rounds of 100 updates of 10^6 float32 parameters.

In turns: a coordinator as it is, and one whose plan has [privacy]. Both take the same updates by
websockets, spool them, add them up and make the next model; the private one also measures the norm
of each update, clips it, and adds noise to each sum. Half of the repeats begin with the one, half
with the other. The second table is of the release alone, in this process.
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


def main() -> None:
    options = measure.parser(__doc__)
    options.add_argument("--devices", type=int, default=100)
    options.add_argument(
        "--size", type=int, default=1_000_000, help="parameters of the model, float32"
    )
    options.add_argument("--rounds", type=int, default=5, help="rounds that count")
    options.add_argument("--repeats", type=int, default=4)
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
    settings = {key: value for key, value in vars(chosen).items() if key != "json"}
    measure.write_json(chosen.json, settings, results)


if __name__ == "__main__":
    main()
