"""A private CA and its certificates: what is in them, who may read the keys, and what is
refused."""

from __future__ import annotations

import ssl
import stat
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID
from fleetlearn_coordinator.service.private_ca import make_certificate, make_device_certificate
from fleetlearn_protocol.errors import FleetError


def read(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def test_the_certificate_is_for_its_names_and_of_the_ca(tmp_path: Path) -> None:
    assert make_certificate(tmp_path, ["fleet.example", "192.0.2.7", "2001:db8::1"], 90)
    ca, certificate = read(tmp_path / "ca.pem"), read(tmp_path / "certificate.pem")
    certificate.verify_directly_issued_by(ca)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["fleet.example"]
    assert [str(address) for address in names.get_values_for_type(x509.IPAddress)] == [
        "192.0.2.7",
        "2001:db8::1",
    ]
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    usage = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert [*usage] == [ExtendedKeyUsageOID.SERVER_AUTH]
    assert 90 <= (certificate.not_valid_after_utc - certificate.not_valid_before_utc).days <= 91
    ssl.create_default_context(cafile=tmp_path / "ca.pem")


def test_keys_are_for_their_owner_alone(tmp_path: Path) -> None:
    make_certificate(tmp_path, ["a"], 1)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == {
        "ca.pem": 0o644,
        "ca-key.pem": 0o600,
        "certificate.pem": 0o644,
        "key.pem": 0o600,
    }


def test_a_device_s_certificate_is_for_its_name_and_of_the_same_ca(tmp_path: Path) -> None:
    assert make_device_certificate(tmp_path, "roof-7", 90)
    assert not make_certificate(tmp_path, ["a"], 1)
    certificate = read(tmp_path / "devices" / "roof-7.pem")
    certificate.verify_directly_issued_by(read(tmp_path / "ca.pem"))
    assert certificate.subject.rfc4514_string() == "CN=roof-7"
    usage = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert [*usage] == [ExtendedKeyUsageOID.CLIENT_AUTH]
    assert stat.S_IMODE((tmp_path / "devices" / "roof-7.key").stat().st_mode) == 0o600
    for name in ("", "a b", "../a", "-a", "a" * 65):
        with pytest.raises(FleetError, match="a device's name has 1 to 64 letters"):
            make_device_certificate(tmp_path, name, 1)


def test_a_second_certificate_is_of_the_same_ca(tmp_path: Path) -> None:
    make_certificate(tmp_path, ["a"], 1)
    ca, first = (tmp_path / "ca.pem").read_bytes(), read(tmp_path / "certificate.pem")
    assert not make_certificate(tmp_path, ["b"], 1)
    assert (tmp_path / "ca.pem").read_bytes() == ca
    assert read(tmp_path / "certificate.pem").serial_number != first.serial_number


@pytest.mark.parametrize("name", ["", "a b", "*.example", "fleet/1", "a" * 254, "x..y"])
def test_what_is_no_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(FleetError, match="neither an IP address nor a host's name"):
        make_certificate(tmp_path / "new", [name], 1)
    assert not (tmp_path / "new").exists()


def test_a_ca_without_its_key_is_named(tmp_path: Path) -> None:
    make_certificate(tmp_path, ["a"], 1)
    (tmp_path / "ca-key.pem").unlink()
    with pytest.raises(FleetError, match=r"ca-key\.pem cannot be used"):
        make_certificate(tmp_path, ["a"], 1)
    make_certificate(tmp_path / "other", ["a"], 1)
    (tmp_path / "other" / "ca-key.pem").replace(tmp_path / "ca-key.pem")
    with pytest.raises(FleetError, match=r"is not the key of"):
        make_certificate(tmp_path, ["a"], 1)


def test_a_certificate_that_outlives_its_ca_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FleetError, match="would outlive"):
        make_certificate(tmp_path, ["a"], 3651)
