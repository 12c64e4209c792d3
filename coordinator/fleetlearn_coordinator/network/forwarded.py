"""Which address a connection comes from that a proxy passes on: `Forwarded` (RFC 7239) and `X-Forwarded-For`.

Each proxy adds the address that it was connected from at the right. So only the rightmost address that is no proxy of
ours was added by somebody whom we believe. What stands left of it may be made up.
"""

from __future__ import annotations

import re
from http import HTTPStatus

from websockets.datastructures import Headers

from fleetlearn_coordinator.network.addresses import Address, Networks, read_address
from fleetlearn_coordinator.network.gate import RefusalError

_FOR = re.compile(r'\s*for\s*=\s*("?)(.*)\1\s*', re.IGNORECASE)
_WITH_PORT = re.compile(r"\[([^\]]*)\](?::\w+)?|([^:]*)(?::\w+)?")


def origin_of(headers: Headers, proxy: Address, proxies: Networks) -> Address:
    """Return the address that a request comes from, which reached us through ``proxy``: the last proxy's own where the
    headers have no other.

    Raises RefusalError (400) where the two headers disagree: then a proxy passes one of them on as the client sent it.
    """
    found = {_rightmost(hops, proxy, proxies) for hops in (_forwarded(headers), _x_forwarded_for(headers)) if hops}
    if len(found) > 1:
        raise RefusalError(
            HTTPStatus.BAD_REQUEST,
            "Forwarded and X-Forwarded-For name different addresses: the proxy must remove the one that it does not "
            "set",
        )
    return found.pop() if found else proxy


def _rightmost(hops: list[Address | None], proxy: Address, proxies: Networks) -> Address:
    for hop in reversed(hops):
        if hop is None:  # "unknown", or a name that the proxy made up: this is as far as we can see
            return proxy
        proxy = hop
        if hop not in proxies:
            break
    return proxy


def _x_forwarded_for(headers: Headers) -> list[Address | None]:
    return [_hop(text) for text in ",".join(headers.get_all("X-Forwarded-For")).split(",") if text.strip()]


def _forwarded(headers: Headers) -> list[Address | None]:
    line = ",".join(headers.get_all("Forwarded"))
    hops: list[Address | None] = []
    # No address has a comma. A quote that a client left open must not swallow what the proxy added, so quotes are not
    # looked at here.
    for element in line.split(",") if line.strip() else ():
        named = [found[2] for pair in element.split(";") if (found := _FOR.fullmatch(pair))]
        hops.append(_hop(named[0]) if len(named) == 1 else None)
    return hops


def _hop(text: str) -> Address | None:
    """Return the address of ``192.0.2.7``, ``192.0.2.7:4711``, ``2001:db8::1``, ``[2001:db8::1]:4711``."""
    text = text.strip()
    address = read_address(text)
    if address is None and (found := _WITH_PORT.fullmatch(text)):
        address = read_address(found[1] or found[2])
    return address
