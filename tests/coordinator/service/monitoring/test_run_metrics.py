"""What is counted of a run, against events by hand."""

from __future__ import annotations

from math import nan
from typing import Any

import pytest
from fleetlearn_coordinator.rounds.commands import Assign, Ended, RegionEnded
from fleetlearn_coordinator.service.monitoring.catalogue import SPECS, Buckets, HistogramValue
from fleetlearn_coordinator.service.monitoring.run_metrics import RECENT, WRITES, RunMetrics
from fleetlearn_coordinator.service.observers import (
    ExchangeSummarised,
    HeldOutMeasured,
    MessageRefused,
    RoundEnded,
    RunEvent,
    UpdateSaved,
)
from fleetlearn_protocol import Code
from fleetlearn_protocol.messages import Part, Report


class Watched:
    """A run's metrics, with a clock that stands still."""

    def __init__(self, *losses: float) -> None:
        self.now = 1000.0
        self.metrics = RunMetrics("digits", losses, lambda: self.now)

    def happen(self, *events: RunEvent) -> None:
        self.metrics(events)

    def read(self, *, received: float = 0, sent: float = 0) -> dict[Any, Any]:
        """Metric and labels after the run's -> value."""
        samples = self.metrics.samples(received=received, sent=sent)
        found: dict[Any, Any] = {}
        for name, (labels, value) in samples:
            assert labels[0] == "digits"
            assert len(labels) == len(SPECS[name].labels)
            found[name.removeprefix("fleetlearn_"), *labels[1:]] = value
        return found


def assign(task: str, *, again: bool = False) -> Assign:
    return Assign("device", task, 1, 7, 99.0, again, 0)


def saved(task: str = "t", *, staleness: int = 0, seconds: float = 3.0) -> UpdateSaved:
    part = Part(name="update", encoding="float32", size=4, crc32=0)
    report = Report(
        task=task, round=1, parts=(part,), examples=10, steps=5, epochs=1.0, complete=True,
        loss=0.5, seconds=seconds,
    )  # fmt: skip
    return UpdateSaved("device", report, 1, staleness)


def ended(cause: str, task: str = "t") -> Ended:
    return Ended("device", task, 1, cause)


def round_ended(outcome: str = "committed", **summary: Any) -> RoundEnded:
    known = {"seconds": 20.0, "change": 0.25, "metrics": {}, "bytes_up": 0, "bytes_down": 0}
    return RoundEnded(1, outcome, 1, known | summary, "")  # type: ignore[arg-type]


def test_each_event_is_counted_under_its_cause() -> None:
    run = Watched()
    run.happen(
        assign("a"), assign("a", again=True), assign("b"), assign("c"), saved("a"),
        ended("lost", "b"), ended("rejected: norm-too-large", "c"),
        ended("failed: diverged"), ended("failed: diverged"), ended("surplus"),
        MessageRefused("c", Code.NORM_TOO_LARGE, "9, 5 is the most"),
        round_ended("abandoned"),
        ExchangeSummarised("evaluation", 1, 1, 3, True, {"metrics": {"loss": 0.25}}),
        ExchangeSummarised("evaluation", 2, 1, 4, False, {"metrics": {"loss": 9.0}}),
    )  # fmt: skip
    found = run.read()
    counters = {key: value for key, value in found.items() if key[0].endswith("_total")}
    assert counters == {
        ("tasks_given_total",): 3,
        ("reports_accepted_total",): 1,
        ("examples_total",): 10,
        ("tasks_ended_total", "lost"): 1,
        ("tasks_ended_total", "failed: diverged"): 2,
        ("tasks_ended_total", "surplus"): 1,
        ("reports_refused_total", "norm-too-large"): 1,
        ("messages_refused_total", "norm-too-large"): 1,
        ("rounds_total", "committed"): 0,
        ("rounds_total", "abandoned"): 1,
        ("exchanges_total", "evaluation", "valid"): 1,
        ("exchanges_total", "evaluation", "invalid"): 1,
        ("received_bytes_total",): 0,
        ("sent_bytes_total",): 0,
    }
    assert found["evaluation_metric", "loss"] == 0.25, "of the valid one"


def test_times_and_staleness_are_histograms() -> None:
    run = Watched()
    run.happen(assign("a"), assign("b"))
    run.now += 10
    run.happen(saved("a", staleness=3, seconds=2.0), saved("of an earlier process"))
    run.happen(ended("late", "b"))
    found = run.read()
    tasks = found["task_duration_seconds",]
    assert isinstance(tasks, HistogramValue)
    assert (tasks.total, tasks.buckets[-1]) == (10, ("+Inf", 1))
    assert dict(tasks.buckets)["5.0"] == 0
    assert dict(tasks.buckets)["15.0"] == 1
    assert found["training_duration_seconds",].total == 5
    staleness = dict(found["report_staleness_versions",].buckets)
    assert [staleness[bound] for bound in ("0.0", "2.0", "4.0", "+Inf")] == [1, 1, 2, 2]
    assert run.metrics._given == {}, "nothing is kept of tasks that are over"


def test_a_bucket_has_what_is_at_most_its_bound() -> None:
    buckets = Buckets((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 7.0):
        buckets.count(value)
    assert buckets.cumulative() == [("1.0", 2), ("2.0", 4), ("+Inf", 5)]
    assert buckets.total == 12


def test_a_rounds_metrics_are_those_of_the_last_committed_one() -> None:
    run = Watched()
    run.happen(round_ended(metrics={"loss": 0.5, "accuracy": 0.75}))
    run.happen(round_ended(metrics={"loss": 0.25}, change=0.125))
    run.happen(round_ended("abandoned", metrics={"loss": 9.0}, change=0.0))
    found = run.read()
    assert found["training_metric", "loss"] == 0.25
    assert ("training_metric", "accuracy") not in found, "too few devices measured it"
    assert found["model_change",] == 0.125


def test_members_of_a_family_are_counted_by_themselves() -> None:
    run = Watched()
    for loss in (0.5, 0.25):
        small = {"reports": 2, "metrics": {"loss": loss}}
        large = {"reports": 1, "metrics": {"loss": 0.75} if loss == 0.5 else {}}
        run.happen(round_ended(members={"small": small, "large": large}))
    found = run.read()
    assert found["member_reports_total", "small"] == 4
    assert found["member_reports_total", "large"] == 2
    assert found["member_training_metric", "small", "loss"] == 0.25
    assert found["member_training_metric", "large", "loss"] == 0.75, "nobody measured it since"


def test_regions_are_counted_by_themselves() -> None:
    run = Watched()
    for done in (True, False, True):
        run.happen(RegionEnded(1, "north", done, 2, "why"))
    found = run.read()
    assert found["region_rounds_total", "north", "done"] == 2
    assert found["region_rounds_total", "north", "failed"] == 1


def test_held_out_metrics_are_those_of_the_newest_model() -> None:
    run = Watched()
    run.happen(HeldOutMeasured(7, {"loss": 0.25}), HeldOutMeasured(4, {"loss": 9.0}))
    assert run.read()["held_out_metric", "loss"] == 0.25


def test_bytes_never_fall_between_a_rounds_close_and_its_end() -> None:
    run = Watched()
    assert run.read(received=100, sent=7)["received_bytes_total",] == 100
    # the round was closed, and its model is being made
    assert run.read()["received_bytes_total",] == 100
    run.happen(round_ended(bytes_up=120, bytes_down=7))
    found = run.read(received=5)
    assert (found["received_bytes_total",], found["sent_bytes_total",]) == (125, 7)


def test_the_age_of_the_last_round_stands_still_while_the_run_does_not_wait() -> None:
    run = Watched()
    run.now += 50
    run.metrics.look(waits=True)
    assert run.read()["round_age_seconds",] == 50
    run.happen(round_ended("abandoned"))
    assert run.read()["round_age_seconds",] == 50
    run.happen(round_ended())
    assert run.read()["round_age_seconds",] == 0
    run.now += 500
    run.metrics.look(waits=False)
    assert run.read()["round_age_seconds",] == 0
    run.now += 5
    assert run.read()["round_age_seconds",] == 5


def test_shares_are_of_the_last_minutes_and_of_enough_reports() -> None:
    run = Watched()
    run.happen(*[saved()] * 5, *[ended("rejected: not-finite")] * 4)
    assert run.read()["refused_ratio",] == 0, "nine reports are too few to tell"
    run.happen(ended("rejected: wrong-hash"), *[ended("failed: diverged")] * 10)
    found = run.read()
    assert found["refused_ratio",] == 0.5
    assert found["not_finite_ratio",] == pytest.approx(14 / 20)
    for _ in range(int(RECENT // 10) + 2):
        run.now += 10
        run.metrics.look(waits=True)
    assert run.read()["refused_ratio",] == 0, "ten minutes later"
    run.happen(*[saved()] * 30, *[ended("rejected: wrong-hash")] * 10)
    assert run.read()["refused_ratio",] == 0.25


def test_a_loss_that_rises_or_is_not_finite() -> None:
    run = Watched(8.0, 2.0)
    assert run.read()["loss_ratio",] == 1
    run.happen(round_ended(metrics={"loss": 5.0}))
    assert run.read()["loss_ratio",] == 2.5
    run.happen(round_ended(metrics={"loss": nan}))
    found = run.read()
    assert (found["loss_ratio",], found["not_finite_ratio",]) == (1, 1)
    assert Watched().read()["loss_ratio",] == 1
    assert Watched(0.0, 1.0).read()["loss_ratio",] == 1, "a loss of 0 has no multiples"


def test_each_kind_of_write_has_a_histogram() -> None:
    run = Watched()
    for number, what in enumerate(WRITES, 1):
        run.metrics.count_write(what, float(number))
    found = run.read()
    totals = [found[name.removeprefix("fleetlearn_"),].total for name in WRITES.values()]
    assert totals == [1, 2, 3, 4]


def test_a_private_run_tells_no_examples_and_no_ratio_of_noisy_losses() -> None:
    run = Watched()
    run.happen(saved()._replace(private=True))
    noisy = {"privacy": {"metrics_noise": 0.1}}
    for loss in (0.01, 3.0):
        run.happen(round_ended(metrics={"loss": loss}, **noisy))
    found = run.read()
    assert (found["examples_total",], found["reports_accepted_total",]) == (0, 1)
    assert (found["training_metric", "loss"], found["loss_ratio",]) == (3.0, 1)
