"""One bundle of fine_tuning.py, in a separate process: trains it, and prints what that cost as
JSON.

_fine_tuning_contender.py BUNDLE DATA.npz EPOCHS SEEDS HEAD whole|features

HEAD: the parameters' names begin with this. With ``features`` what is frozen is computed once for
each example.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np
from fleetlearn_device.runtimes.import_onnxruntime import import_onnxruntime
from fleetlearn_device.runtimes.open_runtime import open_runtime
from fleetlearn_device.training.data import ArrayData, Data
from fleetlearn_device.training.features import FeatureCache, FeatureData
from fleetlearn_protocol import open_bundle

BATCH = 32
LR = 0.03


def private_mib() -> float:
    """Memory that belongs to this process alone: not the files that are mapped into it."""
    rollup = Path("/proc/self/smaps_rollup").read_text()
    return int(rollup.partition("Anonymous:")[2].split()[0]) / 1024


def main() -> None:
    path, arrays, epochs, seeds, head, how = sys.argv[1:]
    import_onnxruntime()
    with np.load(arrays) as file:
        x, y, x_test, y_test = (file[name] for name in ("x", "y", "x_test", "y_test"))
    bundle = open_bundle(path)
    before = private_mib()
    runtime = open_runtime(path, from_features=how == "features")
    data: Data = ArrayData((x, y))
    first, accuracies = runtime.parameters.copy(), []
    taken: list[float] = []
    """CPU-seconds of each epoch, of all seeds."""
    if how == "features":
        data = FeatureCache(bundle, 1, x.nbytes * 100).of(ArrayData((x, y)))
    for seed in range(int(seeds)):
        # A head of one's own for each seed; what else is trained begins as it was pretrained.
        vector, random = first.copy(), np.random.default_rng(seed)
        for parameter in runtime.manifest.parameters:
            if parameter.name == f"{head}.weight":
                size = int(np.prod(parameter.shape))
                vector[parameter.offset : parameter.offset + size] = (
                    random.uniform(-1, 1, size) / parameter.shape[1] ** 0.5
                )
        runtime.load(vector)
        for epoch in range(int(epochs)):
            begun = time.process_time()
            if isinstance(data, FeatureData):
                data.compute(BATCH, lambda: False, lambda: None)
            for batch in data.batches(BATCH, seed, epoch):
                runtime.step(batch, lr=LR)
            taken.append(time.process_time() - begun)
        whole = open_runtime(path)
        whole.load(runtime.parameters)
        sums = whole.evaluate((x_test, y_test))
        accuracies.append(sums.metric_sums["accuracy"] / sums.examples)
        del whole
    steps = -(-len(x) // BATCH)
    later = taken[1:] or taken
    costs = {
        "first_cpu_ms_per_step": 1e3 * taken[0] / steps,
        "cpu_ms_per_step": 1e3 * sum(later) / len(later) / steps,
    }
    print(
        json.dumps(
            costs | {"private_mib": private_mib() - before, "accuracy": float(np.mean(accuracies))}
        )
    )


if __name__ == "__main__":
    main()
