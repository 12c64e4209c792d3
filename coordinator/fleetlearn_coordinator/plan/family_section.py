"""[family.NAME]: one of a run's several models, and which devices train it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from fleetlearn_protocol.messages import Count, Tags
from msgspec import Meta

from fleetlearn_coordinator.plan.toml_errors import Section

MAX_MEMBERS = 16
MemberName = Annotated[str, Meta(pattern=r"^[A-Za-z][-A-Za-z_0-9]{0,31}\Z")]
"""Of a member of a family: 1 to 32 letters, digits, ``_-``."""


class FamilyMember(Section, frozen=True):
    """A member of a family. A device trains the first member, in the file's order, that fits it."""

    bundle: Path
    """The member's training bundle, relative to the plan file."""
    distil: Path | None = None
    """With [distil]: the member's distillation bundle (``export_distillation``), relative to the
    plan file."""
    memory: Count | None = None
    """The least bytes of RAM of a device that trains it. A device that does not say how much it has
    does not fit. Default: any device fits."""
    tags: Tags = ()
    """Tags that a device must have, all of them. Default: none."""


def fill_family(raw: dict[str, Any]) -> None:
    """Let a plan's bundle be its first member's. Raises ValueError where the plan has another one,
    or where [family] has no member."""
    family = raw.get("family")
    if not isinstance(family, Mapping):
        return
    if not family:
        raise ValueError("[family] has no member: write [family.NAME] with its bundle, or leave it")
    first = next(iter(family.values()))
    bundle = first.get("bundle") if isinstance(first, Mapping) else None
    if bundle is None:  # the conversion says that the member's is missing
        raw.setdefault("bundle", "missing")
    elif raw.setdefault("bundle", bundle) != bundle:
        raise ValueError(
            f"bundle = {raw['bundle']!r} and [family]: each member has a bundle of its own; leave "
            "bundle out"
        )
