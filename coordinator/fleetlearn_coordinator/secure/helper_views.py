"""What ``fleetlearn-coordinator helper status`` says."""

from __future__ import annotations

import hashlib
import ssl
from contextlib import closing
from pathlib import Path

import msgspec
from fleetlearn_protocol.date_text import date_text
from fleetlearn_protocol.errors import Code, in_words

from fleetlearn_coordinator.network.own_certificate import read_certificates
from fleetlearn_coordinator.secure.helper_settings import HelperFileError, HelperSettings
from fleetlearn_coordinator.secure.helper_store import HelperStore


class HelperView(msgspec.Struct, frozen=True, kw_only=True):
    """A helper, for people and programs."""

    address: str
    key: str
    """Its public X25519 key, for devices and plans: 64 hexadecimal digits."""
    certificate: str
    """SHA-256 of its certificate, for plans: 64 hexadecimal digits."""
    certificate_names: str
    certificate_ends: float | None
    """Unix time. None: it cannot be read."""
    minimum: int
    devices: int
    """Enrolled, and not revoked."""
    runs: int
    sets: int
    """Sums that were answered."""
    seeds: int
    """Seeds that were used."""
    last: float | None
    """Unix time of the last new sum."""

    def lines(self) -> list[tuple[str, str]]:
        """Return labels and texts, for a terminal."""
        ends = (
            "" if self.certificate_ends is None else f", until {date_text(self.certificate_ends)}"
        )
        runs = "1 run" if self.runs == 1 else f"{self.runs} runs"
        last = "" if self.last is None else f", the last on {date_text(self.last)}"
        return [
            ("address", f"{self.address} (certificate for {self.certificate_names}{ends})"),
            ("key", self.key),
            ("certificate", self.certificate),
            ("minimum", f"{self.minimum} devices in a sum"),
            ("devices", f"{self.devices} enrolled"),
            ("answered", f"{self.sets} sums of {runs}, {self.seeds} seeds{last}"),
        ]


def helper_view(file: Path) -> HelperView:
    """Return what a helper's files say, whether it runs or not. Raises FleetError."""
    settings = HelperSettings.load(file)
    with closing(HelperStore(settings.database)) as store:
        key = store.private_key().public_key().public_bytes_raw()
        counts = store.counts()
    own = next(iter(read_certificates(settings.tls.certificate)), None)
    return HelperView(
        address=f"https://{settings.host}:{settings.port}",
        key=key.hex(),
        certificate=_fingerprint(settings.tls.certificate),
        certificate_names="no name" if own is None else own.listed,
        certificate_ends=None if own is None else own.ends,
        minimum=settings.minimum,
        devices=counts.devices,
        runs=counts.runs,
        sets=counts.sets,
        seeds=counts.seeds,
        last=counts.last,
    )


def _fingerprint(certificate: Path) -> str:
    """Return the SHA-256 of the first certificate of a PEM file. Raises HelperFileError."""
    try:
        text = certificate.read_text("ascii")
        first = text[: text.index("-----END CERTIFICATE-----")] + "-----END CERTIFICATE-----\n"
        begin = first.index("-----BEGIN CERTIFICATE-----")
        return hashlib.sha256(ssl.PEM_cert_to_DER_cert(first[begin:])).hexdigest()
    except (OSError, ValueError) as error:
        why = f"{certificate} cannot be read as a PEM certificate: {in_words(error)}"
        raise HelperFileError(Code.BAD_MESSAGE, why) from None
