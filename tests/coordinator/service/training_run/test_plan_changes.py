"""A start says where the run is, and which of the plan's values are others than before."""

from __future__ import annotations

import hashlib
import importlib
import sys
from pathlib import Path

import pytest
from answering import Fleet, leases
from fleetlearn_coordinator.service.training_run.plan_changes import PLAN, look_at_plan
from fleetlearn_coordinator.storage.ledger import Metadata
from fleetlearn_protocol import extensions
from peers import PlanMaker, update_of


def test_a_start_says_what_changed_in_the_plan(
    make_plan: PlanMaker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "fleetlearn")
    fleet = Fleet(make_plan(round__goal=1, stop__rounds=2))
    assert fleet.run.where == "begins at model version 0"
    (lease,) = leases(fleet.check_in("a"))
    fleet.report(lease, update_of(1.0))
    fleet.store.close()
    assert "the plan" not in caplog.text

    again = Fleet(make_plan(round__goal=1, stop__rounds=2))
    assert again.run.where == "goes on at model version 1"
    again.store.close()
    assert "the plan" not in caplog.text, "nothing changed"

    changed = Fleet(make_plan(round__goal=1, stop__rounds=1, stop__epsilon=0.5, local__lr=0.2))
    assert changed.run.where == "finished before, at model version 1: 1 rounds done"
    changed.store.close()
    (line,) = (text for text in caplog.messages if "the plan" in text)
    assert line == (
        "the plan has changed since the run was served last: local.lr was not set and is 0.2; "
        "stop.rounds was 2 and is 1; stop.epsilon was not set and is 0.5"
    )


def test_values_of_ones_own_come_and_go(make_plan: PlanMaker) -> None:
    """The keys of [local.hyper] are the bundle's: none of them is a key of a newer version."""
    none, some = make_plan(local__hyper={}), make_plan(local__hyper={})
    some.local.hyper["mu"] = 0.1
    store = Fleet(none).store
    changes, row = look_at_plan(some, store.ledger)
    assert changes == ["local.hyper.mu was not set and is 0.1"]
    store.write([row])
    assert look_at_plan(none, store.ledger)[0] == ["local.hyper.mu was 0.1 and is left out"]
    store.close()


def test_a_plan_of_an_earlier_version_has_fewer_keys(make_plan: PlanMaker) -> None:
    plan = make_plan(round__goal=3)
    store = Fleet(plan).store
    store.write([Metadata(PLAN, '{"name": "test", "round": {"goal": 2}, "gone": 1}')])
    assert look_at_plan(plan, store.ledger)[0] == ["round.goal was 2 and is 3"]
    store.close()


SAID = "own algorithms are others than when the run was served last"


def test_a_start_says_which_own_algorithms_are_others(
    make_plan: PlanMaker, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level("INFO", "fleetlearn")
    name = "own_server_of_changes"
    source = tmp_path / f"{name}.py"

    def start(code: str, **plan: object) -> None:
        source.write_text(code)
        with extensions.apart():
            extensions.allow([name], tmp_path)
            Fleet(make_plan(round__goal=1, **plan)).store.close()
        sys.modules.pop(name, None)
        importlib.invalidate_caches()

    def said_last() -> str:
        return [text for text in caplog.messages if SAID in text][-1]

    mean = "def mean():\n    return lambda updates: updates.combination(updates.weights)\n"
    own = {"aggregation__aggregator": f"{name}:mean"}
    start(mean, **own)
    assert f"own algorithms: aggregation.aggregator = {name}:mean " in caplog.text
    start(mean, **own)
    assert SAID not in caplog.text
    start(f"{mean}# mended\n", **own)
    first, second = (
        hashlib.sha256(code.encode()).hexdigest()[:16] for code in (mean, f"{mean}# mended\n")
    )
    assert said_last().endswith(
        f"aggregation.aggregator was {name}:mean {first} and is {name}:mean {second}"
    )
    start(mean)
    assert said_last().endswith(
        f"aggregation.aggregator was {name}:mean {second} and is no own algorithm"
    )
    start(f"{mean}# again\n", **own)
    assert f"aggregation.aggregator was no own algorithm and is {name}:mean " in said_last()
    start(f"{mean}# again\n", **own)
    assert len([text for text in caplog.messages if SAID in text]) == 3, "once each"
