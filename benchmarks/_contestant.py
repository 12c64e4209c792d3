"""One contender of simulator.py in a process of its own: does its device-rounds, and prints what they cost as JSON.

    _contestant.py simulator|kernel|pytorch|pfl SETTINGS.json LAUNCHED

``LAUNCHED`` is time.monotonic() when the process was started.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import _measure as measure
import numpy as np

Settings = dict[str, Any]
Figures = dict[str, float]


def simulator(settings: Settings, launched: float) -> Figures:
    """Rounds of ``simulate``, with all that belongs to a run: data, engine, event log, checkpoints, exact sums."""
    from fleetlearn_simulator.run import Options, simulate
    from fleetlearn_simulator.scenario import Scenario

    base = Path(settings["folder"])
    run = Scenario.read(settings["scenario"], base)
    marks: list[tuple[float, float, int]] = []  # clock, this process's CPU, reports
    used: list[dict[int, measure.Usage]] = []  # by all processes, when the counted rounds begin and when they end

    def progress(fleet: Any) -> None:
        marks.append((time.monotonic(), time.process_time(), fleet.history[-1]["reports"]))
        last = fleet.history[-1]["how"] == "committed" and fleet.engine.version + 1 == run.plan.stop.rounds
        if len(marks) == settings["warm"] or last:
            used.append({pid: measure.usage(pid) for pid in [os.getpid(), *children()]})

    options = Options(backend=settings["backend"], workers=settings["workers"])
    done = simulate(run, base / "run", options, progress=progress)
    assert done is not None
    if len(used) != 2:
        raise RuntimeError(f"the run came to an early end: {done.summary}")
    warm = settings["warm"]
    (begin, begin_cpu, _), (end, end_cpu, _) = marks[warm - 1], marks[-1]
    rounds, reports = len(marks) - warm, sum(reports for *_, reports in marks[warm:])
    cpu = sum(row.cpu for row in used[1].values()) - sum(row.cpu for row in used[0].values())
    return {
        "device_rounds_per_s": reports / (end - begin),
        "cpu_us_per_device_round": 1e6 * cpu / reports,
        "first_round_s": marks[0][0] - launched,
        "parent_cpu_ms_per_round": 1e3 * (end_cpu - begin_cpu) / rounds,
        "clock_ms_per_round": 1e3 * (end - begin) / rounds,
        "parent_peak_rss_mib": used[1][os.getpid()].peak_rss,
        "peak_rss_mib": sum(row.peak_rss for row in used[1].values()),
        "reports": reports / rounds,
        "lost": sum(done.summary["lost"].values()) / len(marks),
        "loss": done.summary["metrics"]["loss"],
    }


def children() -> Iterator[int]:
    """The processes that this one started."""
    for file in Path("/proc/self/task").glob("*/children"):
        yield from map(int, file.read_text().split())


def kernel(settings: Settings, launched: float) -> Figures:
    """train_many.onnx and nothing around it: the same block of devices again and again."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(settings["graph"], options, providers=["CPUExecutionProvider"])
    random = np.random.default_rng(0)
    feed: dict[str, Any] = {}
    for row in session.get_inputs():
        shape = [settings["batch"] if isinstance(size, str) else size for size in row.shape]
        whole = row.type == "tensor(int64)"
        feed[row.name] = random.integers(10, size=shape) if whole else random.standard_normal(shape, np.float32)
    devices, steps = feed["batch.x"].shape[:2]
    feed |= {"steps": np.full(devices, steps), "hyper.lr": np.array(settings["lr"], np.float32)}
    session.run(None, feed)
    begin, begin_cpu = time.monotonic(), time.process_time()
    for _ in range(settings["rounds"]):
        session.run(None, feed)
    clock, cpu, done = time.monotonic() - begin, time.process_time() - begin_cpu, devices * settings["rounds"]
    return {"device_rounds_per_s": done / clock, "cpu_us_per_device_round": 1e6 * cpu / done}


def devices(settings: Settings) -> tuple[Any, list[list[Any]]]:
    """The scenario, and each device's data as tensors."""
    import torch
    from fleetlearn_protocol import open_bundle
    from fleetlearn_simulator.run import source_of
    from fleetlearn_simulator.scenario import Scenario

    torch.set_num_threads(1)
    run = Scenario.read(settings["scenario"], Path(settings["folder"]))
    source = source_of(run, open_bundle(run.plan.bundle))
    return run, [[torch.tensor(array) for array in source.arrays(device)] for device in range(run.population.size)]


def pytorch(settings: Settings, launched: float) -> Figures:
    """FedAvg as one writes it in PyTorch: client after client, a copy of the model, an optimizer, a mean."""
    import _models
    import torch
    from torch import nn
    from torch.nn import functional

    run, data = devices(settings)
    model: nn.Module = _models.make("mcmahan").module if settings["model"] == "mcmahan" else nn.Linear(60, 10)
    size, count = run.population.size, settings["cohort"]
    chosen, rounds, warm = np.random.default_rng(settings["turn"]), settings["rounds"], settings["warm"]
    batch, lr = run.plan.local.batch_size, run.plan.local.lr
    server = {name: value.detach().clone() for name, value in model.state_dict().items()}
    begin, begin_cpu = 0.0, 0.0
    for number in range(rounds):
        if number == warm:
            begin, begin_cpu = time.monotonic(), time.process_time()
        total = {name: torch.zeros_like(value) for name, value in server.items()}
        for device in chosen.permutation(size)[:count].tolist():
            model.load_state_dict(server)
            optimizer = torch.optim.SGD(model.parameters(), lr=lr)
            x, y = data[device]
            for rows in torch.split(torch.randperm(len(y)), batch):
                optimizer.zero_grad()
                value = functional.cross_entropy(model(x[rows]), y[rows])
                value.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            for name, trained in model.state_dict().items():
                total[name] += trained
        server = {name: value / count for name, value in total.items()}
    clock, cpu, done = time.monotonic() - begin, time.process_time() - begin_cpu, count * (rounds - warm)
    model.load_state_dict(server)
    with torch.no_grad():
        loss = sum(functional.cross_entropy(model(x), y).item() for x, y in data) / len(data)
    return {"device_rounds_per_s": done / clock, "cpu_us_per_device_round": 1e6 * cpu / done, "loss": loss}


def pfl(settings: Settings, launched: float) -> Figures:
    """pfl-research's FedAvg on softmax regression, in one process."""
    import importlib

    import torch
    from torch import nn
    from torch.nn import functional

    def get(module: str, name: str) -> Any:
        return getattr(importlib.import_module(f"pfl.{module}"), name)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(60, 10)

        def loss(self, x: torch.Tensor, y: torch.Tensor, eval: bool = False) -> torch.Tensor:  # noqa: A002
            return functional.cross_entropy(self.layer(x), y)

        def metrics(self, x: torch.Tensor, y: torch.Tensor, eval: bool = False) -> dict[str, Any]:  # noqa: A002
            return {"loss": get("metrics", "Weighted")(self.loss(x, y).item() * len(y), len(y))}

    marks: list[tuple[float, float]] = []

    class Clock(get("callback.base", "TrainingProcessCallback")):  # type: ignore[misc]
        def after_central_iteration(self, metrics: Any, model: Any, *, central_iteration: int) -> tuple[bool, Any]:
            marks.append((time.monotonic(), time.process_time()))
            return False, get("metrics", "Metrics")()

    run, data = devices(settings)
    rounds, warm, count, local = settings["rounds"], settings["warm"], settings["cohort"], run.plan.local
    sampler = get("data.sampling", "get_user_sampler")("minimize_reuse", list(range(len(data))))
    users = get("data.federated_dataset", "FederatedDataset")(
        lambda user: get("data.dataset", "Dataset")(data[user], user_id=user), sampler
    )
    module = Model()
    model = get("model.pytorch", "PyTorchModel")(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))
    train = get("hyperparam", "NNTrainHyperParams")(
        local_num_epochs=local.epochs, local_learning_rate=local.lr, local_batch_size=local.batch_size
    )
    algorithm = get("algorithm.federated_averaging", "FederatedAveraging")()
    parameters = get("algorithm.base", "NNAlgorithmParams")(
        central_num_iterations=rounds, evaluation_frequency=10**9, train_cohort_size=count, val_cohort_size=0
    )
    backend = get("aggregate.simulate", "SimulatedBackend")(training_data=users, val_data=None)
    algorithm.run(parameters, backend, model, train, callbacks=[Clock()])
    (begin, begin_cpu), (end, end_cpu) = marks[warm - 1], marks[-1]
    done, losses = count * (rounds - warm), [module.loss(x, y).item() for x, y in data]
    return {
        "device_rounds_per_s": done / (end - begin),
        "cpu_us_per_device_round": 1e6 * (end_cpu - begin_cpu) / done,
        "first_round_s": marks[0][0] - launched,
        "loss": sum(losses) / len(losses),
    }


def main() -> None:
    kind, file, launched = sys.argv[1:]
    contenders = {"simulator": simulator, "kernel": kernel, "pytorch": pytorch, "pfl": pfl}
    figures = contenders[kind](json.loads(Path(file).read_text()), float(launched))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
