"""A run with correlated noise on its disk: one stream of noise, whatever is restarted, rolled back,
changed or copied; and no file tells about it."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from math import sqrt
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from answering import NOW, Fleet, leases
from fleetlearn_coordinator import Plan
from fleetlearn_coordinator.aggregation.privacy import blt
from fleetlearn_coordinator.aggregation.privacy.blt import strategy_for
from fleetlearn_coordinator.aggregation.privacy.sealed import KEY_WORDS
from fleetlearn_coordinator.aggregation.privacy.state import PrivacyState
from fleetlearn_coordinator.service.canary.about import FirstModel
from fleetlearn_coordinator.service.canary.first_model import find_first_model
from fleetlearn_coordinator.service.training_run.private_budget import count_releases
from fleetlearn_coordinator.service.training_run.saved_privacy import NOISE, SECRET
from fleetlearn_coordinator.storage.errors import StoreError
from fleetlearn_coordinator.storage.find_storage import find_storage
from fleetlearn_coordinator.storage.ledger import Metadata
from fleetlearn_coordinator.storage.store import OPTIMIZER_STATE
from numpy.typing import NDArray
from peers import SIZE, PlanMaker, update_of
from safetensors.numpy import load_file
from strategy_matrices import toeplitz

CLIP, GOAL, ROUNDS = 1000.0, 2, 6
SPREAD = CLIP / GOAL


def ftrl_plan(make_plan: PlanMaker, **more: Any) -> Plan:
    usual: dict[str, Any] = {
        "privacy__noise": 1.0,
        "privacy__delta": 1e-6,
        "privacy__population": 1000,
        "privacy__clip": CLIP,
        "privacy__separation": ROUNDS,
        "privacy__participations": 1,
        "round__goal": GOAL,
        "round__minimum": 1,
        "stop__rounds": ROUNDS,
    }
    return make_plan("dp-ftrl", **(usual | more))


class NoisyRun:
    """A run whose updates are nothing beside the noise, so that a move of the model is the noise.
    Two new devices take part in each round."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.fleet = plan, Fleet(plan)
        self.moves: list[NDArray[np.float64]] = []
        """How far each round moved the model."""

    def train(self, rounds: int = 1) -> None:
        for _ in range(rounds):
            before, number = self.model, len(self.moves)
            for lease in leases(self.fleet.check_in(f"a{number}", f"b{number}")):
                self.fleet.report(lease, update_of(1e-6))
            self.moves.append(self.model - before)

    def restart(self, plan: Plan | None = None) -> None:
        self.fleet.store.close()
        self.plan = plan or self.plan
        self.fleet = Fleet(self.plan)
        self.fleet.run.resume(NOW)

    @property
    def model(self) -> NDArray[np.float64]:
        return self.fleet.run.models.newest.model.astype(np.float64)

    @property
    def privacy(self) -> PrivacyState:
        state = self.fleet.run.models.newest.privacy
        assert state is not None
        return state

    def buffers(self) -> dict[str, bytes]:
        return {name: values.tobytes() for name, values in self.privacy.buffers.items()}


def copied(plan: Plan, folder: Path, releases: int) -> Plan:
    """A copy of the run, whose original has made this many releases since."""
    shutil.copytree(plan.data_dir, folder)
    count_releases(folder, releases, NOW.wall, "command")
    return msgspec.structs.replace(plan, data_dir=folder)


def is_one_stream(moves: Sequence[NDArray[np.float64]], planned: int = ROUNDS) -> bool:
    """Whether these moves n are noise of one stream: C n is independent, with the plan's standard
    deviation."""
    strategy = strategy_for(planned, ROUNDS, 1)
    z = toeplitz(strategy.coefficients(len(moves))) @ np.array(moves) / SPREAD
    covariance = z @ z.T / SIZE
    return bool(np.abs(covariance - np.eye(len(moves))).max() < 6 * sqrt(2 / SIZE))


def test_a_run_has_one_stream_of_correlated_noise(make_plan: PlanMaker) -> None:
    run = NoisyRun(ftrl_plan(make_plan))
    run.train(ROUNDS)
    assert run.privacy.releases == ROUNDS == run.fleet.run.engine.version
    assert is_one_stream(run.moves)
    # The check can fail: independent noise, a stream that begins again, a release that is missing.
    random = np.random.default_rng(1).normal(size=(ROUNDS, SIZE)) * SPREAD
    assert not is_one_stream(list(random))
    assert not is_one_stream([*run.moves[:3], *run.moves[:3]])
    assert not is_one_stream(run.moves[1:])
    run.fleet.store.close()


def test_restarts_change_no_bit(make_plan: PlanMaker, tmp_path: Path) -> None:
    """A run that is restarted before each release, and one that never is. Both have the same
    secret."""
    plan = ftrl_plan(make_plan)
    NoisyRun(plan).fleet.store.close()
    copy = copied(plan, tmp_path / "copy", 0)
    one, other = NoisyRun(plan), NoisyRun(copy)
    for _ in range(ROUNDS):
        held = one.buffers()
        one.restart()
        assert one.buffers() == held
        one.train()
        other.train()
        assert one.buffers() == other.buffers()
    assert one.model.tobytes() == other.model.tobytes()
    assert is_one_stream(one.moves)
    for run in (one, other):
        run.fleet.store.close()


def test_a_roll_back_takes_nothing_back_of_the_noise(make_plan: PlanMaker) -> None:
    """The model goes back, the stream of noise goes on: what was released stays released."""
    run = NoisyRun(ftrl_plan(make_plan, stop__rounds=ROUNDS + 1))
    run.train(3)
    held = run.buffers()
    find_storage(run.plan.data_dir).requests.ask_for_roll_back(1, "command")
    assert run.fleet.run.roll_backs.look(NOW.wall)
    run.fleet.run.work.do_work(NOW)
    assert run.fleet.run.engine.version == 4
    for restarts in (False, True):
        if restarts:
            run.restart()
        assert run.buffers() == held
        assert (run.privacy.releases, run.privacy.began) == (3, 0)
    run.train(2)
    assert is_one_stream(run.moves, ROUNDS + 1)
    run.fleet.store.close()


CHANGES: list[dict[str, Any]] = [
    {"privacy__noise": 2.0},
    {"privacy__clip": 2 * CLIP},
    {"privacy__separation": 3},
    {"privacy__participations": 2},
    {"stop__rounds": 2 * ROUNDS, "privacy__participations": 1},
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: next(iter(change)))
def test_a_changed_plan_begins_another_stream(make_plan: PlanMaker, change: dict[str, Any]) -> None:
    run = NoisyRun(ftrl_plan(make_plan))
    run.train(2)
    assert any(any(held) for held in run.buffers().values())
    run.restart(ftrl_plan(make_plan, **change))
    assert not any(any(held) for held in run.buffers().values())
    assert (run.privacy.releases, run.privacy.began) == (2, 2)
    run.restart()  # once more before a release: still at the beginning
    assert (run.privacy.releases, run.privacy.began) == (2, 2)
    run.train(2)
    held = run.buffers()
    run.restart()
    assert run.buffers() == held
    assert (run.privacy.releases, run.privacy.began) == (4, 2)
    run.fleet.store.close()


def test_a_version_that_finds_another_strategy_begins_another_stream(
    make_plan: PlanMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The buffers mean nothing with other parameters; and what was released is accounted for with
    those that it was made with."""
    run = NoisyRun(ftrl_plan(make_plan))
    run.train(2)
    account = run.fleet.run.budget.account
    assert account is not None
    forget = strategy_for.cache_clear, blt.correlated_sensitivity.cache_clear
    with monkeypatch.context() as patch:
        patch.setattr(blt, "search", lambda *plan: ((0.5, 0.25), (0.125, 0.0625)))
        [each() for each in forget]
        run.restart()
        assert not any(any(held) for held in run.buffers().values())
        assert (run.privacy.releases, run.privacy.began) == (2, 2)
        after = run.fleet.run.budget.account
        assert after is not None
        assert after.epsilon == account.epsilon
        run.train(2)
        after = run.fleet.run.budget.account
        assert [each.releases for each in after.segments] == [2, 2]
        assert after.segments[1].mu ** 2 == 1 + 0.1875**2
        run.fleet.store.close()
    [each() for each in forget]


def test_other_noise_in_between_begins_another_stream(make_plan: PlanMaker) -> None:
    run = NoisyRun(ftrl_plan(make_plan))
    run.train(2)
    run.restart(ftrl_plan(make_plan, privacy__mechanism="gaussian"))
    run.train()
    assert run.buffers() == {}
    run.restart(ftrl_plan(make_plan))
    assert (run.privacy.releases, run.privacy.began) == (3, 3)
    assert not any(any(held) for held in run.buffers().values())
    run.fleet.store.close()


def test_a_copy_whose_original_went_on_begins_another_stream(
    make_plan: PlanMaker, tmp_path: Path
) -> None:
    """Two releases that both follow the same one are no part of one stream: its matrix has a row
    for the first, a row for the second, and a row between."""
    run = NoisyRun(ftrl_plan(make_plan))
    run.train(2)
    run.fleet.store.close()
    for releases in (0, 2):
        own = NoisyRun(copied(run.plan, tmp_path / f"copy-{releases}", releases))
        begins = not any(any(held) for held in own.buffers().values())
        assert begins == (releases > 0)
        assert own.privacy.releases == 2 + releases
        assert own.privacy.began == (4 if begins else 0)
        own.fleet.store.close()


def test_a_models_file_does_not_tell_about_the_noise(make_plan: PlanMaker) -> None:
    """With the buffers before and after a release, anybody could compute the sum: S' - theta S is
    the noise. Nothing like that is in two files without the secret."""
    run = NoisyRun(ftrl_plan(make_plan, models__last=5))
    run.train(3)
    theta = strategy_for(ROUNDS, ROUNDS, 1).theta[0]
    files = [
        load_file(Path(run.plan.data_dir) / f"models/v{version:08d}.safetensors")
        for version in (2, 3)
    ]
    name = f"{OPTIMIZER_STATE}{NOISE}sum_0"
    before, after = (each[name][KEY_WORDS:] for each in files)
    assert before.shape == (SIZE,)
    held = run.privacy.buffers["sum_0"]

    def likeness(found: NDArray[np.int64]) -> float:
        return abs(float(np.corrcoef(found, run.moves[2])[0, 1]))

    state_before = np.rint((held - run.moves[2]) / theta)  # what the check would find
    assert likeness(held - theta * state_before) > 0.99
    for guess in (after - theta * before, after, before, after ^ before):
        assert likeness(guess) < 6 / sqrt(SIZE)
    run.fleet.store.close()


def test_a_canary_takes_the_model_without_the_noise(make_plan: PlanMaker) -> None:
    run = NoisyRun(ftrl_plan(make_plan))
    run.train(2)
    manifest = run.fleet.run.bundle.manifest
    found = find_first_model(run.plan, manifest, FirstModel())
    assert found is not None
    assert (found.vector == run.fleet.run.models.newest.model).all()
    assert found.state == {}
    run.fleet.store.close()


def test_buffers_of_another_secret_are_refused(make_plan: PlanMaker) -> None:
    run = NoisyRun(ftrl_plan(make_plan))
    run.train(2)
    run.fleet.store.write([Metadata(SECRET, "00" * 32)])
    run.fleet.store.close()
    with pytest.raises(StoreError, match="sum_0 is damaged, or another run's; put the data"):
        Fleet(run.plan)


def test_a_finished_run_has_made_no_more_releases_than_planned(make_plan: PlanMaker) -> None:
    run = NoisyRun(ftrl_plan(make_plan))
    run.train(ROUNDS)
    assert leases(run.fleet.check_in("late")) == []
    run.restart()
    assert leases(run.fleet.check_in("late")) == []
    assert run.privacy.releases == ROUNDS
    run.fleet.store.close()
