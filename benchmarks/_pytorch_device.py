"""A device as one writes it in PyTorch, for device.py: it speaks the protocol and trains one epoch
of SGD in each round.

    _pytorch_device.py DATA.npz MODEL BATCH LR URL

It keeps nothing on disk: an update that is not acknowledged is lost with the process. It ends when
the training is finished.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import numpy as np
import torch
from _websocket_device import Log, Update, describe, take_part

sys.path.append(str(Path(__file__).parents[1] / "tests/support"))
import zoo


def main(file: str, model: str, batch: int, lr: float, url: str) -> None:
    torch.set_num_threads(1)
    case = zoo.make(model)
    parameters = list(case.module.parameters())
    with np.load(file) as arrays:
        x, y = torch.from_numpy(arrays["x"]), torch.from_numpy(arrays["y"])

    def train(content: bytearray) -> Update:
        base = torch.frombuffer(content, dtype=torch.float32)
        torch.nn.utils.vector_to_parameters(base.clone(), parameters)
        optimizer = torch.optim.SGD(parameters, lr=lr)
        losses = []
        for rows in torch.split(torch.randperm(len(y)), batch):
            optimizer.zero_grad()
            loss = case.loss(case.module(x[rows]), y[rows])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.item())
        print(f"loss {np.mean(losses):.6g}", flush=True)
        trained = torch.nn.utils.parameters_to_vector(parameters).detach()
        return describe((trained - base).numpy())

    asyncio.run(take_part(url, "measured", train, Log()))


if __name__ == "__main__":
    file, model, batch, lr, url = sys.argv[1:]
    main(file, model, int(batch), float(lr), url)
