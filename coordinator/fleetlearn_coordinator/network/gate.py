"""Decides who may open a connection, by its certificate or the headers of its first request, before
the WebSocket is accepted."""

from __future__ import annotations

import re
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
from fleetlearn_protocol.errors import Code, ProtocolError
from fleetlearn_protocol.messages import CheckIn
from websockets.datastructures import Headers

from fleetlearn_coordinator.conversation.pending import Pending
from fleetlearn_coordinator.network.peer_log import logger
from fleetlearn_coordinator.storage.errors import StoreUnavailableError
from fleetlearn_coordinator.storage.identities import EnrolmentError, Identities, Known

SECRET = re.compile(r"[A-Za-z0-9_-]{43,128}")
"""A credential or a token: at least 256 bits in base64url (RFC 4648, section 5)."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
PREFIX = "fleetlearn."
"""Browsers can set no header: a page offers subprotocols ``fleetlearn.credential.SECRET`` and so on
beside the real one, which is the only one that is ever answered."""
MOST_TAGS = 16


CAUSE_OF = {
    HTTPStatus.BAD_REQUEST: "bad-request",
    HTTPStatus.UNAUTHORIZED: "credentials",
    HTTPStatus.FORBIDDEN: "credentials",
    HTTPStatus.TOO_MANY_REQUESTS: "too-many",
    HTTPStatus.SERVICE_UNAVAILABLE: "unavailable",
}
"""Why a request that opens a connection is refused, by the status that it is answered."""
CAUSES = ("tls", "web-page", *dict.fromkeys(CAUSE_OF.values()))
"""All causes for which a connection is refused before it is open."""


class RefusalError(Exception):
    """The connection is not accepted."""

    def __init__(self, status: HTTPStatus, text: str, cause: str = "") -> None:
        """``cause``: for who counts, one of CAUSES; empty: what the status stands for."""
        super().__init__(text)
        self.status, self.text = status, text
        self.cause = cause or CAUSE_OF[status]


def too_often(device: str) -> RefusalError:
    """Return why a device may not check in now that does so more often than it may."""
    return RefusalError(
        HTTPStatus.TOO_MANY_REQUESTS,
        f"{device} connects more often than a device may ([limits] of the coordinator's "
        "service file). Try again later",
    )


class Offered(NamedTuple):
    """What a request says of its device. Empty: nothing."""

    credential: str = ""
    device: str = ""
    token: str = ""
    next: str = ""
    """The credential that the device will change to."""


def offered_by(headers: Headers) -> Offered:
    """Raises RefusalError where a value is not what it should be, or is there twice."""
    values = {
        "credential": [value.removeprefix("Bearer ") for value in headers.get_all("Authorization")],
        "device": headers.get_all("Fleetlearn-Device"),
        "token": headers.get_all("Fleetlearn-Enrolment"),
        "next": headers.get_all("Fleetlearn-Next-Credential"),
    }
    for line in headers.get_all("Sec-WebSocket-Protocol"):
        for protocol in line.split(","):
            kind, _, value = protocol.strip().removeprefix(PREFIX).partition(".")
            if protocol.strip().startswith(PREFIX) and kind in values:
                values[kind] = [*values[kind], value]
    for kind, found in values.items():
        pattern = NAME if kind == "device" else SECRET
        if len(found) > 1 or not all(map(pattern.fullmatch, found)):
            raise RefusalError(
                HTTPStatus.BAD_REQUEST, f"the {kind} in the request is not one, or is there twice"
            )
    return Offered(**{kind: found[0] for kind, found in values.items() if found})


def certified_by(certificate: Mapping[str, Any]) -> tuple[str, float]:
    """Return the device that a certificate is of, and the Unix time from which it is valid. The
    device's name is the subject's common name, its only one (RFC 5280, 4.1.2.6). Raises
    RefusalError.

    ``certificate``: as ``SSLObject.getpeercert`` returns it. TLS has checked whose it is, and that
    it is valid now.
    """
    names = [
        value
        for part in certificate.get("subject", ())
        for kind, value in part
        if kind == "commonName"
    ]
    if len(names) != 1 or not NAME.fullmatch(names[0]):
        raise RefusalError(
            HTTPStatus.FORBIDDEN,
            f"the certificate's subject has the common names {names!r:.200}; expected one, the "
            "device's name: 1 to 64 letters, digits and . _ -",
        )
    return names[0], float(ssl.cert_time_to_seconds(certificate["notBefore"]))


class Doorkeeper(Protocol):
    """Who decides which devices may connect: a ``Gate`` here, or one in another process."""

    def check(
        self, headers: Headers, certificate: Mapping[str, Any] | None, count: Callable[[str], None]
    ) -> Known | Pending[Known | RefusalError | None] | None:
        """As ``Gate.check``. The answer may come later, of a device that was counted elsewhere;
        None: everybody may connect."""

    def look(self) -> Callable[[Known], bool] | None:
        """Return what says of a device that was let in whether it is still known; None: nothing has
        changed since the last call. Called each second."""


class Gate:
    """Lets devices in whose credential or certificate is known, and enrols those that bring a
    token."""

    def __init__(self, identities: Identities) -> None:
        self.identities = identities

    def check(
        self,
        headers: Headers,
        certificate: Mapping[str, Any] | None,
        count: Callable[[str], None] = lambda device: None,
    ) -> Known:
        """Return the device that may connect. A ``certificate`` alone decides, where TLS has taken
        one. ``count`` is called with the name of the device once it is certain, and may raise
        RefusalError. Raises RefusalError."""
        certified = certified_by(certificate) if certificate else None
        return self.check_offered(offered_by(headers), certified, count)

    def check_offered(
        self,
        offered: Offered,
        certified: tuple[str, float] | None,
        count: Callable[[str], None] = lambda device: None,
    ) -> Known:
        """The same of what was found in the headers, whose secrets may be hashes, and in the
        certificate (``certified_by``). Raises RefusalError."""
        try:
            if certified is not None:
                known = self._check_certificate(offered, *certified)
                count(known.device)
                return known
            return self._check(offered, count)
        except StoreUnavailableError as error:
            logger.error("nobody can be let in: %s", error.text)
            raise RefusalError(
                HTTPStatus.SERVICE_UNAVAILABLE,
                "the coordinator cannot look credentials up now; try again later",
            ) from None

    def look(self) -> Callable[[Known], bool] | None:
        if not self.identities.changed():
            return None
        enrolled = self.identities.enrolled()
        return lambda known: enrolled.get(known.device) == known.enrolled

    def _check_certificate(self, offered: Offered, device: str, begin: float) -> Known:
        if offered.device not in ("", device):
            raise RefusalError(
                HTTPStatus.FORBIDDEN,
                f"this certificate is of the device {device}, not of {offered.device}",
            )
        try:
            return self.identities.certified(device, begin, time.time())
        except EnrolmentError as error:
            raise RefusalError(HTTPStatus.FORBIDDEN, str(error)) from None

    def _check(self, offered: Offered, count: Callable[[str], None]) -> Known:
        now = time.time()
        if not offered.credential:
            raise RefusalError(
                HTTPStatus.UNAUTHORIZED,
                "this coordinator takes enrolled devices alone: start the device with a token "
                "(--token), which its operator makes with `fleetlearn-coordinator enrol`, or with "
                "its certificate (--certificate) where it was given one",
            )
        try:
            known = self.identities.find(offered.credential, now, count)
            if known is None:
                known = self._enrol(offered, now)
                count(known.device)
            elif offered.device not in ("", known.device):
                raise RefusalError(
                    HTTPStatus.FORBIDDEN,
                    f"this credential is of the device {known.device}, not of {offered.device}: "
                    "its state directory was copied, or its identity.json was changed",
                )
            if offered.next not in ("", offered.credential):
                self.identities.announce_next(known.device, offered.next)
        except EnrolmentError as error:
            raise RefusalError(HTTPStatus.FORBIDDEN, str(error)) from None
        return known

    def _enrol(self, offered: Offered, now: float) -> Known:
        """Make the device known by its token. Raises RefusalError, EnrolmentError."""
        if not offered.token:
            raise RefusalError(
                HTTPStatus.UNAUTHORIZED,
                "this credential is not known here: it was revoked, or is another coordinator's. A "
                "new token (--token) enrols the device again",
            )
        if not offered.device:
            raise RefusalError(
                HTTPStatus.BAD_REQUEST, "a device that enrols says its name (Fleetlearn-Device)"
            )
        known = self.identities.enrol(offered.device, offered.credential, offered.token, now)
        logger.info("device %s is enrolled", known.device)
        return known


def public_keys(files: Sequence[Path]) -> tuple[str, ...]:
    """Return the public keys of a service's signing keys, which a token brings to its devices.
    Raises FleetError."""
    if not files:
        return ()
    from fleetlearn_coordinator.network.signing import Signer  # few services sign

    return Signer(files).keys


def confirmed(check_in: CheckIn, known: Known) -> CheckIn:
    """Return the check-in of a device that is known, with its operator's tags first. Raises
    ProtocolError (bad-message) if it speaks for another device."""
    if check_in.device != known.device:
        raise ProtocolError(
            Code.BAD_MESSAGE,
            f"this connection's credential is of {known.device}, and {check_in.device} checked in: "
            "a device with a certificate is started with the certificate's name (--name)",
        )
    tags = tuple(dict.fromkeys((*known.tags, *check_in.tags)))[:MOST_TAGS]
    return msgspec.structs.replace(check_in, tags=tags)
