"""One contender of aggregation.py: NAME UPDATES ELEMENTS. Writes what it cost as JSON."""

from __future__ import annotations

import json
import resource
import sys
import time

import numpy as np
from fleetlearn_coordinator.aggregation.aggregators import make
from fleetlearn_coordinator.aggregation.updates import NO_VALUES
from fleetlearn_simulator.fleet.update_file import UpdateFile


def main(name: str, updates: int, elements: int) -> None:
    random, file = np.random.default_rng(0), UpdateFile(elements)
    rows = [file.keep(random.standard_normal(elements, np.float32)) for _ in range(updates)]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    clock, cpu = time.perf_counter(), time.process_time()
    if name.startswith("numpy"):
        total = float(
            np.median(np.stack([row.read(0, elements) for row in rows]), axis=0).sum(
                dtype=np.float64
            )
        )
    else:
        aggregator = make(name)
        state = aggregator.init(elements)
        for row in rows:
            aggregator.add(state, row, 1, 10.0, 1.0, NO_VALUES)
        total = float(aggregator.result(state, NO_VALUES.present).delta.sum())
    figures = {
        "clock": time.perf_counter() - clock,
        "cpu": time.process_time() - cpu,
        "peak_mib": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024,
        "sum": total,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
