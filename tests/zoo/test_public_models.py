"""Models of real size, exported and trained five steps against PyTorch, each in a process of its
own.

``make test-zoo`` runs them and prints what each cost; ``ARGS="-k bert"`` chooses. The time and
memory that an export takes are shown, not judged.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from public_models.measured import Failed, measured, row
from public_models.table import LARGE, MANY_PARAMETERS, MODELS, missing_packages

pytestmark = [
    pytest.mark.zoo,
    pytest.mark.slow,
    pytest.mark.skipif(
        bool(missing_packages()),
        reason=f"{', '.join(missing_packages())} not installed: `make test-zoo` does that",
    ),
]
LARGEST_GRAPH = 1_000_000
"""Bytes of train.onnx. Frozen weights are in a file of their own."""
LONGEST_LOAD = 5.0
"""CPU-seconds, on a busy machine. The aim is 1; densenet121, with 8,258 nodes, takes 2 to 3."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.large) if name in LARGE else name for name in MODELS],
)
def test_five_steps_match_pytorch(
    name: str, record_property: Callable[[str, object], None]
) -> None:
    found = measured(name)
    record_property("exports", row(found))
    assert not isinstance(found, Failed), found.error
    assert (found.parameters > MANY_PARAMETERS) == (name in LARGE)
    assert found.loss_difference <= found.loss_allowed
    assert found.weight_difference <= found.weight_allowed
    assert found.graph_bytes <= LARGEST_GRAPH
    assert found.load_cpu_s < LONGEST_LOAD
