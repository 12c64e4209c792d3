"""Correlated noise of a private run: memory, CPU of a release and error, with 2 to 5 buffers (BLT),
beside banded and independent noise.

Each contender runs in a separate process, on one thread. The error is the standard deviation of the
noise in the sum of all releases for the same epsilon: independent noise of the same releases and
participations is in the same table.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import _measure as measure

HERE = Path(__file__).parent
CONTENDERS = ("independent", "blt-2", "blt-3", "blt-4", "blt-5", "banded-100")


def contend(name: str, *numbers: int) -> dict[str, Any]:
    """Return what one contender cost. Raises CalledProcessError."""
    program = [sys.executable, str(HERE / "_noise_contender.py"), name, *map(str, numbers)]
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    done = subprocess.run(
        program, capture_output=True, text=True, check=True, env={**os.environ, **threads}
    )
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


def main() -> None:
    options = measure.parser(__doc__)
    options.add_argument("--elements", type=int, default=1_660_000)
    options.add_argument("--releases", type=int, default=1000)
    options.add_argument("--separation", type=int, default=100)
    options.add_argument("--participations", type=int, default=10)
    options.add_argument("--contenders", nargs="+", default=[*CONTENDERS])
    options.add_argument("--repeats", type=int, default=7)
    chosen = options.parse_args()
    numbers = chosen.releases, chosen.separation, chosen.participations, chosen.repeats
    results = {name: contend(name, chosen.elements, *numbers) for name in chosen.contenders}
    rows: list[tuple[str, ...]] = [
        (
            "noise",
            "kept, MB",
            "more memory at its peak, MiB",
            "fresh noise, CPU-ms",
            "correlating, CPU-ms",
            "sealing, CPU-ms",
            "greatest error",
        )
    ]
    for name, figures in results.items():
        rows.append(
            (
                name,
                f"{figures['bytes'] / 1e6:.1f}",
                f"{figures['peak_mib']:.0f}",
                f"{figures['sample_cpu'] * 1e3:.0f}",
                f"{figures['cpu'] * 1e3:.0f}",
                f"{figures['seal_cpu'] * 1e3:.0f}",
                f"{figures['error']:.3f}",
            )
        )
    print(measure.table(rows))
    settings = ("elements", "releases", "separation", "participations", "repeats")
    measure.write_json(chosen.json, {key: getattr(chosen, key) for key in settings}, results)


if __name__ == "__main__":
    main()
