"""A round's work: who is trained together and from which model, what arrives, and what it adds up to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from fleetlearn_coordinator import aggregator
from fleetlearn_protocol.errors import ProtocolError
from fleetlearn_protocol.messages import Evaluation
from fleetlearn_protocol.vector import Vector
from fleetlearn_simulator import work
from fleetlearn_simulator.training import Job, Result
from fleetlearn_simulator.work import Flight, Tally, Training

MODEL, EARLIER = np.array([1, 2], np.float32), np.array([5, 7], np.float32)


def flight(device: int, ends: float, cause: str = "", corrupt: str = "", factor: float = 1.0) -> Flight:
    name = f"d{device:08d}"
    return Flight(device, name, f"s-1-{device}", 3, 100 + device, 0.0, ends, cause, None, corrupt, factor, 0)


def result(update: Sequence[float], examples: int = 10, **more: Any) -> Result:
    vector = np.array(update, np.float32)
    largest = float(np.abs(vector).max(initial=0.0))
    return Result(vector, examples, 1, examples, True, more.pop("loss", 0.5), more.pop("metrics", {}), largest, **more)


class Doubles:
    """A back end whose updates are the model's; it remembers who was begun together."""

    def __init__(self) -> None:
        self.begun: list[tuple[list[float], list[int]]] = []

    def train(self, model: Vector, jobs: Sequence[Job]) -> list[Result]:
        return [result(model.tolist(), 10 + job.device) for job in jobs]

    def begin(self, model: Vector, jobs: Sequence[Job]) -> Callable[[int], Result]:
        self.begun.append((model.tolist(), [job.device for job in jobs]))
        return self.train(model, jobs).__getitem__

    def evaluate(self, model: Vector, devices: Sequence[int]) -> list[Evaluation]:
        raise AssertionError

    def close(self) -> None: ...


def test_those_who_report_next_are_begun_together() -> None:
    backend = Doubles()
    training = Training(backend, MODEL, EARLIER, seed=1)
    out = [flight(3, 30.0), flight(1, 10.0, "crash"), flight(4, 20.0), flight(2, 20.0), flight(5, 5.0, corrupt="stale")]
    assert not training.started
    training.begin(out, room=3)
    assert training.started
    # Task s-1-2 before s-1-4, which comes at the same time; stale updates are of the model before.
    assert backend.begun == [([1.0, 2.0], [2, 4]), ([5.0, 7.0], [5])]
    assert training.result(out[4]).update.tolist() == [5.0, 7.0]
    assert training.result(out[2]).examples == 14
    # Device 3 is due, then whoever is not begun yet.
    training.begin([out[0], flight(6, 1.0), flight(7, 2.0), out[3]], room=2, first=out[0])
    assert backend.begun[2:] == [([1.0, 2.0], [3, 6])]
    with pytest.raises(KeyError):
        training.result(out[2])


def test_as_many_are_begun_as_memory_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "LOOK_AHEAD", 2 * MODEL.nbytes + 1)
    backend = Doubles()
    out = [flight(device, float(device)) for device in range(5)]
    training = Training(backend, MODEL, EARLIER, seed=1)
    training.begin(out, room=4)
    monkeypatch.setattr(work, "LOOK_AHEAD", 1)
    training.begin(out, room=4)
    assert [devices for _, devices in backend.begun] == [[0, 1], [2]]


@pytest.mark.parametrize(("corrupt", "expected"), [("scaled", [3.0, 6.0]), ("flipped", [-3.0, -6.0])])
def test_corruption_is_of_the_update_that_was_trained(corrupt: str, expected: list[float]) -> None:
    training = Training(Doubles(), MODEL, EARLIER, seed=1)
    sent = flight(0, 1.0, corrupt=corrupt, factor=3.0)
    training.begin([sent], room=1)
    found = training.result(sent)
    assert found.update.tolist() == expected
    assert found.largest == 6.0


def test_garbage_is_as_long_as_the_update_times_its_factor() -> None:
    made = []
    for device in (0, 0, 1):
        training = Training(Doubles(), MODEL, EARLIER, seed=1)
        sent = flight(device, 1.0, corrupt="garbage", factor=4.0)
        training.begin([sent], room=1)
        made.append(training.result(sent).update)
    np.testing.assert_allclose([np.linalg.norm(update) for update in made], 4 * np.sqrt(5), rtol=1e-6)
    assert made[0].tolist() == made[1].tolist()
    assert made[0].tolist() != made[2].tolist()


def test_the_sum_is_the_same_in_one_go_in_parts_and_update_by_update(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    updates = random.standard_normal((7, 5)).astype(np.float32)
    rows = [result(update.tolist(), int(examples)) for update, examples in zip(updates, range(3, 10), strict=True)]
    sums = []
    for look_ahead, block, most in ((2**28, 32768, 7), (2 * 5 * 4, 32768, 2), (2**28, 5, 0)):
        monkeypatch.setattr(work, "LOOK_AHEAD", look_ahead)
        monkeypatch.setattr(aggregator, "BLOCK", block)
        tally = Tally(5, 8, 0.0)
        held = []
        for place, row in enumerate(rows):
            tally.accept(flight(place, 1.0), row, 2.0)
            held.append(len(tally.waiting))
        tally.add_up()
        tally.add_up()
        sums.append(aggregator.mean(tally.total).tobytes())
        assert (max(held), tally.total.count, tally.useful) == (most, 7, 14.0)
    assert len({*sums}) == 1
    # Weights are the examples, 8 at most.
    expected = np.average(updates.astype(np.float64), axis=0, weights=[3, 4, 5, 6, 7, 8, 8])
    np.testing.assert_allclose(np.frombuffer(sums[0]), expected, rtol=1e-12)


@pytest.mark.parametrize(("update", "code"), [([np.nan, 0.0], "not-finite"), ([3e8, 0.0], "out-of-range")])
def test_what_the_coordinator_would_refuse_is_refused(update: list[float], code: str) -> None:
    tally = Tally(2, 100, 0.0)
    with pytest.raises(ProtocolError) as caught:
        tally.accept(flight(0, 1.0), result(update), 2.0)
    assert caught.value.code == code
    assert (tally.reports, tally.waiting, tally.useful) == ([], [], 0.0)


def test_means_are_weighted_as_the_updates_are() -> None:
    tally = Tally(2, 30, 0.0)
    assert tally.means() == {}
    for device, (examples, loss, metrics) in enumerate([(10, 1.0, {"accuracy": 0.5}), (90, 3.0, {})]):
        tally.accept(flight(device, 1.0), result([1.0, 2.0], examples, loss=loss, metrics=metrics), 5.0)
    assert tally.means() == {"loss": (10 * 1.0 + 30 * 3.0) / 40, "accuracy": 0.5}
    assert tally.summary()["accepted"] == {0: 2}
    assert tally.summary()["device_seconds"] == {"useful": 10.0, "wasted": 0.0}
