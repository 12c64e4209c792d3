"""A vertical plan: what it says, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from fleetlearn_coordinator.service.vertical.settings import (
    VerticalPlan,
    VerticalPlanError,
    hash_of_token,
    vertical_plan_file,
)

TEXT = vertical_plan_file("top.bundle", {"bank": hash_of_token("t"), "shop": "0" * 64}, "bank")


def load(folder: Path, text: str) -> VerticalPlan:
    file = folder / "vertical.toml"
    file.write_text(text)
    return VerticalPlan.load(file)


def test_a_new_plan_is_one(tmp_path: Path) -> None:
    plan = load(tmp_path, TEXT)
    assert plan.data_dir == tmp_path / "data"
    assert plan.bundle == tmp_path / "top.bundle"
    assert plan.labels == "bank"
    assert plan.hyper == {"lr": 0.1}
    assert sorted(plan.parties) == ["bank", "shop"]
    assert plan.parties["bank"].token_sha256 == hash_of_token("t")


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("steps = 1000", "step = 1000", "step is not a key of a vertical plan"),
        ("steps = 1000", "steps = 0", "steps"),
        ('labels = "bank"', "", "one of labels .* and labels_file .* is needed"),
        ('labels = "bank"', 'labels = "bank"\nlabels_file = "y.npz"', "is needed, not both"),
        ("batch_size = 32", 'batch_size = 32\nencoding = "zip"', "there is no encoding zip"),
        ("batch_size = 32", 'batch_size = 32\nencoding = "masked"', "travel as one of float32"),
        ("steps = 1000", "steps =", "this is not TOML"),
        (hash_of_token("t"), "t", "token_sha256"),
    ],
)
def test_a_plan_that_says_something_else_is_refused(
    tmp_path: Path, before: str, after: str, said: str
) -> None:
    assert before in TEXT
    with pytest.raises(VerticalPlanError, match=said):
        load(tmp_path, TEXT.replace(before, after))


def test_a_plan_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(VerticalPlanError, match="the vertical plan cannot be read"):
        VerticalPlan.load(tmp_path / "none.toml")
