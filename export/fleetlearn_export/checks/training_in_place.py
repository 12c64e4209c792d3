"""The user's own module, trained in place for some steps: where graphs are compared with
PyTorch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from fleetlearn_export.checks.comparison import SEEDS, batches, largest
from fleetlearn_export.checks.memory import give_back_freed_memory
from fleetlearn_export.model.on_disk import OnDisk, on_disk
from fleetlearn_export.model.stateless import holding
from fleetlearn_export.model.steps import Function, Tensors
from fleetlearn_export.model.train_step import TrainStep, plain_kernels
from fleetlearn_export.model.user_model import UserModel

SHARES = 0.02, 0.002
"""How far a step moves the element of a parameter that moves farthest, relative to the parameter's
elements; the second where the first leads to numbers that are not finite."""
SMALLEST = 0.05
"""A parameter whose elements are smaller on average, such as a bias of zeros, counts as that
large."""


@contextmanager
def trained_in_place(
    user: UserModel, step: TrainStep, features: Function | None
) -> Iterator[TrainStep]:
    """Train the user's own module by torch.optim, as a person would, with its hooks. Gives back the
    step with the module's new values; when the block ends, the module has its own again.

    A graph that holds a copy of what training changes is right at the initial values, and at no
    others. So no graph is compared with PyTorch there. Each parameter has another rate, so
    that all of them move by percents. If no rate leads to finite numbers, the module stays as it
    is. The model is in training mode.
    """
    trained: Tensors = {
        name: value
        for name, value in user.model.named_parameters()
        if value.requires_grad or user.writes
    }
    buffers = {name: value.detach().clone() for name, value in user.model.named_buffers()}
    with (
        on_disk() as before,
        holding(user.model, {name: value.clone() for name, value in buffers.items()}),
    ):
        for name, value in trained.items():
            before.keep(name, value)
        try:
            for share in SHARES:
                if _train(user, features, share):
                    break
                _restore(trained, before)
                for name, buffer in user.model.named_buffers():
                    buffer.data = buffers[name].clone()
            give_back_freed_memory()
            now = {**dict(user.model.named_parameters()), **dict(user.model.named_buffers())}
            values = {name: now[name].detach().contiguous() for name in step.values}
            yield step._replace(values=values)
        finally:
            _restore(trained, before)


def _restore(tensors: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(values[name])


def _train(user: UserModel, features: Function | None, share: float) -> bool:
    """Do three steps. Returns whether all losses and gradients, and the loss afterwards, are
    finite.

    Until a backward pass has ended, its gradients wait on disk: together they would be as large as
    the model.
    """
    rows = {name: value for name, value in user.model.named_parameters() if value.requires_grad}
    optimizers = {name: torch.optim.SGD([row], lr=0.0) for name, row in rows.items()}
    example, other, _ = batches(user, SEEDS[0])
    for batch in (other, example, other):
        with on_disk() as gradients:
            target = _loss(user, features, batch)
            _backward(target, rows, gradients)
            if not target.isfinite():
                return False
            for name, gradient in gradients.items():
                row, size = rows[name], largest(gradient)
                if not size < float("inf"):
                    return False
                scale = max(
                    SMALLEST, float(torch.linalg.vector_norm(row.detach())) / row.numel() ** 0.5
                )
                optimizers[name].param_groups[0]["lr"] = share * scale / size if size else 0.0
                row.grad = gradient
                optimizers[name].step()
                row.grad = None
    with torch.no_grad():
        return bool(_loss(user, features, example).isfinite())


def _backward(target: Tensor, rows: Mapping[str, Tensor], gradients: OnDisk) -> None:
    """Call ``backward()``, and keep each gradient on disk once it is complete."""

    def keep(name: str, row: Tensor) -> None:
        assert row.grad is not None
        gradients.keep(name, row.grad.to_dense())
        row.grad = None

    handles = [
        row.register_post_accumulate_grad_hook(partial(keep, name))  # type: ignore[no-untyped-call]
        for name, row in rows.items()
    ]
    try:
        target.backward()  # type: ignore[no-untyped-call]
    finally:
        for handle in handles:
            handle.remove()


def _loss(user: UserModel, features: Function | None, batch: Tensors) -> Tensor:
    """Return the loss on a batch, with what a contrastive step differentiates besides it."""
    arrays = [value.clone() for value in batch.values()]
    inputs, targets = user.divided(arrays)
    with plain_kernels():
        outputs = user.model(*inputs)
        loss: Tensor = user.loss(outputs, *targets)
        return loss if features is None else loss + features(outputs).sum()
