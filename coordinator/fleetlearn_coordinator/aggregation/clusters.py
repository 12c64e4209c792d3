"""Clusters: several models of one kind. Each device trains the one that fits its data best.

Ghosh, Chung, Yin and Ramchandran 2020, "An Efficient Framework for Clustered Federated Learning",
arXiv 2006.04088, algorithm 1 (IFCA), with the averages of models: in each round, a device's cluster
is the one whose model has the least loss on its data.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import prod
from statistics import median
from typing import Any

import numpy as np
from fleetlearn_protocol.manifest import Manifest
from fleetlearn_protocol.vector import Vector, views


def best_of(losses: Sequence[float]) -> int:
    """Return which model fits best, from 0: the least loss; of equal ones the first."""
    return min(range(len(losses)), key=losses.__getitem__)


def starting_models(
    model: Vector, manifest: Manifest, count: int, seed: int, spread: float
) -> list[Vector]:
    """Return the models that the clusters begin with: float32, (P,). The first is ``model``.

    In the others a weight w of a tensor whose root mean square is r is (w + spread r n) / sqrt(1 +
    spread^2), n drawn from a normal distribution: as large as w, and the less like it, the greater
    ``spread`` is. In a tensor of zeros it is spread n / sqrt(elements of a row). Tensors of one
    dimension (biases, what normalisation scales by) and buffers stay, unless all tensors have one
    dimension. Raises ValueError where nothing could differ.
    """
    rows = [row for row in manifest.travelling if not row.buffer]
    weights = [row for row in rows if len(row.shape) > 1] or [row for row in rows if row.shape]
    if not weights:
        raise ValueError("the bundle has no tensor in which the clusters' models could differ")
    models = [model]
    for number in range(1, count):
        luck, other = np.random.default_rng([seed, number]), model.copy()
        tensors = views(other, manifest.travelling)
        for row in weights:
            tensor = tensors[row.name]
            noise = luck.standard_normal(tensor.shape)
            size = float(np.sqrt(np.mean(np.square(tensor, dtype=np.float64))))
            if size:
                tensor[...] = (tensor + spread * size * noise) / np.sqrt(1 + spread**2)
            else:
                tensor[...] = spread * noise / np.sqrt(prod(row.shape[1:]) or 1)
        models.append(other)
    return models


def summarise_fit(names: Sequence[str], losses: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Return what devices' answers say together: how many chose each model, and how sure they are.

    ``losses``: of each device, one for each of ``names``. ``in_doubt`` counts the devices whose
    second-best model is less than a tenth worse than the best one; ``margin`` is the median over
    the devices of second-best / best - 1, None where no device has a loss above 0.
    """
    chosen = Counter(names[best_of(row)] for row in losses)
    margins = [
        second / best - 1 for best, second in (sorted(row)[:2] for row in losses) if best > 0
    ]
    return {
        "chosen": {name: chosen[name] for name in names},
        "in_doubt": sum(margin < 0.1 for margin in margins),
        "margin": median(margins) if margins else None,
    }
