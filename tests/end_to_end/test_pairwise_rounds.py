"""Rounds of pairwise masks, a coordinator and devices as processes: they make the model of the same
devices without [secure], whoever dies in whichever exchange; or the round is abandoned by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleetlearn_coordinator import read_model, read_status
from peers import plan_text
from processes import Processes, free_port, processes, service_file

pytestmark = pytest.mark.slow
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


def test_a_fleet_makes_the_model_of_a_fleet_without_masks(
    run: Processes, bundle_path: Path, shards: list[Path], plain: np.ndarray
) -> None:
    fleet = Fleet(run, bundle_path, shards)
    run.coordinator(fleet.plan)
    for name in NAMES:
        fleet.device(name)
    assert np.abs(fleet.model() - plain).max() < 1e-3
    assert [row.outcome for row in read_status(fleet.data).rounds] == ["committed"] * 2
