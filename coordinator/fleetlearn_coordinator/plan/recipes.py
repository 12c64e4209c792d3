"""Recipes: names for combinations of a local step and a server optimizer. Data, not code: a plan
may override it all.

The values are where to start from, not the papers' tuned ones: those differ for each data set.
``lr`` on the devices has no default here, for the same reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from fleetlearn_protocol.algorithms import FEDMD

from fleetlearn_coordinator.aggregation.privacy.rules import Mechanism
from fleetlearn_coordinator.plan.local_algorithms import Need, Personal

SYNCHRONOUS: Mapping[str, Any] = {"participation": "synchronous", "weighting": "examples"}
ASYNCHRONOUS: Mapping[str, Any] = {"participation": "asynchronous", "weighting": "uniform"}
UNIFORM: Mapping[str, Any] = {"participation": "synchronous", "weighting": "uniform"}
LOCAL: Mapping[str, Any] = {"epochs": 1, "batch_size": 20, "algorithm": "plain"}
FEDAVG: Mapping[str, Any] = {"optimizer": "sgd", "lr": 1.0}
MEAN: Mapping[str, Any] = {"aggregator": "mean"}


def computes(kind: str) -> Mapping[str, Any]:
    """Return the defaults of [local] for a recipe whose devices compute sums."""
    return {"epochs": 1, "batch_size": 0, "algorithm": kind, "evaluate": False}


COMPUTED = {"rounds": 1_000_000}
"""The default of [stop] for a computation. It ends by itself when it is done; a hundred boosting
rounds of depth 5 alone take more than 500 rounds, so that the usual 100 would cut them off."""


class Recipe(NamedTuple):
    """A starting point that a plan names and overrides: the defaults of its sections."""

    source: str
    needs: tuple[Need, ...] = ()
    """What the bundle's step must have, beside what the algorithm needs. Where the step has a term
    that is weighted by mu and that nothing needs, mu is 0."""
    local: Mapping[str, Any] = LOCAL
    server: Mapping[str, Any] = FEDAVG
    """The optimizer, and what belongs to it: where a plan names another optimizer, that one's own
    defaults count."""
    round: Mapping[str, Any] = SYNCHRONOUS
    aggregation: Mapping[str, Any] = MEAN
    personal: Personal | None = None
    """What of the bundle must stay on the devices, beside what the algorithm needs there."""
    distils: bool = False
    """Whether the plan needs [distil]. False: it may have one."""
    mechanism: Mechanism | None = None
    """The mechanism of differential privacy, for which a plan needs [privacy]. None: [privacy] may
    be there."""
    clusters: bool = False
    """Whether a plan needs [clusters]."""
    stop: Mapping[str, Any] = MappingProxyType({})


_MCMAHAN = (
    "McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, "
    "arXiv 1602.05629"
)
_REDDI = "Reddi et al., Adaptive Federated Optimization, arXiv 2003.00295, Algorithm 2"
_SCAFFOLD = (
    "Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, arXiv "
    "1910.06378"
)

_ROBUST = {
    "median": "Yin et al., Byzantine-Robust Distributed Learning, arXiv 1803.01498, definition 1",
    "trimmed-mean": (
        "Yin et al., Byzantine-Robust Distributed Learning, arXiv 1803.01498, definition 2"
    ),
    "krum": (
        "Blanchard et al., Machine Learning with Adversaries, NIPS 2017, arXiv 1703.02757, section "
        "4"
    ),
    "multi-krum": (
        "Blanchard et al., Machine Learning with Adversaries, NIPS 2017, arXiv 1703.02757, section "
        "5"
    ),
    "bulyan": (
        "El Mhamdi et al., The Hidden Vulnerability of Distributed Learning in Byzantium, arXiv "
        "1802.07927"
    ),
    "geometric-median": (
        "Pillutla et al., Robust Aggregation for Federated Learning, arXiv 1912.13445, Algorithm 2"
    ),
    "centred-clipping": (
        "Karimireddy et al., Learning from History for Byzantine Robust Optimization, arXiv "
        "2012.10333"
    ),
}
"""Recipe and aggregator of this name -> its source."""

RECIPES: Mapping[str, Recipe] = {
    "fedsgd": Recipe(f"{_MCMAHAN}, section 2: E = 1, B = all", local={**LOCAL, "batch_size": 0}),
    "fedavg": Recipe(f"{_MCMAHAN}, Algorithm 1"),
    "fedprox": Recipe(
        "Li et al., Federated Optimization in Heterogeneous Networks, arXiv 1812.06127, Algorithm "
        "2",
        ("proximal",),
    ),
    "fedprox-adaptive": Recipe(
        "Li et al., Federated Optimization in Heterogeneous Networks, arXiv 1812.06127, section "
        "5.3.2",
        ("proximal",),
        local={**LOCAL, "adaptive_mu": True},
    ),
    "moon": Recipe(
        "Li, He and Song, Model-Contrastive Federated Learning, arXiv 2103.16257, Algorithm 1",
        ("contrastive",),
    ),
    "scaffold": Recipe(
        f"{_SCAFFOLD}, Algorithm 1, option II",
        local={**LOCAL, "algorithm": "scaffold"},
        round=UNIFORM,
    ),
    "feddyn": Recipe(
        "Acar et al., Federated Learning Based on Dynamic Regularization, arXiv 2111.04263, "
        "Algorithm 1",
        local={**LOCAL, "algorithm": "feddyn"},
        server={"optimizer": "feddyn"},
        round=UNIFORM,
    ),
    "fedavgm": Recipe(
        "Hsu, Qi and Brown, Measuring the Effects of Non-Identical Data Distribution for Federated "
        "Visual Classification, arXiv 1909.06335, section 4.2",
        server={"optimizer": "momentum", "lr": 1.0, "momentum": 0.9},
    ),
    "fedadagrad": Recipe(
        _REDDI, server={"optimizer": "adagrad", "lr": 0.1, "beta1": 0.0, "tau": 1e-3}
    ),
    "fedadam": Recipe(
        _REDDI, server={"optimizer": "adam", "lr": 0.01, "beta1": 0.9, "beta2": 0.99, "tau": 1e-3}
    ),
    "fedyogi": Recipe(
        _REDDI, server={"optimizer": "yogi", "lr": 0.01, "beta1": 0.9, "beta2": 0.99, "tau": 1e-3}
    ),
    "fedbuff": Recipe(
        "Nguyen et al., Federated Learning with Buffered Asynchronous Aggregation, arXiv "
        "2106.06639, Algorithm 1",
        round={**ASYNCHRONOUS, "goal": 10},
    ),
    "fedasync": Recipe(
        "Xie, Koyejo and Gupta, Asynchronous Federated Optimization, arXiv 1903.03934, Algorithm 1",
        server={"optimizer": "sgd", "lr": 0.6, "mix": True},
        round={**ASYNCHRONOUS, "goal": 1},
    ),
    "fednova": Recipe(
        "Wang et al., Tackling the Objective Inconsistency Problem, arXiv 2007.07481, section 5",
        aggregation={**MEAN, "normalise": True},
    ),
    "q-fedavg": Recipe(
        "Li et al., Fair Resource Allocation in Federated Learning, arXiv 1905.10497, Algorithm 2",
        round=UNIFORM,
        aggregation={**MEAN, "q": 1.0},
    ),
    "fedper": Recipe(
        "Arivazhagan et al., Federated Learning with Personalization Layers, arXiv 1912.00818, "
        "Algorithms 1 and 2",
        personal="some",
    ),
    "fedbn": Recipe(
        "Li et al., FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, "
        "arXiv 2102.07623, Algorithm 1",
        personal="normalisation",
    ),
    "fedrep": Recipe(
        "Collins et al., Exploiting Shared Representations for Personalized Federated Learning, "
        "arXiv 2102.07078, Algorithm 1",
        local={**LOCAL, "algorithm": "fedrep", "personal_epochs": 10},
    ),
    "ditto": Recipe(
        "Li et al., Ditto: Fair and Robust Federated Learning Through Personalization, arXiv "
        "2012.04221, Algorithm 1",
        local={**LOCAL, "algorithm": "ditto"},
    ),
    "pfedme": Recipe(
        "T. Dinh, Tran and Nguyen, Personalized Federated Learning with Moreau Envelopes, arXiv "
        "2006.08848, Algorithm 1 (server.lr is its beta)",
        local={**LOCAL, "algorithm": "pfedme"},
        round=UNIFORM,
    ),
    "apfl": Recipe(
        "Deng, Kamani and Mahdavi, Adaptive Personalized Federated Learning, arXiv 2003.13461, "
        "Algorithm 1 and equation 10",
        local={**LOCAL, "algorithm": "apfl"},
        round=UNIFORM,
    ),
    "ifca": Recipe(
        "Ghosh et al., An Efficient Framework for Clustered Federated Learning, arXiv 2006.04088, "
        "Algorithm 1 (averages of models)",
        round=UNIFORM,
        clusters=True,
    ),
    "feddf": Recipe(
        "Lin et al., Ensemble Distillation for Robust Model Fusion in Federated Learning, arXiv "
        "2006.07242, Algorithm 1",
        distils=True,
    ),
    "fedmd": Recipe(
        "Li and Wang, FedMD: Heterogenous Federated Learning via Model Distillation, arXiv "
        "1910.03581, Algorithm 1",
        local={**LOCAL, "algorithm": FEDMD},
        round=UNIFORM,
    ),
    "dp-fedavg": Recipe(
        "McMahan et al., Learning Differentially Private Recurrent Language Models, arXiv "
        "1710.06963, Algorithm 1 (clip norm of the whole update)",
        round=UNIFORM,
        mechanism="gaussian",
    ),
    "dp-ftrl": Recipe(
        "Kairouz et al., Practical and Private (Deep) Learning without Sampling or Shuffling, "
        "arXiv 2103.00039, Algorithm 1, with the noise of Dvijotham et al., Efficient and "
        "Near-Optimal Noise Generation for Streaming Differential Privacy, arXiv 2404.16706",
        round=UNIFORM,
        mechanism="dp-ftrl",
    ),
    "statistics": Recipe(
        "sums over all devices' rows; Cormode and Muthukrishnan, What's Hot and What's Not, 2003",
        local=computes("statistics"),
        round=UNIFORM,
        stop=COMPUTED,
    ),
    "boosted-trees": Recipe(
        "Friedman, Greedy Function Approximation: A Gradient Boosting Machine, 2001; Chen and "
        "Guestrin, XGBoost: A Scalable Tree Boosting System, arXiv 1603.02754",
        local=computes("boosted-trees"),
        round=UNIFORM,
        stop=COMPUTED,
    ),
    "boosted-components": Recipe(
        "Schalk, Bischl and Rügamer, Privacy-Preserving and Lossless Distributed Estimation of "
        "High-Dimensional Generalized Additive Mixed Models, arXiv 2210.07723",
        local=computes("boosted-components"),
        round=UNIFORM,
        stop=COMPUTED,
    ),
    "function": Recipe(
        "sums of what a function of each device's owner returns (docs/algorithms/functions.md)",
        local=computes("function"),
        round=UNIFORM,
        stop=COMPUTED,
    ),
    **{
        name: Recipe(source, round=UNIFORM, aggregation={"aggregator": name})
        for name, source in _ROBUST.items()
    },
}
