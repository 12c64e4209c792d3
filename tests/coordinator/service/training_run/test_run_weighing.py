"""Weighed updates without a network: restarts at any point, and a bound on norms, in the server."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from itertools import pairwise
from math import exp
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from answering import NOW, Fleet, leases
from fleetlearn_coordinator import Plan, read_model, read_status
from fleetlearn_coordinator.rounds.commands import Commit
from fleetlearn_coordinator.storage import store
from fleetlearn_coordinator.storage.errors import StoreError
from fleetlearn_coordinator.storage.sqlite_ledger import DATABASE
from fleetlearn_protocol import Code
from fleetlearn_protocol.errors import ProtocolError
from fleetlearn_protocol.messages import Accepted, Evaluation, Refused
from fleetlearn_protocol.vector import Vector
from line_bundle import write_line_bundle
from peers import BUFFERED, SIZE, PlanMaker, fleet, plan_text, update_of

PLANS: dict[str, dict[str, Any]] = {
    "fednova": {"recipe": "fednova"},
    "q-fedavg": {"recipe": "q-fedavg", "aggregation__q": 2.0},
    "clipped": {"aggregation__max_norm": 3.0, "aggregation__norm_quantile": 0.5},
    "both": {"recipe": "q-fedavg", "aggregation__max_norm": 3.0, "aggregation__norm_quantile": 0.5},
    "median": {"recipe": "median", "aggregation__max_norm": 3.0},
    "tiny losses": {"recipe": "q-fedavg", "aggregation__q": 5.0},
    "far apart": {"recipe": "fedavg"},
}
LOSSES = {"tiny losses": 1e-6}
"""Plan -> what its losses are multiplied by."""
MAGNITUDES = {"far apart": 10.0 ** np.array([-12, 9, 0, -3, -30, 4, -2, -7, -12, -14, -16, -16])}
"""Plan -> what its updates are multiplied by."""
RANDOM = np.random.default_rng(7)
UPDATES: list[Vector] = [
    RANDOM.standard_normal(5).astype(np.float32) * scale for scale in range(1, 13)
]


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_restarts_make_the_same_model_whatever_the_weighing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, asynchronous: bool
) -> None:
    """A new process between any two reports, sums in files after each second update, and the
    reports in another order: the same models and summaries, bit for bit."""
    monkeypatch.setattr(store, "SPOOL_FILES_HELD", 2)
    bundle = write_line_bundle(
        tmp_path / "line.bundle", references=["anchor"], optimizer="sgd"
    ).path
    made = []
    for restarts in (False, True):
        settings = {
            "recipe": "fedavg",
            "local__lr": 0.1,
            "round__goal": 4,
            "stop__rounds": 3,
            **PLANS[name],
        }
        settings |= {
            key: value for key, value in BUFFERED.items() if asynchronous and key not in settings
        }
        if asynchronous:
            settings |= {"round__participation": "asynchronous", "round__concurrency": 4}
        data_dir = tmp_path / f"run-{restarts}"
        plan = Plan.parse(plan_text(bundle, data_dir, **settings), tmp_path)
        names = ["a", "b", "c", "d"]
        running = Fleet(plan)
        running.check_in(*names)
        for begin in range(0, 12, 4):
            for number in range(4)[:: -1 if restarts and not asynchronous else 1]:
                if restarts:
                    running.store.close()
                    running = Fleet(plan)
                    running.run.resume(NOW)
                    running.check_in(*names)
                row, device = begin + number, names[number]
                lease = next(
                    each for each in leases(running.check_in(device)) if each.device == device
                )
                evaluation = Evaluation(10, 10.0 * (row + 1) * LOSSES.get(name, 1.0), {})
                update = UPDATES[row] * np.float32(MAGNITUDES.get(name, np.ones(12))[row])
                counts = {"steps": row + 1, "examples": row + 5}
                running.report(lease, update, evaluation=evaluation, **counts)
        running.store.close()
        rows = [row.summary for row in read_status(data_dir).rounds if row.outcome == "committed"]
        kept = [
            {key: row.get(key) for key in ("norm", "weighing", "change", "reports")} for row in rows
        ]
        made.append((read_model(data_dir)[1].tobytes(), kept))
    assert len(made[0][1]) == 3
    assert made[0] == made[1]


@pytest.mark.parametrize("dies", [False, True])
def test_an_update_that_came_early_has_the_bound_of_its_own_round(
    make_plan: PlanMaker, dies: bool
) -> None:
    """c and d report while the first round is committed, whose bound is 2. All were longer, so the
    next bound is 2 * exp(0.5), also if the process dies before the commit."""
    rules = {
        "aggregation__max_norm": 2.0,
        "aggregation__norm_quantile": 0.5,
        "aggregation__norm_rate": 1.0,
    }
    plan = make_plan(
        **BUFFERED | {"round__concurrency": 4, "staleness__function": "constant"} | rules
    )
    running = Fleet(plan)
    tasks = {lease.device: lease for lease in leases(running.check_in("a", "b", "c", "d"))}
    update = update_of(0.0)
    update[0] = 100.0
    for device in "abcd":
        running.save_update(tasks[device], update, add=False)
        commands = running.run.record(
            running.run.engine.count_report(device, tasks[device].task, 0.0), NOW
        )
        if not dies:
            for command in commands:
                if isinstance(command, Commit):
                    running.run.begin_commit(command, NOW)
    if dies:
        running.store.close()
        running = Fleet(plan)
        heard = running.run.resume(NOW)
    else:
        heard = running.run.work.do_work(NOW)
    while commits := [command for command in heard if isinstance(command, Commit)]:
        heard = running.run.commit(commits[0], NOW)
    running.store.close()
    models = [read_model(plan.data_dir, version)[1][0] for version in range(3)]
    assert models[1] - models[0] == pytest.approx(2.0, abs=1e-6)
    assert models[2] - models[1] == pytest.approx(2.0 * exp(0.5), abs=1e-6)


def test_a_bound_follows_the_updates_over_restarts(make_plan: PlanMaker) -> None:
    """By hand: norms 1 and 3 with a bound of 2: half of them within, as wanted. Then 3 and 5:
    none."""
    plan = make_plan(
        aggregation__max_norm=2.0, aggregation__norm_quantile=0.5, aggregation__norm_rate=1.0
    )
    bounds = []
    for norms in ((1.0, 3.0), (3.0, 5.0), (3.0, 5.0)):
        running = Fleet(plan)
        running.run.resume(NOW)
        found = {lease.device: lease for lease in leases(running.check_in("a", "b"))}
        before = running.run.models.newest.model.copy()
        for lease, norm in zip(found.values(), norms, strict=True):
            update = update_of(0.0)
            update[0] = norm
            running.report(lease, update)
        committed = [row for row in read_status(plan.data_dir).rounds if row.outcome == "committed"]
        bounds.append(max(committed, key=lambda row: row.number).summary["norm"])
        counted = [min(norm, bounds[-1]["bound"]) for norm in norms]
        moved = float(running.run.models.newest.model[0]) - float(before[0])
        assert moved == pytest.approx(sum(counted) / 2, abs=1e-6)
        running.store.close()
    assert [each["bound"] for each in bounds] == [2.0, 2.0, 2.0 * exp(0.5)]
    assert [each["clipped"] for each in bounds] == [1, 2, 1]
    assert [before["next"] == after["bound"] for before, after in pairwise(bounds)] == [True, True]


def test_one_report_of_norm_a_million_changes_nothing(make_plan: PlanMaker) -> None:
    """Through the server: it is refused before it is accepted, and the round is that of the
    others."""
    plan = make_plan(aggregation__max_norm=200.0, aggregation__norm_action="refuse")

    async def play() -> None:
        async with asyncio.timeout(30), fleet(plan) as (coordinator, join):
            hostile, honest = await join("a"), await join("b")
            before = coordinator.run.models.newest.model.copy()
            refused = await hostile.upload(await hostile.task(), update_of(1e6 / SIZE**0.5))
            assert isinstance(refused, Refused)
            assert refused.code is Code.NORM_TOO_LARGE
            assert "L2 norm is 1e+06; the plan's bound is 200" in refused.text
            assert isinstance(await honest.upload(await honest.task(), update_of(0.5)), Accepted)
            np.testing.assert_array_equal(
                coordinator.run.models.newest.model, before + np.float32(0.5)
            )

    asyncio.run(play())
    summary = read_status(plan.data_dir).rounds[0].summary
    assert summary["dropped"] == {"rejected: norm-too-large": 1}
    assert summary["norm"] == {"bound": 200.0, "clipped": 0, "refused": 1, "next": 200.0}


def test_a_clipped_report_of_norm_a_million_counts_as_one_of_the_bound(
    make_plan: PlanMaker,
) -> None:
    running = Fleet(make_plan(aggregation__max_norm=1.0))
    before = running.run.models.newest.model.copy()
    for lease, value in zip(
        leases(running.check_in("a", "b")), (1e6 / SIZE**0.5, 0.0), strict=True
    ):
        running.report(lease, update_of(value))
    assert float(
        np.linalg.norm(running.run.models.newest.model.astype(np.float64) - before)
    ) == pytest.approx(0.5, rel=1e-4)
    running.store.close()


def test_a_refused_report_leaves_no_trace(make_plan: PlanMaker) -> None:
    plan = make_plan(aggregation__max_norm=1.0, aggregation__norm_action="refuse")
    running = Fleet(plan)
    lease, _ = leases(running.check_in("a", "b"))
    with pytest.raises(ProtocolError) as refused:
        running.save_update(lease, update_of(1.0))
    assert refused.value.code is Code.NORM_TOO_LARGE
    assert running.run.reports.round.accepted == []
    assert running.run.work.next_work() is None
    running.store.close()


@pytest.mark.parametrize(
    ("settings", "expected"), [({}, None), ({"aggregation__max_norm": 9.0}, SIZE**0.5)]
)
def test_norms_are_in_the_ledger_where_the_plan_needs_them(
    make_plan: PlanMaker, settings: dict[str, Any], expected: float | None
) -> None:
    running = Fleet(make_plan(**settings))
    first, _ = leases(running.check_in("a", "b"))
    running.report(first, update_of(1.0))
    running.store.close()
    with closing(sqlite3.connect(running.run.plan.data_dir / DATABASE)) as database:
        rows = database.execute("SELECT norm, trained_norm FROM tasks WHERE device='a'").fetchall()
    assert rows == [(expected, expected)]


def test_a_rule_that_is_new_to_an_open_round(make_plan: PlanMaker) -> None:
    """The plan was changed while the round was open: what was accepted before counts, with a norm
    of 0."""
    running = Fleet(make_plan())
    first, _ = leases(running.check_in("a", "b"))
    running.report(first, update_of(1.0))
    running.store.close()
    running = Fleet(make_plan("q-fedavg", local__lr=0.1))
    running.run.resume(NOW)
    (second,) = leases(running.check_in("b"))
    running.report(second, update_of(1.0))
    assert running.run.engine.version == 1
    running.store.close()


@pytest.mark.parametrize("action", ["clip", "refuse"])
def test_buffers_move_no_further_than_the_bound(tmp_path: Path, action: str) -> None:
    """``seen`` is 7: one of two devices says -1e30, the other 8. With a bound of 3 the mean is
    (4 + 8) / 2."""
    bundle = write_line_bundle(
        tmp_path / "line.bundle", references=["anchor"], optimizer="sgd"
    ).path
    rules = {"aggregation__max_norm": 3.0, "aggregation__norm_action": action, "local__lr": 0.1}
    running = Fleet(Plan.parse(plan_text(bundle, tmp_path / "run", **rules), tmp_path))
    for lease, seen in zip(leases(running.check_in("a", "b")), (-1e30, 8.0), strict=True):
        parts = {"update": np.zeros(5, np.float32), "buffers": np.array([seen], np.float32)}
        running.save_parts(lease, parts)
        running.carry_out(running.run.engine.count_report(lease.device, lease.task, 0.0))
    assert running.run.models.newest.model[3] == 6.0
    running.store.close()


def test_another_rule_goes_on_with_the_saved_sum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buffers have a sum of their own with every rule: 7 + 3 and 7 + 5 are 11 together."""
    monkeypatch.setattr(store, "SPOOL_FILES_HELD", 1)
    bundle = write_line_bundle(
        tmp_path / "line.bundle", references=["anchor"], optimizer="sgd"
    ).path
    plan = Plan.parse(plan_text(bundle, tmp_path / "run", local__lr=0.1), tmp_path)
    changed = msgspec.structs.replace(
        plan, aggregation=msgspec.structs.replace(plan.aggregation, normalise=True)
    )
    for each, moved in ((plan, 3.0), (changed, 5.0)):
        running = Fleet(each)
        running.run.resume(NOW)
        update = np.array([0.5, 0.5, 0.5, moved, 0.5], np.float32)
        running.report(leases(running.check_in("a", "b"))[-1], update)
        model = running.run.models.newest.model
        running.store.close()
    assert model[3] == 11.0


def test_reports_of_an_earlier_version_are_refused_by_name(tmp_path: Path) -> None:
    """They have the buffers' differences in the update, and no values."""
    bundle = write_line_bundle(
        tmp_path / "line.bundle", references=["anchor"], optimizer="sgd"
    ).path
    plan = Plan.parse(plan_text(bundle, tmp_path / "run", local__lr=0.1), tmp_path)
    running = Fleet(plan)
    running.save_parts(leases(running.check_in("a", "b"))[0], {"update": UPDATES[0]})
    running.store.close()
    running = Fleet(plan)
    text = (
        "has the parts update; this version needs update, buffers. It was accepted by an earlier "
        "version of fleetlearn"
    )
    with pytest.raises(StoreError, match=f"{text}.* gives up what was reported in round 1"):
        running.run.resume(NOW)
    running.store.close()
