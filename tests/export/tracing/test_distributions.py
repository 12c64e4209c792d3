"""Losses with ``torch.distributions``, whose checks of values no graph can have."""

from __future__ import annotations

import contextlib

import pytest
import torch
from fleetlearn_export.tracing.distributions import distributions_unchecked
from torch.distributions import Categorical, Distribution, Normal

from tests.support.emission_cases import check_emission

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(6))


def test_distributions_are_traced() -> None:
    check_emission(None, lambda x: Normal(x, x.exp()).log_prob(x + 1), X)
    check_emission(None, lambda x: Categorical(logits=x).log_prob(x.argmax(1)), X)


def test_checks_return_even_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Distribution, "_validate_args", True)
    with contextlib.suppress(ZeroDivisionError), distributions_unchecked():
        Normal(0.0, -1.0)
        raise ZeroDivisionError
    assert Distribution._validate_args
    with pytest.raises(ValueError, match="scale"):
        Normal(0.0, -1.0)


def test_checks_that_were_off_stay_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Off by the user's own choice, or by the first call of torch.compile in this process."""
    monkeypatch.setattr(Distribution, "_validate_args", False)
    with distributions_unchecked():
        Normal(0.0, -1.0)
    assert not Distribution._validate_args
