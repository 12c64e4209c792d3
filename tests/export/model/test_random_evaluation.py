"""Models that draw random numbers in evaluation mode."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from fleetlearn_device import open_runtime
from fleetlearn_export import ExportError, export_bundle
from fleetlearn_export.model.random_evaluation import drawn_from_fixed_seed
from torch import Tensor, nn
from torch.nn import functional

X = torch.rand(6, 12, generator=torch.Generator().manual_seed(0))


class Autoencoder(nn.Module):
    """A variational autoencoder (arXiv 1312.6114) that samples in evaluation mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(12, 2 * 3), nn.Linear(3, 12)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, dim=1)
        sample = mean + torch.randn_like(mean) * torch.exp(log_variance / 2)
        return self.decoder(sample), mean, log_variance


def loss(outputs: tuple[Tensor, Tensor, Tensor], x: Tensor) -> Tensor:
    decoded, mean, log_variance = outputs
    divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1).mean()
    return functional.mse_loss(decoded, x) + 0.01 * divergence


def distance(outputs: tuple[Tensor, ...], x: Tensor) -> Tensor:
    return (outputs[0] - x).abs().mean(1)


def test_evaluation_and_inference_draw_the_same_numbers_in_each_call(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Autoencoder()
    made = export_bundle(
        model, loss, (X, X), tmp_path / "vae.bundle", metrics={"distance": distance}
    )
    runtime = open_runtime(made.bundle, kind="onnx")
    first, again = (runtime.evaluate((X.numpy(), X.numpy())) for _ in range(2))
    assert first == again
    with torch.no_grad(), drawn_from_fixed_seed():
        outputs = model.eval()(X)
        expected = loss(outputs, X), distance(outputs, X)
    assert first.loss_sum == pytest.approx(6 * expected[0].item(), rel=1e-5)
    assert first.metric_sums["distance"] == pytest.approx(expected[1].sum().item(), rel=1e-5)
    # Of fewer examples each has the numbers that it had among more.
    session = onnxruntime.InferenceSession(
        made.bundle.path / "graphs/infer.onnx", providers=["CPUExecutionProvider"]
    )
    np.testing.assert_allclose(
        session.run(None, {"x": X[:2].numpy()})[0], outputs[0][:2], rtol=1e-4, atol=1e-6
    )
    # Steps draw from their seed.
    losses = {runtime.step((X.numpy(), X.numpy()), lr=0.0, seed=seed) for seed in (1, 2, 1)}
    assert len(losses) == 2


class Dropping(nn.Module):
    def __init__(self, by_attention: bool) -> None:
        super().__init__()
        self.layer, self.by_attention = nn.Linear(12, 12), by_attention

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        if self.by_attention:
            rows = x.unsqueeze(1)
            return functional.scaled_dot_product_attention(rows, rows, rows, dropout_p=0.5).squeeze(
                1
            )
        return functional.dropout(x, 0.5)


@pytest.mark.parametrize("by_attention", [True, False])
def test_dropout_that_stays_on_is_refused(by_attention: bool, tmp_path: Path) -> None:
    with pytest.raises(
        ExportError,
        match=r"drops elements by chance at .*test_random_evaluation\.py:\d+ in forward",
    ):
        export_bundle(Dropping(by_attention), functional.mse_loss, (X, X), tmp_path / "b")
