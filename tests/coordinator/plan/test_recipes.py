"""Recipes: what they name exists, and FedSGD is what it is said to be."""

import numpy as np
import pytest
from fleetlearn_coordinator.aggregation import exact_mean
from fleetlearn_coordinator.aggregation.optimizers import defaults, make
from fleetlearn_coordinator.aggregation.robust.rules import RULES
from fleetlearn_coordinator.plan.local_algorithms import ALGORITHMS
from fleetlearn_coordinator.plan.recipes import RECIPES
from fleetlearn_protocol.vector import Vector
from numpy.typing import NDArray

HYPER = ("lr", "momentum", "beta1", "beta2", "tau")
FEATURES, CLASSES, ROUNDS, RATE = 12, 5, 20, 0.5


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_makes_its_optimizer(name: str) -> None:
    recipe = RECIPES[name]
    optimizer, hyper = (
        recipe.server["optimizer"],
        {key: value for key, value in recipe.server.items() if key in HYPER},
    )
    assert make(optimizer, **hyper).name == optimizer
    assert set(hyper) == set(defaults(optimizer))
    assert recipe.local["algorithm"] in ALGORITHMS
    assert "arXiv" in recipe.source or ALGORITHMS[recipe.local["algorithm"]].computes


def test_the_table_has_the_names_that_users_type() -> None:
    local, server = (
        ["fedprox", "fedprox-adaptive", "moon", "scaffold", "feddyn"],
        ["fedavgm", "fedadagrad", "fedadam", "fedyogi"],
    )
    asynchronous, personal = (
        ["fedbuff", "fedasync", "fednova", "q-fedavg"],
        ["fedper", "fedbn", "fedrep", "ditto", "pfedme", "apfl", "ifca"],
    )
    private = ["dp-fedavg", "dp-ftrl"]
    assert list(RECIPES) == [
        *(
            "fedsgd",
            "fedavg",
            *local,
            *server,
            *asynchronous,
            *personal,
            "feddf",
            "fedmd",
            *private,
            "statistics",
            "boosted-trees",
            "boosted-components",
            "function",
            *RULES,
        )
    ]
    needs = {name: recipe.needs for name, recipe in RECIPES.items() if recipe.needs}
    assert needs == {
        "fedprox": ("proximal",),
        "fedprox-adaptive": ("proximal",),
        "moon": ("contrastive",),
    }


def gradient(
    params: NDArray[np.floating], x: NDArray[np.float64], y: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return the gradient of softmax regression's mean cross-entropy, as one vector: weights, then
    biases."""
    weights, bias = (
        params[: FEATURES * CLASSES].reshape(FEATURES, CLASSES),
        params[FEATURES * CLASSES :],
    )
    scores = x @ weights + bias
    probabilities = np.exp(scores - scores.max(axis=1, keepdims=True))
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    probabilities[np.arange(len(y)), y] -= 1
    return np.concatenate([(x.T @ probabilities).ravel(), probabilities.sum(axis=0)]) / len(y)


def test_fedsgd_with_all_devices_is_centralised_large_batch_sgd() -> None:
    """McMahan et al., section 2: one full-batch step on each device, averaged by examples, is one
    on all the data."""
    recipe = RECIPES["fedsgd"]
    assert (recipe.local["epochs"], recipe.local["batch_size"]) == (1, 0)
    assert recipe.server == {"optimizer": "sgd", "lr": 1.0}
    optimizer = make("sgd", lr=1.0)
    random = np.random.default_rng(11)
    sizes = [1, 2, 3, 7, 20, 55, 140, 400]
    y = random.integers(0, CLASSES, sum(sizes))
    x = random.standard_normal((len(y), FEATURES)) + np.eye(CLASSES, FEATURES)[y] * 2
    order = np.argsort(y, kind="stable")  # each device has few classes: their gradients differ much
    shards = [(x[part], y[part]) for part in np.split(order, np.cumsum(sizes)[:-1])]

    start = (random.standard_normal(FEATURES * CLASSES + CLASSES) * 0.1).astype(np.float32)
    central: NDArray[np.float64] = start.astype(np.float64)
    model: Vector = start
    state = optimizer.init(model)
    for _ in range(ROUNDS):
        total = exact_mean.init(len(model))
        for features, labels in shards:
            trained = (model - RATE * gradient(model, features, labels)).astype(np.float32)
            update = trained - model
            exact_mean.add(total, (update,), len(labels), float(np.abs(update).max()))
        state, model = optimizer.apply(state, exact_mean.mean(total), model)
        central = central - RATE * gradient(central, x, y)
        assert np.abs(model - central).max() < 1e-6
    assert np.abs(central - start).max() > 0.5
    unweighted = np.mean([gradient(start, features, labels) for features, labels in shards], axis=0)
    assert np.abs(unweighted - gradient(start, x, y)).max() > 0.01  # the weights matter here
