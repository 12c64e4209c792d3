"""The device's name: made once, and never changed by mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fleetlearn_device.storage.errors import StateError
from fleetlearn_device.storage.state_directory import StateDirectory


def test_the_identity_is_made_once(tmp_path: Path) -> None:
    first = StateDirectory(tmp_path)
    first.close()
    second = StateDirectory(tmp_path)
    second.close()
    assert first.device == second.device
    other = StateDirectory(tmp_path / "other")
    other.close()
    assert other.device != first.device


def test_a_name_is_given_once(tmp_path: Path) -> None:
    StateDirectory(tmp_path, "sensor-7").close()
    assert json.loads((tmp_path / "identity.json").read_text())["device"] == "sensor-7"
    StateDirectory(tmp_path, "sensor-7").close()
    StateDirectory(tmp_path).close()
    with pytest.raises(StateError, match="sensor-7, not sensor-8"):
        StateDirectory(tmp_path, "sensor-8")
    StateDirectory(tmp_path).close()  # the failed attempt left no lock


@pytest.mark.parametrize("name", ["", "a b", ".hidden", "x" * 65, "../up"])
def test_a_name_that_cannot_be_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(StateError, match="1 to 64 letters"):
        StateDirectory(tmp_path, name)
    assert not (tmp_path / "identity.json").exists()


@pytest.mark.parametrize(
    "content", [b"", b"{", b'{"device":""}', b'{"name":"x"}', b"\xff", b'{"device":"\xff"}']
)
def test_a_damaged_identity_says_what_to_do(tmp_path: Path, content: bytes) -> None:
    StateDirectory(tmp_path).close()
    (tmp_path / "identity.json").write_bytes(content)
    with pytest.raises(StateError, match="delete it and the device gets a new name"):
        StateDirectory(tmp_path)
