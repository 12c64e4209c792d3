"""Comparison of train.onnx, eval.onnx and infer.onnx with the same computation in PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor, nn

from fleetlearn_export.checks.compared_steps import (
    FLOAT16,
    FLOAT32,
    WIDENED,
    CheckedStep,
    Run,
)
from fleetlearn_export.checks.comparison import (
    SEEDS,
    Array,
    GraphSession,
    batches,
    call_in_pytorch,
    compare,
    difference_of_each,
    first_passing,
    open_session,
)
from fleetlearn_export.checks.double_precision import DoublePrecision, as_double
from fleetlearn_export.checks.pytorch_training import ReceiveTensor
from fleetlearn_export.checks.training_comparison import compare_training
from fleetlearn_export.emission.constants import Constants
from fleetlearn_export.errors import ExportError
from fleetlearn_export.model.stateless import functional_call
from fleetlearn_export.model.steps import Function, Tensors
from fleetlearn_export.model.train_step import TrainStep
from fleetlearn_export.model.user_model import EvalModule, InferModule, UserModel


def check_train(
    user: UserModel,
    step: TrainStep,
    content: bytes,
    features: Function | None = None,
    *,
    before: bytes | None = None,
    constants: Constants | None = None,
) -> CheckedStep:
    """Compare gradients and a few steps with PyTorch. The model is in training mode.

    before: a graph that computes inputs of ``content`` from the batch, as features.onnx does.
    constants: those that the graphs have kept apart. Raises ExportError; the text names the tensor
    with the largest difference.
    """
    run = _runner(open_session(content, before=before, constants=constants))

    # by chance, as first_passing says, and much cheaper than PyTorch in float64
    for seed in SEEDS[:2]:
        with suppress(ExportError):
            return compare_training(user, step, run, features, seed, FLOAT32)
    # PyTorch in float64 tells whether float32 can do better.
    return first_passing(lambda seed: compare_training(user, step, run, features, seed, WIDENED))


def check_train_in_float16(
    user: UserModel,
    step: TrainStep,
    content: bytes,
    features: Function | None,
    constants: Constants | None,
) -> None:
    """Compare the same with products in float16, within what rounding to it does in PyTorch. Raises
    ExportError.

    content: a graph that rounds in a session that is not optimised. constants: as for
    ``check_train``.
    """
    run = _runner(open_session(content, optimized=False, constants=constants))
    first_passing(
        lambda seed: compare_training(user, step, run, features, seed, FLOAT16, "step in float16")
    )


def _runner(session: GraphSession) -> Run:
    def run(inputs: Tensors, receive: ReceiveTensor) -> Tensors:
        found = session.run({name: value.numpy() for name, value in inputs.items()})
        return {name: torch.from_numpy(value) for name, value in found.items()}

    return run


def check_eval(
    user: UserModel,
    content: bytes,
    values: Tensors,
    *,
    before: bytes | None = None,
    constants: Constants | None = None,
) -> float:
    """Return the largest difference from PyTorch. The model is in evaluation mode. Raises
    ExportError.

    before, constants: as for ``check_train``.
    """
    feed = {f"param.{name}": value.numpy() for name, value in values.items()}
    opened = cache(partial(open_session, content, before=before, constants=constants))
    return _check_outputs(
        user, EvalModule(user), list(user.batch), opened, values, feed, "batch.", user.sum_names()
    )


def check_infer(user: UserModel, content: bytes | Path, values: Mapping[str, Tensor]) -> float:
    """Return the largest difference from PyTorch. The model is in evaluation mode. Raises
    ExportError.

    content: the graph or its file. values: the parameters that it holds. PyTorch computes with them
    before the graph is loaded, so that they may be freed.
    """
    # Folded constants, such as transposed weights, would be in memory twice more while the graph is
    # loaded.
    opened = cache(partial(open_session, content, without=["ConstantFolding"]))
    return _check_outputs(
        user, InferModule(user), list(user.inputs()), opened, values, {}, "", None
    )


def _check_outputs(
    user: UserModel,
    module: nn.Module,
    inputs: list[str],
    opened: Callable[[], GraphSession],
    values: Mapping[str, Tensor],
    feed: Mapping[str, Array],
    prefix: str,
    names: list[str] | None,
) -> float:
    what = f"the exported {'evaluation' if names else 'model'}"

    def in_pytorch(
        some: Sequence[Tensors], double: bool = False
    ) -> list[tuple[Tensor, ...] | None]:
        tensors = {
            f"model.{name}": value.clone() if user.writes else value
            for name, value in values.items()
        }
        with DoublePrecision() if double else nullcontext():
            rows = [as_double(batch) if double else batch for batch in some]
            tensors = as_double(tensors) if double else tensors
            return [
                call_in_pytorch(partial(_in_pytorch, user, module, tensors, batch, inputs), batch)
                for batch in rows
            ]

    def check(seed: int) -> float:
        worst = 0.0
        first, *two = batches(user, seed)
        results = in_pytorch(two)
        if results[-1] is None:  # the model takes no single example
            two, results = [two[0], first], [results[0], *in_pytorch([first])]
        for batch, expected in zip(two, results, strict=True):
            assert expected is not None
            got = opened().run({**feed, **{prefix + name: batch[name].numpy() for name in inputs}})
            rows = dict(zip(names or opened().outputs, expected, strict=True))
            rows = {
                name: _with_examples_axis(value, got[name].shape) for name, value in rows.items()
            }
            pairs = {name: (got[name], value) for name, value in rows.items()}
            try:
                worst = max(worst, compare(pairs, what))
            except ExportError:  # PyTorch in float64 tells whether float32 can do better
                (precise,) = in_pytorch([batch], double=True)
                if precise is None:
                    raise
                effect = difference_of_each(rows, dict(zip(rows, precise, strict=True)))
                worst = max(worst, compare(pairs, what, rounding=effect))
        return worst

    return first_passing(check)


def _with_examples_axis(value: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return an output for a single example with the axis of the examples.

    ``output.squeeze()``, the commonest end of a binary classifier, takes that axis away too where
    its size is 1. The graph keeps the axis for any number of examples, as whoever reads its output
    expects.
    """
    return value[None] if shape == (1, *value.shape) else value


def _in_pytorch(
    user: UserModel, module: nn.Module, tensors: Tensors, batch: Tensors, inputs: list[str]
) -> tuple[torch.Tensor, ...]:
    with torch.no_grad(), user.evaluation_draws():
        result: tuple[torch.Tensor, ...] = functional_call(
            module, tensors, tuple(batch[name].clone() for name in inputs)
        )
        return result
