"""Devices that mask their updates, and what a coordinator has of them: for the helper's tests."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from fleetlearn_protocol.secure.about import MaskedUpdate, MaskTerms, about_update, signed_seed
from fleetlearn_protocol.secure.fixed_point import Words
from fleetlearn_protocol.secure.helper_messages import MaskSumRequest, SealedReport
from fleetlearn_protocol.secure.masks import mask_of
from fleetlearn_protocol.secure.sealed import seal

BUNDLE = "b" * 64
SIZE = 5
MINIMUM = 3
TRAINING = "e" * 64


def model(number: int) -> str:
    """The SHA-256 of a round's model."""
    return hashlib.sha256(b"model %d" % number).hexdigest()


class SecureDevice(NamedTuple):
    """A device with a key of its own, the same in each process."""

    name: str

    @property
    def private(self) -> Ed25519PrivateKey:
        return Ed25519PrivateKey.from_private_bytes(hashlib.sha256(self.name.encode()).digest())

    @property
    def public(self) -> bytes:
        return self.private.public_key().public_bytes_raw()

    def seed(self, terms: MaskTerms, update: MaskedUpdate, draw: int = 0) -> bytes:
        """The seed of an update, by this test's rule; ``draw``: another one for the same."""
        return hashlib.sha256(b"%d" % draw + about_update(terms, update)).digest()

    def report(
        self,
        terms: MaskTerms,
        round: int,
        *,
        task: str = "",
        seed: bytes | None = None,
        signer: SecureDevice | None = None,
        start: str | None = None,
    ) -> SealedReport:
        """What the device sends for the helper. ``signer``: whose key signs. ``start``: the
        SHA-256 of another model than the round's."""
        named = task or f"{self.name}-{round}"
        update = MaskedUpdate(self.name, named, round, start or model(round))
        about = about_update(terms, update)
        content = self.seed(terms, update) if seed is None else seed
        sealed = seal(content, terms.helper, about)
        signature = (signer or self).private.sign(signed_seed(about, sealed))
        return SealedReport(*update, sealed, signature)


def terms_of(
    key: bytes,
    *,
    run: str = "run-1",
    bundle: str = BUNDLE,
    size: int = SIZE,
    minimum: int = MINIMUM,
    training: str = TRAINING,
    one_model: bool = False,
) -> MaskTerms:
    return MaskTerms(key, run, bundle, size, minimum, training, one_model)


def request_of(terms: MaskTerms, reports: Iterable[SealedReport]) -> MaskSumRequest:
    return MaskSumRequest(*terms, reports=tuple(reports))


def fleet(names: Sequence[str]) -> list[SecureDevice]:
    return [SecureDevice(name) for name in names]


def ordinary(terms: MaskTerms, devices: Iterable[SecureDevice], round: int = 1) -> MaskSumRequest:
    """The request of a coordinator that keeps to the rules."""
    return request_of(terms, [device.report(terms, round) for device in devices])


def seeds_of(request: MaskSumRequest) -> list[bytes]:
    """The seeds of a request, each drawn by ``SecureDevice.seed``."""
    terms = request.terms()
    return [
        SecureDevice(each.device).seed(
            terms, MaskedUpdate(each.device, each.task, each.round, each.model)
        )
        for each in request.reports
    ]


def exact_sum(seeds: Iterable[bytes], size: int) -> Words:
    """The sum of whole masks, in numbers that do not wrap."""
    total = np.zeros(size, np.uint64)
    for seed in seeds:
        total += mask_of(seed, size)
    return (total % 2**32).astype(np.uint32)


def write_roster(path: Path, devices: Iterable[SecureDevice]) -> Path:
    lines = [f"{device.name} {device.public.hex()}\n" for device in devices]
    path.write_text("# the fleet\n\n" + "".join(lines))
    return path
