"""Each recipe's server optimizer on a model with BatchNorm, whose running statistics travel with
it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from fleetlearn_device.runtimes.open_runtime import open_runtime
from fleetlearn_device.training.train import evaluate_data
from fleetlearn_protocol import open_bundle
from fleetlearn_simulator.scenario.scenario import Scenario
from virtual import drive, write_scenario

from examples import digits

DEVICES, ROUNDS = 20, 30
SHARDS = """
from examples import digits

DATA = digits.data()
SHARDS = digits.dirichlet_shards(DATA.y_train, {devices})

def make(device, seed):
    return {{"x": DATA.x_train[SHARDS[device]], "y": DATA.y_train[SHARDS[device]]}}
"""


@pytest.fixture(scope="module")
def normed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small CNN on the digits with BatchNorm behind each convolution."""
    import torch
    from fleetlearn_export import LocalStep, export_bundle
    from torch import nn

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(
            *(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(64, 10)),
        )
    x, y = digits.data()[:2]
    example = (torch.from_numpy(x[:4]), torch.from_numpy(y[:4]))
    path = tmp_path_factory.mktemp("normed") / "normed.bundle"
    metrics = {"accuracy": digits.accuracy}
    export_bundle(model, digits.loss, example, path, step=LocalStep(), metrics=metrics)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["fedavg", "fedavgm", "fedadagrad", "fedadam", "fedyogi"])
def test_a_model_with_batch_norm_learns_by_each_server_optimizer(
    tmp_path: Path, normed: Path, recipe: str
) -> None:
    """The recipes' own server learning rates; 0.1 on the devices. In the order of the list 0.983,
    0.969, 0.992, 0.981 and 0.978 were measured. Where the server optimizer moves the statistics
    too, it is 0.983, 0.875, 0.632, 0.543 and 0.532."""
    path = write_scenario(
        tmp_path,
        normed,
        DEVICES,
        data={"kind": "function", "function": "shards:make"},
        plan__recipe=recipe,
        plan__local={"epochs": 2, "batch_size": 20, "lr": 0.1, "evaluate": False},
        plan__stop={"rounds": ROUNDS},
    )
    (tmp_path / "shards.py").write_text(SHARDS.format(devices=DEVICES))
    run = drive(Scenario.load(path))
    assert len(run.rounds) == ROUNDS
    runtime, data = open_runtime(normed, kind="onnx"), digits.data()
    runtime.load(run.model)
    found = evaluate_data(runtime, (data.x_test, data.y_test))
    accuracy = found.metric_sums["accuracy"] / found.examples
    statistics = [
        row for row in open_bundle(normed).manifest.parameters if row.name.endswith("running_var")
    ]
    assert statistics
    assert all(np.all(run.model[row.offset : row.offset + row.shape[0]] > 0) for row in statistics)
    assert accuracy > 0.95
