"""Which rows of the parameter table belong to normalisation layers."""

from __future__ import annotations

import pytest
import torch
from fleetlearn_export.model.normalisation import normalisation_names
from torch import nn

BATCH = {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}


class Own(nn.LayerNorm):
    """A kind of a layer that another package has."""


@pytest.mark.parametrize(
    ("layer", "names"),
    [
        (nn.BatchNorm2d(4), BATCH),
        (nn.SyncBatchNorm(4), BATCH),
        (nn.BatchNorm1d(4, affine=False), BATCH - {"weight", "bias"}),
        (nn.InstanceNorm2d(4), set()),
        (nn.InstanceNorm2d(4, affine=True), {"weight", "bias"}),
        (nn.LayerNorm(4), {"weight", "bias"}),
        (nn.GroupNorm(2, 4), {"weight", "bias"}),
        (nn.RMSNorm(4), {"weight"}),
        (Own(4), {"weight", "bias"}),
        (nn.Linear(4, 4), set()),
        (torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), set()),
    ],
)
def test_each_kind_of_layer(layer: nn.Module, names: set[str]) -> None:
    assert normalisation_names(nn.Sequential(nn.Linear(4, 4), layer)) == {
        f"1.{name}" for name in names
    }


def test_a_layer_in_two_places_has_the_names_of_the_first() -> None:
    layer = nn.LayerNorm(4)
    model = nn.Sequential(layer, nn.Linear(4, 4), layer)
    assert (
        normalisation_names(model)
        == {"0.weight", "0.bias"}
        <= {name for name, _ in model.named_parameters()}
    )


def test_a_model_that_is_a_layer() -> None:
    assert normalisation_names(nn.BatchNorm1d(4)) == BATCH
