from __future__ import annotations

import torch
from fleetlearn_export import LocalStep
from fleetlearn_export.update import hyper_names, update


def test_update_by_hand() -> None:
    """w 3, g 2, anchor 1, lr 0.5, mu 0.25: 3 - 0.5 * (2 + 0.25 * 2) = 1.75; without the term 3 - 0.5 * 2 = 2."""
    w, g, anchor = torch.tensor([3.0]), torch.tensor([2.0]), torch.tensor([1.0])
    hyper = {"lr": torch.tensor(0.5), "mu": torch.tensor(0.25)}
    assert update(LocalStep(proximal=True), w, g, anchor, hyper).tolist() == [1.75]
    assert update(LocalStep(), w, g, None, hyper).tolist() == [2.0]


def test_hyper_names() -> None:
    assert hyper_names(LocalStep()) == ["lr"]
    assert hyper_names(LocalStep("sgd", proximal=True)) == ["lr", "mu"]
