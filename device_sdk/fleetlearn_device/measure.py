"""Measures models on held-out data, in a process that another one starts: jobs and models come in,
results go out.

    python -m fleetlearn_device.measure BUNDLE DATA.npz

A job (``worker.py`` has its form) is the ``name`` of the model for people and the ``sha256`` of its
vector, which follows: float32, little-endian. The answer: ``examples``, ``loss_sum`` and
``metric_sums``.
"""

from __future__ import annotations

import sys
from typing import Any

import msgspec
import numpy as np
from fleetlearn_protocol.vector import digest

from fleetlearn_device.runtimes.open_runtime import open_runtime
from fleetlearn_device.runtimes.runtime import Runtime
from fleetlearn_device.training.data import Data, as_data, load_npz
from fleetlearn_device.training.train import evaluate_data
from fleetlearn_device.worker import DoJob, JobContent, serve_jobs


def measure(runtime: Runtime, data: Data, job: dict[str, Any], content: bytes) -> dict[str, Any]:
    """Return the answer to a job. ``content``: the vector's bytes. Raises ValueError."""
    vector = np.frombuffer(content, "<f4")
    if digest(vector) != job["sha256"]:
        raise ValueError(f"{job['name']} does not hold the model with SHA-256 {job['sha256']}")
    runtime.load(vector)
    sums: dict[str, Any] = msgspec.to_builtins(evaluate_data(runtime, data))
    return sums


def main(arguments: list[str]) -> int:
    """Entry point of the process."""
    bundle, path = arguments

    def prepare() -> DoJob:
        runtime = open_runtime(bundle, kind="onnx")
        data = as_data(load_npz(path, runtime.manifest))

        def do_job(job: dict[str, Any], content: JobContent) -> tuple[dict[str, Any], bytes]:
            return measure(runtime, data, job, content.read(content.left)), b""

        return do_job

    return serve_jobs(prepare)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
