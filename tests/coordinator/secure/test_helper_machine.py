"""Whatever a coordinator asks, in whatever order: no seed is in two answers, and each sum is exact.
The same machine finds each mistake that is planted in the helper."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np
import pytest
from fleetlearn_coordinator.secure import helper, helper_store
from fleetlearn_coordinator.secure.helper import Helper
from fleetlearn_coordinator.secure.helper_book import OnRecord
from fleetlearn_coordinator.secure.helper_store import HelperStore
from fleetlearn_protocol.secure.fixed_point import Words
from fleetlearn_protocol.secure.helper_messages import MaskSumRequest
from helper_machine import HelperMachine
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

SETTINGS = settings(
    max_examples=20,
    stateful_step_count=15,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


def test_no_seed_is_in_two_answers_and_each_sum_is_exact() -> None:
    run_state_machine_as_test(HelperMachine, settings=SETTINGS)


# Planted mistakes

right_on_record, right_record = HelperStore.on_record, HelperStore.record
right_start = Helper.__init__


def forgets_seeds_and_updates(
    store: HelperStore, asked: MaskSumRequest, seeds: Sequence[bytes]
) -> OnRecord:
    return right_on_record(store, asked, seeds)._replace(used=(), taken=())


@contextmanager
def forgets_updates() -> Iterator[None]:
    """A seed is used once, and a device may mask the same update twice."""

    def on_record(store: HelperStore, asked: MaskSumRequest, seeds: Sequence[bytes]) -> OnRecord:
        return right_on_record(store, asked, seeds)._replace(taken=())

    def record(
        store: HelperStore, asked: MaskSumRequest, seeds: Sequence[bytes], at: float
    ) -> None:
        with patch.object(helper_store, "_updates", lambda asked: []):
            right_record(store, asked, seeds, at)

    with (
        patch.object(HelperStore, "on_record", on_record),
        patch.object(HelperStore, "record", record),
    ):
        yield


def takes_the_run_for_the_set(
    store: HelperStore, asked: MaskSumRequest, seeds: Sequence[bytes]
) -> OnRecord:
    """What was answered once is answered again, and two sets of a run are taken for one."""
    found = right_on_record(store, asked, seeds)
    return found._replace(answered=found.run is not None)


def looks_at_no_size(store: HelperStore, asked: MaskSumRequest, seeds: Sequence[bytes]) -> OnRecord:
    return right_on_record(store, asked, seeds)._replace(run=None)


def checks_no_signature(asked: MaskSumRequest, keys: Mapping[str, bytes]) -> None:
    pass


def adds_in_30_bits(seeds: Iterable[bytes], size: int) -> Words:
    return helper_sum([*seeds], size) & np.uint32(2**30 - 1)


helper_sum = helper.sum_of_masks


def counts_reports(asked: MaskSumRequest, *rest: object) -> None:
    """Reports, and not different devices: nor what the devices signed."""


@contextmanager
def remembers_in_memory() -> Iterator[None]:
    """A restarted helper knows nothing."""
    asked_before: list[tuple[MaskSumRequest, Sequence[bytes]]] = []

    def start(self: Helper, *arguments: object) -> None:
        asked_before.clear()
        right_start(self, *arguments)  # type: ignore[arg-type]

    def record(
        store: HelperStore, asked: MaskSumRequest, seeds: Sequence[bytes], at: float
    ) -> None:
        asked_before.append((asked, seeds))

    def on_record(store: HelperStore, asked: MaskSumRequest, seeds: Sequence[bytes]) -> OnRecord:
        store._database.execute("DELETE FROM seeds")
        store._database.execute("DELETE FROM updates")
        store._database.execute("DELETE FROM sets")
        store._database.execute("DELETE FROM runs")
        for before in asked_before:
            right_record(store, *before, 1.0)
        return right_on_record(store, asked, seeds)

    with (
        patch.object(Helper, "__init__", start),
        patch.object(HelperStore, "record", record),
        patch.object(HelperStore, "on_record", on_record),
    ):
        yield


MISTAKES: dict[str, Callable[[], object]] = {
    "forgets seeds and updates": lambda: _both(forgets_seeds_and_updates),
    "forgets updates": forgets_updates,
    "takes the run for the set": lambda: patch.object(
        HelperStore, "on_record", takes_the_run_for_the_set
    ),
    "looks at no size": lambda: patch.object(HelperStore, "on_record", looks_at_no_size),
    "checks no signature": lambda: patch.object(helper, "check_signatures", checks_no_signature),
    "checks no bounds": lambda: patch.object(helper, "check_bounds", counts_reports),
    "adds in 30 bits": lambda: patch.object(helper, "sum_of_masks", adds_in_30_bits),
    "remembers in memory alone": remembers_in_memory,
}


@contextmanager
def _both(on_record: Callable[..., OnRecord]) -> Iterator[None]:
    """Neither looks, nor has the file refuse a second row."""

    def record(
        store: HelperStore, asked: MaskSumRequest, seeds: Sequence[bytes], at: float
    ) -> None:
        pass

    with (
        patch.object(HelperStore, "on_record", on_record),
        patch.object(HelperStore, "record", record),
    ):
        yield


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_each_mistake_is_found(mistake: str) -> None:
    searched = settings(SETTINGS, max_examples=600, phases=[Phase.generate])
    with MISTAKES[mistake](), pytest.raises((AssertionError, BaseExceptionGroup)):  # type: ignore[attr-defined]
        run_state_machine_as_test(HelperMachine, settings=searched)
