"""What arrived in a round: what is refused, and what the rest adds up to."""

from __future__ import annotations

import numpy as np
import pytest
from fleetlearn_coordinator.aggregation import aggregators
from fleetlearn_coordinator.aggregation.commit import weights_of
from fleetlearn_coordinator.aggregation.round_summary import NOTHING, pooled, training_of
from fleetlearn_protocol.messages import Part, Report
from fleetlearn_simulator.fleet import round_totals
from fleetlearn_simulator.fleet.round_totals import RoundTotals
from fleetlearn_simulator.fleet.running_tasks import RunningTasks
from fleetlearn_simulator.training.trained_devices import TrainedDevices
from numpy.typing import NDArray
from rounds import running_task, trained_device, trained_devices

MEAN = aggregators.make("mean")


def weights(found: TrainedDevices, most: int) -> NDArray[np.int64]:
    return weights_of(found.examples, most)


def test_the_sum_is_the_same_in_one_go_in_parts_and_update_by_update(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    updates = random.standard_normal((7, 5)).astype(np.float32)
    rows = [
        trained_device(update.tolist(), int(examples)) for update, examples in zip(updates, range(3, 10), strict=True)
    ]
    running = RunningTasks.from_rows(running_task(place, 1.0) for place in range(7))
    sums = []
    for look_ahead, large, parts, most in (
        (2**28, 32768, [1] * 7, 7),
        (2 * 5 * 4, 32768, [1] * 7, 2),
        (2**28, 5, [1] * 7, 0),
        (2**28, 32768, [7], 1),
        (2**28, 32768, [3, 1, 3], 3),
        (3 * 5 * 4, 32768, [3, 1, 3], 1),
        (2**28, 5, [3, 4], 0),
    ):
        monkeypatch.setattr(round_totals, "MAX_BYTES_WAITING", look_ahead)
        monkeypatch.setattr(round_totals, "LARGE_UPDATE", large)
        totals = RoundTotals(MEAN, 5, 8)
        held, done = [], 0
        for count in parts:
            places = range(done, done + count)
            found = trained_devices(*(rows[place] for place in places))
            totals.add_reports(running, slice(done, done + count), found, weights(found, 8), [2.0] * count)
            held.append(len(totals.waiting))
            done += count
        totals.add_up()
        totals.add_up()
        sums.append(MEAN.result(totals.aggregate).delta.tobytes())
        assert (max(held), totals.aggregate.count, totals.useful, totals.bytes_waiting) == (most, 7, 14.0, 0)
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
        ([4e10, 0.0], OUT_OF_RANGE),
        ([0.0, -(2.0**35) * 1.001], OUT_OF_RANGE),
        ([0.0, -(2.0**35)], None),
    ],
)
def test_what_the_coordinator_would_refuse_is_refused(update: list[float], why: str | None) -> None:
    """The first of them is named, wherever it is."""
    totals = RoundTotals(MEAN, 2, 100)
    well = trained_device([1.0, 2.0])
    for place in range(3):
        rows = [well] * 3 + [trained_device([np.inf, 0.0])]
        rows[place] = trained_device(update)
        for count, refused in ((4, (3, NOT_FINITE)), (3, None)):
            found = trained_devices(*rows[:count])
            assert totals.refuse(found, weights(found, 100)) == (refused if why is None else (place, why))
    assert (totals.devices, totals.reports, totals.waiting, totals.useful) == ([], [], [], 0.0)


def test_what_has_diverged_is_refused_whatever_its_update_is() -> None:
    totals = RoundTotals(MEAN, 2, 100)
    for update in ([0.0, 0.0], [np.nan, 0.0], [4e10, 0.0]):
        rows = trained_devices(
            trained_device([1.0, 2.0]),
            trained_device(update, diverged=True, loss=np.nan),
            trained_device([np.nan, 1.0]),
        )
        assert totals.refuse(rows, weights(rows, 100)) == (1, "failed: diverged")
        assert totals.refuse(rows.select([2, 1]), weights(rows.select([2, 1]), 100)) == (0, NOT_FINITE)
        assert totals.refuse(rows.select([0]), weights(rows.select([0]), 100)) is None
    assert totals.refuse(rows.select([]), weights(rows.select([]), 100)) is None


def test_the_weight_that_counts_is_the_coordinators() -> None:
    """2^29 examples are beyond what the sum takes, unless the plan lets them count as less."""
    row = trained_devices(trained_device([1e4, 0.0], 2**29))
    assert RoundTotals(MEAN, 2, 2**29).refuse(row, weights(row, 2**29)) == (0, OUT_OF_RANGE)
    assert RoundTotals(MEAN, 2, 20_000).refuse(row, weights(row, 20_000)) is None


def test_means_are_weighted_as_the_updates_are() -> None:
    totals = RoundTotals(MEAN, 2, 30)
    assert totals.training() is NOTHING
    for device, (examples, loss, metrics) in enumerate([(10, 1.0, {"accuracy": 0.5}), (90, 3.0, {})]):
        found = trained_devices(trained_device([1.0, 2.0], examples, loss=loss, metrics=metrics))
        totals.add_reports(
            RunningTasks.from_rows([running_task(device, 1.0)]), slice(1), found, weights(found, 30), [5.0]
        )
    assert pooled(totals.training()) == {"loss": (10 * 1.0 + 30 * 3.0) / 40, "accuracy": 0.5}
    assert totals.summary()["accepted"] == {0: 2}
    assert totals.summary()["device_seconds"] == {"useful": 10.0, "wasted": 0.0}


def test_a_mean_of_nothing_is_not_there() -> None:
    totals = RoundTotals(MEAN, 2, 30)
    found = trained_devices(trained_device([1.0, 2.0], loss=2.0))
    totals.add_reports(RunningTasks.from_rows([running_task(0, 1.0)]), slice(1), found, weights(found, 30), [5.0])
    assert pooled(totals.training()) == {"loss": 2.0}


def test_reports_that_come_together_count_as_one_by_one() -> None:
    """To the last bit: sums, means, and what the round says of itself. The means are those of the coordinator."""
    random = np.random.default_rng(3)
    rows = [
        trained_device(
            random.standard_normal(5).tolist(),
            int(random.integers(1, 60)),
            loss=float(random.exponential()),
            metrics={"accuracy": float(random.random())} if number % 3 else {},
            complete=number % 4 > 0,
        )
        for number in range(20)
    ]
    running = RunningTasks.from_rows(
        running_task(number, 1.0)._replace(began=0.1 * number, tier=number % 3) for number in range(20)
    )
    times = (10 + random.random(20)).tolist()
    found = []
    for parts in ([1] * 20, [20], [3, 0, 10, 7]):
        totals = RoundTotals(MEAN, 5, 40)
        ends = np.cumsum(parts).tolist()
        for start, end in zip([0, *ends], ends, strict=False):
            if end > start:
                part = trained_devices(*rows[start:end])
                totals.add_reports(running, slice(start, end), part, weights(part, 40), times[start:end])
        totals.add_up()
        total = totals.aggregate
        found.append(
            (MEAN.result(total).delta.tobytes(), total.weight, total.count, totals.useful, pooled(totals.training()),
             totals.complete(), totals.devices, totals.summary())
        )  # fmt: skip
    assert found[0] == found[1] == found[2]
    reports = [
        Report("t", 1, (Part("update", "float32", 4, 0),), row.examples, 1, 1.0, row.complete, row.loss, row.metrics)
        for row in rows
    ]
    assert pooled(totals.training()) == pooled(training_of(reports, ["accuracy", "loss"], 40))
    assert totals.complete() == 15
    assert totals.summary()["accepted"] == {0: 7, 1: 7, 2: 6}
