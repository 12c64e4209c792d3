"""Operators that pick or place elements by index."""

from __future__ import annotations

import torch

from fleetlearn_export.emission.emitter import Handler

aten = torch.ops.aten

OPERATORS: dict[torch._ops.OpOverload, Handler] = {}
