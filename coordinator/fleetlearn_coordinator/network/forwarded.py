"""Which address a connection comes from that a proxy passes on: `Forwarded` (RFC 7239) and
`X-Forwarded-For`.

Each proxy adds the address that it was connected from at the right. So only the rightmost address
that is no proxy of ours was added by somebody whom we believe. What stands left of it may be made
up.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from http import HTTPStatus

from websockets.datastructures import Headers

from fleetlearn_coordinator.network.addresses import Address, Networks, read_address
from fleetlearn_coordinator.network.gate import RefusalError

_FOR = re.compile(r'\s*for\s*=\s*("?)(.*)\1\s*', re.IGNORECASE)
_WITH_PORT = re.compile(r"\[([^\]]*)\](?::\w+)?|([^:]*)(?::\w+)?")


def origin_of(headers: Headers, proxy: Address, proxies: Networks) -> Address:
    """Return the address that a request comes from, which reached us through ``proxy``: the last
    proxy's own where the headers have no other.

    Raises RefusalError (400) where the two headers disagree: then a proxy passes one of them on as
    the client sent it.
    """
    both = (
        (_elements(headers, "Forwarded"), _forwarded_hop),
        (_elements(headers, "X-Forwarded-For"), _hop),
    )
    found = {_rightmost(map(read, reversed(hops)), proxy, proxies) for hops, read in both if hops}
    if len(found) > 1:
        raise RefusalError(
            HTTPStatus.BAD_REQUEST,
            "Forwarded and X-Forwarded-For name different addresses: the proxy must remove the one "
            "that it does not set",
        )
    return found.pop() if found else proxy


def _elements(headers: Headers, name: str) -> list[str]:
    """Return what stands between the commas, which no address has. A quote that a client left open
    must not swallow what the proxy added, so quotes are not looked at."""
    return [element for element in ",".join(headers.get_all(name)).split(",") if element.strip()]


def _rightmost(hops: Iterable[Address | None], proxy: Address, proxies: Networks) -> Address:
    """Return the first of the hops, from the right, that is no proxy. The ones beyond it are not
    even read: a client makes up thousands of them, and reading those takes a second."""
    for hop in hops:
        if hop is None:  # "unknown", or a name that the proxy made up: this is as far as we can see
            return proxy
        proxy = hop
        if hop not in proxies:
            break
    return proxy


def _forwarded_hop(element: str) -> Address | None:
    named = [found[2] for pair in element.split(";") if (found := _FOR.fullmatch(pair))]
    return _hop(named[0]) if len(named) == 1 else None


def _hop(text: str) -> Address | None:
    """Return the address of ``192.0.2.7``, ``192.0.2.7:4711``, ``2001:db8::1``,
    ``[2001:db8::1]:4711``."""
    text = text.strip()
    address = read_address(text)
    if address is None and (found := _WITH_PORT.fullmatch(text)):
        address = read_address(found[1] or found[2])
    return address
