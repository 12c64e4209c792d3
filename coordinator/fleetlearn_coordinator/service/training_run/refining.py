"""What may change the averaged models of a closed round before they are written, such as
distillation between the members of a family.

A round that is refined takes two pieces of background work: the first averages, and hands the
models to the refiner; the second writes those that it made of them, and the round is committed. In
between the engine is committing and nothing else changes. Nothing of this is stored: the accepted
updates are, and a start averages them again and asks again, so the refiner must make the same bits
of the same models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from fleetlearn_protocol.vector import Vector

from fleetlearn_coordinator.service.training_run.spooled_report import SpooledReport


class AveragedRound(NamedTuple):
    """A closed round whose models are averaged, and not written yet."""

    number: int
    """Of the round."""
    version: int
    """The one that the models are to be."""
    before: Mapping[str, Vector]
    """Name of each member -> the model that the round began from, float32. A run with one model
    has the name ""."""
    models: Mapping[str, Vector]
    """The same of the averaged models."""
    updates: Sequence[SpooledReport]
    """The round's updates in the order in which their tasks were given, if the refiner keeps them.
    ``columns.member`` is the number of an update's member, ``columns.update(UPDATE, 0)`` reads its
    elements: its device's own model is ``before`` of that member, and the update."""


class Refiner(Protocol):
    """Makes other models of the averaged ones. ``RoundWork.refined`` takes them."""

    keeps_updates: bool
    """Whether it needs each update, so that their spool files are kept until the round ends. The
    plan's ``updates_kept`` must count them."""
    waits_on: str
    """What a round waits for meanwhile, for people: a sentence without its full stop."""

    def begin(self, averaged: AveragedRound) -> None:
        """A round is averaged: begin to refine its models, without keeping the caller waiting. The
        event loop's thread calls this, and so must what calls ``RoundWork.refined``."""

    def forget(self) -> None:
        """The models that were asked for last are not needed any more. Harmless when repeated."""
