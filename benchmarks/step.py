"""A training step: the bundle on ONNX Runtime, ONNX Runtime's own training API, PyTorch, MNN,
ExecuTorch and onnxsim.

Each contender trains the same model from the same weights on the same batches of 20, in a process
of its own; their losses after ten steps must agree. All contenders run once before any runs again.
``onnx`` runs on the stock runtime of this environment, and on the training build of
.venv/ort-training, where that is. Of compiling only its memory is counted. --peers names an
interpreter that has some of the last three; the table says what they cannot train.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import _measure as measure
import _models
from fleetlearn_export import export_bundle
from fleetlearn_protocol import open_bundle

HERE = Path(__file__).parent
TRAINING_PYTHON = HERE.parent / ".venv/ort-training/bin/python"
"""The environment that exports the bundles, if there is one: its bundles have ONNX Runtime's own
training artifacts."""
LR = 0.05
TOLERANCE = 1e-4
"""Relative difference of the losses above which the contenders did not do the same work."""
LOOSE_TOLERANCE = 0.3
"""For models that people bring: dropout draws other numbers, and rounding grows from layer to
layer."""
LIMIT = 300.0
"""Seconds that one contender may take."""


def export(name: str, folder: str) -> None:
    """Write the model's bundle."""
    case = _models.make(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporters that it calls
        export_bundle(
            case.module,
            case.loss,
            case.batch(_models.BATCH),
            Path(folder, f"{name}.bundle"),
            targets=case.targets,
            train=_models.HEADS[name][1] if name in _models.HEADS else None,
        )


def contend(
    python: str | Path, kind: str, what: str | Path, arrays: Path, steps: int, threads: int
) -> dict[str, Any]:
    """Return what one contender cost. Raises RuntimeError with its output if it failed."""
    program = str(HERE / "_step_contender.py")
    command = [
        str(python),
        program,
        kind,
        str(what),
        str(arrays),
        str(steps),
        str(LR),
        str(threads),
    ]
    # What is compiled in the first turn is read in the later ones; no worker processes stay behind.
    compiling = {
        "TORCHINDUCTOR_CACHE_DIR": str(arrays.parent / "compiled"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT, env={**os.environ, **compiling}
    )
    if done.returncode:
        raise RuntimeError(f"{kind} failed:\n{done.stderr[-3000:]}")
    costs: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    steps = costs["steps"]  # fewer if they took too long
    return {
        "cpu_ms_per_step": 1e3 * costs["steps_cpu"] / steps,
        "clock_ms_per_step": 1e3 * costs["steps_clock"] / steps,
        "import_cpu_s": costs["import_cpu"],
        "load_cpu_s": costs["load_cpu"],
        "peak_rss_mib": costs["peak_rss_mib"],
        "loss": costs["loss"],
        "version": costs["version"],
    }


def compare(
    name: str,
    folder: Path,
    repeats: int,
    scale: float,
    threads: int,
    compiled: bool,
    peers: str | None,
) -> dict[str, Any]:
    """Run all contenders on one model, in turns. If the compiler or a peer fails, the result says
    how."""
    tolerance = TOLERANCE if name in _models.OF_THE_ZOO else LOOSE_TOLERANCE
    # That environment has PyTorch, but none of the packages that public models come from.
    python = (
        TRAINING_PYTHON
        if TRAINING_PYTHON.exists() and name in _models.OF_THE_ZOO
        else sys.executable
    )
    bundle, arrays, layers = (folder / f"{name}{end}" for end in (".bundle", ".npz", "-layers.npz"))
    if not bundle.exists():
        subprocess.run(
            [python, "-c", f"import step; step.export({name!r}, {str(folder)!r})"],
            cwd=HERE,
            check=True,
        )
        _models.write_batches(name, arrays)
    optional: dict[str, tuple[str, str | Path]] = (
        {"compile": (sys.executable, name)} if compiled else {}
    )
    if peers:
        optional |= dict.fromkeys(("executorch", "onnxsim"), (peers, name))
        if _models.write_layers(name, layers):
            optional["mnn"] = peers, layers
    steps = max(1, round(_models.STEPS[name] * scale))
    runs: dict[str, list[dict[str, Any]]] = {}
    failed: dict[str, str] = {}
    for _ in range(repeats):
        turn = [contend(sys.executable, "eager", name, arrays, steps, threads)]
        turn.append(contend(sys.executable, "onnx", bundle, arrays, steps, threads))
        if TRAINING_PYTHON.exists():
            turn.append(contend(TRAINING_PYTHON, "onnx", bundle, arrays, steps, threads))
        if (bundle / "ort_training").is_dir():
            turn.append(contend(TRAINING_PYTHON, "ort-training", bundle, arrays, steps, threads))
            turn[-1]["version"] = turn[-1]["version"].replace("onnxruntime", "ort-training")
        for run in turn[1:]:
            if differs(run, turn[0], tolerance):
                raise RuntimeError(
                    f"{name}: {run['version']} has the loss {run['loss']}, eager {turn[0]['loss']}"
                )
        for kind, (interpreter, what) in optional.items():
            if kind in failed:
                continue
            try:
                run = contend(interpreter, kind, what, arrays, steps, threads)
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                failed[kind] = reason_of(str(error))
                continue
            if differs(run, turn[0], tolerance):
                failed[kind] = (
                    f"{run['version']} computes something else: its loss after ten steps is "
                    f"{run['loss']}, "
                )
                failed[kind] += (
                    f"eager's {turn[0]['loss']}; a step takes {run['cpu_ms_per_step']:.3g} CPU-ms"
                )
            else:
                turn.append(run)
        for run in turn:
            ratios = {
                "ratio": run["cpu_ms_per_step"] / turn[0]["cpu_ms_per_step"],
                "clock_ratio": run["clock_ms_per_step"] / turn[0]["clock_ms_per_step"],
                "rss_ratio": run["peak_rss_mib"] / turn[0]["peak_rss_mib"],
            }
            runs.setdefault(run["version"], []).append(run | ratios)
        print(".", end="", flush=True, file=sys.stderr)
    keys = [key for key in next(iter(runs.values()))[0] if key != "version"]
    contenders = {
        version: {key: measure.middle([row[key] for row in rows]) for key in keys}
        for version, rows in runs.items()
    }
    return {
        "parameters": open_bundle(bundle, files=()).manifest.size,
        "steps": steps,
        "contenders": contenders,
        "runs": runs,
        "failed": failed,
    }


def reason_of(output: str) -> str:
    """Return the line of a traceback that names the error, and the line after it; the last line if
    there is none."""
    lines = [line for line in output.strip().splitlines() if line.strip()]
    named = [
        number for number, line in enumerate(lines) if re.match(r"[\w.]+(Error|Exception)\b", line)
    ]
    return " ".join(lines[named[-1] :][:2]) if named else lines[-1]


def differs(run: dict[str, Any], eager: dict[str, Any], tolerance: float) -> bool:
    """Whether the contender did other work than eager PyTorch."""
    return bool(not abs(run["loss"] - eager["loss"]) <= tolerance * abs(eager["loss"]))


def main() -> None:
    options = measure.parser(__doc__)
    options.add_argument("--models", nargs="+", choices=_models.STEPS, default=list(_models.STEPS))
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--scale", type=float, default=1.0, help="times the usual number of steps")
    options.add_argument(
        "--threads", type=int, nargs="+", default=[1], help="numbers of threads (default: 1)"
    )
    options.add_argument("--no-compile", action="store_true", help="without PyTorch's compiler")
    options.add_argument(
        "--peers",
        help="an interpreter that has MNN, ExecuTorch or onnxsim (default: not compared)",
    )
    chosen = options.parse_args()
    compiled = not chosen.no_compile
    results: dict[tuple[str, int], dict[str, Any]] = {}
    try:
        with measure.scratch() as folder:
            for name, threads in product(chosen.models, chosen.threads):
                results[name, threads] = compare(
                    name, folder, chosen.repeats, chosen.scale, threads, compiled, chosen.peers
                )
    finally:  # what was measured before a model failed, or before Ctrl-C
        print(file=sys.stderr)
        show(results)
    settings = {"repeats": chosen.repeats, "scale": chosen.scale, "batch": _models.BATCH}
    measure.write_json(
        chosen.json,
        settings,
        {f"{name}, threads {threads}": result for (name, threads), result in results.items()},
    )


def show(results: Mapping[tuple[str, int], dict[str, Any]]) -> None:
    """Print a table of the figures, and why contenders failed. The keys are model and number of
    threads."""
    columns = {
        "CPU-ms per step": "cpu_ms_per_step",
        "ratio to eager": "ratio",
        "of eager's clock time": "clock_ratio",
        "peak RSS, MiB": "peak_rss_mib",
        "of eager's": "rss_ratio",
        "import, CPU-s": "import_cpu_s",
        "load, CPU-s": "load_cpu_s",
    }
    rows = [("model", "threads", "runtime", *columns)]
    for (name, threads), result in results.items():
        for version, figures in result["contenders"].items():
            rows.append(
                (
                    name,
                    str(threads),
                    version,
                    *(measure.show(figures[key]) for key in columns.values()),
                )
            )
    print(measure.table(rows))
    for (name, threads), result in results.items():
        for kind, reason in result["failed"].items():
            print(f"\n{name}, threads {threads}, {kind} failed: {reason}")


if __name__ == "__main__":
    main()
