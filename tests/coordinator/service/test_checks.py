"""What ``doctor`` looks at before a run is served."""

from __future__ import annotations

from pathlib import Path

import pytest
from fleetlearn_coordinator.plan.plan import Plan
from fleetlearn_coordinator.plan.service_settings import ServiceSettings
from fleetlearn_coordinator.service.checks import check_disk, check_gateways, check_plan
from line_bundle import write_line_bundle
from plans import SECURE
from statistics_bundle import statistics_bundle


def test_the_disk_has_room_for_sums_and_not_for_as_many_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state of a computation is far smaller than what devices send, and each masked upload is
    kept until its round ends."""
    bundle = statistics_bundle(tmp_path)
    secure = SECURE.replace("clip = 0.5", "")
    plan = Plan.parse(
        f'recipe = "statistics"\nname = "a"\nbundle = "{bundle.path}"\n'
        f"[round]\ngoal = 4000\n{secure}",
        tmp_path,
    )
    free = 12 * bundle.manifest.elements_of("sums") * 4000
    room = type("", (), {"free": free, "total": 2**41})
    monkeypatch.setattr("shutil.disk_usage", lambda place: room)
    monkeypatch.setattr(
        "fleetlearn_coordinator.service.helper_check.check_helper", lambda *of: None
    )
    (found,) = [each for each in check_plan(plan, ServiceSettings()) if each.what == "disk"]
    assert found.state == "bad"
    size = 4 * bundle.manifest.size
    assert check_disk(plan, ServiceSettings(), size, size).state == "good", "of states"


def test_gateways_leave_a_core_to_the_engine_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    assert not [*check_gateways(ServiceSettings())]
    (good,) = check_gateways(ServiceSettings(gateways=3))
    assert (good.state, good.do) == ("good", "")
    assert good.found == "3 gateways beside the engine process; this machine has 4 cores"
    (many,) = check_gateways(ServiceSettings(gateways=4))
    assert many.state == "warning"
    assert many.do == "gateways = 3 leaves a core to the engine process"


def test_an_own_encoding_that_cannot_be_had_is_said_once(tmp_path: Path) -> None:
    """It is the plan's fault, and no bundle's."""
    write_line_bundle(tmp_path / "a.bundle")
    text = 'name = "a"\nbundle = "a.bundle"\n[round]\ngoal = 2\n[local]\nlr = 0.1\n'
    text += '[encoding]\nup = "no_such:format"\n'
    rows = list(check_plan(Plan.parse(text, tmp_path), ServiceSettings()))
    assert [row.what for row in rows if row.state == "bad"] == ["plan"]
    assert [row.state for row in rows if row.what == "bundle"] == ["good"]
