"""What exporting a model costs, and how far five steps of its bundle are from PyTorch's.

In a deep network with ReLU and BatchNorm a rounding error that turns one sign moves gradients by
percents, so no fixed tolerance fits. PyTorch trains the model in float64 too: the bundle may be
ALLOWED times as far from that as PyTorch's own float32 is, from the weights as they are or nudged
by a rounding error.

    python tests/support/public_models/measured.py MODEL LIMIT  # ``measured`` runs it; prints JSON
"""

from __future__ import annotations

import copy
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROWS = 4
"""Examples of a batch."""
STEPS = 5
LR = 0.01
ALLOWED = 5.0
FLOOR = 1e-5
"""Relative difference that is always allowed."""
NUDGES = 2
"""Trainings in float32 from weights times 1 + u, u uniform within float32's spacing. The farthest
of all counts."""
LIMIT = 600.0
"""Seconds of CPU that a model may take unless the caller says otherwise: the export, its checks and
all trainings."""


class Measured(NamedTuple):
    """The figures of one model. The peak is the whole process's: PyTorch, the package, the model,
    export and checks."""

    name: str
    parameters: int
    """Elements, frozen ones too."""
    export_cpu_s: float
    peak_rss_mib: float
    nodes: int
    """Of train.onnx, as are the bytes."""
    graph_bytes: int
    """Frozen weights are in a file of their own."""
    load_cpu_s: float
    """Of the device's runtime, with train.onnx and the parameters."""
    loss_difference: float
    """The largest distance of a step's loss from float64, relative to the loss."""
    loss_allowed: float
    weight_difference: float
    """The distance of all trained weights from float64 after the steps, relative to the way that
    they moved."""
    weight_allowed: float


class Failed(NamedTuple):
    """Why a model has no figures."""

    name: str
    error: str


def measured(name: str, limit: float = LIMIT) -> Measured | Failed:
    """Export and train the model of this name in a process of its own, one thread, within ``limit``
    CPU-seconds."""
    command = [sys.executable, __file__, name, str(limit)]
    # The process finds all modules where this one does. The clock's limit is for one that hangs.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=20 * limit, env=environment
    )
    if done.returncode == -signal.SIGXCPU:
        return Failed(name, f"took more than {limit:.0f} CPU-s")
    if done.returncode:
        return Failed(
            name, (done.stderr.strip().splitlines() or [f"ended with status {done.returncode}"])[-1]
        )
    return Measured(**json.loads(done.stdout.splitlines()[-1]))


HEADINGS = (
    "model",
    "parameters, million",
    "export, CPU-s",
    "peak RSS, MiB",
    "nodes",
    "train.onnx, KiB",
    "load, CPU-s",
    "loss: difference / allowed",
    "weights: difference / allowed",
)


def row(found: Measured | Failed) -> tuple[str, ...]:
    """Return the table's row."""
    if isinstance(found, Failed):
        return found.name, found.error, *[""] * (len(HEADINGS) - 2)
    return (
        found.name,
        f"{found.parameters / 1e6:.3g}",
        f"{found.export_cpu_s:.1f}",
        f"{found.peak_rss_mib:.0f}",
        f"{found.nodes}",
        f"{found.graph_bytes / 1024:.0f}",
        f"{found.load_cpu_s:.2f}",
        f"{found.loss_difference:.1e} / {found.loss_allowed:.1e}",
        f"{found.weight_difference:.1e} / {found.weight_allowed:.1e}",
    )


def _measure(name: str) -> Measured:
    import onnx
    import torch
    from by_hand import bundle_training
    from fleetlearn_device import open_runtime
    from fleetlearn_export import export_bundle
    from fleetlearn_protocol.manifest import TRAIN

    from public_models.table import make

    torch.set_num_threads(1)
    case = make(name)
    with tempfile.TemporaryDirectory() as folder:
        begin = time.process_time()
        exported = export_bundle(
            case.module, case.loss, case.batch(ROWS), Path(folder, "bundle"), targets=case.targets
        )
        export_cpu = time.process_time() - begin
        peak = int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) / 1024
        graph = exported.bundle.path / TRAIN
        nodes, graph_bytes = (
            len(onnx.load(graph, load_external_data=False).graph.node),
            graph.stat().st_size,
        )
        begin = time.process_time()
        runtime = open_runtime(exported.bundle.path)
        load_cpu = time.process_time() - begin
        del runtime
        batches = [case.batch(ROWS, 100 + step) for step in range(STEPS)]
        weights, losses = bundle_training(exported.bundle, batches, LR)
        rows = [row.name for row in exported.bundle.manifest.parameters if not row.buffer]
    differences = _differences(case, batches, {name: weights[name] for name in rows}, losses)
    return Measured(
        name,
        sum(value.numel() for value in case.module.parameters()),
        export_cpu,
        peak,
        nodes,
        graph_bytes,
        load_cpu,
        *differences,
    )


def _differences(
    case: Any, batches: Sequence[Any], weights: dict[str, Any], losses: Sequence[float]
) -> list[float]:
    """Return the last four of Measured."""
    import numpy as np
    import torch
    from by_hand import Repeatable, pytorch_training

    def trained(module: Any, rows: Sequence[Any]) -> tuple[Any, Any]:
        found, curve = pytorch_training(
            Repeatable(module), case.loss, rows, LR, targets=case.targets
        )
        return np.concatenate([found[f"inner.{name}"].ravel() for name in weights]), np.array(curve)

    def nudged(seed: int) -> Any:
        module, random = copy.deepcopy(case.module), torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for value in module.parameters():
                spread = torch.rand(value.shape, generator=random) - 0.5
                value.mul_(1 + spread * torch.finfo(torch.float32).eps)
        return module

    doubles = [
        [value.double() if value.is_floating_point() else value for value in batch]
        for batch in batches
    ]
    exact, exact_curve = trained(copy.deepcopy(case.module).double(), doubles)
    state = case.module.state_dict()
    way = np.linalg.norm(exact - np.concatenate([state[name].numpy().ravel() for name in weights]))

    def distances(vector: Any, curve: Any) -> tuple[float, float]:
        return float(np.abs(curve / exact_curve - 1).max()), float(
            np.linalg.norm(vector - exact) / way
        )

    found = distances(
        np.concatenate([value.ravel() for value in weights.values()]), np.array(losses)
    )
    own = [
        distances(*trained(module, batches))
        for module in (case.module, *(nudged(seed) for seed in range(NUDGES)))
    ]
    allowed = [max(FLOOR, ALLOWED * max(values)) for values in zip(*own, strict=True)]
    return [found[0], allowed[0], found[1], allowed[1]]


def main() -> None:
    name, limit = sys.argv[1], int(float(sys.argv[2]))
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
    print(json.dumps(_measure(name)._asdict()))


if __name__ == "__main__":
    main()
