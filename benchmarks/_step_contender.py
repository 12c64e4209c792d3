"""One contender of step.py, in a process of its own: trains, and prints what that cost as JSON.

    _step_contender.py eager|compile MODEL BATCHES.npz STEPS LR [PROVIDER]
    _step_contender.py onnx|ort-training BUNDLE BATCHES.npz STEPS LR [PROVIDER]

``PROVIDER``: cpu, or cuda for a GPU. Each step ends with its loss on the host, so a GPU has done its work by then.
It begins with what the measurement of imports must not include.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

WARM = 10
"""Steps before those that count. The loss of the last is compared: later, rounding drives any two apart."""

Step = Callable[..., float]
costs: dict[str, float] = {}


@contextmanager
def cost(name: str) -> Iterator[None]:
    """Seconds of CPU and of the clock that a part takes."""
    cpu, clock = time.process_time(), time.perf_counter()
    yield
    costs[f"{name}_cpu"], costs[f"{name}_clock"] = time.process_time() - cpu, time.perf_counter() - clock


def pytorch(kind: str, name: str, lr: float, provider: str) -> tuple[Step, str]:
    """The usual loop: zero_grad, backward, step. ``compile``: model and loss, forward and backward, are compiled. On a
    GPU in float32, as the bundle."""
    with cost("import"):
        import _models
        import torch
    with cost("load"):
        torch.set_num_threads(1)
        torch.backends.cudnn.allow_tf32 = False
        case = _models.make(name)
        case.module.to(provider)
        optimizer = torch.optim.SGD(case.module.parameters(), lr=lr)

    def objective(*batch: Any) -> Any:
        return case.loss(case.module(*batch[: -case.targets]), *batch[-case.targets :])

    forward = torch.compile(objective) if kind == "compile" else objective

    def step(*batch: Any) -> float:
        optimizer.zero_grad()
        loss = forward(*(torch.from_numpy(array).to(provider) for array in batch))
        loss.backward()
        optimizer.step()
        value: float = loss.item()
        return value

    return step, f"torch {torch.__version__}" + (", compiled" if kind == "compile" else "")


def bundle(kind: Any, path: str, lr: float, provider: Any) -> tuple[Step, str]:
    """The bundle on a device's runtime."""
    with cost("import"):
        from fleetlearn_device.runtimes.runtime import open_runtime
    with cost("load"):
        runtime = open_runtime(path, kind=kind, threads=1, provider=provider)
    return lambda *batch: runtime.step(batch, lr=lr), f"onnxruntime {runtime.version}"


def main() -> None:
    kind, what, arrays, steps, lr, provider = [*sys.argv[1:], "cpu"][:6]
    made = pytorch if kind in ("eager", "compile") else bundle
    step, version = made(kind, what, float(lr), provider)
    import numpy as np

    with np.load(arrays) as file:
        data = cycle(list(zip(*file.values(), strict=True)))
    loss = [step(*next(data)) for _ in range(WARM)][-1]
    with cost("steps"):
        for _ in range(int(steps)):
            step(*next(data))
    status = Path("/proc/self/status").read_text()
    peak = int(status.partition("VmHWM:")[2].split()[0]) / 1024
    print(json.dumps({**costs, "peak_rss_mib": peak, "loss": loss, "version": version}))


if __name__ == "__main__":
    main()
