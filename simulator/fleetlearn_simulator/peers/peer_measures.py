"""What is measured of peers: how far their models are from each other, and how good they are."""

from __future__ import annotations

from typing import Any

import numpy as np
from fleetlearn_device.runtimes.runtime import Runtime
from fleetlearn_protocol.vector import Vector
from numpy.typing import NDArray

from fleetlearn_simulator import keyed_random
from fleetlearn_simulator.data.generators import Arrays
from fleetlearn_simulator.population.traits import Ids
from fleetlearn_simulator.results.model_tests import tested


def mean_model(models: NDArray[np.float32]) -> Vector:
    """Return the mean of all peers' models: float32, shape (P,)."""
    return np.asarray(models.mean(axis=0, dtype=np.float64), np.float32)


def consensus_error(models: NDArray[np.float32]) -> float:
    """Return sqrt(1/n sum_i ||x_i - mean||^2): how far a peer's model is from their mean."""
    mean = models.mean(axis=0, dtype=np.float64)
    # Peer by peer, so that no second copy of all models is in memory.
    squares = [float(np.square(model - mean).sum()) for model in models]
    return float(np.sqrt(np.sum(squares) / len(models)))


def peers_to_test(peers: int, most: int, seed: int) -> Ids:
    """Return the numbers of the peers whose own models are tested, in order: drawn, if they are not
    all."""
    if most >= peers:
        return np.arange(peers, dtype=np.int64)
    luck = keyed_random.uniform(seed, "tested peers", np.arange(peers, dtype=np.int64))
    return np.sort(np.argsort(luck, kind="stable")[:most])


def own_tests(
    runtime: Runtime, models: NDArray[np.float32], ids: Ids, test: Arrays
) -> dict[str, dict[str, float]]:
    """Return the mean, the least and the greatest of each metric of these peers' own models on the
    test data. A model whose loss is not finite is left out."""
    rows = [found for peer in ids.tolist() if (found := tested(runtime, models[peer], test))]
    names = {name: None for row in rows for name in row}
    return {name: _spread([row[name] for row in rows if name in row]) for name in names}


def _spread(values: list[float]) -> dict[str, Any]:
    return {"mean": float(np.mean(values)), "least": min(values), "greatest": max(values)}
