"""Accepted updates whose bytes did not come to the coordinator: a gateway on another machine put
them into the run's object store, as ``arrived/NUMBER``, before it asked to have them saved.

A number takes the place of a spool file's number, and is never used again: the coordinator's
generation (object_generations.py), a number for each hello of a gateway, and one for each object
that this gateway puts. So a late object of a gateway that was lost replaces nothing.
"""

from __future__ import annotations

ARRIVED = "arrived"
"""The folder of these objects, below the run's."""
PARTIAL = "partial"
"""The folder of partial sums, which gateways put and the coordinator removes."""
FIRST_ARRIVED = 2**40
"""The lowest number. Those of spool files are below."""
HELLOS = 2**20
"""Hellos of gateways that one coordinator can number."""
PUTS = 2**20
"""Objects that a gateway can put after one hello."""


def is_arrived(number: int) -> bool:
    """Return whether this is no spool file, but an object that arrived."""
    return number >= FIRST_ARRIVED


def first_number(generation: int, hello: int) -> int:
    """Return the first of PUTS numbers. ``generation``: the coordinator's, from 1 on."""
    return (generation * HELLOS + hello) * PUTS


def arrived_key(number: int) -> str:
    """Return the name of an object, below the run's."""
    return f"{ARRIVED}/{number}"


def partial_key(number: int) -> str:
    """Return the name of the object that is a partial sum, below the run's."""
    return f"{PARTIAL}/{number}"
