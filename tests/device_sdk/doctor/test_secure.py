"""What the doctor says of secure aggregation."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from fleetlearn_device.doctor.finding import Finding
from fleetlearn_device.doctor.secure import check_secure
from fleetlearn_device.driver.signatures import public_key_of
from fleetlearn_device.session.secure_demands import NO_SECURE_DEMANDS, SecureDemands
from fleetlearn_device.storage.device_key import device_key

REQUIRE = SecureDemands(require=True)


def found(demands: SecureDemands, folder: Path) -> Finding:
    (finding,) = check_secure(demands, folder)
    assert finding.do or finding.state == "good"
    return finding


def test_nothing_is_said_where_nobody_asks_for_it(tmp_path: Path) -> None:
    assert not list(check_secure(NO_SECURE_DEMANDS, tmp_path))
    (tmp_path / "device_key.json").write_bytes(b"{")
    assert not list(check_secure(REQUIRE, tmp_path)), "check_state says that it is damaged"


def test_a_device_that_no_helper_knows(tmp_path: Path) -> None:
    finding = found(REQUIRE, tmp_path)
    assert finding.state == "unknown"
    assert "fleetlearn-device public-key" in finding.do


def test_a_device_that_can_mask(tmp_path: Path) -> None:
    public = public_key_of(device_key(tmp_path)).hex()
    for demands in (NO_SECURE_DEMANDS, REQUIRE):
        finding = found(demands, tmp_path)
        assert finding.state == "good"
        assert public in finding.found


@pytest.mark.parametrize(
    ("key", "words"), [("00" * 32, "is no helper's key"), ("0f", "expected 64 of 0-9 and a-f")]
)
def test_a_helper_s_key_that_is_none(tmp_path: Path, key: str, words: str) -> None:
    finding = found(SecureDemands(helper=key), tmp_path)
    assert finding.state == "bad"
    assert words in finding.found


def test_the_package_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device_key(tmp_path)
    monkeypatch.setitem(sys.modules, "fleetlearn_device.training.masking", None)
    assert found(REQUIRE, tmp_path).state == "bad"
    assert found(NO_SECURE_DEMANDS, tmp_path).state == "warning"
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.asymmetric.ed25519", None)
    assert 'pip install "fleetlearn[device,secure]"' in found(REQUIRE, tmp_path).do


def test_a_list_of_devices_that_cannot_be_read(tmp_path: Path) -> None:
    roster = tmp_path / "devices.txt"
    for content, text in [(None, "cannot be read"), ("roof-8 0a", "line 1")]:
        if content is not None:
            roster.write_text(content)
        finding = found(SecureDemands(roster=str(roster)), tmp_path)
        assert finding.state == "bad"
        assert text in finding.found
    key = public_key_of(device_key(tmp_path)).hex()
    roster.write_text(f"roof-8 {key}\n")
    assert found(SecureDemands(roster=str(roster)), tmp_path).state == "good"
