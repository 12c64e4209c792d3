"""Errors keep what they say on their way from one process to another."""

from __future__ import annotations

import copy
import pickle

import pytest
from fleetlearn_protocol.errors import BundleError, Code, FleetError
from fleetlearn_simulator.errors import SimulatorError


@pytest.mark.parametrize("error", [BundleError(Code.WRONG_HASH, "cut short"), SimulatorError("no such key")])
def test_an_error_comes_back_as_it_was(error: FleetError) -> None:
    error.add_note("on another machine")
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is type(error)
        assert (again.code, again.text, str(again)) == (error.code, error.text, str(error))
        assert again.__notes__ == ["on another machine"]
