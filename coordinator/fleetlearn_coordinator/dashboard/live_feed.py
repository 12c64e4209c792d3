"""How viewers are told what changes: documents, their differences, and a bounded queue for each
viewer. Within a running event loop.

A document is made, and what changed is written as JSON, once for all viewers, and only while there
are any. A viewer who does not take what is sent is dropped: nobody waits for one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import msgspec

from fleetlearn_coordinator.dashboard.growing_list import GrowingList

LAST_WORDS = 0.5
"""Seconds in which viewers take the last message, as the coordinator stops."""
MOST_WAITING = 16
"""Messages that wait for a viewer; one who has more is dropped. That is 8 s of them."""


class Viewer:
    """Somebody who looks at documents."""

    def __init__(self) -> None:
        self._waiting: deque[bytes] = deque()
        self._news = asyncio.Event()
        self._is_last = False
        """Nothing comes after what waits."""
        self.is_dropped = False

    def put(self, message: bytes) -> None:
        """Send a message, or drop the viewer if too many wait."""
        if len(self._waiting) >= MOST_WAITING:
            self.drop()
        if not self.is_dropped:
            self._waiting.append(message)
            self._news.set()

    def drop(self) -> None:
        """Send nothing more."""
        self.is_dropped = True
        self._waiting.clear()
        self._news.set()

    def finish(self) -> None:
        """Send nothing after what waits."""
        self._is_last = True
        self._news.set()

    async def next(self) -> bytes | None:
        """Wait for the next message. None: the viewer is dropped, or has had the last one."""
        while not self._waiting:
            if self.is_dropped or self._is_last:
                return None
            self._news.clear()
            await self._news.wait()
        return self._waiting.popleft()


class Topic:
    """A document that changes: values, which are replaced, and lists, which grow."""

    def __init__(
        self,
        name: str,
        look: Callable[[], dict[str, Any]],
        lists: Mapping[str, GrowingList],
    ) -> None:
        """``look``: returns the values as they are now."""
        self.name, self._look, self._lists = name, look, lists
        self._viewers: set[Viewer] = set()
        self._values: dict[str, Any] = {}
        self._counts: dict[str, int] = {}
        self._whole: bytes | None = None
        """The document as all viewers have it, written once for those who join now."""

    @property
    def is_watched(self) -> bool:
        return bool(self._viewers)

    def join(self, viewer: Viewer) -> None:
        """Send the whole document to a viewer, and from now on what changes."""
        if self._whole is None:
            self.tell()
            lists = {name: list(each.rows) for name, each in self._lists.items()}
            most = {name: each.most for name, each in self._lists.items()}
            document = {"topic": self.name, "values": self._values, "lists": lists, "most": most}
            self._whole = _event(document)
        viewer.put(self._whole)
        self._viewers.add(viewer)

    def leave(self, viewer: Viewer) -> None:
        """Send nothing more to a viewer. Harmless where nothing was sent."""
        self._viewers.discard(viewer)

    def tell(self) -> None:
        """Send what changed since the last call, to all viewers."""
        values = self._look()
        changed = {
            key: value
            for key, value in values.items()
            if key not in self._values or self._values[key] != value
        }
        added = {}
        for name, each in self._lists.items():
            if rows := each.since(self._counts.get(name, 0)):
                added[name] = rows
            self._counts[name] = each.count
        gone = [key for key in self._values if key not in values]
        self._values, self._whole = values, None
        if self._viewers and (changed or added or gone):
            message = _event({"topic": self.name, "set": changed, "add": added, "gone": gone})
            self._send(message)

    def end(self) -> None:
        """Tell all viewers that the document is there no more."""
        self._send(_event({"topic": self.name, "ended": True}))
        self._viewers.clear()

    def finish(self) -> None:
        """Tell all viewers what changed, and then nothing more."""
        if self._viewers:
            self.tell()
        for viewer in self._viewers:
            viewer.finish()

    def _send(self, message: bytes) -> None:
        for viewer in list(self._viewers):
            viewer.put(message)
            if viewer.is_dropped:
                self._viewers.discard(viewer)


class Feed:
    """The documents of a process, and who looks at them."""

    def __init__(self) -> None:
        self.topics: dict[str, Topic] = {}

    def add(self, topic: Topic) -> None:
        """Add a document; one of the same name is replaced, and its viewers look at the new one."""
        before = self.topics.get(topic.name)
        self.topics[topic.name] = topic
        if before is not None:
            for viewer in list(before._viewers):
                topic.join(viewer)

    def remove(self, name: str) -> None:
        """Remove a document. Harmless where there is none."""
        topic = self.topics.pop(name, None)
        if topic is not None:
            topic.end()

    def join(self, names: Iterable[str]) -> Viewer:
        """Return a viewer of these documents. Those that are not there are told as ended."""
        viewer = Viewer()
        for name in names:
            if name in self.topics:
                self.topics[name].join(viewer)
            else:
                viewer.put(_event({"topic": name, "ended": True}))
        return viewer

    def leave(self, viewer: Viewer) -> None:
        """The viewer is gone."""
        viewer.drop()
        for topic in self.topics.values():
            topic.leave(viewer)

    async def close(self) -> None:
        """Tell all viewers how it is now, as the last that they hear; wait LAST_WORDS seconds at
        most for them to take it."""
        for topic in self.topics.values():
            topic.finish()
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS):
                while any(topic.is_watched for topic in self.topics.values()):
                    await asyncio.sleep(0.01)

    def tell(self) -> None:
        """Tell all viewers what changed."""
        for topic in list(self.topics.values()):
            if topic.is_watched:
                topic.tell()


def _event(content: Any) -> bytes:
    """Return a server-sent event (HTML, 9.2): one line of JSON."""
    return b"data: " + msgspec.json.encode(content) + b"\n\n"
