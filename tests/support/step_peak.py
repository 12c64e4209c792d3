"""The memory that a training step takes, measured in a process of its own, and as the export
estimates it."""

from __future__ import annotations

import subprocess
import sys

import onnx
from fleetlearn_export.inspection import step_memory
from fleetlearn_protocol import Bundle
from fleetlearn_protocol.manifest import TRAIN

MEASURE = """
import sys
import numpy as np
from fleetlearn_device import open_runtime
runtime, random = open_runtime(sys.argv[1], kind="onnx"), np.random.default_rng(0)
shapes = [((int(sys.argv[2]), *row.shape), row.dtype) for row in runtime.manifest.batch]
def make(shape, dtype):
    return random.random(shape, np.float32) if dtype == "float32" else random.integers(0, 2, shape)
batch = tuple(make(*row) for row in shapes)
for _ in range(4):
    runtime.step(batch, lr=0.01)
status = dict(line.split(":") for line in open("/proc/self/status"))
print(1024 * int(status["VmHWM"].split()[0]))
"""


def measured(bundle: Bundle, batch: int) -> int:
    """Peak resident bytes of a process that trains on batches of this size."""
    command = [sys.executable, "-c", MEASURE, str(bundle.path), str(batch)]
    return int(
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    )


def estimated(bundle: Bundle, batch: int) -> int:
    model = onnx.load_model_from_string(bundle.read(TRAIN))
    return step_memory.estimate(bundle.manifest, model, batch).total
