"""The newest model for a device that takes no part, from a coordinator that the test plays."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleetlearn_device.driver.address import checked_address
from fleetlearn_device.driver.newest_model import NoNewestModelError, fetch_newest_model
from fleetlearn_device.driver.timing import Timing
from fleetlearn_device.predictor import Predictor
from fleetlearn_device.storage.state_directory import StateDirectory
from fleetlearn_device.storage.trusted_keys import write_trusted_keys
from fleetlearn_protocol.encodings import FLOAT32
from fleetlearn_protocol.errors import Code
from fleetlearn_protocol.messages import (
    CheckIn,
    ComeBack,
    Fetch,
    Refused,
    SharedModel,
    Welcome,
)
from scripted import Line, Scripted, Served, scripted

QUICK = Timing(send=0.5, close=0.5, base=0.01)


@pytest.fixture(scope="module")
def served(cases: Callable[[str], Any]) -> Served:
    return Served(cases("plain").path)


def newest(served: Served) -> SharedModel:
    return SharedModel(served.bundle.sha256, FLOAT32.reference("model", served.model))


def fetched(
    served: Served, folder: Path, play: Callable[[Scripted], Awaitable[None]]
) -> dict[str, Any]:
    """Fetch the model while the test plays the coordinator. Returns the model, or the error."""
    found: dict[str, Any] = {}

    async def test() -> None:
        async with scripted(served.contents) as coordinator:
            directory = StateDirectory(folder)
            playing = asyncio.create_task(play(coordinator))
            try:
                address = checked_address(coordinator.url)
                found["model"] = await fetch_newest_model(address, directory, None, QUICK)
            except NoNewestModelError as error:
                found["error"] = str(error)
            finally:
                directory.close()
                playing.cancel()

    asyncio.run(test())
    return found


async def welcomed(coordinator: Scripted, model: SharedModel | None) -> Line:
    line = await coordinator.line()
    check_in = await line.expect(CheckIn)
    assert check_in.wants == "model"
    await line.say(Welcome("scripted", 5.0, 4096, newest=model))
    return line


def test_the_model_is_fetched_and_used(served: Served, tmp_path: Path, cases: Any) -> None:
    fetches: list[str] = []

    async def play(coordinator: Scripted) -> None:
        line = await welcomed(coordinator, newest(served))
        while True:
            fetch = await line.expect(Fetch)
            fetches.append(fetch.sha256)
            await line.send_content(fetch)

    model = fetched(served, tmp_path, play)["model"]
    assert model.model == served.model_sha256
    wanted = [served.bundle.sha256, served.file("graphs/infer.onnx"), served.model_sha256]
    assert fetches == wanted, "nothing that only training needs"
    found = Predictor(tmp_path).predict(cases("plain").x[:2])
    assert isinstance(found, np.ndarray)
    assert found.shape == (2, 10)


def test_a_newer_model_may_take_its_place_meanwhile(served: Served, tmp_path: Path) -> None:
    async def play(coordinator: Scripted) -> None:
        line = await welcomed(coordinator, newest(served))
        for _ in range(2):
            await line.send_content(await line.expect(Fetch))
        fetch = await line.expect(Fetch)
        await line.say(Refused(Code.UNKNOWN_CONTENT, "of an old round", None, fetch.sha256))
        line = await welcomed(coordinator, newest(served))
        fetch = await line.expect(Fetch)  # the rest is here
        assert fetch.sha256 == served.model_sha256
        await line.send_content(fetch)

    assert fetched(served, tmp_path, play)["model"].model == served.model_sha256


def test_the_training_may_end_meanwhile(served: Served, tmp_path: Path) -> None:
    async def play(coordinator: Scripted) -> None:
        line = await welcomed(coordinator, newest(served))
        while True:
            fetch = await line.expect(Fetch)
            await line.say(ComeBack(30.0, "finished"))
            await line.send_content(fetch)

    assert fetched(served, tmp_path, play)["model"].model == served.model_sha256


def test_what_the_coordinator_says_instead(served: Served, tmp_path: Path) -> None:
    async def gives_none(coordinator: Scripted) -> None:
        await welcomed(coordinator, None)

    async def is_busy(coordinator: Scripted) -> None:
        line = await coordinator.line()
        await line.expect(CheckIn)
        await line.say(ComeBack(30.0, "finished"))

    async def refuses(coordinator: Scripted) -> None:
        line = await coordinator.line()
        await line.expect(CheckIn)
        await line.say(Refused(Code.BAD_VERSION, "another version"))

    for number, (play, text) in enumerate(
        [
            (gives_none, "[models] give = true"),
            (is_busy, "no time now (finished); try again in 30 s"),
            (refuses, "another version"),
        ]
    ):
        assert text in fetched(served, tmp_path / str(number), play)["error"]


def test_wrong_bytes_are_not_used(served: Served, tmp_path: Path) -> None:
    async def play(coordinator: Scripted) -> None:
        coordinator.contents = {
            name: content[:-1] + bytes([content[-1] ^ 1])
            for name, content in served.contents.items()
        }
        line = await welcomed(coordinator, newest(served))
        line.contents = coordinator.contents
        while True:
            await line.send_content(await line.expect(Fetch))

    assert "came 3 times with wrong bytes" in fetched(served, tmp_path, play)["error"]
    assert not (tmp_path / "predict").exists()


def test_a_device_that_trusts_keys_takes_none(served: Served, tmp_path: Path) -> None:
    StateDirectory(tmp_path).close()
    write_trusted_keys(tmp_path, ["a" * 64])

    async def play(coordinator: Scripted) -> None:
        raise AssertionError

    assert "trusted keys" in fetched(served, tmp_path, play)["error"]
