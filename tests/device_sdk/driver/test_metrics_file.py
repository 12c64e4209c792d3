"""The numbers for Prometheus: what the file says, and when it is written."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from pathlib import Path

import pytest
from fleetlearn_device.driver.metrics_file import LEAST, MetricsFile, as_text
from fleetlearn_device.session.history import History
from fleetlearn_device.storage.status import PAUSES, DeviceStatus
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

STATUS = DeviceStatus(
    1e9, "connected to ws://x", 1e9, None, True, "its update was accepted", 1e9 + 5.5,
    History(accepted=3, uncounted=2, failed=1, task="t7"), 1e9, written=1e9 + 6,
    bytes_sent=1234, bytes_received=2**40, bytes_written=77,
)  # fmt: skip


def samples(text: str) -> dict[str, float]:
    """Name, with the label ``reason`` where there is one -> value."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert sample.labels.pop("device") == "sensor-7"
            reason = sample.labels.pop("reason", "")
            assert not sample.labels
            name = sample.name.removeprefix("fleetlearn_device_")
            found[f"{name} {reason}".strip()] = sample.value
    return found


def test_it_says_what_the_status_says() -> None:
    found = samples(as_text(STATUS, "sensor-7"))
    assert found == {
        "up": 1, "connected": 1, "written_timestamp_seconds": 1e9 + 6,
        "last_task_timestamp_seconds": 1e9 + 5.5, "updates_accepted_total": 3,
        "tasks_uncounted_total": 2, "tasks_failed_total": 1, "sent_bytes_total": 1234,
        "received_bytes_total": 2**40, "written_bytes_total": 77,
        **{f"paused {word}": 0 for word in PAUSES},
    }  # fmt: skip
    held = samples(as_text(replace(STATUS, paused_by="battery", connection="not"), "sensor-7"))
    changed = {key for key, value in held.items() if value != found[key]}
    assert changed == {"paused battery", "connected"}
    ended = samples(as_text(replace(STATUS, end="it was stopped"), "sensor-7"))
    assert (ended["up"], ended["connected"]) == (0, 0)
    new = replace(STATUS, history=History())
    assert samples(as_text(new, "sensor-7"))["last_task_timestamp_seconds"] == 0


def test_prometheus_own_tool_finds_nothing_to_say() -> None:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is not here: apt-get install prometheus")
    text = as_text(STATUS, "sensor-7")
    words = [found, "check", "metrics"]
    done = subprocess.run(words, input=text, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_it_is_written_at_most_once_a_minute_and_nothing_is_lost(tmp_path: Path) -> None:
    async def test() -> None:
        loop, now = asyncio.get_running_loop(), 100.0
        file = MetricsFile(tmp_path / "f.prom", "sensor-7", lambda: now)

        def accepted() -> float:
            return samples((tmp_path / "f.prom").read_text())["updates_accepted_total"]

        file.update(STATUS)
        assert accepted() == 3
        now += 20.0
        waits: list[float] = []
        later = loop.call_later
        loop.call_later = lambda wait, call: waits.append(wait) or later(3600, call)  # type: ignore
        file.update(replace(STATUS, history=History(accepted=4)))
        file.update(replace(STATUS, history=History(accepted=5)))
        assert (accepted(), waits) == (3, [LEAST - 20.0])
        assert file._waiting is not None
        file._waiting._run()  # the time is over
        assert accepted() == 5
        file.update(replace(STATUS, history=History(accepted=6), end="it was stopped"))
        assert accepted() == 6, "the end waits for nothing"
        assert [path.name for path in tmp_path.iterdir()] == ["f.prom"]

    asyncio.run(test())


def test_a_folder_that_is_not_there_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = MetricsFile(tmp_path / "no" / "f.prom", "sensor-7")
    for _ in range(2):
        file.update(replace(STATUS, end="it was stopped"))
    assert len(caplog.messages) == 1
    assert "the metrics cannot be written" in caplog.text
