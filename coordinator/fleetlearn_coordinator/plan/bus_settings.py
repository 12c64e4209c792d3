"""The key ``bus`` and the section [nats] of a service file: docs/operate/nats.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from fleetlearn_coordinator.plan.toml_errors import Section

BUS = r"(nats|tls)://([a-zA-Z0-9_.-]+|\[[0-9a-fA-F:.]+\])(:[0-9]{1,5})?"
"""The address of a NATS server: without a name or a password."""


class NatsSettings(Section, frozen=True, kw_only=True):
    """[nats]: as whom a process speaks on the bus. What is secret is in files."""

    user: Annotated[str, Meta(min_length=1, max_length=255)] | None = None
    """Who connects, with ``password_file``."""
    password_file: Path | None = None
    """A file whose text is the password."""
    token_file: Path | None = None
    """A file whose text is the token, for a server that knows one token alone."""
    credentials: Path | None = None
    """A file as ``nsc generate creds`` writes it: a user's JWT and seed."""
    ca: Path | None = None
    """PEM: the CA of the server, for addresses with tls://. Default: those that the system
    trusts."""
    certificate: Path | None = None
    """PEM: this process's own certificate, where the server asks for one. With ``key``."""
    key: Path | None = None
    """PEM: its private key, without a password."""
    prefix: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}(\.[A-Za-z0-9_-]{1,64}){0,7}\Z")] = (
        "fleetlearn"
    )
    """What all subjects begin with."""


def check_bus(
    bus: str | None, nats: NatsSettings | None, blobs: str | None, *, is_gateway: bool
) -> None:
    """Raise ValueError where these keys cannot be used together. ``is_gateway``: the file has
    [gateway]."""
    if bus is None:
        if is_gateway:
            raise ValueError(
                "[gateway] is for a gateway on another machine, which reaches the run over the "
                'bus: add bus = "nats://..."'
            )
        if nats is not None:
            raise ValueError('[nats] is about the bus, which is missing: add bus = "nats://..."')
        return
    addresses = bus.split(",")
    if not all(re.fullmatch(BUS, each) for each in addresses):
        raise ValueError(  # the address is not shown: it may have a password
            "bus takes the address of a NATS server, such as nats://nats.example.org:4222, or "
            "tls://nats.example.org:4222 with TLS, or several with commas between them. Names and "
            "passwords do not go into it: [nats] names the files that have them"
        )
    if blobs is None and not is_gateway:
        raise ValueError(
            "bus needs blobs: gateways on other machines put updates into an object store, and "
            'fetch models from there. Add blobs = "s3://bucket/folder"'
        )
    if nats is not None:
        _check_nats(nats, is_tls=all(each.startswith("tls://") for each in addresses))


def _check_nats(nats: NatsSettings, *, is_tls: bool) -> None:
    if (nats.user is None) != (nats.password_file is None):
        raise ValueError("nats.user and nats.password_file go together: one is missing")
    if (nats.certificate is None) != (nats.key is None):
        raise ValueError("nats.certificate and nats.key go together: one is missing")
    ways = [nats.user, nats.token_file, nats.credentials]
    if sum(each is not None for each in ways) > 1:
        raise ValueError(
            "nats has more than one of user, token_file and credentials: leave all but one out"
        )
    if not is_tls and (nats.ca or nats.certificate) is not None:
        raise ValueError(
            "nats.ca and nats.certificate are for TLS, and bus begins with nats://: write tls://"
        )
