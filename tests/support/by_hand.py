"""Training steps written out: by PyTorch's autograd and torch.optim, and by running a bundle's graph."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import onnxruntime
import torch
from fleetlearn_protocol import Bundle
from fleetlearn_protocol.manifest import TRAIN
from fleetlearn_protocol.vector import views
from torch import nn

Batch = Sequence[Any]


def pytorch_training(
    model: nn.Module,
    loss: Callable[..., torch.Tensor],
    batches: Iterable[Batch],
    lr: float,
    mu: float = 0.0,
    anchor: dict[str, torch.Tensor] | None = None,
    targets: int = 1,
) -> tuple[dict[str, Any], list[float]]:
    """SGD on loss + mu/2 * ||w - anchor||^2. Returns the model's arrays after it, and each step's loss alone."""
    model = copy.deepcopy(model).train()
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    optimizer = torch.optim.SGD(trained.values(), lr=lr)
    losses = []
    for batch in batches:
        arrays = [torch.as_tensor(array) for array in batch]
        optimizer.zero_grad()
        value = loss(model(*arrays[: len(arrays) - targets]), *arrays[len(arrays) - targets :])
        losses.append(float(value.detach()))
        if mu and anchor is not None:
            for name, parameter in trained.items():
                value = value + mu / 2 * (parameter - anchor[name]).pow(2).sum()
        value.backward()
        optimizer.step()
    return {name: value.detach().numpy() for name, value in model.state_dict().items()}, losses


def bundle_training(
    bundle: Bundle, batches: Iterable[Batch], lr: float, mu: float = 0.0, anchor: dict[str, Any] | None = None
) -> tuple[dict[str, Any], list[float]]:
    """The same through graphs/train.onnx, fed by hand from the bundle's parameters."""
    table = bundle.manifest.parameters
    session = onnxruntime.InferenceSession(bundle.read(TRAIN), providers=["CPUExecutionProvider"])
    names = [row.name for row in session.get_outputs()]
    now: dict[str, Any] = dict(views(bundle.parameters(), table))
    fixed: dict[str, Any] = {"hyper.lr": np.array(lr, np.float32)}
    if bundle.manifest.step.proximal:
        fixed["hyper.mu"] = np.array(mu, np.float32)
        fixed |= {f"anchor.{name}": value for name, value in (anchor or now).items()}
    losses = []
    for batch in batches:
        feed = {f"batch.{row.name}": np.asarray(array) for row, array in zip(bundle.manifest.batch, batch, strict=True)}
        feed |= fixed | {f"param.{name}": value for name, value in now.items()}
        outputs = dict(zip(names, session.run(names, feed), strict=True))
        losses.append(float(outputs["loss"]))
        now = {row.name: outputs[f"next.param.{row.name}"] for row in table}
    return now, losses


def largest_difference(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """Over all of ``found``'s arrays."""
    return max(float(np.abs(value - expected[name]).max()) for name, value in found.items())
