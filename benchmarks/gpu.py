"""A training step on a GPU: the bundle on ONNX Runtime's CUDA provider, and PyTorch, eager and
compiled.

Each contender trains the same models from the same weights on the same batches in float32 (no
TensorFloat-32), in a separate process, one model after another; their losses after ten steps must
agree. All contenders run once before any runs again. A step takes its batch from the host's memory
and brings its loss back; the first ten do not count, and take PyTorch's compiler some time. It
needs onnxruntime-gpu and a PyTorch with CUDA in one environment; --provider cpu tries the benchmark
itself where there is no GPU. Bundles can be exported elsewhere: --bundles keeps them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import cycle
from pathlib import Path
from typing import Any

import _measure as measure

HERE = Path(__file__).parent
LIMIT = 1800.0
"""Seconds that one contender may take for all models."""
LONGEST = 10.0
"""Seconds of a model after which no further step begins."""
CONTENDERS = ("eager", "compile", "onnx", "launched")
"""The last: the bundle, with each operator launched by the host."""


def train(kind: str, name: str, folder: Path, chosen: Any) -> dict[str, Any]:
    """Train one model, and return what that cost."""
    import _step_contender as contender
    import numpy as np
    import step as options
    from fleetlearn_device.runtimes.providers import PROVIDERS

    if kind in ("onnx", "launched"):
        if kind == "launched":
            PROVIDERS[chosen.provider] = PROVIDERS[chosen.provider]._replace(recording=None)
        step, _ = contender.bundle(
            "onnx", str(folder / f"{name}.bundle"), options.LR, 1, chosen.provider
        )
    else:
        step, _ = contender.pytorch(kind, name, options.LR, 1, chosen.provider)
    with np.load(arrays_of(folder, name, chosen.batch)) as file:
        data = cycle(list(zip(*file.values(), strict=True)))
    loss = [step(*next(data)) for _ in range(contender.WARM)][-1]
    done, cpu, begun = 0, time.process_time(), time.perf_counter()
    while done < chosen.steps and time.perf_counter() - begun < LONGEST:
        step(*next(data))
        done += 1
    return {
        "clock_ms_per_step": 1e3 * (time.perf_counter() - begun) / done,
        "cpu_ms_per_step": 1e3 * (time.process_time() - cpu) / done,
        "load_s": contender.costs["load_clock"],
        "loss": loss,
    }


def arrays_of(folder: Path, name: str, batch: int) -> Path:
    return folder / f"{name}-{batch}.npz"


def contend(kind: str, folder: Path, chosen: Any) -> dict[str, Any]:
    """Return what each model cost a contender, or how it failed. Raises RuntimeError if the
    contender itself did."""
    command = [
        sys.executable,
        __file__,
        "--contender",
        kind,
        "--bundles",
        str(folder),
        "--models",
        *chosen.models,
    ]
    for name in ("provider", "batch", "steps"):
        command += [f"--{name}", str(getattr(chosen, name))]
    # What is compiled in the first turn is read in the later ones.
    compiling = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled")}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT, env={**os.environ, **compiling}
    )
    if done.returncode:
        raise RuntimeError(f"{kind} failed:\n{done.stderr[-3000:]}")
    print(".", end="", flush=True, file=sys.stderr)
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def contender(kind: str, chosen: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Train the models, and yield what each cost, or why it failed."""
    for name in chosen.models:
        try:
            yield name, train(kind, name, chosen.bundles, chosen)
        except Exception as error:  # of PyTorch's compiler, most likely: the other models go on
            yield (
                name,
                {
                    "failed": (
                        f"{type(error).__name__}: "
                        f"{(str(error).strip() or 'no text').splitlines()[0]}"
                    )
                },
            )


def prepare(folder: Path, chosen: Any) -> None:
    """Write the bundles and the batches that are not there yet."""
    import _models
    import step

    folder.mkdir(parents=True, exist_ok=True)
    for name in chosen.models:
        if not (folder / f"{name}.bundle").exists():
            step.export(name, str(folder))
        if not arrays_of(folder, name, chosen.batch).exists():
            _models.write_batches(name, arrays_of(folder, name, chosen.batch), chosen.batch)


def compare(turns: list[dict[str, dict[str, Any]]], name: str, tolerance: float) -> dict[str, Any]:
    """Return the contenders' figures for a model; of one that failed, or did other work than eager
    PyTorch, how."""
    figures: dict[str, Any] = {}
    for kind in turns[0]:
        runs = [turn[kind][name] for turn in turns]
        eager = [turn["eager"][name] for turn in turns]
        failed = [run["failed"] for run in runs if "failed" in run]
        failed += [f"eager failed: {row['failed']}" for row in eager if "failed" in row]
        pairs = (
            []
            if failed
            else [(row["loss"], other["loss"]) for row, other in zip(runs, eager, strict=True)]
        )
        failed += [
            f"the loss is {a}, eager's {b}"
            for a, b in pairs
            if not abs(a - b) <= tolerance * abs(b)
        ]
        if failed:
            figures[kind] = {"failed": failed[0]}
            continue
        for row, other in zip(runs, eager, strict=True):
            row["ratio"] = row["clock_ms_per_step"] / other["clock_ms_per_step"]
        figures[kind] = {key: measure.middle([run[key] for run in runs]) for key in runs[0]} | {
            "runs": runs
        }
    return figures


def main() -> None:
    import _models
    import step

    options = measure.parser(__doc__)
    options.add_argument(
        "--provider", default="cuda", choices=("cuda", "cpu"), help="default: cuda"
    )
    options.add_argument("--models", nargs="+", choices=_models.STEPS, default=list(_models.STEPS))
    options.add_argument("--batch", type=int, default=64, help="examples in a batch (default: 64)")
    options.add_argument("--steps", type=int, default=200, help="steps that count (default: 200)")
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument(
        "--no-compile", dest="compile", action="store_false", help="without PyTorch's compiler"
    )
    options.add_argument(
        "--launched", action="store_true", help="with bundles whose steps are not recorded, too"
    )
    options.add_argument(
        "--bundles", type=Path, help="a folder that keeps bundles and batches (default: none)"
    )
    options.add_argument(
        "--contender", choices=CONTENDERS, help="only train with this one, and print what that cost"
    )
    options.add_argument(
        "--export-only", action="store_true", help="only write what is missing in --bundles"
    )
    chosen = options.parse_args()
    if chosen.contender:
        print(json.dumps(dict(contender(chosen.contender, chosen))))
        return
    others = {"compile": chosen.compile, "launched": chosen.launched}
    kinds = [kind for kind in CONTENDERS if others.get(kind, True)]
    with nullcontext(chosen.bundles) if chosen.bundles else measure.scratch() as folder:
        prepare(folder, chosen)
        if chosen.export_only:
            return
        turns = [
            {kind: contend(kind, folder, chosen) for kind in kinds} for _ in range(chosen.repeats)
        ]
    print(file=sys.stderr)
    zoo = _models.OF_THE_ZOO
    tolerances = {
        name: step.TOLERANCE if name in zoo else step.LOOSE_TOLERANCE for name in chosen.models
    }
    results = {name: compare(turns, name, tolerance) for name, tolerance in tolerances.items()}
    columns = {
        "ms per step": "clock_ms_per_step",
        "ratio to eager": "ratio",
        "CPU-ms per step": "cpu_ms_per_step",
        "load, s": "load_s",
    }
    rows = [("model", "contender", *columns)]
    for name, contenders in results.items():
        for kind, figures in contenders.items():
            if "failed" not in figures:
                rows.append((name, kind, *(measure.show(figures[key]) for key in columns.values())))
    print(measure.table(rows))
    for name, contenders in results.items():
        for kind, figures in contenders.items():
            if "failed" in figures:
                print(f"\n{name}, {kind} failed: {figures['failed']}")
    settings = {key: getattr(chosen, key) for key in ("provider", "batch", "steps", "repeats")}
    measure.write_json(chosen.json, settings, results)


if __name__ == "__main__":
    main()
