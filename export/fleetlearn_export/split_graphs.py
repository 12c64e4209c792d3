"""Makes the graphs that a part of a split model has beside those of any bundle: a bottom's forward
pass, and a top's step with the gradients for the activations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import onnx
import torch
from fleetlearn_protocol.manifest import ACTIVATIONS, TOP_STEP

from fleetlearn_export.checked_graphs import CheckedGraphs
from fleetlearn_export.checks.comparison import (
    batches,
    call_in_pytorch,
    compare,
    difference_of_each,
    first_inputs,
    first_passing,
    nudged,
    open_session,
)
from fleetlearn_export.emission.emitter import EmissionError
from fleetlearn_export.errors import ExportError
from fleetlearn_export.export_settings import ExportSettings
from fleetlearn_export.graphs.batch_norm_folding import fold_batch_norms
from fleetlearn_export.graphs.coded_weights import code_weights
from fleetlearn_export.graphs.conversion import check_standard, serialised
from fleetlearn_export.graphs.emitted import emitted
from fleetlearn_export.graphs.scattered_sums import scatter_into_sums
from fleetlearn_export.graphs.small_vectors import put_vectors_together
from fleetlearn_export.model.seeded_random import Seeded
from fleetlearn_export.model.steps import Tensors
from fleetlearn_export.model.train_step import TrainStep, gradient_of, plain_kernels
from fleetlearn_export.model.user_model import UserModel, training_mode
from fleetlearn_export.tracing.decompositions import Decompositions
from fleetlearn_export.tracing.trace import Traced, trace_activations, trace_step

SEED = 11
"""The seed with which random steps are compared."""


def split_graphs(user: UserModel, step: TrainStep, settings: ExportSettings) -> CheckedGraphs:
    """Make activations.onnx of a bottom, or top_step.onnx of a top, and compare it with PyTorch.
    Raises ExportError."""
    split = settings.split
    assert split is not None
    settings.progress(f"the {split.part} of a split model")
    with training_mode(user.model):
        if split.part == "bottom":
            graph = _graph(partial(trace_activations, step), settings)
            content = _serialised(graph, settings)
            difference = _check(user, step, content, settings, step.activations)
            return CheckedGraphs({ACTIVATIONS: content}, difference)
        arrays = [cut.activations.name for cut in split.cuts]
        graph = _graph(partial(trace_step, step, gradients_of=arrays), settings)
        content = _serialised(put_vectors_together(scatter_into_sums(graph)), settings)
        in_pytorch = partial(_top_step_in_pytorch, user, step, arrays)
        difference = _check(user, step, content, settings, in_pytorch)
        return CheckedGraphs({TOP_STEP: content}, difference)


def _graph(trace: Callable[[Decompositions], Traced], settings: ExportSettings) -> onnx.ModelProto:
    try:
        written = emitted(trace, settings.constants)
    except EmissionError as error:
        raise ExportError(
            f"{error} is not in our table of operators, so this part of a split model cannot be "
            "written. Write that part of the model with other operators"
        ) from error
    return code_weights(
        fold_batch_norms(written.model, settings.constants), settings.frozen, settings.constants
    )


def _serialised(graph: onnx.ModelProto, settings: ExportSettings) -> bytes:
    check_standard(graph)
    return serialised(graph, settings.constants)


def _check(
    user: UserModel,
    step: TrainStep,
    content: bytes,
    settings: ExportSettings,
    in_pytorch: Callable[[Tensors], Tensors],
) -> float:
    """Return the largest difference of the graph's outputs from PyTorch's, for batches of several
    sizes. Raises ExportError."""
    session = open_session(content, constants=settings.constants)
    part = settings.split.part if settings.split is not None else ""
    hyper = {name: 0.1 if value is None else value for name, value in step.hyper.items()}

    def check(seed: int) -> float:
        found = []
        for inputs in _inputs(user, step, hyper, seed):
            expected = call_in_pytorch(partial(in_pytorch, inputs), user_batch(inputs))
            if expected is None:  # PyTorch itself takes no batch of one
                continue
            random = torch.Generator().manual_seed(seed)
            moved = {
                name: nudged(value, random) if name.startswith("param.") else value
                for name, value in inputs.items()
            }
            rounding = difference_of_each(expected, in_pytorch(moved))
            got = session.run({name: value.numpy() for name, value in inputs.items()})
            rows = {name: (got[name], value) for name, value in expected.items()}
            found.append(compare(rows, f"the {part}'s graph", rounding=rounding))
        return max(found)

    return first_passing(check)


def user_batch(inputs: Tensors) -> Tensors:
    """Return the arrays of the batch among a step's inputs."""
    return {name: value for name, value in inputs.items() if name.startswith("batch.")}


def _inputs(
    user: UserModel, step: TrainStep, hyper: dict[str, float], seed: int
) -> Iterator[Tensors]:
    first = first_inputs(step, hyper, seed)
    for batch in batches(user, seed):
        given = {f"batch.{name}": value for name, value in batch.items()}
        yield first | given | ({"seed": torch.tensor(SEED)} if step.random else {})


def _top_step_in_pytorch(
    user: UserModel, step: TrainStep, arrays: list[str], given: Tensors
) -> Tensors:
    """Return the step's outputs, and the gradients as PyTorch's automatic differentiation gives
    them for the user's own module and loss, called here without the objective."""
    outputs = step.run(given)
    batch = {name.partition(".")[2]: value.clone() for name, value in user_batch(given).items()}
    for name in arrays:
        batch[name].requires_grad_()
    own = {
        name: given[f"param.{name}"].clone().requires_grad_(name not in step.buffers)
        for name in step.values
    }
    inputs = [batch[name] for name in user.inputs()]
    targets = [value for name, value in batch.items() if name not in user.inputs()]
    seeded = Seeded(given["seed"]) if "seed" in given else plain_kernels()
    with plain_kernels(), seeded, torch.enable_grad():
        result = torch.func.functional_call(user.model, own, tuple(inputs))
        loss = user.loss(result, *targets)
        gradients = torch.autograd.grad(
            loss, [batch[name] for name in arrays], allow_unused=True, materialize_grads=True
        )
    rows = len(inputs[0])
    pairs = zip(arrays, gradients, strict=True)
    return outputs | {gradient_of(name): gradient * rows for name, gradient in pairs}
