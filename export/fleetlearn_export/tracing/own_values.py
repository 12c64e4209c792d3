"""Finds parameters of the model that code reads past the model, and which a graph would keep as
they are."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from fleetlearn_export.model.source_locations import location_of_node
from fleetlearn_export.model.steps import read_past_the_model


def refuse_own_values(module: torch.fx.GraphModule, model: nn.Module, names: Iterable[str]) -> None:
    """Raise ExportError if a constant of the traced graph shares memory with a tensor of the model
    that training changes: the graph would have its initial value in each step, and no gradient for
    it.

    names: the parameter table's. While it is traced, the model has other tensors under these names,
    so the code has found its own ones elsewhere: in a list, or in a variable of the loss. A copy,
    such as the fixed weights from which an L2-SP penalty keeps near, shares no memory.
    """
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    places = {tensors[name].untyped_storage().data_ptr(): name for name in names}
    for node in module.graph.find_nodes(op="get_attr"):
        value: object = getattr(module, str(node.target), None)
        # Stand-ins, as tracing makes them of small constants, have no memory.
        if (
            not isinstance(value, Tensor)
            or type(value) not in (Tensor, nn.Parameter)
            or not value.numel()
        ):
            continue
        name = places.get(value.untyped_storage().data_ptr())
        if name is not None:
            location = next((line for user in node.users if (line := location_of_node(user))), "")
            raise read_past_the_model(name, location)
