"""Paths as people write them."""

from __future__ import annotations

from pathlib import Path

import pytest
from fleetlearn_protocol.bundle import open_bundle
from fleetlearn_protocol.errors import BundleError
from fleetlearn_protocol.paths import in_home


def test_the_home_folder_takes_the_place_of_the_tilde(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert in_home("~/fleet/state") == tmp_path / "fleet" / "state"
    assert in_home("a/~/b") == Path("a/~/b")


def test_without_home_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a user whom /etc/passwd does not have: a container's with --user 12345."""
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda number: {}[number])
    with pytest.raises(
        ValueError, match="begins with ~, and no home folder is known for it; set the variable HOME"
    ):
        in_home("~/fleet")
    with pytest.raises(BundleError, match="set the variable HOME"):
        open_bundle("~/digits.bundle")
