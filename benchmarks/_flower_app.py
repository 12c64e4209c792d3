"""The app that Flower's SuperNode trains in device.py: FedAvg, one epoch of SGD in each round.

It is copied beside zoo.py into an app's folder, and runs in an environment that has flwr and torch
and nothing of this project.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zoo
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

torch.set_num_threads(1)
# flwr reads the file for these two names before it runs it
client = ClientApp()
server = ServerApp()


@cache
def examples(file: str) -> tuple[torch.Tensor, torch.Tensor]:
    with np.load(file) as arrays:
        return torch.from_numpy(arrays["x"]), torch.from_numpy(arrays["y"])


@client.train()  # type: ignore[untyped-decorator]
def train(message: Message, context: Any) -> Message:
    config = message.content["config"]
    case, (x, y) = zoo.make(config["model"]), examples(config["data"])
    model = case.module
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
    losses = []
    for rows in torch.split(torch.randperm(len(y)), config["batch"]):
        optimizer.zero_grad()
        loss = case.loss(model(x[rows]), y[rows])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    metrics = {"num-examples": len(y), "loss": float(np.mean(losses))}
    content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord(metrics)}
    return Message(content=RecordDict(content), reply_to=message)


@server.main()  # type: ignore[untyped-decorator]
def main(grid: Any, context: Any) -> None:
    config = context.run_config
    strategy = FedAvg(
        fraction_train=1.0, fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1
    )
    arrays = ArrayRecord(zoo.make(config["model"]).module.state_dict())
    given = ConfigRecord({key: config[key] for key in ("model", "data", "lr", "batch")})
    result = strategy.start(grid, arrays, num_rounds=config["rounds"], train_config=given)
    losses = [metrics["loss"] for metrics in result.train_metrics_clientapp.values()]
    Path(config["results"]).write_text(json.dumps(losses))
