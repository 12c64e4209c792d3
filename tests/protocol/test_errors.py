"""Errors keep what they say on their way from one process to another."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
from fleetlearn_protocol.errors import BundleError, Code, FleetError, in_words
from fleetlearn_simulator.errors import SimulatorError


@pytest.mark.parametrize(
    "error", [BundleError(Code.WRONG_HASH, "cut short"), SimulatorError("no such key")]
)
def test_an_error_comes_back_as_it_was(error: FleetError) -> None:
    error.add_note("on another machine")
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is type(error)
        assert (again.code, again.text, str(again)) == (error.code, error.text, str(error))
        assert again.__notes__ == ["on another machine"]


def test_errors_in_words(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="Errno 2") as missing:
        (tmp_path / "none").read_text()
    assert in_words(missing.value) == "no such file or directory"
    assert in_words(missing.value, file=True) == f"{tmp_path / 'none'}: no such file or directory"
    assert in_words(OSError("in its own words")) == "in its own words"
    assert in_words(TimeoutError()) == "TimeoutError"
    assert in_words(FleetError(Code.BUSY, "come back later")) == "come back later"
    with pytest.raises(UnicodeDecodeError) as no_text:
        b"caf\xe9".decode()
    assert in_words(no_text.value) == "it is no UTF-8 text (byte 3 is 0xe9)"
