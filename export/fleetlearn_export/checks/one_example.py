"""A mistake of PyTorch's on batches of one example, without which graphs are compared with it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fleetlearn_export.model.steps import Tensors

BACKWARD = torch.ops.aten.native_batch_norm_backward.default


class _ContiguousGradients(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is active, the gradient that batch normalisation's backward pass is given lies in
    memory in order.

    With one example, and a gradient whose channels are last in memory, PyTorch 2.13 mixes up the
    elements.
    """

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is BACKWARD:
            args = (args[0].contiguous(), *args[1:])
        return func(*args, **(kwargs or {}))


def right_for_one_example(inputs: Tensors) -> AbstractContextManager[Any]:
    """Return the context in which PyTorch's results for a graph's inputs are right."""
    sizes = {len(value) for name, value in inputs.items() if name.startswith("batch.")}
    return _ContiguousGradients() if sizes == {1} else nullcontext()  # type: ignore[no-untyped-call]
