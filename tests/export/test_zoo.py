"""Every model of the zoo, exported and trained 20 steps: on stock ONNX Runtime, and on its own
training artifacts."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zoo
from by_hand import Repeatable, bundle_training, largest_difference, pytorch_training
from fleetlearn_export import Exported, ExportError, export_bundle
from fleetlearn_export.silence import silenced_process
from fleetlearn_protocol.manifest import ORT_TRAINING
from torch import nn
from torch.nn import functional

FAST = ["convolutions", "autoencoder", "embedding-bag", "two-heads", "tied", "own-loss"]
NAMES = [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in zoo.NAMES]
SIZES = [8, 5] * 9 + [8, 1]
"""Two batch sizes in turn, and a last batch of one: 20 steps."""
LR = 0.05
WITHOUT_ORT_TRAINING = {
    "resnet8-batchnorm": (
        "training changes buffers, which ONNX Runtime's training steps do not write"
    ),
    "inverted-residual": (
        "training changes buffers, which ONNX Runtime's training steps do not write"
    ),
    "convolutions": "Pad gradient currently supports constant mode only",
    "transposed": "Could not find an implementation for ConvTransposeGrad",
    "pools": "ONNX export of operator adaptive_max_pool1d, input size not accessible",
    "lstm": "LSTM and LSTMGrad kernel only supports the forward direction for now",
    "unet": "Could not find an implementation for ResizeGrad",
    "dropout": "the step is random",
}
"""What ONNX Runtime's own training cannot do, and what it says; all other models have these
artifacts too."""

Bundles = Callable[[str], tuple[zoo.Case, Exported]]


@pytest.fixture(scope="session")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Bundles:
    """Each model exported once."""

    @cache
    def bundle(name: str) -> tuple[zoo.Case, Exported]:
        case = zoo.make(name)
        path = tmp_path_factory.mktemp("zoo") / name
        return case, export_bundle(
            case.module, case.loss, case.batch(4), path, metrics=case.metrics, targets=case.targets
        )

    return bundle


def in_pytorch(case: zoo.Case, batches: list[zoo.Arrays]) -> tuple[dict[str, Any], list[float]]:
    found, losses = pytorch_training(
        Repeatable(case.module), case.loss, batches, LR, targets=case.targets
    )
    return {name.removeprefix("inner."): value for name, value in found.items()}, losses


@pytest.mark.parametrize("name", NAMES)
def test_20_steps_match_pytorch(bundles: Bundles, name: str) -> None:
    case, exported = bundles(name)
    manifest = exported.bundle.manifest
    state = case.module.state_dict()
    changing = {
        name
        for name, value in state.items()
        if name.split(".")[-1] in ("running_mean", "running_var")
    }
    assert {row.name for row in manifest.parameters if row.buffer} == changing
    assert {row.name for row in manifest.parameters} == {
        name for name, _ in case.module.named_parameters()
    } | changing

    batches = [case.batch(size, 100 + step) for step, size in enumerate(SIZES)]
    found, losses = bundle_training(exported.bundle, batches, LR)
    expected, expected_losses = in_pytorch(case, batches)
    assert largest_difference(found, expected) < 1e-5
    assert losses == pytest.approx(expected_losses, abs=1e-5)
    assert exported.batch_of_one
    assert exported.difference < 1e-5
    # Not all: a bias before a normalisation has no gradient, nor has what a recurrent layer's last
    # output does not use.
    moved = [
        np.abs(found[row.name] - state[row.name].numpy()).max() > 1e-6
        for row in manifest.parameters
    ]
    assert sum(moved) > 0.5 * len(moved), "training did not move the model"


def test_mcmahan_cnn_is_the_papers() -> None:
    assert sum(value.numel() for value in zoo.make("mcmahan").module.parameters()) == 1_663_370


def test_names_and_seeds_of_the_zoo() -> None:
    one, other = zoo.make("tied"), zoo.make("tied")
    assert all(
        torch.equal(a, b)
        for a, b in zip(one.module.parameters(), other.module.parameters(), strict=True)
    )
    assert torch.equal(one.batch(3, 5)[0], other.batch(3, 5)[0])
    assert not torch.equal(one.batch(3, 5)[0], one.batch(3, 6)[0])
    with pytest.raises(ValueError, match="model 'gpt'; expected one of softmax, mlp"):
        zoo.make("gpt")
    assert WITHOUT_ORT_TRAINING.keys() <= set(zoo.NAMES)


@pytest.mark.ort_training
@pytest.mark.parametrize("name", NAMES)
def test_ort_training_agrees_or_says_why_not(bundles: Bundles, name: str) -> None:
    from onnxruntime.training import api

    case, exported = bundles(name)
    reason = WITHOUT_ORT_TRAINING.get(name)
    assert exported.bundle.manifest.has_ort_training == (reason is None), (
        exported.without_ort_training
    )
    if reason:
        assert reason in (exported.without_ort_training or "")
        return
    files = [str(exported.bundle.path / "ort_training" / file) for file in ORT_TRAINING]
    state = api.CheckpointState.load_checkpoint(files[3])
    with silenced_process():
        module = api.Module(files[0], state, files[1])
        optimizer = api.Optimizer(files[2], module)
    optimizer.set_learning_rate(LR)
    batches = [case.batch(size, 100 + step) for step, size in enumerate(SIZES)]
    for batch in batches:
        module(*(value.numpy() for value in batch))
        optimizer.step()
        module.lazy_reset_grad()
    found, _ = bundle_training(exported.bundle, batches, LR)
    assert largest_difference({name: state.parameters[name].data for name in found}, found) < 1e-4


class Twice(nn.Module):
    """y = w * w * x, the two w one tensor in two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        self.second.weight = self.first.weight
        nn.init.constant_(self.first.weight, 3.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def test_tied_weights_are_one_tensor_whose_gradient_adds_up(tmp_path: Path) -> None:
    """w = 3, x = 1: the gradient of w^2 is 2 w = 6; lr 0.1: 3 - 0.6."""
    example = torch.ones(2, 1), torch.zeros(2, 1)
    bundle = export_bundle(
        Twice(), lambda outputs, y: (outputs + 0 * y).mean(), example, tmp_path / "b"
    ).bundle
    assert [row.name for row in bundle.manifest.parameters] == ["first.weight"]
    found, losses = bundle_training(bundle, [example], 0.1)
    assert found["first.weight"] == pytest.approx(2.4)
    assert losses == [9.0]


class Remembering(nn.Module):
    """Buffers that the user's own code changes: in place, by giving them another tensor, and
    through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("history", torch.zeros(2, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.steps += 1
                self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
                self.history[0] = self.history[1]
                self.history[1] = x.amax(0)
        return self.linear(x - self.mean) + self.history.sum() / (10 + self.steps)


def test_buffers_that_the_users_own_code_changes(tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = Remembering()
    batches = [(torch.randn(size, 4), torch.randn(size, 3)) for size in SIZES]
    bundle = export_bundle(model, functional.mse_loss, batches[0], tmp_path / "b").bundle
    assert {row.name for row in bundle.manifest.parameters if row.buffer} == {
        "mean",
        "steps",
        "history",
    }
    found, _ = bundle_training(bundle, batches, LR)
    expected, _ = pytorch_training(model, functional.mse_loss, batches, LR)
    assert largest_difference(found, expected) < 1e-5
    assert float(found["steps"]) == 20


def test_a_cumulative_batchnorm_is_refused_by_its_counter(tmp_path: Path) -> None:
    model = nn.Sequential(nn.BatchNorm1d(4, momentum=None), nn.Linear(4, 3))
    with pytest.raises(
        ExportError, match=r"0\.num_batches_tracked.*momentum=None.*give BatchNorm a momentum"
    ):
        export_bundle(
            model, functional.mse_loss, (torch.randn(4, 4), torch.randn(4, 3)), tmp_path / "b"
        )


class Adding(nn.Module):
    """x + p, then the functions given, side by side: the gradient of p shows where each function
    sent it."""

    def __init__(
        self, shape: tuple[int, ...], functions: list[Callable[[torch.Tensor], torch.Tensor]]
    ) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.zeros(shape))
        self.functions = functions

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = x + self.p
        return torch.cat([function(z).flatten(1) for function in self.functions], 1)


def weighted(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Each output counts differently."""
    weights = torch.arange(1, outputs.shape[1] + 1, dtype=torch.float32)
    return (outputs * weights * y).sum() / outputs.shape[0] / weights.sum()


def test_equal_values_under_a_maximum_share_as_in_pytorch(tmp_path: Path) -> None:
    """Pixels of few whole numbers are mostly equal; PyTorch gives all to the first of them, or
    shares (amax)."""
    functions: list[Callable[[torch.Tensor], torch.Tensor]] = [
        nn.MaxPool2d(2),
        nn.MaxPool2d(3),
        nn.MaxPool2d(3, 2, padding=1),
        nn.MaxPool2d(2, 1, dilation=2),
        nn.MaxPool2d(3, 2, ceil_mode=True),
        nn.AdaptiveMaxPool2d((4, 5)),
        nn.AdaptiveMaxPool2d(1),
        lambda z: functional.max_pool1d(z.flatten(2), 3, 2),
        lambda z: functional.max_pool3d(z[:, :, None], (1, 3, 2), (1, 2, 2), (0, 1, 1)),
        lambda z: z.amax((2, 3)),
        lambda z: z.flatten(1).max(1, keepdim=True).values,
        lambda z: z.relu(),
    ]
    torch.manual_seed(4)
    model = Adding((1, 2, 6, 7), functions)
    x = torch.randint(-1, 2, (5, 2, 6, 7)).float()
    y = torch.ones(5, 1)
    bundle = export_bundle(model, weighted, (x, y), tmp_path / "b").bundle
    for size in (5, 3, 1):
        found, _ = bundle_training(bundle, [(x[:size], y[:size])], 1.0)
        expected, _ = pytorch_training(model, weighted, [(x[:size], y[:size])], 1.0)
        np.testing.assert_allclose(found["p"], expected["p"], atol=1e-6)


def test_the_gradient_of_a_distance_of_zero_is_zero(tmp_path: Path) -> None:
    """|w x - y| where w x = y, and beside it: sign(0) = 0, so that of two outputs only the second's
    weight moves."""
    model = nn.Linear(1, 2, bias=False)
    nn.init.constant_(model.weight, 2.0)
    x, y = torch.ones(2, 1), torch.tensor([[2.0, 1.0]] * 2)
    bundle = export_bundle(model, functional.l1_loss, (x, y), tmp_path / "b").bundle
    found, losses = bundle_training(bundle, [(x, y)], 0.1)
    np.testing.assert_allclose(found["weight"], [[2.0], [1.95]], atol=1e-7)
    assert losses == [0.5]


@pytest.mark.parametrize(
    ("layer", "text"),
    [
        (
            nn.EmbeddingBag(9, 3, mode="max"),
            r"embedding_bag.*in 0 \(EmbeddingBag\) takes each bag's largest: use nn.Emb",
        ),
        (
            nn.EmbeddingBag(9, 3, mode="sum", sparse=True),
            "has sparse gradients: leave out sparse=True",
        ),
        (nn.EmbeddingBag(9, 3, scale_grad_by_freq=True), "leave out scale_grad_by_freq=True"),
    ],
    ids=["max", "sparse", "scaled"],
)
def test_what_has_no_gradient_in_a_bundle_is_refused_by_name(
    layer: nn.Module, text: str, tmp_path: Path
) -> None:
    example = torch.randint(9, (4, 5)), torch.randn(4, 3)
    with pytest.raises(ExportError, match=text):
        export_bundle(
            nn.Sequential(layer, nn.Linear(3, 3)), functional.mse_loss, example, tmp_path / "b"
        )
