"""``len`` of a tensor is the number of examples, and stays free in a traced graph."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from by_hand import bundle_training, largest_difference, pytorch_training
from fleetlearn_export import export_bundle
from fleetlearn_export.tracing.free_lengths import lengths_free
from torch import Tensor, nn
from torch.nn import functional


def test_other_lengths_are_pythons() -> None:
    before = len
    with lengths_free():
        assert len(torch.ones(3, 2)) == 3
        assert len([1, 2]) == 2
        with pytest.raises(TypeError, match="0-d tensor"):
            len(torch.tensor(1.0))
        with pytest.raises(TypeError, match="no len"):
            len(3)  # type: ignore[arg-type]
    assert len is before


def test_a_model_and_a_loss_with_len_train_on_batches_of_any_size(tmp_path: Path) -> None:
    class Heads(nn.Linear):
        """Reads the number of examples as many libraries do."""

        def forward(self, x: Tensor) -> Tensor:
            size = len(x)
            heads = super().forward(x).reshape(size, 3, 2).transpose(0, 1).reshape(3 * size, 2)
            return (
                heads.reshape(3, size, 2).mean(0)
                + torch.arange(len(heads)).reshape(3, -1).sum(0)[:, None] / 10
            )

    def loss(outputs: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(outputs, y, reduction="sum") / len(y)

    torch.manual_seed(0)
    model = Heads(5, 6)
    batches = [(torch.randn(n, 5), torch.randint(2, (n,))) for n in (4, 7, 1)]
    exported = export_bundle(model, loss, batches[0], tmp_path / "b")
    found, losses = bundle_training(exported.bundle, batches, 0.1)
    expected, curve = pytorch_training(model, loss, batches, 0.1)
    assert losses == pytest.approx(curve, abs=1e-6)
    assert largest_difference(found, expected) < 1e-6
