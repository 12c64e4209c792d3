"""Memory stays flat, whatever the inputs are."""

from __future__ import annotations

import gc
import logging
import pathlib
import re
import tracemalloc
from collections.abc import Iterator
from random import Random

import pytest

from tests.fuzz import seeds
from tests.fuzz.mutation import mutate
from tests.fuzz.targets import administration, page, sockets, streams
from tests.fuzz.targets.table import TARGETS

ALLOWED = 200 * 1024
"""Bytes that may stay: caches that are not full yet, such as those of encodings and regular
expressions."""


@pytest.fixture(autouse=True, scope="module")
def ended() -> Iterator[None]:
    logging.disable()  # pytest keeps the lines of a test
    yield
    logging.disable(logging.NOTSET)
    sockets.stop()
    streams.stop()
    administration.stop()
    page.stop()


def growth(name: str, inputs: int) -> int:
    """Return how many bytes more are in use after so many inputs than after the first of them."""
    random, known, run = Random(5), [*TARGETS[name].seeds(), *seeds.corpus(name)], TARGETS[name].run
    warm = [mutate(random.choice(known), random, known) for _ in range(min(inputs, 300))]
    tracemalloc.start()
    try:
        for data in [*known, *warm]:
            run(data)
        before = in_use()
        for _ in range(inputs):
            run(mutate(random.choice(known), random, known))
        return in_use() - before
    finally:
        tracemalloc.stop()


def in_use() -> int:
    """Return how many bytes are in use, without the coordinators that serve inputs and Python's
    cache of patterns. What pathlib allocates does not count either: it interns names, and Python's
    table of interned strings grows by megabytes at a time."""
    sockets.stop()
    re.purge()
    gc.collect()
    snapshot = tracemalloc.take_snapshot().filter_traces(
        [tracemalloc.Filter(False, pathlib.__file__)]
    )
    return sum(trace.size for trace in snapshot.traces)


@pytest.mark.parametrize("name", ["sessions", "chunks", "reports"])
def test_memory_stays_flat(name: str) -> None:
    assert growth(name, 200) < ALLOWED


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_memory_stays_flat_over_many_inputs(name: str) -> None:
    assert growth(name, 10_000) < ALLOWED


def test_a_leak_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[bytes] = []
    monkeypatch.setitem(
        TARGETS, "chunks", TARGETS["chunks"]._replace(run=lambda data: kept.append(bytes(2000)))
    )
    assert growth("chunks", 200) >= ALLOWED
