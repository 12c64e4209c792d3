"""From where a device fetches contents by HTTP, which a coordinator names. The owner allows hosts.

A coordinator could otherwise have the device ask any server within the device's network. So the
host must be the coordinator's own or one that the owner lists, and the path must end with the
content's SHA-256. This machine is never a host that is allowed unless the owner lists it: a
coordinator's address may lead there through a tunnel.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from ipaddress import IPv6Address, ip_address
from typing import NamedTuple
from urllib.parse import urlsplit

from fleetlearn_protocol.addresses import is_loopback

_HOST = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?|[0-9a-f:.]+")
_NUMBERS = re.compile(r"(0x[0-9a-f]*|[0-9]+)(\.(0x[0-9a-f]*|[0-9]+))*")


class HttpSources(NamedTuple):
    """What the owner allows."""

    hosts: frozenset[str] = frozenset()
    """Names and addresses in lower case. Empty: all is fetched by the WebSocket."""
    insecure: bool = False
    """Whether another machine's URL may be without TLS."""

    def why_not(self, url: str, sha256: str) -> str | None:
        """Return why the device does not fetch a content there, for people; None: it does."""
        try:
            parts = urlsplit(url)
            host, port = (parts.hostname or "").lower(), parts.port
        except ValueError:
            return "the URL cannot be read"
        if parts.username is not None or parts.password is not None or port == 0:
            return "the URL has a user name, a password or no port"
        if host not in self.hosts:
            return (
                f"its owner does not allow {host[:100]}: download_from names the hosts beside the "
                "coordinator's own"
            )
        if parts.scheme == "http" and not (self.insecure or is_loopback(host)):
            return f"{host[:100]} is another machine, and the URL has no TLS"
        if parts.path.rpartition("/")[2] != sha256:
            return "the URL's path does not end with the content's SHA-256"
        return None


NO_SOURCES = HttpSources()


def http_sources(
    coordinator: str, download_from: Iterable[str] = (), *, insecure: bool = False
) -> HttpSources:
    """Return what an owner allows. ``coordinator``: its address, as a URL. ``download_from``: other
    hosts. Raises ValueError."""
    hosts = {host.lower().strip("[]") for host in download_from}
    for host in sorted(hosts):
        if not _HOST.fullmatch(host):
            raise ValueError(
                f"download_from names {host[:100]!r}; expected a host's name or address without "
                'scheme, port and path, such as "cdn.example.org"'
            )
    own = (urlsplit(coordinator).hostname or "").lower()
    if own and not _is_here(own):
        hosts.add(own)
    return HttpSources(frozenset(hosts), insecure)


def _is_here(host: str) -> bool:
    """Return whether a host is this machine, however that is written: also ``localhost.``, 0.0.0.0,
    which connects to this machine too, and both within IPv6. Numbers that are no address as it is
    usually written, such as 127.1, may be."""
    with suppress(ValueError):
        address = ip_address(host)
        within = address.ipv4_mapped if isinstance(address, IPv6Address) else None
        address = within or address
        return address.is_loopback or address.is_unspecified
    return is_loopback(host.rstrip(".")) or _NUMBERS.fullmatch(host) is not None
