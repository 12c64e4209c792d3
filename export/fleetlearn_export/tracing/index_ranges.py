"""The integers that a batch's arrays may hold, as the model and its loss tell: classes of a loss,
rows of an embedding.

PyTorch refuses others when it is run. ONNX's operators may not: GatherElements takes -1 for the
last class.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from fleetlearn_protocol.messages import MAX_EXACT

from fleetlearn_export.model.arguments import IndexRange

aten = torch.ops.aten
INTEGERS = (torch.int64, torch.int32, torch.uint8)
LOSSES = {aten.nll_loss_forward.default, aten.nll_loss2d_forward.default}
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


def index_ranges(graph: torch.fx.Graph, inputs: Iterable[str]) -> list[IndexRange | None]:
    """Return the range of each array of the batch; None where the graph tells none.

    graph: the traced step. inputs: the names of its inputs, in order.
    """
    named = zip(inputs, graph.find_nodes(op="placeholder"), strict=True)
    arrays = [node for name, node in named if name.startswith("batch.")]
    return [_range(node) if node.meta["val"].dtype in INTEGERS else None for node in arrays]


def _range(array: torch.fx.Node) -> IndexRange | None:
    uses = [use for use in _uses(array) if 1 <= use.below <= MAX_EXACT]
    if not uses:
        return None
    below = min(use.below for use in uses)
    # What one use leaves out is an error to another that does not.
    ignored = {use.ignored for use in uses}
    value = ignored.pop() if len(ignored) == 1 else None
    return IndexRange(below, None if value is None or 0 <= value < below else value)


def _uses(node: torch.fx.Node) -> Iterator[IndexRange]:
    """The ranges that the operators which read these values, all of them, demand."""
    for user in node.users:
        arguments: Sequence[Any] = user.args
        if user.target in SAME_VALUES or _is_whole(user):
            yield from _uses(user)
        elif user.target in LOSSES and arguments[1] is node:
            outputs = arguments[0].meta["val"]
            yield from _demand(outputs.shape[min(outputs.dim() - 1, 1)], arguments[4])
        elif user.target is aten.embedding.default and arguments[1] is node:
            yield from _demand(arguments[0].meta["val"].shape[0])
        elif user.target is aten.gather.default and arguments[2] is node:
            yield from _demand(arguments[0].meta["val"].shape[arguments[1]])
        elif user.target is aten.lt.Scalar and _is_asserted(user):
            yield from _demand(arguments[1])


def _is_whole(node: torch.fx.Node) -> bool:
    """Whether it is a slice of everything, which is how ``y[:, None]`` begins."""
    return node.target is aten.slice.Tensor and node.args[2:] in ((), (0,), (0, 2**63 - 1))


def _is_asserted(condition: torch.fx.Node) -> bool:
    """Whether PyTorch refuses a batch for which an element of the condition is false, as
    ``one_hot`` does."""
    alls = [user for user in condition.users if user.target is aten.all.default]
    return any(user.target is aten._assert_async.msg for node in alls for user in node.users)


def _demand(below: Any, ignored: int | None = None) -> Iterator[IndexRange]:
    """Nothing where the size is the number of examples, or where a manifest cannot say what is left
    out."""
    if isinstance(below, int) and abs(ignored or 0) <= MAX_EXACT:
        yield IndexRange(below, ignored)
