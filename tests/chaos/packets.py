"""Machines on one machine: network namespaces, and a program between them that carries their
packets, late, twice, in another order, or not at all.

    python packets.py FOLDER NAME=ADDRESS...

The first machine is the namespace that the program is started in. Each other one is made, and can
be entered by the file FOLDER/NAME.net. The packets are real ones of Linux's TCP: they leave a
machine by a TUN device, whose other end this program reads. Each line of JSON on standard input
sets what happens to the packets from one machine to another (``Link``); one that is empty ends a
group, which is answered by an empty line on standard output. When standard input ends, the last
line is what was done to how many packets.

This needs root and Linux: the kernel here may lack netem, which does the same in the kernel.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import json
import os
import random
import socket
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

CLONE_NEWNET = 0x4000_0000
TUNSETIFF = 0x4004_54CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
MTU = 16_000
"""Bytes of a packet. Large, so that few packets go through this program."""
DEVICE = "chaos0"
TCP, FIN, SYN, RST, ACK = 6, 1, 2, 4, 16
AT_A_TIME = 64
"""Packets read from one machine before another's are read."""


class Link(NamedTuple):
    """What happens to packets from one machine to another."""

    delay: float = 0.001
    """Seconds."""
    jitter: float = 0.0
    """Seconds that a packet may take longer: with enough of them packets overtake each other."""
    loss: float = 0.0
    """The share of packets that are lost; 1: the link is cut."""
    double: float = 0.0
    """The share of packets that come twice."""
    reset: bool = False
    """Whether each packet of TCP is answered by a reset in its receiver's name, and lost, as some
    firewalls do."""


GOOD = Link()


class Packets:
    """Carries packets between machines."""

    def __init__(self, addresses: Sequence[bytes], descriptors: Sequence[int]) -> None:
        """``addresses``: of the machines, 4 bytes each. ``descriptors``: of their TUN devices."""
        self._at = dict(zip(addresses, descriptors, strict=True))
        self._links: dict[tuple[bytes, bytes], Link] = {}
        self._luck = random.Random(0)
        self.counts: Counter[str] = Counter()
        self._loop = asyncio.get_running_loop()
        for address, descriptor in self._at.items():
            self._loop.add_reader(descriptor, self._read, address, descriptor)

    def set(self, source: bytes, target: bytes, link: Link) -> None:
        self._links[source, target] = link

    def _read(self, source: bytes, descriptor: int) -> None:
        for _ in range(AT_A_TIME):
            try:
                packet = os.read(descriptor, MTU + 100)
            except BlockingIOError:
                return
            if packet[0] >> 4 == 4 and packet[16:20] in self._at:
                self._carry(source, packet[16:20], packet)

    def _carry(self, source: bytes, target: bytes, packet: bytes) -> None:
        link = self._links.get((source, target), GOOD)
        if link.reset and packet[9] == TCP:
            answer = reset_for(packet)
            self.counts["reset"] += answer is not None
            if answer is not None:
                self._write(source, answer)
            return
        if self._luck.random() < link.loss:
            self.counts["lost"] += 1
            return
        twice = self._luck.random() < link.double
        self.counts["doubled"] += twice
        self.counts["slow"] += link.delay > GOOD.delay
        for _ in range(1 + twice):
            self.counts["carried"] += 1
            late = link.delay + self._luck.random() * link.jitter
            self._loop.call_later(late, self._write, target, packet)

    def _write(self, target: bytes, packet: bytes) -> None:
        try:
            os.write(self._at[target], packet)
        except BlockingIOError:
            self.counts["no room"] += 1


def reset_for(packet: bytes) -> bytes | None:
    """Return a reset that the sender of this packet takes as its receiver's; None: it is a reset
    itself."""
    begin = 4 * (packet[0] & 15)
    ports, sequence, acknowledged, rest = struct.unpack_from("!4sIIH", packet, begin)
    flags, header = rest & 0x3F, 4 * (rest >> 12)
    if flags & RST:
        return None
    length = len(packet) - begin - header + bool(flags & SYN) + bool(flags & FIN)
    swapped = ports[2:] + ports[:2]
    own = (acknowledged, 0, RST) if flags & ACK else (0, sequence + length, RST | ACK)
    segment = struct.pack(
        "!4sIIHHHH", swapped, own[0], own[1] & 0xFFFF_FFFF, 5 << 12 | own[2], 0, 0, 0
    )
    source, target = packet[16:20], packet[12:16]
    pseudo = source + target + struct.pack("!HH", TCP, len(segment))
    segment = segment[:16] + struct.pack("!H", checksum(pseudo + segment)) + segment[18:]
    around = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(segment), 0, 0, 64, TCP, 0)
    around += source + target
    around = around[:10] + struct.pack("!H", checksum(around)) + around[12:]
    return around + segment


def checksum(content: bytes) -> int:
    """Return the Internet checksum of an even number of bytes (RFC 1071)."""
    total = sum(struct.unpack(f"!{len(content) // 2}H", content))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def make_machine(address: str) -> int:
    """Give this namespace its TUN device with an address. Returns the device's other end."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    request = struct.pack("16sH22x", DEVICE.encode(), IFF_TUN | IFF_NO_PI)
    fcntl.ioctl(descriptor, TUNSETIFF, request)
    for words in (
        ("ip", "link", "set", "lo", "up"),
        ("ip", "address", "add", f"{address}/24", "dev", DEVICE),
        ("ip", "link", "set", DEVICE, "mtu", str(MTU), "up"),
    ):
        subprocess.run(words, check=True)
    return descriptor


def enter_new_namespace(name: Path) -> None:
    """Enter a network namespace of its own, which has a name as a file from then on."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "no network namespace can be made")
    name.touch()
    subprocess.run(["mount", "--bind", f"/proc/{os.getpid()}/ns/net", name], check=True)


async def carry(machines: dict[str, tuple[bytes, int]]) -> None:
    """Carry packets until standard input ends."""
    packets = Packets(*zip(*machines.values(), strict=True))
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(lines), sys.stdin
    )
    print(flush=True)
    while line := await lines.readline():
        if not line.strip():
            print(flush=True)
            continue
        wish: dict[str, Any] = json.loads(line)
        ends = (machines[wish.pop(end)][0] for end in ("from", "to"))
        packets.set(*ends, Link(**wish))
    print(json.dumps(packets.counts), flush=True)


def main() -> None:
    folder = Path(sys.argv[1])
    machines: dict[str, tuple[bytes, int]] = {}
    for number, word in enumerate(sys.argv[2:]):
        name, _, address = word.partition("=")
        if number:
            enter_new_namespace(folder / f"{name}.net")
        machines[name] = socket.inet_aton(address), make_machine(address)
    asyncio.run(carry(machines))


if __name__ == "__main__":
    main()
