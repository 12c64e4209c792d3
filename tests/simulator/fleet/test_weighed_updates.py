"""Weighed updates in the simulator: what is refused and clipped, what is evaluated, and a run that
goes on.

tests/end_to_end/test_simulated_truth_asynchronous.py compares the bits with a server's.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleetlearn_protocol import open_bundle
from fleetlearn_protocol.messages import Evaluation
from fleetlearn_simulator import Options, simulate
from fleetlearn_simulator.results.run_folder import ROUNDS, read_rows
from fleetlearn_simulator.training.backend import Job, PerDevice, RoundInputs
from line_bundle import write_line_bundle
from virtual import drive, make_scenario

HOSTILE: dict[str, Any] = {"failures__corrupt": [{"share": 0.5, "kind": "scaled", "factor": 1e3}]}


@pytest.fixture
def sgd_line(tmp_path: Path) -> Path:
    return write_line_bundle(tmp_path / "line.bundle", references=["anchor"], optimizer="sgd").path


@pytest.mark.parametrize("aggregator", ["mean", "median"])
@pytest.mark.parametrize("action", ["refuse", "clip"])
def test_hostile_devices_that_send_long_updates_change_nothing(
    tmp_path: Path, sgd_line: Path, action: str, aggregator: str
) -> None:
    """With \"refuse\" the round is made of the others; with \"clip\" the model moves by at most the
    bound."""
    bounded = {"aggregator": aggregator, "max_norm": 100.0, "norm_action": action}
    run = drive(make_scenario(tmp_path, sgd_line, 9, **HOSTILE, plan__aggregation=bounded))
    calm = drive(make_scenario(tmp_path, sgd_line, 9, plan__aggregation={"aggregator": aggregator}))
    (row,) = run.rounds
    hostile = 9 - sum(row["accepted"].values())
    if action == "refuse":
        assert hostile >= 1
        assert row["causes"] == {"rejected: norm-too-large": hostile}
        assert (row["norm"]["refused"], row["norm"]["clipped"]) == (hostile, 0)
    else:
        assert (hostile, row["norm"]["refused"]) == (0, 0)
        assert row["norm"]["clipped"] >= 1
    assert row["change"] <= 100.0
    unbounded = drive(make_scenario(tmp_path, sgd_line, 9, **HOSTILE))
    assert unbounded.rounds[0]["change"] > 1e3
    assert np.abs(run.model - calm.model).max() < 100


class Counting(PerDevice):
    """Counts how many devices evaluate."""

    evaluated = 0

    def evaluate(self, inputs: RoundInputs, jobs: Sequence[Job]) -> list[Evaluation | None]:
        Counting.evaluated += len(jobs)
        return super().evaluate(inputs, jobs)


def test_each_device_evaluates_once(
    tmp_path: Path, sgd_line: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """q-FedAvg needs the losses when updates are added; the summary takes the same ones."""
    settings = {"plan__stop__rounds": 2, "plan__local__evaluate": True}
    monkeypatch.setattr(Counting, "evaluated", 0)
    fair = drive(
        make_scenario(tmp_path, sgd_line, 4, plan__recipe="q-fedavg", **settings), backend=Counting
    )
    assert Counting.evaluated == 8
    plain = drive(make_scenario(tmp_path, sgd_line, 4, **settings), backend=Counting)
    assert fair.rounds[0]["evaluation"] == plain.rounds[0]["evaluation"]
    assert fair.model.tobytes() != plain.model.tobytes()


@pytest.mark.parametrize("recipe", ["fedavg", "q-fedavg"])
def test_a_run_that_was_stopped_goes_on_with_its_bound_and_level(
    tmp_path: Path, sgd_line: Path, recipe: str
) -> None:
    scenario = make_scenario(
        tmp_path,
        sgd_line,
        4,
        plan__stop__rounds=6,
        plan__recipe=recipe,
        plan__local__evaluate=True,
        plan__aggregation={"max_norm": 5.0, "norm_quantile": 0.5},
    )
    options = Options(backend="bundle", workers=1, checkpoint=2)
    whole = simulate(scenario, tmp_path / "whole", options)
    rounds = 0

    def stop() -> bool:
        nonlocal rounds
        rounds += 1
        return rounds > 3

    assert simulate(scenario, tmp_path / "parts", options, should_stop=stop) is None
    parts = simulate(scenario, tmp_path / "parts", options, resume=True)
    assert whole is not None
    assert parts is not None
    assert parts.model.tobytes() == whole.model.tobytes()
    rows = [
        [row["norm"] for row in read_rows(outcome.folder, ROUNDS)] for outcome in (whole, parts)
    ]
    assert rows[0] == rows[1]
    assert len({row["bound"] for row in rows[0]}) == 6


def test_buffers_take_the_plain_mean(tmp_path: Path, sgd_line: Path) -> None:
    """``seen`` counts each device's examples: 10, 20 and 30, weighted by themselves, with FedNova
    too."""
    before = open_bundle(sgd_line).parameters()
    for recipe in ("fedavg", "fednova"):
        run = drive(make_scenario(tmp_path, sgd_line, 3, plan__recipe=recipe))
        assert run.model[3] - before[3] == pytest.approx((10 * 10 + 20 * 20 + 30 * 30) / 60)
