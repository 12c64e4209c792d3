"""Finding neighbours on the local network: each peer says by multicast, every few seconds, under
which port it listens.

An announcement is a hint about an address and nothing more: whoever answers there must show the
certificate that the address book has for this name. A forged one costs a connection that TLS
refuses. Announcements are of the names in the book alone, and no device but the peers' own network
sees them (time to live 1).
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Collection
from ipaddress import IPv4Address

import msgspec
from fleetlearn_protocol.messages import Identifier

GROUP, PORT = "239.255.83.76", 8767
"""A multicast address of the local scope (RFC 2365), and a UDP port."""
EVERY = 5.0
"""Seconds between two announcements."""
LARGEST = 512
"""Bytes of an announcement that are read."""

Place = tuple[str, int]


class PeerAnnouncement(msgspec.Struct, frozen=True, tag="peer-here"):
    """A peer says where it is: at the address that this comes from."""

    peer: Identifier
    port: int
    topology: str
    """The digest that peers compare. Announcements of others are not for this peer."""


class Discovery(asyncio.DatagramProtocol):
    """Announces a peer, and notes where others are.

    names: the neighbours. found: called with a neighbour's name when it is at another place.
    """

    def __init__(
        self, own: PeerAnnouncement, names: Collection[str], found: Callable[[str], None]
    ) -> None:
        self.places: dict[str, Place] = {}
        self._own, self._names, self._found = own, names, found

    def datagram_received(self, data: bytes, address: tuple[str, int]) -> None:
        """An announcement came, or anything else."""
        try:
            said = msgspec.json.decode(data[:LARGEST], type=PeerAnnouncement)
        except (msgspec.DecodeError, UnicodeError):
            return
        place = address[0], said.port
        wanted = said.peer in self._names and said.topology == self._own.topology
        if wanted and 0 < said.port < 65536 and self.places.get(said.peer) != place:
            self.places[said.peer] = place
            self._found(said.peer)

    def error_received(self, error: Exception) -> None:
        """The network is not there now; the next announcement may get through."""

    async def run(self, interface: str) -> None:
        """Announce and listen on the network of this IPv4 address of the device, until cancelled.
        Raises OSError."""
        sock = multicast_socket(interface)
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_datagram_endpoint(lambda: self, sock=sock)
        try:
            while True:
                transport.sendto(msgspec.json.encode(self._own), (GROUP, PORT))
                await asyncio.sleep(EVERY)
        finally:
            transport.close()


def checked_interface(text: str | None) -> str | None:
    """Return the text, if it is an IPv4 address or None. Raises ValueError."""
    if text is not None:
        try:
            IPv4Address(text)
        except ValueError:
            raise ValueError(
                f"discover is {text!r}; expected the IPv4 address of one of this device's "
                "interfaces, such as 192.168.1.11 (`ip -brief address` shows it)"
            ) from None
    return text


def multicast_socket(interface: str) -> socket.socket:
    """Return a socket that sends to the group and receives from it, on one interface. Raises
    OSError."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "SO_REUSEPORT"):  # several peers on one machine
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        address = socket.inet_aton(interface)
        sock.bind(("", PORT))
        membership = struct.pack("4s4s", socket.inet_aton(GROUP), address)
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, membership)
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, address)
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 1)
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_LOOP, 1)
    except BaseException:
        sock.close()
        raise
    return sock
