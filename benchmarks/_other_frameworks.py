"""The same FedAvg in other frameworks, for _simulator_contender.py: a loop in PyTorch,
pfl-research, Flower.

They need PyTorch and what is compared, and nothing of this project. ``settings``: ``data``, a file
with all devices' x and y; ``batch`` and ``lr`` of the local steps, one epoch of them; ``cohort``,
the devices of a round; ``rounds``, of which those after the first ``warm`` count; ``turn``, which
seeds the choice of devices; ``provider``, where the loop in PyTorch trains (the others train on the
CPU).
"""

from __future__ import annotations

import os
import tempfile
import time
from functools import cache
from typing import Any

import numpy as np
from _process_usage import Usage, cpu_between, usage_of_all

Settings = dict[str, Any]
Figures = dict[str, float]


@cache
def devices(file: str, provider: str = "cpu") -> list[tuple[Any, Any]]:
    """Return each device's x and y as tensors, on the CPU or on a GPU (``cuda``)."""
    import torch

    with np.load(file) as arrays:
        x, y = arrays["x"], arrays["y"]
    return list(
        zip(torch.from_numpy(x).to(provider), torch.from_numpy(y).to(provider), strict=True)
    )


def softmax() -> Any:
    """Return the model that all begin with."""
    import torch

    torch.manual_seed(0)
    return torch.nn.Linear(60, 10)


def train(model: Any, x: Any, y: Any, batch: int, lr: float) -> None:
    """Train one epoch of SGD."""
    import torch
    from torch.nn import functional

    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for rows in torch.split(torch.randperm(len(y), device=y.device), batch):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x[rows]), y[rows])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def mean_loss(model: Any, data: list[tuple[Any, Any]]) -> float:
    """Return the model's mean loss over all devices' data."""
    import torch
    from torch.nn import functional

    with torch.no_grad():
        return sum(functional.cross_entropy(model(x), y).item() for x, y in data) / len(data)


def pytorch(settings: Settings, launched: float) -> Figures:
    """FedAvg as one writes it in PyTorch: client after client, a copy of the model, an optimizer, a
    mean."""
    import _models
    import torch

    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False  # float32, as the bundle
    data, count = devices(settings["data"], settings["provider"]), settings["cohort"]
    model = (_models.make("mcmahan").module if settings["model"] == "mcmahan" else softmax()).to(
        settings["provider"]
    )
    chosen, rounds, warm = (
        np.random.default_rng(settings["turn"]),
        settings["rounds"],
        settings["warm"],
    )
    server = {name: value.detach().clone() for name, value in model.state_dict().items()}
    begin, begin_cpu = 0.0, 0.0
    for number in range(rounds):
        if number == warm:
            begin, begin_cpu = time.monotonic(), time.process_time()
        total = {name: torch.zeros_like(value) for name, value in server.items()}
        for device in chosen.permutation(len(data))[:count].tolist():
            model.load_state_dict(server)
            x, y = data[device]
            train(model, x, y, settings["batch"], settings["lr"])
            for name, trained in model.state_dict().items():
                total[name] += trained
        server = {name: value / count for name, value in total.items()}
    clock, cpu, done = (
        time.monotonic() - begin,
        time.process_time() - begin_cpu,
        count * (rounds - warm),
    )
    model.load_state_dict(server)
    return {
        "device_rounds_per_s": done / clock,
        "cpu_us_per_device_round": 1e6 * cpu / done,
        "loss": mean_loss(model, data),
    }


def pfl(settings: Settings, launched: float) -> Figures:
    """pfl-research's FedAvg on softmax regression, in one process."""
    import torch
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.metrics import Metrics, Weighted
    from pfl.model.pytorch import PyTorchModel
    from torch import nn
    from torch.nn import functional

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = softmax()

        def forward(self, x: torch.Tensor) -> Any:
            return self.layer(x)

        def loss(self, x: torch.Tensor, y: torch.Tensor, eval: bool = False) -> torch.Tensor:  # noqa: A002
            return functional.cross_entropy(self(x), y)

        def metrics(self, x: torch.Tensor, y: torch.Tensor, eval: bool = False) -> dict[str, Any]:  # noqa: A002
            return {"loss": Weighted(self.loss(x, y).item() * len(y), len(y))}

    marks: list[tuple[float, float]] = []

    class Clock(TrainingProcessCallback):  # type: ignore[misc]
        def after_central_iteration(
            self, metrics: Any, model: Any, *, central_iteration: int
        ) -> tuple[bool, Any]:
            marks.append((time.monotonic(), time.process_time()))
            return False, Metrics()

    torch.set_num_threads(1)
    data, rounds, warm, count = (
        devices(settings["data"]),
        settings["rounds"],
        settings["warm"],
        settings["cohort"],
    )
    users = FederatedDataset(
        lambda user: Dataset(list(data[user]), user_id=user),
        get_user_sampler("minimize_reuse", list(range(len(data)))),
    )
    module = Model()
    model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))
    local = NNTrainHyperParams(
        local_num_epochs=1, local_learning_rate=settings["lr"], local_batch_size=settings["batch"]
    )
    parameters = NNAlgorithmParams(
        central_num_iterations=rounds,
        evaluation_frequency=10**9,
        train_cohort_size=count,
        val_cohort_size=0,
    )
    backend = SimulatedBackend(training_data=users, val_data=None)
    FederatedAveraging().run(parameters, backend, model, local, callbacks=[Clock()])
    (begin, begin_cpu), (end, end_cpu) = marks[warm - 1], marks[-1]
    done = count * (rounds - warm)
    return {
        "device_rounds_per_s": done / (end - begin),
        "cpu_us_per_device_round": 1e6 * (end_cpu - begin_cpu) / done,
        "first_round_s": marks[0][0] - launched,
        "loss": mean_loss(module, data),
    }


def flower_client(message: Any, context: Any) -> Any:
    """Train one client in a round. It is not defined inside ``flower``, or it would be sent with
    each message."""
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

    config, model = message.content["config"], softmax()
    x, y = devices(config["data"])[context.node_config["partition-id"]]
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    train(model, x, y, config["batch"], config["lr"])
    trained = {
        "arrays": ArrayRecord(model.state_dict()),
        "metrics": MetricRecord({"num-examples": len(y)}),
    }
    return Message(content=RecordDict(trained), reply_to=message)


def flower(settings: Settings, launched: float) -> Figures:
    """Flower's simulation of FedAvg on softmax regression, a Ray actor for each core. CPU and
    memory: of all its processes."""
    # Neither is to tell its makers of this.
    os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    from flwr.app import ArrayRecord, ConfigRecord
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    data, rounds, warm, count = (
        devices(settings["data"]),
        settings["rounds"],
        settings["warm"],
        settings["cohort"],
    )
    cores = len(os.sched_getaffinity(0))
    model = softmax()
    clock: list[float] = []
    used: list[dict[int, Usage]] = []
    client, server = ClientApp(), ServerApp()
    client.train()(flower_client)

    def mark(round: int, arrays: Any) -> None:
        if round:
            clock.append(time.monotonic())
        if round in (warm, rounds):
            used.append(usage_of_all(os.getpid()))

    @server.main()  # type: ignore[untyped-decorator]
    def main(grid: Any, context: Any) -> None:
        strategy = FedAvg(
            fraction_train=count / len(data),
            min_train_nodes=count,
            fraction_evaluate=0.0,
            min_available_nodes=len(data),
        )
        config = ConfigRecord({key: settings[key] for key in ("data", "batch", "lr")})
        arrays = ArrayRecord(model.state_dict())
        result = strategy.start(
            grid, arrays, num_rounds=rounds, train_config=config, evaluate_fn=mark
        )
        model.load_state_dict(result.arrays.to_torch_state_dict())

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        ray = {"num_cpus": cores, "_temp_dir": folder}
        config = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": ray}
        run_simulation(server, client, num_supernodes=len(data), backend_config=config)
    if len(clock) != rounds:
        raise RuntimeError(f"Flower did {len(clock)} rounds of {rounds}")
    done = count * (rounds - warm)
    return {
        "device_rounds_per_s": done / (clock[-1] - clock[warm - 1]),
        "cpu_us_per_device_round": 1e6 * cpu_between(*used) / done,
        "first_round_s": clock[0] - launched,
        "peak_rss_mib": sum(usage.peak_rss for usage in used[1].values()),
        "loss": mean_loss(model, data),
    }


CONTENDERS = {"pytorch": pytorch, "pfl": pfl, "flower": flower}
