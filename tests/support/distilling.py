"""For tests: distillation bundles, exported once for all tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from bundle_cache import cached_export
from fleetlearn_export import LocalStep, distillation_loss
from fleetlearn_protocol import Bundle
from fleetlearn_protocol.distillation import TEACHER, TEMPERATURE
from torch import Tensor, nn


def distillation_bundle(
    model: nn.Module, x: Tensor, path: Path, step: LocalStep | None = None, **options: Any
) -> Bundle:
    """What ``export_distillation`` writes; tests/export/test_distillation.py compares the two."""
    model.eval()
    with torch.no_grad():
        logits = model(x)
    model.train()
    example = x, logits + torch.linspace(-1, 1, logits.shape[1]), torch.ones(len(x))
    exported = cached_export(
        model,
        distillation_loss,
        example,
        path,
        step=step or LocalStep("adam"),
        names=["x", TEACHER, TEMPERATURE],
        targets=2,
        **options,
    )
    return exported.bundle
