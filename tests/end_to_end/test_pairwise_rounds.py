"""Rounds of pairwise masks, a coordinator and devices as processes: they make the model of the same
devices without [secure], whoever dies in whichever exchange; or the round is abandoned by name."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleetlearn_coordinator import read_model, read_status
from peers import plan_text
from processes import Processes, free_port, processes, service_file, status_of, wait_for

pytestmark = pytest.mark.slow
CRASH = Path(__file__).with_name("crash_pairwise.py")
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(CRASH.parent))
    COORDINATOR = list(runpy.run_path(str(CRASH))["COORDINATOR"])
NAMES = ["d0", "d1", "d2", "d3"]


class Fleet:
    """The files and commands of one fleet."""

    def __init__(
        self,
        run: Processes,
        bundle: Path,
        shards: list[Path],
        *,
        secure: bool = True,
        **changed: Any,
    ) -> None:
        self.run, self.shards, self.port = run, shards, free_port()
        self.data, self.plan = run.folder / "run", run.folder / "plan.toml"
        settings: dict[str, Any] = {
            "local__lr": 0.2,
            "local__evaluate": False,
            "round__goal": len(NAMES),
            "round__minimum": len(NAMES),
            "round__gather": 30.0,
            "round__grace": 30.0,
            "round__weighting": None,
            "stop__rounds": 2,
        }
        if secure:
            settings |= {"secure__mode": "pairwise", "secure__clip": 5.0}
        self.plan.write_text(plan_text(bundle, self.data, "fedavg", **(settings | changed)))
        service_file(self.plan, self.port)

    def device(self, name: str, *wrapper: Any) -> Any:
        shard = self.shards[NAMES.index(name)]
        return self.run.device(name, f"ws://127.0.0.1:{self.port}", shard, *wrapper)

    def model(self) -> np.ndarray:
        """The model when all is over."""
        for name in ("coordinator", *NAMES):
            assert self.run.wait(name) == 0, self.run.log(name)
        version, model = read_model(self.data)
        assert version == 2
        return model


@pytest.fixture(scope="module")
def plain(
    warm: Path, bundle_path: Path, shards: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> np.ndarray:
    """The model of the same devices without [secure]."""
    with processes(tmp_path_factory.mktemp("plain"), warm) as run:
        changed = {"round__weighting": "uniform"}
        fleet = Fleet(run, bundle_path, shards, secure=False, **changed)
        run.coordinator(fleet.plan)
        for name in NAMES:
            fleet.device(name)
        return fleet.model()


@pytest.mark.parametrize("down", [None, "float16"])
def test_a_fleet_makes_the_model_of_a_fleet_without_masks(
    run: Processes, bundle_path: Path, shards: list[Path], plain: np.ndarray, down: str | None
) -> None:
    """Also where devices are sent models in another encoding, by another SHA-256."""
    fleet = Fleet(run, bundle_path, shards, encoding__down=down)
    run.coordinator(fleet.plan)
    for name in NAMES:
        fleet.device(name)
    assert np.abs(fleet.model() - plain).max() < (1e-3 if down is None else 1e-2)
    assert [row.outcome for row in read_status(fleet.data).rounds] == ["committed"] * 2


def test_words_of_three_bytes_make_nearly_the_same_model(
    run: Processes, bundle_path: Path, shards: list[Path], plain: np.ndarray
) -> None:
    """Each element is rounded to a multiple of 2 C / 4095, in each of two rounds."""
    fleet = Fleet(run, bundle_path, shards, secure__bits=12)
    run.coordinator(fleet.plan)
    for name in NAMES:
        fleet.device(name)
    assert 0 < np.abs(fleet.model() - plain).max() < 2 * 2 * 5.0 / 4095
    assert [row.outcome for row in read_status(fleet.data).rounds] == ["committed"] * 2


PLACES = [
    *((point, phase) for phase in (1, 2, 3) for point in list(COORDINATOR)[:4]),
    *((point, 3) for point in list(COORDINATOR)[4:]),
]


@pytest.mark.parametrize(("point", "phase"), PLACES)
def test_a_coordinator_that_is_killed_asks_nothing_else_and_makes_the_same_model(
    run: Processes,
    bundle_path: Path,
    shards: list[Path],
    plain: np.ndarray,
    point: str,
    phase: int,
) -> None:
    fleet = Fleet(run, bundle_path, shards)
    process = run.coordinator(fleet.plan, CRASH, point, str(phase), "serve", fleet.plan)
    for name in NAMES:
        fleet.device(name)
    assert process.wait(90) == -9, f"it was to die at {point}: {run.log('coordinator')}"
    run.coordinator(fleet.plan)
    assert np.abs(fleet.model() - plain).max() < 1e-3
    assert [row.outcome for row in read_status(fleet.data).rounds] == ["committed"] * 2
    for name in NAMES:  # a device that was asked twice for something else would say so
        assert "untrusted" not in run.log(name)


@pytest.mark.parametrize(
    ("point", "phase"),
    [
        ("the device has to answer", 1),
        ("the device has told its answer", 1),
        ("the device has to answer", 2),
        ("the device has told its answer", 2),
        ("the update is masked and not saved", 1),
        ("the masked update is saved", 1),
        ("the device has to answer", 3),
        ("the device has told its answer", 3),
    ],
)
def test_a_device_that_is_killed_is_missing_or_counts_and_the_others_go_on(
    run: Processes, bundle_path: Path, shards: list[Path], point: str, phase: int
) -> None:
    """Three of four are enough. The dead one does not come back."""
    changed = {"round__minimum": 3, "round__grace": 0.5, "secure__dropouts": 0.0}
    fleet = Fleet(run, bundle_path, shards, **changed, stop__rounds=1)
    run.coordinator(fleet.plan)
    for name in NAMES[1:]:
        fleet.device(name)
    dying = fleet.device(NAMES[0], CRASH, point, str(phase))
    assert dying.wait(90) == -9, f"it was to die at {point}: {run.log(NAMES[0])}"
    for name in ("coordinator", *NAMES[1:]):
        assert run.wait(name) == 0, run.log(name)
    (row,) = read_status(fleet.data).rounds
    assert row.outcome == "committed"
    counted = 4 if phase == 3 else 3
    assert row.summary["reports"] == counted


def test_a_round_that_cannot_be_unmasked_is_abandoned_by_name(
    run: Processes, bundle_path: Path, shards: list[Path]
) -> None:
    """Two of four die when they are to tell their shares: two are left, and three are needed."""
    fleet = Fleet(run, bundle_path, shards, round__grace=0.5)
    run.coordinator(fleet.plan)
    dying = [fleet.device(name, CRASH, "the device has to answer", "3") for name in NAMES[:2]]
    for name in NAMES[2:]:
        fleet.device(name)
    for process in dying:
        assert process.wait(90) == -9

    def abandoned() -> bool:
        status = status_of(fleet.data)
        return status is not None and bool(status.rounds)

    wait_for(abandoned, "the round's end")
    assert read_status(fleet.data).rounds[0].outcome == "abandoned"
    text = "2 devices answered in phase 3 of its pairwise, 3 are the minimum"
    assert text in run.log("coordinator")
