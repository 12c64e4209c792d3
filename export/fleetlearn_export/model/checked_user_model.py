"""Makes the user's model, with its loss, metrics and example, and checks it by running it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from functools import partial
from typing import Any

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
from fleetlearn_export.model.call_misfits import misfits_named
from fleetlearn_export.model.on_disk import on_disk
from fleetlearn_export.model.other_random import without_other_random
from fleetlearn_export.model.random_evaluation import DropoutRefused, drawn_from_fixed_seed
from fleetlearn_export.model.refused_habits import AutocastRefused, refuse_growing_attributes
from fleetlearn_export.model.returned_loss import returned_loss
from fleetlearn_export.model.source_locations import as_export_error
from fleetlearn_export.model.steps import Function
from fleetlearn_export.model.user_model import (
    SMALL_BATCH,
    UserModel,
    evaluation_mode,
    named_outputs,
    training_mode,
)

RUNS = 8
"""A model is run with this many seeds to see whether it depends on chance, as where a layer is
skipped once in ten times."""


def make_user_model(
    model: nn.Module,
    loss: Function | None,
    example: Sequence[Any],
    metrics: Mapping[str, Function],
    names: Sequence[str] | None,
    targets: int,
    features: Function | None = None,
) -> UserModel:
    """Check everything that can be checked before tracing. Raises ExportError.

    loss: None if the model returns it; it is then called with the labels too.
    features: what a contrastive step differentiates besides the loss.
    """
    returns_loss, loss = loss is None, returned_loss if loss is None else loss
    check_kinds(model, loss, metrics)
    batch = named_batch(example, names, targets)
    user = UserModel(model, loss, metrics, batch, targets, returns_loss)
    check_parameters(model, loss)
    user = _checked_by_running(user, features)
    return _checked_in_evaluation(user)


def _checked_by_running(user: UserModel, features: Function | None) -> UserModel:
    """Run the loss and its gradient on the example, and on three of its rows; on one more if it has
    no more.

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
                with misfits_named(user):
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
            _refuse_dependence_on_size(
                user, features, first.sizes.keys(), second.sizes.keys(), rows, other, before
            )
    trained = [name for name, value in user.model.named_parameters() if value.requires_grad]
    without_gradient = tuple(name for name in trained if name not in first.sizes)
    largest = max(first.sizes.values(), default=0.0)
    return user._replace(
        without_gradient=without_gradient, largest_gradient=largest, writes=first.writes
    )


def _refuse_dependence_on_size(
    user: UserModel,
    features: Function | None,
    trained: Set[str],
    others: Set[str],
    rows: int,
    other: int,
    before: Mapping[str, Tensor],
) -> None:
    """Raise ExportError if which parameters get a gradient depends on the number of examples, not
    on PyTorch's random numbers: of the latter tracing says in which line they are read."""
    with_gradient = []
    for seed in (0, *range(RUNS)):  # twice with the first
        with training_mode(user.model):
            torch.manual_seed(seed)
            with_gradient.append(backward_run(user, features, rows, before).sizes.keys())
    if with_gradient[0] != with_gradient[1]:
        raise skipped_by_chance(with_gradient[0] ^ with_gradient[1])
    if all(row == trained for row in with_gradient):
        raise ExportError(
            f"parameter {first_of(trained ^ others)} gets a gradient on {rows} examples or on "
            f"{other}, not on both: a graph computes the same for any number of examples"
        )


def _checked_in_evaluation(user: UserModel) -> UserModel:
    """Run the loss in evaluation mode, on a few rows of the example and with each of them there
    twice.

    Returns ``user`` with ``random_evaluation`` and ``evaluated``. Raises ExportError if dropout is
    on, or if the loss or a metric is a sum over the batch: it doubles with each row twice, and a
    mean stays.
    """
    losses: list[float] = []
    metrics: list[dict[str, Tensor]] = []
    evaluated = {}
    what = "in evaluation mode the model or its loss fails in PyTorch itself"

    def evaluate(times: int) -> tuple[dict[str, Tensor | str], float, dict[str, Tensor], int]:
        arrays = tuple(torch.cat([array[:SMALL_BATCH]] * times) for array in user.batch.values())
        inputs, targets = user.divided(arrays)
        with DropoutRefused(), drawn_from_fixed_seed() as seeded:
            outputs = user.outputs(inputs)
            described: dict[str, Tensor | str] = {
                name: torch.empty_like(value, device="meta")
                if isinstance(value, Tensor)
                else type(value).__name__
                for name, value in named_outputs(outputs).items()
            }
            loss = user.loss(outputs, *targets).item()
            detached = pytree.tree_map_only(Tensor, Tensor.detach, outputs)
            measured = {name: metric(detached, *targets) for name, metric in user.metrics.items()}
        return described, loss, measured, seeded.draws

    # Outputs that remember how they were computed keep all that lies between: 1.2 GiB of ViT-B's,
    # at 224 x 224.
    with evaluation_mode(user.model), torch.no_grad(), as_export_error(what):
        for times in (1, 2):
            who = "in evaluation mode the model, its loss or a metric"
            evaluated[SMALL_BATCH * times], loss, measured, draws = without_other_random(
                partial(evaluate, times), who
            )
            losses.append(loss)
            metrics.append(measured)
    once, twice = losses
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
            f"{what} is {once:.4g} on {SMALL_BATCH} examples, and {twice:.4g} with each of them "
            f"there twice: it is a sum; expected the mean over the batch, {instead}"
        )
