"""What a helper answers and what it refuses, given what is on record. No I/O, no clock.

A helper adds the masks of a set of updates up. Whoever has two such sums whose sets differ by one
update knows that update's mask, and with it the update. So a seed is in one answered set at most,
ever; a set has a minimum of devices that the helper's own operator enrolled; and a device counts
once for each model, because two updates that began from the same model are much the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from hashlib import sha256
from typing import NamedTuple

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from fleetlearn_protocol.errors import clip
from fleetlearn_protocol.secure.helper_messages import (
    MOST_REFUSED,
    MaskSumRefusal,
    MaskSumRequest,
    RefusalName,
)
from fleetlearn_protocol.secure.sealed import unseal
from fleetlearn_protocol.secure.signatures import is_signed

_USED = b"fleetlearn.v1 used seed"


class NotAddedError(Exception):
    """The helper adds nothing up, for a reason with a name."""

    def __init__(self, name: RefusalName, text: str, devices: Collection[str] = ()) -> None:
        """``devices``: whose reports are at fault."""
        named = sorted({*devices})
        if len(named) == 1:
            text = f"{named[0]}: {text}"
        elif named:
            text = f"{len(named)} devices, {named[0]} among them: {text}"
        super().__init__(text)
        self.refusal = MaskSumRefusal(name, clip(text), tuple(named[:MOST_REFUSED]))


class HelperBounds(NamedTuple):
    """What the helper's operator allows."""

    minimum: int
    most_devices: int
    most_elements: int


class RunOnRecord(NamedTuple):
    """What a run's first answered set was about."""

    bundle: str
    size: int


class OnRecord(NamedTuple):
    """What the helper remembers of the things that one request names."""

    run: RunOnRecord | None
    """None: no set of the run was answered yet."""
    answered: bool
    """Whether a set with this name was answered: this very one."""
    used: Collection[bytes]
    """Of the request's seeds, by ``seed_name``, those that are in an answered set."""
    taken: Collection[str]
    """Of the request's devices, those that are in an answered set of this run with the same
    model."""


def seed_name(seed: bytes) -> bytes:
    """Return the name under which a seed is remembered: 32 bytes, which say nothing of the seed."""
    return sha256(_USED + seed).digest()


def check_bounds(asked: MaskSumRequest, helper: bytes, bounds: HelperBounds) -> None:
    """Check what can be seen of a request by itself. ``helper``: this helper's public key. Raises
    NotAddedError."""
    if asked.helper != helper:
        raise NotAddedError(
            RefusalName.WRONG_HELPER,
            f"the seeds are said to be sealed for the key {asked.helper.hex()}; this helper's is "
            f"{helper.hex()}",
        )
    if asked.size > bounds.most_elements:
        raise NotAddedError(
            RefusalName.TOO_LARGE,
            f"masks of {asked.size} elements were asked for; this helper adds at most "
            f"{bounds.most_elements}",
        )
    if len(asked.reports) > bounds.most_devices:
        raise NotAddedError(
            RefusalName.TOO_LARGE,
            f"the masks of {len(asked.reports)} updates were asked for; this helper adds at most "
            f"{bounds.most_devices}",
        )
    devices = {report.device for report in asked.reports}
    least = max(bounds.minimum, asked.minimum)
    if len(devices) < least:
        raise NotAddedError(
            RefusalName.TOO_FEW_DEVICES,
            f"the sum of {len(devices)} different devices was asked for; at least {least} are "
            f"needed ({asked.minimum} by what they signed, {bounds.minimum} by this helper)",
        )
    starts = {(report.round, report.model) for report in asked.reports}
    if asked.one_model and len(starts) > 1:
        raise NotAddedError(
            RefusalName.MODELS_DIFFER,
            f"the updates are of {len(starts)} rounds or models; the devices signed that all of "
            "them are of one",
        )
    pairs = Counter((report.device, report.model) for report in asked.reports)
    if twice := [device for (device, _), times in pairs.items() if times > 1]:
        raise NotAddedError(
            RefusalName.DEVICE_TWICE, "a device is twice in the set with the same model", twice
        )


def check_signatures(asked: MaskSumRequest, keys: Mapping[str, bytes]) -> None:
    """Check that each seed is signed by its device. ``keys``: device -> public Ed25519 key, of
    those that are enrolled. Raises NotAddedError."""
    if unknown := [each.device for each in asked.reports if each.device not in keys]:
        raise NotAddedError(
            RefusalName.UNKNOWN_DEVICE, "not enrolled by this helper's operator", unknown
        )
    signed = zip(asked.reports, asked.signed(), strict=True)
    if forged := [
        report.device
        for report, content in signed
        if not is_signed(keys[report.device], report.signature, content)
    ]:
        raise NotAddedError(
            RefusalName.BAD_SIGNATURE,
            "the signature is not of the enrolled key over this seed, run, bundle, model, size, "
            "minimum, training, round and task",
            forged,
        )


def open_seeds(asked: MaskSumRequest, private: X25519PrivateKey) -> list[bytes]:
    """Return the seeds, in the order of the reports. Raises NotAddedError."""
    seeds, closed = [], []
    for report, about in zip(asked.reports, asked.about(), strict=True):
        try:
            seed = unseal(report.sealed, private, about)
        except ValueError:
            closed.append(report.device)
        else:
            seeds.append(seed)
    if closed:
        raise NotAddedError(
            RefusalName.NOT_OPENED,
            "the seed was sealed for another key, or about another update",
            closed,
        )
    return seeds


def decide(asked: MaskSumRequest, seeds: Sequence[bytes], on_record: OnRecord) -> bool:
    """Return whether the set is new, and is to be remembered before it is answered. False: this
    very set was answered before, and has the same answer. Raises NotAddedError.

    seeds: in the order of the reports. Everything else about the request was checked.
    """
    if on_record.answered:
        return False
    run = on_record.run
    if run is not None and run != (asked.bundle, asked.size):
        raise NotAddedError(
            RefusalName.RUN_CHANGED,
            f"the run {asked.run} has masks of {run.size} elements and the bundle {run.bundle}; "
            f"{asked.size} elements and {asked.bundle} were given",
        )
    times = Counter(seeds)
    reused = _devices(asked, seeds, lambda seed: times[seed] > 1)
    reused += _devices(asked, seeds, lambda seed: seed_name(seed) in on_record.used)
    if reused:
        raise NotAddedError(RefusalName.SEED_USED, "the seed is in another sum", reused)
    if on_record.taken:
        raise NotAddedError(
            RefusalName.DEVICE_TWICE,
            "an earlier sum of this run has the device's update of the same model",
            on_record.taken,
        )
    return True


def _devices(
    asked: MaskSumRequest, seeds: Iterable[bytes], chosen: Callable[[bytes], bool]
) -> list[str]:
    pairs = zip(asked.reports, seeds, strict=True)
    return [report.device for report, seed in pairs if chosen(seed)]
