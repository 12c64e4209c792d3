"""Maps each exception to the failure that the coordinator is told, and to whether the device can go
on."""

from __future__ import annotations

from typing import NamedTuple

from fleetlearn_protocol.errors import FleetError
from fleetlearn_protocol.messages import FailureCode

from fleetlearn_device.data.buffer_source import EmptyBufferError
from fleetlearn_device.runtimes.checks import DataError
from fleetlearn_device.runtimes.import_onnxruntime import RuntimeUnavailableError
from fleetlearn_device.storage.errors import CacheFullError, DiskFullError, StateError
from fleetlearn_device.training.algorithms import UnsupportedError
from fleetlearn_device.training.pairwise_sessions import LostSessionError, UntrustedError
from fleetlearn_device.training.train import (
    BadValuesError,
    DivergedError,
    NoExamplesError,
    OutOfTimeError,
)
from fleetlearn_device.training.trainer import KilledError


class Failure(NamedTuple):
    """What an exception means for the task and for the device."""

    code: FailureCode
    """The code in the message ``failed``."""
    ends_device: bool = False
    """The next task would fail as well, so the device ends with this exception."""


FAILURES: dict[type, Failure] = {
    DataError: Failure("bad-data", ends_device=True),
    EmptyBufferError: Failure("bad-data"),  # there may be records next time
    BadValuesError: Failure("bad-data", ends_device=True),
    StateError: Failure("runtime-error", ends_device=True),
    DiskFullError: Failure("disk-full", ends_device=True),
    CacheFullError: Failure("disk-full"),  # a smaller bundle may fit
    RuntimeUnavailableError: Failure("runtime-error", ends_device=True),
    DivergedError: Failure("diverged"),
    OutOfTimeError: Failure("out-of-time"),
    NoExamplesError: Failure("bad-data"),  # there may be some next time
    KilledError: Failure("killed"),
    UnsupportedError: Failure("unsupported"),
    UntrustedError: Failure("untrusted"),
    LostSessionError: Failure("killed"),
    MemoryError: Failure("out-of-memory"),
    FleetError: Failure("bad-bundle"),
    Exception: Failure("runtime-error"),
    SystemExit: Failure("runtime-error"),  # of the owner's code
}
"""By class. An exception that is not listed is treated as the nearest listed class that it derives
from."""


def failure_of(error: BaseException) -> Failure:
    """Return the row of the exception's class in ``FAILURES``."""
    return next(FAILURES[kind] for kind in type(error).__mro__ if kind in FAILURES)
