"""Which integers a batch's arrays may hold, as the model and its loss tell: classes of a loss, rows of an embedding.

PyTorch refuses others when it is run. ONNX's operators may not: GatherElements takes -1 for the last class.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from fleetlearn_protocol.messages import MAX_EXACT

aten = torch.ops.aten
INTEGERS = (torch.int64, torch.int32, torch.uint8)
IGNORED = -100
"""What a loss leaves out unless it is told otherwise."""
LOSSES = {
    aten.cross_entropy_loss.default,
    aten.nll_loss.default,
    aten.nll_loss2d.default,
    aten.nll_loss_nd.default,
}
"""Called with (outputs, target, weight, reduction, ignore_index)."""
SAME_VALUES = {
    aten._to_copy.default,
    aten.alias.default,
    aten.clone.default,
    aten.contiguous.default,
    aten.detach.default,
    aten.expand.default,
    aten.flatten.using_ints,
    aten.permute.default,
    aten.reshape.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.t.default,
    aten.to.dtype,
    aten.to.dtype_layout,
    aten.transpose.int,
    aten.unsqueeze.default,
    aten.view.default,
}
"""What hands on all values of its first argument, and no others."""


class Range(NamedTuple):
    below: int
    ignored: int | None


def ranges(graph: torch.fx.Graph, count: int) -> list[Range | None]:
    """The range of each array of the batch, the graph's last ``count`` inputs; None where the graph tells none."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"][-count:]
    return [_range(node) if node.meta["val"].dtype in INTEGERS else None for node in inputs]


def _range(array: torch.fx.Node) -> Range | None:
    found = [use for use in _uses(array) if 1 <= use.below <= MAX_EXACT]
    if not found:
        return None
    below = min(use.below for use in found)
    # What one use leaves out is an error to another that does not.
    ignored = {use.ignored for use in found}
    value = ignored.pop() if len(ignored) == 1 else None
    return Range(below, None if value is None or 0 <= value < below else value)


def _uses(node: torch.fx.Node) -> Iterator[Range]:
    """The ranges that the operators which read these values, all of them, demand."""
    for user in node.users:
        arguments: Sequence[Any] = user.args
        if user.target in SAME_VALUES or _is_whole(user):
            yield from _uses(user)
        elif user.target in LOSSES and arguments[1] is node:
            outputs = arguments[0].meta["val"]
            ignored: Any = arguments[4] if len(arguments) > 4 else user.kwargs.get("ignore_index", IGNORED)
            yield from _demand(outputs.shape[min(outputs.dim() - 1, 1)], ignored)
        elif user.target is aten.embedding.default and arguments[1] is node:
            yield from _demand(arguments[0].meta["val"].shape[0])
        elif user.target is aten.gather.default and arguments[2] is node:
            yield from _demand(arguments[0].meta["val"].shape[arguments[1]])
        elif user.target is aten.one_hot.default and len(arguments) > 1:
            yield from _demand(arguments[1])


def _is_whole(node: torch.fx.Node) -> bool:
    """Whether it is a slice of everything, which is how ``y[:, None]`` begins."""
    return node.target is aten.slice.Tensor and node.args[2:] in ((), (0,), (0, 2**63 - 1))


def _demand(below: Any, ignored: int | None = None) -> Iterator[Range]:
    """Nothing where the size is the number of examples, or where a manifest cannot say what is left out."""
    if isinstance(below, int) and abs(ignored or 0) <= MAX_EXACT:
        yield Range(below, ignored)
