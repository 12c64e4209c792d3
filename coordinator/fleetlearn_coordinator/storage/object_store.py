"""Objects below a URL of an object store: S3 and what speaks like it, Google's, Azure's.

obstore does the work, tries again for a while what fails on the way, and finds its credentials
where the store's own tools do: in the environment, or from the machine.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any, TypeVar

from fleetlearn_protocol.errors import Code, in_words

from fleetlearn_coordinator.storage.errors import StoreError, StoreUnavailableError

if TYPE_CHECKING:
    from obstore.store import ObjectStore

logger = logging.getLogger("fleetlearn.coordinator")

TIMEOUT = timedelta(minutes=10)
"""That one request may take: a model is read by one, and written by one for each 5 MiB."""
PATIENCE = timedelta(seconds=60)
"""For which a request is tried again."""
SLOW = 8.0
"""Seconds after which the log says that a small object has not come."""
ON_THE_WAY = "HTTP error: "
"""In obstore's errors: the store gave no whole answer."""
PAUSE = 0.2
"""Seconds before a request is made again here."""
Answer = TypeVar("Answer")


class Objects:
    """The objects below one URL. Every method may be called in any thread, and waits."""

    def __init__(self, url: str) -> None:
        """``url``: such as s3://BUCKET/FOLDER. Opens no connection. Raises StoreError where the
        URL cannot be used, or obstore is missing."""
        self.where = url.rstrip("/")
        try:
            import obstore
            from obstore.store import from_url
        except ImportError:
            raise StoreError(
                Code.UNKNOWN_CONTENT,
                f"{self.where}: obstore is missing, which object stores need. "
                "pip install 'fleetlearn[objects]'",
            ) from None
        self._obstore = obstore
        options: dict[str, Any] = {"timeout": TIMEOUT, "connect_timeout": timedelta(seconds=5)}
        if os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://"):
            options["allow_http"] = True
        try:
            self._store: ObjectStore = from_url(
                self.where,
                client_options=options,
                retry_config={"retry_timeout": PATIENCE, "max_retries": 1000},
            )
        except Exception as error:
            raise StoreError(
                Code.BAD_MESSAGE, f"{self.where} cannot be used as an object store: {_short(error)}"
            ) from None

    def name(self, key: str) -> str:
        """Return where an object is, for messages to people."""
        return f"{self.where}/{key}"

    def _no_bucket(self) -> StoreError:
        text = f"{self.where}: there is no such bucket; make it with the store's own tools"
        return StoreError(Code.UNKNOWN_CONTENT, text)

    @contextmanager
    def _said_if_slow(self) -> Iterator[None]:
        """Say within the block that the object store does not answer, if it takes long."""
        text = "%s: the object store has not answered for %d s; it is tried for %d s in all"
        args = text, self.where, SLOW, PATIENCE.total_seconds()
        saying = threading.Timer(SLOW, logger.warning, args)
        saying.daemon = True
        saying.start()
        try:
            yield
        finally:
            saying.cancel()

    @contextmanager
    def _named(self, what: str, key: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise StoreError(Code.UNKNOWN_CONTENT, f"{self.name(key)} is missing") from None
        except self._obstore.exceptions.BaseError as error:
            if what == "listed" and "404 Not Found" in str(error):
                raise self._no_bucket() from None
            text = f"{self.name(key)} cannot be {what} now: {_short(error)}"
            raise StoreUnavailableError(Code.BUSY, text) from None
        except OSError as error:
            text = f"{self.name(key)} cannot be {what} now: {in_words(error)}"
            raise StoreUnavailableError(Code.BUSY, text) from None

    def _ask(self, what: str, key: str, request: Callable[[], Answer]) -> Answer:
        """Return what a request returns that may be made twice. Raises as ``_named``.

        obstore tries again what is safe for any request by HTTP. A POST, or an answer that breaks
        off, is not: where a store dies while it removes an object, for example."""
        until = time.monotonic() + PATIENCE.total_seconds()

        def attempt() -> Answer | None:
            try:
                return request()
            except self._obstore.exceptions.GenericError as error:
                if ON_THE_WAY not in str(error) or time.monotonic() > until:
                    raise
                return None

        with self._named(what, key):
            while (found := attempt()) is None:
                time.sleep(PAUSE)
            return found

    def put(self, key: str, content: Path | bytes | Iterable[bytes]) -> None:
        """Write an object, whole or not at all. One that is there is replaced. Raises StoreError
        (unknown-content) where there is no such bucket, StoreUnavailableError, and what iterating
        raises."""

        def write() -> Any:
            try:
                return self._obstore.put(self._store, key, content)
            except FileNotFoundError:
                raise self._no_bucket() from None

        if isinstance(content, Path | bytes):
            self._ask("written", key, write)
        else:  # it can be read once
            with self._named("written", key):
                write()

    def read(self, key: str) -> bytes | None:
        """Return a small object's bytes; None: it is not there. Raises StoreUnavailableError."""
        try:
            with self._said_if_slow():
                return self._ask(
                    "read", key, lambda: bytes(self._obstore.get(self._store, key).bytes())
                )
        except StoreUnavailableError:
            raise
        except StoreError:
            return None

    def fetch(self, key: str, path: Path) -> None:
        """Write an object's bytes to a file, which is made, or replaced once all of them are here.
        Raises StoreError (unknown-content) where there is no such object, StoreUnavailableError,
        OSError."""
        draft = path.with_name(f"{path.name}.{token_hex(8)}.draft")  # others may fetch it, too

        def write() -> Path:
            found = self._obstore.get(self._store, key)
            with draft.open("wb") as file:
                for part in found.stream(min_chunk_size=2**20):
                    file.write(part)
            return draft

        try:
            self._ask("read", key, write).replace(path)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise

    def read_range(self, key: str, begin: int, size: int) -> bytes:
        """Return ``size`` bytes of an object from ``begin`` on, fewer where it ends before that.
        ``begin``: less than its size. Raises StoreError (unknown-content) where there is no such
        object, StoreUnavailableError."""
        return self._ask(
            "read",
            key,
            lambda: bytes(self._obstore.get_range(self._store, key, start=begin, length=size)),
        )

    def url(self, key: str, seconds: float) -> str:
        """Return a URL by which anybody can GET an object for ``seconds`` from now on. It has no
        key of the store's, and is a secret itself. The store is not asked; where its credentials
        come from may be. Raises StoreUnavailableError."""
        with self._named("signed for", key):
            expires = timedelta(seconds=seconds)
            return str(self._obstore.sign(self._store, "GET", key, expires))

    def size(self, key: str) -> int | None:
        """Return how many bytes an object has; None: it is not there. Raises
        StoreUnavailableError."""
        try:
            return int(self._ask("read", key, lambda: self._obstore.head(self._store, key)["size"]))
        except StoreUnavailableError:
            raise
        except StoreError:
            return None

    def keys(self, folder: str) -> list[str]:
        """Return the names of the objects below a folder, without the folder's; "": of all. Raises
        StoreUnavailableError."""
        pages = self._ask(
            "listed", folder, lambda: list(self._obstore.list(self._store, folder or None))
        )
        return [each["path"].removeprefix(f"{folder}/") for page in pages for each in page]

    def remove(self, keys: Iterable[str]) -> None:
        """Remove these objects, if they are there. Raises StoreUnavailableError."""
        for key in keys:
            try:
                self._ask("removed", key, partial(self._remove_one, key))
            except StoreUnavailableError:
                raise
            except StoreError:
                pass

    def _remove_one(self, key: str) -> bool:
        self._obstore.delete(self._store, key)
        return True


def _short(error: BaseException) -> str:
    """Return the first line of obstore's error; the others are for those who debug it."""
    return (str(error).splitlines() or [type(error).__name__])[0][:500]
