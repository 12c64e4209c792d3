"""What devices may fetch, in an object store: moto's S3 server, over real sockets."""

from __future__ import annotations

import resource
import signal
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from urllib.error import HTTPError

import pytest
from fleetlearn_coordinator.storage.errors import StoreError, StoreUnavailableError
from fleetlearn_coordinator.storage.object_store import Objects
from fleetlearn_coordinator.storage.served_objects import Content, ServedObjects
from fleetlearn_protocol.errors import Code

pytest.importorskip("obstore")
pytest.importorskip("moto")
from object_server import BUCKET, ObjectServer, object_server

PATIENCE = timedelta(seconds=0.2)
MODEL, OLDER, LARGE = b"model", b"older model", bytes(range(256)) * 2**16
"""The last is above what obstore writes in one request."""


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectServer]:
    with object_server() as server:
        yield server


@pytest.fixture
def objects(
    server: ObjectServer, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Objects:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return Objects(f"s3://{BUCKET}/fleet/{request.node.name}")


def name_of(content: bytes) -> str:
    return sha256(content).hexdigest()


def names(objects: Objects) -> set[str]:
    return {*objects.keys("served")}


def test_contents_are_published_from_files_bytes_and_parts(
    objects: Objects, tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(LARGE)
    served = ServedObjects(objects)
    contents: dict[str, Content] = {
        name_of(LARGE): tmp_path / "file",
        name_of(MODEL): memoryview(MODEL),
        name_of(OLDER): iter([OLDER[:5], memoryview(OLDER)[5:]]),
    }
    served.publish(contents)
    assert names(objects) == contents.keys()
    for content in (LARGE, MODEL, OLDER):
        served.fetch(name_of(content), tmp_path / "fetched")
        assert (tmp_path / "fetched").read_bytes() == content


def test_what_is_over_is_removed_and_what_is_there_is_not_written_again(objects: Objects) -> None:
    ServedObjects(objects).publish({name_of(MODEL): MODEL})
    later = ServedObjects(objects)  # of a process that was started again
    later.add(name_of(OLDER), OLDER)
    later.publish({name_of(MODEL): Path("/nothing/is/read"), name_of(LARGE): LARGE})
    assert names(objects) == {name_of(MODEL), name_of(LARGE)}


@pytest.mark.parametrize("content", [MODEL + b"!", LARGE + b"!"])
def test_other_bytes_are_never_an_object(objects: Objects, content: bytes) -> None:
    with pytest.raises(StoreError, match=f"the content {name_of(MODEL)} has other bytes") as raised:
        ServedObjects(objects).publish({name_of(MODEL): content})
    assert raised.value.code is Code.WRONG_HASH
    assert not names(objects)


def test_an_object_that_somebody_changed_is_no_file(objects: Objects, tmp_path: Path) -> None:
    objects.put(f"served/{name_of(MODEL)}", OLDER)
    with pytest.raises(StoreError, match="has other bytes"):
        ServedObjects(objects).fetch(name_of(MODEL), tmp_path / "fetched")
    with pytest.raises(StoreError, match="is missing"):
        ServedObjects(objects).fetch(name_of(OLDER), tmp_path / "fetched")
    assert not [*tmp_path.iterdir()]


def test_a_content_is_read_by_ranges(objects: Objects) -> None:
    served = ServedObjects(objects)
    served.publish({name_of(LARGE): LARGE})
    found = served.open(name_of(LARGE))
    assert found is not None
    assert found.size == len(LARGE)
    for begin, size in ((0, 10), (12345, 2**20), (len(LARGE) - 3, 100), (len(LARGE), 5), (7, 0)):
        assert found.read(begin, size) == LARGE[begin : begin + size]
    served.publish({})
    with pytest.raises(OSError, match="is missing"):
        found.read(0, 1)
    assert served.open(name_of(LARGE)) is None


def test_two_threads_fetch_the_same_content(objects: Objects, tmp_path: Path) -> None:
    """As where a gateway's bus is lost in the middle of a download, and comes back: the thread that
    fetches goes on for nobody."""
    served = ServedObjects(objects)
    served.publish({name_of(LARGE): LARGE})
    path = tmp_path / name_of(LARGE)
    with ThreadPoolExecutor(8) as threads:
        for fetching in [threads.submit(served.fetch, name_of(LARGE), path) for _ in range(24)]:
            fetching.result()
            assert path.read_bytes() == LARGE
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_what_cannot_be_written_leaves_nothing(objects: Objects, tmp_path: Path) -> None:
    """Else a disk that is full stays full, and each try makes it worse."""
    served = ServedObjects(objects)
    served.publish({name_of(LARGE): LARGE})
    with file_size_limit(2**20), pytest.raises(StoreUnavailableError, match="file too large"):
        served.fetch(name_of(LARGE), tmp_path / "content")
    assert not [*tmp_path.iterdir()]


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Within the block, no file can become longer."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    was = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, was)


def test_a_signed_url_gives_one_object_by_ranges(objects: Objects) -> None:
    served = ServedObjects(objects)
    served.publish({name_of(LARGE): LARGE})
    url = served.url(name_of(LARGE), 60)
    asked = urllib.request.Request(url, headers={"Range": "bytes=1000-"})
    with urllib.request.urlopen(asked) as answer:
        assert answer.status == 206
        assert answer.read() == LARGE[1000:]
    assert "a secret of tests" not in url
    with pytest.raises(HTTPError, match="404"):
        urllib.request.urlopen(served.url(name_of(OLDER), 60))


def test_who_lost_the_run_writes_and_removes_nothing(objects: Objects) -> None:
    ServedObjects(objects).publish({name_of(MODEL): MODEL})

    def lost() -> None:
        raise StoreUnavailableError(Code.BUSY, "lost")

    late = ServedObjects(objects, lost)
    for contents in ({}, {name_of(OLDER): OLDER}):
        with pytest.raises(StoreUnavailableError, match="lost"):
            late.publish(contents)
    assert names(objects) == {name_of(MODEL)}


def test_a_store_that_is_away_is_said_to_be(
    objects: Objects, server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setattr("fleetlearn_coordinator.storage.object_store.PATIENCE", PATIENCE)
    away = ServedObjects(Objects(objects.where))
    for ask in (
        lambda: away.publish({}),
        lambda: away.add(name_of(MODEL), MODEL),
        lambda: away.open(name_of(MODEL)),
        lambda: away.fetch(name_of(MODEL), Path("/nothing/is/written")),
    ):
        with pytest.raises(StoreUnavailableError, match="now"):
            ask()
