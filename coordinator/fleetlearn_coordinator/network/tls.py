"""TLS of the listener: the certificate that new connections are shown, and whose certificates devices may show. The
files are read again when they change."""

from __future__ import annotations

import ssl
from pathlib import Path

from fleetlearn_protocol.errors import Code, FleetError, in_words

from fleetlearn_coordinator.network import process_settings
from fleetlearn_coordinator.network.peer_log import logger
from fleetlearn_coordinator.plan.service_settings import Tls

HANDSHAKE_TIMEOUT = 8.0
"""Seconds that a TLS handshake may take; it is over before a connection is due to check in."""


class Certificates:
    """The TLS context of new connections."""

    def __init__(self, settings: Tls) -> None:
        """Raises FleetError (bad-message) where the files cannot be used."""
        process_settings.shrink_tls_buffers()
        self._settings = settings
        self._stamps = self._look()
        self.context = _context(settings)

    def check(self) -> None:
        """Read the files again if they have changed. If they cannot be used, the ones before stay, and the log says so.
        Open connections are left as they are."""
        stamps = self._look()
        if stamps == self._stamps:
            return
        self._stamps = stamps
        try:
            self.context = _context(self._settings)
        except FleetError as error:
            logger.error("the certificate from before stays in use: %s", error)
        else:
            logger.info("the certificate was read again from %s", self._settings.certificate)

    def _look(self) -> list[tuple[int, int] | None]:
        """Return when each file was written, and its size. None: it is not there."""
        return [_stamp(file) for file in (self._settings.certificate, self._settings.key, self._settings.clients)]


def _stamp(file: Path | None) -> tuple[int, int] | None:
    if file is None:
        return None
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def _context(settings: Tls) -> ssl.SSLContext:
    """Return the context. Raises FleetError (bad-message) where the files cannot be used, naming them."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        # Without the callback a key with a password would make OpenSSL ask for it at the terminal.
        context.load_cert_chain(settings.certificate, settings.key, password=_refuse_password)
    except (OSError, ValueError) as error:
        raise FleetError(
            Code.BAD_MESSAGE,
            f"{settings.certificate} and {settings.key} cannot be used for TLS: {in_words(error)}. Each is a PEM file; "
            "`fleetlearn-coordinator certificate` makes a certificate and its key",
        ) from None
    if settings.clients is not None:
        context.verify_mode = ssl.CERT_OPTIONAL  # the gate refuses who shows none, in words, or takes its credential
        try:
            context.load_verify_locations(settings.clients)
        except OSError as error:
            raise FleetError(
                Code.BAD_MESSAGE,
                f"{settings.clients} cannot be used as the CA of devices' certificates: {in_words(error)}; "
                "expected a PEM file",
            ) from None
    return context


def _refuse_password() -> bytes:
    raise ValueError("the key has a password; write it without one, readable by the coordinator's user alone")
