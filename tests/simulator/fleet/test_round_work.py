"""A round's work: who is trained together and from which model, what arrives, and what it adds up to."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any
from weakref import ref

import numpy as np
import pytest
from fleetlearn_coordinator import aggregator
from fleetlearn_coordinator.run import pooled
from fleetlearn_protocol.messages import Evaluation
from fleetlearn_protocol.vector import Vector
from fleetlearn_simulator.fleet import round_work as work
from fleetlearn_simulator.fleet.round_work import Flight, Tally, Training, flights_of
from fleetlearn_simulator.training.backend import Job
from fleetlearn_simulator.training.trained_devices import Outcome, Outcomes, Pending, Take, columns_of
from virtual import bits

MODEL, EARLIER = np.array([1, 2], np.float32), np.array([5, 7], np.float32)


def flight(device: int, ends: float, cause: str = "", corrupt: str = "", factor: float = 1.0) -> Flight:
    name = f"d{device:08d}"
    return Flight(ends, device, device, name, f"s-1-{device}", 3, 100 + device, 0.0, cause, None, corrupt, factor, 0)


def tasks(*flights: Flight) -> list[str]:
    return [flight.task for flight in flights]


def taken(training: Training, *flights: Flight) -> list[Outcomes]:
    """All that comes of them, as it comes."""
    due, found = tasks(*flights), list[Outcomes]()
    while due:
        found.append(training.take(due))
        due = due[len(found[-1]) :]
    return found


def outcome(update: Sequence[float], examples: int = 10, **more: Any) -> Outcome:
    vector = np.array(update, np.float32)
    largest = float(np.abs(vector).max(initial=0.0))
    usual: dict[str, Any] = {"metrics": {}, "complete": True, "loss": 0.5}
    return Outcome(update=vector, examples=examples, steps=1, seen=examples, largest=largest, **(usual | more))


def outcomes(*rows: Outcome) -> Outcomes:
    return columns_of(rows, len(rows[0].update), ["accuracy"])


class Doubles:
    """A back end whose updates are the model's; it remembers who was begun together. Device ``wild`` diverges."""

    def __init__(self, wild: int = -1) -> None:
        self.wild = wild
        self.begun: list[tuple[list[float], list[int]]] = []

    def train(self, model: Vector, jobs: Sequence[Job]) -> Outcomes:
        return outcomes(
            *(outcome(model.tolist(), 10 + job.device, diverged=job.device == self.wild) for job in jobs)
        )  # fmt: skip

    def begin(self, model: Vector, jobs: Sequence[Job]) -> Take:
        self.begun.append((model.tolist(), [job.device for job in jobs]))
        return self.train(model, jobs).take

    def evaluate(self, model: Vector, devices: Sequence[int]) -> list[Evaluation]:
        raise AssertionError

    def close(self) -> None: ...


def test_the_first_who_report_are_begun_together() -> None:
    backend = Doubles()
    training = Training(backend, MODEL, EARLIER, seed=1)
    out = [flight(5, 5.0, corrupt="stale"), flight(1, 10.0, "crash"), flight(4, 20.0), flight(2, 20.0), flight(3, 30.0)]
    assert not training.started
    training.begin(flights_of(out), room=3)
    assert training.started
    # Stale updates are of the model before.
    assert backend.begun == [([1.0, 2.0], [4, 2]), ([5.0, 7.0], [5])]
    assert training.take(tasks(out[0])).updates.tolist() == [[5.0, 7.0]]
    assert training.take(tasks(out[2])).examples.tolist() == [14]
    # Device 3 is due, then whoever is not begun yet.
    training.begin(flights_of([out[4], out[3], flight(6, 1.0), flight(7, 2.0)]), room=2)
    assert backend.begun[2:] == [([1.0, 2.0], [3, 6])]
    with pytest.raises(KeyError):
        training.take(tasks(out[2]))
    training.drop(out[4].task)
    training.drop(out[4].task)
    with pytest.raises(KeyError):
        training.take(tasks(out[4]))


def test_what_was_begun_together_is_taken_together() -> None:
    """And what was begun apart comes the next time."""
    training = Training(Doubles(), MODEL, EARLIER, seed=1)
    out = [flight(0, 1.0), flight(1, 2.0), flight(2, 3.0, corrupt="stale"), flight(3, 4.0), flight(4, 5.0)]
    training.begin(flights_of(out), room=5)
    came = taken(training, *out)
    assert [found.examples.tolist() for found in came] == [[10, 11], [12], [13, 14]]
    assert [found.updates[0].tolist() for found in came] == [[1.0, 2.0], [5.0, 7.0], [1.0, 2.0]]
    assert not training.begun


def test_as_many_are_begun_as_memory_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "LOOK_AHEAD", 2 * MODEL.nbytes + 1)
    backend = Doubles()
    out = [flight(device, float(device)) for device in range(5)]
    training = Training(backend, MODEL, EARLIER, seed=1)
    training.begin(flights_of(out), room=4)
    monkeypatch.setattr(work, "LOOK_AHEAD", 1)
    training.begin(flights_of(out), room=4)
    assert [devices for _, devices in backend.begun] == [[0, 1], [2]]


@pytest.mark.parametrize(("corrupt", "expected"), [("scaled", [3.0, 6.0]), ("flipped", [-3.0, -6.0])])
def test_corruption_is_of_the_update_that_was_trained(corrupt: str, expected: list[float]) -> None:
    """And of no other that was trained with it."""
    training = Training(Doubles(), MODEL, EARLIER, seed=1)
    out = [flight(0, 1.0), flight(1, 2.0, corrupt=corrupt, factor=3.0), flight(2, 3.0)]
    training.begin(flights_of(out), room=3)
    found = training.take(tasks(*out))
    assert found.updates.tolist() == [[1.0, 2.0], expected, [1.0, 2.0]]
    assert found.largest.tolist() == [2.0, 6.0, 2.0]


def test_what_has_diverged_is_not_spoilt() -> None:
    training = Training(Doubles(wild=0), MODEL, EARLIER, seed=1)
    out = [flight(device, 1.0, corrupt="scaled", factor=3.0) for device in range(2)]
    training.begin(flights_of(out), room=2)
    found = training.take(tasks(*out))
    assert found.largest.tolist() == [2.0, 6.0]
    assert found.diverged.tolist() == [True, False]


def test_garbage_is_as_long_as_the_update_times_its_factor() -> None:
    made = []
    for device in (0, 0, 1):
        training = Training(Doubles(), MODEL, EARLIER, seed=1)
        sent = flight(device, 1.0, corrupt="garbage", factor=4.0)
        training.begin(flights_of([sent]), room=1)
        made.append(training.take(tasks(sent)).updates[0])
    np.testing.assert_allclose([np.linalg.norm(update) for update in made], 4 * np.sqrt(5), rtol=1e-6)
    assert made[0].tolist() == made[1].tolist()
    assert made[0].tolist() != made[2].tolist()


def test_what_is_put_back_is_taken_once_more_as_it_was() -> None:
    """What was spoilt is not spoilt twice."""
    training = Training(Doubles(), MODEL, EARLIER, seed=1)
    corrupt = {1: "scaled", 2: "garbage", 3: "flipped"}
    out = [flight(device, float(device), corrupt=corrupt.get(device, ""), factor=3.0) for device in range(5)]
    training.begin(flights_of(out), room=5)
    found = training.take(tasks(*out[:4]))
    before = bits(found)
    assert found.updates[1].tolist() == [3.0, 6.0]
    training.put_back(tasks(*out[1:4]), found.take(range(1, 4)))
    with pytest.raises(KeyError):
        training.take(tasks(*out[:1]))
    again = training.take(tasks(*out[1:3]))
    assert bits(again) == before[1:3]
    training.put_back(tasks(*out[2:3]), again.take([1]))
    training.put_back([], again.take([]))
    # Device 2 was put back by itself, device 3 before, device 4 was not taken yet.
    came = taken(training, *out[2:])
    assert [bits(row) for row in came[:2]] == [before[2:3], before[3:4]]
    assert came[2].updates.tolist() == [[1.0, 2.0]]
    for sent in out:
        with pytest.raises(KeyError):
            training.take(tasks(sent))


def test_the_sum_is_the_same_in_one_go_in_parts_and_update_by_update(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    updates = random.standard_normal((7, 5)).astype(np.float32)
    rows = [outcome(update.tolist(), int(examples)) for update, examples in zip(updates, range(3, 10), strict=True)]
    flights = flights_of(flight(place, 1.0) for place in range(7))
    sums = []
    for look_ahead, block, parts, most in (
        (2**28, 32768, [1] * 7, 7),
        (2 * 5 * 4, 32768, [1] * 7, 2),
        (2**28, 5, [1] * 7, 0),
        (2**28, 32768, [7], 1),
        (2**28, 32768, [3, 1, 3], 3),
        (3 * 5 * 4, 32768, [3, 1, 3], 1),
        (2**28, 5, [3, 4], 0),
    ):
        monkeypatch.setattr(work, "LOOK_AHEAD", look_ahead)
        monkeypatch.setattr(aggregator, "BLOCK", block)
        tally = Tally(5, 8, 0.0)
        held, done = [], 0
        for count in parts:
            places = range(done, done + count)
            found = outcomes(*(rows[place] for place in places))
            tally.accept(flights, slice(done, done + count), found, [2.0] * count)
            held.append(len(tally.waiting))
            done += count
        tally.add_up()
        tally.add_up()
        sums.append(aggregator.mean(tally.total).tobytes())
        assert (max(held), tally.total.count, tally.useful, tally.held) == (most, 7, 14.0, 0)
    assert len({*sums}) == 1
    # Weights are the examples, 8 at most.
    expected = np.average(updates.astype(np.float64), axis=0, weights=[3, 4, 5, 6, 7, 8, 8])
    np.testing.assert_allclose(np.frombuffer(sums[0]), expected, rtol=1e-12)


NOT_FINITE, OUT_OF_RANGE = "rejected: not-finite", "rejected: out-of-range"


@pytest.mark.parametrize(
    ("update", "why"),
    [
        ([np.nan, 0.0], NOT_FINITE),
        ([0.0, -np.inf], NOT_FINITE),
        ([3e8, 0.0], OUT_OF_RANGE),
        ([0.0, -(2.0**28) / 10 * 1.001], OUT_OF_RANGE),
        ([0.0, -(2.0**28) / 10 * 0.999], None),
    ],
)
def test_what_the_coordinator_would_refuse_is_refused(update: list[float], why: str | None) -> None:
    """The first of them is named, wherever it is."""
    tally = Tally(2, 100, 0.0)
    well = outcome([1.0, 2.0])
    for place in range(3):
        rows = [well] * 3 + [outcome([np.inf, 0.0])]
        rows[place] = outcome(update)
        assert tally.refuse(outcomes(*rows)) == ((3, NOT_FINITE) if why is None else (place, why))
        assert tally.refuse(outcomes(*rows[:3])) == (None if why is None else (place, why))
    assert (tally.devices, tally.reports, tally.waiting, tally.useful) == ([], [], [], 0.0)


def test_what_has_diverged_is_refused_whatever_its_update_is() -> None:
    tally = Tally(2, 100, 0.0)
    for update in ([0.0, 0.0], [np.nan, 0.0], [3e8, 0.0]):
        rows = outcomes(outcome([1.0, 2.0]), outcome(update, diverged=True, loss=np.nan), outcome([np.nan, 1.0]))
        assert tally.refuse(rows) == (1, "failed: diverged")
        assert tally.refuse(rows.take([2, 1])) == (0, NOT_FINITE)
        assert tally.refuse(rows.take([0])) is None
    assert tally.refuse(rows.take([])) is None


def test_the_weight_that_counts_is_the_coordinators() -> None:
    """Of 10^6 examples an update may be a thousandth as large, unless the weight ends before."""
    row = outcomes(outcome([1e4, 0.0], 10**6))
    assert Tally(2, 10**6, 0.0).refuse(row) == (0, OUT_OF_RANGE)
    assert Tally(2, 20_000, 0.0).refuse(row) is None


def test_means_are_weighted_as_the_updates_are() -> None:
    tally = Tally(2, 30, 0.0)
    assert tally.means() == {}
    for device, (examples, loss, metrics) in enumerate([(10, 1.0, {"accuracy": 0.5}), (90, 3.0, {})]):
        found = outcomes(outcome([1.0, 2.0], examples, loss=loss, metrics=metrics))
        tally.accept(flights_of([flight(device, 1.0)]), slice(1), found, [5.0])
    assert tally.means() == {"loss": (10 * 1.0 + 30 * 3.0) / 40, "accuracy": 0.5}
    assert tally.summary()["accepted"] == {0: 2}
    assert tally.summary()["device_seconds"] == {"useful": 10.0, "wasted": 0.0}


def test_a_mean_of_nothing_is_not_there() -> None:
    tally = Tally(2, 30, 0.0)
    tally.accept(flights_of([flight(0, 1.0)]), slice(1), outcomes(outcome([1.0, 2.0], loss=2.0)), [5.0])
    assert tally.means() == {"loss": 2.0}


def test_reports_that_come_together_count_as_one_by_one() -> None:
    """To the last bit: sums, means, and what the round says of itself. The means are those of the coordinator."""
    random = np.random.default_rng(3)
    rows = [
        outcome(
            random.standard_normal(5).tolist(),
            int(random.integers(1, 60)),
            loss=float(random.exponential()),
            metrics={"accuracy": float(random.random())} if number % 3 else {},
            complete=number % 4 > 0,
        )
        for number in range(20)
    ]
    flights = flights_of(flight(number, 1.0)._replace(began=0.1 * number, tier=number % 3) for number in range(20))
    times = (10 + random.random(20)).tolist()
    found = []
    for parts in ([1] * 20, [20], [3, 0, 10, 7]):
        tally = Tally(5, 40, 0.0)
        ends = np.cumsum(parts).tolist()
        for start, end in zip([0, *ends], ends, strict=False):
            if end > start:
                tally.accept(flights, slice(start, end), outcomes(*rows[start:end]), times[start:end])
        tally.add_up()
        total = tally.total
        found.append(
            (aggregator.mean(total).tobytes(), total.weight, total.count, tally.useful, tally.means(),
             tally.complete(), tally.devices, tally.summary())
        )  # fmt: skip
    assert found[0] == found[1] == found[2]
    weights = [min(row.examples, 40) for row in rows]
    sums = [
        (weight, {name: weight * value for name, value in {"loss": row.loss, **row.metrics}.items()})
        for weight, row in zip(weights, rows, strict=True)
    ]
    assert tally.means() == pooled(sums)
    assert tally.complete() == 15
    assert tally.summary()["accepted"] == {0: 7, 1: 7, 2: 6}


@pytest.mark.parametrize("corrupt", ["", "scaled"])
def test_what_nobody_takes_is_gone_with_its_round(corrupt: str) -> None:
    """At once, and not when Python looks for cycles: its updates would wait for that, and its blocks still be done."""

    class Kept(Doubles):
        def begin(self, model: Vector, jobs: Sequence[Job]) -> Take:
            pending = Pending(lambda pending, place: pending.put(range(len(jobs)), self.train(model, jobs)))
            left.append(ref(pending))
            return pending.take

    left: list[Any] = []
    training = Training(Kept(), MODEL, EARLIER, seed=1)
    out = [flight(device, float(device), corrupt=corrupt) for device in range(3)]
    training.begin(flights_of(out), room=3)
    training.take(tasks(*out[:1]))
    gc.disable()
    try:
        assert left[0]() is not None
        del training
        assert left[0]() is None
    finally:
        gc.enable()
