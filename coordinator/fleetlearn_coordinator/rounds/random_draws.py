"""Random numbers that follow from the run's seed and the round alone, so that none needs to be
stored."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from hashlib import blake2b
from struct import unpack

MASK = 2**64 - 1


@lru_cache(4)
def _start(seed: int, round: int, what: str, size: int) -> blake2b:
    return blake2b(f"{seed}/{round}/{what} ".encode(), digest_size=size)


def task_seeds(seed: int, round: int, devices: Iterable[str]) -> list[int]:
    """Return 53 random bits (a browser's integers) for each device's training.

    They depend on the round and the device, not on the task: a device trains the same way in a
    round whichever slot it was given."""
    start, digests = _start(seed, round, "device", 8), []
    for device in devices:
        drawn = start.copy()  # half the cost of hashing seed and round again for each device
        drawn.update(device.encode())
        digests.append(drawn.digest())
    return [number >> 11 for number in unpack(f"<{len(digests)}Q", b"".join(digests))]


def shuffled(seed: int, number: int, devices: Iterable[str], kind: str) -> list[str]:
    """Return the devices in the random order in which exchange ``number`` of this kind takes them.
    It does not depend on their order here, nor on which others are there."""
    start, rows = _start(seed, number, kind, 16), []
    for device in devices:
        drawn = start.copy()
        drawn.update(device.encode())
        rows.append((drawn.digest(), device))
    return [device for _, device in sorted(rows)]


def picks(seed: int, round: int, first: int, count: int, what: str = "picks") -> Sequence[int]:
    """Return 64 random bits for each of ``count`` picks, beginning with pick number ``first``. A
    digest has eight."""
    found: list[int] = []
    for block in range(first // 8, (first + count - 1) // 8 + 1):
        drawn = _start(seed, round, what, 64).copy()
        drawn.update(str(block).encode())
        found += unpack("<8Q", drawn.digest())
    return found[first % 8 : first % 8 + count]


def stream(draw: int) -> Iterator[int]:
    """Yield as many numbers of 64 random bits as are wanted, which follow from one: SplitMix64
    (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014)."""
    while True:
        draw = draw + 0x9E3779B97F4A7C15 & MASK
        mixed = (draw ^ draw >> 30) * 0xBF58476D1CE4E5B9 & MASK
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & MASK
        yield mixed ^ mixed >> 31
