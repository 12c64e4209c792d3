"""Training steps written out: by PyTorch's autograd and torch.optim, and by running a bundle's
graph."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime
import torch
from fleetlearn_export.model.seeded_random import Seeded
from fleetlearn_protocol import Bundle
from fleetlearn_protocol.manifest import TRAIN
from fleetlearn_protocol.vector import views
from torch import nn

Batch = Sequence[Any]
Arrays = dict[str, Any]


def pytorch_training(
    model: nn.Module,
    loss: Callable[..., torch.Tensor],
    batches: Iterable[Batch],
    lr: float,
    mu: float = 0.0,
    anchor: dict[str, torch.Tensor] | None = None,
    targets: int = 1,
) -> tuple[Arrays, list[float]]:
    """SGD on loss + mu/2 * ||w - anchor||^2. Returns the model's arrays after it, and each step's
    loss alone."""
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
        value.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return {name: value.detach().numpy() for name, value in model.state_dict().items()}, losses


class Repeatable(nn.Module):
    """A module whose random numbers in the k-th call come from the seed k, as a bundle's in the
    k-th step."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.calls = 0

    def forward(self, *inputs: torch.Tensor) -> Any:
        with Seeded(torch.tensor(self.calls)):
            self.calls += 1
            return self.inner(*inputs)


class GraphTraining:
    """One task on graphs/train.onnx: what a device does, without the device's code.

    parameters, state: name -> array as they are now; they begin as the bundle's.
    hyper: values; the manifest's defaults for the rest.
    references: reference -> name -> array, for all that travels. Unless given ``anchor`` and
        ``previous`` are the parameters at the beginning, ``correction`` is 0.
    seed: of the first step; each step adds 1.
    """

    def __init__(
        self,
        bundle: Bundle,
        hyper: Mapping[str, float],
        references: Mapping[str, Mapping[str, Any]] | None = None,
        seed: int = 0,
    ) -> None:
        self.manifest = bundle.manifest
        self.parameters: Arrays = dict(views(bundle.parameters(), self.manifest.parameters))
        self.state: Arrays = dict(views(bundle.state(), self.manifest.state))
        self.hyper = {row.name: row.default for row in self.manifest.hyper} | dict(hyper)
        self.references = {
            reference: {
                row.name: np.zeros(row.shape, np.float32)
                if reference == "correction"
                else self.parameters[row.name]
                for row in self.manifest.travelling
            }
            for reference in self.manifest.references
        } | dict(references or {})
        self.seed = seed
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1  # on a busy machine a second one waits more than it works
        self.session = onnxruntime.InferenceSession(
            bundle.path / TRAIN, options, providers=["CPUExecutionProvider"]
        )

    def step(self, batch: Batch) -> dict[str, float]:
        """Train on one batch. Returns the loss and the metrics, which the graph measures before the
        update."""
        feed = {
            f"batch.{row.name}": np.asarray(array)
            for row, array in zip(self.manifest.batch, batch, strict=True)
        }
        feed |= {f"param.{name}": value for name, value in self.parameters.items()}
        feed |= {f"state.{name}": value for name, value in self.state.items()}
        feed |= {f"hyper.{name}": np.array(value, np.float32) for name, value in self.hyper.items()}
        for reference, values in self.references.items():
            feed |= {f"{reference}.{name}": np.asarray(value) for name, value in values.items()}
        if self.manifest.random:
            feed["seed"] = np.array(self.seed)
            self.seed += 1
        names = [row.name for row in self.session.get_outputs()]
        outputs = dict(zip(names, self.session.run(names, feed), strict=True))
        self.parameters = {name: outputs[f"next.param.{name}"] for name in self.parameters}
        self.state = {name: outputs[f"next.state.{name}"] for name in self.state}
        return {
            name: float(outputs[name])
            for name in ("loss", *(f"metric.{row}" for row in self.manifest.metrics))
        }


def bundle_training(
    bundle: Bundle,
    batches: Iterable[Batch],
    lr: float,
    mu: float = 0.0,
    anchor: Arrays | None = None,
    *,
    hyper: Mapping[str, float] | None = None,
    seed: int = 0,
) -> tuple[Arrays, list[float]]:
    """The same through graphs/train.onnx, fed by hand from the bundle's parameters and its initial
    state."""
    given = {"lr": lr, **({"mu": mu} if bundle.manifest.step.proximal else {}), **(hyper or {})}
    training = GraphTraining(bundle, given, {"anchor": anchor} if anchor else None, seed)
    losses = [training.step(batch)["loss"] for batch in batches]
    return training.parameters, losses


def largest_difference(found: Mapping[str, Any], expected: Mapping[str, Any]) -> float:
    """Over all of ``found``'s arrays."""
    return max(
        float(np.abs(np.asarray(value) - np.asarray(expected[name])).max())
        for name, value in found.items()
    )
