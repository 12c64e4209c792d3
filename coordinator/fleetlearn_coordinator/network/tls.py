"""TLS of the listener: the certificate that new connections are shown, and whose certificates
devices may show. The files are read again when they change."""

from __future__ import annotations

import ssl
from pathlib import Path

from fleetlearn_protocol.errors import Code, FleetError, in_words

from fleetlearn_coordinator.network.peer_log import logger
from fleetlearn_coordinator.network.tls_failures import note_hello
from fleetlearn_coordinator.network.tls_reading import share_read_buffers
from fleetlearn_coordinator.plan.service_settings import Tls

HANDSHAKE_TIMEOUT = 8.0
"""Seconds that a TLS handshake may take; it is over before a connection is due to check in."""


class Certificates:
    """The TLS context of new connections."""

    def __init__(self, settings: Tls) -> None:
        """Raises FleetError (bad-message) where the files cannot be used."""
        share_read_buffers()
        self._settings = settings
        self._remarks_due = 0.0
        self._read()

    def _read(self) -> None:
        # 10 MB, for services with TLS
        from fleetlearn_coordinator.network.own_certificate import read_certificates

        self._stamps = self._look()
        self.context = _context(self._settings)
        clients = self._settings.clients
        self.own = next(iter(read_certificates(self._settings.certificate)), None)
        """The certificate that is shown, if it can be read."""
        self._authorities = [] if clients is None else read_certificates(clients)

    def say_remarks(self, host: str, now: float) -> None:
        """Say in the log what keeps devices away, or soon will: at the first call, when the files
        have changed, and once a day. ``host``: where the coordinator listens; ``now``: Unix
        time."""
        if now < self._remarks_due:
            return
        from fleetlearn_coordinator.network.own_certificate import DAY, remarks, remarks_on_ca

        self._remarks_due = now + DAY
        found = [] if self.own is None else remarks(self.own, host, now)
        for authority in self._authorities:
            found += remarks_on_ca(authority, now)
        for text in found:
            logger.warning("%s", text)

    def check(self) -> None:
        """Read the files again if they have changed. If they cannot be used, the ones before stay,
        and the log says so. Open connections are left as they are."""
        stamps = self._look()
        if stamps == self._stamps:
            return
        try:
            self._read()
        except FleetError as error:
            logger.error("the certificate from before stays in use: %s", error.text)
        else:
            self._remarks_due = 0.0
            logger.info("the certificate was read again from %s", self._settings.certificate)

    def _look(self) -> list[tuple[int, int] | None]:
        """Return when each file was written, and its size. None: it is not there."""
        return [
            _stamp(file)
            for file in (self._settings.certificate, self._settings.key, self._settings.clients)
        ]


def _stamp(file: Path | None) -> tuple[int, int] | None:
    if file is None:
        return None
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def _context(settings: Tls) -> ssl.SSLContext:
    """Return the context. Raises FleetError (bad-message) where the files cannot be used, naming
    them."""
    for file in (
        settings.certificate,
        settings.key,
        *([settings.clients] if settings.clients is not None else []),
    ):
        if not file.exists():  # OpenSSL's error would not say which
            raise FleetError(Code.BAD_MESSAGE, f"{file} does not exist; {_MADE_BY}")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.sni_callback = note_hello
    # Two tickets are half of a handshake's CPU (0.45 ms with them, 0.19 ms without), and a resumed
    # handshake takes 0.18 ms: they would cost more than they save, even if devices kept them.
    context.num_tickets = 0
    try:
        # Without the callback a key with a password would make OpenSSL ask for it at the terminal.
        context.load_cert_chain(settings.certificate, settings.key, password=_refuse_password)
    except (OSError, ValueError) as error:
        raise FleetError(
            Code.BAD_MESSAGE,
            f"{settings.certificate} and {settings.key} cannot be used for TLS: {in_words(error)}. "
            f"{_MADE_BY}",
        ) from None
    if settings.clients is not None:
        # the gate refuses who shows none, in words, or takes its credential
        context.verify_mode = ssl.CERT_OPTIONAL
        try:
            context.load_verify_locations(settings.clients)
        except OSError as error:
            raise FleetError(
                Code.BAD_MESSAGE,
                f"{settings.clients} cannot be used as the CA of devices' certificates: "
                f"{in_words(error)}; expected a PEM file",
            ) from None
    return context


_MADE_BY = (
    "[tls] names PEM files; `fleetlearn-coordinator certificate` makes a certificate and its key"
)


def _refuse_password() -> bytes:
    raise ValueError(
        "the key has a password; write it without one, readable by the coordinator's user alone"
    )
