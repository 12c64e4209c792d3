from __future__ import annotations

import numpy as np
import pytest
import torch
from fleetlearn_export import ExportError
from fleetlearn_export.checks.comparison import (
    BLOCK,
    batches,
    compare,
    difference_of_each,
    in_blocks,
    largest_difference,
)
from fleetlearn_export.model.checked_user_model import make_user_model
from torch import nn
from torch.nn import functional


def test_compare() -> None:
    expected = torch.tensor([100.0, 1.0])
    assert compare({"a": (np.array([100.0005, 1]), expected)}, "it") == pytest.approx(
        5e-6, rel=1e-2
    )
    with pytest.raises(
        ExportError, match=r"it differs from PyTorch in a by 2e-05 \(and in 0 more\)"
    ):
        compare({"a": (np.array([100.002, 1]), expected), "b": (np.zeros(2), torch.zeros(2))}, "it")
    with pytest.raises(ExportError, match="in a by nan"):
        compare({"a": (np.array([np.nan, 1]), expected)}, "it")
    with pytest.raises(ExportError, match=r"a with shape \(1,\) where PyTorch has \(2,\)"):
        compare({"a": (np.zeros(1), expected)}, "it")


def test_infinity_is_equal_to_itself_and_hides_nothing() -> None:
    """Masked scores are -inf; NaN cannot be compared."""
    expected = torch.tensor([-torch.inf, 1.0])
    assert compare({"a": (np.array([-np.inf, 1]), expected)}, "it") == 0
    with pytest.raises(ExportError, match=r"it differs from PyTorch in a by 0\.1 "):
        compare({"a": (np.array([-np.inf, 1.1]), expected)}, "it")
    with pytest.raises(ExportError, match=r"in a by inf"):
        compare({"a": (np.array([1.0, 1.0]), expected)}, "it")
    with pytest.raises(ExportError, match="it cannot be compared: PyTorch itself gives NaN in a"):
        compare({"a": (np.array([np.nan]), torch.tensor([torch.nan]))}, "it")


def test_where_float32_itself_is_off_more_is_allowed() -> None:
    """PyTorch's own float32 is 1e-4 from its float64: 8 times that, besides the tolerance."""
    rows = {"a": (np.array([1.0007, 1]), torch.tensor([1.0, 1.0]))}
    with pytest.raises(ExportError, match=r"where 1e-05 is allowed"):
        compare(rows, "it")
    effect = difference_of_each(
        {"a": rows["a"][1]}, {"a": torch.tensor([1.0001, 1.0], dtype=torch.float64)}
    )
    assert effect == {"a": pytest.approx(1e-4)}
    assert compare(rows, "it", rounding=effect) == pytest.approx(7e-4, rel=1e-3)
    with pytest.raises(
        ExportError, match=r"it differs from PyTorch in a by 0\.0009 .* where 8e-04 is allowed"
    ):
        compare({"a": (np.array([1.0009, 1]), torch.tensor([1.0, 1.0]))}, "it", rounding=effect)
    with pytest.raises(ExportError, match=r"by nan"):
        compare({"a": (np.array([np.nan, 1]), torch.tensor([1.0, 1.0]))}, "it", rounding=effect)


def test_runs_in_pytorch_that_differ_by_more_than_rounding_widen_nothing() -> None:
    """PyTorch's two runs differ by 0.2, as where a model initialises itself: 0.01 is allowed for
    that, not 1.6."""
    rows = {"a": (np.array([1.15, 1]), torch.tensor([1.0, 1.0]))}
    with pytest.raises(
        ExportError, match=r"it differs from PyTorch in a by 0\.15 .* where 1e-02 is allowed"
    ):
        compare(rows, "it", rounding={"a": 0.2})
    with pytest.raises(ExportError, match=r"where 1e-01 is allowed"):
        compare(rows, "it", rounding={"a": 0.2}, widest=0.1)
    near = {"a": (np.array([1.009, 1]), torch.tensor([1.0, 1.0]))}
    assert compare(near, "it", rounding={"a": 0.2}) == pytest.approx(0.009, rel=1e-3)


def test_large_tensors_are_compared_in_blocks() -> None:
    """Each element is in one block, whatever the layout, and no block hides another's NaN."""
    shape = (3, 2 * BLOCK // 5, 5)
    one = torch.arange(6 * BLOCK // 5 * 5, dtype=torch.float32)[: 3 * (2 * BLOCK // 5) * 5].reshape(
        shape
    )
    for tensor in (one, one.transpose(0, 1)):
        blocks = [block for (block,) in in_blocks(tensor)]
        assert len(blocks) > 1
        assert max(block.numel() for block in blocks) <= BLOCK
        assert torch.equal(
            torch.cat([block.reshape(-1) for block in blocks]).sort().values, one.reshape(-1)
        )
    other = one.clone()
    other[2, -1, -1] += 3
    elsewhere = other.transpose(0, 2).contiguous().transpose(0, 2)
    for first, second in ((one, other), (one, elsewhere), (elsewhere, one)):
        assert largest_difference(first, second) == 3
        assert largest_difference(first.transpose(0, 1), second.transpose(0, 1)) == 3
    assert largest_difference(one[:1].expand(shape), one[:1].repeat(3, 1, 1)) == 0
    other[0, 0, 0] = torch.nan
    assert np.isnan(largest_difference(one, other))


@pytest.mark.parametrize(
    ("rows", "trains_on_one", "sizes"),
    [
        (2, False, [2, 3, 1]),
        (4, False, [4, 3, 1]),
        (8, False, [4, 3, 1]),
        (2, True, [2, 3, 1]),
        (4, True, [4, 2, 1]),
    ],
)
def test_a_batch_of_another_size_repeats_few_rows(
    rows: int, trains_on_one: bool, sizes: list[int]
) -> None:
    example = torch.arange(2.0 * rows).reshape(rows, 2), torch.zeros(rows, 3)
    user = make_user_model(nn.Linear(2, 3), functional.mse_loss, example, {}, None, 1)
    found = list(batches(user._replace(trains_on_one=trains_on_one), 1))
    assert [len(batch["x"]) for batch in found] == sizes
    assert all(len(batch["x"].unique(dim=0)) == min(len(batch["x"]), rows) for batch in found)
