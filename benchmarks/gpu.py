"""A training step on a GPU: the bundle on ONNX Runtime's CUDA provider, and PyTorch, eager and compiled.

Each contender trains the same model from the same weights on the same batches in float32 (no TensorFloat-32), in a
process of its own; their losses after ten steps must agree. All contenders run once before any runs again. A step takes
its batch from the host's memory and brings its loss back. It needs onnxruntime-gpu and a PyTorch with CUDA in one
environment; --provider cpu tries the benchmark itself where there is no GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import _measure as measure
import _models
import step

HERE = Path(__file__).parent


def contend(kind: str, what: str | Path, arrays: Path, steps: int, provider: str) -> dict[str, Any]:
    """Return what one contender cost. Raises RuntimeError with its output if it failed."""
    program = str(HERE / "_step_contender.py")
    command = [sys.executable, program, kind, str(what), str(arrays), str(steps), str(step.LR), "1", provider]
    compiling = {"TORCHINDUCTOR_CACHE_DIR": str(arrays.parent / "compiled")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=step.LIMIT, env={**os.environ, **compiling})
    if done.returncode:
        raise RuntimeError(f"{kind} failed:\n{done.stderr[-3000:]}")
    costs: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {
        "clock_ms_per_step": 1e3 * costs["steps_clock"] / steps,
        "cpu_ms_per_step": 1e3 * costs["steps_cpu"] / steps,
        "load_s": costs["load_clock"],
        "loss": costs["loss"],
    }


def compare(name: str, folder: Path, chosen: Any) -> dict[str, Any]:
    """Run all contenders on one model, in turns. Raises RuntimeError if one failed, or did other work."""
    step.export(name, str(folder))
    arrays = folder / f"{name}.npz"
    _models.write_batches(name, arrays, chosen.batch)
    what: dict[str, str | Path] = {"eager": name, "compile": name, "onnx": folder / f"{name}.bundle"}
    tolerance = step.LOOSE_TOLERANCE if name in _models.PUBLIC else step.TOLERANCE
    runs: dict[str, list[dict[str, Any]]] = {kind: [] for kind in what if chosen.compile or kind != "compile"}
    for _ in range(chosen.repeats):
        turn = {kind: contend(kind, what[kind], arrays, chosen.steps, chosen.provider) for kind in runs}
        for kind, costs in turn.items():
            if abs(costs["loss"] - turn["eager"]["loss"]) > tolerance * abs(turn["eager"]["loss"]):
                raise RuntimeError(f"{name}: {kind} has the loss {costs['loss']}, eager {turn['eager']['loss']}")
            ratio = costs["clock_ms_per_step"] / turn["eager"]["clock_ms_per_step"]
            runs[kind].append(costs | {"ratio": ratio})
        print(".", end="", flush=True, file=sys.stderr)
    return {
        kind: {key: measure.middle([row[key] for row in rows]) for key in rows[0]} | {"runs": rows}
        for kind, rows in runs.items()
    }


def main() -> None:
    options = measure.parser(__doc__)
    options.add_argument("--provider", default="cuda", choices=("cuda", "cpu"), help="default: cuda")
    options.add_argument("--models", nargs="+", choices=_models.STEPS, default=list(_models.STEPS))
    options.add_argument("--batch", type=int, default=64, help="examples in a batch (default: 64)")
    options.add_argument("--steps", type=int, default=200, help="steps that count (default: 200)")
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--no-compile", dest="compile", action="store_false", help="without PyTorch's compiler")
    chosen = options.parse_args()
    with measure.scratch() as folder:
        results = {name: compare(name, folder, chosen) for name in chosen.models}
    print(file=sys.stderr)
    columns = {
        "ms per step": "clock_ms_per_step",
        "ratio to eager": "ratio",
        "CPU-ms per step": "cpu_ms_per_step",
        "load, s": "load_s",
    }
    rows = [("model", "contender", *columns)]
    for name, contenders in results.items():
        for kind, figures in contenders.items():
            rows.append((name, kind, *(measure.show(figures[key]) for key in columns.values())))
    print(measure.table(rows))
    settings = {key: getattr(chosen, key) for key in ("provider", "batch", "steps", "repeats")}
    measure.write_json(chosen.json, settings, results)


if __name__ == "__main__":
    main()
