"""Pages of devices: what fits, and how long what was read is good."""

from __future__ import annotations

from pathlib import Path

import pytest
from answering import Fleet
from fleetlearn_coordinator.service.views.device_search import FITS, DeviceSearch
from fleetlearn_coordinator.storage.identities import Identities
from fleetlearn_coordinator.storage.ledger import DeviceActivity
from peers import PlanMaker


@pytest.fixture
def places(make_plan: PlanMaker) -> list[tuple[str, Path]]:
    plan = make_plan()
    run = Fleet(plan)
    run.store.write(
        [
            DeviceActivity("roof-2", 5.0, runtime="ONNX 1.31", tier="board", tags=["north"]),
            DeviceActivity("roof-1", 6.0, error="diverged: x", error_at=6.0),
        ]
    )
    run.store.close()
    return [("test", plan.data_dir), ("not begun", plan.data_dir / "nothing")]


def names(
    search: DeviceSearch,
    places: list[tuple[str, Path]],
    identities: Identities | None,
    text: str = "",
    state: str = "",
    offset: int = 0,
    most: int = 10,
) -> list[str]:
    found = search.page(places, identities, search=text, state=state, offset=offset, most=most)
    return [device.device for device in found.devices]


def test_what_fits(places: list[tuple[str, Path]], tmp_path: Path) -> None:
    identities = Identities(tmp_path / "ids")
    for name, tags in (("roof-1", []), ("cellar", ["South"]), ("gone", [])):
        token = identities.make_token(1, 100.0, tags, 1.0)
        identities.enrol(name, name * 10, token, 2.0)
    identities.revoke("gone", 3.0)
    search = DeviceSearch()
    assert names(search, places, identities) == ["cellar", "gone", "roof-1", "roof-2"]
    assert names(search, places, identities, offset=1, most=2) == ["gone", "roof-1"]
    for text, fitting in (
        ("ROOF", ["roof-1", "roof-2"]),
        ("onnx", ["roof-2"]),
        ("board", ["roof-2"]),
        ("south", ["cellar"]),
        ("nowhere", []),
    ):
        assert names(search, places, identities, text) == fitting
    by_state = {state: names(search, places, identities, state=state) for state in FITS}
    assert by_state == {
        "": ["cellar", "gone", "roof-1", "roof-2"],
        "connected": [],
        "away": ["cellar", "roof-1", "roof-2"],
        "error": ["roof-1"],
        "revoked": ["gone"],
    }
    found = search.page(places, identities, search="", state="", offset=2, most=1)
    assert (found.total, found.connected, found.matching) == (4, 0, 4)
    (device,) = found.devices
    assert (device.error, device.enrolled) == ("diverged: x", 2.0)


def test_what_was_read_is_good_for_a_moment(places: list[tuple[str, Path]], tmp_path: Path) -> None:
    identities, now = Identities(tmp_path / "ids"), 0.0
    search = DeviceSearch(lambda: now)
    assert names(search, places, identities) == ["roof-1", "roof-2"]
    identities.certified("new", 0.0, 1.0)
    assert names(search, places, identities) == ["roof-1", "roof-2"]
    now = 2.0
    assert names(search, places, identities) == ["new", "roof-1", "roof-2"]
