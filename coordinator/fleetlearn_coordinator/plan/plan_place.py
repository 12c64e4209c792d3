"""Where a plan's run is, without all that the plan says: for whoever only looks at the run."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import NamedTuple

from fleetlearn_protocol.paths import in_home

from fleetlearn_coordinator.plan.toml_errors import paths_from


class PlanPlace(NamedTuple):
    """A run by its plan."""

    name: str
    data_dir: Path
    file: str


def read_place(path: str | os.PathLike[str]) -> PlanPlace:
    """Return the name and the data directory that a plan says. Whether the rest of the plan is good
    is not looked at, unless these two cannot be known. Raises PlanError."""
    try:
        file = in_home(path)
        raw = tomllib.loads(file.read_text("utf-8"))
        name, data_dir = raw["name"], raw.get("data_dir")
        bundle = raw["family"] if "family" in raw else raw["bundle"]
        if not isinstance(bundle, str | dict) or not isinstance(name, str):
            raise TypeError
        place = paths_from(file.absolute().parent)
        found = place(Path, f"{name}.run" if data_dir is None else data_dir)
        return PlanPlace(name, found, str(path))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        from fleetlearn_coordinator.plan.plan import Plan

        plan = Plan.load(path)  # says what is wrong
        return PlanPlace(plan.name, plan.data_dir, str(plan.file))
