"""What travels for each algorithm that a device can train by: section 4 of PROTOCOL.md has the
equations."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from fleetlearn_protocol.computations.settings import KIND_NAMES
from fleetlearn_protocol.extensions import ExtensionPoint
from fleetlearn_protocol.messages import CONTROL, MODEL, PLAIN, SUMS, UPDATE

FEDMD = "fedmd"
"""Devices tell class scores of public examples; the bundle has these in place of graphs."""
OWN = "own"
"""Devices train by a function of their owner's, which `Task.function` names."""
LOCAL_ALGORITHM: ExtensionPoint[Any] = ExtensionPoint(
    "local algorithm", object, arguments=("work",)
)
"""Trains in place of ours."""


class Exchange(NamedTuple):
    """The vectors that a task must have, and the parts that its report must have."""

    vectors: tuple[str, ...] = (MODEL,)
    parts: tuple[str, ...] = (UPDATE,)
    """Those that depend on the algorithm. A report has ``buffers`` too where the bundle has any
    that travel."""
    hyper: tuple[str, ...] = ()
    """Numbers that a task's ``hyper`` must have for the algorithm itself, beside those of the
    bundle's step."""


EXCHANGES = {
    PLAIN: Exchange(),
    "scaffold": Exchange((MODEL, CONTROL), (UPDATE, CONTROL)),
    "scaffold-gradient": Exchange((MODEL, CONTROL), (UPDATE, CONTROL)),
    "feddyn": Exchange(),
    "ditto": Exchange(),
    "fedrep": Exchange(),
    "pfedme": Exchange(hyper=("inner_steps", "outer_lr")),
    "apfl": Exchange(hyper=("alpha", "adapt_alpha")),
    FEDMD: Exchange(hyper=("lr", "digest_lr", "digest_epochs", "temperature")),
    OWN: Exchange(),
    **dict.fromkeys(KIND_NAMES, Exchange(parts=(SUMS,))),
}
"""By the name in ``Task.algorithm``. Each of these vectors and parts has P float32 elements before
it is encoded; the part ``sums`` of a computation has S whole numbers."""


def of_step(algorithm: str, hyper: Mapping[str, float], step: Collection[str]) -> dict[str, float]:
    """Return a task's hyper-parameters without those of its algorithm: those of the bundle's
    step. ``step``: the names of all that the step takes; of an own algorithm it has the others."""
    own = {*hyper} - {*step} if algorithm == OWN else EXCHANGES[algorithm].hyper
    return {name: value for name, value in hyper.items() if name not in own}
