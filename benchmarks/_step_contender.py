"""One contender of step.py, in a separate process: trains, and prints what that cost as JSON.

    _step_contender.py eager|compile MODEL BATCHES.npz STEPS LR THREADS [PROVIDER]
    _step_contender.py executorch|onnxsim MODEL BATCHES.npz STEPS LR THREADS
    _step_contender.py onnx|ort-training BUNDLE BATCHES.npz STEPS LR THREADS [PROVIDER]
    _step_contender.py mnn LAYERS.npz BATCHES.npz STEPS LR THREADS

``PROVIDER``: cpu, or cuda for a GPU. Each step ends with its loss on the host, so a GPU has done
its work by then. It begins with what the measurement of imports must not include.
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
"""Steps before those that count. The loss of the last is compared: later, rounding drives any two
apart."""
LONGEST = 30.0
"""Seconds after which no further step begins."""

Step = Callable[..., float]
costs: dict[str, float] = {}


@contextmanager
def cost(name: str) -> Iterator[None]:
    """Seconds of CPU and of the clock that a part takes."""
    cpu, clock = time.process_time(), time.perf_counter()
    yield
    costs[f"{name}_cpu"], costs[f"{name}_clock"] = (
        time.process_time() - cpu,
        time.perf_counter() - clock,
    )


def pytorch(kind: str, name: str, lr: float, threads: int, provider: str) -> tuple[Step, str]:
    """The usual loop: zero_grad, backward, step. ``compile``: model and loss, forward and backward,
    are compiled. On a GPU in float32, as the bundle."""
    with cost("import"):
        import _models
        import torch
    with cost("load"):
        torch.set_num_threads(threads)
        torch.backends.cudnn.allow_tf32 = False
        case = _models.make(name)
        case.module.to(provider)
        trained = [value for value in case.module.parameters() if value.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=lr)

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


def bundle(kind: Any, path: str, lr: float, threads: int, provider: Any) -> tuple[Step, str]:
    """The bundle on a device's runtime."""
    with cost("import"):
        from fleetlearn_device.runtimes.open_runtime import open_runtime
    with cost("load"):
        runtime = open_runtime(path, kind=kind, threads=threads, provider=provider)
    return lambda *batch: runtime.step(batch, lr=lr), f"onnxruntime {runtime.version}"


def main() -> None:
    kind, what, arrays, steps, lr, threads, provider = [*sys.argv[1:], "cpu"][:7]
    if kind in ("mnn", "executorch", "onnxsim"):
        import _step_peers

        step, version = getattr(_step_peers, kind)(what, float(lr), int(threads), cost)
    else:
        made = pytorch if kind in ("eager", "compile") else bundle
        step, version = made(kind, what, float(lr), int(threads), provider)
    import numpy as np

    with np.load(arrays) as file:
        data = cycle(list(zip(*file.values(), strict=True)))
    loss = [step(*next(data)) for _ in range(WARM)][-1]
    done, begun = 0, time.monotonic()
    with cost("steps"):
        while done < int(steps) and time.monotonic() - begun < LONGEST:
            step(*next(data))
            done += 1
    status = Path("/proc/self/status").read_text()
    peak = int(status.partition("VmHWM:")[2].split()[0]) / 1024
    print(
        json.dumps({**costs, "steps": done, "peak_rss_mib": peak, "loss": loss, "version": version})
    )


if __name__ == "__main__":
    main()
