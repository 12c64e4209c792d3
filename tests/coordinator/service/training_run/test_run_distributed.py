"""Runs whose devices add the noise under their masks: what their models are made of, and what is
spent by sums that came to no model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from answering import NOW, leases
from fleetlearn_coordinator.plan.plan import Plan
from fleetlearn_coordinator.privacy.accounting import gaussian_epsilon
from fleetlearn_coordinator.privacy.budget import MOST, PrivacyAccount
from fleetlearn_coordinator.rounds.commands import Abandon, Assign, Finish
from fleetlearn_coordinator.rounds.settings import Phase
from fleetlearn_coordinator.secure.helper_client import HelperRefusedError, NoHelperError
from fleetlearn_coordinator.service.training_run.private_budget import read_account
from fleetlearn_coordinator.service.training_run.roll_back import ask_to_roll_back
from fleetlearn_coordinator.service.training_run.saved_mask_set import KEY
from fleetlearn_coordinator.storage.find_storage import find_storage
from fleetlearn_coordinator.storage.ledger import PRIVACY, Metadata
from fleetlearn_protocol.errors import Code
from fleetlearn_protocol.secure.distributed_noise import noise_of_device, noisy_sum
from fleetlearn_protocol.secure.helper_messages import MaskSumRefusal, RefusalName
from fleetlearn_protocol.secure.pairwise_messages import KEYS, UNMASKING
from masked_fleet import CalledHelper, MaskedFleet, secure_settings
from peers import BUFFERED, PlanMaker, update_of

DEVICES = ("a", "b", "c")
NOISY: dict[str, Any] = {
    "privacy__mechanism": "distributed",
    "privacy__clip": 300.0,
    "privacy__noise": 4.0,
    "privacy__epsilon": 2.3,
    "privacy__delta": 1e-6,
    "privacy__population": 1000,
    "local__evaluate": False,
}
"""Four releases cost 2.26, five more than the budget."""


@pytest.fixture(autouse=True)
def served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans with [secure] are served, whether or not their helper is there."""
    monkeypatch.setattr(Plan, "check_against", Plan.check_bundle)


@pytest.fixture
def helper(tmp_path: Path) -> CalledHelper:
    return CalledHelper(tmp_path, DEVICES)


def settings(helper: CalledHelper, **changed: Any) -> dict[str, Any]:
    given = secure_settings(helper) | NOISY | changed
    given.pop("secure__clip")
    return given


def account_in(plan: Plan) -> PrivacyAccount:
    with find_storage(plan.data_dir).read_ledger() as ledger:
        found = read_account(ledger.metadata().get(PRIVACY))
    assert found is not None
    return found


def spent_by(rounds: int) -> float:
    """Epsilon of so many Gaussian mechanisms with noise 4, in each of which a device may be."""
    return gaussian_epsilon(rounds**0.5 / 4, 1e-6)


def report_all(fleet: MaskedFleet, *names: str) -> Any:
    """Let these devices train and report; by default all, which closes the round. Returns what the
    helper is asked."""
    engine = fleet.run.engine
    fleet.check_in(*(name for name in DEVICES if name not in engine.leases))
    for device, task in [*engine.leases.items()]:
        if device in (names or DEVICES):
            number, version = engine.round_of(task), engine.version
            fleet.report_masked(
                Assign(device, task, number, 0, 0.0, False, version), update_of(0.5)
            )
    return fleet.sums.question


def wrong_masks(fleet: MaskedFleet) -> np.ndarray[Any, Any]:
    size = fleet.run.models.newest.model.size + 1
    return np.random.default_rng(0).integers(0, 2**32, size).astype(np.uint32)


def test_a_model_is_made_of_the_sum_with_the_noise_of_its_devices_and_no_other(
    make_plan: PlanMaker, helper: CalledHelper
) -> None:
    """Two of three report, the fewest: the noise is the plan's, four clip norms of the sum."""
    plan = make_plan(**settings(helper))
    fleet = MaskedFleet(plan)
    before = fleet.run.models.newest.model.copy()
    report_all(fleet, "a", "b")
    fleet.carry_out(fleet.run.engine.tick(1e6))
    state = fleet.run.reports.round.sums.states["update"]
    masks = helper.ask(fleet.sums.question)
    fleet.answer(helper)
    moved = fleet.run.models.newest.model - before
    noise = noise_of_device(4.0, 20, 2)
    assert fleet.run.tasks.shared(0, fleet.run.members.all[0]).secure.noise == noise
    exact = noisy_sum(state.words - masks, 2, 300.0, 20, noise).total
    np.testing.assert_array_equal(fleet.run.models.newest.model, (before + exact / 3).astype("f4"))
    # 70,000 elements: five standard deviations of their standard deviation.
    beside = (moved * 3 - 2 * 0.5).std() / 300
    assert beside == pytest.approx(4.0, rel=5 / (2 * moved.size) ** 0.5)
    found = account_in(plan)
    assert (found.releases, found.rounds) == (1, 1)
    assert found.epsilon == pytest.approx(spent_by(1))
    fleet.store.close()


@pytest.mark.parametrize("how", ["too few report", "refused"])
def test_a_round_whose_sum_nobody_was_given_spends_nothing(
    make_plan: PlanMaker, helper: CalledHelper, how: str
) -> None:
    plan = make_plan(**settings(helper))
    fleet = MaskedFleet(plan)
    if how == "refused":
        helper.revoke("a")
        helper.revoke("b")
        question = report_all(fleet)
        heard = fleet.hear(question, helper.ask(question))
    else:
        report_all(fleet, "a")
        heard = fleet.carry_out(fleet.run.engine.tick(1e6))
    assert [each.round for each in heard if isinstance(each, Abandon)] == [1]
    assert (account_in(plan).rounds, account_in(plan).epsilon) == (0, 0.0)
    fleet.store.close()


def test_a_sum_that_was_seen_spends_though_it_comes_to_no_model(
    make_plan: PlanMaker, helper: CalledHelper, caplog: pytest.LogCaptureFixture
) -> None:
    """A device did not clip, so that the sum cannot be: the budget is spent by three releases and
    one such sum, and no other round opens."""
    plan = make_plan(**settings(helper))
    fleet = MaskedFleet(plan)
    for _ in range(3):
        report_all(fleet)
        fleet.answer(helper)
    assert account_in(plan).left == 1
    heard = fleet.hear(report_all(fleet), wrong_masks(fleet))
    assert [each.round for each in heard if isinstance(each, Abandon)] == [4]
    (finish,) = [each for each in heard if isinstance(each, Finish)]
    assert finish.reason.startswith(
        "the privacy budget is spent: epsilon 2.26 of 2.3 after 3 releases and 1 sum that came to "
        "no model; another would make it"
    )
    assert "round 4: the sum of its updates may have been seen, and counts towards" in caplog.text
    found = account_in(plan)
    assert (found.releases, found.rounds, found.left) == (3, 4, 0)
    assert found.epsilon == pytest.approx(spent_by(4))
    fleet.store.close()
    again = MaskedFleet(plan)
    assert again.run.finished is not None
    assert account_in(plan) == found
    again.store.close()


def test_such_a_sum_may_cost_more_than_the_releases_that_are_left(
    make_plan: PlanMaker, helper: CalledHelper
) -> None:
    """A device is in one of two releases: two cost as one, and the sum as two. Before it seven
    releases were left; then no round opens after four more."""
    plan = make_plan(**settings(helper, privacy__separation=2, privacy__participations=50))
    fleet = MaskedFleet(plan)
    assert account_in(plan).left == 8
    fleet.hear(report_all(fleet), wrong_masks(fleet))
    assert (account_in(plan).left, fleet.run.engine.settings.budget.releases) == (6, 7)
    assert fleet.run.engine.releases == 1
    fleet.store.close()


@pytest.mark.parametrize("how", ["waits", "did not answer", "refused"])
def test_a_round_that_is_rolled_back_spends_unless_the_helper_has_refused(
    make_plan: PlanMaker, helper: CalledHelper, how: str
) -> None:
    plan = make_plan(**settings(helper))
    fleet = MaskedFleet(plan)
    report_all(fleet)
    fleet.answer(helper)
    question = report_all(fleet)
    if how == "did not answer":
        fleet.hear(question, NoHelperError(Code.BUSY, "nobody answers"))
    if how == "refused":
        refusal = MaskSumRefusal(RefusalName.UNKNOWN_DEVICE, "b", ("b", "c"))
        fleet.hear(question, HelperRefusedError(refusal))
        assert account_in(plan).rounds == 1, "too few are left: it is abandoned"
    ask_to_roll_back(plan.data_dir, 0, "test")
    assert fleet.run.roll_backs.look(0.0)
    fleet.run.work.do_work(NOW)
    expected = 1 if how == "refused" else 2
    assert (account_in(plan).releases, account_in(plan).rounds) == (1, expected)
    assert fleet.run.engine.releases == expected
    # A second roll back, between rounds, takes nothing.
    ask_to_roll_back(plan.data_dir, 0, "test")
    assert fleet.run.roll_backs.look(0.0)
    fleet.run.work.do_work(NOW)
    assert account_in(plan).rounds == expected
    fleet.store.close()


def test_a_restart_goes_on_and_spends_once(make_plan: PlanMaker, helper: CalledHelper) -> None:
    plan = make_plan(**settings(helper))
    fleet = MaskedFleet(plan)
    helper.ask(report_all(fleet))
    fleet.store.close()
    fleet = MaskedFleet(plan)
    fleet.run.resume(NOW)
    fleet.answer(helper)
    assert (account_in(plan).releases, account_in(plan).rounds) == (1, 1)
    fleet.store.close()


def test_what_an_earlier_process_may_have_seen_spends_where_the_round_goes_no_further(
    make_plan: PlanMaker, helper: CalledHelper
) -> None:
    """The helper has answered, the coordinator died, and its set cannot be made again."""
    plan = make_plan(**settings(helper))
    fleet = MaskedFleet(plan)
    question = report_all(fleet)
    helper.ask(question)
    written = fleet.store.ledger.get(KEY).replace(question.request.digest().hex(), "0" * 64)
    fleet.store.write([Metadata(KEY, written)])
    fleet.store.close()
    fleet = MaskedFleet(plan)
    heard = fleet.run.resume(NOW)
    assert [each.round for each in heard if isinstance(each, Abandon)] == [1]
    assert (account_in(plan).releases, account_in(plan).rounds) == (0, 1)
    assert account_in(plan).epsilon == pytest.approx(spent_by(1))
    fleet.store.close()


@pytest.mark.parametrize(
    ("changed", "noise"),
    [({"privacy__noise": 8.0}, 8.0), ({"privacy__colluding": 0.5}, 4.0)],
    ids=["noise", "colluding"],
)
def test_under_a_changed_plan_the_open_round_is_given_up_and_spends_as_it_was_made(
    make_plan: PlanMaker, helper: CalledHelper, changed: dict[str, Any], noise: float
) -> None:
    """Also where the changed key says only how many devices share the noise."""
    fleet = MaskedFleet(make_plan(**settings(helper)))
    report_all(fleet)
    fleet.store.close()
    plan = make_plan(**settings(helper, **changed))
    fleet = MaskedFleet(plan)
    fleet.run.resume(NOW)
    assert fleet.sums.question is None
    found = account_in(plan)
    assert [(each.noise, each.releases, each.abandoned) for each in found.segments] == [
        (4.0, 0, 1),
        (noise, 0, 0),
    ]
    assert found.epsilon == pytest.approx(spent_by(1))
    assert fleet.run.engine.releases == 1
    fleet.store.close()


def test_a_round_that_cannot_go_on_with_other_bits_spends_and_the_engine_knows(
    make_plan: PlanMaker, helper: CalledHelper
) -> None:
    """The rules of the releases are the same. A device is in one of two releases, as above."""
    limits = {"privacy__separation": 2, "privacy__participations": 50}
    fleet = MaskedFleet(make_plan(**settings(helper, **limits)))
    report_all(fleet)
    fleet.store.close()
    plan = make_plan(**settings(helper, **limits, secure__bits=18))
    fleet = MaskedFleet(plan)
    fleet.run.resume(NOW)
    found, engine = account_in(plan), fleet.run.engine
    assert [(each.releases, each.abandoned) for each in found.segments] == [(0, 1)]
    assert (found.left, engine.releases, engine.settings.budget.releases) == (6, 1, 7)
    fleet.store.close()


def test_a_roll_back_between_rounds_does_not_count_the_last_release_twice(
    make_plan: PlanMaker, helper: CalledHelper
) -> None:
    """No device may take part in the next release: no round is open."""
    limits = {"privacy__separation": 2, "privacy__participations": 50}
    plan = make_plan(**settings(helper, **limits))
    fleet = MaskedFleet(plan)
    report_all(fleet)
    fleet.answer(helper)
    assert fleet.run.engine.phase is Phase.GATHERING
    ask_to_roll_back(plan.data_dir, 0, "test")
    assert fleet.run.roll_backs.look(0.0)
    fleet.run.work.do_work(NOW)
    assert fleet.run.budget.account == account_in(plan)
    assert (account_in(plan).releases, account_in(plan).rounds) == (1, 1)
    fleet.store.close()


def test_buffered_rounds_spend_by_release_as_others_do(
    make_plan: PlanMaker, helper: CalledHelper
) -> None:
    """FedBuff: the third device's update is one version late. It counts for what staleness leaves
    of it, and has its noise whole."""
    buffered = {"round__goal": 2, "round__minimum": 2, "round__concurrency": 3}
    plan = make_plan(**(BUFFERED | settings(helper) | buffered))
    fleet = MaskedFleet(plan)
    given = leases(fleet.check_in(*DEVICES))
    for lease in given[:2]:
        fleet.report_masked(lease, update_of(0.5))
    fleet.answer(helper)
    before = fleet.run.models.newest.model.copy()
    fleet.save(given[2], update_of(0.5), 0.5**0.5)
    fleet.carry_out(fleet.run.engine.count_report(given[2].device, given[2].task, 0.0))
    (fresh, *_) = [task for device, task in fleet.run.engine.leases.items() if device != "c"]
    (device,) = [name for name, task in fleet.run.engine.leases.items() if task == fresh]
    number, version = fleet.run.engine.round_of(fresh), fleet.run.engine.version
    fleet.report_masked(Assign(device, fresh, number, 0, 0.0, False, version), update_of(0.5))
    fleet.answer(helper)
    beside = (fleet.run.models.newest.model - before) * 2 - 0.5 * (1 + 0.5**0.5)
    assert beside.std() / 300 == pytest.approx(4.0, rel=5 / (2 * beside.size) ** 0.5)
    assert (account_in(plan).releases, account_in(plan).rounds) == (2, 2)
    assert account_in(plan).epsilon == pytest.approx(spent_by(2))
    fleet.store.close()


@pytest.mark.parametrize("participations", [50, 16])
def test_the_engine_knows_what_pairwise_masks_that_are_taken_off_may_cost(
    make_plan: PlanMaker, helper: CalledHelper, participations: int
) -> None:
    """Devices that are asked to unmask a sum let it be seen. With 16 participations no number of
    releases costs more than the 16 that the budget has, until a sum counts for all."""
    limits = {"privacy__separation": 2, "privacy__participations": participations}
    fleet = MaskedFleet(make_plan(**settings(helper, **limits, privacy__epsilon=4.8866)))
    budget, engine = fleet.run.budget, fleet.run.engine
    before = engine.settings.budget
    assert (before is None) is (participations == 16)
    budget.begin_unmasking(1, KEYS, engine)
    assert engine.settings.budget == before, "keys are told, and no sum"
    budget.begin_unmasking(1, UNMASKING, engine)
    known = engine.settings.budget
    assert (known.abandoned, known.if_abandoned.abandoned) == (True, False)
    # mu^2 of 16: 16 participations in 32 releases; a sum leaves 15 of them
    assert known.releases == (32 if participations == 50 else MOST)
    assert known.if_abandoned.releases == 1 + 30
    budget.begin_unmasking(2, KEYS, engine)
    assert engine.settings.budget == before, "the next round's begin"
    fleet.store.close()
