"""What people ask of a run, as another process than its coordinator's sees it. file_requests.py
keeps it in files."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class RollBack(NamedTuple):
    """Somebody asks for a roll back."""

    name: str
    """Of this request; no other has it."""
    version: int
    """Whose model is to be the newest again."""
    who: str
    """An administrator's name, or ``command``."""


class Requests(Protocol):
    """The requests of one run: at most one for an evaluation, and at most one for a roll back.

    Any process may ask, at any time, also while no coordinator runs. The coordinator looks once a
    second. It writes a request's name into the ledger together with what answers it, and only then
    removes the request. So a request is carried out once, whoever dies in between: one whose name
    is in the ledger was carried out and is just removed.

    Each method is complete when it returns, and survives the process that called it. A reader sees
    a request whole or not at all. The process that holds the run's lock may see what others ask a
    moment later: it is told while it does other things. Every method may raise OSError or
    StoreUnavailableError.
    """

    def ask_for_evaluation(self) -> None:
        """Ask for an evaluation, under a new random name. A request that is there is replaced: one
        evaluation answers both. Raises StoreError where there is no run yet."""

    def evaluation(self) -> str | None:
        """Return the name of the request for an evaluation, or None where there is none."""

    def remove_evaluation(self) -> None:
        """Remove the request for an evaluation. May be called where there is none."""

    def ask_for_roll_back(self, version: int, who: str) -> None:
        """Ask for a roll back to an earlier version of the model, under a new random name. A
        request that is there is replaced: the last one counts. Raises StoreError where there is no
        run yet."""

    def roll_back(self) -> RollBack | None:
        """Return the request for a roll back, or None where there is none, or one that cannot be
        read."""

    def remove_roll_back(self) -> None:
        """Remove the request for a roll back. May be called where there is none."""


def encode_roll_back(request: RollBack) -> str:
    """Return the request as a line of text."""
    return f"{request.name} {request.version} {request.who}"


def decode_roll_back(text: str) -> RollBack:
    """Return the request that ``encode_roll_back`` wrote."""
    name, version, who = text.split(" ", 2)
    return RollBack(name, int(version), who)
