"""Divides a model at one of its layers: the part that ends with the layer's output, and the part
that goes on from there."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from difflib import get_close_matches
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fleetlearn_export.errors import ExportError
from fleetlearn_export.model.fine_tuning import stay_in_evaluation_mode
from fleetlearn_export.model.source_locations import as_export_error
from fleetlearn_export.model.user_model import evaluation_mode


class CutModel(NamedTuple):
    """A model in two parts. Each has its parameters under the names of the whole model."""

    bottom: nn.Module
    """Maps the model's inputs to the layer's output."""
    top: nn.Module
    """Maps the layer's output to the model's outputs."""
    activations: Tensor
    """The layer's output on the inputs that were given, in evaluation mode."""


class _CutReachedError(Exception):
    """The bottom has computed the layer's output."""

    def __init__(self, output: Any) -> None:
        self.output = output


def cut_model(model: nn.Module, layer: str, inputs: Sequence[Tensor]) -> CutModel:
    """Divide the model behind ``layer``, the name of one of its modules. The model stays as it is.

    inputs: a few examples, float tensors or integers, the examples on the first axis.

    Raises ExportError: there is no such layer, it is not called once, its output is not one float32
    tensor with a row for each example, or what lies above it reads something from below beside its
    output, such as a skip connection.
    """
    named = dict(model.named_modules())
    if not layer or layer not in named:
        near = get_close_matches(layer, [name for name in named if name], 12, cutoff=0.0)
        raise ExportError(
            f"split={layer!r} is the name of no layer; of {len(named) - 1} the nearest are "
            f"{', '.join(near)}"
        )
    with evaluation_mode(model), torch.no_grad(), as_export_error("the model cannot be divided"):
        outputs, whole = _outputs_of(named[layer], model, inputs)
    if len(outputs) != 1:
        raise ExportError(
            f"split={layer!r}: the model calls that layer {len(outputs)} times; expected once"
        )
    (activations,) = outputs
    rows = len(inputs[0])
    described = (
        f"{activations.dtype} {tuple(activations.shape)}"
        if isinstance(activations, Tensor)
        else f"a {type(activations).__name__}"
    )
    if (
        not isinstance(activations, Tensor)
        or activations.dtype != torch.float32
        or activations.dim() < 2
        or len(activations) != rows
    ):
        raise ExportError(
            f"split={layer!r}: that layer gives {described} for {rows} examples; expected one "
            "float32 tensor (n, ...)"
        )
    below, above = _parameters_of_parts(model, layer, inputs)
    both = sorted(below & above)
    if both:
        raise ExportError(
            f"split={layer!r}: parameter {both[0]} is read below and above the cut; each part has "
            "its own parameters, so such a model cannot be divided there"
        )
    calls = _calls(model, layer, inputs)
    bottom = _bottom(model, layer, below, calls)
    top = _top(model, layer, above, calls, inputs)
    with evaluation_mode(top), torch.no_grad(), as_export_error("the model cannot be divided"):
        again = top(activations)
    if not _equal(again, whole):
        raise ExportError(
            f"split={layer!r}: what lies above that layer reads more from below than its output, "
            "as a skip connection does: cut where all that follows comes of one tensor"
        )
    return CutModel(bottom, top, activations)


def _outputs_of(
    layer: nn.Module, model: nn.Module, inputs: Sequence[Tensor]
) -> tuple[list[Any], Any]:
    """Return what the layer gave in each of its calls, and what the model returned."""
    outputs: list[Any] = []
    handle = layer.register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
    try:
        whole = model(*(value.clone() for value in inputs))
    finally:
        handle.remove()
    return outputs, whole


def _parameters_of_parts(
    model: nn.Module, layer: str, inputs: Sequence[Tensor]
) -> tuple[set[str], set[str]]:
    """Return the names of the trained parameters on which the layer's output depends, and of those
    on which the model's outputs depend beside it."""
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    kept: list[Tensor] = []

    def cut(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        kept.append(output)
        return output.detach().requires_grad_()

    def read_by(values: Sequence[Tensor]) -> set[str]:
        sums = [value.sum() for value in values if value.requires_grad]
        if not sums:
            return set()
        gradients = torch.autograd.grad(
            torch.stack(sums).sum(), list(trained.values()), allow_unused=True, retain_graph=True
        )
        pairs = zip(trained, gradients, strict=True)
        return {name for name, gradient in pairs if gradient is not None}

    handle = model.get_submodule(layer).register_forward_hook(cut)
    try:
        with (
            evaluation_mode(model),
            torch.enable_grad(),
            as_export_error("the model cannot be divided"),
        ):
            outputs = model(*(value.clone() for value in inputs))
            leaves = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]
            return read_by(kept), read_by(leaves)
    finally:
        handle.remove()


class _Calls(NamedTuple):
    """Which modules a model calls, by name."""

    finished: set[str]
    """Those that have returned when the cut layer returns, that layer included."""
    begun: set[str]
    """Those that were called before the cut layer returned."""
    after: set[str]
    """Those that are called after it."""


def _calls(model: nn.Module, layer: str, inputs: Sequence[Tensor]) -> _Calls:
    calls = _Calls(set(), set(), set())
    handles = []
    reached: list[bool] = []

    def begin(name: str) -> None:
        (calls.after if reached else calls.begun).add(name)

    def finish(name: str) -> None:
        if not reached:
            calls.finished.add(name)
        if name == layer:
            reached.append(True)

    for name, module in model.named_modules():
        handles += [
            module.register_forward_pre_hook(lambda *_, name=name: begin(name)),
            module.register_forward_hook(lambda *_, name=name: finish(name)),
        ]
    try:
        with evaluation_mode(model), torch.no_grad():
            model(*(value.clone() for value in inputs))
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _bottom(model: nn.Module, layer: str, trained: set[str], calls: _Calls) -> nn.Module:
    """Return a copy of the model that ends with the layer's output."""
    part = _copied(model, trained)
    for name, module in part.named_modules():
        kept = {own for own in module._parameters if f"{name}.{own}".lstrip(".") in trained}
        if name not in calls.begun and not kept:
            module._parameters.clear()
            module._buffers.clear()
    forward = part.forward

    def stop(_module: nn.Module, _inputs: Any, output: Any) -> None:
        raise _CutReachedError(output)

    def until_cut(*arrays: Any) -> Any:
        try:
            forward(*arrays)
        except _CutReachedError as reached:
            return reached.output
        raise ExportError(f"the model does not call {layer}, where it is divided")

    part.get_submodule(layer).register_forward_hook(stop)
    vars(part)["forward"] = until_cut
    return part


def _top(
    model: nn.Module, layer: str, trained: set[str], calls: _Calls, inputs: Sequence[Tensor]
) -> nn.Module:
    """Return a copy of the model that begins with the layer's output.

    What lies below runs on zeros, and nobody reads what it computes: the graphs do not have it.
    """
    part = _copied(model, trained)
    for name, module in part.named_modules():
        if name in calls.finished - calls.after:
            # Else its dropout would draw, and its statistics change, in this part too.
            vars(module)["train"] = MethodType(stay_in_evaluation_mode, module)
            module.train()
    forward = part.forward
    given: list[Tensor] = []
    like = [(value.dtype, tuple(value.shape[1:])) for value in inputs]

    def from_cut(activations: Tensor) -> Any:
        rows = activations.shape[0]
        zeros = [activations.new_zeros((rows, *shape), dtype=dtype) for dtype, shape in like]
        given[:] = [activations]
        try:
            return forward(*zeros)
        finally:
            given.clear()

    part.get_submodule(layer).register_forward_hook(lambda *_: given[0])
    vars(part)["forward"] = from_cut
    return part


def _copied(model: nn.Module, trained: set[str]) -> nn.Module:
    """Return a copy of the model that trains these parameters."""
    part = copy.deepcopy(model)
    for name, value in part.named_parameters():
        value.grad = None
        value.requires_grad_(name in trained)
    return part


def _equal(one: Any, other: Any) -> bool:
    pairs = zip(pytree.tree_leaves(one), pytree.tree_leaves(other), strict=True)
    return all(not isinstance(a, Tensor) or torch.equal(a, b) for a, b in pairs)
