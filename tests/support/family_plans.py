"""For tests: a plan with two models of different sizes, and devices that fit them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fleetlearn_coordinator import Plan
from peers import plan_text, write_test_bundle

LARGE, SMALL = 700, 300
"""Elements of the members' models."""
RAM = 2_000
"""Bytes of RAM from which on a device fits the member ``large``."""


def family_text(
    folder: Path,
    recipe: str = "fedavg",
    *,
    tags: Mapping[str, Sequence[str]] | None = None,
    order: Sequence[str] = ("large", "small"),
    **settings: Any,
) -> str:
    """Return a plan with the members ``large`` and ``small``, whose bundles are made in
    ``folder``. Its data directory is ``folder``/run. ``tags``: of members. ``settings``: as for
    ``plan_text``."""
    members, sizes = [], {"large": LARGE, "small": SMALL}
    for name in order:
        path = folder / f"{name}.bundle"
        if not path.exists():
            write_test_bundle(path, sizes[name])
        lines = [f"[family.{name}]", f'bundle = "{path}"']
        if name == "large":
            lines.append(f"memory = {RAM}")
        lines.append(f"tags = {json.dumps((tags or {}).get(name, []))}")
        members += lines
    first = folder / f"{order[0]}.bundle"
    return "\n".join([plan_text(first, folder / "run", recipe, **settings), *members, ""])


def family_plan(folder: Path, recipe: str = "fedavg", **more: Any) -> Plan:
    """Return the same as a plan."""
    return Plan.parse(family_text(folder, recipe, **more), folder)
