"""What each address costs the coordinator: its connections, and its budgets of check-ins, messages
and bytes.

An IPv4 address counts as it is. An IPv6 address counts with all others of its /64 network, which
one machine usually has for itself. The book remembers what an address has spent for a while after
its last connection, and is bounded.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from fleetlearn_coordinator.conversation.limits import (
    ADDRESS_BURST,
    ADDRESS_SHORT_LIVES,
    ADDRESSES_KEPT,
    FRAMES_PER_TURN,
    RETRY_AFTER,
    SHORT_LIFE_BURST,
    SHORT_LIFE_RATE,
    TURN_BYTES,
    Bucket,
)
from fleetlearn_coordinator.plan.service_settings import Limits

Address = IPv4Address | IPv6Address
NOTHING = 0, 0
"""Frames and bytes booked for a connection that does not wait."""


@lru_cache(maxsize=1024)  # most connections come from few addresses, and each asks twice
def read_address(text: str) -> Address | None:
    """Return the address, an IPv4 address in IPv6 clothes (::ffff:192.0.2.7) as IPv4; None if the
    text is none."""
    try:
        address = ip_address(text.partition("%")[0])
    except ValueError:
        return None
    return (address.ipv4_mapped or address) if isinstance(address, IPv6Address) else address


class Networks:
    """Some networks: ``address in networks``."""

    def __init__(self, networks: Iterable[str]) -> None:
        self._networks: list[IPv4Network | IPv6Network] = [
            ip_network(network) for network in networks
        ]

    def __contains__(self, address: object) -> bool:
        return any(address in network for network in self._networks)


class AddressUse:
    """What one address has and has spent. Its connections share it."""

    __slots__ = (
        "_most",
        "bytes",
        "check_ins",
        "connections",
        "key",
        "messages",
        "newcomers",
        "short_lives",
    )

    def __init__(self, key: str, limits: Limits, now: float) -> None:
        self.key = key
        """What the log calls it by: the address or the network."""
        self._most = limits.connections
        self.connections = 0
        self.newcomers = 0
        """Connections that have not checked in."""
        self.check_ins = Bucket(limits.check_ins, max(1.0, ADDRESS_BURST * limits.check_ins), now)
        self.messages = Bucket(limits.messages, ADDRESS_BURST * limits.messages, now)
        self.bytes = Bucket(limits.bytes, ADDRESS_BURST * limits.bytes, now)
        self.short_lives = Bucket(
            ADDRESS_SHORT_LIVES * SHORT_LIFE_RATE, ADDRESS_SHORT_LIVES * SHORT_LIFE_BURST, now
        )

    def floods(self, now: float, room: int) -> bool:
        """Return whether a further connection of the address is to be closed unread: because many
        of the last ones ended at once, or because as many have not checked in as there is ``room``
        for newcomers."""
        return self.newcomers >= room or self.short_lives.wait(now) > 0

    def refusal(self, now: float) -> str:
        """Count a connection that asks to be opened. Returns why it is refused; empty if it is
        not."""
        if self.connections > self._most:
            return (
                f"{self.key} has {self._most} connections, as many as one address may have at a "
                "time"
            )
        if self.check_ins.wait(now):
            return f"{self.key} opens more than {self.check_ins.rate:g} connections per second"
        self.check_ins.tokens -= 1
        return ""

    def wait(self, now: float) -> tuple[float, tuple[int, int]]:
        """Return for how many seconds a connection must wait until the address may send more, and
        how many frames and bytes were booked for it. The connections that wait have their turns one
        after the other."""
        if not self.messages.wait(now, least=0) and not self.bytes.wait(now, least=0):
            return 0.0, NOTHING
        booked = (
            FRAMES_PER_TURN if self.messages.tokens < 0 else 0,
            TURN_BYTES if self.bytes.tokens < 0 else 0,
        )
        return max(self.messages.book(now, booked[0]), self.bytes.book(now, booked[1])), booked


class AddressBook:
    """The use of each address that is connected, and of those that were there lately."""

    def __init__(self, limits: Limits) -> None:
        self._limits, self._exempt = limits, Networks(limits.exempt)
        self._connected: dict[str, AddressUse] = {}
        self._gone: dict[str, AddressUse] = {}
        """Addresses without a connection; the one that went first comes first. At most
        ADDRESSES_KEPT."""

    def __len__(self) -> int:
        return len(self._connected) + len(self._gone)

    def find(self, address: Address, now: float) -> AddressUse | None:
        """Return the use of an address; None if it has no limits."""
        if address in self._exempt:
            return None
        key = str(address)
        if isinstance(address, IPv6Address):
            key = str(IPv6Network((int(address) >> 64 << 64, 64)))
        return self._connected.get(key) or self._gone.get(key) or AddressUse(key, self._limits, now)

    def enter(self, use: AddressUse) -> None:
        """A connection of the address is there."""
        self._gone.pop(use.key, None)
        self._connected[use.key] = use
        use.connections += 1
        use.newcomers += 1

    def leave(self, use: AddressUse, *, newcomer: bool) -> None:
        """A connection of the address is gone; ``newcomer``: without having checked in."""
        use.connections -= 1
        use.newcomers -= newcomer
        if not use.connections:
            del self._connected[use.key]
            self._gone[use.key] = use
            if len(self._gone) > ADDRESSES_KEPT:
                del self._gone[next(iter(self._gone))]


def retry_after() -> str:
    """Return when a refused peer may try again, as the header Retry-After says it: whole seconds,
    at random."""
    return str(round(random.uniform(1.0, RETRY_AFTER)))
