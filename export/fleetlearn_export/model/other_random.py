"""Random numbers of Python and NumPy, which no graph can draw."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

import numpy as np

from fleetlearn_export.errors import ExportError
from fleetlearn_export.model.source_locations import hint_of_library, is_user_code

Result = TypeVar("Result")


def without_other_random(run: Callable[[], Result], what: str) -> Result:
    """Return ``run()``. Raises ExportError, with the line of the user's code, if it draws from
    Python's or NumPy's random numbers.

    A graph would keep for ever what was drawn while it was traced: one branch, one gain. The states
    of both generators before and after tell. Generators of the user's own, such as
    ``numpy.random.default_rng()``, have states elsewhere; two runs that differ tell of those.

    what: whose code runs, as the beginning of a sentence.
    """
    before = _states()
    result = run()
    changed = [name for name, state in _states().items() if state != before[name]]
    if not changed:
        return result
    location = _drawing_line(run)
    raise ExportError(
        f"{what} draws a random number from {' and '.join(changed)}{location}. A graph cannot do "
        "that: it would use the number that was drawn at the export for ever. Draw with PyTorch, "
        "whose numbers come from the step's seed, and choose with torch.where, such as "
        "torch.where(torch.rand(()) < p, x.flip(1), x); or do it where the data are read"
        f"{hint_of_library(location)}"
    )


def _states() -> dict[str, Any]:
    numpy_state: Any = np.random.get_state(legacy=False)
    inner = numpy_state["state"]
    return {
        "Python's random": random.getstate(),
        "numpy.random": (inner["key"].tobytes(), inner["pos"], numpy_state["has_gauss"]),
    }


def _drawing_line(run: Callable[[], object]) -> str:
    """Run it again, and return `` at FILE:LINE in FUNCTION`` for the first line of the user's code
    that draws."""
    lines: list[str] = []
    last: list[Any] = [_states(), None]

    def watch(frame: FrameType, event: str, _: Any) -> Any:
        if lines:
            return None
        states = _states()
        if states != last[0] and last[1] is not None:
            lines.append(last[1])
            return None
        last[:] = states, _user_line(frame) or last[1]
        return watch

    tracer_before = sys.gettrace()
    sys.settrace(watch)
    try:
        run()
    finally:
        sys.settrace(tracer_before)
    return lines[0] if lines else ""


def _user_line(frame: FrameType | None) -> str | None:
    while frame is not None:
        if is_user_code(frame.f_code.co_filename):
            return f" at {frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return None
