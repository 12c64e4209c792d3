"""A token bucket, worked by hand and over any traffic."""

from __future__ import annotations

import asyncio

import pytest
from fleetlearn_device.limits import byte_rate
from fleetlearn_device.limits.byte_rate import BURST, ByteRate
from hypothesis import given
from hypothesis import strategies as st


def test_what_passes_is_paid_for_by_waiting() -> None:
    now = 100.0
    rate = ByteRate(1000.0, lambda: now)
    assert rate.delay(500) == pytest.approx(0.5)
    now += 0.5  # the wait
    assert rate.delay(1000) == pytest.approx(1.0)
    now += 61.0  # nothing passed for a minute: a quarter of a second was saved up, and no more
    assert rate.delay(1000) == pytest.approx(1.0 - BURST)


@given(
    st.floats(16e3, 1e7),
    st.lists(st.tuples(st.integers(1, 200_000), st.floats(0.0, 3.0)), min_size=1, max_size=40),
)
def test_the_rate_is_kept_over_any_traffic(
    bytes_per_second: float, traffic: list[tuple[int, float]]
) -> None:
    now = 0.0
    rate = ByteRate(bytes_per_second, lambda: now)
    passed = 0
    for size, pause in traffic:
        passed += size
        now += rate.delay(size) + pause
        assert passed <= bytes_per_second * (now + BURST) * (1 + 1e-9) + 1


@pytest.mark.parametrize(
    ("bytes_per_second", "most", "chunk"),
    [(16 * 1024, 131072, 16384), (1e9, 131072, 131072), (16386.5, 131072, 16384), (2e4, 8, 8)],
)
def test_chunks_are_so_small_that_some_pass_each_second(
    bytes_per_second: float, most: int, chunk: int
) -> None:
    assert ByteRate(bytes_per_second).chunk_bytes(most) == chunk


def test_the_wait_is_slept(monkeypatch: pytest.MonkeyPatch) -> None:
    slept = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(byte_rate.asyncio, "sleep", sleep)
    rate = ByteRate(1000.0, lambda: 5.0)
    asyncio.run(rate.passed(200))
    asyncio.run(ByteRate(1000.0, lambda: 5.0).passed(0))
    assert slept == [pytest.approx(0.2)]
