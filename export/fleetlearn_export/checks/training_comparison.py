"""Comparison of a graph's gradients, and of a few of its steps, with PyTorch's."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from fleetlearn_export.checks.compared_steps import (
    STEPS,
    USUAL,
    CheckedStep,
    ComparedSteps,
    Precision,
    Run,
    compare_results,
    examples,
    gives_numbers,
    inputs_to_widen,
    inputs_without_ties,
    keep_larger,
)
from fleetlearn_export.checks.comparison import batches, call_in_pytorch, difference_of_each
from fleetlearn_export.checks.gradient_comparison import compare_gradients
from fleetlearn_export.checks.memory import give_back_freed_memory
from fleetlearn_export.checks.plain_step_comparison import compare_plain_steps, is_plain
from fleetlearn_export.checks.pytorch_training import PyTorchTraining
from fleetlearn_export.model.steps import Function, Tensors
from fleetlearn_export.model.train_step import TrainStep
from fleetlearn_export.model.user_model import UserModel


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
    if is_plain(step):
        return compare_plain_steps(compared)
    return _compare_steps(compared, _hyper_of_steps(compared))


def _hyper_of_steps(compared: ComparedSteps) -> dict[str, float]:
    """Compare the gradients, and return the hyper-parameters of the steps to compare, with a
    learning rate that suits these gradients. Raises ExportError."""
    step = compared.step
    hyper = {name: 0.5 if default is None else default for name, default in step.hyper.items()}
    rate = 0.01
    # A custom step may call anything lr, mu or momentum, and returns nothing that shows a gradient.
    if step.rule.optimizer != "custom":
        hyper |= {name: USUAL[name] for name in hyper if name in USUAL}
        rate = compare_gradients(compared)
        give_back_freed_memory()
    return hyper | ({"lr": rate} if "lr" in hyper else {})


def _compare_steps(compared: ComparedSteps, hyper: Mapping[str, float]) -> CheckedStep:
    """Compare ``STEPS`` steps, each of which begins with the state that the one before it left."""
    user, step, precision, seed = compared.user, compared.step, compared.precision, compared.seed
    reference = compared.in_pytorch()
    precise = [compared.in_pytorch(torch.float64) for _ in range(2)] if precision.widened else []
    inputs = inputs_without_ties(step, hyper, seed, precision)
    graph_inputs = inputs
    worst, steps, batch_of_one = 0.0, 0, True
    first, other, one = batches(user, seed)
    for number, batch in enumerate([other, one, first]):
        if steps == STEPS:
            break
        arrays = {f"batch.{name}": value for name, value in batch.items()}
        arrays |= {"seed": torch.tensor(seed + number)} if step.random else {}
        inputs, graph_inputs = inputs | arrays, graph_inputs | arrays
        if examples(batch) == 1 and not _trains_on(compared, reference, inputs, batch):
            batch_of_one = False
            continue
        steps += 1
        got = _all_outputs(compared.run, graph_inputs)
        give_back_freed_memory()
        # PyTorch's step changes parameters in place. Where they are needed afterwards, it gets
        # copies.
        expected = reference(
            {name: value.clone() for name, value in inputs.items()} if precise else inputs
        )
        effect: dict[str, float] = {}
        widening = inputs_to_widen(inputs, precision.nudge)
        for training, nudged_inputs in zip(precise, widening, strict=False):
            others = training(nudged_inputs).results
            keep_larger(effect, difference_of_each(expected.results, others))
        worst = max(worst, compare_results(compared, batch, got, expected.results, effect))
        inputs = expected.given
        graph_inputs = _next_inputs(compared, graph_inputs, inputs, got)
        del expected, got  # before the next step: each is as large as the model
        give_back_freed_memory()
    values = {name: inputs[f"param.{name}"] for name in step.values}
    if not gives_numbers(user, step, values):
        values = dict(step.values)
    return CheckedStep(worst, values, batch_of_one)


def _trains_on(
    compared: ComparedSteps, reference: PyTorchTraining, inputs: Tensors, batch: Tensors
) -> bool:
    """Whether the model trains on this batch of one example in PyTorch: BatchNorm may not."""
    custom = compared.step.rule.optimizer == "custom"
    attempt = reference if custom else partial(_gradients, reference)
    return call_in_pytorch(partial(attempt, inputs), batch) is not None


def _next_inputs(
    compared: ComparedSteps, graph_inputs: Tensors, inputs: Tensors, got: Tensors
) -> Tensors:
    """Return what the graph's next step begins with.

    graph_inputs: what this one began with. inputs: what PyTorch's next step begins with. got: the
    graph's results.
    """
    own = {
        name.removeprefix("next."): value for name, value in got.items() if name.startswith("next.")
    }
    if compared.precision.on_own_results:
        return graph_inputs | own
    if compared.step.rule.optimizer == "custom":
        return inputs
    # torch.optim has the optimizer's state in itself
    return inputs | {name: value for name, value in own.items() if name.startswith("state.")}


def _all_outputs(run: Run, inputs: Tensors) -> Tensors:
    """Return all outputs of a graph."""
    received: Tensors = {}
    return run(inputs, received.__setitem__) | received


def _gradients(training: PyTorchTraining, inputs: Tensors) -> tuple[Tensors, Tensors]:
    """Return all gradients, and the loss and metrics."""
    gradients: Tensors = {}
    return gradients, training.gradients(inputs, gradients.__setitem__)
