"""Training steps whose products take float16, beside the same in float32: what they cost here, and
what they learn.

Time is this machine's: ONNX Runtime has no float16 kernels for x86 CPUs, and computes float16
products in float32. The bytes alive at the peak are counted in the graph, as a device with float16
kernels holds them. The digits' network is trained with every rounding of such a device.
"""

from __future__ import annotations

import os
import runpy
import sys
import warnings
from pathlib import Path
from typing import Any

import _measure as measure
import _models
import numpy as np
import onnx
import step
import torch
from fleetlearn_export import LocalStep, export_bundle
from fleetlearn_export.graphs.half_precision import Compute, with_every_rounding
from fleetlearn_export.inspection import graph_costs, step_memory
from fleetlearn_protocol import Bundle
from fleetlearn_protocol.manifest import TRAIN
from fleetlearn_protocol.vector import views

COMPUTE: tuple[Compute, ...] = ("float32", "float16")
DIGITS = Path(__file__).parents[1] / "examples" / "digits.py"
LR, BATCH = 0.03, 32
LAST = 50
"""Steps whose mean loss is shown."""


def export(name: str, folder: Path) -> dict[str, Bundle]:
    """Write the model's two bundles."""
    case = _models.make(name)
    bundles: dict[str, Bundle] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporters that it calls
        for compute in COMPUTE:
            path = folder / f"{name}.{compute}"
            example = case.batch(_models.BATCH)
            bundles[compute] = export_bundle(
                case.module, case.loss, example, path, targets=case.targets, compute=compute
            ).bundle
    return bundles


def alive(bundle: Bundle) -> float:
    """Return the MiB of intermediate results at the peak of a step."""
    graph = onnx.load(bundle.path / TRAIN)
    return (
        step_memory.peak_of_intermediates(graph, graph_costs.values(graph, _models.BATCH))
        / step_memory.MIB
    )


def compare(name: str, folder: Path, repeats: int, scale: float) -> dict[str, Any]:
    """Return each bundle's figures, and the ratios of float16's to float32's. The two run in
    turns."""
    bundles, arrays = export(name, folder), folder / f"{name}.npz"
    _models.write_batches(name, arrays)
    steps = max(1, round(_models.STEPS[name] * scale))
    runs: dict[str, list[dict[str, Any]]] = {compute: [] for compute in COMPUTE}
    for _ in range(repeats):
        for compute, found in runs.items():
            cost = step.contend(sys.executable, "onnx", bundles[compute].path, arrays, steps, 1)
            found.append({key: cost[key] for key in ("cpu_ms_per_step", "peak_rss_mib")})
    for compute, found in runs.items():
        for row in found:
            row["alive_mib"] = alive(bundles[compute])
    return measure.summary({compute: runs[compute] for compute in reversed(COMPUTE)})


def learn(folder: Path, steps: int, seeds: int) -> dict[str, dict[str, Any]]:
    """Train the digits' network from the same weights on the same batches. Returns last losses and
    accuracies."""
    digits = runpy.run_path(str(DIGITS))
    data, model = digits["data"](), digits["model"]()
    example = tuple(torch.from_numpy(value[:8]) for value in (data.x_train, data.y_train))
    results: dict[str, dict[str, Any]] = {}
    for compute in COMPUTE:
        path, rule = folder / f"digits.{compute}", LocalStep("momentum")
        bundle = export_bundle(
            model, digits["loss"], example, path, step=rule, compute=compute
        ).bundle
        runs = [_trained(bundle, data, steps, seed) for seed in range(seeds)]
        accuracies = []
        for _, parameters in runs:
            with torch.no_grad():
                outputs = torch.func.functional_call(
                    model, parameters, (torch.from_numpy(data.x_test),)
                )
            accuracies.append(float((outputs.argmax(1).numpy() == data.y_test).mean()))
        results[compute] = {
            "loss": measure.middle([loss for loss, _ in runs]),
            "accuracy": measure.middle(accuracies),
        }
    return results


def _trained(
    bundle: Bundle, data: Any, steps: int, seed: int
) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the mean of the last losses, and the parameters."""
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    graph = with_every_rounding(onnx.load(bundle.path / TRAIN)).SerializeToString()
    session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    parameters, state = bundle.manifest.parameters, bundle.manifest.state
    values = {
        f"param.{name}": value for name, value in views(bundle.parameters(), parameters).items()
    }
    values |= {f"state.{name}": value for name, value in views(bundle.state(), state).items()}
    inputs = {"hyper.lr": np.float32(LR), "hyper.momentum": np.float32(0.9)}
    random, losses = np.random.default_rng(seed), []
    for _ in range(steps):
        rows = random.choice(len(data.x_train), BATCH, replace=False)
        feed = {**values, **inputs, "batch.x": data.x_train[rows], "batch.y": data.y_train[rows]}
        outputs = session.run(names, {name: np.asarray(value) for name, value in feed.items()})
        results = dict(zip(names, outputs, strict=True))
        values = {name: results[f"next.{name}"] for name in values}
        losses.append(float(results["loss"]))
    trained = {
        parameter.name: torch.from_numpy(np.array(values[f"param.{parameter.name}"]))
        for parameter in parameters
    }
    return float(np.mean(losses[-LAST:])), trained


def main() -> None:
    options = measure.parser(__doc__)
    options.add_argument(
        "--models", nargs="*", choices=_models.STEPS, default=["ds_cnn", "transformer"]
    )
    options.add_argument("--repeats", type=int, default=3, help="turns (%(default)s)")
    options.add_argument(
        "--scale", type=float, default=1.0, help="of the number of steps (%(default)s)"
    )
    options.add_argument("--steps", type=int, default=300, help="on the digits (%(default)s)")
    options.add_argument("--seeds", type=int, default=5, help="orders of the digits (%(default)s)")
    chosen = options.parse_args()
    with measure.scratch() as folder:
        results: dict[str, Any] = {
            name: compare(name, folder, chosen.repeats, chosen.scale) for name in chosen.models
        }
        results["digits"] = learn(folder, chosen.steps, chosen.seeds)
    for name in chosen.models:
        print(f"\n{name}\n\n{measure.side_by_side(results[name])}")
    rows = [("digits", "loss", "accuracy")]
    rows += [
        (compute, measure.show(row["loss"]), measure.show(row["accuracy"]))
        for compute, row in results["digits"].items()
    ]
    print(f"\n{measure.table(rows)}")
    settings = {name: getattr(chosen, name) for name in ("repeats", "scale", "steps", "seeds")}
    measure.write_json(chosen.json, settings, results)


if __name__ == "__main__":
    main()
