"""The memory of a training step at the size that people use, beside PyTorch eager: by default, and
within a budget.

Each contender trains in a separate process on one thread; its peak is the whole process's. The
estimate is the one of ``fleetlearn-export inspect``. Needs the extra ``zoo``, which
``make test-zoo`` installs.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import _measure as measure
import onnx
from fleetlearn_export.inspection import step_memory
from fleetlearn_protocol import open_bundle
from fleetlearn_protocol.manifest import TRAIN

CONTENDER = Path(__file__).with_name("_memory_contender.py")
BUDGETS = {"mobilenet_v3_small": "230 MiB", "mobilenet_v2": "650 MiB"}
"""Near the least that a batch of 16 at 224 x 224 needs."""


def run(*arguments: object) -> str:
    command = [sys.executable, str(CONTENDER), *map(str, arguments)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def estimate(path: Path, batch: int) -> float:
    """Return the estimated peak in MiB."""
    bundle = open_bundle(path)
    model = onnx.load_model_from_string(bundle.read(TRAIN))
    return step_memory.estimate(bundle.manifest, model, batch).total / step_memory.MIB


def compare(name: str, chosen: Any, folder: Path) -> dict[str, dict[str, float]]:
    """Return the contenders' figures."""
    budgets = {"default": "", f"within {BUDGETS[name]}": BUDGETS[name]}
    results: dict[str, dict[str, float]] = {
        "eager": json.loads(run("eager", name, chosen.side, chosen.batch, chosen.steps))
    }
    for label, memory in budgets.items():
        path = folder / f"{name}.bundle"
        run("export", name, chosen.side, chosen.batch, path, memory)
        results[label] = json.loads(run("onnx", path, chosen.side, chosen.batch, chosen.steps))
        results[label]["estimate_mib"] = estimate(path, chosen.batch)
    return results


def main() -> None:
    options = measure.parser(__doc__)
    options.add_argument("--models", nargs="+", choices=BUDGETS, default=["mobilenet_v3_small"])
    options.add_argument(
        "--side", type=int, default=224, help="pixels of an image's side (%(default)s)"
    )
    options.add_argument("--batch", type=int, default=16, help="examples (%(default)s)")
    options.add_argument("--steps", type=int, default=5, help="that are timed (%(default)s)")
    chosen = options.parse_args()
    rows = [
        (
            "model",
            "contender",
            "peak RSS, MiB",
            "of eager's",
            "estimate, MiB",
            "CPU-s per step",
            "of eager's",
        )
    ]
    results = {}
    with measure.scratch() as folder:
        for name in chosen.models:
            results[name] = compare(name, chosen, folder)
            whole = results[name]["eager"]
            for label, figures in results[name].items():
                peak, spent = figures["peak_rss_mib"], figures["cpu_s_per_step"]
                of_peak, of_time = (
                    f"{figures[key] / whole[key]:.2f}" for key in ("peak_rss_mib", "cpu_s_per_step")
                )
                estimated = f"{figures['estimate_mib']:.0f}" if "estimate_mib" in figures else ""
                rows.append(
                    (name, label, f"{peak:.0f}", of_peak, estimated, f"{spent:.2f}", of_time)
                )
    print(measure.table(rows))
    settings = {"side": chosen.side, "batch": chosen.batch, "steps": chosen.steps}
    measure.write_json(chosen.json, settings, results)


if __name__ == "__main__":
    main()
