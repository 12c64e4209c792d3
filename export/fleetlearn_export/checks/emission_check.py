"""The check of a step that was written straight from the traced graph: of its tracing, and of each of its operators."""

from __future__ import annotations

import torch
from torch import fx

from fleetlearn_export.checks.comparison import batches, first_inputs, first_passing
from fleetlearn_export.checks.operator_check import OperatorsChecked, check_operators
from fleetlearn_export.checks.tracing_check import check_tracing
from fleetlearn_export.checks.training_comparison import USUAL
from fleetlearn_export.emission.emit import Emission
from fleetlearn_export.model.steps import Function, Tensors
from fleetlearn_export.model.train_step import TrainStep
from fleetlearn_export.model.user_model import UserModel


def check_emission(
    user: UserModel,
    step: TrainStep,
    module: fx.GraphModule,
    emission: Emission,
    features: Function | None = None,
    located: fx.Graph | None = None,
) -> OperatorsChecked:
    """Compare the traced step with autograd in PyTorch, and each operator of its ONNX graph with PyTorch's.

    module: the traced graph that was emitted. located: a graph of the user's loss with lines of the user's code. The
    model is in training mode. Raises ExportError; the text names the parameter or the operator.
    """
    traced = check_tracing(user, step, module, features)

    def check(seed: int) -> OperatorsChecked:
        _, larger, _, one = (operator_inputs(step, batch, seed) for batch in batches(user, seed))
        found = check_operators(module, emission, larger, located)
        if traced.batch_of_one:
            found = max(found, check_operators(module, emission, one, located), key=lambda row: row.worst.excess)
        return found

    return first_passing(check)


def operator_inputs(step: TrainStep, batch: Tensors, seed: int) -> Tensors:
    """Return inputs of the graph for which each operator has something to compute: no bias, state or rate is 0."""
    random = torch.Generator().manual_seed(seed)
    hyper = {name: USUAL.get(name, 0.5 if default is None else default) for name, default in step.hyper.items()}
    given = first_inputs(step, hyper, seed) | {f"batch.{name}": value for name, value in batch.items()}
    given |= {"seed": torch.tensor(seed)} if step.random else {}
    for name, value in given.items():
        if name.startswith(("param.", "state.")):
            given[name] = value + 0.01 * torch.rand(value.shape, generator=random)
    return given
