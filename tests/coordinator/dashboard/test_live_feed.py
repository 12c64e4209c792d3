"""Documents and their differences; viewers who do not keep up."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from fleetlearn_coordinator.dashboard.growing_list import GrowingList
from fleetlearn_coordinator.dashboard.live_feed import MOST_WAITING, Feed, Topic, Viewer


class Told:
    """What a viewer makes of what it is told, as the page does (page/live.js)."""

    def __init__(self, viewer: Viewer) -> None:
        self.viewer = viewer
        self.values: dict[str, Any] = {}
        self.lists: dict[str, list[Any]] = {}
        self.messages = 0
        self.ended = False

    async def take(self) -> None:
        """Take all that waits."""
        while self.viewer._waiting:
            message = await self.viewer.next()
            assert message is not None
            content = json.loads(message.removeprefix(b"data: "))
            self.messages += 1
            if content.get("ended"):
                self.ended = True
            elif "values" in content:
                self.values, self.lists = content["values"], content["lists"]
            else:
                self.values |= content["set"]
                for key in content["gone"]:
                    del self.values[key]
                for name, rows in content["add"].items():
                    self.lists[name] += rows


def test_differences_add_up_to_the_document() -> None:
    async def check() -> None:
        values: dict[str, Any] = {"a": 1, "b": {"c": 2}}
        rows = GrowingList(10)
        rows.extend([1, 2])
        looks = 0

        def look() -> dict[str, Any]:
            nonlocal looks
            looks += 1
            return dict(values)

        feed = Feed()
        feed.add(Topic("t", look, {"rows": rows}))
        feed.tell()
        assert looks == 0, "nobody looks, so nothing is made"
        first = Told(feed.join(["t"]))
        await first.take()
        assert (first.values, first.lists) == (values, {"rows": [1, 2]})
        values["a"], values["d"] = 5, None
        del values["b"]
        rows.add(3)
        second = Told(
            feed.join(["t"])
        )  # in between: it has all, and the first is told what changed
        feed.tell()
        rows.add(4)
        feed.tell()
        before = first.messages
        feed.tell()
        for told in (first, second):
            await told.take()
            assert (told.values, told.lists) == ({"a": 5, "d": None}, {"rows": [1, 2, 3, 4]})
        assert first.messages == before + 2, "where nothing changed nothing is said"
        feed.remove("t")
        await first.take()
        assert first.ended

    asyncio.run(check())


def test_what_is_told_is_written_once_for_all() -> None:
    async def check() -> None:
        feed, count = Feed(), 0

        def look() -> dict[str, Any]:
            nonlocal count
            count += 1
            return {"count": count}

        feed.add(Topic("t", look, {}))
        viewers = [feed.join(["t"]) for _ in range(100)]
        assert count == 1
        assert len({id(viewer._waiting[0]) for viewer in viewers}) == 1
        feed.tell()
        assert count == 2
        assert len({id(viewer._waiting[1]) for viewer in viewers}) == 1

    asyncio.run(check())


def test_who_does_not_keep_up_is_dropped_and_the_others_are_not() -> None:
    async def check() -> None:
        feed, rows = Feed(), GrowingList(1000)
        feed.add(Topic("t", dict, {"rows": rows}))
        slow, quick = feed.join(["t"]), Told(feed.join(["t"]))
        for number in range(2 * MOST_WAITING):
            rows.add(number)
            feed.tell()
            await quick.take()
        assert slow.is_dropped
        assert await slow.next() is None
        assert not slow._waiting, "and holds nothing"
        assert quick.lists["rows"] == list(range(2 * MOST_WAITING))

    asyncio.run(check())


def test_a_topic_is_replaced_and_one_that_is_not_there_has_ended() -> None:
    async def check() -> None:
        feed = Feed()
        feed.add(Topic("t", lambda: {"a": 1}, {}))
        told = Told(feed.join(["t", "nowhere"]))
        await told.take()
        assert (told.values, told.ended) == ({"a": 1}, True)
        feed.add(Topic("t", lambda: {"b": 2}, {}))
        await told.take()
        assert told.values == {"b": 2}
        feed.leave(told.viewer)
        feed.tell()
        assert await told.viewer.next() is None

    asyncio.run(check())


def test_a_list_that_is_full_says_what_is_new() -> None:
    rows = GrowingList(3)
    rows.extend(range(5))
    assert (rows.since(5), rows.since(4), rows.since(3), rows.since(0)) == (
        [],
        [4],
        [3, 4],
        [2, 3, 4],
    )


def test_the_last_that_viewers_hear_is_how_it_is_at_the_end() -> None:
    async def check() -> None:
        feed, values = Feed(), {"a": 1}
        feed.add(Topic("t", lambda: dict(values), {}))
        told, slow = Told(feed.join(["t"])), feed.join(["t"])
        await told.take()
        values["a"] = 2
        closing = asyncio.create_task(feed.close())
        await asyncio.sleep(0)
        await told.take()
        assert told.values == {"a": 2}
        assert await told.viewer.next() is None
        feed.leave(told.viewer)
        await closing  # which does not wait long for the other
        assert slow._waiting

    asyncio.run(check())
