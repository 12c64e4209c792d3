"""trusted.json: kept from the first start on, and changed by nothing that is said at a later
one."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from fleetlearn_device.storage.errors import StateError
from fleetlearn_device.storage.trusted_keys import (
    checked_keys,
    read_trusted_keys,
    trust_first,
    write_trusted_keys,
)

A, B = "a" * 64, "b" * 64


def test_the_first_keys_are_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "fleetlearn")
    assert trust_first(tmp_path, ()) == ()
    assert trust_first(tmp_path, (A,)) == (A,)
    assert trust_first(tmp_path, ()) == (A,)
    assert not caplog.text
    assert trust_first(tmp_path, (B,)) == (A,)
    assert f"trusts {A}, and goes on so: {B} was given" in caplog.text
    write_trusted_keys(tmp_path, (B, A))
    assert read_trusted_keys(tmp_path) == (B, A)
    assert [path.name for path in tmp_path.iterdir()] == ["trusted.json"]


@pytest.mark.parametrize("content", ["", "{}", '{"keys":[]}', '{"keys":["x"]}'])
def test_a_damaged_file_does_not_let_the_device_do_everything(tmp_path: Path, content: str) -> None:
    (tmp_path / "trusted.json").write_text(content)
    with pytest.raises(StateError, match=r"trusted\.json is damaged"):
        trust_first(tmp_path, (A,))


def test_what_is_no_key_is_named() -> None:
    assert checked_keys((A, B, A)) == (A, B)
    assert checked_keys(()) == ()
    for wrong in (["x"], ["a" * 63], ["a" * 64 + "\n"], [str(n) * 64 for n in range(9)]):
        with pytest.raises(ValueError, match="as `fleetlearn-coordinator signing-key` prints them"):
            checked_keys(wrong)
