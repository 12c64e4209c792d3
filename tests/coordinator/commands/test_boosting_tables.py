from __future__ import annotations

import msgspec
import pytest
from boosting_run import COMPONENTS, TABLES, TREES, as_arrays
from computing import computed
from fleetlearn_coordinator.commands.boosting_tables import show_components, show_trees
from fleetlearn_coordinator.commands.computations import SHOW
from fleetlearn_protocol.computations.kinds import KINDS

PARTS = [as_arrays(table) for table in TABLES.values()]


def test_each_kind_is_shown() -> None:
    assert SHOW.keys() == KINDS.keys()


def test_trees_are_told_by_what_they_gain(capsys: pytest.CaptureFixture[str]) -> None:
    found, _ = computed(TREES, PARTS)
    show_trees(found)
    first, *rows = capsys.readouterr().out.splitlines()
    assert first.startswith(f"3 trees with {found['splits']} splits, of 650 rows; loss 0.")
    shares = [float(row.split()[-1].rstrip("%")) for row in rows if "%" in row]
    assert shares == sorted(shares, reverse=True)
    assert sum(shares) == pytest.approx(100, abs=0.2)


def test_before_the_first_tree_and_effect_no_loss_of_0_is_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show_trees({"trees": 0})
    show_components({"iterations": 0})
    assert capsys.readouterr().out == "no tree is grown yet\nno effect is chosen yet\n"


def test_components_are_told_by_what_they_add(capsys: pytest.CaptureFixture[str]) -> None:
    found, _ = computed(msgspec.structs.replace(COMPONENTS, iterations=40), PARTS)
    show_components(found)
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.startswith("40 iterations, of 650 rows; loss 0.")
    assert {effect["kind"] for effect in found["effects"]} >= {"linear", "category"}
    for effect in found["effects"]:
        assert f"{effect['column']} {effect['kind']} {effect['iterations']} " in shown
    (line,) = [e for e in found["effects"] if (e["column"], e["kind"]) == ("age", "linear")]
    assert f"{line['intercept']:.4g} {line['slope']:+.4g} x" in shown
