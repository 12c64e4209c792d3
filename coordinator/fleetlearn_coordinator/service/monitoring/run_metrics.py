"""What is counted of one run: an observer (observers.py). Counting is an addition in a dict, and
nothing is kept of a device beyond the time at which the task that it has was given."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import inf, isfinite
from typing import Any, NamedTuple

from fleetlearn_coordinator.aggregation.round_summary import MEMBERS, has_noise
from fleetlearn_coordinator.rounds.commands import FAILED, REJECTED, Assign, Ended, RegionEnded
from fleetlearn_coordinator.rounds.evaluation import EVALUATION
from fleetlearn_coordinator.service.monitoring.catalogue import (
    SPECS,
    Buckets,
    HistogramValue,
    Sample,
)
from fleetlearn_coordinator.service.observers import (
    ExchangeSummarised,
    HeldOutMeasured,
    MessageRefused,
    RoundEnded,
    RunEvent,
    UpdateSaved,
)
from fleetlearn_coordinator.storage.store import Written

NOT_FINITE = (f"{REJECTED}not-finite", f"{FAILED}diverged")
RECENT, LOOKS = 600.0, 10.0
"""Seconds over which shares are told, and between two looks at the counts."""
FEWEST = 10
"""Reports below which there is no share to tell."""
WRITES: Mapping[Written, str] = {
    "rows": "fleetlearn_ledger_write_seconds",
    "update": "fleetlearn_update_sync_seconds",
    "sum": "fleetlearn_sum_write_seconds",
    "model": "fleetlearn_model_write_seconds",
}
LOSSES = 20
"""Rounds whose lowest loss is what the last one's is compared with."""


class _Look(NamedTuple):
    at: float
    accepted: float
    refused: float
    failed: float
    not_finite: float


class RunMetrics:
    """An observer that counts what happens in one run."""

    def __init__(
        self,
        run: str,
        losses: Iterable[float] = (),
        clock: Callable[[], float] = time.monotonic,
        round_ended: float | None = None,
    ) -> None:
        """``run``: its name, the label. ``losses``: of the last rounds before this process, the
        oldest first. ``round_ended``: when the last of them was committed, on ``clock``; None:
        time counts from now on."""
        self._run, self._clock = run, clock
        self._counts: defaultdict[tuple[str, tuple[str, ...]], float] = defaultdict(float)
        """Counter and labels -> its value. Every cause that has come is here for good: there are
        some 30."""
        self._values: dict[tuple[str, tuple[str, ...]], float] = {}
        """Gauge and labels -> its value."""
        self._buckets = {
            name: Buckets(spec.buckets)
            for name, spec in SPECS.items()
            if spec.kind == "histogram" and spec.labels == ("run",)
        }
        self._measured = 0
        """The newest version that was measured on held-out data."""
        self._given: dict[str, float] = {}
        """Task that runs -> when it was given."""
        self._losses = deque(losses, LOSSES)
        self._active_since = clock() if round_ended is None else round_ended
        """Since when the run has waited for a round to be committed."""
        self._looks: deque[_Look] = deque([_Look(-inf, 0, 0, 0, 0)])
        self._bytes = {"received": 0.0, "sent": 0.0}
        """Of the rounds that are over."""
        self._most_bytes = {"received": 0.0, "sent": 0.0}
        """What was told last: the counts never fall, also between a round's close and its end."""
        self._count_of: Mapping[type, Callable[[Any], None]] = {
            Assign: self._assign,
            Ended: self._end,
            UpdateSaved: self._accept,
            MessageRefused: self._refuse,
            RegionEnded: self._end_region,
            RoundEnded: self._end_round,
            ExchangeSummarised: self._end_exchange,
            HeldOutMeasured: self._measure,
        }
        for name in ("tasks_given", "reports_accepted", "examples"):
            self._counts[f"fleetlearn_{name}_total", (run,)] = 0.0
        for outcome in ("committed", "abandoned"):
            self._counts["fleetlearn_rounds_total", (run, outcome)] = 0.0

    def __call__(self, events: Sequence[RunEvent]) -> None:
        """Count what happened."""
        for event in events:
            count = self._count_of.get(type(event))
            if count is not None:
                count(event)

    def count_write(self, what: Written, seconds: float) -> None:
        """Count something that was made durable. Called in the thread that wrote it."""
        self._buckets[WRITES[what]].count(seconds)

    def _add(self, name: str, *labels: str, by: float = 1.0) -> None:
        self._counts[f"fleetlearn_{name}_total", (self._run, *labels)] += by

    def _assign(self, event: Assign) -> None:
        if not event.again:
            self._add("tasks_given")
            self._given[event.task] = self._clock()

    def _end(self, event: Ended) -> None:
        self._given.pop(event.task, None)
        if event.cause.startswith(REJECTED):
            self._add("reports_refused", event.cause.removeprefix(REJECTED))
        else:
            self._add("tasks_ended", event.cause)

    def _accept(self, event: UpdateSaved) -> None:
        report = event.report
        self._add("reports_accepted")
        if not event.private:
            self._add("examples", by=report.examples)
        given = self._given.pop(report.task, None)
        if given is not None:  # else an earlier process gave it
            self._buckets["fleetlearn_task_duration_seconds"].count(self._clock() - given)
        self._buckets["fleetlearn_training_duration_seconds"].count(report.seconds)
        self._buckets["fleetlearn_report_staleness_versions"].count(event.staleness)

    def _refuse(self, event: MessageRefused) -> None:
        self._add("messages_refused", event.code.value)

    def _end_region(self, event: RegionEnded) -> None:
        self._add("region_rounds", event.region, "done" if event.is_done else "failed")

    def _end_round(self, event: RoundEnded) -> None:
        self._add("rounds", event.outcome)
        summary = event.summary
        self._bytes["received"] += summary["bytes_up"]
        self._bytes["sent"] += summary["bytes_down"]
        self._buckets["fleetlearn_round_duration_seconds"].count(summary["seconds"])
        if event.outcome != "committed":
            return
        self._active_since = self._clock()
        self._values["fleetlearn_model_change", (self._run,)] = summary["change"]
        self._set_metrics("fleetlearn_training_metric", summary["metrics"])
        self._count_members(summary.get(MEMBERS, {}))
        loss = summary["metrics"].get("loss")
        # Noise alone makes a loss many times the lowest.
        if loss is not None and not has_noise(summary):
            self._losses.append(loss)

    def _count_members(self, members: Mapping[str, Any]) -> None:
        """Count what a round says of the members of a family. One that nobody measured this time
        keeps what was measured of it last."""
        for member, own in members.items():
            self._add("member_reports", member, by=own["reports"])
            for metric, value in own["metrics"].items():
                name = "fleetlearn_member_training_metric"
                self._values[name, (self._run, member, metric)] = value

    def _end_exchange(self, event: ExchangeSummarised) -> None:
        self._add("exchanges", event.kind, "valid" if event.valid else "invalid")
        if event.valid and event.kind == EVALUATION:
            self._set_metrics("fleetlearn_evaluation_metric", event.summary["metrics"])

    def _measure(self, event: HeldOutMeasured) -> None:
        if event.version >= self._measured:
            self._measured = event.version
            self._set_metrics("fleetlearn_held_out_metric", event.metrics)

    def _set_metrics(self, name: str, metrics: Mapping[str, float]) -> None:
        for key in [key for key in self._values if key[0] == name]:
            del self._values[key]  # a metric that too few devices measured this time
        for metric, value in metrics.items():
            self._values[name, (self._run, metric)] = value

    # What is told of time that passes

    def look(self, *, waits: bool) -> None:
        """Look at the counts. Called each second. ``waits``: whether the run waits for rounds;
        False: it is paused or finished."""
        now = self._clock()
        if not waits:
            self._active_since = now
        if now - self._looks[-1].at >= LOOKS:
            self._looks.append(self._look_now(now))
            while len(self._looks) > 2 and self._looks[1].at <= now - RECENT:
                self._looks.popleft()

    def _look_now(self, now: float) -> _Look:
        refused = failed = not_finite = 0.0
        for (name, labels), value in self._counts.items():
            if name == "fleetlearn_reports_refused_total":
                refused += value
                not_finite += value * (REJECTED + labels[1] in NOT_FINITE)
            elif name == "fleetlearn_tasks_ended_total" and labels[1].startswith(FAILED):
                failed += value
                not_finite += value * (labels[1] in NOT_FINITE)
        accepted = self._counts["fleetlearn_reports_accepted_total", (self._run,)]
        return _Look(now, accepted, refused, failed, not_finite)

    def samples(self, *, received: float, sent: float) -> Iterator[tuple[str, Sample]]:
        """Yield the name and series of each metric that is counted here. ``received``, ``sent``:
        bytes since the last round closed."""
        now, run = self._clock(), (self._run,)
        for (name, labels), value in {**self._counts, **self._values}.items():
            yield name, Sample(labels, value)
        for name, buckets in self._buckets.items():
            yield name, Sample(run, HistogramValue(buckets.cumulative(), buckets.total))
        before, at = self._looks[0], self._look_now(now)
        accepted, refused = at.accepted - before.accepted, at.refused - before.refused
        failed, not_finite = at.failed - before.failed, at.not_finite - before.not_finite
        reports = accepted + refused
        yield (
            "fleetlearn_refused_ratio",
            Sample(run, refused / reports if reports >= FEWEST else 0.0),
        )
        tried = reports + failed
        ratio = not_finite / tried if tried >= FEWEST else 0.0
        if self._losses and not isfinite(self._losses[-1]):
            ratio = 1.0
        yield "fleetlearn_not_finite_ratio", Sample(run, ratio)
        yield "fleetlearn_loss_ratio", Sample(run, self._loss_ratio())
        yield "fleetlearn_round_age_seconds", Sample(run, max(0.0, now - self._active_since))
        for what, new in (("received", received), ("sent", sent)):
            yield f"fleetlearn_{what}_bytes_total", Sample(run, self._all_bytes(what, new))

    def _all_bytes(self, what: str, new: float) -> float:
        self._most_bytes[what] = max(self._most_bytes[what], self._bytes[what] + new)
        return self._most_bytes[what]

    def _loss_ratio(self) -> float:
        finite = [loss for loss in self._losses if isfinite(loss)]
        if not finite or min(finite) <= 0 or not isfinite(self._losses[-1]):
            return 1.0
        return self._losses[-1] / min(finite)
