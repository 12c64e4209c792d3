"""Which proxy a connection goes through.

The variables are those that websockets and Python's urllib read; on macOS and Windows the system's
settings count, too. Two rules are our own. This machine is always connected to directly: no proxy
can lead to it. And so is every address without TLS: a proxy would read the device's credential,
which goes with the first request.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from ipaddress import ip_address
from typing import NamedTuple
from urllib.request import getproxies, proxy_bypass

from fleetlearn_protocol.addresses import is_loopback
from websockets.exceptions import InvalidProxy
from websockets.proxy import parse_proxy
from websockets.uri import WebSocketURI

from fleetlearn_device.driver.addresses import UnreachableError, find_places

SETTINGS = ("wss", "socks", "https")
"""The settings that name the proxy of a ``wss://`` address, the first that is there: the variables
WSS_PROXY, SOCKS_PROXY and HTTPS_PROXY, in capitals or not."""
LOOKUP = 1.0
"""Seconds to find out whether a name is of this machine. Behind a proxy there may be no DNS that
answers."""


class Proxy(NamedTuple):
    """A proxy that can be used."""

    url: str
    """Its address, which may have a password: not for people's eyes."""
    shown: str
    """The address without name and password."""
    setting: str
    """What names it, such as HTTPS_PROXY."""
    has_name: bool
    """Its host is a name, which may have several addresses."""

    def __str__(self) -> str:
        return f"the proxy {self.shown} of {self.setting}"


async def find_proxy(uri: WebSocketURI) -> Proxy | None:
    """Return the proxy for an address; None: it is connected to directly.

    Raises UnreachableError on a proxy that cannot be used.
    """
    if not uri.secure or is_loopback(uri.host):
        return None
    configured = configured_proxy(uri)
    if configured is None or await _is_this_machine(uri, configured):
        return None
    setting, url = configured
    instead = f"or set NO_PROXY={uri.host} to connect without it"
    if "://" not in url:
        url = f"http://{url}"  # as curl takes it
    try:
        parsed = parse_proxy(url)
    except InvalidProxy as error:
        raise UnreachableError(
            f"{setting} names a proxy that cannot be used: {error.msg}. Expected http://HOST:PORT, "
            f"https://HOST:PORT or socks5h://HOST:PORT; {instead}"
        ) from None
    except ValueError:  # its text may have a part of the password
        raise UnreachableError(
            f"{setting} names a proxy with no port that can be used. Expected http://HOST:PORT; "
            f"{instead}"
        ) from None
    host = f"[{parsed.host}]" if ":" in parsed.host else parsed.host
    proxy = Proxy(
        url, f"{parsed.scheme}://{host}:{parsed.port}", setting, not _is_ip_address(parsed.host)
    )
    if parsed.scheme.startswith("socks") and find_spec("python_socks") is None:
        raise UnreachableError(
            f'{proxy} speaks SOCKS, which needs: pip install "python-socks[asyncio]"; {instead}. '
            "An HTTP proxy needs no package"
        )
    return proxy


def configured_proxy(uri: WebSocketURI) -> tuple[str, str] | None:
    """Return what names a proxy for this address, and the proxy's address as it is there. None:
    nothing does."""
    # With the port, since NO_PROXY may name one.
    if proxy_bypass(f"{uri.host}:{uri.port}"):
        return None
    proxies = getproxies()
    for scheme in SETTINGS if uri.secure else ("ws", "socks", "https", "http"):
        if url := proxies.get(scheme):
            if scheme == "socks" and url.startswith("http://"):
                url = f"socks5h{url[4:]}"  # so do macOS's settings name it
            variable = f"{scheme}_proxy"
            named = sorted(
                name
                for name in os.environ
                if name.lower() == variable and os.environ[name] == proxies[scheme]
            )
            return (named[0] if named else f"the system's settings ({scheme})"), url
    return None


def _is_ip_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


async def _is_this_machine(uri: WebSocketURI, configured: tuple[str, str]) -> bool:
    """Return whether a name is of this machine alone, such as a Raspberry Pi's own name on the Pi.
    It is not looked up where the proxy is one that looks names up itself: then DNS here is not
    asked, as the setting says."""
    if configured[1].startswith(("socks5h://", "socks4a://")):
        return False
    try:
        return all(place.is_loopback for place in await find_places(uri.host, uri.port, LOOKUP))
    except UnreachableError:
        return False
