"""What a coordinator asks the helper, and what the helper answers: MessagePack, over HTTPS.

``POST /v1/sum`` takes a ``MaskSumRequest``. The answer is a ``MaskSumAnswer`` (status 200) or a
``MaskSumRefusal`` (any other). ``GET /v1/helper`` returns a ``HelperCard``.
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from fleetlearn_protocol.errors import Code, ProtocolError
from fleetlearn_protocol.messages import MOST_REPORTS, Digest, Identifier
from fleetlearn_protocol.secure.about import (
    MaskedUpdate,
    MaskTerms,
    about_update,
    digest_of_set,
    signed_seed,
)

SUM_PATH = "/v1/sum"
CARD_PATH = "/v1/helper"
MEDIA_TYPE = "application/msgpack"
MOST_ELEMENTS = 2**28
"""Elements of a mask: its sum has 1 GiB."""
REPORT_BYTES = 512
"""Most bytes of a report in a request: texts of 64 bytes, digests, the sealed seed, keys."""
MOST_REFUSED = 1000
"""Devices that a refusal names at most."""

Bytes32 = Annotated[bytes, Meta(min_length=32, max_length=32)]


class RefusalName(str, Enum):
    """Why the helper adds nothing up. The words travel, and never change their meaning."""

    BAD_REQUEST = "bad-request"
    """It cannot be read, or a field is outside its bounds."""
    TOO_LARGE = "too-large"
    """More elements or devices than this helper takes."""
    BUSY = "busy"
    """The helper cannot write what it must remember, or is at a limit: ask again later."""
    WRONG_HELPER = "wrong-helper"
    """The seeds are sealed for another helper's key."""
    TOO_FEW_DEVICES = "too-few-devices"
    """Fewer different devices than the helper, or what the devices signed, wants."""
    DEVICE_TWICE = "device-twice"
    """A device is in it twice with one model, or was in an earlier sum with that model: the
    difference of two such sums could be one update."""
    UNKNOWN_DEVICE = "unknown-device"
    """A device that the helper's own operator has not enrolled, or has revoked."""
    BAD_SIGNATURE = "bad-signature"
    """The device did not sign this seed, for this run, model, size, minimum and task."""
    NOT_OPENED = "not-opened"
    """A seed that was not sealed for this helper about this update."""
    SEED_USED = "seed-used"
    """A seed that is in another sum, or twice in this one."""
    RUN_CHANGED = "run-changed"
    """The run's first sum was of another bundle, or of updates of another size."""
    MODELS_DIFFER = "models-differ"
    """The devices signed that all of them train one model in one round, and these did not."""


TRY_AGAIN = frozenset({RefusalName.BUSY})
"""After these the same request may be answered later."""
WITHOUT_THEM = frozenset(
    {
        RefusalName.UNKNOWN_DEVICE,
        RefusalName.BAD_SIGNATURE,
        RefusalName.NOT_OPENED,
        RefusalName.DEVICE_TWICE,
        RefusalName.SEED_USED,
    }
)
"""After these the sum may be asked for without the devices that the refusal names."""


class SealedReport(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True, gc=False
):
    """One device's part: what it sent to the coordinator beside its masked update."""

    device: Identifier
    task: Identifier
    round: Annotated[int, Meta(ge=0, le=2**53 - 1)]
    model: Digest
    sealed: Annotated[bytes, Meta(min_length=80, max_length=80)]
    """The seed, sealed for the helper."""
    signature: Annotated[bytes, Meta(min_length=64, max_length=64)]
    """Ed25519, by the device's key, over ``about.signed_seed``."""


class MaskSumRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The sum of the masks of exactly these updates is asked for."""

    helper: Bytes32
    """The public key that the seeds are sealed for."""
    run: Identifier
    bundle: Digest
    size: Annotated[int, Meta(ge=1, le=MOST_ELEMENTS)]
    """Elements of each mask."""
    minimum: Annotated[int, Meta(ge=2, le=MOST_REPORTS)]
    """The fewest devices, as each device signed it."""
    training: Digest
    """What is trained, as each device signed it: ``task_terms.training_digest``."""
    one_model: bool
    """Whether each device signed that all reports are of one round and one model."""
    reports: Annotated[tuple[SealedReport, ...], Meta(min_length=1, max_length=MOST_REPORTS)]

    def terms(self) -> MaskTerms:
        """Return what the reports have in common."""
        return MaskTerms(
            self.helper,
            self.run,
            self.bundle,
            self.size,
            self.minimum,
            self.training,
            self.one_model,
        )

    def about(self) -> list[bytes]:
        """Return what each report's seed is sealed about, in the order of the reports."""
        terms = self.terms()
        return [
            about_update(terms, MaskedUpdate(each.device, each.task, each.round, each.model))
            for each in self.reports
        ]

    def signed(self) -> list[bytes]:
        """Return what the device of each report signed, in the order of the reports."""
        pairs = zip(self.about(), self.reports, strict=True)
        return [signed_seed(about, report.sealed) for about, report in pairs]

    def digest(self) -> bytes:
        """Return the set's name: 32 bytes, whatever the order of the reports."""
        return digest_of_set(self.signed())


class MaskSumAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The sum of the masks of the set with this name."""

    digest: Bytes32
    """The set's, so that an answer to another request is no answer to this one."""
    words: Annotated[bytes, Meta(max_length=4 * MOST_ELEMENTS)]
    """uint32, little-endian, one for each element, modulo 2^32."""


class MaskSumRefusal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Nothing was added up, and no seed counts as used by this request."""

    name: RefusalName
    text: Annotated[str, Meta(max_length=1000)]
    """For people."""
    devices: Annotated[tuple[Identifier, ...], Meta(max_length=MOST_REFUSED)] = ()
    """Whose reports are at fault, where some are."""


class HelperCard(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a helper says of itself. A device trusts the key that it was given, not this one."""

    key: Bytes32
    """Its public X25519 key."""
    minimum: int
    """The fewest devices of a sum, whatever the devices signed."""
    most_elements: int


Read = TypeVar("Read", bound=msgspec.Struct)


def write_message(message: msgspec.Struct) -> bytes:
    """Return a message's bytes."""
    return msgspec.msgpack.encode(message)


def read_message(content: bytes, kind: type[Read]) -> Read:
    """Return the message of this kind. Raises ProtocolError (bad-message) where the bytes are
    none."""
    try:
        return msgspec.msgpack.decode(content, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        text = f"{len(content)} bytes that are no {kind.__name__}: {error}"
        raise ProtocolError(Code.BAD_MESSAGE, text) from None
