"""The user's model, loss, metrics and example, checked by running them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fleetlearn_export.errors import ExportError
from fleetlearn_export.model.arguments import check_kinds, check_parameters, named_batch
from fleetlearn_export.model.backward_runs import (
    BackwardRun,
    backward_run,
    first_of,
    plain_attributes,
    refuse_other_run,
    skipped_by_chance,
)
from fleetlearn_export.model.on_disk import on_disk
from fleetlearn_export.model.other_random import without_other_random
from fleetlearn_export.model.random_evaluation import DropoutRefused, drawn_from_fixed_seed
from fleetlearn_export.model.refused_habits import (
    AutocastRefused,
    refuse_growing_attributes,
)
from fleetlearn_export.model.source_locations import as_export_error
from fleetlearn_export.model.stateless import attributes_restored, functional_call
from fleetlearn_export.model.steps import Function

FEW = 2
"""Examples on which a model is run to see what any batch shows. Each takes time; PyTorch treats a size of 1 as a
constant, and BatchNorm may not train on one."""
RUNS = 8
"""With how many seeds a model is run to see whether it depends on chance; layers are skipped once in ten times."""


class UserModel(NamedTuple):
    """The user's model with its loss, its metrics and an example of its data."""

    model: nn.Module
    loss: Function
    metrics: Mapping[str, Function]
    batch: dict[str, Tensor]
    """Rows of the example by name: from two to MOST. Each array is a copy of the user's."""
    targets: int
    """How many of the batch's last arrays go to the loss, not to the model."""
    without_gradient: tuple[str, ...] = ()
    """Names of parameters with ``requires_grad`` on which the loss does not depend, as torch.optim skips them."""
    largest_gradient: float = 1.0
    """The largest element of any parameter's gradient on the example."""
    writes: bool = False
    """Whether the model or its loss writes into a parameter, as ``nn.Embedding(max_norm=...)`` does."""
    random_evaluation: bool = False
    """Whether the model, the loss or a metric draws random numbers in evaluation mode."""
    trains_on_one: bool = False
    """Whether the traced step was compared with PyTorch on a single example."""
    evaluated: Mapping[int, Mapping[str, Tensor | str]] = {}
    """What the model returns in evaluation mode for two numbers of examples: name -> a tensor without memory, or the
    name of another type."""
    outputs_left_out: Mapping[str, str] = {}
    """Name of an output that is in no graph -> what it is: not a tensor with a row for each example."""

    def inputs(self) -> dict[str, Tensor]:
        return dict(list(self.batch.items())[: len(self.batch) - self.targets])

    def few(self) -> dict[str, Tensor]:
        """Return the first FEW rows of the example."""
        return {name: value[:FEW].clone() for name, value in self.batch.items()}

    def evaluation_draws(self) -> AbstractContextManager[object]:
        """Return a context for one evaluation, in which the random numbers are those of eval.onnx and infer.onnx."""
        return drawn_from_fixed_seed() if self.random_evaluation else nullcontext()

    def outputs(self, inputs: tuple[Tensor, ...]) -> Any:
        """Call the model, without a change of its parameters."""
        return functional_call(self.model, self.written(), inputs)

    def kept_outputs(self, result: Any) -> dict[str, Tensor]:
        """Return by name what the model returned, without what is left out."""
        return {name: value for name, value in named_outputs(result).items() if name not in self.outputs_left_out}

    def written(self) -> dict[str, Tensor]:
        """Return copies of the parameters for one call, into which the model may write; none if it does not write."""
        return {name: value.detach().clone() for name, value in self.model.named_parameters() if self.writes}

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
        self.inputs = len(user.batch) - user.targets

    def forward(self, *batch: Tensor) -> tuple[Tensor, ...]:
        return self.means(self.model(*batch[: self.inputs]), batch[self.inputs :])

    def means(self, outputs: Any, targets: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        loss = self.loss(outputs, *targets)
        outputs = pytree.tree_map_only(Tensor, Tensor.detach, outputs)
        return (loss, *(metric(outputs, *targets).float().mean() for metric in self.metrics))


class EvalModule(LossModule):
    """Maps a batch to the sum of the loss, the sum of each metric, and the number of examples (int64)."""

    def forward(self, *batch: Tensor) -> tuple[Tensor, ...]:
        return self.sums(self.model(*batch[: self.inputs]), batch)

    def sums(self, outputs: Any, batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        means = self.means(outputs, batch[self.inputs :])
        examples = batch[0].new_ones(batch[0].shape[:1], dtype=torch.int64).sum()
        return (*(mean * examples for mean in means), examples)


class EvalInferModule(EvalModule):
    """Maps a batch to what EvalModule gives and, behind that, to what InferModule gives."""

    def forward(self, *batch: Tensor) -> tuple[Tensor, ...]:
        outputs = self.model(*batch[: self.inputs])
        named = [value.clone() for value in self.user.kept_outputs(outputs).values()]  # before the loss may change them
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
    """Name the model's outputs: ``output``; ``output_0``, ``output_1``, ... for a tuple; ``output_KEY`` for a dict; and
    ``output_KEY_0`` for a tuple in a dict. None has no name."""
    if isinstance(result, Mapping):
        rows = list(result.items())
    elif isinstance(result, list | tuple):
        rows = list(enumerate(result))
    else:
        return {} if result is None else {name: result}
    return {row: leaf for key, value in rows for row, leaf in named_outputs(value, f"{name}_{key}").items()}


def make_user_model(
    model: nn.Module,
    loss: Function,
    example: Sequence[Any],
    metrics: Mapping[str, Function],
    names: Sequence[str] | None,
    targets: int,
    features: Function | None = None,
) -> UserModel:
    """Check everything that can be checked before tracing. Raises ExportError.

    features: what a contrastive step differentiates besides the loss.
    """
    check_kinds(model, loss, metrics)
    user = UserModel(model, loss, metrics, named_batch(example, names, targets), targets)
    check_parameters(model, loss)
    user = _checked_by_running(user, features)
    return _checked_in_evaluation(user)


def _checked_by_running(user: UserModel, features: Function | None) -> UserModel:
    """Run the loss and its gradient on the example, and on three of its rows; on one more if it has no more.

    Returns the same with the fields that this shows. Raises ExportError.
    """
    rows = len(next(iter(user.batch.values())))
    other = 3 if rows > 3 else rows + 1
    what = "the model or its loss fails in PyTorch itself"
    with on_disk() as before:
        for name, value in user.model.named_parameters():
            before.keep(name, value)
        with training_mode(user.model), as_export_error(f"on {rows} examples {what}"):
            attributes, runs = plain_attributes(user.model), list[BackwardRun]()

            def run() -> None:
                torch.manual_seed(0)
                runs.append(backward_run(user, features, rows, before))

            with AutocastRefused():
                who = "the model, its loss or a metric"
                refuse_growing_attributes(user.model, lambda: without_other_random(run, who))
            if len(runs) == 1:
                run()
            first = runs[0]
            refuse_other_run(first, runs[1], user.model, attributes)
        with (
            training_mode(user.model),
            as_export_error(f"the example's {rows} examples work, but on {other} examples {what}"),
        ):
            second = backward_run(user, features, other, before)
        if first.sizes.keys() != second.sizes.keys():
            _refuse_dependence_on_size(user, features, first.sizes.keys(), second.sizes.keys(), rows, other, before)
    trained = [name for name, value in user.model.named_parameters() if value.requires_grad]
    without_gradient = tuple(name for name in trained if name not in first.sizes)
    largest = max(first.sizes.values(), default=0.0)
    return user._replace(without_gradient=without_gradient, largest_gradient=largest, writes=first.writes)


def _refuse_dependence_on_size(
    user: UserModel,
    features: Function | None,
    trained: Set[str],
    others: Set[str],
    rows: int,
    other: int,
    before: Mapping[str, Tensor],
) -> None:
    """Raise ExportError if which parameters get a gradient depends on the number of examples, not on PyTorch's random
    numbers: of the latter tracing says in which line they are read."""
    found = []
    for seed in (0, *range(RUNS)):  # twice with the first
        with training_mode(user.model):
            torch.manual_seed(seed)
            found.append(backward_run(user, features, rows, before).sizes.keys())
    if found[0] != found[1]:
        raise skipped_by_chance(found[0] ^ found[1])
    if all(row == trained for row in found):
        raise ExportError(
            f"parameter {first_of(trained ^ others)} gets a gradient on {rows} examples or on {other}, not on both: a "
            "graph computes the same for any number of examples"
        )


def _checked_in_evaluation(user: UserModel) -> UserModel:
    """Run the loss in evaluation mode, on a few rows of the example and with each of them there twice.

    Returns ``user`` with ``random_evaluation`` and ``evaluated``. Raises ExportError if dropout is on, or if the loss
    or a metric is a sum over the batch: it doubles with each row twice, and a mean stays.
    """
    found: list[float] = []
    metrics: list[dict[str, Tensor]] = []
    evaluated = {}
    what = "in evaluation mode the model or its loss fails in PyTorch itself"

    def evaluate(times: int) -> tuple[dict[str, Tensor | str], float, dict[str, Tensor], int]:
        arrays = tuple(torch.cat([array[:FEW]] * times) for array in user.batch.values())
        inputs, targets = arrays[: len(user.inputs())], arrays[len(user.inputs()) :]
        with DropoutRefused(), drawn_from_fixed_seed() as seeded:
            outputs = user.outputs(inputs)
            described: dict[str, Tensor | str] = {
                name: torch.empty_like(value, device="meta") if isinstance(value, Tensor) else type(value).__name__
                for name, value in named_outputs(outputs).items()
            }
            loss = user.loss(outputs, *targets).item()
            detached = pytree.tree_map_only(Tensor, Tensor.detach, outputs)
            measured = {name: metric(detached, *targets) for name, metric in user.metrics.items()}
        return described, loss, measured, seeded.draws

    # Outputs that remember how they were computed keep all that lies between: 1.2 GiB of ViT-B's, at 224 x 224.
    with evaluation_mode(user.model), torch.no_grad(), as_export_error(what):
        for times in (1, 2):
            who = "in evaluation mode the model, its loss or a metric"
            evaluated[FEW * times], loss, measured, draws = without_other_random(partial(evaluate, times), who)
            found.append(loss)
            metrics.append(measured)
    once, twice = found
    _refuse_sum("the loss", once, twice, 'as reduction="mean" gives it')
    for name, value in metrics[0].items():
        if value.dim() == 0:
            instead = "or a value for each example, such as outputs.argmax(1) == y"
            _refuse_sum(f"metric {name}", value.item(), metrics[1][name].item(), instead)
    return user._replace(random_evaluation=draws > 0, evaluated=evaluated)


def _refuse_sum(what: str, once: float, twice: float, instead: str) -> None:
    """Raise ExportError if a value doubles with the number of examples."""
    if once and abs(twice - 2 * once) <= 1e-4 * abs(once):
        raise ExportError(
            f"{what} is {once:.4g} on {FEW} examples, and {twice:.4g} with each of them there twice: it is a sum; "
            f"expected the mean over the batch, {instead}"
        )


def training_mode(model: nn.Module) -> AbstractContextManager[None]:
    """Put the model in training mode. Restores its modes, its buffers and PyTorch's random state afterwards."""
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
            for buffer, kept in buffers:
                if not torch.equal(buffer, kept):
                    buffer.copy_(kept)
