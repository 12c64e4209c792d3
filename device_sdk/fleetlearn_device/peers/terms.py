"""What two peers must have alike before they train together, and what to say where they do not."""

from __future__ import annotations

from typing import NamedTuple

from fleetlearn_protocol.peer_messages import (
    PEER_PROTOCOL_VERSION,
    PeerHello,
    PeerRefusal,
)


class PeerTerms(NamedTuple):
    """What this peer trains, and how."""

    bundle: str
    """SHA-256 of the bundle's manifest."""
    topology: str
    settings: dict[str, str]

    def hello(self, name: str, votes: dict[str, int | bool]) -> PeerHello:
        """Return this peer's hello. ``votes``: as ``PeerMachine.votes_for`` says."""
        terms = self._asdict()
        return PeerHello(version=PEER_PROTOCOL_VERSION, peer=name, **terms, **votes)  # type: ignore[arg-type]

    def refusal(self, hello: PeerHello, neighbour: str) -> PeerRefusal | None:
        """Return why this peer does not train with the sender of a hello; None: it does.

        ``neighbour``: whose certificate the sender has.
        """
        if hello.version != PEER_PROTOCOL_VERSION:
            return PeerRefusal(
                "version",
                f"{neighbour} speaks version {hello.version} of the peers' protocol, and this peer "
                f"{PEER_PROTOCOL_VERSION}: install one version of fleetlearn on both",
            )
        if hello.peer != neighbour:
            return PeerRefusal(
                "name",
                f"the certificate is of {neighbour}, and the hello says {hello.peer}: use the "
                "state directory whose card is in the address book",
            )
        if hello.bundle != self.bundle:
            return PeerRefusal(
                "bundle",
                f"{neighbour} trains the bundle {hello.bundle[:12]}, and this peer "
                f"{self.bundle[:12]}: give all peers one bundle",
            )
        if hello.topology != self.topology:
            return PeerRefusal(
                "topology",
                f"{neighbour} has other peers, another order of them or other weights between them "
                "in its address book: give all peers one address book",
            )
        names = [*self.settings, *(name for name in hello.settings if name not in self.settings)]
        for name in names:
            theirs, own = hello.settings.get(name), self.settings.get(name)
            if theirs != own:
                return PeerRefusal(
                    "settings",
                    f"{neighbour} has {name} = {theirs or 'the default'}, and this peer "
                    f"{own or 'the default'}: give all peers one address book",
                )
        return None
