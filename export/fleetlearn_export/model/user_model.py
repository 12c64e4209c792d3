"""The user's model with its loss, metrics and example, and the modules that are traced."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fleetlearn_export.model.random_evaluation import drawn_from_fixed_seed
from fleetlearn_export.model.returned_loss import fields
from fleetlearn_export.model.stateless import attributes_restored, functional_call
from fleetlearn_export.model.steps import Function

SMALL_BATCH = 2
"""Examples on which a model is run to see what any batch shows. Each takes time; PyTorch treats a
size of 1 as a constant, and BatchNorm may not train on one."""


class UserModel(NamedTuple):
    """The user's model with its loss, its metrics and an example of its data."""

    model: nn.Module
    loss: Function
    metrics: Mapping[str, Function]
    batch: dict[str, Tensor]
    """Rows of the example by name: from two to MOST. Each array is a copy of the user's."""
    targets: int
    """How many of the batch's last arrays are labels: they go to the loss and the metrics."""
    returns_loss: bool = False
    """Whether the model computes the loss itself: it is called with the labels too."""
    without_gradient: tuple[str, ...] = ()
    """Names of parameters with ``requires_grad`` on which the loss does not depend, as torch.optim
    skips them."""
    largest_gradient: float = 1.0
    """The largest element of any parameter's gradient on the example."""
    writes: bool = False
    """Whether the model or its loss writes into a parameter, as ``nn.Embedding(max_norm=...)``
    does."""
    random_evaluation: bool = False
    """Whether the model, the loss or a metric draws random numbers in evaluation mode."""
    trains_on_one: bool = False
    """Whether the traced step was compared with PyTorch on a single example."""
    evaluated: Mapping[int, Mapping[str, Tensor | str]] = {}
    """What the model returns in evaluation mode for two numbers of examples: name -> a tensor
    without memory, or the name of another type."""
    outputs_left_out: Mapping[str, str] = {}
    """Name of an output that is in no graph -> what it is: not a tensor with a row for each
    example."""

    def inputs(self) -> dict[str, Tensor]:
        """Return the arrays that the model is called with."""
        return self.batch if self.returns_loss else self.without_labels()

    def without_labels(self) -> dict[str, Tensor]:
        return dict(list(self.batch.items())[: len(self.batch) - self.targets])

    def labels(self) -> list[str]:
        return list(self.batch)[len(self.batch) - self.targets :]

    def divided(self, arrays: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return what the model is called with, and the labels, of a batch's arrays in order."""
        return tuple(arrays[: len(self.inputs())]), tuple(arrays[len(arrays) - self.targets :])

    def small_batch(self) -> dict[str, Tensor]:
        """Return the first SMALL_BATCH rows of the example."""
        return {name: value[:SMALL_BATCH].clone() for name, value in self.batch.items()}

    def evaluation_draws(self) -> AbstractContextManager[object]:
        """Return a context for one evaluation, in which the random numbers are eval.onnx's
        and infer.onnx."""
        return drawn_from_fixed_seed() if self.random_evaluation else nullcontext()

    def outputs(self, inputs: tuple[Tensor, ...]) -> Any:
        """Call the model, without a change of its parameters."""
        return functional_call(self.model, self.written(), inputs)

    def kept_outputs(self, result: Any) -> dict[str, Tensor]:
        """Return by name what the model returned, without what is left out."""
        return {
            name: value
            for name, value in named_outputs(result).items()
            if name not in self.outputs_left_out
        }

    def written(self) -> dict[str, Tensor]:
        """Return copies of the parameters for one call, into which the model may write; none if it
        does not write."""
        return {
            name: value.detach().clone()
            for name, value in self.model.named_parameters()
            if self.writes
        }

    def sum_names(self) -> list[str]:
        """Return the names of EvalModule's results, in eval.onnx's order."""
        return ["loss_sum", *(f"metric_sum.{name}" for name in self.metrics), "examples"]


class LossModule(nn.Module):
    """Maps a batch to its mean loss and the mean of each metric, with the user's functions."""

    def __init__(self, user: UserModel) -> None:
        super().__init__()
        self.user = user
        self.model = user.model
        self.loss = user.loss
        self.metrics = list(user.metrics.values())

    def forward(self, *batch: Tensor) -> tuple[Tensor, ...]:
        inputs, targets = self.user.divided(batch)
        return self.means(self.model(*inputs), targets)

    def means(self, outputs: Any, targets: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        loss = self.loss(outputs, *targets)
        outputs = pytree.tree_map_only(Tensor, Tensor.detach, outputs)
        return (loss, *(metric(outputs, *targets).float().mean() for metric in self.metrics))


class EvalModule(LossModule):
    """Maps a batch to the sum of the loss, the sum of each metric, and the number of examples
    (int64)."""

    def forward(self, *batch: Tensor) -> tuple[Tensor, ...]:
        return self.sums(self.model(*self.user.divided(batch)[0]), batch)

    def sums(self, outputs: Any, batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        means = self.means(outputs, self.user.divided(batch)[1])
        examples = batch[0].new_ones(batch[0].shape[:1], dtype=torch.int64).sum()
        return (*(mean * examples for mean in means), examples)


class EvalInferModule(EvalModule):
    """Maps a batch to what EvalModule gives and, behind that, to what InferModule gives."""

    def forward(self, *batch: Tensor) -> tuple[Tensor, ...]:
        outputs = self.model(*self.user.divided(batch)[0])
        # before the loss may change them
        named = [value.clone() for value in self.user.kept_outputs(outputs).values()]
        return (*self.sums(outputs, batch), *named)


class InferModule(nn.Module):
    """Maps the model's inputs to its outputs, as a flat tuple."""

    def __init__(self, user: UserModel) -> None:
        super().__init__()
        self.user = user
        self.model = user.model

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.user.kept_outputs(self.model(*inputs)).values())


def named_outputs(result: Any, name: str = "output") -> dict[str, Any]:
    """Name the model's outputs: ``output``; ``output_0``, ``output_1``, ... for a tuple;
    ``output_KEY`` for a dict or a dataclass; and ``output_KEY_0`` for a tuple in a dict. None has
    no name."""
    if isinstance(result, list | tuple):
        rows = list(enumerate(result))
    elif (named := fields(result)) is not None:
        rows = list(named.items())
    else:
        return {} if result is None else {name: result}
    return {
        row: leaf
        for key, value in rows
        for row, leaf in named_outputs(value, f"{name}_{key}").items()
    }


def training_mode(model: nn.Module) -> AbstractContextManager[None]:
    """Put the model in training mode. Restores its modes, its buffers and PyTorch's random state
    afterwards."""
    return _mode(model, training=True)


def evaluation_mode(model: nn.Module) -> AbstractContextManager[None]:
    """Put the model in evaluation mode. Restores the same as ``training_mode``."""
    return _mode(model, training=False)


@contextmanager
def _mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), attributes_restored(model):
        torch.manual_seed(0)
        model.train()  # models forget here what they keep between calls in evaluation mode
        model.train(training)
        try:
            yield
        finally:
            for module, was in modes.items():
                module.training = was
            for buffer, copy in buffers:
                if not torch.equal(buffer, copy):
                    buffer.copy_(copy)
