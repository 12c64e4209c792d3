"""The parts of split models: written, compared with training in one place, and refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fleetlearn_device.runtimes.split import Bottom, Top
from fleetlearn_export import ExportError, LocalStep, export_bundle, export_vertical
from fleetlearn_export.checks import comparison
from fleetlearn_export.model.train_step import TrainStep
from fleetlearn_export.split_parts import product_loss
from fleetlearn_protocol import open_bundle
from fleetlearn_protocol.manifest import ACTIVATIONS, TOP_STEP
from fleetlearn_protocol.vector import views
from split_models import batches, exported_vertical, trained_in_one_place, vertical
from torch import nn
from torch.nn import functional


def test_the_loss_of_a_bottom_has_the_given_gradient_for_each_row() -> None:
    activations = torch.ones(4, 2, 3, requires_grad=True)
    gradient = torch.arange(24.0).reshape(4, 2, 3)
    product_loss(activations, gradient).backward()
    assert activations.grad is not None
    assert torch.equal(activations.grad * 4, gradient)


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "lr", "steps"), [("sgd", 0.2, 300), ("adam", 0.01, 200)])
def test_parts_trained_together_are_the_model_trained_in_one_place(
    tmp_path: Path, optimizer: Any, lr: float, steps: int
) -> None:
    model = vertical()
    parts = exported_vertical(tmp_path / "parts", LocalStep(optimizer), model)
    bank, shop, top = Bottom(parts.bottoms["bank"]), Bottom(parts.bottoms["shop"]), Top(parts.top)
    losses = []
    for rows in batches(steps):
        arrays = [(model.x_bank[rows],), (model.x_shop[rows],)]
        made = [part.activations(own) for part, own in zip((bank, shop), arrays, strict=True)]
        result = top.step([*made, model.y[rows]], lr=lr)
        for part, own, gradient in zip((bank, shop), arrays, result.gradients, strict=True):
            part.step(own, gradient, lr=lr)
        losses.append(result.loss)

    expected = trained_in_one_place(model, optimizer, lr, batches(steps))
    assert np.abs(np.subtract(losses, expected)).max() <= 1e-6 * max(expected)
    for part, module, prefix in (
        (bank, model.bank, ""),
        (shop, model.shop, ""),
        (top, model.top, "top."),
    ):
        state = module.state_dict()
        for name, found in views(part.local, part.manifest.parameters).items():
            wanted = state[name.removeprefix(prefix)].numpy()
            scale = max(1.0, float(np.abs(wanted).max()))
            assert np.abs(found - wanted).max() <= 1e-6 * scale, name


@pytest.mark.slow
def test_a_model_split_at_a_layer_is_written_whole_and_in_two_parts(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Linear(6, 5),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Linear(5, 4),
        nn.Dropout(0.2),
        nn.Linear(4, 3),
    )
    x, y = torch.randn(8, 6), torch.randint(3, (8,))
    path = tmp_path / "m.bundle"
    exported = export_bundle(model, functional.cross_entropy, (x, y), path, split="2")
    parts = exported.parts
    assert parts is not None
    bottom, top = parts.bottoms["device"], parts.top
    assert (bottom.path, top.path) == (
        tmp_path / "m.split" / "device.bundle",
        tmp_path / "m.split" / "top.bundle",
    )
    for bundle in (exported.bundle, bottom, top):
        assert open_bundle(bundle.path).sha256 == bundle.sha256
    assert ACTIVATIONS in bottom.manifest.files
    assert TOP_STEP in top.manifest.files
    assert top.manifest.split
    assert [cut.bundle for cut in top.manifest.split.cuts] == [bottom.sha256]
    names = [row.name for row in (*bottom.manifest.parameters, *top.manifest.parameters)]
    assert sorted(names) == sorted(row.name for row in exported.bundle.manifest.parameters)
    assert bottom.manifest.random
    assert top.manifest.random
    # Both graphs of the bottom draw the same numbers: a dropped element takes no gradient.
    part = Bottom(bottom)
    made = part.activations((x.numpy(),), seed=4)
    assert not np.array_equal(made, part.activations((x.numpy(),), seed=5))
    before = part.local.copy()
    part.step((x.numpy(),), np.where(made == 0, np.float32(1), np.float32(0)), seed=4, lr=1.0)
    assert np.array_equal(part.local, before)
    (tmp_path / "n.split").mkdir()
    (tmp_path / "n.split" / "mine.txt").write_text("mine")
    other = tmp_path / "n.bundle"
    with pytest.raises(ExportError, match="has no parts of a split model, so it is not replaced"):
        export_bundle(model, functional.cross_entropy, (x, y), other, split="2")
    assert not other.exists()


@pytest.mark.slow
def test_a_wrong_gradient_for_the_activations_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = TrainStep.run_with_gradients_of

    def wrong(self: TrainStep, arrays: Any, given: Any, *, copies: bool = True) -> Any:
        return {
            name: value * 1.001 if name.startswith("gradient.") else value
            for name, value in right(self, arrays, given, copies=copies).items()
        }

    monkeypatch.setattr(TrainStep, "run_with_gradients_of", wrong)
    with pytest.raises(ExportError, match="the top's graph differs from PyTorch in gradient"):
        exported_vertical(tmp_path / "parts", LocalStep(), vertical())
    assert not (tmp_path / "parts").exists()
    assert comparison.TOLERANCE <= 1e-5


def parties(**more: Any) -> dict[str, Any]:
    return {"bank": (nn.Linear(3, 2), (torch.randn(4, 3),)), **more}


@pytest.mark.parametrize(
    ("given", "options", "said"),
    [
        ({}, {}, "parties={} is empty"),
        ({"bank": nn.Linear(3, 2)}, {}, r"parties\['bank'\] is no tuple"),
        ({"my bank": parties()["bank"]}, {}, "party name 'my bank'"),
        ({"my-bank": parties()["bank"]}, {}, "party 'my-bank'"),
        ({"top": parties()["bank"]}, {}, "party 'top'"),
        (parties(shop=(nn.Linear(3, 2), (torch.randn(5, 3),))), {}, "the first axis"),
        (parties(), {"step": LocalStep(clip=True)}, "which clipping needs"),
        (parties(), {"step": LocalStep(proximal=True)}, "no round whose model"),
        (parties(), {"target_names": ["a", "b"]}, "for 1 targets"),
        ({"bank": (nn.Flatten(0), (torch.randn(4, 3),))}, {}, r"gives torch.float32 \(12,\)"),
    ],
)
def test_what_no_split_model_can_have_is_refused(
    given: Any, options: Any, said: str, tmp_path: Path
) -> None:
    with pytest.raises(ExportError, match=said):
        export_vertical(
            given,
            nn.Linear(2, 2),
            functional.cross_entropy,
            torch.randint(2, (4,)),
            tmp_path / "parts",
            **options,
        )
    assert not [*tmp_path.iterdir()]


def test_what_the_parts_cannot_have_is_refused_before_the_work(tmp_path: Path) -> None:
    example = (torch.randn(4, 3), torch.randint(2, (4,)))
    with pytest.raises(ExportError, match="split= and memory= were given"):
        export_bundle(
            nn.Linear(3, 2),
            functional.cross_entropy,
            example,
            tmp_path / "m.bundle",
            split="0",
            memory="100 MiB",
            batch=4,
        )
    assert not [*tmp_path.iterdir()]
