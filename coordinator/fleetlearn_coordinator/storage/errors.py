"""What storage raises, whatever the store is: no error of a database's own library leaves this
package.

Where bytes cannot be written or read because of the machine (a full disk, a lost connection), an
OSError may come too.
"""

from __future__ import annotations

from fleetlearn_protocol.errors import FleetError


class StoreError(FleetError):
    """What is stored cannot be used: it is missing, damaged, another run's or a newer version's, or
    it is in use."""


class StoreUnavailableError(FleetError):
    """The store cannot be reached, read or written now: its disk is full, read-only or broken, or
    others use it."""


class StoreAwayError(StoreUnavailableError):
    """The store is a server that cannot be reached now, or that gave the run to another process:
    this may pass without anybody's doing here."""


class DuplicateRowError(FleetError):
    """A row was to be written whose key another row has. Nothing of its batch was written."""
