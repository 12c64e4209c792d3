"""Before a bundle is published: its graphs on ONNX Runtime against the same steps in PyTorch, written by hand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import onnxruntime
import torch
from fleetlearn_protocol.manifest import LocalStep
from numpy.typing import NDArray
from torch import Tensor
from torch.func import functional_call

from fleetlearn_export.errors import ExportError
from fleetlearn_export.trace import EvalModule, InferModule, LossModule, Source
from fleetlearn_export.update import hyper_names

TOLERANCE = 1e-5
"""Largest difference of a tensor's elements after the check's steps, for each unit of its largest magnitude above 1."""
GRADIENT_TOLERANCE = 1e-3
"""Of a tensor's largest gradient."""
GRADIENT_FLOOR = 1e-5
"""Of the model's largest gradient: a bias before a normalisation has a gradient of rounding errors alone."""
PROBE = 2.0**20
"""A learning rate that makes the step's result show the gradient itself and not the parameter."""

Arrays = dict[str, NDArray[Any]]
Tensors = dict[str, Tensor]


class Session(NamedTuple):
    """A graph on ONNX Runtime, one thread."""

    inner: onnxruntime.InferenceSession
    inputs: list[str]
    outputs: list[str]

    def run(self, feed: Mapping[str, Any]) -> Arrays:
        given = {name: np.asarray(feed[name]) for name in self.inputs}
        return dict(zip(self.outputs, self.inner.run(self.outputs, given), strict=True))


def open_session(content: bytes) -> Session:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    inner = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    return Session(inner, [row.name for row in inner.get_inputs()], [row.name for row in inner.get_outputs()])


class HandStep(NamedTuple):
    """A step by PyTorch's autograd, the proximal penalty added to the loss."""

    parameters: Tensors
    gradients: Tensors
    loss: Tensor
    metrics: list[Tensor]


def hand_step(
    source: Source, step: LocalStep, values: Tensors, anchor: Tensors, batch: Tensors, hyper: Mapping[str, float]
) -> HandStep:
    """``values`` hold every parameter and buffer of the table; buffers have no anchor."""
    leaves = {name: values[name].clone().requires_grad_() for name in anchor}
    others = {name: value.clone() for name, value in values.items() if name not in anchor}
    given = {f"model.{name}": value for name, value in (leaves | others).items()}
    loss, *metrics = functional_call(LossModule(source), given, tuple(batch.values()))
    target = loss
    if step.proximal:
        distance = torch.stack([((leaves[name] - anchor[name]) ** 2).sum() for name in anchor]).sum()
        target = loss + hyper["mu"] / 2 * distance
    gradients = dict(zip(leaves, torch.autograd.grad(target, list(leaves.values())), strict=True))
    moved = {name: (leaves[name] - hyper["lr"] * gradients[name]).detach() for name in leaves}
    return HandStep({name: (moved | others)[name] for name in values}, gradients, loss.detach(), metrics)


def batches(source: Source) -> Iterator[Tensors]:
    """Rows of the example in batches of its own size, of one more, and of one."""
    rows = len(next(iter(source.batch.values())))
    random = torch.Generator().manual_seed(1)
    for size in (rows, rows + 1, rows, 1):
        chosen = torch.randint(rows, (size,), generator=random)
        yield {name: value[chosen].clone() for name, value in source.batch.items()}


def check_train(
    source: Source, step: LocalStep, content: bytes, values: Tensors, buffers: set[str]
) -> tuple[float, Tensors]:
    """The largest difference found, and the parameters after the check's steps. Raises ExportError."""
    session = open_session(content)
    random = torch.Generator().manual_seed(2)
    trained = {name: value for name, value in values.items() if name not in buffers}
    anchor = {name: value + 0.05 * torch.randn(value.shape, generator=random) for name, value in trained.items()}

    def both(now: Arrays, hand: Tensors, batch: Tensors, hyper: dict[str, float]) -> tuple[Arrays, HandStep]:
        feed: dict[str, Any] = {f"param.{name}": value for name, value in now.items()}
        feed |= {f"anchor.{name}": value.numpy() for name, value in anchor.items()}
        feed |= {f"batch.{name}": value.numpy() for name, value in batch.items()}
        feed |= {f"hyper.{name}": np.float32(value) for name, value in hyper.items()}
        return session.run(feed), hand_step(source, step, hand, anchor, batch, hyper)

    now = {name: value.numpy() for name, value in values.items()}
    first = next(batches(source))
    hyper = dict.fromkeys(hyper_names(step), 0.25) | {"lr": PROBE}
    got, expected = both(now, values, first, hyper)
    largest = max(float(gradient.abs().max()) for gradient in expected.gradients.values())
    for name, gradient in expected.gradients.items():
        found = (values[name].numpy().astype(np.float64) - got[f"next.param.{name}"]) / PROBE
        difference = _largest_difference(found, gradient.numpy())
        if not difference <= GRADIENT_TOLERANCE * float(gradient.abs().max()) + GRADIENT_FLOOR * largest:
            raise ExportError(
                f"the exported step computes another gradient than PyTorch for parameter {name}: they differ by "
                f"{difference:.3g} where the largest is {float(gradient.abs().max()):.3g}. Nothing was written."
            )

    hyper["lr"] = min(0.1, 0.1 / max(largest, 1e-30))
    hand, worst = values, 0.0
    for batch in batches(source):
        try:
            got, expected = both(now, hand, batch, hyper)
        except ValueError:
            if len(next(iter(batch.values()))) > 1:
                raise
            continue  # batch norm cannot train on a single value
        now, hand = {name: got[f"next.param.{name}"] for name in values}, expected.parameters
        size = len(next(iter(batch.values())))
        rows = {f"parameter {name}": (now[name], hand[name]) for name in values}
        rows |= {"the loss": (got["loss"], expected.loss)}
        rows |= {
            f"metric {name}": (got[f"metric.{name}"], value)
            for name, value in zip(source.metrics, expected.metrics, strict=True)
        }
        worst = max(worst, compare(rows, f"the exported step, trained on a batch of {size}"))
    return worst, hand


def check_eval(source: Source, content: bytes, values: Tensors) -> float:
    """The largest difference found, relative to the sum's size. The model is in evaluation mode."""
    session, worst = open_session(content), 0.0
    names = ["loss_sum", *(f"metric_sum.{name}" for name in source.metrics), "examples"]
    given = {f"model.{name}": value for name, value in values.items()}
    for batch in batches(source):
        with torch.no_grad():
            expected = functional_call(EvalModule(source), given, tuple(batch.values()))
        feed: dict[str, Any] = {f"param.{name}": value.numpy() for name, value in values.items()}
        got = session.run(feed | {f"batch.{name}": value.numpy() for name, value in batch.items()})
        rows = {name: (got[name], value) for name, value in zip(names, expected, strict=True)}
        worst = max(worst, compare(rows, "the exported evaluation"))
    return worst


def check_infer(source: Source, content: bytes, values: Tensors) -> float:
    """The largest difference found. The model is in evaluation mode; ``values`` are the ones inside ``content``."""
    session, worst = open_session(content), 0.0
    given = {f"model.{name}": value for name, value in values.items()}
    for batch in batches(source):
        inputs = {name: batch[name] for name in source.inputs()}
        with torch.no_grad():
            expected = functional_call(InferModule(source), given, tuple(inputs.values()))
        got = session.run({name: value.numpy() for name, value in inputs.items()})
        rows = {name: (got[name], value) for name, value in zip(session.outputs, expected, strict=True)}
        worst = max(worst, compare(rows, "the exported model"))
    return worst


def compare(rows: Mapping[str, tuple[NDArray[Any], Tensor]], what: str) -> float:
    worst = 0.0
    for name, (got, tensor) in rows.items():
        expected = tensor.numpy()
        if got.shape != expected.shape:
            raise ExportError(f"{what}: {name} has shape {got.shape} where PyTorch has {expected.shape}")
        difference = _largest_difference(got, expected)
        if not difference <= TOLERANCE * max(1.0, float(np.abs(expected).max(initial=0.0))):
            raise ExportError(f"{what} differs from PyTorch: {name} by {difference:.3g}. Nothing was written.")
        worst = max(worst, difference)
    return worst


def _largest_difference(got: NDArray[Any], expected: NDArray[Any]) -> float:
    return float(np.abs(np.subtract(got, expected, dtype=np.float64)).max(initial=0.0))
