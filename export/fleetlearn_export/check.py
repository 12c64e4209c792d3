"""Before a bundle is published: its graphs on ONNX Runtime against the same steps in PyTorch, written by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import onnxruntime
import torch
from fleetlearn_protocol.manifest import LocalStep
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call

from fleetlearn_export.errors import ExportError
from fleetlearn_export.places import explained
from fleetlearn_export.source import EvalModule, InferModule, LossModule, Source, copy_of_state
from fleetlearn_export.update import hyper_names

TOLERANCE = 1e-5
"""Largest difference of a tensor's elements after the check's steps; above magnitude 1, of its largest element."""
GRADIENT_TOLERANCE = 1e-3
"""Of a tensor's largest gradient."""
GRADIENT_FLOOR = 1e-5
"""Of the model's largest gradient: a bias before a normalisation has a gradient of rounding errors alone."""
PROBE = 2.0**20
"""A learning rate with which the step's result shows the gradient itself, and hardly the parameter."""
SEEDS = (1, 2, 3)
"""Two values nearly equal under a maximum, or one at ReLU's corner, may fall differently on two runtimes: seldom, and
by chance. What fails with all seeds is wrong."""

Array = NDArray[Any]
Tensors = dict[str, Tensor]
Result = TypeVar("Result")


class Session(NamedTuple):
    """A graph on ONNX Runtime, one thread."""

    inner: Any
    inputs: list[str]
    outputs: list[str]

    def run(self, feed: Mapping[str, Any]) -> dict[str, Array]:
        given = {name: np.asarray(feed[name]) for name in self.inputs}
        with explained("ONNX Runtime cannot run the exported graph"):
            return dict(zip(self.outputs, self.inner.run(self.outputs, given), strict=True))


def open_session(content: bytes) -> Session:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4  # what fails raises
    with explained("ONNX Runtime cannot load the exported graph"):
        inner = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    return Session(inner, [row.name for row in inner.get_inputs()], [row.name for row in inner.get_outputs()])


class HandStep(NamedTuple):
    """A step by PyTorch's autograd, the proximal penalty added to the loss."""

    state: Tensors
    gradients: Tensors
    loss: Tensor
    metrics: list[Tensor]


def hand_step(
    source: Source, step: LocalStep, state: Tensors, anchor: Tensors, batch: Tensors, hyper: Mapping[str, float]
) -> HandStep:
    """``state`` is a copy of the whole model, ``anchor`` has its trained parameters. The model itself stays."""
    leaves = {name: state[name].clone().requires_grad_() for name in anchor}
    after = {name: value.clone() for name, value in state.items()}
    given = {f"model.{name}": value for name, value in (after | leaves).items()}
    # Copies: a model may change its input in place.
    arrays = tuple(value.clone() for value in batch.values())
    loss, *metrics = functional_call(LossModule(source), given, arrays)
    target = loss
    if step.proximal:
        distance = torch.stack([((leaves[name] - anchor[name]) ** 2).sum() for name in anchor]).sum()
        target = loss + hyper["mu"] / 2 * distance
    gradients = dict(zip(leaves, torch.autograd.grad(target, list(leaves.values())), strict=True))
    moved = {name: (leaves[name] - hyper["lr"] * gradients[name]).detach() for name in leaves}
    return HandStep(after | moved, gradients, loss.detach(), metrics)


def batches(source: Source, seed: int) -> Iterator[Tensors]:
    """Rows of the example in batches of its own size, of one more, and of one."""
    rows = len(next(iter(source.batch.values())))
    random = torch.Generator().manual_seed(seed)
    for size in (rows, rows + 1, rows, 1):
        chosen = torch.randint(rows, (size,), generator=random)
        yield {name: value[chosen].clone() for name, value in source.batch.items()}


class Trained(NamedTuple):
    """What checking the step found."""

    difference: float
    values: Tensors
    """The parameters and buffers after its steps."""
    batch_of_one: bool
    """Whether the model trains on a single example at all (BatchNorm may not)."""


def over_seeds(check: Callable[[int], Result]) -> Result:
    """What the check gives with the first seed that it passes. Raises ExportError where it passes with none."""
    for seed in SEEDS[:-1]:
        with suppress(ExportError):
            return check(seed)
    return check(SEEDS[-1])


def in_pytorch(call: Callable[[], Result], batch: Tensors) -> Result | None:
    """What the model gives; None where it takes no batch of one, as BatchNorm in training."""
    try:
        return call()
    except Exception:
        if len(next(iter(batch.values()))) > 1:
            raise
        return None


def check_train(source: Source, step: LocalStep, content: bytes, values: Tensors, buffers: set[str]) -> Trained:
    """Compare gradients and a few steps. The model is in training mode. Raises ExportError, naming the worst."""
    session = open_session(content)
    return over_seeds(lambda seed: _check_steps(source, step, session, values, buffers, seed))


def _check_steps(
    source: Source, step: LocalStep, session: Session, values: Tensors, buffers: set[str], seed: int
) -> Trained:
    random = torch.Generator().manual_seed(seed)
    shifted = {name: value + 0.05 * torch.randn(value.shape, generator=random) for name, value in values.items()}
    anchor = {name: value for name, value in shifted.items() if name not in buffers}
    hyper = dict.fromkeys(hyper_names(step), 0.0) | {"lr": PROBE}

    def exported_step(now: Mapping[str, Array], batch: Tensors, hyper: Mapping[str, float]) -> dict[str, Array]:
        feed: dict[str, Any] = {f"param.{name}": value for name, value in now.items()}
        feed |= {f"anchor.{name}": value.numpy() for name, value in shifted.items()}
        feed |= {f"batch.{name}": value.numpy() for name, value in batch.items()}
        return session.run(feed | {f"hyper.{name}": np.float32(value) for name, value in hyper.items()})

    now: dict[str, Array] = {name: value.numpy() for name, value in values.items()}
    state = copy_of_state(source.model)
    first = next(batches(source, seed))
    largest = _compare_gradients(
        now, exported_step(now, first, hyper), hand_step(source, step, state, anchor, first, hyper)
    )

    hyper = dict.fromkeys(hyper_names(step), 0.25) | {"lr": min(0.1, 0.1 / max(largest, 1e-30))}
    worst, batch_of_one = 0.0, True
    for batch in batches(source, seed):
        expected = in_pytorch(partial(hand_step, source, step, state, anchor, batch, hyper), batch)
        if expected is None:
            batch_of_one = False
            continue
        got = exported_step(now, batch, hyper)
        now, state = {name: got[f"next.param.{name}"] for name in values}, expected.state
        rows = {f"parameter {name}": (now[name], state[name]) for name in values} | {
            "the loss": (got["loss"], expected.loss)
        }
        for name, value in zip(source.metrics, expected.metrics, strict=True):
            rows[f"metric {name}"] = (got[f"metric.{name}"], value)
        worst = max(worst, compare(rows, f"the exported step, on a batch of {len(next(iter(batch.values())))},"))
    return Trained(worst, {name: state[name] for name in values}, batch_of_one)


def _compare_gradients(before: Mapping[str, Array], got: Mapping[str, Array], expected: HandStep) -> float:
    """The largest gradient. ``got`` is a step with learning rate PROBE from ``before``."""
    sizes = {name: float(gradient.abs().max()) for name, gradient in expected.gradients.items()}
    largest = max(sizes.values())
    excess = {}
    for name, gradient in expected.gradients.items():
        found = (before[name].astype(np.float64) - got[f"next.param.{name}"]) / PROBE
        difference = _largest_difference(found, gradient.numpy())
        excess[name] = difference / (GRADIENT_TOLERANCE * sizes[name] + GRADIENT_FLOOR * largest + 1e-30)
    # NaN is greater than nothing, so it is looked for by what it is not.
    bad = [name for name, value in excess.items() if not value <= 1]
    if bad:
        name = max(bad, key=lambda row: np.nan_to_num(excess[row], nan=np.inf))
        raise ExportError(
            f"the exported step has another gradient than PyTorch for parameter {name} (and {len(bad) - 1} more): "
            f"a difference of {100 * excess[name] * GRADIENT_TOLERANCE:.3g} % of the largest"
        )
    return largest


def check_eval(source: Source, content: bytes, values: Tensors) -> float:
    """The largest difference found. The model is in evaluation mode. Raises ExportError."""
    names = ["loss_sum", *(f"metric_sum.{name}" for name in source.metrics), "examples"]
    feed = {f"param.{name}": value.numpy() for name, value in values.items()}
    return _check_outputs(source, EvalModule(source), list(source.batch), content, values, feed, "batch.", names)


def check_infer(source: Source, content: bytes, values: Tensors) -> float:
    """The largest difference found; ``values`` are what ``content`` holds. The model is in evaluation mode."""
    inputs = list(source.inputs())
    return _check_outputs(source, InferModule(source), inputs, content, values, {}, "", None)


def _check_outputs(
    source: Source,
    module: nn.Module,
    inputs: list[str],
    content: bytes,
    values: Tensors,
    feed: Mapping[str, Array],
    prefix: str,
    names: list[str] | None,
) -> float:
    session = open_session(content)
    given = {f"model.{name}": value for name, value in values.items()}

    def check(seed: int) -> float:
        worst = 0.0
        for batch in batches(source, seed):
            arrays = tuple(batch[name].clone() for name in inputs)
            with torch.no_grad():
                expected = in_pytorch(partial(functional_call, module, given, arrays), batch)
            if expected is not None:
                got = session.run({**feed, **{prefix + name: batch[name].numpy() for name in inputs}})
                rows = {
                    name: (got[name], value) for name, value in zip(names or session.outputs, expected, strict=True)
                }
                worst = max(worst, compare(rows, f"the exported {'evaluation' if names else 'model'}"))
        return worst

    return over_seeds(check)


def compare(rows: Mapping[str, tuple[Array, Tensor]], what: str) -> float:
    """The largest difference, above magnitude 1 relative. Raises ExportError above TOLERANCE, naming the worst."""
    found = {}
    for name, (got, tensor) in rows.items():
        expected = tensor.numpy()
        if got.shape != expected.shape:
            raise ExportError(f"{what} gives {name} with shape {got.shape} where PyTorch has {expected.shape}")
        found[name] = _largest_difference(got, expected) / max(1.0, float(np.abs(expected).max(initial=0)))
    bad = [name for name, value in found.items() if not value <= TOLERANCE]
    if bad:
        name = max(bad, key=lambda row: np.nan_to_num(found[row], nan=np.inf))
        raise ExportError(
            f"{what} differs from PyTorch in {name} by {found[name]:.3g} (and in {len(bad) - 1} more), where "
            f"{TOLERANCE:.0e} is allowed"
        )
    return max(found.values())


def _largest_difference(got: Array, expected: Array) -> float:
    return float(np.abs(np.subtract(got, expected, dtype=np.float64)).max(initial=0.0))
