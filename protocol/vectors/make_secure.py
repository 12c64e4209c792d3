"""Secure aggregation: numbers, masks, what a seed is about, sealed seeds, signatures, the helper's
messages."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from fleetlearn_protocol.encodings import masked_encoding
from fleetlearn_protocol.formats.masked import words_to_bytes
from fleetlearn_protocol.messages import SecureTask, StepSchedule, Task, VectorReference
from fleetlearn_protocol.secure.about import (
    MaskedUpdate,
    MaskTerms,
    about_update,
    digest_of_set,
    signed_seed,
)
from fleetlearn_protocol.secure.fixed_point import Words, to_words, weighted_sum, weighted_words
from fleetlearn_protocol.secure.helper_messages import (
    MaskSumAnswer,
    MaskSumRefusal,
    MaskSumRequest,
    RefusalName,
    SealedReport,
    write_message,
)
from fleetlearn_protocol.secure.masks import add_mask, mask_of
from fleetlearn_protocol.secure.sealed import seal
from fleetlearn_protocol.secure.task_terms import terms_of, training_digest, update_of
from make_pairwise import session

# RFC 7748, section 6.1: Alice's private key, and Bob's, who is the helper here.
ALICE = "77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a"
BOB = "5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb"
SEED = bytes(range(32)).hex()
MODEL, BUNDLE = "0a" * 32, "0b" * 32


def secure() -> dict[str, Any]:
    helper = X25519PrivateKey.from_private_bytes(bytes.fromhex(BOB))
    public = helper.public_key().public_bytes_raw()
    own = X25519PrivateKey.from_private_bytes(bytes.fromhex(ALICE))
    signer = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(SEED))
    task = _task(public)
    terms = MaskTerms(public, "run-1", BUNDLE, 5, 3, training_digest(task), False)
    updates = [
        MaskedUpdate("camera-7", "c7.12", 12, MODEL),
        MaskedUpdate("roof", "r.9007199254740991", 2**53 - 1, "ff" * 32),
        MaskedUpdate("a", "0", 0, "00" * 32),
    ]
    about = [about_update(terms, update) for update in updates]
    sealed = [seal(bytes.fromhex(SEED), public, each, own) for each in about]
    signed = [signed_seed(*pair) for pair in zip(about, sealed, strict=True)]
    reports = [
        SealedReport(*update, each, signer.sign(content))
        for update, each, content in zip(updates, sealed, signed, strict=True)
    ]
    words = _words()
    request = MaskSumRequest(*terms, reports=tuple(reports))
    first = bytearray(sealed[0])
    first[40] ^= 1
    return {
        "words": [words, _words(12)],
        "masks": [_mask(SEED, 5), _mask("00" * 32, 3), _mask(SEED, 17)],
        "masked": [_masked(words["words"], SEED)],
        "sums": [_sum(18), _sum(12)],
        "uploads": [
            _upload(about[0], public, 1.0, 1.0),
            _upload(about[1], public, 0.3, 0.4),
            _upload(about[0], public, 0.5, 1.0, 12),
        ],
        "training": _trainings(task),
        "about": [
            {
                "name": update.device,
                "helper": public.hex(),
                "run": terms.run,
                "bundle": terms.bundle,
                "size": terms.size,
                "minimum": terms.minimum,
                "training": terms.training,
                "one_model": terms.one_model,
                **update._asdict(),
                "bytes": each.hex(),
            }
            for update, each in zip(updates, about, strict=True)
        ],
        "sealed": [
            {
                "name": update.device,
                "content": SEED,
                "one_use": ALICE,
                "private": BOB,
                "public": public.hex(),
                "about": each.hex(),
                "sealed": made.hex(),
            }
            for update, each, made in zip(updates, about, sealed, strict=True)
        ],
        "not_opened": [
            _closed("about another update", BOB, about[1], sealed[0]),
            _closed("about nothing", BOB, b"", sealed[0]),
            _closed("for another key", ALICE, about[0], sealed[0]),
            _closed("one bit of the seed", BOB, about[0], bytes(first)),
            _closed("a tag too short", BOB, about[0], sealed[0][:-1]),
            _closed("shorter than nothing sealed", BOB, about[0], sealed[0][:47]),
            _closed("a key of small order", BOB, about[0], bytes(32) + sealed[0][32:]),
        ],
        "signed": [
            {
                "name": update.device,
                "about": each.hex(),
                "sealed": made.hex(),
                "bytes": content.hex(),
                "secret": SEED,
                "public": signer.public_key().public_bytes_raw().hex(),
                "signature": signer.sign(content).hex(),
            }
            for update, each, made, content in zip(updates, about, sealed, signed, strict=True)
        ],
        "sets": [
            {
                "name": "three reports, in any order",
                "signed": [content.hex() for content in signed],
                "digest": digest_of_set(signed).hex(),
            }
        ],
        "messages": [
            {"name": "request", "hex": write_message(request).hex()},
            {
                "name": "answer",
                "hex": write_message(
                    MaskSumAnswer(request.digest(), np.arange(5, dtype="<u4").tobytes())
                ).hex(),
            },
            {
                "name": "refusal",
                "hex": write_message(
                    MaskSumRefusal(RefusalName.SEED_USED, "the seed is in another sum", ("roof",))
                ).hex(),
            },
        ],
        "pairwise": [session()],
    }


def _task(helper: bytes) -> Task:
    """A task of an asynchronous round, with a value in each field that is signed."""
    return Task(
        task="5eed-12-7",
        round=12,
        bundle=BUNDLE,
        vectors=(VectorReference("model", MODEL, 16, "float32"),),
        parts={"update": "masked"},
        hyper={"mu": 0.0, "lr": 0.1},
        epochs=2,
        batch_size=20,
        seed=1,
        deadline=600.0,
        algorithm="ditto",
        personal_epochs=3,
        clip=0.5,
        secure=SecureTask("helper", 3, 18, 500, 0.25, helper.hex(), 1.5),
    )


def _trainings(task: Task) -> list[dict[str, Any]]:
    """Tasks, and what of them a device signs: their digest, and the terms of its update."""
    assert task.secure is not None
    plain = msgspec.structs.replace(
        task,
        task="5eed-13-8",
        algorithm="plain",
        personal_epochs=None,
        hyper={},
        secure=SecureTask("helper", 3, 20, helper=task.secure.helper),
    )
    short = msgspec.structs.replace(
        plain,
        parts={"update": "masked24"},
        secure=SecureTask("helper", 3, 12, helper=task.secure.helper),
    )
    scheduled = msgspec.structs.replace(plain, schedule=StepSchedule("cosine", 10, 0.25))
    return [
        {
            "name": name,
            "task": msgspec.to_builtins(each),
            "device": "camera-7",
            "size": 5,
            "digest": training_digest(each),
            "about": about_update(terms_of(each, 5), update_of(each, "camera-7")).hex(),
        }
        for name, each in (
            ("every field", task),
            ("as few fields as can be", plain),
            ("12 bits", short),
            ("a schedule", scheduled),
        )
    ]


def _words(bits: int = 20) -> dict[str, Any]:
    """An update whose elements are both ends, the middle and two others, and how each is
    rounded."""
    update = np.array([1.0, -1.0, 0.0, 0.25, -0.3], "<f4")
    fractions = np.array([0.0, 0.999, 0.5, 0.25, 0.75])
    words = to_words(update, 1.0, bits, fractions)
    return {
        "name": f"{bits} bits, bound 1",
        "update": update.tobytes().hex(),
        "bound": 1.0,
        "bits": bits,
        "fractions": fractions.tolist(),
        "words": words.tolist(),
    }


def _mask(seed: str, size: int) -> dict[str, Any]:
    mask = mask_of(bytes.fromhex(seed), size)
    return {"name": f"{size} elements", "seed": seed, "mask": mask.tolist()}


def _masked(plain: list[int], seed: str) -> dict[str, Any]:
    words = np.array(plain, np.uint32)
    add_mask(words, bytes.fromhex(seed))
    return {"name": "wraps at 2^32", "words": plain, "seed": seed, "masked": words.tolist()}


def _sum(bits: int) -> dict[str, Any]:
    """Three updates with their weights, masked, as they travel; the masks' sum, and what is left
    of theirs without it."""
    rows = [([0.5, -0.25], 1.0), ([0.125, 0.0], 0.5), ([-0.25, 0.25], 0.25)]
    total, masks, reports = np.zeros(3, np.uint32), np.zeros(3, np.uint32), []
    for number, (elements, share) in enumerate(rows, 1):
        update, fractions = np.array(elements, "<f4"), np.array([0.25, 0.5, 0.75])
        words = weighted_words(update, share, 1.0, bits, fractions)
        seed = bytes([number]) * 32
        mask = mask_of(seed, 3)
        total += words + mask
        masks += mask
        report = {"update": update.tobytes().hex(), "share": share, "words": words.tolist()}
        report |= {"fractions": fractions.tolist(), "seed": seed.hex()}
        reports.append(report | {"part": _part(words + mask, bits)})
    found = weighted_sum(total - masks, 3, 1.0, bits)
    return {
        "name": f"three updates of {bits} bits, bound 1",
        "bound": 1.0,
        "bits": bits,
        "reports": reports,
        "masked": total.tolist(),
        "masks": masks.tolist(),
        "total": found.total.tolist(),
        "weight": found.weight,
    }


def _part(masked: Words, bits: int) -> str:
    """Masked words as they travel."""
    return words_to_bytes(masked, masked_encoding(bits).block_bytes).hex()


def _upload(
    about: bytes, helper: bytes, share: float, factor: float, bits: int = 20
) -> dict[str, Any]:
    """What leaves a device, from the update on. A fraction is a word of a mask, over 2^32."""
    update, bound = np.array([0.5, -0.5, 0.25, 0.0], "<f4"), 0.76
    rounding, seed, size = bytes([2]) * 32, bytes([3]) * 32, len(update) + 1
    fractions = mask_of(rounding, size) / 2.0**32
    words = weighted_words(update * np.float32(share * factor), share, bound, bits, fractions)
    sealed = seal(seed, helper, about, X25519PrivateKey.from_private_bytes(bytes.fromhex(ALICE)))
    signer = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(SEED))
    return {
        "name": f"share {share:g}, factor {factor:g}, {bits} bits",
        "update": update.tobytes().hex(),
        "share": share,
        "factor": factor,
        "bound": bound,
        "bits": bits,
        "rounding": rounding.hex(),
        "seed": seed.hex(),
        "one_use": ALICE,
        "helper": helper.hex(),
        "secret": SEED,
        "about": about.hex(),
        "words": words.tolist(),
        "part": _part(words + mask_of(seed, size), bits),
        "sealed": sealed.hex(),
        "signature": signer.sign(signed_seed(about, sealed)).hex(),
    }


def _closed(name: str, private: str, about: bytes, sealed: bytes) -> dict[str, Any]:
    return {"name": name, "private": private, "about": about.hex(), "sealed": sealed.hex()}
