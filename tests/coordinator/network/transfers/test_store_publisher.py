"""What a run publishes in its object store, and the URLs that devices are told. The store is one
whose calls the test holds up, or lets fail."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from awaited import awaited
from fleetlearn_coordinator.network.transfers import store_publisher
from fleetlearn_coordinator.network.transfers.contents import Older
from fleetlearn_coordinator.network.transfers.elsewhere import COMING
from fleetlearn_coordinator.network.transfers.store_publisher import StorePublisher
from fleetlearn_coordinator.storage.errors import StoreUnavailableError
from fleetlearn_coordinator.storage.file_bytes import FileBytes
from fleetlearn_coordinator.storage.served_objects import Content, ServedObjects
from fleetlearn_protocol import open_bundle
from fleetlearn_protocol.errors import Code

A, B, OLD = "a" * 64, "b" * 64, "c" * 64


class HeldObjects(ServedObjects):
    """Objects in memory. ``gate`` holds ``publish`` up; ``away``: it fails."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.away = False
        self.there: dict[str, bytes] = {}
        self.signed = 0

    def publish(self, contents: Mapping[str, Content]) -> None:
        self.gate.wait(20)
        if self.away:
            raise StoreUnavailableError(Code.BUSY, "no route to the store")
        self.there = {sha256: read(content) for sha256, content in contents.items()}

    def url(self, sha256: str, seconds: float) -> str:
        self.signed += 1
        return f"https://store/{sha256}?signed={self.signed}"


def read(content: Content) -> bytes:
    if isinstance(content, Path):
        return content.read_bytes()
    if isinstance(content, bytes | bytearray | memoryview):
        return bytes(content)
    return b"".join(map(bytes, content))


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


@awaited
async def test_a_content_has_a_url_once_it_is_there(tmp_path: Path, bundle_path: Path) -> None:
    (tmp_path / "old").write_bytes(b"older model.")
    served, said = HeldObjects(), list[Mapping[str, str]]()
    bundle = open_bundle(bundle_path)
    publisher = StorePublisher(served, [bundle], 100.0, said.append)
    served.gate.clear()
    publisher.publish({A: b"model"}, {OLD: Older(FileBytes(tmp_path / "old"), 12)})
    assert publisher.url(A) == publisher.url(OLD) == publisher.url(bundle.sha256) == COMING
    assert publisher.url(B) is None
    waiting = asyncio.create_task(publisher.changed())
    await asyncio.sleep(0)
    served.gate.set()
    await asyncio.wait_for(waiting, 20)
    assert str(publisher.url(A)).startswith(f"https://store/{A}?")
    assert served.there[A] == b"model"
    assert served.there[OLD] == b"older model."
    assert {entry.sha256 for entry in bundle.manifest.files.values()} < served.there.keys()
    assert said[-1][A] == publisher.url(A)
    publisher.close()


@awaited
async def test_only_what_is_served_now_has_a_url(tmp_path: Path) -> None:
    served = HeldObjects()
    publisher = StorePublisher(served, [], 100.0)
    publisher.publish({A: b"a"}, {})
    await until(lambda: publisher.url(A))
    served.gate.clear()
    publisher.publish({B: b"b"}, {})
    assert publisher.url(A) is None
    (tmp_path / "old").write_bytes(b"old!")
    publisher.add_older(OLD, Older(FileBytes(tmp_path / "old"), 4))
    served.gate.set()
    await until(lambda: publisher.url(OLD) and publisher.url(B))
    assert served.there == {B: b"b", OLD: b"old!"}
    publisher.close()
    assert publisher.url(B) is None


@awaited
async def test_urls_are_signed_again_before_they_end() -> None:
    served = HeldObjects()
    publisher = StorePublisher(served, [], 0.4)
    publisher.publish({A: b"a"}, {})
    await until(lambda: publisher.url(A))
    first = publisher.url(A)

    def renewed() -> bool:
        publisher.sweep()
        assert publisher.url(A) is not None
        return publisher.url(A) != first

    await until(renewed)
    publisher.close()


@awaited
async def test_a_store_that_is_away_costs_a_line_and_devices_their_websockets(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(store_publisher, "AGAIN", 0.05)
    served = HeldObjects()
    served.away = True
    publisher = StorePublisher(served, [], 100.0)
    publisher.publish({A: b"a"}, {})
    await until(lambda: publisher.url(A) is None)
    assert "no route to the store" in caplog.text
    served.away = False

    def is_there() -> object:
        publisher.sweep()
        return publisher.url(A)

    await until(is_there)
    publisher.close()
