"""Checking signatures: RFC 8032's own, those of the vectors, and without the package that can."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from fleetlearn_device.driver.signatures import find_verifier
from fleetlearn_protocol.errors import FleetError
from fleetlearn_protocol.signing import signed_bytes

VECTORS = json.loads(
    (Path(__file__).parents[3] / "protocol" / "vectors" / "signing.json").read_text()
)


@pytest.mark.parametrize("case", VECTORS["rfc8032"], ids=lambda case: case["name"])
def test_rfc_8032(case: dict[str, str]) -> None:
    message = bytes.fromhex(case["message"])
    verify = find_verifier()
    assert verify(case["public"], case["signature"], message)
    assert not verify(case["public"], case["signature"], message + b"x")


def is_signed(case: dict[str, Any]) -> bool:
    content = signed_bytes(case["challenge"], case["device"], case["message"])
    return find_verifier()(case["key"], case["signature"], content)


@pytest.mark.parametrize("case", VECTORS["valid"], ids=lambda case: case["name"])
def test_signed_messages(case: dict[str, Any]) -> None:
    assert signed_bytes(case["challenge"], case["device"], case["message"]).hex() == case["bytes"]
    assert is_signed(case)


@pytest.mark.parametrize("case", VECTORS["invalid"], ids=lambda case: case["name"])
def test_wrong_signatures(case: dict[str, Any]) -> None:
    assert not is_signed(case)


def test_the_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.exceptions", None)
    with pytest.raises(FleetError, match=r'pip install "fleetlearn\[device,signatures\]"'):
        find_verifier()
