"""What the comparisons of training steps share: how exactly, with which inputs, and by which
words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch

from fleetlearn_export.checks.comparison import (
    NUDGE,
    SEEDS,
    TOLERANCE,
    WIDEST,
    batches,
    compare,
    first_inputs,
    nudged,
    without_zeros,
)
from fleetlearn_export.checks.pytorch_training import PyTorchTraining, ReceiveTensor
from fleetlearn_export.model.stateless import functional_call
from fleetlearn_export.model.steps import Function, Tensors
from fleetlearn_export.model.train_step import TrainStep
from fleetlearn_export.model.user_model import SMALL_BATCH, InferModule, UserModel, evaluation_mode

USUAL = {"mu": 0.25, "max_norm": 0.5, "weight_decay": 0.1, "temperature": 0.5, "momentum": 0.8}
# A large epsilon: a gradient that is rounding errors alone would make a whole step of lr under
# Adam.
USUAL |= {"beta1": 0.8, "beta2": 0.95, "epsilon": 1e-2}
"""The hyper-parameters of the compared steps."""
Run = Callable[[Tensors, ReceiveTensor], Tensors]
"""A graph: named inputs -> named outputs. It may pass an output on to its second argument instead,
when it has it."""


STEPS = 2
"""The second step begins with the state that the first one left."""


class Precision(NamedTuple):
    """How exactly a graph is compared with PyTorch."""

    dtype: torch.dtype
    """What PyTorch computes with."""
    values: float
    """Largest difference of parameters, state and metrics that is allowed; see
    ``comparison.TOLERANCE``."""
    gradients: float
    """Difference of a gradient that is allowed, relative to the tensor's largest gradient."""
    floor: float
    """Difference of a gradient that is allowed in addition, relative to the model's largest
    gradient: a bias before a normalisation has a gradient of rounding errors alone."""
    on_own_results: bool = False
    """Whether each step of the graph starts from the graph's own results. In a deep network with
    BatchNorm an error of rounding grows some 100 times in each step, so there a step starts from
    PyTorch's results."""
    widened: bool = False
    """Whether ``TIMES_ROUNDING`` times the effect of rounding in PyTorch itself is allowed in
    addition."""
    widest: float = WIDEST
    """Most that the effect of rounding may add: for values on the scale of TOLERANCE; for gradients
    ten times as much, on their scale. One sign that flips under a ReLU changes a gradient by
    percents."""
    nudge: float = NUDGE
    """Relative noise on the parameters that shows this effect."""
    traced: bool = False
    """Whether the graph is a traced one, which PyTorch runs: SMALL_BATCH examples do, and nobody
    needs its new parameters."""


FLOAT32 = Precision(torch.float32, TOLERANCE, 1e-3, 1e-5, on_own_results=True)
WIDENED = FLOAT32._replace(on_own_results=False, widened=True)
"""For deep networks with ReLU or BatchNorm: one sign that flips in float32 changes gradients by
percents."""
FLOAT16 = WIDENED._replace(
    values=2.0**-8, gradients=2.0**-6, floor=2.0**-11, nudge=2.0**-11, widest=0.1
)
"""For products in float16, which rounds to relative errors of 2**-11 at most: 8 times as much for
values, which a step moves a little; 32 times for gradients, which pass through many products."""
FLOAT64 = Precision(torch.float64, 1e-9, 1e-6, 1e-9, traced=True)
SAME_ROUNDING = Precision(torch.float32, 2e-6, 2e-5, 5e-9, traced=True)
"""For a traced graph that mostly rounds as autograd does, since both call the same functions of
PyTorch. Of 18 public models 14 are within it; gradients of rounding errors alone, as before
BatchNorm, are not."""


class CheckedStep(NamedTuple):
    """What the check of train.onnx found."""

    difference: float
    """The largest difference from PyTorch."""
    values: Tensors
    """The parameters and buffers after the check's steps; before them, if the steps diverged, so
    that the model's outputs are no numbers in PyTorch either."""
    batch_of_one: bool
    """Whether the model can train on a single example (BatchNorm may not)."""


class ComparedSteps(NamedTuple):
    """What is compared: a step's graph with the same step in PyTorch."""

    user: UserModel
    step: TrainStep
    run: Run
    """Runs the graph."""
    features: Function | None
    seed: int
    """Seed of the batches and of the step's random numbers."""
    precision: Precision
    what: str
    """What the graph is, for messages."""

    def in_pytorch(self, dtype: torch.dtype | None = None) -> PyTorchTraining:
        """Return the step in PyTorch, in the precision's dtype unless another is given."""
        return PyTorchTraining(self.user, self.step, self.features, dtype or self.precision.dtype)


def compare_results(
    compared: ComparedSteps,
    batch: Tensors,
    got: Tensors,
    expected: Tensors,
    effect: Mapping[str, float],
) -> float:
    """Compare the graph's results with PyTorch's. effect: what rounding changes in
    PyTorch, which is allowed in addition.

    Returns the largest difference. Raises ExportError."""
    precision = compared.precision
    rows = {described(name): (got[name].numpy(), value) for name, value in expected.items()}
    rounding = {described(name): value for name, value in effect.items()}
    where = f"the {compared.what}, on a batch of {examples(batch)},"
    return compare(rows, where, precision.values, rounding, precision.widest)


def inputs_without_ties(
    step: TrainStep, hyper: Mapping[str, float], seed: int, precision: Precision
) -> Tensors:
    """Return the inputs of a first step but the batch. In float64, with all seeds but the first, no
    parameter is 0.

    Where a batch norm's bias is 0, its output for one example has the mean 0. If the model takes
    that mean and applies a ReLU, rounding decides the sign, and so the gradient. The comparison in
    float64 does not allow for that.
    """
    inputs = first_inputs(step, hyper, seed)
    if precision.dtype != torch.float64 or seed == SEEDS[0]:
        return inputs
    random = torch.Generator().manual_seed(seed)
    trained = {f"param.{name}" for name in step.objective.trained}
    return {
        name: without_zeros(value, random) if name in trained else value
        for name, value in inputs.items()
    }


def other_batch(user: UserModel, seed: int, precision: Precision) -> Tensors:
    """Return the batch that has another size than the example has."""
    _, other, _ = batches(user, seed)
    if precision.traced and len(next(iter(user.batch.values()))) > SMALL_BATCH:
        return {name: value[:SMALL_BATCH] for name, value in other.items()}
    return other


def examples(batch: Tensors) -> int:
    return len(next(iter(batch.values())))


def gives_numbers(user: UserModel, step: TrainStep, values: Tensors) -> bool:
    """Whether the model with these parameters gives no NaN, on the example and in evaluation
    mode."""
    tensors = {
        f"model.{name}": value.to(step.values[name].dtype, copy=user.writes or name in step.buffers)
        for name, value in values.items()
    }
    with evaluation_mode(user.model), torch.no_grad():
        outputs = functional_call(
            InferModule(user), tensors, tuple(value.clone() for value in user.inputs().values())
        )
    return not any(bool(value.isnan().any()) for value in outputs)


def inputs_to_widen(inputs: Tensors, nudge: float = NUDGE) -> Iterator[Tensors]:
    """Yield the inputs with which PyTorch in float64 shows the effect of rounding: those that are
    given, and the same with nudged parameters."""
    yield inputs
    random = torch.Generator().manual_seed(0)
    yield {
        name: nudged(value, random, nudge) if name.startswith("param.") else value
        for name, value in inputs.items()
    }


def keep_larger(effect: dict[str, float], other: dict[str, float]) -> None:
    effect |= {name: max(value, effect.get(name, 0.0)) for name, value in other.items()}


def described(name: str) -> str:
    kind, _, rest = name.removeprefix("next.").partition(".")
    return {"param": "parameter", "loss": "the loss"}.get(kind, kind) + (f" {rest}" if rest else "")
