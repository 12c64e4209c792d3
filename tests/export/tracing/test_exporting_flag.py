"""Models do what they do in training while they are traced."""

from __future__ import annotations

from pathlib import Path

import torch
from fleetlearn_export import export_bundle
from fleetlearn_export.model.checked_user_model import make_user_model
from fleetlearn_export.model.user_model import training_mode
from fleetlearn_export.tracing.trace import export_loss
from torch import Tensor, nn
from torch.nn import functional


def test_a_model_does_not_see_that_it_is_exported() -> None:
    class Two(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            found = super().forward(x)
            seen = torch.compiler.is_exporting() or torch.compiler.is_compiling()
            return found.sin() if seen else found.cos()

    user = make_user_model(
        Two(3, 2), functional.cross_entropy, (torch.randn(4, 3), torch.zeros(4).long()), {}, None, 1
    )
    before = torch.compiler.is_exporting
    with training_mode(user.model):
        graph = export_loss(user)
    targets = {node.target for node in graph.nodes}
    assert torch.ops.aten.cos.default in targets
    assert torch.ops.aten.sin.default not in targets
    assert torch.compiler.is_exporting is before


def test_a_model_is_told_if_it_checks_values_otherwise(tmp_path: Path) -> None:
    class Checking(nn.Linear):
        """Checks its input as kornia's filters do."""

        def forward(self, x: Tensor) -> Tensor:
            if not torch.compiler.is_compiling() and not bool((x >= 0).all()):
                raise ValueError("x must not be negative")
            return super().forward(x)

    example = torch.rand(4, 3), torch.tensor([0, 1, 1, 0])
    assert (
        export_bundle(Checking(3, 2), functional.cross_entropy, example, tmp_path / "b").difference
        < 1e-6
    )
