"""Whom a proxy connects for: the rightmost address that no proxy of ours has, of two headers."""

from __future__ import annotations

import pytest
from fleetlearn_coordinator.network import forwarded
from fleetlearn_coordinator.network.addresses import Networks, read_address
from fleetlearn_coordinator.network.forwarded import origin_of
from fleetlearn_coordinator.network.gate import RefusalError
from websockets.datastructures import Headers

PROXY = read_address("10.0.0.1")
PROXIES = Networks(["10.0.0.0/8", "2001:db8:1::/48"])


def found(*fields: tuple[str, str]) -> str:
    assert PROXY is not None
    return str(origin_of(Headers(fields), PROXY, PROXIES))


@pytest.mark.parametrize(
    ("value", "address"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("192.0.2.7:4711", "192.0.2.7"),
        ("2001:db8::7", "2001:db8::7"),
        ("[2001:db8::7]:4711", "2001:db8::7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("198.51.100.9, 192.0.2.7", "192.0.2.7"),
        ("192.0.2.7, 10.0.0.2", "192.0.2.7"),
        ("198.51.100.9, 192.0.2.7, 2001:db8:1::2, 10.0.0.2", "192.0.2.7"),
        ("10.0.0.3, 10.0.0.2", "10.0.0.3"),
        ("192.0.2.7, nonsense", "10.0.0.1"),
        ("192.0.2.7, nonsense, 10.0.0.2", "10.0.0.2"),
        ("", "10.0.0.1"),
        (" , ", "10.0.0.1"),
    ],
)
def test_x_forwarded_for(value: str, address: str) -> None:
    assert found(("X-Forwarded-For", value)) == address


@pytest.mark.parametrize(
    ("value", "address"),
    [
        ("for=192.0.2.7", "192.0.2.7"),
        ('For="[2001:db8::7]:4711"', "2001:db8::7"),
        ('for="192.0.2.7:4711";proto=https;by=10.0.0.1', "192.0.2.7"),
        ("proto=http; for=198.51.100.9, for=192.0.2.7;host=here", "192.0.2.7"),
        ("for=192.0.2.7, for=10.0.0.2", "192.0.2.7"),
        ("for=unknown", "10.0.0.1"),
        ("for=192.0.2.7, for=_hidden", "10.0.0.1"),
        ("for=192.0.2.7;for=192.0.2.8", "10.0.0.1"),
        ("for=192.0.2.7, ,", "192.0.2.7"),
        ("proto=http", "10.0.0.1"),
        # a client leaves a quote open
        ('for="198.51.100.9, for=192.0.2.7', "192.0.2.7"),
        ('for="198.51.100.9, for="[2001:db8::7]"', "2001:db8::7"),
    ],
)
def test_forwarded(value: str, address: str) -> None:
    assert found(("Forwarded", value)) == address


def test_lines_of_a_header_are_one_list() -> None:
    assert (
        found(("X-Forwarded-For", "198.51.100.9"), ("X-Forwarded-For", "192.0.2.7")) == "192.0.2.7"
    )
    assert found() == "10.0.0.1"


def test_hops_that_a_client_made_up_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """8,000 of them fit in a request, and would hold up all devices for a second."""
    read: list[str] = []
    monkeypatch.setattr(
        forwarded, "read_address", lambda text: read.append(text) or read_address(text)
    )
    for name, before in (("X-Forwarded-For", ""), ("Forwarded", "for=")):
        read.clear()
        made_up = ",".join(f"{before}{number:x}" for number in range(1000))
        assert found((name, made_up), (name, f"{before}192.0.2.7, {before}10.0.0.2")) == "192.0.2.7"
        assert read == ["10.0.0.2", "192.0.2.7"]


def test_headers_that_disagree_are_refused() -> None:
    """A proxy that sets one of them passes the other on as its client made it up."""
    both = ("Forwarded", "for=192.0.2.7"), ("X-Forwarded-For", "192.0.2.7")
    assert found(*both) == "192.0.2.7"
    with pytest.raises(RefusalError, match="the proxy must remove the one"):
        found(both[0], ("X-Forwarded-For", "192.0.2.8"))
