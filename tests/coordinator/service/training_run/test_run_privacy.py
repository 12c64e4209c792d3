"""A private run on its disk: its noise is a function of its secret and of each sum, whatever is
killed, rolled back or copied; and nobody is shown the secret."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from math import sqrt
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from answering import NOW, Fleet, leases
from fleetlearn_coordinator import Plan, read_model, read_status
from fleetlearn_coordinator.rounds.commands import Assign
from fleetlearn_coordinator.service.training_run.private_budget import count_releases
from fleetlearn_coordinator.service.training_run.saved_privacy import SECRET, STATE
from fleetlearn_coordinator.storage.find_storage import find_storage
from fleetlearn_coordinator.storage.ledger import ModelMade, Row
from fleetlearn_coordinator.storage.sqlite_ledger import SqliteLedger
from fleetlearn_protocol.vector import Vector
from peers import PlanMaker, update_of
from release_deaths import DEATHS, KilledError

CLIP, GOAL = 1000.0, 2
PRIVATE: dict[str, Any] = {
    "privacy__noise": 1.0,
    "privacy__delta": 1e-6,
    "privacy__population": 1000,
    "privacy__clip": CLIP,
    "round__goal": GOAL,
    "round__minimum": 1,
}
SPREAD = CLIP / GOAL
"""Standard deviation of the noise in each element of a released mean."""


def private_plan(make_plan: PlanMaker, **more: Any) -> Plan:
    return make_plan("dp-fedavg", **(PRIVATE | more))


def copied(plan: Plan, folder: Path) -> Plan:
    """A copy of the run that goes on as its original does."""
    shutil.copytree(plan.data_dir, folder)
    count_releases(folder, 0, NOW.wall, "command")
    return msgspec.structs.replace(plan, data_dir=folder)


def train(fleet: Fleet, tasks: Sequence[Assign], values: Sequence[float]) -> list[Assign]:
    """One round, with these updates. Returns the next round's tasks."""
    commands: list[Any] = []
    for lease, value in zip(tasks, values, strict=True):
        commands += fleet.report(lease, update_of(value))
    return leases(commands)


def newest(fleet: Fleet) -> Vector:
    return fleet.run.models.newest.model


def is_noise(values: Vector, spread: float) -> bool:
    """Whether independent noise of this standard deviation is in each element, and nothing that is
    much larger."""
    return abs(float(values.astype(np.float64).std()) / spread - 1) < 6 / sqrt(2 * values.size)


def test_a_round_releases_the_mean_of_clipped_updates_and_its_noise(make_plan: PlanMaker) -> None:
    fleet = Fleet(private_plan(make_plan))
    before = newest(fleet).copy()
    first = update_of(1.0) * np.float32(1000)  # far longer than the clip norm
    tasks = leases(fleet.check_in("a", "b"))
    for lease in tasks:
        fleet.report(lease, first)
    moved = newest(fleet) - before
    clean = first * (CLIP / np.linalg.norm(first))
    assert is_noise(moved - clean, SPREAD)
    state = fleet.run.models.newest.privacy
    assert state is not None
    assert (state.releases, state.clip, len(state.secret)) == (1, CLIP, 32)
    fleet.store.close()


def test_the_noise_is_the_same_however_few_devices_come(make_plan: PlanMaker) -> None:
    """One of the two wanted vanishes. What is divided is not who came."""
    fleet = Fleet(private_plan(make_plan))
    before = newest(fleet).copy()
    here, gone = leases(fleet.check_in("a", "b"))
    fleet.carry_out(fleet.run.engine.disconnect(gone.device, 0.0))
    fleet.report(here, update_of(1e-6))
    fleet.carry_out(fleet.run.engine.tick(1000.0))
    assert fleet.run.engine.version == 1
    assert is_noise(newest(fleet) - before, SPREAD)
    fleet.store.close()


@pytest.mark.parametrize("moment", DEATHS)
def test_a_kill_between_noise_and_commit_gives_the_same_bits(
    make_plan: PlanMaker, tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two copies of a run at the same open round: one closes it, the other is killed as it does."""
    plan = private_plan(make_plan)
    fleet = Fleet(plan)
    first, last = train(fleet, leases(fleet.check_in("a", "b")), [1.0, 2.0])
    fleet.report(first, update_of(3.0))
    fleet.store.close()
    copy = tmp_path / "copy"
    undisturbed = Fleet(copied(plan, copy))
    undisturbed.run.resume(NOW)
    undisturbed.report(last, update_of(4.0))
    undisturbed.store.close()

    fleet = Fleet(plan)
    fleet.run.resume(NOW)
    with monkeypatch.context() as patch:
        DEATHS[moment](patch)
        with pytest.raises(KilledError):
            fleet.report(last, update_of(4.0))
    fleet.store.close()
    fleet = Fleet(plan)
    fleet.run.resume(NOW)
    fleet.run.work.do_work(NOW)
    assert fleet.run.models.newest.privacy is not None
    assert fleet.run.models.newest.privacy.releases == 2 == fleet.run.engine.version
    fleet.store.close()
    assert read_model(plan.data_dir)[1].tobytes() == read_model(copy)[1].tobytes()


def test_copies_of_a_run_that_go_different_ways_have_independent_noise(
    make_plan: PlanMaker, tmp_path: Path
) -> None:
    """A restored backup has the secret and the number of the release. With the noise of these two
    alone, the difference of both models would be the difference of the sums, without any noise."""
    plan = private_plan(make_plan)
    fleet = Fleet(plan)
    tasks = train(fleet, leases(fleet.check_in("a", "b")), [1.0, 2.0])
    fleet.store.close()
    moved = []
    for copy, value in (("one", 1.0), ("other", 1.0 + 1e-3)):
        own = Fleet(copied(plan, tmp_path / copy))
        own.run.resume(NOW)
        before = newest(own).copy()
        train(own, tasks, [1.0, value])
        assert own.run.engine.version == 2
        moved.append(newest(own) - before)
        own.store.close()
    assert is_noise(moved[0] - moved[1], SPREAD * sqrt(2))


def test_a_roll_back_takes_no_release_back_and_no_noise_occurs_twice(make_plan: PlanMaker) -> None:
    """The same updates on the same model, once before a roll back and once after it."""
    plan = private_plan(make_plan)
    fleet = Fleet(plan)
    tasks = leases(fleet.check_in("a", "b"))
    tasks = train(fleet, tasks, [1.0, 2.0])
    one = newest(fleet).copy()
    find_storage(plan.data_dir).requests.ask_for_roll_back(0, "command")
    assert fleet.run.roll_backs.look(NOW.wall)
    tasks = leases(fleet.run.work.do_work(NOW))
    for restarted in (False, True):
        if restarted:
            fleet.store.close()
            fleet = Fleet(plan)
            fleet.run.resume(NOW)
        state = fleet.run.models.newest.privacy
        assert state is not None
        assert (fleet.run.models.newest.version, state.releases) == (2, 1)
    train(fleet, tasks, [1.0, 2.0])
    assert fleet.run.models.newest.version == 3
    assert is_noise(newest(fleet) - one, SPREAD * sqrt(2))
    fleet.store.close()


def test_the_secret_is_made_once_whenever_a_plan_becomes_private(make_plan: PlanMaker) -> None:
    plain = make_plan(round__goal=GOAL, round__weighting="uniform", local__evaluate=False)
    fleet = Fleet(plain)
    assert fleet.store.ledger.get(SECRET) is None
    assert fleet.run.models.newest.privacy is None
    fleet.store.close()
    secrets = []
    for plan in (private_plan(make_plan), private_plan(make_plan, privacy__noise=2.0)):
        fleet = Fleet(plan)
        fleet.run.resume(NOW)
        secrets.append(fleet.store.ledger.get(SECRET))
        tasks = leases(fleet.check_in("a", "b"))
        train(fleet, tasks, [1.0, 2.0])
        fleet.store.close()
    assert len({*secrets}) == 1
    fleet = Fleet(plan)
    state = fleet.run.models.newest.privacy
    assert state is not None
    assert state.secret.hex() == secrets[0]
    assert (state.releases, state.began) == (2, 1), "another noise is another stretch"
    fleet.store.close()


def test_a_new_run_has_its_secret_in_the_batch_of_its_first_model(
    make_plan: PlanMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[list[Row]] = []
    write = SqliteLedger.write
    monkeypatch.setattr(
        SqliteLedger,
        "write",
        lambda ledger, rows: (batches.append(list(rows)), write(ledger, rows))[1],
    )
    fleet = Fleet(private_plan(make_plan))
    keys = [{getattr(row, "key", type(row)) for row in batch} for batch in batches]
    assert [{SECRET, STATE, ModelMade} <= batch for batch in keys].count(True) == 1
    assert sum(SECRET in batch for batch in keys) == 1
    fleet.store.close()


def test_nobody_is_shown_the_secret(
    make_plan: PlanMaker, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    plan = private_plan(make_plan)
    fleet = Fleet(plan)
    train(fleet, leases(fleet.check_in("a", "b")), [1.0, 2.0])
    secret = fleet.store.ledger.get(SECRET)
    shown = [repr(fleet.run.models.newest), repr(fleet.run.models.newest.privacy), caplog.text]
    fleet.store.close()
    shown += [repr(read_status(plan.data_dir))]
    assert len(secret) == 64
    for text in shown:
        assert secret not in text
        assert repr(bytes.fromhex(secret)) not in text
