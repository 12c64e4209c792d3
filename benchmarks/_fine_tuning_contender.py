"""One bundle of fine_tuning.py, in a process of its own: trains it, and prints what that cost as JSON.

_fine_tuning_contender.py BUNDLE DIGITS.npz EPOCHS SEEDS
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np
from fleetlearn_device.runtimes.import_onnxruntime import import_onnxruntime
from fleetlearn_device.runtimes.runtime import open_runtime
from fleetlearn_device.training.data import ArrayData

BATCH = 32
LR = 0.03


def private_mib() -> float:
    """Memory that belongs to this process alone: not the files that are mapped into it."""
    rollup = Path("/proc/self/smaps_rollup").read_text()
    return int(rollup.partition("Anonymous:")[2].split()[0]) / 1024


def main() -> None:
    bundle, arrays, epochs, seeds = sys.argv[1:]
    import_onnxruntime()
    with np.load(arrays) as file:
        x, y, x_test, y_test = (file[name] for name in ("x", "y", "x_test", "y_test"))
    before = private_mib()
    runtime = open_runtime(bundle)
    data, first, accuracies = ArrayData((x, y)), runtime.parameters.copy(), []
    steps, spent = 0, 0.0
    for seed in range(int(seeds)):
        # A head of one's own for each seed; what else is trained begins as it was pretrained.
        vector, random = first.copy(), np.random.default_rng(seed)
        for row in runtime.manifest.parameters:
            if row.name == "head.weight":
                size = int(np.prod(row.shape))
                vector[row.offset : row.offset + size] = random.uniform(-1, 1, size) / row.shape[1] ** 0.5
        runtime.load(vector)
        for epoch in range(int(epochs)):
            batches = list(data.batches(BATCH, seed, epoch))
            begun = time.process_time()
            for batch in batches:
                runtime.step(batch, lr=LR)
            steps, spent = steps + len(batches), spent + time.process_time() - begun
        sums = runtime.evaluate((x_test, y_test))
        accuracies.append(sums.metric_sums["accuracy"] / sums.examples)
    costs = {"cpu_ms_per_step": 1e3 * spent / steps, "private_mib": private_mib() - before}
    print(json.dumps(costs | {"accuracy": float(np.mean(accuracies))}))


if __name__ == "__main__":
    main()
