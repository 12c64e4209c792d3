"""The kept state of each bundle, as it comes from a task and is read for the next."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from fleetlearn_device.storage.kept_states import personal_name, read_kept
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


def test_a_personal_model_may_have_more_behind_it(state: StateDirectory, tmp_path: Path) -> None:
    """Who wants its first elements need not know what the algorithm keeps there."""
    more = np.array([5, 6, 7], np.float32)
    state.outbox.save(REPORT, (UPDATE,), BUNDLE, BEFORE, personal=more)
    found = state.kept_states.load_personal(BUNDLE, 2)
    assert found is not None
    assert found.tolist() == [5, 6, 7]
    path = state.path / "kept" / personal_name(BUNDLE)
    read = read_kept(path, 2, or_more=True)
    assert read is not None
    assert read.tolist() == [5, 6]
    assert read_kept(path, 2) is None, "what is kept beside it has one size"
    assert state.kept_states.load_personal("c" * 64, 2) is None
    path.write_bytes(path.read_bytes()[:-4])
    assert state.kept_states.load_personal(BUNDLE, 2) is None
    assert path.with_name(f"{path.name}.damaged").exists()
    state.outbox.save(LATER, (UPDATE,), BUNDLE, BEFORE, personal=more)
    assert state.kept_states.load_personal(BUNDLE, 4) is None, "a model of another size"
