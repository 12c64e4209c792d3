"""Tensors that wait on disk."""

from __future__ import annotations

import pytest
import torch
from fleetlearn_export.model.on_disk import on_disk
from torch import Tensor

TENSORS = {
    "matrix": torch.arange(6.0).reshape(2, 3),
    "transposed": torch.arange(6.0).reshape(2, 3).t(),
    "scalar": torch.tensor(7),
    "empty": torch.empty(2, 0, 3),
    "flags": torch.tensor([True, False, True]),
    "double": torch.rand(1000, dtype=torch.float64),
    "parameter": torch.nn.Parameter(torch.ones(3)),
}


def test_tensors_come_back_as_they_were() -> None:
    with on_disk() as kept:
        for name, value in TENSORS.items():
            kept.keep(name, value)
        assert list(kept) == list(TENSORS)
        assert len(kept) == len(TENSORS)
        for name, value in TENSORS.items():
            assert kept[name].dtype == value.dtype
            assert torch.equal(kept[name], value.detach())


@pytest.mark.parametrize("value", [torch.zeros(4), torch.zeros(1_000_000)])
def test_what_writes_into_a_result_does_not_change_the_file(value: Tensor) -> None:
    with on_disk() as kept:
        kept.keep("value", value)
        kept["value"].add_(1.0)
        assert torch.equal(kept["value"], value)


def test_a_tensor_kept_again_replaces_the_first() -> None:
    with on_disk() as kept:
        kept.keep("value", torch.zeros(3))
        kept.keep("value", torch.ones(2))
        assert torch.equal(kept["value"], torch.ones(2))
        assert len(kept) == 1


def test_a_result_outlives_the_file() -> None:
    with on_disk() as kept:
        kept.keep("value", torch.arange(5))
        found = kept["value"]
    assert torch.equal(found, torch.arange(5))
