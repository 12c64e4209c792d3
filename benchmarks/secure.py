"""What secure aggregation costs: bytes and CPU of devices, coordinator and helper, beside plain
float32 updates in the same run.

One thread, in this process: the real parts of devices, helper and coordinator, without sockets
(_secure_rounds.py). The modes take turns within each repeat. ``bytes up`` are of one device and
its whole round, without messages that all modes have alike. ``device`` is the masking alone; the
fixed point has a column of its own. A pairwise round loses a tenth of its devices after they have
shared their secrets. Where flwr is installed, its SecAgg+ is measured too:

    python -m venv peers && peers/bin/pip install flwr numpy
    python benchmarks/secure.py --flower peers/bin/python
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import _measure as measure
import _secure_rounds as secure_rounds
from fleetlearn_protocol.secure.graph import graph_of

HERE = Path(__file__).parent
SIZES = ("10x10000", "1000x10000", "10000x10000", "100x100000", "1000x100000", "100x1000000")
FIGURES = {
    "bytes_up": "bytes up",
    "device_ms": "device, CPU-ms",
    "device_fixed_point_ms": "fixed point, CPU-ms",
    "coordinator_s": "coordinator, CPU-s",
    "unmasking_s": "of it unmasking",
    "helper_s": "helper, CPU-s",
    "neighbours": "neighbours",
}
"""Figure -> its column's heading."""
COMPARED = ("bytes_up", "coordinator_s")


def flower(python: str, sizes: secure_rounds.Sizes) -> dict[str, Any]:
    """Return the figures of Flower's SecAgg+. Raises CalledProcessError."""
    degree, threshold = graph_of(sizes.devices, secure_rounds.HOSTILE, secure_rounds.LOST)
    lost = int(secure_rounds.LOST * sizes.devices)
    numbers = (sizes.devices, sizes.elements, degree, threshold, lost)
    program = [python, str(HERE / "_secure_flower.py"), *map(str, numbers)]
    done = subprocess.run(program, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def compared(runs: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Return the middle of each figure, and of each ratio to plain in the same repeat."""
    found: dict[str, Any] = {}
    for mode, rows in runs.items():
        found[mode] = {key: measure.middle([row[key] for row in rows]) for key in rows[0]}
        pairs = [*zip(rows, runs["plain"], strict=True)]
        for key in COMPARED:
            ratios = [row[key] / own[key] for row, own in pairs]
            found[mode][f"{key}_of_plain"] = measure.middle(ratios)
    return found


def table_of(results: dict[str, dict[str, Any]]) -> str:
    """Return a row for each mode of each size."""
    headings = [*FIGURES.values(), "bytes of plain", "coordinator of plain"]
    keys = [*FIGURES, *(f"{key}_of_plain" for key in COMPARED)]
    rows = [["devices x elements", "mode", *headings]]
    for size, modes in results.items():
        for mode, found in modes.items():
            shown = [measure.show(found[key]) if key in found else "" for key in keys]
            rows.append([size, mode, *shown])
    return measure.table(rows)


def main() -> None:
    options = measure.parser(__doc__)
    options.add_argument("--sizes", nargs="+", default=[*SIZES], metavar="DEVICESxELEMENTS")
    options.add_argument("--repeats", type=int, default=2)
    options.add_argument(
        "--most-pairwise", type=int, default=1000, help="devices of the largest pairwise round"
    )
    options.add_argument("--flower", metavar="PYTHON", help="of an environment with flwr")
    options.add_argument(
        "--most-flower", type=int, default=100, help="devices of its largest round"
    )
    chosen = options.parse_args()
    results: dict[str, dict[str, Any]] = {}
    version = ""
    for sizes in secure_rounds.sizes_of(chosen.sizes):
        modes = [*secure_rounds.MODES]
        if sizes.devices > chosen.most_pairwise:
            modes.remove("pairwise")
        runs: dict[str, list[dict[str, float]]] = {mode: [] for mode in modes}
        for repeat in range(chosen.repeats):
            for mode in sorted(modes, reverse=bool(repeat % 2)):
                with measure.scratch() as folder:
                    runs[mode].append(secure_rounds.MODES[mode](folder / mode, sizes))
            print(".", end="", flush=True, file=sys.stderr)
        size = f"{sizes.devices} x {sizes.elements}"
        results[size] = compared(runs)
        if chosen.flower and sizes.devices <= chosen.most_flower:
            figures = flower(chosen.flower, sizes)
            version = figures.pop("version")
            own = {key: measure.middle([value]) for key, value in figures.items()}
            for key in COMPARED:
                value = figures[key] / results[size]["plain"][key]["median"]
                own[f"{key}_of_plain"] = measure.middle([value])
            results[size]["flower"] = own
    print(file=sys.stderr)
    print(table_of(results))
    if version:
        print(f"\nflower: SecAgg+ of flwr {version}, its own client and server code in one process")
    else:
        print("\nFlower's SecAgg+ was not measured: --flower names no environment that has flwr.")
    settings = {key: value for key, value in vars(chosen).items() if key != "json"}
    measure.write_json(chosen.json, settings, results)


if __name__ == "__main__":
    main()
