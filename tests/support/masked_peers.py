"""A device by hand whose updates are masked, for tests of the coordinator's side of it."""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

import msgspec
import numpy as np
from fleetlearn_protocol.computations.layout import Sums
from fleetlearn_protocol.encodings import find_encoding, word_bytes
from fleetlearn_protocol.formats.masked import words_to_bytes
from fleetlearn_protocol.messages import Report, Task
from fleetlearn_protocol.secure.about import about_update, signed_seed
from fleetlearn_protocol.secure.distributed_noise import noisy_words
from fleetlearn_protocol.secure.fixed_point import Words, weighted_words
from fleetlearn_protocol.secure.masks import add_mask
from fleetlearn_protocol.secure.sealed import seal
from fleetlearn_protocol.secure.task_terms import terms_of, update_of
from fleetlearn_protocol.secure.whole_words import sums_to_words
from fleetlearn_protocol.vector import Vector
from helper_fleet import SecureDevice

SECURE: dict[str, Any] = {
    "round__minimum": 2,
    "round__weighting": "uniform",
    "secure__mode": "helper",
    "secure__helper": "https://helper.example:8770",
    "secure__key": "de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f",
    "secure__certificate": "b" * 64,
    "secure__clip": 300.0,
}
"""Settings of ``plan_text``. The key is Bob's of RFC 7748, section 6.1."""
CAN_MASK = ("clip", "secure")
"""What such a device says in ``check-in.privacy``."""


class MaskedUpload(NamedTuple):
    """What a device reports and sends."""

    report: Report
    content: bytes
    seed: bytes


def masked_upload(task: Task, name: str, update: Vector, factor: float = 1.0) -> MaskedUpload:
    """Mask an update as its task says, with a seed by the names of the task and the device."""
    assert task.secure is not None
    assert task.clip is not None
    seed = _seed_of(task, name)
    fractions = np.random.default_rng(0).random(len(update) + 1)
    scaled = np.asarray(update * factor, np.float32)
    if task.secure.noise is None:
        words = weighted_words(scaled, 1.0, task.clip, task.secure.bits, fractions)
    else:
        words = noisy_words(scaled, task.clip, task.secure.bits, task.secure.noise, seed)
    return masked_words(task, name, words)


def masked_sums(task: Task, name: str, sums: Sums) -> MaskedUpload:
    """The same of a device's sums."""
    return masked_words(task, name, sums_to_words(sums))


def _seed_of(task: Task, name: str) -> bytes:
    return hashlib.sha256(f"{task.task} {name}".encode()).digest()


def masked_words(task: Task, name: str, words: Words) -> MaskedUpload:
    """Mask words, in place, and say what their task asks for."""
    device, seed = SecureDevice(name), _seed_of(task, name)
    add_mask(words, seed)
    ((part, asked),) = task.parts.items()
    encoding = find_encoding(asked)
    content = bytes(words_to_bytes(words, word_bytes(encoding)))
    terms = terms_of(task, len(words))
    about = about_update(terms, update_of(task, name))
    sealed = seal(seed, terms.helper, about)
    report = Report(
        task.task,
        task.round,
        (encoding.part(part, content),),
        1,
        1,
        float(task.epochs),
        True,
        0.0,
        sealed=sealed.hex(),
        signature=device.private.sign(signed_seed(about, sealed)).hex(),
    )
    return MaskedUpload(report, content, seed)


def otherwise(upload: MaskedUpload, **fields: Any) -> MaskedUpload:
    """The same with other fields of the report."""
    return upload._replace(report=msgspec.structs.replace(upload.report, **fields))
