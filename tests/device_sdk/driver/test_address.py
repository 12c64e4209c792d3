"""Which addresses a device connects to, and whom it trusts there."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
from fleetlearn_device.driver.address import checked_address, read_token


@pytest.mark.parametrize(
    "url", ["ws://127.0.0.1:1", "ws://localhost", "ws://[::1]:8765/", "ws://a.localhost:1"]
)
def test_this_machine_needs_no_tls(url: str) -> None:
    assert checked_address(url) == (url, None)


def test_another_machine_needs_tls_or_a_word() -> None:
    with pytest.raises(
        ValueError, match=r"(?s)without TLS.*Expected wss://; or insecure=True \(--insecure\)"
    ):
        checked_address("ws://192.0.2.1:8765")
    assert checked_address("ws://192.0.2.1:8765", insecure=True).tls is None
    with pytest.raises(ValueError, match="without TLS"):
        checked_address("ws://127.0.0.1.example")


def test_tls_checks_the_name_and_the_certificate() -> None:
    context = checked_address("wss://fleet.example").tls
    assert context is not None
    assert context.check_hostname
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2


def test_a_ca_is_the_only_one_that_is_trusted(tmp_path: Path) -> None:
    from fleetlearn_coordinator.service.private_ca import make_certificate

    make_certificate(tmp_path, ["fleet.example"], 1)
    context = checked_address("wss://fleet.example", ca=tmp_path / "ca.pem").tls
    assert context is not None
    assert len(context.get_ca_certs()) == 1


@pytest.mark.parametrize(
    ("url", "ca", "words"),
    [
        ("http://a", None, "expected ws://HOST:PORT or wss://HOST:PORT"),
        (
            "wss://me:secret@a",
            None,
            "the address has a user name or a password; expected wss://HOST:PORT alone",
        ),
        ("wss://a", "none.pem", "none.pem cannot be used as a CA"),
        ("ws://127.0.0.1", "none.pem", "which has no TLS; expected wss://"),
    ],
)
def test_mistakes_are_named(url: str, ca: str | None, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        checked_address(url, ca=ca)


@pytest.mark.parametrize(
    "token",
    ["", "a" * 42, "a" * 43 + "\n", "a" * 42 + " ", "a" * 129, "ä" * 43, f"{'a' * 43}.{'b' * 63}"],
)
def test_what_cannot_be_a_token_is_refused_and_not_shown(token: str) -> None:
    with pytest.raises(
        ValueError, match=f"it has {len(token)} characters. Expected 43 to 128"
    ) as caught:
        read_token(token)
    assert not token or token.strip() not in str(caught.value)
    assert read_token("a-_0" * 11) == ("a-_0" * 11, ())


def test_a_token_brings_keys_along() -> None:
    a, b = "a" * 64, "b" * 64
    assert read_token(f"{'t' * 43}.{a}.{b}") == ("t" * 43, (a, b))
