"""Forward and backward passes of the user's own module, which show what a graph must do, and what
none can do."""

from __future__ import annotations

from collections.abc import Mapping, Set
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fleetlearn_export.errors import ExportError
from fleetlearn_export.model.refused_habits import refuse_missing_values, refuse_written_frozen
from fleetlearn_export.model.stateless import holding
from fleetlearn_export.model.steps import Function
from fleetlearn_export.model.user_model import UserModel

REPEATABLE = 1e-3
"""How far two runs on the same inputs may be from each other, relative to the loss and to the
largest gradient: threads may add up in another order, which deep networks enlarge."""


class BackwardRun(NamedTuple):
    """What one forward and backward pass of the model showed."""

    loss: float
    sizes: dict[str, float]
    """The largest element of each parameter's gradient; parameters without a gradient are not
    here."""
    writes: bool
    """Whether the model or its loss writes into its parameters."""


def backward_run(
    user: UserModel, features: Function | None, size: int, before: Mapping[str, Tensor]
) -> BackwardRun:
    """Run the loss and its gradient on the first rows of the example, in the user's own module.

    before: the parameters, which they are again afterwards. Raises ExportError.
    """
    try:
        with holding(
            user.model, {name: value.detach().clone() for name, value in user.model.named_buffers()}
        ):
            loss, sizes = _run_backwards(user, features, size)
    finally:
        changed = [
            name
            for name, value in user.model.named_parameters()
            if not torch.equal(value, before[name])
        ]
        with torch.no_grad():
            for name in changed:
                user.model.get_parameter(name).copy_(before[name])
    refuse_written_frozen(user.model, changed)
    return BackwardRun(loss, sizes, bool(changed))


def _run_backwards(
    user: UserModel, features: Function | None, size: int
) -> tuple[float, dict[str, float]]:
    """Return the loss, and the largest element of each gradient. Raises ExportError.

    Parameters into which the model writes stay changed.
    """
    batch = {name: torch.cat([array, array[:1]])[:size] for name, array in user.batch.items()}
    leaves = {name: value for name, value in user.model.named_parameters() if value.requires_grad}
    arrays = tuple(batch.values())
    inputs, targets = user.divided(arrays)
    outputs = user.model(*inputs)
    loss = user.loss(outputs, *targets)
    if not isinstance(loss, Tensor) or loss.dim() or not loss.is_floating_point():
        raise ExportError(
            f"the loss is {_describe(loss)}; expected a scalar float tensor, the batch's mean"
        )
    refuse_missing_values(batch, loss)
    detached = pytree.tree_map_only(Tensor, Tensor.detach, outputs)
    for name, metric in user.metrics.items():
        value = metric(detached, *targets)
        if not isinstance(value, Tensor) or value.shape not in ((), (size,)):
            raise ExportError(
                f"metric {name} is {_describe(value)}; expected a scalar tensor (the batch's mean) "
                f"or one of shape ({size},), a value for each example"
            )
    if not loss.requires_grad:
        raise ExportError("the loss does not depend on any parameter of the model")
    target = loss if features is None else loss + features(outputs).sum()
    sizes = {}
    hidden: set[str] = set()
    run = []  # the number of this backward pass: a backward pass inside it has another

    def keep_size(name: str, leaf: Tensor) -> None:  # and free the gradient before the next is made
        gradient, leaf.grad = leaf.grad, None
        if torch._C._current_graph_task_id() not in run:
            hidden.add(name)
        elif gradient is not None:
            sizes[name] = float(torch.linalg.vector_norm(gradient.to_dense(), torch.inf))

    _refuse_other_parameters(target, user.model)
    target.register_hook(lambda _: run.append(torch._C._current_graph_task_id()))
    handles = [
        leaf.register_post_accumulate_grad_hook(partial(keep_size, name))  # type: ignore[no-untyped-call]
        for name, leaf in leaves.items()
    ]
    try:
        target.backward(inputs=list(leaves.values()))
    finally:
        for handle in handles:
            handle.remove()
    hidden |= {name for name, value in user.model.named_parameters() if value.grad is not None}
    if hidden:
        raise ExportError(
            "a torch.autograd.Function calls backward() in its own backward; what parameters get "
            "there is in no graph, which has only the gradients that the Function returns. Give "
            "these parameters to the Function's apply() and return their gradients, call their "
            "layers without the Function, or freeze them with requires_grad_(False): "
            f"{', '.join(sorted(hidden))}"
        )
    return loss.item(), sizes


def _refuse_other_parameters(target: Tensor, model: nn.Module) -> None:
    """Raise ExportError if the loss depends on a parameter that takes a gradient and is not the
    model's."""
    own = {id(value) for value in model.parameters()}
    nodes, seen = [target.grad_fn], set[Any]()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [row for row, _ in node.next_functions]
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, nn.Parameter) and id(leaf) not in own:
            raise ExportError(
                f"the loss depends on a parameter of shape {tuple(leaf.shape)} with requires_grad "
                "that is not one of the model's, so no step would train it. To train it, make it a "
                "part of the model (model.NAME = ...). If it is fixed, as another model's that "
                "teaches this one, freeze it with requires_grad_(False)"
            )


def plain_attributes(model: nn.Module) -> dict[str, Any]:
    """Return by name the modules' attributes that are numbers, texts, None or tensors."""
    return {
        f"{path}.{name}" if path else name: value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if value is None or isinstance(value, bool | int | float | str | Tensor)
    }


def refuse_other_run(
    one: BackwardRun, other: BackwardRun, model: nn.Module, attributes: Mapping[str, Any]
) -> None:
    """Raise ExportError if a second run gave another loss, or other gradients, than the first.

    attributes: those of the model before the first run.
    """
    if one.sizes.keys() != other.sizes.keys():
        raise skipped_by_chance(one.sizes.keys() ^ other.sizes.keys())
    largest = max(one.sizes.values(), default=0.0)
    pairs = [(one.loss, other.loss, abs(one.loss))]
    pairs += [(size, other.sizes[name], largest) for name, size in one.sizes.items()]
    # NaN is the same as NaN here: what is not a number is refused later, with its name.
    if all(
        first == second or not abs(first - second) > REPEATABLE * size
        for first, second, size in pairs
    ):
        return
    after = plain_attributes(model)
    changed = [name for name, value in attributes.items() if after.get(name) is not value]
    changed = [
        name
        for name in changed
        if isinstance(after.get(name), Tensor) or after.get(name) != attributes[name]
    ]
    buffers = f" {', '.join(changed)} changed in the first run." if changed else ""
    raise ExportError(
        "the model or its loss gives another result when it runs again, on the same examples, with "
        f"the same parameters, buffers and random seed of PyTorch: a loss of {one.loss:.6g}, then "
        f"{other.loss:.6g}, and largest gradients of {largest:.3g} and "
        f"{max(other.sizes.values(), default=0.0):.3g}.{buffers} A graph computes the same in each "
        "step. What the first batch initialises: run the model on a batch in training mode before "
        "the export. What changes from step to step: keep it in a float32 buffer "
        "(register_buffer). Random numbers: draw them with PyTorch's functions, not from a "
        "generator of your own"
    )


def skipped_by_chance(different: Set[str]) -> ExportError:
    return ExportError(
        f"parameter {first_of(different)} gets a gradient in one run and none in another, though "
        "PyTorch draws the same random numbers: a graph computes the same in each step. Where the "
        "model chooses with its own random numbers, such as layers to skip, switch that off "
        "(layerdrop=0)"
    )


def first_of(names: Set[str]) -> str:
    return min(names) + (f" (and {len(names) - 1} more)" if len(names) > 1 else "")


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"
