"""A device that masks its updates, on a real socket: what leaves it, when, and how often."""

from __future__ import annotations

import asyncio
import hashlib
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from fleetlearn_device import Device
from fleetlearn_device.__main__ import main
from fleetlearn_device.driver.timing import Timing
from fleetlearn_device.session.secure_demands import SecureDemands
from fleetlearn_device.storage.device_key import read_device_key
from fleetlearn_device.storage.outbox import Outbox
from fleetlearn_device.storage.state_directory import describe
from fleetlearn_protocol.encodings import FLOAT32
from fleetlearn_protocol.errors import FleetError
from fleetlearn_protocol.formats.masked import words_from_bytes
from fleetlearn_protocol.messages import (
    Accepted,
    Failed,
    Held,
    Report,
    SecureTask,
    Task,
    TaskFinished,
    TaskWeighing,
)
from fleetlearn_protocol.secure.about import about_update, signed_seed
from fleetlearn_protocol.secure.distributed_noise import largest_step
from fleetlearn_protocol.secure.fixed_point import Words, weighted_sum
from fleetlearn_protocol.secure.masks import mask_of
from fleetlearn_protocol.secure.sealed import unseal
from fleetlearn_protocol.secure.task_terms import terms_of, update_of
from fleetlearn_protocol.vector import Vector
from line_bundle import line_data, write_line_bundle
from scripted import PATIENCE, Line, Scripted, Served, scripted

QUICK = Timing(send=0.5, close=0.5, base=0.01)
HELPER = X25519PrivateKey.from_private_bytes(bytes(range(32)))
KEY = HELPER.public_key().public_bytes_raw().hex()
SMALL = "01" + "00" * 31
CLIP, BITS = 0.25, 20
SECURE = SecureTask("helper", 2, BITS, helper=KEY)
LATE = msgspec.structs.replace(SECURE, least_factor=0.1)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(write_line_bundle(tmp_path_factory.mktemp("line") / "line", buffer=False).path)


@pytest.fixture(scope="module")
def data() -> Any:
    return line_data(20)


@asynccontextmanager
async def pair(
    served: Served, data: Any, folder: Path, **options: Any
) -> AsyncIterator[tuple[Scripted, asyncio.Task[None]]]:
    """A coordinator and a device in this process."""
    async with scripted(served.contents) as coordinator:
        device = Device(coordinator.url, data=data, state_dir=folder, timing=QUICK, **options)
        running = asyncio.create_task(device.serve())
        try:
            yield coordinator, running
        finally:
            device.stop()
            async with asyncio.timeout(PATIENCE):
                await asyncio.gather(running, return_exceptions=True)


def secure_task(
    served: Served, name: str, secure: SecureTask | None = SECURE, **changes: Any
) -> Task:
    parts = {"parts": {"update": "masked"}} if secure is not None else {}
    return served.task(name, clip=CLIP, secure=secure, **parts, **changes)


def opened(task: Task, report: Report, content: bytes, folder: Path) -> Words:
    """The words without their mask, as helper and coordinator together know them; the signature is
    checked."""
    words = words_from_bytes(content)
    with_name = update_of(task, describe(folder).device or "")
    about = about_update(terms_of(task, len(words)), with_name)
    sealed = bytes.fromhex(report.sealed or "")
    private = read_device_key(folder)
    assert private is not None
    public = Ed25519PrivateKey.from_private_bytes(private).public_key()
    public.verify(bytes.fromhex(report.signature or ""), signed_seed(about, sealed))
    unmasked: Words = words - mask_of(unseal(sealed, HELPER, about), len(words))
    return unmasked


async def plain_update(served: Served, data: Any, folder: Path) -> Vector:
    """The clipped update of the same task without a mask."""
    async with pair(served, data, folder) as (coordinator, _):
        line = await coordinator.line()
        await line.check_in()
        await line.say(secure_task(served, "r1-1-1", None))
        return FLOAT32.decode(await line.accept(await line.answer_fetches(Report)))


async def forgotten(folder: Path) -> None:
    """Wait until the device has deleted its update."""
    async with asyncio.timeout(PATIENCE):
        while list((folder / "pending").iterdir()):
            await asyncio.sleep(0.005)


def near(words: Words, expected: Vector, share: float, factor: float = 1.0) -> None:
    """Assert that the words are those of the update, rounded by less than a step."""
    found = weighted_sum(words, 1, CLIP, BITS)
    step = 2 * CLIP / (2**BITS - 1)
    assert np.abs(found.total - expected.astype(np.float64) * share * factor).max() < 1.01 * step
    assert found.weight == pytest.approx(share, abs=2.0**-BITS * 1.01)


def test_all_that_leaves_the_device_is_masked(served: Served, data: Any, tmp_path: Path) -> None:
    async def test() -> None:
        expected = await plain_update(served, data, tmp_path / "plain")
        assert np.linalg.norm(expected.astype(np.float64)) == pytest.approx(CLIP, rel=1e-6)
        secure = msgspec.structs.replace(SECURE, most_weight=40)
        task = secure_task(served, "r1-1-1", secure, evaluate=True)
        async with pair(served, data, tmp_path / "state") as (coordinator, _):
            line = await coordinator.line()
            check_in = await line.check_in()
            assert "secure" in check_in.privacy
            assert not (tmp_path / "state" / "device_key.json").exists(), "not needed yet"
            await line.say(task)
            report = await line.answer_fetches(Report)
            content = await line.accept(report)
            await forgotten(tmp_path / "state")
        assert len(content) == 4 * (len(expected) + 1)
        told = msgspec.structs.asdict(report)
        del told["parts"], told["sealed"], told["signature"]
        assert told == {
            "task": "r1-1-1", "round": 1, "examples": 1, "steps": 1, "epochs": 2.0,
            "complete": True, "loss": 0.0, "metrics": {}, "seconds": 0.0, "evaluation": None,
            "personal": None, "lost_tied": False, "clipped": None,
        }  # fmt: skip
        near(opened(task, report, content, tmp_path / "state"), expected, 20 / 40)

    asyncio.run(test())


def test_noise_is_added_below_the_mask_and_is_another_one_for_the_same_task(
    served: Served, data: Any, tmp_path: Path
) -> None:
    """The task's seed is the same, and the coordinator knows it."""
    noise = 2000.0
    task = secure_task(served, "r1-1-1", msgspec.structs.replace(SECURE, noise=noise))

    async def words_of(folder: Path) -> Words:
        async with pair(served, data, folder) as (coordinator, _):
            line = await coordinator.line()
            assert "secure-noise" in (await line.check_in()).privacy
            await line.say(task)
            report = await line.answer_fetches(Report)
            return opened(task, report, await line.accept(report), folder)

    async def test() -> None:
        expected = await plain_update(served, data, tmp_path / "plain")
        found = [await words_of(tmp_path / str(number)) for number in range(2)]
        assert [int(words[-1]) for words in found] == [1, 1], "all weigh the same"
        first, second = (words[:-1].view(np.int32).astype(np.float64) for words in found)
        steps = expected.astype(np.float64) / CLIP * largest_step(BITS)
        for words in (first, second):
            assert 0 < np.abs(words - steps).max() < 7 * noise
        assert (first != second).any()

    asyncio.run(test())


@pytest.mark.parametrize("restart", [False, True])
def test_an_update_that_waits_stays_on_the_device_until_it_is_known_what_it_counts(
    served: Served, data: Any, tmp_path: Path, restart: bool
) -> None:
    folder = tmp_path / "state"
    task = secure_task(served, "r1-1-1", LATE)

    async def told(line: Line, expected: Vector) -> None:
        await line.say(TaskWeighing("r1-1-1", 0.5))
        report = await line.expect(Report)
        await line.say(TaskWeighing("r1-1-1", 0.125))  # too late: it is masked
        content = await line.accept(report)
        await forgotten(folder)
        near(opened(task, report, content, folder), expected, 1.0, 0.5)

    async def test() -> None:
        expected = await plain_update(served, data, tmp_path / "plain")
        async with pair(served, data, folder) as (coordinator, _):
            line = await coordinator.line()
            await line.check_in()
            await line.say(task)
            assert await line.answer_fetches(TaskFinished) == TaskFinished("r1-1-1")
            pending = {path.name for path in (folder / "pending").iterdir()}
            assert pending >= {"unmasked.json", "unmasked.bin"}
            assert "report.json" not in pending
            line.cut()
            if not restart:
                line = await coordinator.line()
                assert (await line.check_in()).held == Held("r1-1-1", 1)
                await line.expect(TaskFinished)
                await told(line, expected)
        if restart:
            held = describe(folder)
            assert held.unmasked
            assert held.pending is not None
            async with pair(served, data, folder) as (coordinator, _):
                line = await coordinator.line()
                assert (await line.check_in()).held == Held("r1-1-1", 1)
                await line.expect(TaskFinished)
                await told(line, expected)

    asyncio.run(test())


def test_a_masked_update_is_the_same_bytes_however_often_it_is_sent(
    served: Served, data: Any, tmp_path: Path
) -> None:
    """Over lost connections and restarts, and whatever the coordinator says it counts."""
    task = secure_task(served, "r1-1-1", LATE)

    async def test() -> None:
        seen: set[tuple[bytes, str | None, str | None]] = set()
        for _ in range(3):
            async with pair(served, data, tmp_path) as (coordinator, _):
                for _ in range(2):
                    line = await coordinator.line()
                    await line.check_in()
                    if seen:
                        await line.say(TaskWeighing("r1-1-1", 0.2))
                        report = await line.expect(Report)
                    else:
                        await line.say(task)
                        await line.answer_fetches(TaskFinished)
                        await line.say(TaskWeighing("r1-1-1", 0.5))
                        report = await line.expect(Report)
                    content = await line.take_upload(report)
                    seen.add((content, report.sealed, report.signature))
                    line.cut()
        assert len(seen) == 1

    asyncio.run(test())


@pytest.mark.parametrize("secure", [SECURE, LATE], ids=["at once", "late"])
def test_an_update_that_was_masked_and_is_lost_is_not_masked_again(
    served: Served, data: Any, tmp_path: Path, secure: SecureTask
) -> None:
    async def test() -> None:
        task = secure_task(served, "r1-1-1", secure)
        async with pair(served, data, tmp_path) as (coordinator, _):
            line = await coordinator.line()
            await line.check_in()
            await line.say(task)
            await line.answer_fetches(Report if secure is SECURE else TaskFinished)
        for path in (tmp_path / "pending").iterdir():
            path.unlink()
        async with pair(served, data, tmp_path) as (coordinator, _):
            line = await coordinator.line()
            assert (await line.check_in()).held is None
            await line.say(task)
            failed = await line.answer_fetches(Failed)
            assert "made a masked update for this task already" in failed.text
            # Another task in between changes nothing.
            line = await coordinator.line()
            await line.check_in()
            await line.say(secure_task(served, "r1-2-1"))
            await line.accept(await line.answer_fetches(Report))
            await line.say(task)
            assert (await line.answer_fetches(Failed)).task == "r1-1-1"

    asyncio.run(test())


@pytest.mark.parametrize(
    ("options", "changes", "code", "words"),
    [
        ({}, {"helper": SMALL}, "unsupported", "which is of small order"),
        ({"secure": SecureDemands(helper="0a" * 32)}, {}, "untrusted", "secure.helper"),
        ({"secure": SecureDemands(minimum=3)}, {}, "untrusted", "secure.minimum"),
    ],
)
def test_a_task_that_would_not_hide_the_update_is_given_back_before_anything_is_fetched(
    served: Served,
    data: Any,
    tmp_path: Path,
    options: dict[str, Any],
    changes: dict[str, Any],
    code: str,
    words: str,
) -> None:
    async def test() -> None:
        async with pair(served, data, tmp_path, **options) as (coordinator, _):
            line = await coordinator.line()
            await line.check_in()
            secure = msgspec.structs.replace(SECURE, **changes)
            await line.say(secure_task(served, "r1-1-1", secure))
            failed = await line.expect(Failed)
            assert (failed.task, failed.code) == ("r1-1-1", code)
            assert words in failed.text

    asyncio.run(test())


def test_a_factor_below_the_promise_gives_the_task_back_and_nothing_is_masked(
    served: Served, data: Any, tmp_path: Path
) -> None:
    async def test() -> None:
        async with pair(served, data, tmp_path) as (coordinator, _):
            line = await coordinator.line()
            await line.check_in()
            await line.say(secure_task(served, "r1-1-1", LATE))
            await line.answer_fetches(TaskFinished)
            await line.say(TaskWeighing("r1-1-1", 0.01))
            failed = await line.expect(Failed)
            assert (failed.task, failed.code) == ("r1-1-1", "untrusted")
            line = await coordinator.line()
            assert (await line.check_in()).held is None
            assert not list((tmp_path / "pending").iterdir())

    asyncio.run(test())


def test_an_update_that_its_owner_forbids_by_now_is_not_masked(
    served: Served, data: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It was trained for a helper that the owner has stopped trusting since."""

    async def test() -> None:
        task = secure_task(served, "r1-1-1", LATE)
        async with pair(served, data, tmp_path) as (coordinator, _):
            line = await coordinator.line()
            await line.check_in()
            await line.say(task)
            await line.answer_fetches(TaskFinished)
        demands = SecureDemands(helper="0a" * 32)
        async with pair(served, data, tmp_path, secure=demands) as (coordinator, _):
            line = await coordinator.line()
            assert (await line.check_in()).held is None
            assert not list((tmp_path / "pending").iterdir())
            await line.say(task)
            assert (await line.expect(Failed)).code == "untrusted"
        assert "is dropped before it is masked: the task names the helper" in caplog.text

    asyncio.run(test())


def test_an_update_that_was_accepted_and_is_back_is_forgotten(
    served: Served, data: Any, tmp_path: Path
) -> None:
    async def test() -> None:
        async with pair(served, data, tmp_path) as (coordinator, _):
            line = await coordinator.line()
            await line.check_in()
            await line.say(secure_task(served, "r1-1-1", LATE))
            await line.answer_fetches(TaskFinished)
            await line.say(Accepted("r1-1-1"))
            await line.say(secure_task(served, "r1-2-1"))
            assert (await line.answer_fetches(Report)).task == "r1-2-1"

    asyncio.run(test())


def missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have no package cryptography."""
    names = [name for name in sys.modules if name.partition(".")[0] == "cryptography"]
    for name in ("cryptography", *names, "fleetlearn_device.training.masking"):
        monkeypatch.setitem(sys.modules, name, None)


def test_a_device_without_the_package_says_that_it_cannot(
    served: Served, data: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing(monkeypatch)

    async def test() -> None:
        async with pair(served, data, tmp_path) as (coordinator, _):
            line = await coordinator.line()
            assert "secure" not in (await line.check_in()).privacy
            await line.say(secure_task(served, "r1-1-1"))  # for all that
            failed = await line.expect(Failed)
            assert failed.code == "unsupported"
            assert 'pip install "fleetlearn[device,secure]"' in failed.text
            line = await coordinator.line()
            await line.check_in()
            await line.say(served.task("r1-2-1"))
            await line.accept(await line.answer_fetches(Report))
        secure = SecureDemands(require=True)
        device = Device("ws://127.0.0.1:9", data=data, state_dir=tmp_path, secure=secure)
        with pytest.raises(FleetError, match=r'pip install "fleetlearn\[device,secure\]"'):
            await device.serve()

    asyncio.run(test())


def test_a_device_that_requires_it_ends_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missing(monkeypatch)
    np.savez(tmp_path / "data.npz", x=np.zeros((4, 3), np.float32), y=np.zeros(4, np.int64))
    arguments = ["run", "--coordinator", "ws://127.0.0.1:9", "--state", str(tmp_path / "state")]
    arguments += ["--data", str(tmp_path / "data.npz"), "--require-secure"]
    assert main(arguments) == 1
    assert 'pip install "fleetlearn[device,secure]"' in capsys.readouterr().err
    assert main([*arguments, "--trust-helper", "0f"]) == 2


def test_a_package_that_is_gone_when_the_update_is_masked_gives_the_task_back(
    served: Served, data: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with pair(served, data, tmp_path) as (coordinator, _):
            line = await coordinator.line()
            await line.check_in()
            await line.say(secure_task(served, "r1-1-1", LATE))
            await line.answer_fetches(TaskFinished)
            with monkeypatch.context() as context:
                context.setitem(sys.modules, "fleetlearn_device.training.masking", None)
                await line.say(TaskWeighing("r1-1-1", 0.5))
                failed = await line.expect(Failed)
            assert (failed.task, failed.code) == ("r1-1-1", "unsupported")

    asyncio.run(test())


# Mistakes that are planted in the device: each of the checks above must be able to fail.


async def two_versions(served: Served, data: Any, folder: Path) -> int:
    """Return how many masked versions of one task leave a device that loses its connection and its
    process, and whose coordinator asks again and again."""
    seen: set[bytes] = set()
    task = secure_task(served, "r1-1-1", LATE)
    for _ in range(3):
        async with pair(served, data, folder) as (coordinator, _):
            line = await coordinator.line()
            await line.check_in()
            await line.say(task)
            message = await line.answer_fetches((Report, TaskFinished, Failed))  # type: ignore
            if isinstance(message, TaskFinished):
                await line.say(TaskWeighing("r1-1-1", 0.5))
                message = await line.expect(Report)
            if isinstance(message, Report):
                seen.add(hashlib.sha256(await line.take_upload(message)).digest())
            line.cut()
    return len(seen)


def _keeps_unmasked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The masked update is not written in the place of the unmasked one."""

    def save_masked(self: Outbox, report: Report, content: Any) -> None:
        self._mistake = report, bytes(content)  # type: ignore[attr-defined]

    def chunks(self: Outbox, transfer: int, offset: int, chunk_bytes: int = 2**16) -> Any:
        from fleetlearn_protocol.frames import pack_chunk

        yield pack_chunk(transfer, offset, self._mistake[1][offset:])  # type: ignore[attr-defined]

    monkeypatch.setattr(Outbox, "save_masked", save_masked)
    monkeypatch.setattr(Outbox, "chunks", chunks)


def _nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No mistake."""


@pytest.mark.parametrize(
    ("plant", "versions"), [(_nothing, {1}), (_keeps_unmasked, {2, 3})], ids=["none", "kept"]
)
def test_planted_mistakes_are_found(
    served: Served,
    data: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    plant: Callable[[pytest.MonkeyPatch], None],
    versions: set[int],
) -> None:
    plant(monkeypatch)
    assert asyncio.run(two_versions(served, data, tmp_path)) in versions
