"""Shakespeare's sequences dealt out in equal numbers: the data that McMahan et al. (arXiv
1602.05629) call IID. A module of its own, since the simulator asks a module how many examples each
of its devices has."""

from __future__ import annotations

from _shakespeare_data import Codes, dealt, roles, test

__all__ = ["balanced", "examples", "test"]


def balanced(device: int, seed: int) -> tuple[Codes, Codes]:
    """A device's sequences, whatever their role: as many as any other's, or one more."""
    x, y, _ = dealt(seed)
    begin, end = _place(device, len(x))
    return x[begin:end], y[begin:end]


def examples(device: int, seed: int) -> int:
    """Return how many sequences a device has."""
    begin, end = _place(device, len(dealt(seed)[0]))
    return end - begin


def _place(device: int, sequences: int) -> tuple[int, int]:
    return device * sequences // roles(), (device + 1) * sequences // roles()
