"""Why a party that says `join` does not belong to a run."""

from __future__ import annotations

from fleetlearn_protocol.vertical.messages import VERTICAL_VERSION, PartyJoin


def misfit_of_join(message: PartyJoin, name: str, bundle: object | None) -> str:
    """Return why a party cannot take part, or an empty text.

    name: what its token says. bundle: SHA-256 of its bottom's manifest; None: no party has that
    name.
    """
    if bundle is None or message.party != name:
        return f"this run has nobody called {message.party} with that token"
    if message.version != VERTICAL_VERSION:
        return (
            f"version {message.version} of this conversation is unknown; the coordinator has "
            f"{VERTICAL_VERSION}"
        )
    if message.bundle != bundle:
        return (
            f"the bundle {message.bundle} is not that with which the top was exported: {bundle}. "
            "All parts of a model are of one export"
        )
    return ""
