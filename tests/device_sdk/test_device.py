"""The device on a real socket, against a coordinator that the test plays; whole processes where one
is killed.

What any SDK must do is in the transcripts (tests/protocol/test_transcripts.py); here is what only
this one has.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from buffers import trained_model
from fleetlearn_device import BufferWriter, Device, open_runtime
from fleetlearn_device.__main__ import main
from fleetlearn_device.driver.timing import Timing
from fleetlearn_device.runtimes.checks import DataError
from fleetlearn_device.runtimes.import_onnxruntime import RuntimeUnavailableError
from fleetlearn_device.runtimes.providers import CPU, PROVIDERS, Provider
from fleetlearn_device.runtimes.runtime_onnx import OnnxRuntime
from fleetlearn_device.session.privacy_demands import PrivacyDemands
from fleetlearn_device.storage.errors import StateError
from fleetlearn_device.storage.outbox import Outbox
from fleetlearn_device.storage.state_directory import StateDirectory, describe
from fleetlearn_device.storage.status import read_status
from fleetlearn_device.training.algorithms import known_algorithms
from fleetlearn_device.training.train import StoppedError, train
from fleetlearn_device.training.trainer import MAX_STARTS, Trainer
from fleetlearn_protocol.bundle import write_inference_model
from fleetlearn_protocol.encodings import FLOAT32
from fleetlearn_protocol.errors import Code, ProtocolError
from fleetlearn_protocol.manifest import EVAL, TRAIN
from fleetlearn_protocol.messages import (
    Cancel,
    CheckIn,
    ComeBack,
    Failed,
    Fetch,
    Grant,
    Held,
    PrivacyNote,
    Refused,
    Report,
)
from line_bundle import line_data, write_line_bundle
from processes import free_port
from scripted import PATIENCE, Line, Scripted, Served, scripted, small_buffers
from websockets.exceptions import ConnectionClosed

QUICK = Timing(send=0.5, close=0.5, base=0.01)
HYPER = {"lr": 0.1, "mu": 0.01}
LONG = {"epochs": 10**6, "deadline": 10**6}


@pytest.fixture(scope="module")
def served(cases: Callable[[str], Any]) -> Served:
    return Served(cases("softmax").path)


@pytest.fixture(scope="module")
def data(cases: Callable[[str], Any]) -> dict[str, Any]:
    case = cases("softmax")
    names = [row.name for row in Served(case.path).bundle.manifest.batch]
    return dict(zip(names, (case.x[:20], case.y[:20]), strict=True))


@asynccontextmanager
async def serving(device: Device) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(device.serve())
    try:
        yield task
    finally:
        device.stop()
        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def pair(
    served: Served | None, data: Any, folder: Path, **options: Any
) -> AsyncIterator[tuple[Scripted, asyncio.Task[None]]]:
    """A coordinator and a device in this process."""
    async with scripted(served.contents if served is not None else None) as coordinator:
        device = Device(coordinator.url, data=data, state_dir=folder, timing=QUICK, **options)
        async with serving(device) as running:
            yield coordinator, running


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.005)


async def in_training(coordinator: Scripted, served: Served, name: str = "t1") -> Line:
    """A connection whose device is in the middle of a training that would take days."""
    line = await coordinator.line()
    await line.check_in(heartbeat=0.02)
    await line.say(served.task(name, **LONG))
    fetches = asyncio.create_task(line.answer_fetches(Failed))
    await until(lambda: any(beat.task == name and beat.steps > 3 for beat in line.heartbeats))
    fetches.cancel()
    await asyncio.gather(fetches, return_exceptions=True)
    return line


def test_a_device_waits_for_the_first_record_of_its_buffer(
    served: Served, data: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fleetlearn_device.device.LOOK_FOR_EXAMPLES", 0.02)
    path = tmp_path / "live.flb"
    arrays = {name: (array.dtype, array.shape[1:]) for name, array in data.items()}

    async def test() -> None:
        async with pair(served, str(path), tmp_path / "state") as (coordinator, running):
            with BufferWriter(path, arrays, 50) as buffer:
                await until(lambda: (tmp_path / "state" / "lock").exists())
                assert not coordinator.lines
                for row in range(5):
                    buffer.append(**{name: array[row] for name, array in data.items()})
                line = await coordinator.line()
                assert (await line.check_in()).examples == 5
                buffer.append(**{name: array[5] for name, array in data.items()})
                await line.say(served.task("t1"))
                report = await line.answer_fetches(Report)
                assert report.examples == 6
            assert not running.done()

    asyncio.run(test())


def test_a_device_that_waits_for_records_can_be_stopped(tmp_path: Path) -> None:
    async def test() -> None:
        device = Device("ws://127.0.0.1:9", str(tmp_path / "live.flb"), tmp_path / "state")
        async with serving(device) as running:
            await until(lambda: (tmp_path / "state" / "lock").exists())
            device.stop()
            async with asyncio.timeout(PATIENCE):
                await running

    asyncio.run(test())


def test_two_rounds_give_the_updates_that_training_gives(
    served: Served, data: Any, tmp_path: Path
) -> None:
    async def test() -> None:
        async with pair(served, data, tmp_path, name="dev-1") as (coordinator, _):
            line = await coordinator.line()
            check_in = await line.check_in()
            assert (check_in.device, check_in.examples, check_in.held) == ("dev-1", 20, None)
            assert check_in.runtime.startswith("onnx 1.")
            await line.say(served.task("t1", evaluate=True))
            report = await line.answer_fetches(Report)
            assert describe(tmp_path).pending == report  # it is on disk before it is reported
            update = np.frombuffer(await line.accept(report), np.float32)

            runtime = open_runtime(served.bundle)
            runtime.load(served.model)
            expected = train(
                runtime, data, hyper=HYPER, epochs=2, batch_size=8, seed=5, evaluate=True
            )
            np.testing.assert_array_equal(update, expected.update)
            assert (report.examples, report.steps, report.epochs, report.complete) == (
                20,
                6,
                2.0,
                True,
            )
            assert (report.loss, report.metrics) == (expected.loss, expected.metrics)
            assert report.evaluation == expected.evaluation
            names = [fetch.sha256 for fetch in line.fetches]
            assert names[0] == served.bundle.sha256
            assert sorted(names[1:]) == sorted(
                [served.model_sha256, served.file(TRAIN), served.file(EVAL)]
            )

            await line.say(served.task("t2", round=2, seed=6))
            assert (await line.expect(Report)).task == "t2"  # nothing was lacking
            assert (await line.accept(await again(line, "t2"))) != update.tobytes()

    async def again(line: Line, name: str) -> Report:
        report = describe(tmp_path).pending
        assert report is not None
        assert report.task == name
        return report

    asyncio.run(test())


def test_a_redirect_is_not_followed_since_nobody_has_checked_where_it_leads(
    data: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        asked, elsewhere = list[bytes](), list[bytes]()
        async with AsyncExitStack() as held:

            async def start(requests: list[bytes], place: str) -> str:
                async def answer(
                    reader: asyncio.StreamReader, writer: asyncio.StreamWriter
                ) -> None:
                    requests.append(await reader.readuntil(b"\r\n\r\n"))
                    writer.write(
                        (
                            f"HTTP/1.1 302 Found\r\nLocation: {place}\r\nContent-Length: 0\r\n\r\n"
                        ).encode()
                    )
                    writer.close()

                server = await held.enter_async_context(
                    await asyncio.start_server(answer, "127.0.0.1", 0)
                )
                return f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}"

            other = await start(elsewhere, "/")
            url = await start(asked, other)
            with caplog.at_level(logging.WARNING, logger="fleetlearn.device"):
                async with serving(Device(url, data, tmp_path, token=43 * "t", timing=QUICK)):
                    await until(lambda: len(asked) > 1)
            assert b"Fleetlearn-Enrolment: " + 43 * b"t" in asked[0]
            assert not elsewhere
            assert f"{url} refuses the connection: HTTP 302 Found" in caplog.text

    asyncio.run(test())


def test_a_device_waits_as_long_as_a_refused_handshake_asks_for(
    data: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(
            b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 300\r\nContent-Length: 8\r\n\r\ntoo "
            b"many"
        )
        writer.close()

    async def test() -> None:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            url = f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            async with serving(Device(url, data, tmp_path, timing=QUICK)):
                await until(lambda: "connecting again in 300.0 s" in caplog.text)
        assert f"{url} refuses the connection: too many" in caplog.text

    with caplog.at_level(logging.INFO, "fleetlearn.device"):
        asyncio.run(test())


def test_a_web_page_of_a_proxy_is_named_and_not_written_to_the_log(
    data: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    page = (
        b"<!DOCTYPE html><html><body><h1>Sign in to the network</h1>"
        + 5000 * b"<p>.</p>"
        + b"</body></html>"
    )

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = (
            "HTTP/1.1 502 Bad Gateway\r\nContent-Type: text/html\r\nContent-Length: "
            f"{len(page)}\r\n\r\n"
        )
        writer.write(head.encode() + page)
        writer.close()

    async def test() -> None:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            url = f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            async with serving(Device(url, data, tmp_path, timing=QUICK)):
                await until(lambda: "refuses the connection" in caplog.text)
        assert (
            f"{url} refuses the connection: HTTP 502 Bad Gateway, with a web page: a proxy or "
            "another server answers there, and no fleetlearn coordinator"
        ) in caplog.messages
        assert "<p>" not in caplog.text

    with caplog.at_level(logging.INFO, "fleetlearn.device"):
        asyncio.run(test())


def test_a_download_goes_on_where_the_connection_was_cut(
    served: Served, data: Any, tmp_path: Path
) -> None:
    async def test() -> None:
        async with pair(served, data, tmp_path) as (coordinator, _):
            line = await coordinator.line()
            await line.check_in()
            await line.say(served.task())
            fetch = await line.expect(Fetch)
            await line.send_content(fetch, chunk=100, stop_after=500)
            partial = tmp_path / "partial" / fetch.sha256
            await until(lambda: partial.exists() and partial.stat().st_size == 500)
            line.cut()

            line = await coordinator.line()
            assert (await line.check_in()).held is None
            assert await line.expect(Fetch) == Fetch(fetch.sha256, 500)
            await line.send_content(Fetch(fetch.sha256, 500))
            await line.accept(await line.answer_fetches(Report))

    asyncio.run(test())


def test_a_coordinator_that_stops_reading_is_aborted_and_the_update_comes_later(
    tmp_path: Path,
) -> None:
    # more than the system buffers
    update = np.random.default_rng(1).standard_normal(8 * 2**20, np.float32)
    report = Report("t1", 1, (FLOAT32.part("update", update),), 20, 3, 1.0, True, 0.5)
    state = StateDirectory(tmp_path)
    state.outbox.save(report, (update.data.cast("B"),))
    state.close()

    async def test() -> None:
        with small_buffers() as listening:
            async with scripted(sock=listening) as coordinator:
                device = Device(
                    coordinator.url, data=(update[:20],), state_dir=tmp_path, timing=QUICK
                )
                async with serving(device):
                    line = await coordinator.line()
                    assert (await line.check_in()).held == Held("t1", 1)
                    assert await line.expect(Report) == report
                    await line.say(Grant("t1", 3, 0))
                    line.connection.transport.pause_reading()

                    line = await coordinator.line()  # while the first still stands
                    assert (await line.check_in()).held == Held("t1", 1)
                    await line.accept(await line.expect(Report))

    asyncio.run(test())


def test_the_checkpoint_of_a_finished_update_goes_at_the_next_start(
    data: Any, tmp_path: Path
) -> None:
    """A process died after it saved the update and before it deleted the checkpoint, which holds
    the trained model: without the noise that the update may have."""
    update = np.ones(3, np.float32)
    report = Report("t1", 1, (FLOAT32.part("update", update),), 20, 3, 1.0, True, 0.5)
    state = StateDirectory(tmp_path)
    state.outbox.save(report, (update.data.cast("B"),))
    state.checkpoint.save("t1", b"", {"local": update})
    state.close()

    async def test() -> None:
        async with scripted() as coordinator:
            device = Device(coordinator.url, data=data, state_dir=tmp_path, timing=QUICK)
            async with serving(device):
                line = await coordinator.line()
                assert (await line.check_in()).held == Held("t1", 1)
                assert not (tmp_path / "checkpoint").exists()
                await line.accept(await line.expect(Report))

    asyncio.run(test())


def test_a_device_takes_part_as_often_as_its_owner_allows(
    served: Served, data: Any, tmp_path: Path
) -> None:
    """Over a restart too. The update that nobody accepts counts as well."""
    note = PrivacyNote(1.5, 1e-6, 8.0)

    async def trained(line: Line, name: str) -> Report:
        await line.say(served.task(name, clip=0.5, privacy=note))
        report: Report = await line.answer_fetches(Report)
        return report

    async def test() -> None:
        options = {"privacy": PrivacyDemands(participations=2)}
        async with pair(served, data, tmp_path, **options) as (coordinator, _):
            line = await coordinator.line()
            await line.check_in()
            await trained(line, "r1-1-1")
        async with pair(served, data, tmp_path, **options) as (coordinator, _):
            line = await coordinator.line()
            assert (await line.check_in()).held == Held("r1-1-1", 1)
            await line.expect(Report)
            await line.say(Cancel("r1-1-1", Code.ROUND_OVER))
            await line.accept(await trained(line, "r1-2-1"))
            await line.say(served.task("r1-3-1", clip=0.5, privacy=note))
            failed = await line.expect(Failed)
            assert (failed.code, failed.task) == ("unsupported", "r1-3-1")
            assert "has made 2 updates in the run r1, and its owner allows 2" in failed.text
            line = await coordinator.line()
            await line.check_in()
            assert (await trained(line, "r2-1-1")).task == "r2-1-1", "another run"
        status = read_status(tmp_path)
        assert status is not None
        assert (status.history.privacy, status.took_part, status.may_take_part) == (note, 1, 2)

    asyncio.run(test())


def test_an_update_with_its_own_noise_that_was_lost_is_not_made_again(
    served: Served, data: Any, tmp_path: Path
) -> None:
    """A part of it was sent; then the disk lost it. Whoever has two noised updates of one task has
    their mean."""

    async def test() -> None:
        task = served.task("r1-1-1", clip=0.5, local_noise=1.0)
        async with pair(served, data, tmp_path) as (coordinator, _):
            line = await coordinator.line()
            await line.check_in()
            await line.say(task)
            report = await line.answer_fetches(Report)
            assert (report.examples, report.loss) == (1, 0.0)
            await line.take_upload(report, bytes_=512)
        (update,) = (tmp_path / "pending").glob("*.bin")
        content = update.read_bytes()
        update.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        async with pair(served, data, tmp_path) as (coordinator, _):
            line = await coordinator.line()
            assert (await line.check_in()).held is None
            await line.say(task)
            failed = await line.answer_fetches(Failed)
            assert (failed.code, failed.task) == ("unsupported", "r1-1-1")
            assert "could take the mean" in failed.text

    asyncio.run(test())


def test_a_coordinator_that_gives_no_sign_of_life_is_left(
    data: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It takes what comes and reads nothing, as behind a cable that was pulled out."""

    async def test() -> None:
        async with scripted() as coordinator:
            timing = QUICK._replace(ping=0.2, send=PATIENCE)
            device = Device(coordinator.url, data=data, state_dir=tmp_path, timing=timing)
            async with serving(device):
                line = await coordinator.line()
                await line.check_in(heartbeat=0.05)
                line.connection.transport.pause_reading()
                await (await coordinator.line()).check_in(heartbeat=0.05)

    caplog.set_level(logging.WARNING, "fleetlearn.device")
    asyncio.run(test())
    assert "no sign of life for 0.2 s" in caplog.text


def test_bytes_that_are_wrong_twice_give_the_task_back(
    served: Served, data: Any, tmp_path: Path
) -> None:
    async def test() -> None:
        async with pair(served, data, tmp_path) as (coordinator, _):
            line = await coordinator.line()
            await line.check_in()
            await line.say(served.task())
            fetch = await line.expect(Fetch)
            line.contents = dict(line.contents) | {
                fetch.sha256: b"{" + line.contents[fetch.sha256][1:-1] + b"!"
            }
            await line.send_content(fetch)
            await line.send_content(await line.expect(Fetch))
            failed = await line.expect(Failed)
            assert (failed.task, failed.code) == ("t1", "bad-bundle")
            assert "manifest.json arrived twice" in failed.text
            assert await line.closed() == 1000
            again = await (await coordinator.line()).expect(CheckIn)
            assert (again.held, again.algorithms) == (None, known_algorithms("onnx"))

    asyncio.run(test())


def test_a_time_budget_gives_partial_work(served: Served, data: Any, tmp_path: Path) -> None:
    async def test() -> None:
        async with pair(served, data, tmp_path) as (coordinator, _):
            line = await coordinator.line()
            await line.check_in()
            await line.say(served.task("t1", epochs=10**6, time_budget=0.5))
            report = await line.answer_fetches(Report)
            assert not report.complete
            passes, rest = divmod(report.steps, 3)  # steps of 8, 8 and 4 examples
            assert report.epochs == pytest.approx(passes + (0.0, 0.4, 0.8)[rest])
            assert 0 < report.seconds < 5

    asyncio.run(test())


def test_a_training_that_fails_gives_the_task_back(
    served: Served, data: Any, tmp_path: Path
) -> None:
    async def test() -> None:
        async with pair(served, data, tmp_path) as (coordinator, _):
            for name, hyper, code in (
                ("t1", {"lr": 1e30}, "diverged"),
                ("t2", {"rate": 0.1}, "runtime-error"),
            ):
                line = await coordinator.line()
                await line.check_in()
                await line.say(served.task(name, hyper=hyper, epochs=50))
                failed = await line.answer_fetches(Failed)
                assert (failed.task, failed.code) == (name, code)
                assert await line.closed() == 1000

    asyncio.run(test())


def test_data_that_do_not_fit_end_the_device(served: Served, data: Any, tmp_path: Path) -> None:
    async def test() -> None:
        wrong = {name: array[:, :7] if array.ndim == 2 else array for name, array in data.items()}
        async with pair(served, wrong, tmp_path) as (coordinator, running):
            line = await coordinator.line()
            await line.check_in()
            await line.say(served.task())
            failed = await line.answer_fetches(Failed)
            assert failed.code == "bad-data"
            assert "(20, 7)" in failed.text
            assert await line.closed() == 1000
            with pytest.raises(DataError, match="expected"):
                await running

    asyncio.run(test())


def test_batches_of_the_users_own(served: Served, data: Any, tmp_path: Path) -> None:
    async def test() -> None:
        batches = [
            {name: array[i : i + 5] for name, array in data.items()} for i in range(0, 20, 5)
        ]
        async with pair(served, batches, tmp_path, examples=20) as (coordinator, _):
            line = await coordinator.line()
            assert (await line.check_in()).examples == 20
            await line.say(served.task(epochs=3))
            report = await line.answer_fetches(Report)
            assert (report.steps, report.epochs) == (12, 3.0)

    asyncio.run(test())


@pytest.mark.ort_training
def test_the_other_runtime_fetches_its_own_files(served: Served, data: Any, tmp_path: Path) -> None:
    async def test() -> None:
        async with pair(served, data, tmp_path, runtime="ort-training") as (coordinator, _):
            line = await coordinator.line()
            assert (await line.check_in()).runtime.startswith("ort-training 1.")
            await line.say(served.task())
            report = await line.answer_fetches(Report)
            names = {fetch.sha256 for fetch in line.fetches}
            assert served.file("ort_training/checkpoint") in names
            assert served.file(TRAIN) not in names
            update = np.frombuffer(await line.accept(report), np.float32)
            expected = train(
                open_runtime(served.bundle), data, hyper=HYPER, epochs=2, batch_size=8, seed=5
            )
            np.testing.assert_allclose(update, expected.update, atol=1e-6)

    asyncio.run(test())


def test_a_task_with_parameters_in_another_memory(
    served: Served, data: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, with the CPU and memory of its own in the GPU's place."""
    monkeypatch.setitem(PROVIDERS, "cuda", Provider(CPU, {}, "cpu"))

    async def test() -> None:
        async with pair(served, data, tmp_path, provider="cuda") as (coordinator, _):
            line = await coordinator.line()
            assert (await line.check_in()).runtime.endswith(" on cuda")
            for name in ("t1", "t2"):
                await line.say(served.task(name, evaluate=True))
                update = await line.accept(await line.answer_fetches(Report))
                runtime = open_runtime(served.bundle)
                runtime.load(served.model)
                expected = train(runtime, data, hyper=HYPER, epochs=2, batch_size=8, seed=5)
                assert update == expected.update.tobytes()

    asyncio.run(test())


def test_a_gpu_that_cannot_be_used_ends_the_device_at_its_start(
    data: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PROVIDERS, "cuda", Provider("NoSuchExecutionProvider", {}, "cuda"))
    with pytest.raises(
        RuntimeUnavailableError, match="is ONNX Runtime's NoSuchExecutionProvider, which is not in"
    ):
        Device("ws://127.0.0.1:9", data, tmp_path / "state", provider="cuda").run()
    assert not (tmp_path / "state").exists()


def test_a_state_directory_that_fails_ends_the_device(
    served: Served, data: Any, tmp_path: Path
) -> None:
    async def test() -> None:
        async with pair(served, data, tmp_path) as (coordinator, running):
            line = await coordinator.line()
            await line.check_in()
            (tmp_path / "partial").rmdir()
            await line.say(served.task())
            failed = await line.answer_fetches(Failed)
            assert (failed.task, failed.code) == ("t1", "runtime-error")
            assert "cannot use the state directory" in failed.text
            assert await line.closed() == 1000
            with pytest.raises(StateError, match="cannot use the state directory"):
                await running

    asyncio.run(test())


def test_what_stays_on_the_device_goes_from_task_to_task(tmp_path: Path) -> None:
    served = Served(write_line_bundle(tmp_path / "line.bundle", personal=True, state=True).path)
    x, y = line_data(20)
    state = tmp_path / "state"

    async def test() -> None:
        async with pair(served, (x, y), state) as (coordinator, _):
            line = await coordinator.line()
            await line.check_in()
            await line.say(served.task("t1"))
            first = await line.accept(await line.answer_fetches(Report))
            await line.say(served.task("t2"))
            second = await line.accept(await line.expect(Report))
            runtime = open_runtime(served.bundle)
            updates = []
            # the personal part and the kept state go on, the momentum begins at 0
            for _ in range(2):
                runtime.load(served.model)
                outcome = train(runtime, (x, y), hyper=HYPER, epochs=2, batch_size=8, seed=5)
                updates.append(outcome.update.tobytes() + outcome.buffers.tobytes())
            assert updates == [first, second]
            assert first != second
            (path,) = (state / "kept").iterdir()
            assert (path.name, path.read_bytes()[:-4]) == (
                served.bundle.sha256,
                outcome.kept_state.tobytes(),
            )

    asyncio.run(test())


def test_the_owner_has_the_device_s_own_model_as_a_file(tmp_path: Path) -> None:
    """infer.onnx is fetched for it, and has the personal parameter with which the kept state
    begins."""
    served = Served(write_line_bundle(tmp_path / "line.bundle", personal=True).path)
    own = tmp_path / "mine.onnx"

    async def test() -> None:
        async with pair(served, line_data(20), tmp_path / "state", own_model=own) as (
            coordinator,
            _,
        ):
            line = await coordinator.line()
            await line.check_in()
            await line.say(served.task("t1"))
            sent = np.frombuffer(await line.accept(await line.answer_fetches(Report)), "<f4")
            parts = {"update": sent[: served.model.size], "buffers": sent[served.model.size :]}
            trained = trained_model(parts, served.model, served.bundle.manifest)
            personal = (tmp_path / "state" / "kept" / served.bundle.sha256).read_bytes()[:4]
            whole = np.frombuffer(trained.tobytes() + personal, "<f4")
            assert own.read_bytes() == write_inference_model(served.bundle, whole)

    asyncio.run(test())


def test_an_own_part_that_cannot_be_read_ends_the_device(tmp_path: Path) -> None:
    served = Served(write_line_bundle(tmp_path / "line.bundle", personal=True).path)
    state = tmp_path / "state"
    (state / "kept" / served.bundle.sha256).mkdir(parents=True)

    async def test() -> None:
        async with pair(served, line_data(20), state) as (coordinator, running):
            line = await coordinator.line()
            await line.check_in()
            await line.say(served.task())
            failed = await line.answer_fetches(Failed)
            assert (failed.task, failed.code) == ("t1", "runtime-error")
            assert await line.closed() == 1000
            with pytest.raises(StateError, match="cannot use the state directory"):
                await running

    asyncio.run(test())


def test_two_devices_cannot_share_a_directory(data: Any, tmp_path: Path) -> None:
    async def test() -> None:
        async with scripted() as coordinator:
            device = Device(coordinator.url, data=data, state_dir=tmp_path, timing=QUICK)
            async with serving(device):
                await coordinator.line()
                with pytest.raises(StateError, match="in use by another process"):
                    await Device(coordinator.url, data=data, state_dir=tmp_path).serve()

    asyncio.run(test())


@pytest.mark.parametrize(
    "message",
    ["{", '{"type":"hello"}', '{"type":"accepted"}', b"12", '{"type":"welcome","coordinator":"x"}'],
)
def test_a_broken_message_closes_the_connection_and_no_more(
    message: str | bytes, data: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with pair(None, data, tmp_path) as (coordinator, _):
            line = await coordinator.line()
            await line.check_in()
            await line.say(message)
            assert await line.closed() == 1002
            await (await coordinator.line()).check_in()

    with caplog.at_level(logging.INFO, "fleetlearn.device"):
        asyncio.run(test())
    (warning,) = [
        record.getMessage() for record in caplog.records if record.levelno == logging.WARNING
    ]
    assert warning.startswith("closing the connection: the coordinator broke the protocol: ")


def test_a_frame_above_the_bound_closes_the_connection(data: Any, tmp_path: Path) -> None:
    async def test() -> None:
        async with pair(None, data, tmp_path) as (coordinator, _):
            line = await coordinator.line()
            await line.check_in()
            await line.say(bytes(2**18))
            assert await line.closed() == 1009
            await (await coordinator.line()).check_in()

    asyncio.run(test())


def test_another_version_ends_a_device_that_runs_until_the_end(data: Any, tmp_path: Path) -> None:
    async def test() -> None:
        async with pair(None, data, tmp_path, until_finished=True) as (coordinator, running):
            line = await coordinator.line()
            await line.expect(CheckIn)
            await line.say(Refused(Code.BAD_VERSION, "version 2 is spoken here"))
            await line.closed()
            with pytest.raises(ProtocolError, match="version 2 is spoken here"):
                await running

    asyncio.run(test())


def test_come_back_is_heeded_and_finished_ends_the_device(data: Any, tmp_path: Path) -> None:
    async def test() -> None:
        async with scripted() as coordinator:
            device = Device(
                coordinator.url, data=data, state_dir=tmp_path, timing=QUICK, until_finished=True
            )
            async with serving(device) as running:
                line = await coordinator.line()
                await line.expect(CheckIn)
                await line.say(ComeBack(0.5, "busy"))
                assert await line.closed() == 1000
                left = asyncio.get_running_loop().time()
                line = await coordinator.line()
                assert asyncio.get_running_loop().time() - left >= 0.25  # half of what was said
                await line.check_in()
                await line.say(ComeBack(3600.0, "finished"))
                assert await line.closed() == 1000
                async with asyncio.timeout(PATIENCE):
                    await running

    asyncio.run(test())


def test_a_coordinator_that_comes_later_is_found(
    data: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        port = free_port()
        device = Device(f"ws://127.0.0.1:{port}", data=data, state_dir=tmp_path, timing=QUICK)
        async with serving(device):
            await until(lambda: "cannot connect" in caplog.text)
            async with scripted(port=port) as coordinator:
                await (await coordinator.line()).check_in()

    with caplog.at_level(logging.INFO, "fleetlearn.device"):
        asyncio.run(test())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_run_gives_the_signals_back_to_the_program(
    data: Any, tmp_path: Path, number: signal.Signals
) -> None:
    """The program goes on after ``run``: Ctrl-C and ``docker stop`` must mean to it what they meant
    before."""
    device = Device("ws://127.0.0.1:9", data, tmp_path / "state", timing=QUICK)
    before = {
        name: signal.signal(name, lambda *_: None)
        for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    }
    own = {name: signal.getsignal(name) for name in before}
    try:
        threading.Thread(target=kill_when_serving, args=(device, number)).start()
        device.run()
        assert device.stopped_by is number
        assert {name: signal.getsignal(name) for name in before} == own
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)


def kill_when_serving(device: Device, number: signal.Signals) -> None:
    while device._stop is None:  # its handlers are set by then
        time.sleep(0.01)
    os.kill(os.getpid(), number)


def test_run_in_an_event_loop_says_what_to_await(data: Any, tmp_path: Path) -> None:
    async def notebook() -> None:
        Device("ws://127.0.0.1:9", data, tmp_path / "state").run()

    with pytest.raises(
        RuntimeError, match=r"as in a notebook.*Write `await device\.serve\(\)` there"
    ):
        asyncio.run(notebook())


def test_stopping_gives_the_task_back(served: Served, data: Any, tmp_path: Path) -> None:
    async def test() -> None:
        async with scripted(served.contents) as coordinator:
            device = Device(coordinator.url, data=data, state_dir=tmp_path, timing=QUICK)
            async with serving(device) as running:
                line = await in_training(coordinator, served)
                device.stop()
                assert (await line.expect(Failed)).code == "stopping"
                assert await line.closed() == 1000
                async with asyncio.timeout(PATIENCE):
                    await running
        StateDirectory(tmp_path).close()  # nobody holds it any more

    asyncio.run(test())


def test_a_stop_before_the_device_serves_is_remembered(data: Any, tmp_path: Path) -> None:
    async def test() -> None:
        async with scripted() as coordinator:
            device = Device(coordinator.url, data=data, state_dir=tmp_path, timing=QUICK)
            device.stop()
            async with asyncio.timeout(PATIENCE):
                await device.serve()
            running = asyncio.create_task(device.serve())  # the next one serves
            line = await coordinator.line()
            await line.check_in()
            device.stop()
            assert await line.closed() == 1000
            async with asyncio.timeout(PATIENCE):
                await running

    asyncio.run(test())


def test_a_stop_while_the_directory_is_opened_is_remembered(
    data: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        device = Device("ws://127.0.0.1:9", data=data, state_dir=tmp_path, timing=QUICK)
        load = Outbox.load

        def stopped(outbox: Outbox) -> Report | None:
            device.stop()
            return load(outbox)

        monkeypatch.setattr(Outbox, "load", stopped)
        async with asyncio.timeout(PATIENCE):
            await device.serve()

    asyncio.run(test())


def test_a_stopped_device_does_not_connect_again(
    served: Served,
    data: Any,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The training thread may take longer to end than the connection."""
    halted = threading.Event()

    def slow(trainer: Trainer, given: Any, seconds: float) -> Any:
        trainer.batches = 4
        assert trainer.halt.wait(PATIENCE)
        assert halted.wait(PATIENCE)
        raise StoppedError("stopped")

    monkeypatch.setattr(Trainer, "train", slow)

    async def test() -> None:
        async with scripted(served.contents) as coordinator:
            device = Device(coordinator.url, data=data, state_dir=tmp_path, timing=QUICK)
            async with serving(device) as running:
                line = await in_training(coordinator, served)
                device.stop()
                assert await line.closed() == 1000
                await until(
                    lambda: (
                        not any(
                            "_stay_connected" in repr(row.get_coro()) for row in asyncio.all_tasks()
                        )
                    )
                )
                halted.set()
                async with asyncio.timeout(PATIENCE):
                    await running
            assert len(coordinator.lines) == 1

    with caplog.at_level(logging.INFO, "fleetlearn.device"):
        asyncio.run(test())
    assert "connecting again" not in caplog.text


def test_a_replaced_device_ends(served: Served, data: Any, tmp_path: Path) -> None:
    async def test() -> None:
        async with pair(served, data, tmp_path) as (coordinator, running):
            line = await in_training(coordinator, served)
            await line.say(Refused(Code.REPLACED, "the same device has connected again"))
            assert await line.closed() == 1000
            with pytest.raises(ProtocolError, match="a state directory of its own"):
                await running
            assert len(coordinator.lines) == 1

    asyncio.run(test())


def test_what_is_said_on_the_connection_before_does_not_end_this_one(
    data: Any, tmp_path: Path
) -> None:
    """The coordinator replaces a half-open connection of the device by the device's own new one."""

    async def test() -> None:
        with small_buffers() as listening:
            async with scripted(sock=listening) as coordinator:
                device = Device(coordinator.url, data=data, state_dir=tmp_path, timing=QUICK)
                async with serving(device) as running:
                    before = await coordinator.line()
                    await before.check_in()
                    before.connection.transport.pause_reading()  # the device's end is not noticed
                    await before.say("{")
                    replaced = Refused(Code.REPLACED, "the same device has connected again")
                    await before.say(replaced)
                    line = await coordinator.line()
                    await line.check_in()
                    with suppress(ConnectionClosed):
                        await before.say(replaced)
                    line.cut()
                    await (await coordinator.line()).check_in()  # it is alive and well
                    assert not running.done()

    asyncio.run(test())


class Faulty:
    """A user's own batches, whose second pass fails."""

    def __init__(self, batch: Any, error: BaseException) -> None:
        self.batch, self.error, self.passes = batch, error, 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        if self.passes > 1:
            raise self.error
        yield self.batch


@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize(
    ("error", "text"),
    [
        (KeyError(3), "KeyError: 3"),
        (
            RuntimeError("one\n2026-01-01 ERROR forged \x1b[31m" * 3),
            "RuntimeError: one 2026-01-01 ERROR forged ",
        ),
        (ValueError("x" * 5000), "ValueError: xxx"),
        (MemoryError("no room"), "MemoryError: no room"),
        (SystemExit(3), "SystemExit: 3"),
    ],
)
def test_an_error_of_the_user_s_loader_is_told_with_its_type_and_line(
    error: BaseException, text: str, evaluates: bool, served: Served, data: Any, tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    line_number = Faulty.__iter__.__code__.co_firstlineno + 3

    async def test() -> None:
        loader = Faulty(data, error)
        async with pair(served, loader, tmp_path, examples=20) as (coordinator, _):
            for name in ("t1", "t2"):  # the same error again
                line = await coordinator.line()
                await line.check_in()
                await line.say(served.task(name, epochs=5, evaluate=evaluates))
                failed = await line.answer_fetches(Failed)
                assert failed.code == (
                    "out-of-memory" if isinstance(error, MemoryError) else "runtime-error"
                )
                assert failed.text.startswith(text)
                assert failed.text.endswith(f"(in __iter__, test_device.py line {line_number})")
                assert "\n" not in failed.text
                # the place is the file's name, and not its folder
                assert str(tmp_path.parent) not in failed.text

    with caplog.at_level(logging.INFO, "fleetlearn.device"):
        asyncio.run(test())
    (traced,) = [
        record.getMessage() for record in caplog.records if "Traceback" in record.getMessage()
    ]
    head, *lines = traced.splitlines()
    assert head.startswith(
        "task t1 failed by an exception, most likely of the code that gives the data:"
    )
    assert f'File "{__file__}", line {line_number}, in __iter__' in traced
    # so that none of them can be taken for a line of the log
    assert all(line.startswith("    ") for line in lines)
    assert "\x1b" not in traced
    for name in ("t1", "t2"):
        assert (
            sum(
                row.getMessage().startswith(f"task {name} failed: {text}") for row in caplog.records
            )
            == 1
        )


def test_an_error_of_ours_has_no_traceback(
    served: Served, data: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with pair(served, data, tmp_path) as (coordinator, _):
            line = await coordinator.line()
            await line.check_in()
            await line.say(served.task(hyper={"rate": 0.1}))
            failed = await line.answer_fetches(Failed)
            assert failed.code == "runtime-error"
            assert "rate" in failed.text
            assert "Error" not in failed.text

    with caplog.at_level(logging.INFO, "fleetlearn.device"):
        asyncio.run(test())
    assert "Traceback" not in caplog.text


def test_a_full_disk_shows_before_training(
    served: Served, data: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, start: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setattr(OnnxRuntime, "step", lambda *_, **__: pytest.fail("a step was done"))

    async def test() -> None:
        async with pair(served, data, tmp_path) as (coordinator, running):
            line = await coordinator.line()
            await line.check_in()
            await line.say(served.task())
            failed = await line.answer_fetches(Failed)
            assert (failed.task, failed.code) == ("t1", "disk-full")
            assert f"no room for an update of {served.model.nbytes} bytes" in failed.text
            assert await line.closed() == 1000
            with pytest.raises(StateError, match="the disk is full: free some space"):
                await running

    asyncio.run(test())


def test_a_cancelled_serve_leaves_nothing_behind(served: Served, data: Any, tmp_path: Path) -> None:
    async def test() -> None:
        async with scripted(served.contents) as coordinator:
            device = Device(coordinator.url, data=data, state_dir=tmp_path, timing=QUICK)
            running = asyncio.create_task(device.serve())
            await in_training(coordinator, served)
            running.cancel()
            async with asyncio.timeout(PATIENCE):
                await asyncio.gather(running, return_exceptions=True)
            assert running.cancelled()
            assert not [task for task in asyncio.all_tasks() if "Driver" in repr(task.get_coro())]
        StateDirectory(tmp_path).close()

    asyncio.run(test())


def test_what_the_coordinator_writes_cannot_forge_the_log(
    data: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with pair(None, data, tmp_path) as (coordinator, _):
            line = await coordinator.line()
            await line.check_in()
            await line.say(Refused(Code.BAD_MESSAGE, "bad\n2026 ERROR forged \x1b[31m"))
            await line.closed()

    with caplog.at_level(logging.INFO, "fleetlearn.device"):
        asyncio.run(test())
    assert "forged" in caplog.text
    assert not any(
        character in record.getMessage() for record in caplog.records for character in "\n\x1b"
    )


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"url": "http://127.0.0.1:1"}, "expected ws://HOST:PORT or wss://HOST:PORT"),
        ({"url": "127.0.0.1:1"}, "expected ws://HOST:PORT or wss://HOST:PORT"),
        ({"runtime": "tensorflow"}, "expected one of auto, onnx, ort-training"),
        ({"threads": 0}, "expected at least 1"),
        ({"provider": "tpu"}, "provider 'tpu'; expected one of cpu, cuda"),
        ({"runtime": "ort-training", "provider": "cuda"}, "'ort-training' computes on the CPU"),
        ({"feature_cache": -1}, "expected MiB, or 0 to keep no features"),
        ({"data": "/nowhere/data.npz"}, "does not exist"),
        ({"data": [1, 2], "examples": None}, "without examples="),
        (
            {"data": "~nobody-of-this-name/data.npz"},
            "begins with ~nobody-of-this-name, and no home folder is known",
        ),
        (
            {"state_dir": "~nobody-of-this-name/state"},
            "no home folder is known for it; write the whole path",
        ),
        ({"own_model": "~nobody-of-this-name/mine.onnx"}, "no home folder is known"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_opened(
    options: dict[str, Any], text: str, tmp_path: Path
) -> None:
    arguments: dict[str, Any] = {
        "url": "ws://127.0.0.1:1",
        "data": (np.zeros((3, 2)),),
        "state_dir": tmp_path / "s",
    }
    with pytest.raises(ValueError, match=text):
        Device(**(arguments | options))
    assert not (tmp_path / "s").exists()


def test_status_shows_a_live_device_while_it_works(
    served: Served, data: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def status() -> dict[str, str]:
        main(["status", "--state", str(tmp_path)])
        rows = (line.partition(" ") for line in capsys.readouterr().out.splitlines())
        return {about: text.strip() for about, _, text in rows}

    async def test() -> None:
        async with scripted(served.contents) as coordinator:
            device = Device(coordinator.url, data=data, state_dir=tmp_path, timing=QUICK)
            place = f"127.0.0.1 port {coordinator.port}"
            async with serving(device):
                line = await coordinator.line()
                await line.check_in()
                await until(lambda: "waiting: " in status().get("now", ""))
                assert status()["link"].startswith(
                    f"connected to {coordinator.url} ({place}), since 20"
                )
                assert status()["process"].startswith("runs since 20")
                assert status()["task"] == "none was given to this device yet"

                await line.say(served.task("t1", round=4))
                report = await line.answer_fetches(Report)
                await until(
                    lambda: status()["task"].startswith(
                        "t1 (round 4) is trained, and its update waits to be "
                    )
                )
                assert status()["now"].startswith("working: task t1 (round 4) ")
                await line.accept(report)
                await until(lambda: "its update was accepted" in status()["task"])
                assert status()["tasks"].startswith("1 accepted, ")
                assert "reason" not in status()

                await line.say(served.task("t2", round=5, hyper={"lr": 1e30}, epochs=50))
                await line.expect(Failed)
                await until(lambda: "1 failed" in status()["tasks"])
                assert "task t2 failed: " in status()["reason"]

                line = await coordinator.line()
                await line.check_in()
                await line.say(ComeBack(3600.0, "no-task"))
                assert await line.closed() == 1000
                await until(lambda: "it connects again at 20" in status()["link"])
                assert status()["link"].startswith(
                    "not connected (the coordinator has no task for this device now; the "
                )
        assert status()["process"].startswith("ended at 20")
        assert status()["process"].endswith(": it was stopped")
        assert "link" not in status()

    asyncio.run(test())


# Whole processes


@asynccontextmanager
async def process(
    coordinator: Scripted,
    folder: Path,
    *options: str,
    command: Sequence[str] = (sys.executable, "-m", "fleetlearn_device"),
) -> AsyncIterator[asyncio.subprocess.Process]:
    running = await asyncio.create_subprocess_exec(
        *command, "run", "--coordinator", coordinator.url,
        "--data", str(folder / "data.npz"), "--state", str(folder / "state"), *options,
        stdin=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        yield running
    finally:
        if running.returncode is None:
            running.kill()
        await running.communicate()


@pytest.fixture
def folder(tmp_path: Path, data: dict[str, Any]) -> Path:
    np.savez(tmp_path / "data.npz", **data)
    return tmp_path


def test_an_update_survives_sigkill_and_is_sent_without_training_again(
    served: Served, folder: Path
) -> None:
    async def test() -> None:
        async with scripted(served.contents) as coordinator:
            async with process(coordinator, folder) as first:
                line = await coordinator.line()
                device = (await line.check_in(chunk_bytes=256)).device
                await line.say(served.task())
                report = await line.answer_fetches(Report)
                part = await line.take_upload(report, bytes_=512)
                first.kill()
                assert await first.wait() == -signal.SIGKILL
            line.released.set()

            async with process(coordinator, folder) as second:
                line = await coordinator.line()
                check_in = await line.check_in()
                assert (check_in.device, check_in.held) == (device, Held("t1", 1))
                assert await line.expect(Report) == report
                update = await line.accept(report)
                assert update[:512] == part
                line.cut()
                line = await coordinator.line()
                assert (await line.check_in()).held is None  # acknowledged, so forgotten
                second.terminate()
                assert await line.closed() == 1000
                assert await second.wait() == 0

    asyncio.run(test())


def test_status_says_that_a_device_was_killed(
    served: Served, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def test() -> None:
        async with (
            scripted(served.contents) as coordinator,
            process(coordinator, folder) as running,
        ):
            await in_training(coordinator, served)
            running.kill()
            await running.wait()

    asyncio.run(test())
    assert main(["status", "--state", str(folder / "state")]) == 3
    shown = capsys.readouterr().out
    assert (
        "process  does not run, and did not end in order: it was killed, or the power failed, "
        "after 20"
    ) in shown
    assert "task     t1 (round 1) when the process ended: is in training, since 20" in shown


def test_training_that_sigkill_ended_is_done_again_to_the_same_update(
    served: Served, folder: Path
) -> None:
    async def test() -> None:
        async with scripted(served.contents) as coordinator:
            async with process(coordinator, folder) as first:
                await in_training(coordinator, served)
                first.kill()
                await first.wait()
            updates = []
            for name in ("t1", "t2"):
                async with process(coordinator, folder):
                    line = await coordinator.line()
                    assert (await line.check_in()).held is None
                    await line.say(served.task(name))
                    report = await line.answer_fetches(Report)
                    # the bundle was there; a small model is in the memory of the process alone
                    assert [fetch.sha256 for fetch in line.fetches] == [served.model_sha256]
                    updates.append(await line.accept(report))
                    await until(lambda: describe(folder / "state").pending is None)
            assert updates[0] == updates[1]

    asyncio.run(test())


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130), (signal.SIGHUP, 0)]
)
def test_signals_end_the_command_in_order(
    served: Served, folder: Path, number: signal.Signals, status: int
) -> None:
    async def test() -> None:
        async with (
            scripted(served.contents) as coordinator,
            process(coordinator, folder) as running,
        ):
            line = await in_training(coordinator, served)
            running.send_signal(number)
            assert (await line.expect(Failed)).code == "stopping"
            assert await line.closed() == 1000
            _, log = await running.communicate()
            assert running.returncode == status
            assert b"Traceback" not in log
            assert f"stopping: {number.name}".encode() in log

    asyncio.run(test())


def test_a_finished_update_survives_sigterm(served: Served, folder: Path) -> None:
    async def test() -> None:
        async with (
            scripted(served.contents) as coordinator,
            process(coordinator, folder) as running,
        ):
            line = await coordinator.line()
            await line.check_in()
            await line.say(served.task())
            report = await line.answer_fetches(Report)
            running.terminate()
            assert await line.closed() == 1000
            assert await running.wait() == 0
            assert describe(folder / "state").pending == report

    asyncio.run(test())


def test_the_command_ends_when_training_is_finished(served: Served, folder: Path) -> None:
    async def test() -> None:
        async with (
            scripted() as coordinator,
            process(coordinator, folder, "--until-finished") as running,
        ):
            line = await coordinator.line()
            await line.expect(CheckIn)
            await line.say(ComeBack(3600.0, "finished"))
            assert await line.closed() == 1000
            assert await running.wait() == 0

    asyncio.run(test())


def test_the_command_ends_with_2_where_the_data_do_not_fit(
    served: Served, folder: Path, data: Any
) -> None:
    np.savez(folder / "data.npz", **{f"my_{name}": array for name, array in data.items()})

    async def test() -> None:
        async with (
            scripted(served.contents) as coordinator,
            process(coordinator, folder) as running,
        ):
            line = await coordinator.line()
            await line.check_in()
            await line.say(served.task())
            assert (await line.answer_fetches(Failed)).code == "bad-data"
            await line.closed()
            _, log = await running.communicate()
            assert running.returncode == 2
            assert b"data.npz: there is no array x, y; expected x float32" in log
            assert b"Traceback" not in log

    asyncio.run(test())


def test_a_replaced_process_ends_with_3(folder: Path) -> None:
    async def test() -> None:
        async with (
            scripted() as coordinator,
            process(coordinator, folder, "--name", "dev-1") as running,
        ):
            line = await coordinator.line()
            await line.check_in()
            await line.say(Refused(Code.REPLACED, "the same device has connected again"))
            assert await line.closed() == 1000
            _, log = await running.communicate()
            assert running.returncode == 3
            assert (
                log.count(
                    b"\nfleetlearn-device: another process connected to the coordinator as device "
                    b"dev-1"
                )
                == 1
            )
            assert b"connecting again" not in log

    asyncio.run(test())


def test_a_task_that_killed_the_process_three_times_is_given_back(
    served: Served, folder: Path
) -> None:
    async def test() -> None:
        async with scripted(served.contents) as coordinator:
            for _ in range(MAX_STARTS):
                async with process(coordinator, folder) as running:
                    await in_training(coordinator, served)
                    running.kill()
                    await running.wait()
            async with process(coordinator, folder):
                line = await coordinator.line()
                assert (await line.check_in()).held is None
                await line.say(served.task("t1", **LONG))
                failed = await line.answer_fetches(Failed)
                assert (failed.task, failed.code) == ("t1", "killed")
                assert "killed the process 3 times" in failed.text
                line = await coordinator.line()
                await line.check_in()
                await line.say(served.task("t2"))  # another task has starts of its own
                assert (await line.answer_fetches(Report)).task == "t2"

    asyncio.run(test())


LIMITED = """
import resource, sys
from fleetlearn_device import driver
from fleetlearn_device.runtimes import runtime_onnx
from fleetlearn_device.training import trainer
from fleetlearn_device.__main__ import main
from fleetlearn_device.runtimes.import_onnxruntime import import_onnxruntime
import_onnxruntime()
(used,) = (int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmSize"))
resource.setrlimit(resource.RLIMIT_AS, (1024 * used + int(sys.argv[1]), resource.RLIM_INFINITY))
sys.exit(main(sys.argv[2:]))
"""
"""The command, with this many bytes more of memory than it has after all imports."""


@pytest.mark.skipif(
    sys.platform != "linux", reason="bounds the address space, and reads how large it is in /proc"
)
@pytest.mark.parametrize(
    ("example", "fixed", "where"), [(2**24, 0, "to run"), (0, 2**25, "to load")]
)
def test_out_of_memory_is_named_and_the_bundle_stays(
    tmp_path: Path, example: int, fixed: int, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of 1.3 GiB, and a graph with 128 MiB of constants, which are twice in memory when it
    is loaded."""
    served = Served(write_line_bundle(tmp_path / "line.bundle", needs=(example, fixed)).path)
    x, y = line_data(20)
    np.savez(tmp_path / "data.npz", x=x, y=y)
    state = StateDirectory(tmp_path / "state")
    shutil.copytree(served.bundle.path, state.contents.bundle_path(served.bundle.sha256))
    state.contents.vector_path(served.model_sha256).write_bytes(served.model.tobytes())
    state.close()
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")  # else each thread reserves 64 MiB

    async def test() -> None:
        async with (
            scripted() as coordinator,
            process(
                coordinator, tmp_path, command=(sys.executable, "-c", LIMITED, str(200 * 2**20))
            ),
        ):
            for name in ("t1", "t2"):
                line = await coordinator.line()
                await line.check_in()
                await line.say(served.task(name, batch_size=0))
                failed = await line.expect(Failed)  # and nothing was fetched
                assert (failed.task, failed.code) == (name, "out-of-memory")
                assert f"not enough memory {where} graphs/train.onnx" in failed.text

    asyncio.run(test())


@pytest.mark.parametrize(
    ("array", "value", "text"),
    [
        ("y", -1, "array y has the value -1 in example 3 (the first is 0); expected 0 to 9"),
        ("y", 10, "array y has the value 10 in example 3 (the first is 0); expected 0 to 9"),
        (
            "x",
            np.nan,
            (
                "array x has the value nan in example 3 (the first is 0), at [0]; expected finite "
                "numbers"
            ),
        ),
    ],
)
def test_values_that_cannot_be_are_named_and_end_the_command_with_2(
    served: Served, data: Any, tmp_path: Path, array: str, value: float, text: str
) -> None:
    wrong = {name: values.copy() for name, values in data.items()}
    wrong[array][3, *[0] * (wrong[array].ndim - 1)] = value
    np.savez(tmp_path / "data.npz", **wrong)

    async def test() -> None:
        async with (
            scripted(served.contents) as coordinator,
            process(coordinator, tmp_path) as running,
        ):
            line = await coordinator.line()
            await line.check_in()
            await line.say(served.task())
            failed = await line.answer_fetches(Failed)
            assert failed.code == "bad-data"
            assert text in failed.text
            assert await line.closed() == 1000
            _, log = await running.communicate()
            assert running.returncode == 2
            assert text.encode() in log
            assert b"Traceback" not in log

    asyncio.run(test())
