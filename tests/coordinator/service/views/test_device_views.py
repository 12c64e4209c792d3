"""Devices: what identities and runs know of them, together."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path

import msgspec
from fleetlearn_coordinator.service.views.device_views import device_views
from fleetlearn_coordinator.storage.find_storage import find_storage
from fleetlearn_coordinator.storage.identities import Identities
from fleetlearn_coordinator.storage.ledger import DeviceActivity, Metadata

NOW = 1000.0


def write(folder: Path, *rows: DeviceActivity, began: float | None = None) -> ExitStack:
    """Make a run with these rows; ``began``: one that runs since then, until the stack is
    closed."""
    held, storage = ExitStack(), find_storage(folder)
    held.enter_context(storage.lock())
    ledger = storage.open_ledger(power=False, any_thread=False)
    ledger.create({})
    live = {"pid": None if began is None else 1, "began": began or 0.0}
    ledger.write([*rows, Metadata("live", msgspec.json.encode(live).decode())])
    ledger.close()
    return held


def test_what_is_known_comes_together(tmp_path: Path) -> None:
    identities = Identities(tmp_path / "identities")
    token = identities.make_token(3, NOW + 10, ["roof"], NOW)
    for name in ("a", "b", "c"):
        identities.enrol(name, name * 43, token, NOW)
    identities.revoke("c", NOW + 5)
    early = DeviceActivity("a", 5.0, 5.0, "onnx 1", "sdk 1", "pi", ["old"], 3, 1, 2, "x: y", 9.0)
    late = DeviceActivity("a", 8.0, 8.0, "onnx 2", "sdk 2", None, ["own"], done=4, failed=1)
    with (
        write(tmp_path / "one", early),
        write(tmp_path / "two", late, DeviceActivity("z", 7.0), began=6.0),
    ):
        places = [(name, tmp_path / name) for name in ("one", "two", "not-begun")]
        found = {row.device: row for row in device_views(places, identities)}
    assert list(found) == ["a", "b", "c", "z"]
    a = found["a"]
    assert (a.done, a.failed, a.lost, a.runs) == (7, 2, 2, ["one", "two"])
    assert (a.seen, a.since, a.connected) == (8.0, 8.0, True)
    assert (a.runtime, a.software, a.tags) == ("onnx 2", "sdk 2", ["roof", "own"])
    assert (a.error, a.error_at) == ("x: y", 9.0)
    assert (found["b"].enrolled, found["b"].seen, found["b"].tags) == (NOW, None, ["roof"])
    assert (found["c"].enrolled, found["c"].revoked) == (None, NOW + 5)
    assert (found["z"].enrolled, found["z"].revoked, found["z"].seen) == (None, None, 7.0)


def test_nobody_is_connected_to_a_coordinator_that_was_killed(tmp_path: Path) -> None:
    """Its rows say so still: it could not write that the devices are gone."""
    row = DeviceActivity("a", 5.0, 5.0)
    with write(tmp_path / "run", row, began=4.0):
        (device,) = device_views([("run", tmp_path / "run")], None)
        assert device.connected
    (device,) = device_views([("run", tmp_path / "run")], None)
    assert (device.connected, device.since, device.seen) == (False, None, 5.0)
    with write(tmp_path / "next", row, began=6.0):  # the next process, which has not seen it
        (device,) = device_views([("run", tmp_path / "next")], None)
        assert not device.connected


def test_a_device_that_is_enrolled_again_is_not_revoked(tmp_path: Path) -> None:
    identities = Identities(tmp_path)
    token = identities.make_token(2, time.time() + 10, [], NOW)
    identities.enrol("a", "s" * 43, token, NOW)
    identities.revoke("a", NOW + 1)
    (device,) = device_views([], identities)
    assert (device.enrolled, device.revoked) == (None, NOW + 1)
    identities.enrol("a", "t" * 43, token, NOW + 2)
    (device,) = device_views([], identities)
    assert (device.enrolled, device.revoked) == (NOW + 2, None)
