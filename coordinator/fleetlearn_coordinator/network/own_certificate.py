"""The coordinator's own certificate: from when to when it is valid, and for which names."""

from __future__ import annotations

from datetime import UTC, datetime
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.x509.oid import ExtensionOID, NameOID
from fleetlearn_protocol.date_text import date_text

DAY = 86400.0
SOON = 14 * DAY
"""Seconds before a certificate's end from which on the log says so, once a day."""
ANY_ADDRESS = ("", "0.0.0.0", "::")
RENEW = "`fleetlearn-coordinator certificate` writes a new one, which is taken up without a restart"


class OwnCertificate(NamedTuple):
    """What a certificate says of itself."""

    file: Path
    begins: float
    """Unix time."""
    ends: float
    """Unix time."""
    names: tuple[str, ...]
    """Host names, in lower case, and IP addresses."""
    issuer: str
    """The common name of the CA that made it; empty where that has none."""

    def is_for(self, host: str) -> bool:
        """Return whether the certificate is for this host name or IP address (RFC 9525: a name may
        begin with ``*.``, which stands for one label)."""
        host = host.lower().rstrip(".")
        return host in self.names or f"*.{host.partition('.')[2]}" in self.names

    @property
    def listed(self) -> str:
        """Its names, for people."""
        return ", ".join(self.names) or "no name at all"

    def out_of_date(self, now: float) -> str:
        """Return why the certificate is not valid at this Unix time; empty if it is."""
        if now < self.begins:
            # The hour alone: a line that says the second would be another line for each device that
            # is refused.
            clock = f"{datetime.fromtimestamp(now, UTC):%Y-%m-%d %Hh UTC}"
            return (
                f"{self.file} is valid from {date_text(self.begins)} on, and by this machine's "
                f"clock it is {clock}"
            )
        if now > self.ends:
            return f"{self.file} ended on {date_text(self.ends)}"
        return ""


def read_certificates(file: Path) -> list[OwnCertificate]:
    """Return a PEM file's certificates, in their order; none where they cannot be read."""
    try:
        return [_read(file, found) for found in x509.load_pem_x509_certificates(file.read_bytes())]
    except (OSError, ValueError):  # OpenSSL has read them, and is less strict
        return []


def _read(file: Path, certificate: x509.Certificate) -> OwnCertificate:
    names: list[str] = []
    for extension in certificate.extensions:
        if extension.oid == ExtensionOID.SUBJECT_ALTERNATIVE_NAME:
            found = extension.value
            assert isinstance(found, x509.SubjectAlternativeName)
            names += [name.lower() for name in found.get_values_for_type(x509.DNSName)]
            names += map(str, found.get_values_for_type(x509.IPAddress))
    issuers = [
        str(part.value) for part in certificate.issuer.get_attributes_for_oid(NameOID.COMMON_NAME)
    ]
    begins, ends = (
        certificate.not_valid_before_utc.timestamp(),
        certificate.not_valid_after_utc.timestamp(),
    )
    return OwnCertificate(file, begins, ends, tuple(names), issuers[0] if issuers else "")


def remarks(own: OwnCertificate, host: str, now: float) -> list[str]:
    """Return what keeps devices away, or soon will, at this Unix time. ``host``: where the
    coordinator listens."""
    found = []
    if why := own.out_of_date(now):
        found.append(f"the certificate {why}: devices refuse it. {RENEW}")
    elif own.ends - now < SOON:
        days = int((own.ends - now) // DAY)
        found.append(
            f"the certificate {own.file} ends on {date_text(own.ends)}, in {days} days; then "
            f"devices refuse it. {RENEW}"
        )
    if host not in ANY_ADDRESS and not own.is_for(_plain(host)):
        found.append(
            f'the certificate {own.file} is for {own.listed}, and not for host = "{host}": devices '
            "that connect to that name or address refuse it"
        )
    return found


def remarks_on_ca(authority: OwnCertificate, now: float) -> list[str]:
    """Return what is wrong with the CA of devices' certificates, or soon will be."""
    if why := authority.out_of_date(now):
        return [f"the CA of devices' certificates {why}: devices with certificates cannot connect"]
    if authority.ends - now < SOON:
        return [
            f"the CA of devices' certificates {authority.file} ends on {date_text(authority.ends)}"
        ]
    return []


def _plain(host: str) -> str:
    try:
        return str(ip_address(host))
    except ValueError:
        return host
