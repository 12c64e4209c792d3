"""The fuzz targets by name: a function from bytes to None, and the inputs to begin from. All
drivers run these.

A target raises where something is wrong: an error that its part does not promise, or a state that
must not be. Whatever it makes of one input does not change what it makes of the next.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tests.fuzz import seeds
from tests.fuzz.targets import decoders
from tests.fuzz.targets.administration import administration
from tests.fuzz.targets.conversations import conversations
from tests.fuzz.targets.page import page
from tests.fuzz.targets.peers import peers
from tests.fuzz.targets.sessions import sessions
from tests.fuzz.targets.sockets import sockets
from tests.fuzz.targets.streams import streams
from tests.fuzz.targets.vertical import vertical


class Target(NamedTuple):
    """What is fuzzed."""

    run: Callable[[bytes], None]
    seeds: Callable[[], list[bytes]]
    cost: float = 1.0
    """CPU of an input, about: 1 is 0.1 ms. Drivers give cheap targets more inputs."""


TARGETS: dict[str, Target] = {
    "conversations": Target(conversations, seeds.conversations, 10),
    "sessions": Target(sessions, seeds.sessions, 2),
    "streams": Target(streams, seeds.streams, 7),
    "sockets": Target(sockets, seeds.sockets, 35),
    "messages": Target(decoders.messages, seeds.messages),
    "chunks": Target(decoders.chunks, seeds.chunks),
    "peers": Target(peers, seeds.peers, 2),
    "vertical": Target(vertical, seeds.vertical),
    "encodings": Target(decoders.encodings, seeds.encodings),
    "uploads": Target(decoders.uploads, seeds.uploads),
    "deltas": Target(decoders.deltas, seeds.deltas),
    "manifests": Target(decoders.manifests, seeds.manifests),
    "bundles": Target(decoders.bundles, seeds.bundles, 2),
    "reports": Target(decoders.reports, seeds.reports),
    "state_directories": Target(decoders.state_directories, seeds.state_directories, 10),
    "plans": Target(decoders.plans, seeds.plans, 10),
    "services": Target(decoders.services, seeds.services, 2),
    "headers": Target(decoders.headers, seeds.headers),
    "administration": Target(administration, seeds.administration, 4),
    "page": Target(page, seeds.page, 7),
}
