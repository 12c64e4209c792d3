"""Inputs for the checks, graphs run on ONNX Runtime, and the comparison of two results."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

import numpy as np
import onnxruntime
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils import _pytree as pytree

from fleetlearn_export.errors import ExportError
from fleetlearn_export.model.source_locations import as_export_error
from fleetlearn_export.model.steps import Tensors
from fleetlearn_export.model.train_step import TrainStep
from fleetlearn_export.model.user_model import UserModel

TOLERANCE = 1e-5
"""Largest difference of a tensor's elements that is allowed; relative to its largest element where that is above 1."""
ROUNDING = 8
"""Where that is not enough: how many times the effect of rounding in PyTorch itself is allowed besides."""
NUDGE = 1e-6
"""Relative change of parameters that shows this effect, besides the difference between float32 and float64: deep
networks with BatchNorm on a few elements enlarge it a million times."""
SEEDS = (1, 2, 3)
"""Two runtimes may send a tie under a maximum, or a unit at ReLU's corner, different ways. That is rare and happens by
chance, so only what fails with all seeds is wrong."""

Array = NDArray[Any]
Result = TypeVar("Result")


class Session(NamedTuple):
    """A graph on ONNX Runtime, one thread."""

    inner: Any
    inputs: list[str]
    outputs: list[str]
    before: Session | None = None
    """A graph that runs first, and computes inputs of this one."""

    def run(self, feed: Mapping[str, Any]) -> dict[str, Array]:
        if self.before is not None:
            feed = {**feed, **self.before.run(feed)}
        given = {name: np.asarray(feed[name]) for name in self.inputs}
        with as_export_error("ONNX Runtime cannot run the exported graph"):
            return dict(zip(self.outputs, self.inner.run(self.outputs, given), strict=True))


def open_session(content: bytes, *, optimized: bool = True, before: bytes | None = None) -> Session:
    """Open a graph. ``before``: a graph that computes inputs of this one."""
    options = onnxruntime.SessionOptions()
    if not optimized:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4  # an error is raised, so the log need not say it too
    with as_export_error("ONNX Runtime cannot load the exported graph"):
        inner = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    first = None if before is None else open_session(before)
    return Session(inner, [row.name for row in inner.get_inputs()], [row.name for row in inner.get_outputs()], first)


def batches(user: UserModel, seed: int) -> Iterator[Tensors]:
    """Yield random rows of the example in batches of its own size, of one more, of its own size, and of one.

    A row is repeated only if a batch needs more rows than there are: BatchNorm over equal rows divides by almost 0.
    """
    rows = len(next(iter(user.batch.values())))
    random = torch.Generator().manual_seed(seed)
    for size in (rows, rows + 1, rows, 1):
        chosen = torch.cat([torch.randperm(rows, generator=random), torch.randperm(rows, generator=random)])[:size]
        yield {name: value[chosen].clone() for name, value in user.batch.items()}


def first_inputs(step: TrainStep, hyper: Mapping[str, float], seed: int) -> Tensors:
    """Return the inputs of a first step but the batch: references near the model, the step's initial state."""
    random = torch.Generator().manual_seed(seed)
    given = step.arguments()
    for reference in step.references:
        for name in step.travelling:
            noise = 0.05 * torch.randn(step.values[name].shape, generator=random)
            # Variances may not become negative.
            given[f"{reference}.{name}"] = noise if reference == "correction" else step.values[name] + noise.abs()
    return given | {f"hyper.{name}": torch.tensor(value) for name, value in hyper.items()}


def first_passing(check: Callable[[int], Result]) -> Result:
    """Return ``check(seed)`` for the first of ``SEEDS`` that passes. Raises ExportError if none does."""
    for seed in SEEDS[:-1]:
        with suppress(ExportError):
            return check(seed)
    return check(SEEDS[-1])


def call_in_pytorch(call: Callable[[], Result], batch: Tensors) -> Result | None:
    """Return the call's result, or None if the model takes no batch of one: BatchNorm fails, a deviation is NaN."""
    one = len(next(iter(batch.values()))) == 1
    try:
        with warnings.catch_warnings():
            if one:  # the user did not ask for a batch of one
                warnings.simplefilter("ignore")
            result = call()
    except Exception:
        if not one:
            raise
        return None
    leaves = pytree.tree_leaves(result)
    return None if one and any(isinstance(row, Tensor) and bool(row.isnan().any()) for row in leaves) else result


def compare(
    rows: Mapping[str, tuple[Array, Tensor]],
    what: str,
    tolerance: float = TOLERANCE,
    others: Sequence[Mapping[str, Tensor]] = (),
) -> float:
    """Return the largest difference; where a tensor's largest element is above 1, relative to that element.

    others: further results of PyTorch, such as those in float64, if ``ROUNDING`` times their largest difference from
        its results in float32 is allowed besides ``tolerance``. Raises ExportError if a difference is larger; the text
        names the tensor.
    """
    found, allowed = {}, {}
    for name, (got, tensor) in rows.items():
        expected = tensor.numpy()
        if got.shape != expected.shape:
            raise ExportError(f"{what} gives {name} with shape {got.shape} where PyTorch has {expected.shape}")
        if np.isnan(expected).any():
            raise ExportError(
                f"{what} cannot be compared: PyTorch itself gives NaN in {name}, on random rows of the example. "
                "Give an example with which training gives numbers"
            )
        finite = np.abs(expected[np.isfinite(expected)])
        scale = max(1.0, float(finite.max(initial=0)))
        found[name] = largest_difference(got, expected) / scale
        allowed[name] = tolerance + ROUNDING * rounding(tensor, [other[name] for other in others]) / scale
    # NaN is neither above nor below: `not value <= ...` finds it too.
    bad = [name for name, value in found.items() if not value <= allowed[name]]
    if bad:
        name = max(bad, key=lambda row: np.nan_to_num(found[row] / allowed[row], nan=np.inf))
        raise ExportError(
            f"{what} differs from PyTorch in {name} by {found[name]:.3g} (and in {len(bad) - 1} more), where "
            f"{allowed[name]:.0e} is allowed"
        )
    return max(found.values())


def rounding(tensor: Tensor, others: Sequence[Tensor]) -> float:
    """Return the largest difference of ``others`` from the tensor, without those that are infinite or NaN."""
    found = [largest_difference(tensor.numpy(), other.numpy()) for other in others]
    return max(filter(np.isfinite, found), default=0.0)


def largest_difference(got: Array, expected: Array) -> float:
    with np.errstate(invalid="ignore"):  # infinity less infinity
        difference = np.abs(np.subtract(got, expected, dtype=np.float64))
    return float(np.where(got == expected, 0.0, difference).max(initial=0.0))
