"""The helper's side of transcripts with masked updates: opens the seed that the device has sealed,
and looks at the words without their mask. A real coordinator cannot."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from fleetlearn_protocol.encodings import masked_encoding
from fleetlearn_protocol.formats.masked import words_from_bytes
from fleetlearn_protocol.messages import Task
from fleetlearn_protocol.secure.about import about_update, signed_seed
from fleetlearn_protocol.secure.fixed_point import Words
from fleetlearn_protocol.secure.masks import add_mask
from fleetlearn_protocol.secure.sealed import unseal
from fleetlearn_protocol.secure.task_terms import terms_of, update_of
from values import Mismatch


class Masks:
    """A pair of keys: ``$helper`` is the public one, which tasks name."""

    def __init__(self, public_key: Callable[[], bytes] | None = None) -> None:
        """``public_key``: returns the device's own key, 32 bytes. None: signatures are not
        checked."""
        self._private = X25519PrivateKey.generate()
        self._public_key = public_key
        self._used: dict[bytes, str] = {}
        """Seed -> the task whose update it masks."""

    @property
    def placeholders(self) -> dict[str, Any]:
        return {"$helper": self._private.public_key().public_bytes_raw().hex()}

    def check(
        self,
        message: dict[str, Any],
        check_in: dict[str, Any],
        report: dict[str, Any],
        upload: bytes,
        factor: float,
    ) -> None:
        """Raise Mismatch if the upload is not the update as the task asks for it, with a mask of
        its own.

        message: the task. factor: what the device was told that its staleness leaves; 1 where
        nothing is stale.
        """
        task, device = msgspec.convert(message, Task), check_in["device"]
        assert task.secure is not None
        assert task.clip is not None
        words = words_from_bytes(upload, masked_encoding(task.secure.bits).block_bytes).copy()
        about = about_update(terms_of(task, len(words)), update_of(task, device))
        sealed, signature = (_bytes(report, name) for name in ("sealed", "signature"))
        self._check_signature(signature, signed_seed(about, sealed))
        try:
            seed = unseal(sealed, self._private, about)
        except ValueError as error:
            raise Mismatch(f"the seed cannot be opened: {error}") from None
        if self._used.setdefault(seed, task.task) != task.task:
            raise Mismatch(f"the seed of task {self._used[seed]} masks task {task.task} too")
        add_mask(words, seed, -1)
        most = task.secure.most_weight
        share = 1.0 if most is None else min(check_in["examples"], most) / most
        _check_words(words, task.clip, task.secure.bits, share, factor)

    def _check_signature(self, signature: bytes, content: bytes) -> None:
        if self._public_key is None:
            return
        try:
            Ed25519PublicKey.from_public_bytes(self._public_key()).verify(signature, content)
        except InvalidSignature:
            raise Mismatch(
                "the signature is not the device's, of what PROTOCOL.md says that it signs"
            ) from None


def _bytes(report: dict[str, Any], name: str) -> bytes:
    if report[name] is None:
        raise Mismatch(f"the report has no `{name}`")
    return bytes.fromhex(report[name])


def _check_words(words: Words, clip: float, bits: int, share: float, factor: float) -> None:
    """Raise Mismatch if these are no words of an update of this weight and bound."""
    most = 2**bits - 1
    if int(words.max()) > most:
        raise Mismatch(
            f"without the mask a word is {words.max()}; of {bits} bits it is at most {most}"
        )
    weight = int(words[-1])
    if abs(weight - share * most) >= 1:
        raise Mismatch(f"the weight's word is {weight}; a share of {share:g} is {share * most:g}")
    elements = (2 * words[:-1].astype(np.float64) - most) * (clip / most)
    norm = math.sqrt(math.fsum(elements**2))
    # What the update is multiplied by is known, and each element is off by less than a step.
    allowed = clip * share * factor + math.sqrt(len(elements)) * 2 * clip / most
    if norm > min(allowed, clip):
        raise Mismatch(f"the update's norm is {norm}; expected at most {min(allowed, clip)}")
    if norm == 0:
        raise Mismatch("the update is zeros")
