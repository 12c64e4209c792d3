"""The log lines about one run. They begin with its name where one process serves several."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any


class RunLog(logging.LoggerAdapter[logging.Logger]):
    """The log of one run."""

    def __init__(self, name: str = "") -> None:
        """``name``: the run's, of several. Empty: its process serves no other."""
        super().__init__(logging.getLogger("fleetlearn.coordinator"), {})
        self.run = name
        """The run's, of several; or empty."""
        self.begin = f"run {name}: " if name else ""
        """What each line begins with."""

    def process(
        self, msg: object, kwargs: MutableMapping[str, Any]
    ) -> tuple[str, MutableMapping[str, Any]]:
        """Return a line as it is logged."""
        kwargs["extra"] = {**(kwargs.get("extra") or {}), "run": self.run}
        return f"{self.begin}{msg}", kwargs
