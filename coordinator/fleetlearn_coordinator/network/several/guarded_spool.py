"""The spool files of one of several runs: an error there (the disk is full) ends that run alone."""

from __future__ import annotations

from collections.abc import Callable

from fleetlearn_protocol.errors import Code, ProtocolError
from fleetlearn_protocol.frames import Buffer

from fleetlearn_coordinator.conversation.port import Spool

NO_FILE = -1
"""What is returned in place of a file when the run has just failed. Its uploads are over then."""


class GuardedSpool:
    """A ``Spool`` whose errors end its run: conversations and uploads of other runs do not hear of
    them."""

    def __init__(self, spool: Spool, failed: Callable[[Exception], None]) -> None:
        """``failed``: ends the run, and drops its uploads."""
        self._spool, self._failed = spool, failed
        self._over = False

    def _fail(self, error: Exception) -> None:
        self._over = True
        self._failed(error)

    def has_room(self) -> bool:
        return not self._over and self._spool.has_room()

    def take_spool_file(self) -> int:
        try:
            return self._spool.take_spool_file()
        except Exception as error:
            self._fail(error)
            return NO_FILE

    def free_spool_file(self, number: int) -> None:
        if not self._over:
            try:
                self._spool.free_spool_file(number)
            except Exception as error:
                self._fail(error)

    def write_checkpoint(self, number: int, content: bytes) -> None:
        if not self._over:
            try:
                self._spool.write_checkpoint(number, content)
            except Exception as error:
                self._fail(error)

    def write_spool_file(self, number: int, offset: int, content: Buffer) -> None:
        try:
            self._spool.write_spool_file(number, offset, content)
        except Exception as error:
            self._fail(error)
            raise ProtocolError(
                Code.STALE_ROUND, "the task's run was stopped by an error of its coordinator"
            ) from None
