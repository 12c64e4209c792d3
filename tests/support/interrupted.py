"""For tests: tasks whose training is interrupted, on real bundles and a real state directory."""

from __future__ import annotations

from typing import Any

import numpy as np
from fleetlearn_device.storage.state_directory import StateDirectory
from fleetlearn_device.training.data import as_data
from fleetlearn_device.training.trainer import FinishedUpdate
from fleetlearn_protocol import Bundle
from fleetlearn_protocol.encodings import FLOAT32
from fleetlearn_protocol.messages import CONTROL, MODEL, StepSchedule, Task
from fleetlearn_protocol.vector import digest
from line_bundle import line_data

DATA = as_data(line_data(12))
CONTROL_VARIATE = np.array([0.1, -0.2, 0.3, 0, 0.05], np.float32)
BUNDLES: dict[str, dict[str, Any]] = {
    "everything": {
        "personal": True,
        "state": True,
        "references": ("anchor", "previous"),
        "random": True,
    },
    "correction": {"references": ("anchor", "correction"), "optimizer": "sgd", "random": True},
    "heads": {"personal": True, "state": True, "references": ("anchor",), "random": True},
}
ALGORITHMS = {
    "plain": "everything",
    "scaffold": "correction",
    "scaffold-gradient": "correction",
    "feddyn": "correction",
    "ditto": "correction",
    "fedrep": "heads",
    "pfedme": "correction",
    "apfl": "correction",
}
HYPER = {
    "pfedme": {"inner_steps": 3.0, "outer_lr": 0.5},
    "apfl": {"alpha": 0.5, "adapt_alpha": 2.0},
}
"""Algorithm -> its own hyper-parameters."""


def task_of(bundle: Bundle, algorithm: str, number: int, kept: str | None = None) -> Task:
    model = np.linspace(-1, 1, bundle.manifest.size, dtype=np.float32)
    model[3] = 2
    vectors = [FLOAT32.reference(MODEL, model)]
    parts = {"update": "topk-0.5", "buffers": "float32"}
    if algorithm.startswith("scaffold"):
        vectors.append(FLOAT32.reference(CONTROL, CONTROL_VARIATE))
        parts[CONTROL] = "float32"
    return Task(
        f"t{number}",
        number,
        bundle.sha256,
        tuple(vectors),
        parts,
        {"lr": 0.05, "mu": 0.3, **HYPER.get(algorithm, {})},
        epochs=2,
        batch_size=5,
        seed=100 + number,
        deadline=100.0,
        evaluate=True,
        algorithm=algorithm,
        kept=kept,
        personal_epochs=1 if algorithm in ("ditto", "fedrep") else None,
        schedule=StepSchedule("cosine", 2, 0.5),
    )


def bring(state: StateDirectory, bundle: Bundle, task: Task) -> None:
    """Put what the task needs into the cache."""
    contents = {entry.sha256: bundle.read(path) for path, entry in bundle.manifest.files.items()}
    contents[bundle.sha256] = bundle.read("manifest.json")
    model = np.linspace(-1, 1, bundle.manifest.size, dtype=np.float32)
    model[3] = 2
    contents |= {digest(vector): vector.tobytes() for vector in (model, CONTROL_VARIATE)}
    while lacking := state.contents.lacking(task, "onnx"):
        for wanted in lacking:
            state.contents.append(wanted, 0, contents[wanted.sha256])
            assert state.contents.finish(wanted)


def left(finished: FinishedUpdate) -> dict[str, Any]:
    """What a task leaves, without the time that it took."""
    report = finished.report
    return {
        "contents": [bytes(content) for content in finished.contents],
        "kept": finished.kept_state.tobytes(),
        "tied": {name: vector.tobytes() for name, vector in finished.tied.items()},
        "personal": None if finished.personal is None else finished.personal.tobytes(),
        "report": (report.examples, report.steps, report.epochs, report.loss, report.metrics),
        "evaluations": (report.evaluation, report.personal, report.complete),
    }
