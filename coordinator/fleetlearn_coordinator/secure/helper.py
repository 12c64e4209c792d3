"""The helper's work: checks a request, remembers its seeds, and adds their masks up."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
from fleetlearn_protocol.errors import FleetError, ProtocolError
from fleetlearn_protocol.secure.fixed_point import Words
from fleetlearn_protocol.secure.helper_messages import (
    HelperCard,
    MaskSumAnswer,
    MaskSumRefusal,
    MaskSumRequest,
    RefusalName,
    read_message,
)
from fleetlearn_protocol.secure.masks import MaskAdder

from fleetlearn_coordinator.secure.helper_book import (
    HelperBounds,
    NotAddedError,
    check_bounds,
    check_signatures,
    decide,
    open_seeds,
)
from fleetlearn_coordinator.secure.helper_store import HelperStore

logger = logging.getLogger("fleetlearn.helper")


class Helper:
    """What answers requests. Several threads may use it."""

    def __init__(
        self, database: Path, bounds: HelperBounds, clock: Callable[[], float] = time.time
    ) -> None:
        """``clock``: returns the Unix time. Raises StoreError where the file cannot be used."""
        self._path, self._bounds, self._clock = database, bounds, clock
        with closing(HelperStore(database)) as store:
            self._private = store.private_key()
        key = self._private.public_key().public_bytes_raw()
        self.card = HelperCard(key, bounds.minimum, bounds.most_elements)

    def answer(self, body: bytes) -> MaskSumAnswer | MaskSumRefusal:
        """Return what a request's bytes are answered."""
        try:
            asked = read_message(body, MaskSumRequest)
        except ProtocolError as error:
            return MaskSumRefusal(RefusalName.BAD_REQUEST, error.text)
        try:
            seeds = self._allowed(asked)
        except NotAddedError as refused:
            name, text = refused.refusal.name, refused.refusal.text
            logger.warning("run %s: %s is refused: %s", asked.run, name.value, text)
            return refused.refusal
        except FleetError as error:  # a full disk, or another process in the way
            logger.error("run %s: a sum cannot be answered now: %s", asked.run, error.text)
            text = "the helper cannot write what it must remember; its log says why"
            return MaskSumRefusal(RefusalName.BUSY, text)
        total = sum_of_masks(seeds, asked.size)
        return MaskSumAnswer(asked.digest(), total.astype("<u4", copy=False).tobytes())

    def _allowed(self, asked: MaskSumRequest) -> list[bytes]:
        """Return the seeds of a set that may be answered. They are on record when this returns.
        Raises NotAddedError; FleetError where they cannot be written."""
        check_bounds(asked, self.card.key, self._bounds)
        with closing(HelperStore(self._path)) as store:
            # Of this very set the sum may be known already: a device that was revoked since changes
            # nothing of that, and the other devices' updates would be lost.
            answered = store.was_answered(asked)
            names = (each.device for each in asked.reports)
            check_signatures(asked, store.keys(names, also_revoked=answered))
            seeds = open_seeds(asked, self._private)
            with store.transaction():
                new = decide(asked, seeds, store.on_record(asked, seeds))
                if new:
                    store.record(asked, seeds, self._clock())
        word = "answered" if new else "answered again"
        logger.info("run %s: the sum of %d masks is %s", asked.run, len(seeds), word)
        return seeds


def sum_of_masks(seeds: list[bytes], size: int) -> Words:
    """Return the sum of the masks of these seeds: uint32, shape (size,), modulo 2^32."""
    total = np.zeros(size, np.uint32)
    adder = MaskAdder(size)
    for seed in seeds:
        adder.add(total, seed)
    return total
