"""BatchNorm's statistics in rounds whose updates are stale or compressed: they stay variances, and
come to the data's.

Six devices with different data. Each measures the model that its task began from before it trains,
and gives the task back where the loss is not finite: a single negative variance ends the run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bundle_cache import cached_export
from fleetlearn_protocol import open_bundle
from fleetlearn_protocol.vector import views
from fleetlearn_simulator.training.backend import PerDevice
from fleetlearn_simulator.training.vectorized import Vectorized
from virtual import drive, make_fleet, make_scenario

DEVICES, EXAMPLES, FEATURES, ROUNDS = 6, 40, 4, 24
ASYNCHRONOUS = {"goal": 2, "concurrency": 6, "deadline": 1000.0}
CARRY = {"goal": 2, "over_selection": 2.0, "deadline": 1000.0, "late": "carry"}
DATA = """
import numpy as np

def make(device, seed):
    random = np.random.default_rng(device)
    x = random.normal({mean}, {deviation} * (1 + device / 10), ({examples}, 4)).astype(np.float32)
    return {{"x": x, "y": (x[:, 0] > {mean}).astype(np.int64)}}
"""


@pytest.fixture(scope="module")
def normed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from fleetlearn_export import LocalStep, TrainMany
    from torch import nn

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
        )
    example = torch.randn(8, FEATURES), torch.randint(2, (8,))
    step, path = LocalStep(), tmp_path_factory.mktemp("normed") / "normed.bundle"
    return cached_export(
        model, nn.functional.cross_entropy, example, path, step=step, many=TrainMany(4, 4)
    ).bundle.path


def settings_of(
    folder: Path, deviation: float, mean: float = 0.0, examples: int = EXAMPLES
) -> dict[str, Any]:
    (folder / "normal.py").write_text(
        DATA.format(mean=mean, deviation=deviation, examples=examples)
    )
    return {
        "data": {"kind": "function", "function": "normal:make"},
        "plan__local": {"epochs": 5, "batch_size": 10, "lr": 0.1, "evaluate": True},
        "plan__stop__rounds": ROUNDS,
        "tiers": {"device": {"latency": 0.0, "download": 1e12, "upload": 1e12, "spread": 1.0}},
    }


PLANS: dict[str, tuple[float, dict[str, Any]]] = {
    "synchronous": (0.1, {}),
    "fedbuff": (0.1, {"plan__recipe": "fedbuff", "plan__round": ASYNCHRONOUS}),
    "fedbuff int4": (
        0.1,
        {"plan__recipe": "fedbuff", "plan__round": ASYNCHRONOUS, "plan__encoding": {"up": "int4"}},
    ),
    "carry": (0.1, {"plan__round": CARRY}),
    "fedasync": (
        0.1,
        {"plan__recipe": "fedasync", "plan__round": {"concurrency": 5, "deadline": 1000.0}},
    ),
    "topk-0.1": (0.1, {"plan__encoding": {"up": "topk-0.1"}}),
    "int4": (0.05, {"plan__encoding": {"up": "int4"}}),
    "int8": (0.01, {"plan__encoding": {"up": "int8"}}),
    "fednova": (0.1, {"plan__recipe": "fednova"}),
    "median": (0.1, {"plan__recipe": "median", "plan__round": CARRY}),
    "clipped": (0.1, {"plan__aggregation": {"max_norm": 5.0}}),
    "momentum": (0.1, {"plan__recipe": "fedavgm"}),
}
"""Name -> the standard deviation of the inputs, and what the scenario has beside the rest."""


@pytest.mark.parametrize("name", PLANS)
def test_running_variances_come_to_those_of_the_data(
    tmp_path: Path, normed: Path, name: str
) -> None:
    """From 1 they come to a hundredth and less, in a few steps of each task."""
    deviation, more = PLANS[name]
    fleet = make_fleet(
        make_scenario(tmp_path, normed, DEVICES, **(settings_of(tmp_path, deviation) | more))
    )
    table, low, high = open_bundle(normed).manifest.travelling, deviation**2, (1.5 * deviation) ** 2
    goes_on, rounds = True, 0
    while goes_on:
        goes_on = fleet.advance()
        if len(fleet.history) > rounds:
            rounds = len(fleet.history)
            found = views(fleet.model, table)
            assert (found["0.running_var"] > 0.6 * low).all(), rounds
            assert (found["0.running_var"] <= 1.0).all(), rounds
            assert (found["2.running_var"] > 0).all(), rounds
    assert rounds == ROUNDS
    assert not any(
        cause.startswith(("failed", "rejected")) for row in fleet.history for cause in row["causes"]
    )
    assert (found["0.running_var"] < 1.6 * high).all()
    assert np.abs(found["0.running_mean"]).max() < deviation


def test_air_pressure_in_pascal_is_no_divergence(tmp_path: Path, normed: Path) -> None:
    """5,000 examples around 101,325 Pa on each device. (The sum took values up to 53,687 with this
    weight.)"""
    settings = settings_of(tmp_path, 3000.0, mean=101325.0, examples=5000)
    settings |= {
        "plan__stop__rounds": 4,
        "plan__local": settings["plan__local"] | {"epochs": 1, "batch_size": 50},
    }
    run = drive(make_scenario(tmp_path, normed, DEVICES, **settings))
    assert [row["reports"] for row in run.rounds] == [DEVICES] * 4
    found = views(run.model, open_bundle(normed).manifest.travelling)
    assert found["0.running_mean"] == pytest.approx(101325.0, rel=0.01)
    assert (found["0.running_var"] > 0.8 * 3000.0**2).all()


@pytest.mark.parametrize("name", ["fedbuff", "int8"])
def test_both_back_ends_send_the_same_values(tmp_path: Path, normed: Path, name: str) -> None:
    deviation, more = PLANS[name]
    scenario = make_scenario(tmp_path, normed, DEVICES, **(settings_of(tmp_path, deviation) | more))
    one, many = (drive(scenario, backend=kind).model for kind in (PerDevice, Vectorized))
    np.testing.assert_allclose(one, many, atol=2e-3)


@pytest.mark.parametrize(
    ("evaluate", "reports", "causes"),
    [(True, 0, {"failed: diverged": DEVICES}), (False, DEVICES, {})],
)
def test_a_device_whose_model_has_no_finite_loss_gives_its_task_back(
    tmp_path: Path, normed: Path, evaluate: bool, reports: int, causes: dict[str, int]
) -> None:
    """As a real one does: it measures the model before it trains. Simulated devices used to train
    on."""
    settings = settings_of(tmp_path, 1.0) | {"plan__stop__rounds": 1}
    settings["plan__local"] = settings["plan__local"] | {"evaluate": evaluate}
    fleet = make_fleet(make_scenario(tmp_path, normed, DEVICES, **settings))
    views(fleet.coordinator.model, open_bundle(normed).manifest.parameters)["0.running_var"][
        0
    ] = -1.0
    while not fleet.history and fleet.advance():
        pass
    assert (fleet.history[0]["reports"], fleet.history[0]["causes"]) == (reports, causes)
