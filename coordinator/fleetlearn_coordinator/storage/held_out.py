"""What models measure on held-out data. file_held_out.py keeps it in files."""

from __future__ import annotations

from typing import Any, Protocol


class HeldOutResults(Protocol):
    """The results of one run's models on held-out data, by version. A result never changes once it
    is there.

    Any process may write and read, at any time. Every method may raise OSError or
    StoreUnavailableError.
    """

    def write(self, version: int, result: dict[str, Any]) -> None:
        """Write a version's result (examples, metrics), whole or not at all. A result that is there
        already stays, so two processes may measure the same model."""

    def read(self, version: int) -> dict[str, Any] | None:
        """Return a version's result, or None where it has none. Raises StoreError (damaged)."""

    def read_all(self) -> dict[int, dict[str, Any]]:
        """Return version -> result, the oldest version first. Raises StoreError (damaged)."""
