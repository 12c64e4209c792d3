"""What devices do beside plain training: what the bundle and the plan must have for it.

The protocol's ``algorithms.py`` says what travels; ``fleetlearn_device/training/algorithms.py`` is
the devices' side; docs/algorithms/recipes.md has the equations.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

from fleetlearn_protocol.algorithms import FEDMD, OWN
from fleetlearn_protocol.computations.settings import KIND_NAMES
from fleetlearn_protocol.messages import CONTROL

LARGEST = sys.float_info.max
Need = Literal["proximal", "contrastive", "correction"]
"""A switch of the bundle's step."""
Personal = Literal["some", "normalisation", "in turns", "nothing"]
"""What of a bundle must stay on the devices: some parameters; those of all normalisation layers,
and no others; some, with a step that can train them in turns with the others; nothing, since each
device has its own whole model."""


class Own(NamedTuple):
    """A hyper-parameter of an algorithm itself, beside those of the bundle's step."""

    expected: str
    """What values it may have, for people."""
    least: float
    most: float
    whole: bool = False
    default: float | None = None
    """None: the plan must give it."""

    def takes(self, value: float) -> bool:
        return self.least <= value <= self.most and not (self.whole and value % 1)


class LocalAlgorithm(NamedTuple):
    """What an algorithm needs."""

    needs: tuple[Need, ...] = ()
    """What the bundle's step must have."""
    plain_sgd: bool = False
    """Whether the bundle's step must be plain gradient descent: its equations hold for no other."""
    tied: tuple[str, ...] = ()
    """What devices keep from tasks whose updates counted."""
    counts_devices: bool = False
    """Whether the coordinator must know how many devices there are (``server.devices``)."""
    whole_updates: bool = False
    """Whether what devices keep is made of their updates, so that each must count whole, and the
    same as all others."""
    personal: Personal | None = None
    """What of the bundle must stay on the devices. None: anything may, or nothing."""
    personal_passes: bool = False
    """Whether what is the device's own is trained in passes by itself
    (``local.personal_epochs``)."""
    personal_model: bool = False
    """Whether each device has a personal model, which it measures beside the round's."""
    computes: bool = False
    """Whether devices compute sums in place of training: the bundle has a computation of this
    kind."""
    scores: bool = False
    """Whether devices train models of their own, and tell class scores of public examples: the
    bundle has these in place of graphs."""
    steps: int | str = 1
    """Steps that a device does with each batch, or the hyper-parameter that says how many."""
    sums_gradients: bool = True
    """Whether an update is the sum of the step's gradients, as ``aggregation.normalise`` and
    ``aggregation.q`` take it."""
    pulls: bool = True
    """Whether mu is in the training of what travels. False: only in that of what is the
    device's."""
    own: bool = False
    """Whether a function of each device's owner trains, of which nothing else is known."""
    hyper: Mapping[str, Own] = {}
    """Its own hyper-parameters, by the protocol's names: keys of [local.hyper]."""
    misfit: Callable[[Mapping[str, float]], str | None] = lambda hyper: None
    """All hyper-parameters -> what of them does not go together, for people; None: nothing."""

    @property
    def has_model(self) -> bool:
        """Whether the run's vector is a model, which can be measured and written."""
        return not (self.computes or self.scores)


def _too_far(hyper: Mapping[str, float]) -> str | None:
    rate, mu = hyper["outer_lr"], hyper["mu"]
    if rate * mu <= 1:
        return None
    return (
        f"local.hyper.outer_lr = {rate:g} and local.mu = {mu:g}: the local model would go beyond "
        f"the personal one. Their product must be at most 1, so outer_lr at most {1 / mu:g}"
    )


_SCAFFOLD = LocalAlgorithm(("correction",), True, (CONTROL,), True)

ALGORITHMS: Mapping[str, LocalAlgorithm] = {
    "plain": LocalAlgorithm(),
    "scaffold": _SCAFFOLD,
    "scaffold-gradient": _SCAFFOLD,
    "feddyn": LocalAlgorithm(
        ("proximal", "correction"), tied=("dual",), counts_devices=True, whole_updates=True
    ),
    "fedrep": LocalAlgorithm(personal="in turns", personal_passes=True),
    "ditto": LocalAlgorithm(
        ("proximal",),
        personal="nothing",
        personal_passes=True,
        personal_model=True,
        pulls=False,
    ),
    "pfedme": LocalAlgorithm(
        ("proximal",),
        personal="nothing",
        personal_model=True,
        steps="inner_steps",
        sums_gradients=False,
        hyper={
            "inner_steps": Own("a whole number from 1 to 10000", 1, 10_000, True, 5.0),
            "outer_lr": Own("a number from 1e-6 to 1e6", 1e-6, 1e6),
        },
        misfit=_too_far,
    ),
    "apfl": LocalAlgorithm(
        plain_sgd=True,
        personal="nothing",
        personal_model=True,
        steps=2,
        hyper={
            "alpha": Own("a number from 0 to 1", 0, 1, default=0.5),
            "adapt_alpha": Own("a number from 0 to 1000", 0, 1000, default=0.0),
        },
    ),
    FEDMD: LocalAlgorithm(
        scores=True,
        sums_gradients=False,
        hyper={
            "lr": Own("a number from 1e-6 to 1e6", 1e-6, 1e6),
            "digest_lr": Own("a number from 1e-6 to 1e6", 1e-6, 1e6, default=0.001),
            "digest_epochs": Own("a whole number from 1 to 1000", 1, 1000, True, 5.0),
            "temperature": Own("a number from 0.01 to 100", 0.01, 100, default=1.0),
        },
    ),
    OWN: LocalAlgorithm(sums_gradients=False, own=True),
    **dict.fromkeys(KIND_NAMES, LocalAlgorithm(computes=True)),
}


def with_parameters(parameters: Mapping[str, float]) -> LocalAlgorithm:
    """Return what an own algorithm needs, whose function takes these parameters."""
    kinds = {
        name: Own("a finite number", -LARGEST, LARGEST, default=value)
        for name, value in parameters.items()
    }
    return ALGORITHMS[OWN]._replace(hyper=kinds)


def untied() -> str:
    """Return the algorithms whose devices keep no tied vectors, for people."""
    names = [
        f'"{name}"'
        for name, algorithm in ALGORITHMS.items()
        if not (algorithm.tied or algorithm.own)
    ]
    return f"{', '.join(names[:-1])} or {names[-1]}"
