"""What devices do beside plain training: what the bundle and the plan must have for it.

The protocol's ``algorithms.py`` says what travels; ``fleetlearn_device/training/algorithms.py`` is the devices' side;
docs/algorithms.md has the equations.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from fleetlearn_protocol.messages import CONTROL

Need = Literal["proximal", "contrastive", "correction"]
"""A switch of the bundle's step."""


class Algorithm(NamedTuple):
    """What an algorithm needs."""

    needs: tuple[Need, ...] = ()
    """What the bundle's step must have."""
    plain_sgd: bool = False
    """Whether the bundle's step must be plain gradient descent: its equations hold for no other."""
    tied: tuple[str, ...] = ()
    """What devices keep from those of their tasks whose updates counted."""
    counts_devices: bool = False
    """Whether the coordinator must know how many devices there are (``server.devices``)."""


_SCAFFOLD = Algorithm(("correction",), True, (CONTROL,), True)

ALGORITHMS: Mapping[str, Algorithm] = {
    "plain": Algorithm(),
    "scaffold": _SCAFFOLD,
    "scaffold-gradient": _SCAFFOLD,
    "feddyn": Algorithm(("proximal", "correction"), tied=("dual",), counts_devices=True),
}
