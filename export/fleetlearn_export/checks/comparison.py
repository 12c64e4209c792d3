"""Inputs for the checks, graphs run on ONNX Runtime, and the comparison of two results."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import onnx
import onnxruntime
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils import _pytree as pytree

from fleetlearn_export.emission.constants import Constants
from fleetlearn_export.errors import ExportError
from fleetlearn_export.model.source_locations import as_export_error
from fleetlearn_export.model.steps import Tensors
from fleetlearn_export.model.train_step import TrainStep
from fleetlearn_export.model.user_model import SMALL_BATCH, UserModel

TOLERANCE = 1e-5
"""Largest difference of a tensor's elements that is allowed; relative to its largest element where
that is above 1."""
TIMES_ROUNDING = 8
"""Where that is not enough: how many times the effect of rounding in PyTorch itself is allowed
besides."""
WIDEST = 0.01
"""Most that is allowed for rounding, on the scale of TOLERANCE. Two steps of ResNet-18, the second
on one example, need 1e-3. What makes two runs in PyTorch differ by more is not rounding, and widens
no tolerance."""
NUDGE = 1e-6
"""Relative noise on a computation's inputs that shows this effect, besides the difference between
float32 and float64: deep networks with BatchNorm on a few elements enlarge it a million times."""
BLOCK = 2**16
"""Number of elements that are compared at a time, so that what is computed of them stays in the
processor's cache."""
SEEDS = (1, 2, 3)
"""Two runtimes may send a tie under a maximum, or a unit at ReLU's corner, different ways. That is
rare and happens by chance, so only what fails with all seeds is wrong."""

ROWS_FOR_FEWER = 4
"""If an example has this number of rows, the second size is one row less, as each row takes time;
else one row more."""

PLAIN = 0.01
"""The share of a parameter's elements that may be 0, or equal to the element before them, for
``without_zeros``. A parameter with more of them, such as a norm's weights, hides operators that are
left out: it gets some noise."""

Array = NDArray[Any]
Result = TypeVar("Result")


class GraphSession(NamedTuple):
    """A graph on ONNX Runtime, one thread."""

    inner: Any
    inputs: list[str]
    outputs: list[str]
    before: GraphSession | None = None
    """A graph that runs first, and computes inputs of this one."""

    def run(self, feed: Mapping[str, Any]) -> dict[str, Array]:
        if self.before is not None:
            feed = {**feed, **self.before.run(feed)}
        arrays = {name: np.asarray(feed[name]) for name in self.inputs}
        with as_export_error("ONNX Runtime cannot run the exported graph"):
            return dict(zip(self.outputs, self.inner.run(self.outputs, arrays), strict=True))


def open_session(
    content: bytes | Path,
    *,
    optimized: bool = True,
    before: bytes | None = None,
    constants: Constants | None = None,
    without: Sequence[str] = (),
) -> GraphSession:
    """Open a graph, given as its bytes or, which takes less memory, as its file.

    before: a graph that computes inputs of this one. constants: those that the graphs have kept
    apart. without: optimizers of ONNX Runtime that do not run.
    """
    options = onnxruntime.SessionOptions()
    if not optimized:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    # a run gives back the memory that it took
    options.enable_cpu_mem_arena = options.enable_mem_pattern = False
    # no rearranged copies of the weights
    options.add_session_config_entry("session.disable_prepacking", "1")
    options.log_severity_level = 4  # an error is raised, so the log need not say it too
    if constants is not None and constants.arrays:
        graph = content.read_bytes() if isinstance(content, Path) else content
        named = constants.named(onnx.load_model_from_string(graph).graph.initializer)
        values = [onnxruntime.OrtValue.ortvalue_from_numpy(value) for value in named.values()]
        options.add_external_initializers(list(named), values)
    with as_export_error("ONNX Runtime cannot load the exported graph"):
        inner = onnxruntime.InferenceSession(
            content, options, providers=["CPUExecutionProvider"], disabled_optimizers=list(without)
        )
    vars(inner).pop("_model_bytes", None)  # kept only to load the graph again on another provider
    first = None if before is None else open_session(before, constants=constants)
    return GraphSession(
        inner,
        [input_.name for input_ in inner.get_inputs()],
        [output.name for output in inner.get_outputs()],
        first,
    )


def batches(user: UserModel, seed: int) -> Iterator[Tensors]:
    """Yield random rows of the example in batches of its own size, of another one, and of one.

    SMALL_BATCH examples are enough for the second if the model trains on one; else this size shows
    what holds for SMALL_BATCH only, with which the step was traced. A row is repeated only if a
    batch needs more rows than there are: BatchNorm over equal rows divides by almost 0.
    """
    rows = len(next(iter(user.batch.values())))
    other = rows - 1 if rows >= ROWS_FOR_FEWER else rows + 1
    random = torch.Generator().manual_seed(seed)
    for size in (rows, SMALL_BATCH if user.trains_on_one and rows > SMALL_BATCH else other, 1):
        chosen = torch.cat(
            [torch.randperm(rows, generator=random), torch.randperm(rows, generator=random)]
        )[:size]
        yield {name: value[chosen].clone() for name, value in user.batch.items()}


def first_inputs(step: TrainStep, hyper: Mapping[str, float], seed: int) -> Tensors:
    """Return the inputs of a first step but the batch: references near the model, the step's
    initial state.

    Nobody may write into the parameters: they are the step's own.
    """
    random = torch.Generator().manual_seed(seed)
    inputs = step.inputs()
    for reference in step.references:
        for name in step.travelling:
            noise = 0.05 * torch.randn(step.values[name].shape, generator=random)
            # Variances may not become negative.
            inputs[f"{reference}.{name}"] = (
                noise if reference == "correction" else step.values[name] + noise.abs()
            )
    return inputs | {f"hyper.{name}": torch.tensor(value) for name, value in hyper.items()}


def without_zeros(value: Tensor, random: torch.Generator) -> Tensor:
    """Return the tensor if hardly any element is 0 or equal to the one before it, else a tensor
    near it."""
    elements = value.flatten()
    plain = int((elements == 0).sum()) + int((elements[1:] == elements[:-1]).sum())
    if plain <= PLAIN * len(elements):
        return value
    return torch.rand(value.shape, generator=random).mul_(0.01).add_(value)


def first_passing(check: Callable[[int], Result]) -> Result:
    """Return ``check(seed)`` for the first of ``SEEDS`` that passes. Raises ExportError if none
    does."""
    for seed in SEEDS[:-1]:
        with suppress(ExportError):
            return check(seed)
    return check(SEEDS[-1])


def call_in_pytorch(call: Callable[[], Result], batch: Tensors) -> Result | None:
    """Return the call's result, or None if the model takes no batch of one: BatchNorm fails, a
    deviation is NaN."""
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
    return (
        None
        if one and any(isinstance(leaf, Tensor) and bool(leaf.isnan().any()) for leaf in leaves)
        else result
    )


class Difference(NamedTuple):
    """How far a tensor is from PyTorch's, and how far it may be."""

    found: float
    """The largest difference of an element; where the largest element is above 1, relative to
    that."""
    allowed: float


def compare(
    rows: Mapping[str, tuple[Array, Tensor]],
    what: str,
    tolerance: float = TOLERANCE,
    rounding: Mapping[str, float] | None = None,
    widest: float = WIDEST,
) -> float:
    """Return the largest difference; where a tensor's largest element is above 1, relative to that
    element.

    rounding: tensor -> the effect of rounding on it, of which ``TIMES_ROUNDING`` times are allowed
        besides ``tolerance``, but at most ``widest``. Raises ExportError if a difference is larger;
        the text names the tensor.
    """
    effect = rounding or {}
    differences = {
        name: difference(name, *pair, what, tolerance, effect.get(name, 0.0), widest)
        for name, pair in rows.items()
    }
    return refuse_larger(differences, what)


def difference(
    name: str,
    got: Array,
    expected: Tensor,
    what: str,
    tolerance: float = TOLERANCE,
    rounding: float = 0.0,
    widest: float = WIDEST,
) -> Difference:
    """Compare one tensor, as ``compare`` does. Raises ExportError if it has another shape, or
    PyTorch's has NaN."""
    if got.shape != expected.shape:
        raise ExportError(
            f"{what} gives {name} with shape {got.shape} where PyTorch has {tuple(expected.shape)}"
        )
    size = largest(expected)
    if np.isnan(size):
        raise ExportError(
            f"{what} cannot be compared: PyTorch itself gives NaN in {name}, on random rows of the "
            "example. Give an example with which training gives numbers"
        )
    scale = max(1.0, size if np.isfinite(size) else largest(expected[expected.isfinite()]))
    relative = largest_difference(torch.from_numpy(np.asarray(got)), expected) / scale
    return Difference(relative, tolerance + min(TIMES_ROUNDING * rounding / scale, widest))


def refuse_larger(differences: Mapping[str, Difference], what: str) -> float:
    """Return the largest difference. Raises ExportError if one is larger than allowed; the text
    names the tensor."""
    # NaN is neither above nor below: `not value <= ...` finds it too.
    bad = {
        name: difference
        for name, difference in differences.items()
        if not difference.found <= difference.allowed
    }
    if bad:
        name = max(
            bad, key=lambda row: np.nan_to_num(bad[row].found / bad[row].allowed, nan=np.inf)
        )
        raise ExportError(
            f"{what} differs from PyTorch in {name} by {bad[name].found:.3g} (and in "
            f"{len(bad) - 1} more), where {bad[name].allowed:.0e} is allowed"
        )
    return max(difference.found for difference in differences.values())


def difference_of_each(tensors: Tensors, others: Tensors) -> dict[str, float]:
    """Return each tensor's largest difference from the other of its name; 0 where that is infinite
    or NaN."""
    found = {name: largest_difference(others[name], tensor) for name, tensor in tensors.items()}
    return {name: value if np.isfinite(value) else 0.0 for name, value in found.items()}


def nudged(value: Tensor, random: torch.Generator, relative: float = NUDGE) -> Tensor:
    """Return a floating-point tensor with relative noise."""
    noise = torch.randn(value.shape, generator=random, dtype=value.dtype)
    return noise.mul_(relative).add_(1).mul_(value)


def largest_difference(one: Tensor, other: Tensor) -> float:
    """Return the largest absolute difference, computed in float64. Infinity is equal to itself; NaN
    is equal to nothing, and gives NaN."""
    largest_of_blocks = []
    for first, second in in_blocks(one, other):
        difference = first.double() - second.double()
        largest_of_blocks.append(largest(difference))
        if not np.isfinite(largest_of_blocks[-1]):
            largest_of_blocks[-1] = largest(difference.masked_fill_(first == second, 0.0))
    return float(np.max(largest_of_blocks, initial=0.0))


def largest(values: Tensor) -> float:
    """Return the largest absolute value; NaN if one is NaN, and 0 if there is none."""
    if not values.numel():
        return 0.0
    low, high = torch.aminmax(values.detach())
    return float(torch.maximum(-low.double(), high.double()))


def in_blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield pieces of tensors of one shape, at the same places of each, of about ``BLOCK``
    elements."""
    if tensors[0].numel() <= BLOCK:
        yield tensors
        return
    in_memory = sorted(range(tensors[0].dim()), key=tensors[0].stride, reverse=True)
    rows = [tensor.permute(in_memory) for tensor in tensors]
    # pieces of memory: 1.3 ns for an element's difference, not 4.6
    if all(row.is_contiguous() for row in rows):
        yield from zip(*(torch.split(row.view(-1), BLOCK) for row in rows), strict=True)
    else:
        shape = rows[0].shape
        axis = max(range(len(shape)), key=shape.__getitem__)
        length = max(1, BLOCK * shape[axis] // rows[0].numel())
        yield from zip(*(torch.split(row, length, axis) for row in rows), strict=True)
