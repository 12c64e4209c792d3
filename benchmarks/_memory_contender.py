"""One contender of memory.py, in a separate process: trains, and prints what that cost as JSON.

_memory_contender.py eager MODEL SIDE BATCH STEPS
_memory_contender.py onnx BUNDLE SIDE BATCH STEPS
_memory_contender.py export MODEL SIDE BATCH BUNDLE MEMORY
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

LR = 0.01


def case(name: str, side: int) -> Any:
    sys.path.append(str(Path(__file__).parents[1] / "tests/support"))
    import torch
    from public_models import vision
    from public_models.table import make

    torch.set_num_threads(1)
    vision.SIDE = side
    return make(name)


def export(name: str, side: int, batch: int, path: str, memory: str) -> None:
    """Write the model's bundle, within the memory for that batch unless it is empty."""
    from fleetlearn_export import export_bundle

    warnings.simplefilter("ignore")  # of the exporters that it calls
    made = case(name, side)
    budget = (memory, batch) if memory else (None, None)
    export_bundle(
        made.module,
        made.loss,
        made.batch(4),
        path,
        targets=made.targets,
        memory=budget[0],
        batch=budget[1],
    )


def eager(name: str, side: int, batch: int) -> Any:
    import torch

    made = case(name, side)
    optimizer = torch.optim.SGD(made.module.parameters(), lr=LR)
    x, y = made.batch(batch)

    def step() -> None:
        optimizer.zero_grad()
        made.loss(made.module(x), y).backward()
        optimizer.step()

    return step


def bundle(path: str, side: int, batch: int) -> Any:
    import numpy as np
    from fleetlearn_device import open_runtime

    runtime = open_runtime(path, kind="onnx")
    x = np.random.default_rng(0).standard_normal((batch, 3, side, side), np.float32)
    y = np.zeros(batch, np.int64)
    return lambda: runtime.step((x, y), lr=LR)


def main() -> None:
    kind, what, side, batch, *rest = sys.argv[1:]
    if kind == "export":
        export(what, int(side), int(batch), *rest)
        return
    step = (eager if kind == "eager" else bundle)(what, int(side), int(batch))
    for _ in range(2):
        step()
    begin = time.process_time()
    for _ in range(int(rest[0])):
        step()
    spent = time.process_time() - begin
    peak = int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) / 1024
    print(json.dumps({"cpu_s_per_step": spent / int(rest[0]), "peak_rss_mib": peak}))


if __name__ == "__main__":
    main()
