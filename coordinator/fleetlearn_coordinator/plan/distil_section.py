"""[distil] of a plan: after each round the model learns from several others, by examples without
labels."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from fleetlearn_protocol.messages import MAX_EXAMPLES
from msgspec import Meta

from fleetlearn_coordinator.plan.toml_errors import Positive, Section


class DistilSection(Section, frozen=True, kw_only=True):
    """[distil]: ensemble distillation, FedDF (docs/algorithms/distillation.md)."""

    data: Path
    """Examples without labels, an .npz file of the arrays that the model takes, relative to the
    plan file. Further arrays in it are not read."""
    bundle: Path | None = None
    """The distillation bundle of the plan's bundle (``export_distillation``), relative to the plan
    file. In a family each member names its own, ``family.NAME.distil``."""
    teachers: Literal["devices", "members"] = "devices"
    """devices: the models that the round's devices trained. members: the members of a family, after
    their means."""
    steps: Positive = 200
    """Steps of each distillation."""
    batch_size: Annotated[int, Meta(ge=1, le=MAX_EXAMPLES)] = 128
    """Examples in a step."""
    lr: Annotated[float, Meta(gt=0, lt=1e6)] = 0.001
    """Learning rate of the first step. It falls to nearly 0 with the last one, as half a cosine
    does."""
    temperature: Annotated[float, Meta(ge=0.01, le=1000)] = 1.0
    """The logits of teachers and student are divided by it. Above 1 the teachers' doubts count
    more."""
    every: Positive = 1
    """Committed rounds from one distillation to the next."""
