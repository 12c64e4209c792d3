"""Comparison of a graph's gradients, and of a few of its steps, with PyTorch's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fleetlearn_export.checks.comparison import (
    NUDGE,
    SEEDS,
    TIMES_ROUNDING,
    TOLERANCE,
    WIDEST,
    Difference,
    batches,
    call_in_pytorch,
    compare,
    difference,
    difference_of_each,
    first_inputs,
    in_blocks,
    largest_difference,
    nudged,
    refuse_larger,
    without_zeros,
)
from fleetlearn_export.checks.memory import give_back_freed_memory
from fleetlearn_export.checks.pytorch_training import PyTorchTraining, ReceiveTensor
from fleetlearn_export.errors import ExportError
from fleetlearn_export.model.on_disk import on_disk
from fleetlearn_export.model.stateless import functional_call
from fleetlearn_export.model.steps import Function, Tensors
from fleetlearn_export.model.train_step import TrainStep
from fleetlearn_export.model.user_model import SMALL_BATCH, InferModule, UserModel, evaluation_mode

PROBE = 2.0**20
"""A learning rate so large that the step's result shows the gradient, and hardly the parameter."""
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


def compare_training(
    user: UserModel,
    step: TrainStep,
    run: Run,
    features: Function | None,
    seed: int,
    precision: Precision,
    what: str = "exported step",
) -> CheckedStep:
    """Compare gradients, and two steps on batches of other sizes. Raises ExportError; the text
    names the tensor.

    A plain step passes no state on, so besides the one that shows the gradients it is done once, on
    one example.
    """
    compared = ComparedSteps(user, step, run, features, seed, precision, what)
    if _is_plain(step):
        return _compare_plain_steps(compared)
    custom = step.rule.optimizer == "custom"
    hyper = {name: 0.5 if default is None else default for name, default in step.hyper.items()}
    hyper |= {name: USUAL[name] for name in hyper if not custom and name in USUAL}
    rate = 0.01
    if not custom:
        rate = _compare_gradients(compared)
        give_back_freed_memory()
    if "lr" in hyper:
        hyper["lr"] = rate

    reference = compared.in_pytorch()
    precise = [compared.in_pytorch(torch.float64) for _ in range(2)] if precision.widened else []
    given = inputs_without_ties(step, hyper, seed, precision)
    fed = given
    worst, steps, batch_of_one = 0.0, 0, True
    first, other, one = batches(user, seed)
    for number, batch in enumerate([other, one, first]):
        if steps == STEPS:
            break
        arrays = {f"batch.{name}": value for name, value in batch.items()}
        arrays |= {"seed": torch.tensor(seed + number)} if step.random else {}
        given, fed = given | arrays, fed | arrays
        if _examples(batch) == 1:
            attempt = reference if custom else partial(_gradients, reference)
            if call_in_pytorch(partial(attempt, given), batch) is None:
                batch_of_one = False
                continue
        steps += 1
        got = _all_of(run, fed)
        give_back_freed_memory()
        # PyTorch's step changes parameters in place. Where they are needed afterwards, it gets
        # copies.
        expected = reference(
            {name: value.clone() for name, value in given.items()} if precise else given
        )
        effect: dict[str, float] = {}
        for training, inputs in zip(precise, inputs_to_widen(given, precision.nudge), strict=False):
            keep_larger(effect, difference_of_each(expected.results, training(inputs).results))
        worst = max(worst, _compare_results(compared, batch, got, expected.results, effect))
        given = expected.given
        fed = _next_inputs(compared, fed, given, got)
        del expected, got  # before the next step: each is as large as the model
        give_back_freed_memory()
    values = {name: given[f"param.{name}"] for name in step.values}
    if not _gives_numbers(user, step, values):
        values = dict(step.values)
    return CheckedStep(worst, values, batch_of_one)


def _examples(batch: Tensors) -> int:
    return len(next(iter(batch.values())))


def _compare_results(
    compared: ComparedSteps,
    batch: Tensors,
    got: Tensors,
    expected: Tensors,
    effect: Mapping[str, float],
) -> float:
    """Compare the graph's results with PyTorch's. effect: of rounding in PyTorch, which is allowed
    besides.

    Returns the largest difference. Raises ExportError."""
    precision = compared.precision
    rows = {_described(name): (got[name].numpy(), value) for name, value in expected.items()}
    described = {_described(name): value for name, value in effect.items()}
    where = f"the {compared.what}, on a batch of {_examples(batch)},"
    return compare(rows, where, precision.values, described, precision.widest)


def _next_inputs(compared: ComparedSteps, fed: Tensors, given: Tensors, got: Tensors) -> Tensors:
    """Return what the graph's next step begins with. fed: what this one began with. given: what
    PyTorch's next step begins with. got: the graph's results."""
    own = {
        name.removeprefix("next."): value for name, value in got.items() if name.startswith("next.")
    }
    if compared.precision.on_own_results:
        return fed | own
    if compared.step.rule.optimizer == "custom":
        return given
    # torch.optim has the optimizer's state in itself
    return given | {name: value for name, value in own.items() if name.startswith("state.")}


def inputs_without_ties(
    step: TrainStep, hyper: Mapping[str, float], seed: int, precision: Precision
) -> Tensors:
    """Return the inputs of a first step but the batch. In float64, with all seeds but the first, no
    parameter is 0.

    Where a batch norm's bias is 0, its output for one example has the mean 0. If the model takes
    that mean and applies a ReLU, rounding decides the sign, and so the gradient. The comparison in
    float64 does not allow for that.
    """
    given = first_inputs(step, hyper, seed)
    if precision.dtype != torch.float64 or seed == SEEDS[0]:
        return given
    random = torch.Generator().manual_seed(seed)
    trained = {f"param.{name}" for name in step.objective.trained}
    return {
        name: without_zeros(value, random) if name in trained else value
        for name, value in given.items()
    }


def _other_batch(user: UserModel, seed: int, precision: Precision) -> Tensors:
    """Return the batch that has another size than the example has."""
    _, other, _ = batches(user, seed)
    if precision.traced and len(next(iter(user.batch.values()))) > SMALL_BATCH:
        return {name: value[:SMALL_BATCH] for name, value in other.items()}
    return other


def _is_plain(step: TrainStep) -> bool:
    """Whether a step without state moves each parameter by ``lr`` times the gradient of the loss
    and its penalties."""
    rule = step.rule
    return rule.optimizer == "sgd" and not (
        step.state or rule.clip or rule.weight_decay or rule.correction
    )


def _compare_plain_steps(compared: ComparedSteps) -> CheckedStep:
    """Do the same for a plain step, of which no state goes from one to the next, so that each
    begins with the step's own parameters: in an export those of the module trained in place, not
    the first ones.

    In float64 a step shows gradients so exactly that they need no runs of their own.
    """
    user, step, seed, precision = compared.user, compared.step, compared.seed, compared.precision
    hyper = {
        name: USUAL.get(name, 0.5 if default is None else default)
        for name, default in step.hyper.items()
    }
    double = precision.dtype == torch.float64
    hyper["lr"] = min(0.1, 0.1 / max(user.largest_gradient, 1e-30))
    if not double:
        hyper["lr"] = _compare_gradients(compared)
        give_back_freed_memory()
    given = inputs_without_ties(step, hyper, seed, precision)
    worst, steps, batch_of_one, values = 0.0, 0, True, dict(step.values)
    _, other, one = batches(user, seed)
    few = _other_batch(user, seed, precision)
    for number, batch in enumerate([few, one, other] if double else [one, other]):
        if steps == (STEPS if double else 1):
            break
        given |= {f"batch.{name}": value for name, value in batch.items()}
        given |= {"seed": torch.tensor(seed + number)} if step.random else {}
        found = _compare_plain_step(compared, given)
        if found is None:
            batch_of_one = False
            continue
        steps += 1
        worst, values = max(worst, found[0]), found[1]
        give_back_freed_memory()
    if precision.traced or not _gives_numbers(user, step, values):
        values = dict(step.values)
    return CheckedStep(worst, values, batch_of_one)


def _compare_plain_step(compared: ComparedSteps, given: Tensors) -> tuple[float, Tensors] | None:
    """Compare one plain step. PyTorch's parameters wait on disk, and each is compared as soon as
    the graph has its own.

    Returns the largest difference, and the parameters and buffers after the step unless the graph
    is a traced one; None if the model takes no batch of one. Raises ExportError.
    """
    step, precision, what = compared.step, compared.precision, compared.what
    batch = {name: value for name, value in given.items() if name.startswith("batch.")}
    count = _examples(batch)
    # Tracing takes any number from two for granted.
    one = (
        " example (if your model asks for that number, leave the question out)"
        if count == 1
        else ""
    )
    what_on = f"the {what}, on a batch of {count}{one},"
    double = precision.dtype == torch.float64
    reference = compared.in_pytorch()
    with on_disk() as parameters:

        def in_pytorch() -> tuple[Tensors, list[Tensor]]:
            found = reference.plain_step(
                given, lambda name, value: parameters.keep(f"next.param.{name}", value)
            )
            # NaN if a gradient has NaN
            return found, [torch.tensor(size) for size in reference.sizes.values()]

        found = call_in_pytorch(in_pytorch, batch)
        if found is None:
            return None
        others, _ = found

        def expected(name: str) -> Tensor:
            return others[name] if name in others else parameters[name]

        effect: dict[str, float] = {}

        def keep_effect(name: str, value: Tensor) -> None:
            keep_larger(effect, difference_of_each({name: expected(name)}, {name: value}))

        for inputs in inputs_to_widen(given, precision.nudge) if precision.widened else ():
            training = compared.in_pytorch(torch.float64)
            results = training.plain_step(
                inputs, lambda name, value: keep_effect(f"next.param.{name}", value)
            )
            for name, value in results.items():
                keep_effect(name, value)
        give_back_freed_memory()
        differences: dict[str, Difference] = {}
        of_gradients: dict[str, float] = {}
        values: Tensors = {}

        def receive(name: str, value: Tensor) -> None:
            exact, parameter = expected(name), name.removeprefix("next.param.")
            if double and parameter in reference.sizes:
                of_gradients[parameter] = largest_difference(value, exact) / float(
                    given["hyper.lr"]
                )
            described = _described(name)
            differences[name] = difference(
                described,
                value.numpy(),
                exact,
                what_on,
                precision.values,
                effect.get(name, 0.0),
                precision.widest,
            )
            if parameter in step.values and not precision.traced:
                values[parameter] = value

        for name, value in compared.run(given, receive).items():
            receive(name, value)
        if double:
            _refuse_other_gradients(
                what_on if one else f"the {what}", of_gradients, reference.sizes, precision, {}
            )
        worst = refuse_larger({_described(name): row for name, row in differences.items()}, what_on)
    return worst, {name: values[name] for name in step.values} if values else {}


def _all_of(run: Run, given: Tensors) -> Tensors:
    """Return all outputs of a graph."""
    taken: Tensors = {}
    return run(given, taken.__setitem__) | taken


def _gradients(training: PyTorchTraining, given: Tensors) -> tuple[Tensors, Tensors]:
    """Return all gradients, and the loss and metrics."""
    gradients: Tensors = {}
    return gradients, training.gradients(given, gradients.__setitem__)


def _gives_numbers(user: UserModel, step: TrainStep, values: Tensors) -> bool:
    """Whether the model with these parameters gives no NaN, on the example and in evaluation
    mode."""
    given = {
        f"model.{name}": value.to(step.values[name].dtype, copy=user.writes or name in step.buffers)
        for name, value in values.items()
    }
    with evaluation_mode(user.model), torch.no_grad():
        found = functional_call(
            InferModule(user), given, tuple(value.clone() for value in user.inputs().values())
        )
    return not any(bool(value.isnan().any()) for value in found)


def inputs_to_widen(given: Tensors, nudge: float = NUDGE) -> Iterator[Tensors]:
    """Yield the inputs with which PyTorch in float64 shows the effect of rounding: those that are
    given, and the same with nudged parameters."""
    yield given
    random = torch.Generator().manual_seed(0)
    yield {
        name: nudged(value, random, nudge) if name.startswith("param.") else value
        for name, value in given.items()
    }


def keep_larger(effect: dict[str, float], other: dict[str, float]) -> None:
    effect |= {name: max(value, effect.get(name, 0.0)) for name, value in other.items()}


def _described(name: str) -> str:
    kind, _, rest = name.removeprefix("next.").partition(".")
    return {"param": "parameter", "loss": "the loss"}.get(kind, kind) + (f" {rest}" if rest else "")


def _compare_gradients(compared: ComparedSteps) -> float:
    """Compare the gradients, loss, metrics and buffers of a first step. Returns a learning rate
    that suits them.

    A step returns no gradients. They are read from the parameters after a step with a huge learning
    rate, or from a state (momentum, Adam's m) that equals the gradient with these hyper-parameters.
    Raises ExportError.
    """
    step, precision, seed = compared.step, compared.precision, compared.seed
    hyper = dict.fromkeys(step.hyper, 0.0) | {
        "lr": PROBE,
        "max_norm": 1e30,
        "temperature": 0.5,
        "mu": 0.25,
    }
    hyper = {name: value for name, value in hyper.items() if name in step.hyper}
    given = first_inputs(step, hyper | ({"epsilon": 1.0} if "epsilon" in hyper else {}), seed)
    given = {
        name: torch.zeros_like(v) if name.startswith("correction.") else v
        for name, v in given.items()
    }
    batch = _other_batch(compared.user, seed, precision)
    given |= {f"batch.{name}": value for name, value in batch.items()}
    training = compared.in_pytorch()
    differences: dict[str, float] = {}
    gradients: Tensors = {}
    effect: dict[str, float] = {}

    def keep_effect(name: str, gradient: Tensor) -> None:
        keep_larger(effect, difference_of_each({name: gradients[name]}, {name: gradient}))

    # while PyTorch computes: together they took 1.8 GiB for ViT-B at 224 x 224, not 1.5
    with on_disk() as got:
        found = compared.run(given, got.keep)
        while found:
            got.keep(*found.popitem())
        give_back_freed_memory()

        def receive(name: str, gradient: Tensor) -> None:
            if precision.widened:
                gradients[name] = gradient
            slots = (f"{row}.{name}" for row in ("momentum", "m"))
            slot = next((f"next.state.{row}" for row in slots if f"state.{row}" in given), None)
            differences[name] = (
                largest_difference(got[slot], gradient)
                if slot
                else _difference_of_move(
                    given[f"param.{name}"], got[f"next.param.{name}"], gradient
                )
            )

        results = training.gradients(given, receive)
        kept = {name: got[name] for name in results}
    for inputs in inputs_to_widen(given, precision.nudge) if precision.widened else ():
        others = compared.in_pytorch(torch.float64).gradients(inputs, keep_effect)
        keep_larger(effect, difference_of_each(results, others))
    _refuse_other_gradients(f"the {compared.what}", differences, training.sizes, precision, effect)
    _compare_results(compared, batch, kept, results, effect)
    return min(0.1, 0.1 / max(*training.sizes.values(), 1e-30))


def _refuse_other_gradients(
    what: str,
    differences: Mapping[str, float],
    sizes: Mapping[str, float],
    precision: Precision,
    effect: Mapping[str, float],
) -> None:
    """Raise ExportError if a difference is larger than allowed for a gradient of this size.

    sizes: the largest element of each parameter's gradient. effect: the effect of rounding on it.
    """
    largest = max(sizes.values())
    floor = precision.floor * largest + 1e-30
    allowed = {}
    for name, size in sizes.items():
        widest = 10 * precision.widest * size + precision.widest * largest
        rounding = min(TIMES_ROUNDING * effect.get(name, 0.0), widest)
        allowed[name] = precision.gradients * size + floor + rounding
    # NaN is neither above nor below: `not value <= ...` finds it too.
    bad = [name for name, value in differences.items() if not value <= allowed[name]]
    if bad:
        name = max(bad, key=lambda row: np.nan_to_num(differences[row] / allowed[row], nan=np.inf))
        raise ExportError(
            f"{what} has another gradient than PyTorch for parameter {name} (and {len(bad) - 1} "
            f"more): a difference of {differences[name]:.3g}, where {allowed[name]:.3g} is allowed "
            f"and the largest gradient is {sizes[name]:.3g}"
        )


def _difference_of_move(before: Tensor, after: Tensor, gradient: Tensor) -> float:
    """Return the largest difference between the gradient and what a step with the rate PROBE says
    that it is."""
    pieces = in_blocks(before, after, gradient)
    return max(
        largest_difference((one.double() - other.double()) / PROBE, piece)
        for one, other, piece in pieces
    )
