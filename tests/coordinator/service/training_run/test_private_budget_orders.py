"""What a run has spent never falls: any order of releases, abandoned rounds, restarts, kills,
changed plans, roll backs and copies, on a data directory."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from answering import NOW, Fleet, leases
from fleetlearn_coordinator import Plan
from fleetlearn_coordinator.privacy.budget import PrivacyAccount, make_account
from fleetlearn_coordinator.rounds.settings import Phase
from fleetlearn_coordinator.service.training_run.private_budget import (
    count_releases,
    read_account,
)
from fleetlearn_coordinator.storage.find_storage import find_storage
from fleetlearn_coordinator.storage.ledger import PRIVACY, Metadata, Row
from fleetlearn_coordinator.storage.sqlite_ledger import SqliteLedger
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec import structs
from peers import plan_text, update_of, write_test_bundle

pytestmark = pytest.mark.slow
DELTA = 1e-6


class KilledError(Exception):
    """Stands for SIGKILL: the process writes nothing more."""


class SpendingRuns(RuleBasedStateMachine):
    """One run, whose device answers at once. What the rules count is held against its ledger."""

    def __init__(self) -> None:
        super().__init__()
        self.home = Path(tempfile.mkdtemp())
        self.bundle = write_test_bundle(self.home / "test.bundle")
        self.data, self.copies, self.ghosts = self.home / "run", 0, 0
        self.releases, self.abandoned, self.highest = 0, 0, 0.0

    def teardown(self) -> None:
        self.fleet.store.close()
        shutil.rmtree(self.home)

    def plan(self, **settings: Any) -> Plan:
        usual = {"noise": 4.0, "delta": DELTA, "population": 100, "clip": 1.0, "epsilon": 6.0}
        named = {f"privacy__{key}": value for key, value in (usual | settings).items()}
        text = plan_text(self.bundle, self.data, "dp-fedavg", round__goal=1, **named)
        return Plan.parse(text, self.home)

    @initialize(mechanism=st.sampled_from(["gaussian", "local", "dp-ftrl"]))
    def begin(self, mechanism: str) -> None:
        self.current = self.plan(mechanism=mechanism, separation=1, participations=1000)
        self.start()

    def start(self) -> None:
        self.fleet = Fleet(self.current)
        self.fleet.run.resume(NOW)

    @property
    def account(self) -> PrivacyAccount:
        with find_storage(self.data).read_ledger() as ledger:
            found = read_account(ledger.metadata().get(PRIVACY))
        assert found is not None
        return found

    @property
    def goes_on(self) -> bool:
        return self.fleet.run.finished is None

    @precondition(lambda self: self.goes_on)
    @rule()
    def release(self) -> None:
        self.fleet.check_in("a")
        (task,) = self.fleet.run.engine.leases.values()
        (lease,) = [each for each in self.again() if each.task == task]
        self.fleet.report(lease, update_of(0.1))
        self.releases += 1

    def again(self) -> list[Any]:
        """The task that the device has, as it is told once more."""
        self.fleet.carry_out(self.fleet.run.engine.disconnect("a", 0.0))
        return leases(self.fleet.check_in("a"))

    @precondition(lambda self: self.goes_on)
    @rule()
    def abandon(self) -> None:
        self.ghosts += 1  # one that is lost again and again is given no task any more
        ghost, engine = f"ghost{self.ghosts}", self.fleet.run.engine
        self.fleet.carry_out(engine.disconnect("a", 0.0))
        self.fleet.check_in(ghost)
        if engine.phase is Phase.OPEN:
            self.fleet.carry_out(engine.disconnect(ghost, 0.0))
            self.fleet.carry_out(engine.tick(engine.deadline))
            self.abandoned += 1

    @rule()
    def restart(self) -> None:
        self.fleet.store.close()
        self.start()

    @precondition(lambda self: self.goes_on)
    @rule(after=st.booleans())
    def be_killed_at_a_release(self, after: bool) -> None:
        write = SqliteLedger.write

        def dying(ledger: SqliteLedger, rows: Any) -> None:
            made = any(is_account(row) for row in rows)
            if after or not made:
                write(ledger, rows)
            if made:
                raise KilledError

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SqliteLedger, "write", dying)
            with pytest.raises(KilledError):
                self.release()
        self.releases += after
        self.fleet.store.close()
        self.start()
        if not after:  # the report was safe: the start makes the model
            self.releases += 1

    @rule(noise=st.sampled_from([2.0, 4.0, 8.0]), epsilon=st.sampled_from([3.0, 6.0, 9.0]))
    def change_the_plan(self, noise: float, epsilon: float) -> None:
        before, local = self.account, self.account.is_local
        privacy = structs.replace(self.current.privacy, noise=noise, epsilon=epsilon)  # type: ignore[type-var]
        self.current = structs.replace(self.current, privacy=privacy)
        self.fleet.store.close()
        self.start()
        if local and before.segments[-1].rules != self.account.segments[-1].rules:
            self.abandoned = self.account.rounds - self.releases  # what was open may be counted

    @precondition(lambda self: self.goes_on and self.fleet.run.engine.version > 1)
    @rule()
    def roll_back(self) -> None:
        is_open = self.fleet.run.engine.phase is Phase.OPEN
        find_storage(self.data).requests.ask_for_roll_back(
            self.fleet.run.engine.version - 1, "command"
        )
        self.fleet.run.roll_backs.look(NOW.wall)
        self.fleet.run.work.do_work(NOW)
        self.abandoned += is_open

    @rule(released=st.integers(0, 2))
    def go_on_from_a_copy(self, released: int) -> None:
        self.copies += 1
        self.fleet.store.close()
        copy = self.home / f"copy{self.copies}"
        find_storage(self.data).copy_to(copy)
        count_releases(copy, released, NOW.wall, "command")
        self.data, self.releases = copy, self.releases + released
        self.current = structs.replace(self.current, data_dir=copy)
        self.start()

    @invariant()
    def nothing_is_lost(self) -> None:
        if not hasattr(self, "fleet"):
            return
        found = self.account
        assert found == self.fleet.run.budget.account
        assert found.releases == self.releases
        assert found.rounds == self.releases + (self.abandoned if found.is_local else 0)
        assert found.epsilon >= self.highest - 1e-9
        assert found == make_account(found.segments, found.budget, found.delta)
        assert found.budget is not None
        assert found.left == 0 or found.epsilon <= found.budget
        self.highest = found.epsilon


def is_account(row: Row) -> bool:
    return isinstance(row, Metadata) and row.key == PRIVACY


SpendingRuns.TestCase.settings = settings(max_examples=15, stateful_step_count=12, deadline=None)
test_whatever_happens_nothing_is_given_back = SpendingRuns.TestCase
