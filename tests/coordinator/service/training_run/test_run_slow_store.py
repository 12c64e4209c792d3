"""A run whose rows are not safe yet knows what it decided, and does not wait for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from answering import NOW, Fleet, hyper_of, leases
from fleetlearn_coordinator import Plan
from fleetlearn_coordinator.rounds.commands import Ask, Assign, ExchangeClosed, ExchangeOpened
from fleetlearn_coordinator.rounds.evaluation import EVALUATION
from fleetlearn_coordinator.storage import find_storage
from fleetlearn_protocol.exchanges import fields_of
from fleetlearn_protocol.messages import Evaluation, Reply
from memory_storage import SLOW_SCHEME, MemoryStorage, slow_storage
from peers import BUFFERED, plan_text, update_of

PLACE = f"{SLOW_SCHEME}://run"


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryStorage]:
    monkeypatch.setitem(find_storage.STORES, SLOW_SCHEME, slow_storage)
    monkeypatch.setattr("memory_storage.STORED", {})
    found = slow_storage(PLACE)
    yield found
    found.may_write.set()


class SlowFleet(Fleet):
    """A ``Fleet`` that is served from a slow store. Its event loop is the test."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._calls: deque[Callable[[], None]] = deque()
        self.store.write_beside(self._calls.append, lambda: lambda: None, pytest.fail)

    def store_all(self) -> None:
        """Let all rows become safe, and what waited for them be done."""
        self.store.wait_until_safe()
        while not self.store.is_safe:
            while self._calls:
                self._calls.popleft()()


def fleet_of(bundle: Path, **settings: Any) -> SlowFleet:
    kept = {"round__goal": 1, "round__gather": 30.0, "stop__rounds": 100} | settings
    return SlowFleet(Plan.parse(plan_text(bundle, PLACE, **kept), bundle.parent))


def report(fleet: SlowFleet, lease: Assign, **fields: Any) -> Assign:
    """Report, and return the next task."""
    (following,) = leases(fleet.report(lease, update_of(1.0), **fields))
    return following


def test_a_device_goes_on_from_its_last_task(bundle_path: Path, storage: MemoryStorage) -> None:
    fleet = fleet_of(bundle_path, encoding__up="topk-0.1")
    (first,) = leases(fleet.check_in("a"))
    fleet.store_all()
    storage.may_write.clear()
    second = report(fleet, first)
    assert second.version == 1
    assert fleet.run.tied_to("a") == first.task
    storage.may_write.set()
    fleet.store_all()
    report(fleet, second)
    assert fleet.run.tied_to("a") == second.task
    fleet.store.close()


def test_tasks_name_older_models(bundle_path: Path, storage: MemoryStorage) -> None:
    """And devices are sent differences from them."""
    fleet = fleet_of(bundle_path, encoding__down="delta")
    digests = [fleet.run.models.newest.digest]
    (first,) = leases(fleet.check_in("a"))
    fleet.store_all()
    storage.may_write.clear()
    report(fleet, first)
    digests.append(fleet.run.models.newest.digest)
    assert fleet.run.models.digest_of(0) == digests[0]
    assert fleet.run.models.bases_of(2) == dict(enumerate(digests))
    storage.may_write.set()
    fleet.store.close()


def test_tasks_of_older_models_have_their_mu(bundle_path: Path, storage: MemoryStorage) -> None:
    """The loss rises, so mu does: .1 with each round from the second on. A next process knows it
    too."""
    settings: dict[str, Any] = {
        **BUFFERED,
        "recipe": "fedprox-adaptive",
        "round__participation": "asynchronous",
        "round__goal": 1,
        "round__concurrency": 1,
    }
    fleet = fleet_of(bundle_path, **settings)
    (lease,) = leases(fleet.check_in("a"))
    for loss in (1.0, 2.0, 3.0):
        fleet.store_all()
        storage.may_write.clear()
        lease = report(fleet, lease, evaluation=Evaluation(10, 10 * loss, {"accuracy": 5.0}))
        assert hyper_of(fleet, 0)["mu"] == 0.0
        storage.may_write.set()
    expected = [hyper_of(fleet, version)["mu"] for version in range(4)]
    assert expected == pytest.approx([0.0, 0.0, 0.1, 0.2])
    fleet.store.close()
    again = fleet_of(bundle_path, **settings)
    assert [hyper_of(again, version)["mu"] for version in range(4)] == expected
    again.store.close()


def evaluate(fleet: SlowFleet, version: int, measured: Evaluation) -> None:
    """One device measures a version, as the engine may decide at any moment."""
    task, kind = f"te{version}", EVALUATION
    opened = ExchangeOpened(version + 1, version, kind)
    fleet.run.record([opened, Ask("b", task, version + 1, version, 9.0, False, kind)], NOW)
    fleet.run.save_answer("b", Reply(task, kind, fields_of(measured)))
    fleet.run.record([ExchangeClosed(version + 1, version, {}, True, kind)], NOW)


@pytest.mark.parametrize("source", ["round", "evaluation"])
def test_the_best_model_stays(bundle_path: Path, storage: MemoryStorage, source: str) -> None:
    """Version 1 is measured best. That is not safe yet when version 2's round decides what is
    dropped."""
    fleet = fleet_of(
        bundle_path,
        models__last=1,
        models__best=1,
        models__metric="accuracy",
        models__measured_by=source,
        evaluation__every=100,
    )
    (lease,) = leases(fleet.check_in("a"))
    fleet.store_all()
    for version, accuracy in enumerate((0.1, 0.9, 0.2, 0.3)):
        measured = Evaluation(10, 5.0, {"accuracy": 10 * accuracy})
        if version == 1:
            storage.may_write.clear()
        if source == "evaluation":
            evaluate(fleet, version, measured)
        commands = fleet.report(lease, update_of(1.0), evaluation=measured)
        if version == 2:  # its model waits for the one before
            assert commands == []
            storage.may_write.set()
            fleet.store_all()
            commands = fleet.run.work.do_work(NOW)
        (lease,) = leases(commands)
        if version != 1:
            fleet.store_all()
    assert fleet.store.blobs.model_versions() == [0, 1, 3, 4]
    fleet.store.close()
