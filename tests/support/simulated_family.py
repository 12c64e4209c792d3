"""For tests: a simulated family of the line's bundles (line_bundle.py), which take the same data
and differ in what they have: ``full`` has the buffer ``seen``, ``small`` has none, and with ``own``
the element h stays on the device. Devices of the tier ``large`` train ``full``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fleetlearn_simulator.scenario.scenario import Scenario
from line_bundle import write_line_bundle
from virtual import write_scenario

TIERS: dict[str, Any] = {
    "large": {"latency": 0.0, "download": 1e12, "upload": 1e12, "memory": 500.0},
    "little": {"latency": 0.0, "download": 1e12, "upload": 1e12, "memory": 100.0, "tags": ["leaf"]},
}
MIB = 2**20


def family_tables(folder: Path, *, own: bool = False) -> dict[str, Any]:
    """Make the bundles, and return the plan's [family]."""
    full, small = folder / "full.bundle", folder / "small.bundle"
    if not full.exists():
        write_line_bundle(full)
    if not small.exists():
        write_line_bundle(small, buffer=False, personal=own)
    return {
        "full": {"bundle": str(full), "memory": 400 * MIB},
        "small": {"bundle": str(small), "tags": ["leaf"]},
    }


def family_scenario(
    folder: Path, size: int = 12, *, own: bool = False, **settings: Any
) -> Scenario:
    """Return a scenario of this family; ``settings`` as ``write_scenario`` takes them."""
    usual = {"tiers": TIERS, "plan__family": family_tables(folder, own=own)}
    return Scenario.load(write_scenario(folder, None, size, **(usual | settings)))
