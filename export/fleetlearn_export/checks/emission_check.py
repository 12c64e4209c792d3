"""The checks of graphs that were written straight from a traced graph: of the tracing, and of each
operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import fx

from fleetlearn_export.checks.compared_steps import USUAL
from fleetlearn_export.checks.comparison import batches, first_inputs, first_passing, without_zeros
from fleetlearn_export.checks.memory import give_back_freed_memory
from fleetlearn_export.checks.operator_check import OperatorsChecked, check_operators
from fleetlearn_export.checks.tracing_check import check_cases, check_tracing
from fleetlearn_export.emission.emit import Emission
from fleetlearn_export.model.steps import Function, Tensors
from fleetlearn_export.model.train_step import TrainStep
from fleetlearn_export.model.user_model import UserModel


class StepChecked(NamedTuple):
    """What ``check_emission`` found."""

    operators: OperatorsChecked
    batch_of_one: bool
    """Whether the model can train on a single example."""


def check_emission(
    user: UserModel,
    step: TrainStep,
    module: fx.GraphModule,
    emission: Emission,
    features: Function | None = None,
    located: Callable[[], fx.Graph] | None = None,
) -> StepChecked:
    """Compare the traced step with autograd in PyTorch, and each operator of its ONNX graph with
    PyTorch's.

    module: the traced graph that was emitted. located: returns a graph of the user's loss with
    lines of the user's code. The model is in training mode. Raises ExportError; the text names the
    parameter or the operator.
    """
    trains_on_one = check_tracing(user, step, module, features).batch_of_one
    user = user._replace(trains_on_one=trains_on_one)
    give_back_freed_memory()

    def check(seed: int) -> OperatorsChecked:
        _, some, one = batches(user, seed)
        checked = check_operators(module, emission, operator_inputs(step, some, seed), located)
        if trains_on_one:
            again = check_operators(
                module, emission, operator_inputs(step, one, seed), located, of_the_batch=True
            )
            checked = max(checked, again, key=lambda row: row.worst.excess)
        return checked

    return StepChecked(first_passing(check), trains_on_one)


def check_evaluation(
    user: UserModel,
    values: Tensors,
    module: fx.GraphModule,
    emission: Emission,
    cases: Sequence[fx.GraphModule] = (),
) -> OperatorsChecked:
    """Compare each operator of eval.onnx or infer.onnx, as it was emitted, with PyTorch's.

    values: the parameter table's tensors. cases: what was traced for other numbers of examples.
    Raises ExportError; the text names the operator.
    """

    def check(seed: int) -> OperatorsChecked:
        _, some, _ = batches(user, seed)
        random = torch.Generator().manual_seed(seed)
        inputs = {
            input_.name: without_zeros(values[input_.name.removeprefix("param.")], random)
            if input_.name.startswith("param.")
            else some[input_.name.removeprefix("batch.")]
            for input_ in emission.model.graph.input
        }
        check_cases(module, cases, list(inputs.values()))
        return check_operators(module, emission, inputs)

    return first_passing(check)


def operator_inputs(step: TrainStep, batch: Tensors, seed: int) -> Tensors:
    """Return inputs of the graph for which each operator has something to compute: no bias, state
    or rate is 0."""
    random = torch.Generator().manual_seed(seed)
    hyper = {
        name: USUAL.get(name, 0.5 if default is None else default)
        for name, default in step.hyper.items()
    }
    inputs = first_inputs(step, hyper, seed) | {
        f"batch.{name}": value for name, value in batch.items()
    }
    inputs |= {"seed": torch.tensor(seed)} if step.random else {}
    return {
        name: without_zeros(value, random) if name.startswith(("param.", "state.")) else value
        for name, value in inputs.items()
    }
