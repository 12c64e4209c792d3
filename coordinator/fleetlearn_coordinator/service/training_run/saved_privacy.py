"""What a private run's releases leave for the next one, in the ledger and beside the model.

The secret is made once in a run, at the first start with [privacy], and never changes. How many
releases were made is written in the batch of each model, so a release counts exactly when its model
does. The buffers of correlated noise are in the model's file, sealed: they tell as much as the
secret does, and a model's file is given to people.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
from fleetlearn_protocol.errors import Code
from fleetlearn_protocol.vector import Vector
from numpy.typing import NDArray

from fleetlearn_coordinator.aggregation.privacy.release import begin
from fleetlearn_coordinator.aggregation.privacy.rules import PrivacyRules
from fleetlearn_coordinator.aggregation.privacy.sealed import seal, unseal
from fleetlearn_coordinator.aggregation.privacy.state import PrivacyState
from fleetlearn_coordinator.plan.privacy_budget import digest_of
from fleetlearn_coordinator.storage.errors import StoreError
from fleetlearn_coordinator.storage.ledger import Ledger, Metadata, Row
from fleetlearn_coordinator.storage.stored_json import decode

SECRET, STATE = "privacy_secret", "privacy_state"
"""Keys of the metadata."""
NOISE = "noise."
"""Prefix of the buffers' names in a model's file."""


class SavedPrivacy(msgspec.Struct, frozen=True):
    """What the ledger has of a ``PrivacyState``."""

    releases: int
    clip: float
    began: int
    rules: str
    """The digest of the rules that it was made under."""


def privacy_rows(rules: PrivacyRules | None, state: PrivacyState | None) -> list[Row]:
    """Return what is written with a model; nothing without [privacy]."""
    if rules is None or state is None:
        return []
    saved = SavedPrivacy(state.releases, state.clip, state.began, digest_of(rules))
    return [Metadata(STATE, msgspec.json.encode(saved).decode())]


def tensors_of(state: PrivacyState | None) -> dict[str, NDArray[Any]]:
    """Return the buffers as a model's file has them: by name, sealed."""
    if state is None:
        return {}
    return {
        NOISE + name: seal(buffer, state.secret, name) for name, buffer in state.buffers.items()
    }


def take_buffers(tensors: dict[str, Vector]) -> dict[str, NDArray[Any]]:
    """Take the sealed buffers out of what is beside a model in its file. Returns them by their
    names."""
    names = [name for name in tensors if name.startswith(NOISE)]
    return {name.removeprefix(NOISE): tensors.pop(name) for name in names}


def load_privacy(
    rules: PrivacyRules | None, ledger: Ledger, size: int, buffers: Mapping[str, NDArray[Any]]
) -> tuple[PrivacyState | None, list[Row]]:
    """Return the state at the newest model, and what is to be written at this start. ``size``: of
    the model. ``buffers``: those in its file.

    Correlated noise begins from the beginning where the plan's [privacy] has changed, or the newest
    model was made without. What was released stays counted. Raises StoreError (damaged).
    """
    if rules is None:
        return None, []
    rows: list[Row] = []
    secret, saved = ledger.get(SECRET), ledger.get(STATE)
    if secret is None:
        secret = secrets.token_hex(32)
        rows.append(Metadata(SECRET, secret))
    found = (
        None
        if saved is None
        else decode(saved, SavedPrivacy, "what the database says of the releases")
    )
    state = begin(rules, bytes.fromhex(secret), size, 0 if found is None else found.releases)
    if found is None or found.rules != digest_of(rules):
        return state, rows
    state = replace(state, clip=found.clip)
    if buffers.keys() == state.buffers.keys():
        opened = {name: _unseal(each, state.secret, name) for name, each in buffers.items()}
        state = replace(state, began=found.began, buffers=opened)
    return state, rows


def _unseal(sealed: NDArray[Any], secret: bytes, name: str) -> NDArray[np.int64]:
    try:
        return unseal(sealed, secret, name)
    except ValueError as error:
        text = f"the newest model's file: {error}; put the data directory back from a backup"
        raise StoreError(Code.WRONG_HASH, text) from None


def end_noise(ledger: Ledger, releases: int) -> list[Row]:
    """Return the rows with which the next start begins correlated noise from the beginning, as the
    first release after this many. Raises StoreError (damaged)."""
    saved = ledger.get(STATE)
    if saved is None:
        return []
    found = decode(saved, SavedPrivacy, "what the database says of the releases")
    ended = msgspec.structs.replace(found, releases=releases, rules="")
    return [Metadata(STATE, msgspec.json.encode(ended).decode())]
