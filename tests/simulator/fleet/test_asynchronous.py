"""Asynchronous rounds and late updates in virtual time: who trains from which model, and what
counts how much."""

from __future__ import annotations

from itertools import count
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleetlearn_coordinator.aggregation import exact_mean
from fleetlearn_coordinator.aggregation.exact_mean import multiplier
from fleetlearn_coordinator.rounds import participation
from fleetlearn_protocol import open_bundle
from fleetlearn_simulator import Options, simulate
from fleetlearn_simulator.fleet import device_tasks
from fleetlearn_simulator.results.run_folder import EVENTS, ROUNDS, read_checkpoint, read_rows
from virtual import Driven, Row, by_lines, drive, make_scenario, simulate_in_parts

BUFFERED: dict[str, Any] = {
    "plan__recipe": "fedbuff",
    "plan__round": {"goal": 3, "concurrency": 4, "deadline": 1000.0},
    "plan__stop__rounds": 8,
    "plan__local": {"epochs": 1, "batch_size": 0, "lr": 0.01, "evaluate": True},
    "tiers": {"device": {"latency": 0.0, "download": 1e12, "upload": 1e12, "spread": 1.0}},
}
"""Six devices of different speeds, one step each, whatever their numbers of examples."""


def replayed(run: Driven, line: Path) -> tuple[list[np.ndarray], list[list[int]]]:  # type: ignore[type-arg]
    """Return the models and the staleness of each round's updates, worked out from the event log
    alone.

    Each task is trained from the model that was the newest when it was assigned. The model moves by
    the mean of a buffer's updates, each times s(tau). ``seen``, the model's row of statistics,
    moves towards the devices' values: by the mean of their distances from its value now, each times
    s(tau)."""
    models = [open_bundle(line).parameters().astype(np.float64)]
    began: dict[str, int] = {}
    buffer: list[np.ndarray] = []  # type: ignore[type-arg]
    staleness: list[list[int]] = [[]]
    for row in run.events:
        match row["event"]:
            case "assigned":
                began[row["task"]] = len(models) - 1
            case "accepted":
                version = began.pop(row["task"])
                tau = len(models) - 1 - version
                trained = by_lines(models[version], row["device"], 1, lr=0.01)
                move = trained - models[version]
                move[3] = trained[3] - models[-1][3]
                buffer.append(multiplier(1, 1 / sqrt(1 + tau)) * move)
                staleness[-1].append(tau)
            case "committed":
                models.append(models[-1] + np.sum(buffer, axis=0) / len(buffer))
                buffer = []
                staleness.append([])
    return models, staleness[:-1]


@pytest.mark.parametrize(
    "more",
    [{}, {"coordinator": {"crashes": [15.0, 61.0], "restart": 3.0}}, {"failures": {"crash": 0.2}}],
    ids=["calm", "the coordinator dies", "devices die"],
)
def test_each_task_is_trained_from_its_own_version(
    tmp_path: Path, line: Path, more: dict[str, Any]
) -> None:
    run = drive(make_scenario(tmp_path, line, 6, **(BUFFERED | more)))
    assert run.fleet.finished == "8 rounds done"
    models, staleness = replayed(run, line)
    np.testing.assert_allclose(run.model, models[-1], rtol=1e-5)
    assert [len(row) for row in staleness] == [3] * 8
    assert max(max(row) for row in staleness) >= 1
    for row, found in zip(run.rounds, staleness, strict=True):
        assert row["staleness"] == {
            "mean": sum(found) / 3,
            "max": max(found),
            "stale": sum(map(bool, found)),
        }
        assert row["reports"] == 3
        assert row["evaluation"], "devices measured the models that their tasks began from"
    if more:
        assert any(row["event"] in ("crash", "lost") for row in run.events)


def test_up_to_the_concurrency_devices_work_at_a_time(tmp_path: Path, line: Path) -> None:
    run = drive(make_scenario(tmp_path, line, 6, **BUFFERED))
    out, most = set[str](), 0
    for row in run.events:
        if row["event"] == "assigned":
            out.add(row["task"])
        elif row["event"] in ("accepted", "lost"):
            out.remove(row["task"])
        most = max(most, len(out))
    assert most == 4


def test_the_same_seed_gives_the_same_run(tmp_path: Path, line: Path) -> None:
    """Also with devices that vanish, come and go, and differ in what they have."""
    churn = BUFFERED | {"failures": {"train": 0.01}, "coordinator": {"limits": True}}
    churn |= {"service": {"uploads": 1, "downloads": 1}}
    for name in "ab":
        (tmp_path / name).mkdir()
    first, second = (drive(make_scenario(tmp_path / name, line, 6, **churn)) for name in "ab")
    assert first.events == second.events
    assert first.model.tobytes() == second.model.tobytes()


@pytest.mark.parametrize(
    "more", [{}, {"failures": {"crash": 0.2}}, {"coordinator": {"crashes": [15.0, 61.0]}}]
)
def test_reports_are_counted_together_as_one_by_one(
    tmp_path: Path, line: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    """Also where an update in between is refused: device 3 diverges."""
    monkeypatch.setattr(participation, "TOGETHER", 2)
    monkeypatch.setattr(exact_mean, "MAX_ELEMENT", 1e6)
    rules = BUFFERED | {
        "plan__round": {"goal": 7, "concurrency": 10, "deadline": 1000.0},
        "plan__stop__rounds": 20,
    }
    rules |= {"failures": {"corrupt": [{"kind": "scaled", "share": 0.2, "factor": 1e9}]}}
    rules["plan__local"] = BUFFERED["plan__local"] | {"lr": 0.1}
    for name in "ab":
        (tmp_path / name).mkdir()
    together = drive(make_scenario(tmp_path / "a", line, 14, **(rules | more)))
    monkeypatch.setattr(device_tasks, "MOST_GATHERED", 0)
    alone = drive(make_scenario(tmp_path / "b", line, 14, **(rules | more)))
    assert together.events == alone.events
    assert together.model.tobytes() == alone.model.tobytes()
    assert together.handled < alone.handled
    assert any(row["causes"].get("rejected: out-of-range") for row in alone.rounds) or more


def test_stale_tasks_are_cancelled(tmp_path: Path, line: Path) -> None:
    run = drive(make_scenario(tmp_path, line, 6, **BUFFERED, plan__staleness={"max": 0}))
    causes = [row["causes"] for row in run.rounds]
    assert any(row.get("stale") for row in causes)
    assert max(row["staleness"]["max"] for row in run.rounds) == 0


def test_late_updates_are_carried_into_the_next_round(tmp_path: Path, line: Path) -> None:
    """Three tasks for two reports, over and over: what comes late counts in the next round, so no
    work is lost."""
    carry = BUFFERED | {"plan__recipe": "fedavg"}
    carry["plan__round"] = {
        "goal": 2,
        "over_selection": 1.5,
        "deadline": 1000.0,
        "late": "carry",
        "weighting": "uniform",
    }
    run = drive(make_scenario(tmp_path, line, 6, **carry))
    models, staleness = replayed(run, line)
    np.testing.assert_allclose(run.model, models[-1], rtol=1e-5)
    assert max(max(row) for row in staleness) == 1
    assert all(not row["causes"].get("surplus") for row in run.rounds)


CARRIED: Row = {
    "plan__round": {
        "goal": 4,
        "over_selection": 1.5,
        "minimum": 2,
        "deadline": 40.0,
        "late": "carry",
    },
    "plan__staleness": {"max": 3},
    "plan__stop__rounds": 12,
}
OFFLINE: Row = {"availability": {"kind": "bernoulli", "share": 0.6, "slot": 100.0}}


@pytest.mark.parametrize(
    "more",
    [
        {},
        OFFLINE,
        {
            "failures": {
                "crash": 0.2,
                "stragglers": 0.3,
                "corrupt": [{"kind": "stale", "share": 0.4}],
            }
        },
        {
            "coordinator": {"limits": True, "crashes": [35.0, 150.0], "restart": 7.0},
            "service": {"uploads": 1},
        },
        {"plan__round": {**BUFFERED["plan__round"], "weighting": "inverse-participation"}},
        CARRIED,
        CARRIED | OFFLINE,
    ],
    ids=[
        "quiet",
        "offline",
        "failures",
        "limits and crashes",
        "rates",
        "carried",
        "carried, offline",
    ],
)
def test_a_run_stopped_after_each_round_ends_as_if_it_was_not(
    tmp_path: Path, line: Path, more: Row
) -> None:
    """With tasks that go on, of models that were made before the checkpoint."""
    settings = BUFFERED | more
    if more.get("plan__round") is CARRIED["plan__round"]:
        settings["plan__recipe"] = "fedavg"
    scenario = make_scenario(tmp_path, line, 9, **settings)
    whole = simulate(scenario, tmp_path / "whole.sim", Options(backend="bundle", workers=1))
    assert whole is not None
    rounds = read_rows(whole.folder, ROUNDS)
    assert max(row["staleness"]["max"] for row in rounds) > 0
    again = simulate_in_parts(scenario, tmp_path / "part.sim")
    assert again.model.tobytes() == whole.model.tobytes()
    for name in (ROUNDS, EVENTS):
        assert (again.folder / name).read_bytes() == (whole.folder / name).read_bytes()


def test_conspirators_that_outlive_their_round_are_in_no_checkpoint(
    tmp_path: Path, line: Path
) -> None:
    """What they send depends on others that have reported already. The run begins again, and ends
    as it would have."""
    failures = {"corrupt": [{"kind": "little", "share": 0.5}]}
    scenario = make_scenario(tmp_path, line, 6, **BUFFERED, failures=failures)
    whole = simulate(scenario, tmp_path / "whole.sim", Options(backend="bundle", workers=1))
    asked = count()
    assert simulate(scenario, tmp_path / "part.sim", should_stop=lambda: next(asked) > 20) is None
    assert read_checkpoint(tmp_path / "part.sim") is None
    again = simulate(scenario, tmp_path / "part.sim", resume=True)
    assert whole is not None
    assert again is not None
    assert again.model.tobytes() == whole.model.tobytes()


def test_a_device_s_second_turn_in_a_round_has_a_fate_of_its_own(
    tmp_path: Path, line: Path
) -> None:
    """One device fills a buffer alone. It straggles in some turns, and does another number of steps
    in each of them."""
    alone = BUFFERED | {
        "plan__round": {"goal": 20, "concurrency": 1, "deadline": 1e5},
        "plan__stop__rounds": 1,
    }
    alone["plan__local"] = {"epochs": 20, "batch_size": 0, "lr": 0.01}
    run = drive(make_scenario(tmp_path, line, 1, **alone, failures={"stragglers": 0.5}))
    accepted = [row for row in run.events if row["event"] == "accepted"]
    assert [row["task"] for row in accepted] == [
        "s-1-1",
        *(f"s-1-{turn}.{turn}" for turn in range(2, 21)),
    ]
    assert len({row["steps"] for row in accepted}) > 3
