"""Keeps the objects that devices may fetch as the run publishes its contents, and signed URLs for
them. What waits for the object store is done in a thread of its own, one thing after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from fleetlearn_protocol import Bundle
from fleetlearn_protocol.errors import FleetError, in_words
from fleetlearn_protocol.frames import Buffer
from fleetlearn_protocol.manifest import MANIFEST

from fleetlearn_coordinator.network.peer_log import logger
from fleetlearn_coordinator.network.transfers.contents import Older
from fleetlearn_coordinator.network.transfers.elsewhere import COMING, Elsewhere
from fleetlearn_coordinator.storage.served_objects import Content, ServedObjects

T = TypeVar("T")

AGAIN = 30.0
"""Seconds until the store is tried again after it could not be reached."""


class StorePublisher(Elsewhere):
    """The run's object store, within a running event loop. A content has a URL once its object is
    there."""

    def __init__(
        self,
        served: ServedObjects,
        bundles: Iterable[Bundle],
        seconds: float,
        changed: Callable[[Mapping[str, str]], object] = lambda urls: None,
    ) -> None:
        """``seconds``: for which a URL can be used. ``changed``: called with all URLs, by SHA-256,
        when there are others."""
        super().__init__()
        self._served, self._seconds, self._say_changed = served, seconds, changed
        self._bundles: dict[str, Content] = dict(_bundle_contents(bundles))
        self._contents: dict[str, Content] = {}
        """What is to be published: the newest vectors and the older ones."""
        self._loop = asyncio.get_running_loop()
        self._thread = ThreadPoolExecutor(1, "served-objects")
        self._working = self._closed = False
        self._wanted = True
        """The store is not as it should be yet."""
        self._pause_until = 0.0
        self._urls: dict[str, str] = {}
        """COMING for contents that are being published."""
        self._signed = 0.0
        """When they were signed, by the event loop's clock."""

    def url(self, sha256: str) -> str | None:
        return self._urls.get(sha256)

    def publish(self, newest: Mapping[str, Buffer], older: Mapping[str, Older]) -> None:
        self._contents = {sha256: memoryview(content) for sha256, content in newest.items()}
        self._contents |= {sha256: _OlderParts(where) for sha256, where in older.items()}
        self._wanted = True
        self._work()
        self._change(self._urls)

    def add_older(self, sha256: str, where: Older) -> None:
        if sha256 not in self._contents:
            self._contents[sha256] = _OlderParts(where)
            self._wanted = True
            self._work()
            self._change(self._urls)

    def sweep(self) -> None:
        """Sign again what would end soon, and try again what failed."""
        if self._loop.time() - self._signed > self._seconds / 4:
            self._wanted = True
        self._work()

    def close(self) -> None:
        """Publish nothing more. The objects stay: the next process needs them."""
        self._closed = True
        self._change({})
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _work(self) -> None:
        if not self._wanted or self._working or self._closed:
            return
        if self._loop.time() < self._pause_until:
            return
        self._wanted, self._working = False, True
        contents = self._bundles | self._contents
        job = self._loop.run_in_executor(self._thread, self._publish_and_sign, contents)
        job.add_done_callback(partial(self._done, self._loop.time()))

    def _publish_and_sign(self, contents: Mapping[str, Content]) -> dict[str, str]:
        """In the thread: publish, and return the URL of each content."""
        self._served.publish(contents)
        return {sha256: self._served.url(sha256, self._seconds) for sha256 in contents}

    def _done(self, began: float, job: asyncio.Future[dict[str, str]]) -> None:
        self._working = False
        if self._closed or job.cancelled():
            return
        error = job.exception()
        if error is None:
            self._signed = began
            self._work()
            self._change(job.result())
            return
        self._wanted, self._pause_until = True, self._loop.time() + AGAIN
        expected = isinstance(error, FleetError | OSError)
        logger.warning(
            "contents cannot be published in the object store, and devices fetch them by their "
            "WebSockets; tried again in %.0f s: %s",
            AGAIN,
            in_words(error, file=True) if expected else repr(error),
            exc_info=None if expected else error,
        )
        # A device needs a while for what it fetches.
        self._change({} if began - self._signed > self._seconds / 2 else self._urls)

    def _change(self, urls: Mapping[str, str]) -> None:
        """Have these URLs, of what is served and no more. What is being published has one soon."""
        known = self._contents.keys() | self._bundles.keys()
        kept = {sha256: url for sha256, url in urls.items() if sha256 in known and url}
        coming = known - kept.keys() if self._working and not self._closed else ()
        self._urls = kept | dict.fromkeys(coming, COMING)
        self._say_changed(self._urls)
        self.wake()


class _OlderParts:
    """The bytes of an older vector, as they travel, each time that they are iterated over."""

    def __init__(self, where: Older) -> None:
        self._where = where

    def __iter__(self) -> Iterator[Buffer]:
        return self._where.parts()


class _BundleFile:
    """A file of a bundle, read when it is iterated over."""

    def __init__(self, bundle: Bundle, file: str) -> None:
        self._bundle, self._file = bundle, file

    def __iter__(self) -> Iterator[Buffer]:
        yield self._bundle.read(self._file)


def _bundle_contents(bundles: Iterable[Bundle]) -> Iterator[tuple[str, Content]]:
    for bundle in bundles:
        yield bundle.sha256, _BundleFile(bundle, MANIFEST)
        folder = bundle.path.is_dir()
        for path, entry in bundle.manifest.files.items():
            yield entry.sha256, bundle.path / path if folder else _BundleFile(bundle, path)
