"""What one peer can cost a coordinator: every bound in one place. PROTOCOL.md states those that a
device can meet.

A peer that is over its budget is not read from: TCP makes it wait, at no cost here. One that stays
over it is ended.
"""

from __future__ import annotations

KIB = 1024

# --- Messages. Frames of a device are counted, with pings, pongs and fragments.

FRAMES_PER_TURN = 8
"""Frames of one connection that are handled before every other connection has had its turn."""
MESSAGE_RATE = 50.0
"""Frames a second, once the burst is used up; 8 for each heartbeat interval where that is more."""
MESSAGE_BURST = 200
"""Frames at once, from the check-in on."""
MESSAGES_BEFORE_CHECK_IN = 40
"""Frames at once before the check-in; enough to be refused MAX_REFUSALS times."""
MESSAGES_OF_A_TASK = 50
"""Frames at once that a new task allows at least, so that short rounds do not slow a device that
works."""
LARGE_FRAME = 16 * KIB
"""Bytes of payload. A binary frame of at least this size counts by its bytes alone, and not as a
message."""
BYTE_RATE = 256.0 * KIB
"""Bytes a second that a device may send beyond those of its tasks' updates."""
BYTE_BURST = 1024 * KIB
"""Bytes at once, from the check-in on. A task adds the bytes of its update, twice."""
DOWNLOAD_RATE = 256.0 * KIB
"""Bytes a second that a device may fetch beyond the bundle once and the model once for each
task."""
PATIENCE = 10.0
"""Seconds that a peer may have to wait for its budget before its connection is ended. Each second
gives back half a second."""

# --- Refused messages. MAX_REFUSALS is the protocol's.

REFUSAL_FORGOTTEN = 10.0
"""Seconds after which one of a connection's refused messages is forgotten, one after the other."""
RACES_OF_A_TASK = 4
"""Refusals that a task may bring without a fault of its device: its round ended while a fetch, a
report or an update was on its way, or the update itself was rejected. Beyond these, and
MAX_REFUSALS more, the connection is closed: no device that follows the protocol is refused as
often."""

# --- Memory of one connection: at most READ_LIMIT + WRITE_LIMIT, and some 10 KiB of objects.

LARGEST_MESSAGE = 256 * KIB
"""Bytes; above, the connection is closed (1009) before the message is read. Below, what is too
large is refused."""
MAX_FRAGMENTS = 256
"""Frames of one message."""
RECEIVE = 256 * KIB
"""Bytes that asyncio reads at once from a socket."""
READ_LIMIT = RECEIVE + 2 * LARGEST_MESSAGE
"""Bytes that were read and not handled yet: one read, an incomplete message, and one that is being
handled."""
DRAIN_ABOVE = 32 * KIB
"""Bytes that wait for the peer to read. Above, a download waits."""
WRITE_PAUSE = 256 * KIB
"""Bytes that wait for the peer to read. Above, nothing is read from the peer. A download stays
below."""
WRITE_LIMIT = 512 * KIB
"""Bytes that wait for the peer to read. Above, the connection is cut off."""

# --- Connections.

NEWCOMERS = 4096
"""Connections that speak for no device: in the handshake, before the check-in, closing. Each takes
some 10 KiB. More wait in the queue of the system; where that is full, the systems of the devices
try again after 1 and after 3 s."""
TLS_NEWCOMERS = 1024
"""Most newcomers at a time with TLS, where each takes some 50 KiB."""
CHECK_IN_TIMEOUT = 10.0
"""Seconds from the connection to the check-in."""
HANDSHAKE_BYTES = 16 * KIB
"""Bytes of the HTTP request that opens a connection."""
ACCEPTS_PER_TURN = 128
"""Connections that are accepted before every other connection has had its turn. With fewer, a storm
of devices costs more (8: 40 % of CPU). SHORT_LIFE_BURST and NEWCOMERS bound the connections of an
attack."""
SHORT_LIFE = 2.0
"""Seconds: connections that end sooner are counted, so that connecting again and again does not
starve others. Those that were told that training is finished are not: there is nobody left to
starve."""
SHORT_LIFE_RATE = 50.0
"""Short-lived connections a second, once the burst is used up; until there is room for another none
is accepted."""
SHORT_LIFE_BURST = 100
REFUSED_LIFE = 0.1
"""How much of a short life a connection counts that is refused because of its address: it costs a
tenth of one."""
OTHER_FILES = 64
"""Descriptors for the database, sums, models, the bundle, the log, beside those for updates."""

# --- One address, and one device. Their rates: `[limits]`, plan/service_settings.py.

ADDRESS_BURST = 4.0
"""Seconds of its rates that an address may use at once."""
ADDRESS_SHORT_LIVES = 0.25
"""Part of SHORT_LIFE_RATE and SHORT_LIFE_BURST that one address may use. Beyond, its connections
are closed unread."""
ADDRESSES_KEPT = 10_000
"""Addresses without a connection whose spent budgets are remembered, some 1 KiB each."""
TURN_BYTES = 64 * KIB
"""Bytes that a connection books of its address's budget when it waits for its turn; FRAMES_PER_TURN
frames beside."""
DEVICE_BURST = 60
"""Check-ins of a device at once."""
DEVICES_KEPT = 10_000
"""Devices that are gone whose spent budgets are remembered, some 1 KiB each."""
ALLOWANCE_INTERVAL = 60.0
"""Seconds within which a check-in allows a device its messages, the bundle and an update only once.
A device that lost its files or an upload can begin again then."""
RETRY_AFTER = 30.0
"""Longest wait, in seconds, that a refused address is told. Its devices get random ones, and so do
not come at once."""

# --- Ends, in seconds.

CLOSE_TIMEOUT = 5.0
"""Longest closing handshake."""
LINGER = 1.0
"""Time from closing a connection for misbehaviour until it is cut off; nothing is read
meanwhile."""
STOP_TIMEOUT = 2.5
"""Time that devices have to leave when the coordinator stops; LINGER later their connections are
cut off."""

# --- The log: lines that peers cause. The rest are counted.

LINE_RATE = 10.0
LINE_BURST = 100
LINES_OF_A_CONNECTION = 8
LINE_RATE_OF_A_CONNECTION = 0.1
LONGEST_LINE = 400
"""Characters."""


class Bucket:
    """A budget of tokens that come back at a rate, up to a burst."""

    __slots__ = ("at", "burst", "rate", "tokens")

    def __init__(self, rate: float, burst: float, now: float, tokens: float | None = None) -> None:
        """``rate``: tokens a second; ``now``: seconds on any clock; ``tokens``: at the start, the
        burst by default."""
        self.rate, self.burst, self.at = rate, burst, now
        self.tokens = burst if tokens is None else tokens

    def wait(self, now: float, group: float = 1.0, least: float = 1.0) -> float:
        """Return 0 if there are ``least`` tokens, else the seconds until ``group`` of them will be
        there."""
        # raise_to may have given more than the burst; these do not grow
        if self.tokens < self.burst:
            self.tokens = min(self.burst, self.tokens + (now - self.at) * self.rate)
        self.at = now
        return 0.0 if self.tokens >= least else (max(group, least) - self.tokens) / self.rate

    def book(self, now: float, tokens: float) -> float:
        """Take tokens that may not be there yet. Returns the seconds until they are."""
        self.wait(now)
        self.tokens -= tokens
        return max(0.0, -self.tokens / self.rate)

    def raise_to(self, tokens: float) -> None:
        """Have at least this many tokens."""
        self.tokens = max(self.tokens, tokens)
