"""The kept state of each bundle, as it comes from a task and is read for the next."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from fleetlearn_device.storage.state_directory import StateDirectory
from fleetlearn_protocol.encodings import FLOAT32
from fleetlearn_protocol.messages import Report

UPDATE = bytes(range(256)) * 4
REPORT = Report(
    "t1", 3, (FLOAT32.part("update", UPDATE),), 7, 3, 2.0, True, 0.5, {"accuracy": 0.25}
)
BUNDLE = "b" * 64
BEFORE, AFTER = np.array([1, 2], np.float32), np.array([3, 4], np.float32)
LATER = msgspec.structs.replace(REPORT, task="t2")


def test_what_is_kept_comes_with_the_update(tmp_path: Path) -> None:
    first = StateDirectory(tmp_path)
    assert first.kept_states.load(BUNDLE, 2) is None
    first.outbox.save(REPORT, (UPDATE,), BUNDLE, BEFORE)
    first.outbox.drop("t1")
    assert first.kept_states.load("c" * 64, 2) is None
    first.close()
    second = StateDirectory(tmp_path)
    kept = second.kept_states.load(BUNDLE, 2)
    assert kept is not None
    assert kept.tolist() == BEFORE.tolist()
    second.outbox.save(LATER, (UPDATE,), BUNDLE, AFTER)
    assert (tmp_path / "kept" / BUNDLE).read_bytes() == AFTER.tobytes() + zlib.crc32(
        AFTER.tobytes()
    ).to_bytes(4, "little")
    second.contents.delete_bundle(BUNDLE)
    kept = second.kept_states.load(BUNDLE, 2)
    assert kept is not None
    assert kept.tolist() == AFTER.tolist()
    assert second.kept_states.load(BUNDLE, 0) is None
    second.close()


@pytest.mark.parametrize(
    "damage", [lambda b: b[:-1], lambda b: b"\x01" + b[1:], lambda b: b + b"\0", lambda b: b""]
)
def test_what_is_kept_and_damaged_is_put_aside(
    state: StateDirectory, damage: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    state.outbox.save(REPORT, (UPDATE,), BUNDLE, BEFORE)
    path = state.path / "kept" / BUNDLE
    damaged = damage(path.read_bytes())
    path.write_bytes(damaged)
    assert state.kept_states.load(BUNDLE, 2) is None
    assert "damaged" in caplog.text
    assert path.with_name(f"{BUNDLE}.damaged").read_bytes() == damaged
    state.outbox.save(LATER, (UPDATE,), BUNDLE, AFTER)
    kept = state.kept_states.load(BUNDLE, 2)
    assert kept is not None
    assert kept.tolist() == AFTER.tolist()
