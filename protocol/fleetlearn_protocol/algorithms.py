"""What travels for each algorithm that a device can train by: section 4 of PROTOCOL.md has the
equations."""

from __future__ import annotations

from typing import NamedTuple

from fleetlearn_protocol.computations.kinds import KINDS
from fleetlearn_protocol.messages import CONTROL, MODEL, PLAIN, SUMS, UPDATE


class Exchange(NamedTuple):
    """The vectors that a task must have, and the parts that its report must have."""

    vectors: tuple[str, ...] = (MODEL,)
    parts: tuple[str, ...] = (UPDATE,)
    """Those that depend on the algorithm. A report has ``buffers`` too where the bundle has any
    that travel."""


EXCHANGES = {
    PLAIN: Exchange(),
    "scaffold": Exchange((MODEL, CONTROL), (UPDATE, CONTROL)),
    "scaffold-gradient": Exchange((MODEL, CONTROL), (UPDATE, CONTROL)),
    "feddyn": Exchange(),
    "ditto": Exchange(),
    "fedrep": Exchange(),
    **dict.fromkeys(KINDS, Exchange(parts=(SUMS,))),
}
"""By the name in ``Task.algorithm``. Each of these vectors and parts has P float32 elements before
it is encoded; the part ``sums`` of a computation has S whole numbers."""
