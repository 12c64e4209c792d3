"""Objects below a URL of an object store: S3 and what speaks like it, Google's, Azure's.

obstore does the work, tries again for a while what fails on the way, and finds its credentials
where the store's own tools do: in the environment, or from the machine.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any

from fleetlearn_protocol.errors import Code, in_words

from fleetlearn_coordinator.storage.errors import StoreError, StoreUnavailableError

if TYPE_CHECKING:
    from obstore.store import ObjectStore

TIMEOUT = timedelta(minutes=10)
"""That one request may take: a model is read by one, and written by one for each 5 MiB."""
PATIENCE = timedelta(seconds=60)
"""For which a request is tried again."""


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

    @contextmanager
    def _named(self, what: str, key: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise StoreError(Code.UNKNOWN_CONTENT, f"{self.name(key)} is missing") from None
        except self._obstore.exceptions.BaseError as error:
            text = f"{self.name(key)} cannot be {what} now: {_short(error)}"
            raise StoreUnavailableError(Code.BUSY, text) from None
        except OSError as error:
            text = f"{self.name(key)} cannot be {what} now: {in_words(error)}"
            raise StoreUnavailableError(Code.BUSY, text) from None

    def put(self, key: str, content: Path | bytes | Iterable[bytes]) -> None:
        """Write an object, whole or not at all. One that is there is replaced. Raises StoreError
        (unknown-content) where there is no such bucket, StoreUnavailableError, and what iterating
        raises."""
        with self._named("written", key):
            try:
                self._obstore.put(self._store, key, content)
            except FileNotFoundError:
                text = f"{self.where}: there is no such bucket; make it with the store's own tools"
                raise StoreError(Code.UNKNOWN_CONTENT, text) from None

    def read(self, key: str) -> bytes | None:
        """Return a small object's bytes; None: it is not there. Raises StoreUnavailableError."""
        try:
            with self._named("read", key):
                return bytes(self._obstore.get(self._store, key).bytes())
        except StoreUnavailableError:
            raise
        except StoreError:
            return None

    def fetch(self, key: str, path: Path) -> None:
        """Write an object's bytes to a file, which is made, or replaced once all of them are here.
        Raises StoreError (unknown-content) where there is no such object, StoreUnavailableError,
        OSError."""
        draft = path.with_name(f"{path.name}.{token_hex(8)}.draft")  # others may fetch it, too
        try:
            with self._named("read", key):
                found = self._obstore.get(self._store, key)
                parts = found.stream(min_chunk_size=2**20)
                with draft.open("wb") as file:
                    for part in parts:
                        file.write(part)
            draft.replace(path)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise

    def read_range(self, key: str, begin: int, size: int) -> bytes:
        """Return ``size`` bytes of an object from ``begin`` on, fewer where it ends before that.
        ``begin``: less than its size. Raises StoreError (unknown-content) where there is no such
        object, StoreUnavailableError."""
        with self._named("read", key):
            return bytes(self._obstore.get_range(self._store, key, start=begin, length=size))

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
            with self._named("read", key):
                size: int = self._obstore.head(self._store, key)["size"]
                return size
        except StoreUnavailableError:
            raise
        except StoreError:
            return None

    def keys(self, folder: str) -> list[str]:
        """Return the names of the objects below a folder, without the folder's; "": of all. Raises
        StoreUnavailableError."""
        with self._named("listed", folder):
            pages = list(self._obstore.list(self._store, folder or None))
        return [each["path"].removeprefix(f"{folder}/") for page in pages for each in page]

    def remove(self, keys: Iterable[str]) -> None:
        """Remove these objects, if they are there. Raises StoreUnavailableError."""
        for key in keys:
            try:
                with self._named("removed", key):
                    self._obstore.delete(self._store, key)
            except StoreUnavailableError:
                raise
            except StoreError:
                pass


def _short(error: BaseException) -> str:
    """Return the first line of obstore's error; the others are for those who debug it."""
    return (str(error).splitlines() or [type(error).__name__])[0][:500]
