"""A training step on one thread: the bundle on ONNX Runtime, ONNX Runtime's own training API, and PyTorch.

Each contender trains the same model from the same weights on the same batches of 20, in a process of its own; their
losses after ten steps must agree. All contenders run once before any runs again. ``onnx`` runs on the stock runtime of
.venv/device, where there is one, and on the one of this environment. Compiling is not counted, but for its memory.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import _measure as measure
import _models
from fleetlearn_export import export_bundle

HERE = Path(__file__).parent
DEVICE_PYTHON = HERE.parent / ".venv/device/bin/python"
"""Holds what a device holds: stock ONNX Runtime, and no PyTorch."""
LR = 0.05
TOLERANCE = 1e-4
"""Relative difference of the losses above which the contenders did not do the same work."""
LIMIT = 300.0
"""Seconds that one contender may take."""


def export(name: str, folder: Path) -> tuple[Path, Path, int]:
    """The model's bundle, its batches as a file, and its number of parameters."""
    case = _models.make(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporters that it calls
        made = export_bundle(
            case.module, case.loss, case.batch(_models.BATCH), folder / f"{name}.bundle", targets=case.targets
        )
    _models.write_batches(name, folder / f"{name}.npz")
    return made.bundle.path, folder / f"{name}.npz", made.bundle.manifest.size


def contend(python: str | Path, kind: str, what: str | Path, arrays: Path, steps: int) -> dict[str, Any]:
    """What one contender cost. Raises RuntimeError with its output where it failed."""
    command = [str(python), str(HERE / "_step_contender.py"), kind, str(what), str(arrays), str(steps), str(LR)]
    # What is compiled in the first turn is read in the later ones; no worker processes stay behind.
    compiling = {"TORCHINDUCTOR_CACHE_DIR": str(arrays.parent / "compiled"), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, env={**os.environ, **compiling})
    if done.returncode:
        raise RuntimeError(f"{kind} failed:\n{done.stderr[-3000:]}")
    costs: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {
        "cpu_ms_per_step": 1e3 * costs["steps_cpu"] / steps,
        "clock_ms_per_step": 1e3 * costs["steps_clock"] / steps,
        "import_cpu_s": costs["import_cpu"],
        "load_cpu_s": costs["load_cpu"],
        "peak_rss_mib": costs["peak_rss_mib"],
        "loss": costs["loss"],
        "version": costs["version"],
    }


def compare(name: str, folder: Path, repeats: int, scale: float) -> dict[str, Any]:
    """All contenders on one model, in turns. Compiling may fail: then the result says how."""
    bundle, arrays, size = export(name, folder)
    steps = max(1, round(_models.STEPS[name] * scale))
    runs: dict[str, list[dict[str, Any]]] = {}
    failed = ""
    for _ in range(repeats):
        turn = [contend(sys.executable, "eager", name, arrays, steps)]
        if not failed:
            try:
                turn.append(contend(sys.executable, "compile", name, arrays, steps))
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                failed = str(error).strip().splitlines()[-1]
        if DEVICE_PYTHON.exists():
            turn.append(contend(DEVICE_PYTHON, "onnx", bundle, arrays, steps))
        turn.append(contend(sys.executable, "onnx", bundle, arrays, steps))
        if (bundle / "ort_training").is_dir():
            turn.append(contend(sys.executable, "ort-training", bundle, arrays, steps))
            turn[-1]["version"] = turn[-1]["version"].replace("onnxruntime", "ort-training")
        for run in turn:
            if abs(run["loss"] - turn[0]["loss"]) > TOLERANCE * abs(turn[0]["loss"]):
                raise RuntimeError(f"{name}: {run['version']} has the loss {run['loss']}, eager {turn[0]['loss']}")
            ratios = {
                "ratio": run["cpu_ms_per_step"] / turn[0]["cpu_ms_per_step"],
                "rss_ratio": run["peak_rss_mib"] / turn[0]["peak_rss_mib"],
            }
            runs.setdefault(run["version"], []).append(run | ratios)
        print(".", end="", flush=True, file=sys.stderr)
    keys = [key for key in next(iter(runs.values()))[0] if key != "version"]
    contenders = {
        version: {key: measure.middle([row[key] for row in rows]) for key in keys} for version, rows in runs.items()
    }
    return {"parameters": size, "steps": steps, "contenders": contenders, "runs": runs, "compile_failed": failed}


def main() -> None:
    options = measure.parser(__doc__)
    options.add_argument("--models", nargs="+", choices=_models.STEPS, default=list(_models.STEPS))
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--scale", type=float, default=1.0, help="times the usual number of steps")
    chosen = options.parse_args()
    with measure.scratch() as folder:
        results = {name: compare(name, folder, chosen.repeats, chosen.scale) for name in chosen.models}
    print(file=sys.stderr)
    columns = {
        "CPU-ms per step": "cpu_ms_per_step",
        "ratio to eager": "ratio",
        "peak RSS, MiB": "peak_rss_mib",
        "of eager's": "rss_ratio",
        "import, CPU-s": "import_cpu_s",
        "load, CPU-s": "load_cpu_s",
    }
    rows = [("model", "runtime", *columns)]
    for name, result in results.items():
        for version, figures in result["contenders"].items():
            rows.append((name, version, *(measure.show(figures[key]) for key in columns.values())))
        if result["compile_failed"]:
            rows.append((name, "compiled", f"failed: {result['compile_failed']}", *[""] * (len(columns) - 1)))
    print(measure.table(rows))
    measure.write_json(chosen.json, {"repeats": chosen.repeats, "scale": chosen.scale, "batch": _models.BATCH}, results)


if __name__ == "__main__":
    main()
