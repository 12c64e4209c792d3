"""Measures models on held-out data, in a process that another one starts: jobs and models come in,
results go out.

    python -m fleetlearn_device.measure BUNDLE DATA.npz

A job is a line of standard input, a JSON object: ``name`` of the model for people, ``elements``,
and ``sha256`` of the vector's bytes. The vector follows it, as ``elements`` float32 numbers,
little-endian. The answer is a line of standard output: ``examples``, ``loss_sum`` and
``metric_sums``, or ``error``. The process ends with its input.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import msgspec
import numpy as np
from fleetlearn_protocol.vector import digest

from fleetlearn_device.runtimes.open_runtime import open_runtime
from fleetlearn_device.runtimes.runtime import Runtime
from fleetlearn_device.training.data import Data, as_data, load_npz
from fleetlearn_device.training.train import evaluate_data


def measure(runtime: Runtime, data: Data, job: dict[str, Any], content: bytes) -> dict[str, Any]:
    """Return the answer to a job. ``content``: the vector's bytes."""
    try:
        vector = np.frombuffer(content, "<f4")
        if digest(vector) != job["sha256"]:
            return {"error": f"{job['name']} does not hold the model with SHA-256 {job['sha256']}"}
        runtime.load(vector)
        sums: dict[str, Any] = msgspec.to_builtins(evaluate_data(runtime, data))
    except Exception as error:
        return {"error": " ".join(str(error).split()) or type(error).__name__}
    return sums


def main(arguments: list[str]) -> int:
    """Entry point of the process."""
    bundle, path = arguments
    try:
        runtime = open_runtime(bundle, kind="onnx")
        data = as_data(load_npz(path, runtime.manifest))
    except Exception as error:
        print(json.dumps({"error": " ".join(str(error).split())}), flush=True)
        return 1
    for line in sys.stdin.buffer:
        job = json.loads(line)
        content = sys.stdin.buffer.read(4 * job["elements"])
        print(json.dumps(measure(runtime, data, job, content)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
