"""Where a plan's run is: the same as the whole plan says, and no less said where it is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from fleetlearn_coordinator import Plan, PlanError
from fleetlearn_coordinator.plan.plan_place import read_place
from peers import plan_text


@pytest.mark.parametrize("data_dir", ["run", "../elsewhere", "/abs/run", "~/run", None])
def test_it_is_what_the_plan_says(tmp_path: Path, bundle_path: Path, data_dir: str | None) -> None:
    text = plan_text(bundle_path, data_dir or "")
    if data_dir is None:
        text = text.replace('data_dir = ""\n', "")
    (tmp_path / "plan.toml").write_text(text)
    plan, place = Plan.load(tmp_path / "plan.toml"), read_place(tmp_path / "plan.toml")
    assert place == (plan.name, plan.data_dir, str(plan.file))


def test_a_url_stays_one(tmp_path: Path, bundle_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(plan_text(bundle_path, "memory://x"))
    plan, place = Plan.load(tmp_path / "plan.toml"), read_place(tmp_path / "plan.toml")
    assert place.data_dir == plan.data_dir


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x", "this is not TOML"),
        ("port = 1", "this is a service file"),
        ('name = "a"', "bundle"),
        ('name = 1\nbundle = "b"', "name"),
    ],
)
def test_what_is_wrong_is_said_as_the_plan_s_reader_says_it(
    tmp_path: Path, text: str, said: str
) -> None:
    (tmp_path / "plan.toml").write_text(text)
    with pytest.raises(PlanError, match=said):
        read_place(tmp_path / "plan.toml")
    with pytest.raises(PlanError, match="cannot be read"):
        read_place(tmp_path / "none.toml")
