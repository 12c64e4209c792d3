"""What devices do beside plain training: what the bundle and the plan must have for it.

The protocol's ``algorithms.py`` says what travels; ``fleetlearn_device/training/algorithms.py`` is
the devices' side; docs/algorithms/recipes.md has the equations.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from fleetlearn_protocol.messages import CONTROL

Need = Literal["proximal", "contrastive", "correction"]
"""A switch of the bundle's step."""
Personal = Literal["some", "normalisation", "in turns", "nothing"]
"""What of a bundle must stay on the devices: some parameters; those of all normalisation layers,
and no others; some, with a step that can train them in turns with the others; nothing, since each
device has its own whole model."""


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
        ("proximal",), personal="nothing", personal_passes=True, personal_model=True
    ),
}
