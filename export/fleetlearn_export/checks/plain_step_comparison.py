"""Comparison of a plain step with PyTorch's: one that has no state, so that each begins alike."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fleetlearn_export.checks.compared_steps import (
    STEPS,
    USUAL,
    CheckedStep,
    ComparedSteps,
    described,
    examples,
    gives_numbers,
    inputs_to_widen,
    inputs_without_ties,
    keep_larger,
    other_batch,
)
from fleetlearn_export.checks.comparison import (
    Difference,
    batches,
    call_in_pytorch,
    difference,
    difference_of_each,
    largest_difference,
    refuse_larger,
)
from fleetlearn_export.checks.gradient_comparison import (
    compare_gradients,
    refuse_other_gradients,
    suitable_rate,
)
from fleetlearn_export.checks.memory import give_back_freed_memory
from fleetlearn_export.model.on_disk import OnDisk, on_disk
from fleetlearn_export.model.steps import Tensors
from fleetlearn_export.model.train_step import TrainStep


def is_plain(step: TrainStep) -> bool:
    """Whether a step without state moves each parameter by ``lr`` times the gradient of the loss
    and its penalties."""
    rule = step.rule
    return rule.optimizer == "sgd" and not (
        step.state or rule.clip or rule.weight_decay or rule.correction
    )


def compare_plain_steps(compared: ComparedSteps) -> CheckedStep:
    """Compare a few plain steps. Each begins with the step's own parameters: in an export the
    parameters of the module trained in place, not the first ones.

    In float64 a step shows gradients so exactly that they need no separate runs. Raises
    ExportError.
    """
    user, step, seed, precision = compared.user, compared.step, compared.seed, compared.precision
    double = precision.dtype == torch.float64
    hyper = {
        name: USUAL.get(name, 0.5 if default is None else default)
        for name, default in step.hyper.items()
    }
    if double:
        hyper["lr"] = suitable_rate(user.largest_gradient)
    else:
        hyper["lr"] = compare_gradients(compared)
        give_back_freed_memory()
    inputs = inputs_without_ties(step, hyper, seed, precision)
    _, other, one = batches(user, seed)
    few = other_batch(user, seed, precision)
    worst, steps, batch_of_one, values = 0.0, 0, True, dict(step.values)
    for number, batch in enumerate([few, one, other] if double else [one, other]):
        if steps == (STEPS if double else 1):
            break
        inputs |= {f"batch.{name}": value for name, value in batch.items()}
        inputs |= {"seed": torch.tensor(seed + number)} if step.random else {}
        compared_step = _compare_plain_step(compared, inputs)
        if compared_step is None:
            batch_of_one = False
            continue
        steps += 1
        largest, values = compared_step
        worst = max(worst, largest)
        give_back_freed_memory()
    if precision.traced or not gives_numbers(user, step, values):
        values = dict(step.values)
    return CheckedStep(worst, values, batch_of_one)


class _PlainResults:
    """Results of a plain step in PyTorch: the parameters on disk, the rest in memory."""

    def __init__(self, others: Tensors, parameters: OnDisk, sizes: Mapping[str, float]) -> None:
        self._others, self._parameters = others, parameters
        self.sizes = sizes
        """The largest element of each parameter's gradient."""

    def __getitem__(self, name: str) -> Tensor:
        return self._others[name] if name in self._others else self._parameters[name]


def _compare_plain_step(compared: ComparedSteps, inputs: Tensors) -> tuple[float, Tensors] | None:
    """Compare one plain step. PyTorch's parameters wait on disk, and each is compared as soon as
    the graph has its own.

    Returns the largest difference, and the parameters and buffers after the step unless the graph
    is a traced one; None if the model takes no batch of one. Raises ExportError.
    """
    with on_disk() as parameters:
        expected = _step_in_pytorch(compared, inputs, parameters)
        if expected is None:
            return None
        effect = _effect_of_rounding(compared, inputs, expected)
        give_back_freed_memory()
        return _compare_results(compared, inputs, expected, effect)


def _batch_of(inputs: Tensors) -> Tensors:
    return {name: value for name, value in inputs.items() if name.startswith("batch.")}


def _step_in_pytorch(
    compared: ComparedSteps, inputs: Tensors, parameters: OnDisk
) -> _PlainResults | None:
    """Do the step in PyTorch. Returns None if the model takes no batch of one."""
    training = compared.in_pytorch()

    def step() -> tuple[Tensors, list[Tensor]]:
        others = training.plain_step(
            inputs, lambda name, value: parameters.keep(f"next.param.{name}", value)
        )
        # call_in_pytorch looks for NaN in what it is given: a gradient with NaN is one of these.
        return others, [torch.tensor(size) for size in training.sizes.values()]

    results = call_in_pytorch(step, _batch_of(inputs))
    return None if results is None else _PlainResults(results[0], parameters, training.sizes)


def _effect_of_rounding(
    compared: ComparedSteps, inputs: Tensors, expected: _PlainResults
) -> dict[str, float]:
    """Return how much rounding changes each result in PyTorch. Empty unless that widens the
    precision."""
    effect: dict[str, float] = {}
    if not compared.precision.widened:
        return effect

    def keep_effect(name: str, value: Tensor) -> None:
        keep_larger(effect, difference_of_each({name: expected[name]}, {name: value}))

    for nudged_inputs in inputs_to_widen(inputs, compared.precision.nudge):
        others = compared.in_pytorch(torch.float64).plain_step(
            nudged_inputs, lambda name, value: keep_effect(f"next.param.{name}", value)
        )
        for name, value in others.items():
            keep_effect(name, value)
    return effect


def _compare_results(
    compared: ComparedSteps,
    inputs: Tensors,
    expected: _PlainResults,
    effect: Mapping[str, float],
) -> tuple[float, Tensors]:
    """Run the graph, and compare each result as soon as it is there."""
    step, precision = compared.step, compared.precision
    double = precision.dtype == torch.float64
    count = examples(_batch_of(inputs))
    where = f"the {compared.what}, on a batch of {count},"
    if count == 1:
        # Tracing takes any number from two for granted.
        advice = "(if your model asks for that number, leave the question out)"
        where = f"the {compared.what}, on a batch of 1 example {advice},"
    differences: dict[str, Difference] = {}
    of_gradients: dict[str, float] = {}
    values: Tensors = {}

    def receive(name: str, value: Tensor) -> None:
        exact, parameter = expected[name], name.removeprefix("next.param.")
        if double and parameter in expected.sizes:
            # A plain step moves a parameter by lr times its gradient.
            rate = float(inputs["hyper.lr"])
            of_gradients[parameter] = largest_difference(value, exact) / rate
        differences[name] = difference(
            described(name),
            value.numpy(),
            exact,
            where,
            precision.values,
            effect.get(name, 0.0),
            precision.widest,
        )
        if parameter in step.values and not precision.traced:
            values[parameter] = value

    for name, value in compared.run(inputs, receive).items():
        receive(name, value)
    if double:
        what = where if count == 1 else f"the {compared.what}"
        refuse_other_gradients(what, of_gradients, expected.sizes, precision, {})
    worst = refuse_larger(
        {described(name): difference for name, difference in differences.items()}, where
    )
    return worst, {name: values[name] for name in step.values} if values else {}
