"""Batches as numbered frames: they come whole and in order, or it is noticed."""

from __future__ import annotations

import random
from collections import deque

import pytest
from fleetlearn_coordinator.gateways.numbered_frames import (
    HEADER,
    WINDOW,
    FrameKind,
    MissingFrameError,
    NumberedFrames,
    begins,
    end_of_unknown,
)

LONGEST = HEADER.size + 100


def taken(end: NumberedFrames, frames: list[bytes]) -> list[bytes]:
    found = [end.take(frame)[1] for frame in frames]
    return [batch for batch in found if batch is not None]


@pytest.mark.parametrize("size", [0, 1, 99, 100, 101, 200, 1234])
def test_a_batch_comes_whole_whatever_its_length(size: int) -> None:
    one, other = NumberedFrames(LONGEST), NumberedFrames(LONGEST)
    batches = [bytes([number]) * size for number in range(3)]
    for batch in batches:
        one.add(batch)
    frames = list(one.frames())
    assert max(map(len, frames)) <= LONGEST
    assert len(frames) == 3 * max(1, -(-size // 100))
    assert [begins(frame) for frame in frames] == [True, *[False] * (len(frames) - 1)]
    assert taken(other, frames) == batches


def test_no_more_is_sent_than_is_taken_in() -> None:
    longest = 2**20
    one, other = NumberedFrames(longest), NumberedFrames(longest)
    one.add(bytes(3 * WINDOW))
    first = list(one.frames())
    assert WINDOW <= sum(map(len, first)) <= WINDOW + longest
    assert one.waiting == 3 * WINDOW - sum(len(frame) - HEADER.size for frame in first)
    assert not list(one.frames())
    assert not taken(other, first)
    assert other.must_tell
    one.take(other.signal(FrameKind.BEAT))
    assert not other.must_tell
    rest: list[bytes] = []
    found: list[bytes] = []
    while one.waiting:
        rest = list(one.frames())
        found = taken(other, rest)
        one.take(other.signal(FrameKind.BEAT))
    assert found == [bytes(3 * WINDOW)]


def test_what_is_missing_comes_twice_or_late_is_noticed() -> None:
    for change in (
        lambda frames: frames[1:],
        lambda frames: [frames[0], *frames[2:]],
        lambda frames: [frames[0], frames[0], *frames[1:]],
        lambda frames: [frames[1], frames[0], *frames[2:]],
    ):
        one, other = NumberedFrames(LONGEST), NumberedFrames(LONGEST)
        one.add(bytes(1000))
        with pytest.raises(MissingFrameError, match="messages were lost"):
            taken(other, change(list(one.frames())))
    one, other = NumberedFrames(LONGEST), NumberedFrames(LONGEST)
    one.add(b"the last one")
    list(one.frames())
    with pytest.raises(MissingFrameError, match="number 0 was expected, and 1 came"):
        other.take(one.signal(FrameKind.BEAT))


@pytest.mark.parametrize("frame", [b"", b"\0" * (HEADER.size - 1), b"\7" + bytes(HEADER.size)])
def test_what_is_no_frame_is_refused(frame: bytes) -> None:
    with pytest.raises(MissingFrameError, match="another program"):
        NumberedFrames(LONGEST).take(frame)
    assert not begins(frame)


def test_a_batch_that_never_ends_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleetlearn_coordinator.gateways.numbered_frames.LONGEST_BATCH", 150)
    one, other = NumberedFrames(LONGEST), NumberedFrames(LONGEST)
    one.add(bytes(200))
    with pytest.raises(MissingFrameError, match="another program"):
        taken(other, list(one.frames()))


def test_the_end_of_an_unknown_bus_is_an_end_wherever_it_is() -> None:
    fresh = NumberedFrames(LONGEST)
    assert fresh.take(end_of_unknown()) == (FrameKind.END, None)


@pytest.mark.parametrize("seed", range(20))
def test_two_ends_that_speak_at_random(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for ever, and nothing is lost."""
    monkeypatch.setattr("fleetlearn_coordinator.gateways.numbered_frames.WINDOW", 500)
    luck = random.Random(seed)
    ends = NumberedFrames(LONGEST), NumberedFrames(LONGEST)
    ways: list[deque[bytes]] = [deque(), deque()]
    said: list[list[bytes]] = [[], []]
    heard: list[list[bytes]] = [[], []]

    def hear(side: int) -> None:
        batch = ends[side].take(ways[1 - side].popleft())[1]
        if batch is not None:
            heard[side].append(batch)
        ways[side].extend(ends[side].frames())
        if ends[side].must_tell:
            ways[side].append(ends[side].signal(FrameKind.BEAT))

    for _ in range(400):
        side = luck.randrange(2)
        if luck.random() < 0.3:
            said[side].append(luck.randbytes(luck.randrange(700)))
            ends[side].add(said[side][-1])
            ways[side].extend(ends[side].frames())
        while ways[1 - side] and luck.random() < 0.7:
            hear(side)
    while ends[0].waiting or ends[1].waiting or ways[0] or ways[1]:
        for side in (0, 1):
            while ways[1 - side]:
                hear(side)
    assert heard == [said[1], said[0]]
    assert said[0]
    assert said[1]
