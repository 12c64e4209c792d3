"""Robust aggregation of a round: seconds and memory of each aggregator, beside NumPy's median of
all updates in memory.

Each contender runs in a separate process, on one thread. The updates are random, written to a
temporary file first; reading them is part of what is timed. The two medians must agree.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import _measure as measure
from fleetlearn_coordinator.aggregation.robust.rules import RULES

HERE = Path(__file__).parent
NUMPY = "numpy.median"


def contend(name: str, updates: int, elements: int) -> dict[str, Any]:
    """Return what one contender cost. Raises CalledProcessError."""
    program = [
        sys.executable,
        str(HERE / "_aggregation_contender.py"),
        name,
        str(updates),
        str(elements),
    ]
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    done = subprocess.run(
        program, capture_output=True, text=True, check=True, env={**os.environ, **threads}
    )
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


def main() -> None:
    options = measure.parser(__doc__)
    options.add_argument("--updates", type=int, default=1000)
    options.add_argument("--elements", type=int, default=10**6)
    options.add_argument("--rules", nargs="+", choices=RULES, default=[*RULES])
    chosen = options.parse_args()
    results = {
        name: contend(name, chosen.updates, chosen.elements) for name in (NUMPY, *chosen.rules)
    }
    if (
        "median" in results
        and abs(results["median"]["sum"] - results[NUMPY]["sum"]) > 1e-3 * chosen.elements**0.5
    ):
        raise RuntimeError(f"the medians differ: {results['median']} and {results[NUMPY]}")
    rows: list[tuple[str, ...]] = [
        ("aggregator", "seconds", "CPU-s", "of numpy's CPU", "more memory at its peak, MiB")
    ]
    for name, figures in results.items():
        ratio = figures["cpu"] / results[NUMPY]["cpu"]
        rows.append(
            (
                name,
                f"{figures['clock']:.1f}",
                f"{figures['cpu']:.1f}",
                f"{ratio:.2f}",
                f"{figures['peak_mib']:.0f}",
            )
        )
    print(measure.table(rows))
    measure.write_json(
        chosen.json, {"updates": chosen.updates, "elements": chosen.elements}, results
    )


if __name__ == "__main__":
    main()
