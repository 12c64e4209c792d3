"""The devices' names in the engine."""

from functools import lru_cache


def name_of(device: int) -> str:
    """Return the name of a device. Names are sorted as the numbers are."""
    return f"d{device:08d}"


@lru_cache(2**16)  # the same devices come again: this takes a fraction of the time
def device_of(name: str) -> int:
    """Return the number of the device with this name."""
    return int(name[1:])
