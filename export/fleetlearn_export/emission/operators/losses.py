"""Losses and their backward passes."""

from __future__ import annotations

import torch

from fleetlearn_export.emission.emitter import Handler

aten = torch.ops.aten

OPERATORS: dict[torch._ops.OpOverload, Handler] = {}
