"""For tests of fleets with other SDKs: the model that their rounds must make."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from fleetlearn_device import open_runtime
from fleetlearn_device.training.data import load_npz
from fleetlearn_device.training.train import train
from fleetlearn_protocol import open_bundle
from fleetlearn_protocol.vector import Vector

ROUNDS, EPOCHS, LR = 3, 4, 0.2
TOLERANCE = 1e-4


def expected_model(bundle_path: Path, shards: list[Path]) -> Vector:
    """FedAvg, with all of a device's examples in each step, so that their order is no matter."""
    bundle = open_bundle(bundle_path)
    runtime = open_runtime(bundle_path)
    model = bundle.parameters().astype(np.float64)
    for _ in range(ROUNDS):
        updates, weights = [], []
        for shard in shards:
            runtime.load(model.astype(np.float32))
            hyper = {"lr": LR, "mu": 0.0}
            result = train(
                runtime, load_npz(shard), hyper=hyper, epochs=EPOCHS, batch_size=0, seed=0
            )
            updates.append(result.update)
            weights.append(result.examples)
        model += np.average(updates, axis=0, weights=weights)
    return np.asarray(model, np.float32)
