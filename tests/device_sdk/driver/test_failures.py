"""Which failure each exception is, and which of them end the device."""

from __future__ import annotations

import pytest
from fleetlearn_device.driver.failures import failure_of
from fleetlearn_device.runtimes.checks import DataError
from fleetlearn_device.runtimes.import_onnxruntime import RuntimeUnavailableError
from fleetlearn_device.runtimes.sessions import StepError
from fleetlearn_device.storage.errors import DiskFullError, StateError
from fleetlearn_device.training.train import (
    BadValuesError,
    DivergedError,
    NoExamplesError,
    OutOfTimeError,
    TrainingError,
)
from fleetlearn_device.training.trainer import KilledError
from fleetlearn_protocol.errors import BundleError, Code, ProtocolError


@pytest.mark.parametrize(
    ("error", "code", "ends_device"),
    [
        (DataError("labels"), "bad-data", True),
        (BadValuesError("nan"), "bad-data", True),
        (StateError("denied"), "runtime-error", True),
        (DiskFullError("full"), "disk-full", True),
        (RuntimeUnavailableError("not installed"), "runtime-error", True),
        (DivergedError("nan"), "diverged", False),
        (OutOfTimeError("late"), "out-of-time", False),
        (NoExamplesError("none today"), "bad-data", False),
        (KilledError("three times"), "killed", False),
        (TrainingError("another"), "runtime-error", False),
        (MemoryError(), "out-of-memory", False),
        (BundleError(Code.BAD_MESSAGE, "damaged"), "bad-bundle", False),
        (ProtocolError(Code.BAD_MESSAGE, "the model is not finite"), "bad-bundle", False),
        (StepError("label 11"), "runtime-error", False),
        (ValueError("no lr"), "runtime-error", False),
        (SystemExit(3), "runtime-error", False),
    ],
)
def test_each_exception_has_its_failure(error: BaseException, code: str, ends_device: bool) -> None:
    assert failure_of(error) == (code, ends_device)
