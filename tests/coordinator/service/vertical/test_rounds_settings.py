"""The plan of a split run."""

from __future__ import annotations

from pathlib import Path

import pytest
from fleetlearn_coordinator.service.vertical.rounds_settings import (
    SplitPlan,
    check_new_plan,
    split_plan_file,
)
from fleetlearn_protocol.errors import FleetError

TOKENS = {"barn": "a" * 64, "attic": "b" * 64}


def written(folder: Path, lines: dict[str, str] | None = None, *, turns: bool = False) -> Path:
    """Write a plan, in which lines that begin with a key are replaced."""
    text = split_plan_file(folder / "parts", TOKENS, turns=turns)
    for key, line in (lines or {}).items():
        found = next(one for one in text.splitlines() if one.lstrip("# ").startswith(f"{key} ="))
        text = text.replace(found, line)
    (folder / "split.toml").write_text(text, "utf-8")
    return folder / "split.toml"


def test_the_plan_that_init_writes_is_read(tmp_path: Path) -> None:
    plan = SplitPlan.load(written(tmp_path))
    assert (plan.kind, plan.unit, plan.round_steps) == ("splitfed", "rounds", None)
    assert plan.bottom == tmp_path / "parts" / "device.bundle"
    # In the order of the file, which is that of the turns.
    assert list(plan.devices) == ["barn", "attic"]
    turns = SplitPlan.load(written(tmp_path, {"round_steps": "round_steps = 10"}, turns=True))
    assert (turns.kind, turns.unit, turns.round_steps) == ("turns", "turns", 10)


@pytest.mark.parametrize(
    ("key", "line", "said"),
    [
        ("encoding", 'encoding = "int8"', "activations and gradients travel as one of"),
        ("least_devices", "least_devices = 3", "least_devices = 3, and there are 2 devices"),
        ("wait", "wait = 0", "wait"),
        ("round_steps", "round_steps = 2000000000", "2147483648 steps in a run"),
        ("rounds", "rounds = 0", "rounds"),
        ("turns", "turn = true", "turn is not a key of a split plan; did you mean turns"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, key: str, line: str, said: str) -> None:
    with pytest.raises(FleetError, match=said):
        SplitPlan.load(written(tmp_path, {key: line}))


def test_more_devices_than_tops_can_be_held_for_are_refused(tmp_path: Path) -> None:
    tokens = {f"device{number}": f"{number:064x}" for number in range(33)}
    (tmp_path / "split.toml").write_text(
        split_plan_file(tmp_path, tokens, turns=False), encoding="utf-8"
    )
    with pytest.raises(FleetError, match="there are 33 devices; a split run has 1 to 32"):
        SplitPlan.load(tmp_path / "split.toml")


@pytest.mark.parametrize("names", [[], ["a", "a"], ["a b"], [""]])
def test_names_that_are_none_are_refused(tmp_path: Path, names: list[str]) -> None:
    with pytest.raises(FleetError, match="--devices"):
        check_new_plan(tmp_path, names)


def test_what_is_no_folder_of_parts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FleetError, match=r"has no top.bundle: expected the folder NAME.split"):
        check_new_plan(tmp_path, ["a"])
