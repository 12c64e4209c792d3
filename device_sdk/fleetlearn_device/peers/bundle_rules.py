"""Which bundles peers can train: a rule for each kind that they cannot, with its reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from fleetlearn_protocol.errors import BundleError, Code
from fleetlearn_protocol.manifest import Manifest
from msgspec import UNSET


class PeerBundleRule(NamedTuple):
    """A kind of bundle that peers do not train."""

    name: str
    applies: Callable[[Manifest], bool]
    reason: str
    """For people: why not, and what to do."""


RULES = (
    PeerBundleRule(
        "computation",
        lambda manifest: manifest.computation is not UNSET,
        "it has a computation in place of a model: devices send sums, which a coordinator adds up "
        "and goes on from. Give it to `fleetlearn-device run` and a coordinator",
    ),
    PeerBundleRule(
        "public",
        lambda manifest: manifest.public is not UNSET,
        "it has public examples in place of a model: devices tell class scores, whose mean a "
        'coordinator sends to all. Give it to a coordinator, with recipe = "fedmd"',
    ),
    PeerBundleRule(
        "split",
        lambda manifest: manifest.split is not UNSET,
        "it is one part of a split model, which a device trains together with a coordinator that "
        "has the other part. Peers need the whole model: export it without split=",
    ),
)


def check_peer_bundle(path: str, manifest: Manifest) -> None:
    """Raise BundleError (bad-message) where peers cannot train such a bundle."""
    for rule in RULES:
        if rule.applies(manifest):
            raise BundleError(Code.BAD_MESSAGE, f"{path} is not for peers: {rule.reason}")
