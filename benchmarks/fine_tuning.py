"""A new head on a frozen backbone, one thread, batch 32: what a step costs, the download, the
memory and the accuracy.

A convolutional network learns the digits 0 to 4 in PyTorch. Then its bundles learn the digits 5 to
9, from a new head. All of it is trained, or the head alone, on a frozen backbone in float32,
float16 or int8, or from features that are computed once for each example. The bundles run in turns,
each in a separate process, with the same heads and the same order of examples. The same for a
MobileNetV3-small on random images, where the extra ``zoo`` is installed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from math import prod
from pathlib import Path
from typing import Any

import _measure as measure
import numpy as np
import onnx
import torch
from fleetlearn_export import export_bundle
from fleetlearn_export.graphs.frozen_file import with_constants
from fleetlearn_export.inspection import graph_costs
from fleetlearn_protocol import Bundle
from fleetlearn_protocol.manifest import (
    EVAL,
    EVAL_FROM_FEATURES,
    FEATURES,
    FROZEN,
    TRAIN,
    TRAIN_FROM_FEATURES,
)
from torch import Tensor, nn
from torch.nn import functional

sys.path.append(str(Path(__file__).parents[1] / "tests/support"))
from public_models import table

HERE = Path(__file__).parent
BATCH = 32
BUNDLES: dict[str, dict[str, Any]] = {
    "all": {},
    "head, float32": {"train": "head"},
    "head, float16": {"train": "head", "frozen": "float16"},
    "head, int8": {"train": "head", "frozen": "int8"},
    "head, features": {"train": "head", "cache_features": True},
}
OF_IMAGES = {name: BUNDLES[name] for name in ("head, float32", "head, features")}
SIDE, IMAGES = 64, 256
"""Pixels of an image's side, and the number of images that train MobileNetV3-small's last layer."""


class Network(nn.Module):
    """Scans (n, 1, 8, 8) -> 5 classes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            *self.block(1, width, 1),
            *self.block(width, 2 * width, 1),
            *self.block(2 * width, 4 * width, 2),
            *self.block(4 * width, 4 * width, 1),
            nn.AvgPool2d(2),
            nn.Flatten(),
        )
        self.head = nn.Linear(16 * width, 5)

    def block(self, inputs: int, outputs: int, stride: int) -> tuple[nn.Module, ...]:
        convolution = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        return convolution, nn.BatchNorm2d(outputs), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.backbone(x))
        return scores


def accuracy(outputs: Tensor, y: Tensor) -> Tensor:
    return (outputs.argmax(1) == y).float()


def pretrained(width: int, epochs: int, x: Tensor, y: Tensor) -> Network:
    """Train a network on the scans of 0 to 4."""
    torch.manual_seed(0)
    model = Network(width)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    chosen = torch.nonzero(y < 5).flatten()
    for _ in range(epochs):
        for rows in torch.split(chosen[torch.randperm(len(chosen))], BATCH):
            optimizer.zero_grad()
            loss: Any = functional.cross_entropy(model(x[rows]), y[rows])
            loss.backward()
            optimizer.step()
    return model


def exported(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    head: str,
    bundles: dict[str, dict[str, Any]],
    folder: Path,
) -> dict[str, tuple[Bundle, dict[str, Any]]]:
    """Write the bundles. Returns each with what can be said without running the bundle."""
    found = {}
    for name, options in bundles.items():
        arguments = {**options, "train": head} if "train" in options else options
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            path = folder / f"{name.replace(', ', '-')}.bundle"
            made = export_bundle(
                model,
                functional.cross_entropy,
                (x[:BATCH], y[:BATCH]),
                path,
                metrics={"accuracy": accuracy},
                **arguments,
            )
        files = made.bundle.manifest.files
        step, *others = (
            (TRAIN, EVAL)
            if FEATURES not in files
            else (TRAIN_FROM_FEATURES, FEATURES, EVAL_FROM_FEATURES)
        )
        graph = onnx.load_model_from_string(made.bundle.read(step))
        if FROZEN in files:
            with_constants(graph, made.bundle.read(FROZEN))
        feature_bytes = sum(
            np.dtype(feature.dtype).itemsize * prod(feature.shape)
            for feature in made.bundle.manifest.computed_features
        )
        found[name] = (
            made.bundle,
            {
                "gflops_per_step": graph_costs.flops(graph, graph_costs.values(graph, BATCH)).total
                / 1e9,
                "once_kib": sum(
                    files[path].size for path in (step, *others, FROZEN) if path in files
                )
                / 1024,
                "round_kib": 4 * made.bundle.manifest.size / 1024,
                "kept_bytes": feature_bytes,
                "effect_of_rounding": made.effect_of_rounding or 0.0,
            },
        )
        print(".", end="", flush=True, file=sys.stderr)
    return found


def measured(
    bundles: dict[str, tuple[Bundle, dict[str, Any]]],
    arrays: Path,
    head: str,
    repeats: int,
    epochs: int,
    seeds: int,
) -> dict[str, dict[str, Any]]:
    """Run the bundles in turns. Ratios are to the first one's time for a step."""
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in bundles}
    for _ in range(repeats):
        turn = {}
        for name, (bundle, _) in bundles.items():
            how = "whole" if bundle.manifest.computed_features == () else "features"
            command = [
                sys.executable,
                str(HERE / "_fine_tuning_contender.py"),
                str(bundle.path),
                str(arrays),
            ]
            command += [str(epochs), str(seeds), head, how]
            done = subprocess.run(command, capture_output=True, text=True, timeout=600)
            if done.returncode:
                raise RuntimeError(f"{name} failed:\n{done.stderr[-3000:]}")
            turn[name] = json.loads(done.stdout)
            print(".", end="", flush=True, file=sys.stderr)
        first = turn[next(iter(bundles))]["cpu_ms_per_step"]
        for name, run in turn.items():
            runs[name].append(run | {"ratio": run["cpu_ms_per_step"] / first})
    return {
        name: said
        | {key: measure.middle([run[key] for run in runs[name]]) for key in runs[name][0]}
        for name, (_, said) in bundles.items()
    }


def of_images(folder: Path, repeats: int) -> dict[str, dict[str, Any]]:
    """Measure a new last layer of a MobileNetV3-small with random weights, on random images and
    labels."""
    case = table.make("mobilenet_v3_small")
    random = torch.Generator().manual_seed(0)
    x = torch.randn(IMAGES, 3, SIDE, SIDE, generator=random)
    y = torch.randint(1000, (IMAGES,), generator=random)
    arrays = folder / "images.npz"
    np.savez(arrays, x=x.numpy(), y=y.numpy(), x_test=x[:BATCH].numpy(), y_test=y[:BATCH].numpy())
    (folder / "images").mkdir()
    bundles = exported(case.module, x, y, "classifier.3", OF_IMAGES, folder / "images")
    return measured(bundles, arrays, "classifier.3", repeats, 3, 1)


def main() -> None:
    options = measure.parser(__doc__)
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--width", type=int, default=32, help="channels of the first layer")
    options.add_argument("--pretraining", type=int, default=5, help="epochs")
    options.add_argument("--epochs", type=int, default=6, help="epochs of the new head")
    options.add_argument(
        "--seeds", type=int, default=2, help="new heads, whose mean accuracy is shown"
    )
    options.add_argument("--digits-only", action="store_true", help="without MobileNetV3-small")
    chosen = options.parse_args()
    sys.path.append(str(HERE.parent))
    from examples.digits import data

    digits = data()
    x, y = torch.from_numpy(digits.x_train), torch.from_numpy(digits.y_train)
    model = pretrained(chosen.width, chosen.pretraining, x, y)
    images: dict[str, dict[str, Any]] = {}
    with measure.scratch() as folder:
        later, held_out = digits.y_train >= 5, digits.y_test >= 5
        arrays = folder / "digits.npz"
        np.savez(
            arrays,
            x=digits.x_train[later],
            y=digits.y_train[later] - 5,
            x_test=digits.x_test[held_out],
            y_test=digits.y_test[held_out] - 5,
        )
        bundles = exported(model, x[y >= 5], y[y >= 5] - 5, "head", BUNDLES, folder)
        results = measured(bundles, arrays, "head", chosen.repeats, chosen.epochs, chosen.seeds)
        if not chosen.digits_only and not table.missing_packages():
            images = of_images(folder, chosen.repeats)
    print(file=sys.stderr)
    costs = "GFLOPs a step", "CPU-ms a step, first epoch", "later epochs", "of the first row's"
    sizes = (
        "fetched once, KiB",
        "each way a round, KiB",
        "kept of an example, bytes",
        "private, MiB",
    )
    rows: list[tuple[str, ...]] = [("trained", *costs, *sizes, "accuracy", "effect of rounding")]
    for title, found in (("", results), ("MobileNetV3-small, ", images)):
        for name, result in found.items():
            keys = "first_cpu_ms_per_step", "cpu_ms_per_step", "ratio", "private_mib"
            early, ms, ratio, private = (measure.show(result[key]) for key in keys)
            once, each, feature_bytes = (
                f"{result[key]:,.0f}" for key in ("once_kib", "round_kib", "kept_bytes")
            )
            correct = "" if title else f"{result['accuracy']['median']:.4f}"
            effect = f"{result['effect_of_rounding']:.2g}"
            step = f"{result['gflops_per_step']:.3g}"
            rows.append(
                (
                    title + name,
                    step,
                    early,
                    ms,
                    ratio,
                    once,
                    each,
                    feature_bytes,
                    private,
                    correct,
                    effect,
                )
            )
    print(measure.table(rows))
    written = results | {f"mobilenet_v3_small {name}": result for name, result in images.items()}
    measure.write_json(chosen.json, vars(chosen) | {"json": str(chosen.json)}, written)


if __name__ == "__main__":
    main()
