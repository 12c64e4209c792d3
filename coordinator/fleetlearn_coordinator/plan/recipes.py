"""Recipes: names for combinations of a local step and a server optimizer. Data, not code: a plan may override it all.

The values are where to start from, not the papers' tuned ones: those differ for each data set. ``lr`` on the devices
has no default here, for the same reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

Switch = Literal["proximal", "correction", "contrastive"]
"""A switch of the bundle's step (``manifest.LocalStep``) that a recipe may need."""
MU_TERMS: tuple[Switch, ...] = ("proximal", "contrastive")
"""Those whose weight is mu."""
SYNCHRONOUS: Mapping[str, Any] = {"participation": "synchronous", "weighting": "examples"}
ASYNCHRONOUS: Mapping[str, Any] = {"participation": "asynchronous", "weighting": "uniform"}


class Recipe(NamedTuple):
    """A starting point that a plan names and overrides."""

    epochs: int
    """Passes over the device's data in a round."""
    batch_size: int
    """Examples per local step; 0: all of the device's in one."""
    needs: tuple[Switch, ...]
    """The switches that the bundle's step must have. Without one whose weight is mu (``MU_TERMS``), mu is 0."""
    optimizer: str
    """The server optimizer."""
    hyper: Mapping[str, float]
    """Its hyper-parameters, where they are not its defaults."""
    source: str
    round: Mapping[str, Any] = SYNCHRONOUS
    """Defaults of [round]."""
    server: Mapping[str, Any] = MappingProxyType({})
    """Further defaults of [server]."""
    aggregation: Mapping[str, Any] = MappingProxyType({})
    """Defaults of [aggregation]."""
    local: Mapping[str, Any] = MappingProxyType({})
    """Further defaults of [local]."""


_MCMAHAN = "McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, arXiv 1602.05629"
_REDDI = "Reddi et al., Adaptive Federated Optimization, arXiv 2003.00295, Algorithm 2"

_ROBUST = {
    "median": "Yin et al., Byzantine-Robust Distributed Learning, arXiv 1803.01498, definition 1",
    "trimmed-mean": "Yin et al., Byzantine-Robust Distributed Learning, arXiv 1803.01498, definition 2",
    "krum": "Blanchard et al., Machine Learning with Adversaries, NIPS 2017, arXiv 1703.02757, section 4",
    "multi-krum": "Blanchard et al., Machine Learning with Adversaries, NIPS 2017, arXiv 1703.02757, section 5",
    "bulyan": "El Mhamdi et al., The Hidden Vulnerability of Distributed Learning in Byzantium, arXiv 1802.07927",
    "geometric-median": "Pillutla et al., Robust Aggregation for Federated Learning, arXiv 1912.13445, Algorithm 2",
    "centred-clipping": "Karimireddy et al., Learning from History for Byzantine Robust Optimization, arXiv 2012.10333",
}
"""Recipe and aggregator of this name -> its source."""

RECIPES: Mapping[str, Recipe] = {
    "fedsgd": Recipe(1, 0, (), "sgd", {"lr": 1.0}, f"{_MCMAHAN}, section 2: E = 1, B = all"),
    "fedavg": Recipe(1, 20, (), "sgd", {"lr": 1.0}, f"{_MCMAHAN}, Algorithm 1"),
    "fedprox": Recipe(
        1,
        20,
        ("proximal",),
        "sgd",
        {"lr": 1.0},
        "Li et al., Federated Optimization in Heterogeneous Networks, arXiv 1812.06127, Algorithm 2",
    ),
    "moon": Recipe(
        1,
        20,
        ("contrastive",),
        "sgd",
        {"lr": 1.0},
        "Li, He and Song, Model-Contrastive Federated Learning, arXiv 2103.16257, Algorithm 1",
    ),
    "fedavgm": Recipe(
        1,
        20,
        (),
        "momentum",
        {"lr": 1.0, "momentum": 0.9},
        "Hsu, Qi and Brown, Measuring the Effects of Non-Identical Data Distribution for Federated Visual "
        "Classification, arXiv 1909.06335, section 4.2",
    ),
    "fedadagrad": Recipe(1, 20, (), "adagrad", {"lr": 0.1, "beta1": 0.0, "tau": 1e-3}, _REDDI),
    "fedadam": Recipe(1, 20, (), "adam", {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "tau": 1e-3}, _REDDI),
    "fedyogi": Recipe(1, 20, (), "yogi", {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "tau": 1e-3}, _REDDI),
    "fedbuff": Recipe(
        1,
        20,
        (),
        "sgd",
        {"lr": 1.0},
        "Nguyen et al., Federated Learning with Buffered Asynchronous Aggregation, arXiv 2106.06639, Algorithm 1",
        {**ASYNCHRONOUS, "goal": 10},
    ),
    "fedasync": Recipe(
        1,
        20,
        (),
        "sgd",
        {"lr": 0.6},
        "Xie, Koyejo and Gupta, Asynchronous Federated Optimization, arXiv 1903.03934, Algorithm 1",
        {**ASYNCHRONOUS, "goal": 1},
        {"mix": True},
    ),
    "fednova": Recipe(
        1,
        20,
        (),
        "sgd",
        {"lr": 1.0},
        "Wang et al., Tackling the Objective Inconsistency Problem, arXiv 2007.07481, section 5",
        aggregation={"normalise": True},
    ),
    "q-fedavg": Recipe(
        1,
        20,
        (),
        "sgd",
        {"lr": 1.0},
        "Li et al., Fair Resource Allocation in Federated Learning, arXiv 1905.10497, Algorithm 2",
        {**SYNCHRONOUS, "weighting": "uniform"},
        aggregation={"q": 1.0},
    ),
    **{
        name: Recipe(1, 20, (), "sgd", {"lr": 1.0}, source, aggregation={"aggregator": name})
        for name, source in _ROBUST.items()
    },
}
