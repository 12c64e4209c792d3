"""Reading a run's ledger from outside, also while its coordinator writes it. sqlite_reader.py reads
SQLite's."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, NamedTuple, Protocol

from fleetlearn_coordinator.storage.ledger import DeviceActivity, ModelMade


class EndedExchange(NamedTuple):
    """An exchange that is over; as the ledger's rows of it have it."""

    number: int
    version: int
    outcome: str
    closed: float
    summary: dict[str, Any]
    phase: int


class LedgerReader(Protocol):
    """A run's ledger at one moment, in any process. Nothing here writes, and no read keeps the
    coordinator waiting.

    All reads of one reader show the same moment: whole batches, up to some batch. That is a batch
    which was written when the reader was made, or a later one. One thread at a time may call it,
    for as long as its context is open.

    Every method may raise StoreUnavailableError.
    """

    def metadata(self) -> dict[str, Any]:
        """Return all small values of the run, by name."""

    def models(self) -> dict[int, str]:
        """Return version -> SHA-256 of each committed model, also of those whose bytes are not kept
        any more."""

    def known_models(self) -> list[ModelMade]:
        """Return what is known of each committed model, the oldest first, also of those whose bytes
        are not kept."""

    def newest_model(self) -> ModelMade | None:
        """Return what is known of the newest committed model, or None before the first."""

    def last_round(self) -> int:
        """Return the number of the last round that was opened, or 0 before the first."""

    def open_round(self) -> int | None:
        """Return the number of the open round, or None where none is open."""

    def goal(self, round: int) -> int | None:
        """Return the goal with which a round was opened, or None where the plan says it, there is
        no such round, or an earlier version was the last to serve the run."""

    def opened(self, round: int) -> float | None:
        """Return when a round was opened, as a Unix time, or None where there is no such round."""

    def closed_rounds(self, since: int) -> list[tuple[int, str, float, float, dict[str, Any]]]:
        """Return (number, outcome, opened, closed, summary) of each round that is over, from number
        ``since`` on, in order. Times are Unix times. Raises StoreError (damaged)."""

    def round_outcomes(self) -> dict[str, int]:
        """Return outcome -> how many rounds had it (``closed_rounds``)."""

    def tasks(self, round: int) -> list[tuple[str, str, str, str | None]]:
        """Return (task, device, state, member) of each of a round's tasks, by the task's name.
        state: ``assigned`` while it runs, ``accepted``, or the cause of its end. member: which of a
        family's models it is for; None: the run has one. Empty for a round that was closed long
        ago."""

    def searched_devices(self) -> list[tuple[str, float | None, int, str]]:
        """Return (device, since when it has been connected or None, 1 if a task of it failed else
        0, its tags, tier and runtime in lower case) of each device that was seen, in no order."""

    def tasks_of(self, device: str, most: int) -> list[tuple[str, int, str, str | None]]:
        """Return (task, round, state, member) of a device's last tasks, the newest round first, at
        most this many. Those of rounds that were closed long ago are gone."""

    def task_states(self, round: int) -> dict[str, int]:
        """Return state -> how many of a round's tasks have it (``tasks``)."""

    def device_activity(
        self, since: float | None = None, only: Collection[str] | None = None
    ) -> list[DeviceActivity]:
        """Return what is known of each device that was seen, by name. ``since``: only of those that
        were seen then (Unix time) or later. ``only``: in place of ``since``, of devices with these
        names, a thousand at most. Devices that were last seen long ago may be missing
        (``DEVICES_KEPT``). Empty where an earlier version was the last to serve the run."""

    def measured_in_rounds(self, versions: Iterable[int]) -> dict[int, dict[str, Any]]:
        """Return version -> the summary of the round that began from it and made the next one, for
        those of these versions of which it is over. Raises StoreError (damaged)."""

    def exchanges(self, kind: str) -> list[EndedExchange]:
        """Return the exchanges of this kind that are over, in order. Raises StoreError
        (damaged)."""

    def valid_exchanges(self, kind: str, versions: Iterable[int]) -> dict[int, dict[str, Any]]:
        """Return version -> the summary of the last valid exchange of this kind about it, for those
        of these versions that have one. Raises StoreError (damaged)."""
