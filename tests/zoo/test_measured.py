"""The measurement itself: it stops what takes too long and tells what fails. No model of a package
is needed."""

from __future__ import annotations

import pytest
from public_models.measured import HEADINGS, Failed, Measured, measured, row
from public_models.table import make


def test_a_model_that_takes_too_long_is_stopped() -> None:
    assert measured("ds_cnn", limit=1) == Failed("ds_cnn", "took more than 1 CPU-s")


def test_a_failure_is_told_in_the_table() -> None:
    found = measured("gpt")
    assert isinstance(found, Failed)
    assert found.error.startswith("ValueError: model 'gpt'; expected one of resnet18, ")
    assert row(found)[:2] == found
    assert len(row(found)) == len(row(Measured("m", *[1] * 10))) == len(HEADINGS)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("ds_cnn", 23_180), ("unet", 9_823_466), ("rnnt_lstm", 28_872_704), ("shakespeare", 822_570)],
)
def test_models_of_papers_have_their_size(name: str, parameters: int) -> None:
    """As counted by hand from the shapes."""
    assert sum(value.numel() for value in make(name).module.parameters()) == parameters
