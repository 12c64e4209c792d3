"""A traced model has no conditions on the number of examples that always hold."""

from __future__ import annotations

import pytest
import torch
from fleetlearn_export.model.checked_user_model import make_user_model
from fleetlearn_export.model.user_model import training_mode
from fleetlearn_export.tracing.trace import export_loss
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.nn import functional

from tests.support.emission_cases import check_emission


def test_a_condition_that_holds_for_all_numbers_of_examples_is_none() -> None:
    """PyTorch asks whether n * min(2, 2 * n) is 2 * n, and cannot prove it."""

    class Reshaped(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            n = x.shape[0]
            heads = super().forward(x).reshape(n, 3, 2).transpose(0, 1).reshape(3 * n, 2)
            return heads.reshape(3, n, 2).mean(0)

    user = make_user_model(
        Reshaped(3, 6),
        functional.cross_entropy,
        (torch.randn(4, 3), torch.zeros(4).long()),
        {},
        None,
        1,
    )
    with training_mode(user.model):
        assert export_loss(user).find_nodes(op="call_function", target=torch.ops.aten.mean.dim)


def test_what_torch_compile_compiled_is_traced_as_it_was_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The first torch.compile of a process switches off the checks of torch.distributions.
    # They are put back after this test.
    monkeypatch.setattr(Distribution, "_validate_args", Distribution._validate_args)
    layer = torch.compile(nn.Linear(3, 2), backend="eager")
    check_emission(torch.ops.aten.addmm.default, lambda x: layer(x), torch.randn(3, 3))
