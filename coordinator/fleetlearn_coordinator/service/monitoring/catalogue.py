"""Every metric: its name, kind, labels and meaning. The page docs/operate/monitoring.md has the
same table, and a test holds them together.

No label is a device's: a fleet of a million devices has as many series as one of ten.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Literal, NamedTuple


class MetricSpec(NamedTuple):
    """What a metric is."""

    name: str
    """As Prometheus shows it; a histogram's without ``_bucket``, ``_sum`` and ``_count``."""
    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    help: str
    buckets: tuple[float, ...] = ()
    """A histogram's upper bounds, without the infinite one."""


SECONDS = (0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0)
"""Bounds for what the coordinator itself takes time for."""
LONG = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 86400.0)
"""Bounds for what waits for devices, in seconds."""
VERSIONS = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
RUN = ("run",)

CATALOGUE: tuple[MetricSpec, ...] = (
    # rounds and the model
    MetricSpec(
        "fleetlearn_rounds_total", "counter", ("run", "outcome"), "Rounds committed and abandoned."
    ),
    MetricSpec("fleetlearn_round", "gauge", RUN, "Number of the open round, or of the last one."),
    MetricSpec("fleetlearn_round_open", "gauge", RUN, "1 while a round is open, else 0."),
    MetricSpec("fleetlearn_round_goal", "gauge", RUN, "Reports with which a round closes."),
    MetricSpec("fleetlearn_round_minimum", "gauge", RUN, "Reports that a round needs."),
    MetricSpec(
        "fleetlearn_round_reports", "gauge", RUN, "Reports of the open round that were accepted."
    ),
    MetricSpec(
        "fleetlearn_round_age_seconds", "gauge", RUN,
        "Time since a round was committed, or since the run began to be served. 0 while the run is "
        "paused or finished.",
    ),
    MetricSpec(
        "fleetlearn_round_duration_seconds", "histogram", RUN,
        "From the opening of a round to its end.", LONG,
    ),
    MetricSpec("fleetlearn_model_version", "gauge", RUN, "Version of the newest model."),
    MetricSpec(
        "fleetlearn_model_change", "gauge", RUN, "L2 norm of the last round's change of the model."
    ),
    MetricSpec(
        "fleetlearn_training_metric", "gauge", ("run", "metric"),
        "What devices measured in the last committed round, on their training examples: loss and "
        "the model's own metrics.",
    ),
    MetricSpec(
        "fleetlearn_region_rounds_total", "counter", ("run", "region", "outcome"),
        "Rounds in which a region was done, and in which it failed (regions).",
    ),
    MetricSpec(
        "fleetlearn_region_reports", "gauge", ("run", "region"),
        "Reports of the open round that were accepted of a region's devices.",
    ),
    MetricSpec(
        "fleetlearn_region_goal", "gauge", ("run", "region"),
        "Reports with which a region's part of a round is over.",
    ),
    MetricSpec(
        "fleetlearn_region_devices", "gauge", ("run", "region", "state"),
        "A region's devices: waiting for a task, and training (with a task).",
    ),
    MetricSpec(
        "fleetlearn_member_reports_total", "counter", ("run", "member"),
        "Reports in committed rounds, by the member of the family that they are of.",
    ),
    MetricSpec(
        "fleetlearn_member_training_metric", "gauge", ("run", "member", "metric"),
        "What the devices of each member of a family measured in the last committed round.",
    ),
    MetricSpec(
        "fleetlearn_evaluation_metric", "gauge", ("run", "metric"),
        "What devices measured in the last valid evaluation.",
    ),
    MetricSpec(
        "fleetlearn_held_out_metric", "gauge", ("run", "metric"),
        "What the newest model that was measured on held-out data has there.",
    ),
    MetricSpec(
        "fleetlearn_loss_ratio", "gauge", RUN,
        "Loss of the last committed round over the lowest of the last 20; 1 where none is above 0.",
    ),
    MetricSpec("fleetlearn_paused", "gauge", RUN, "1 while the run is paused, else 0."),
    MetricSpec("fleetlearn_finished", "gauge", RUN, "1 once training is over, else 0."),
    MetricSpec("fleetlearn_run_failed", "gauge", RUN, "1 once the run was stopped by an error."),
    # privacy
    MetricSpec(
        "fleetlearn_privacy_epsilon", "gauge", RUN,
        "Epsilon that the releases of a private run have spent. This and the next four are absent "
        "where the plan has no [privacy].",
    ),
    MetricSpec(
        "fleetlearn_privacy_budget", "gauge", RUN,
        "The plan's epsilon. Absent where it states none.",
    ),
    MetricSpec(
        "fleetlearn_privacy_spent_ratio", "gauge", RUN,
        "Epsilon spent over the plan's epsilon. Absent where it states none.",
    ),
    MetricSpec("fleetlearn_privacy_releases", "gauge", RUN, "Models released, in all."),
    MetricSpec(
        "fleetlearn_privacy_releases_left", "gauge", RUN,
        "How many more releases are within the budget and stop.rounds.",
    ),
    # secure aggregation
    MetricSpec(
        "fleetlearn_helper_tries", "gauge", RUN,
        "How often the helper was asked for the sum of the closed round's masks and had no answer; "
        "0 where no round waits for one. Absent where the plan names no helper.",
    ),
    MetricSpec(
        "fleetlearn_devices_held", "gauge", RUN,
        "Connected devices that wait for another model, as a sum with their updates of this one "
        "was made before. Absent where the plan names no helper.",
    ),
    # devices and their tasks
    MetricSpec("fleetlearn_devices_connected", "gauge", RUN, "Devices that may serve the run."),
    MetricSpec(
        "fleetlearn_devices", "gauge", ("run", "state"),
        "Devices by state: idle, training, uploading, queued (wait to upload), unable (lack what "
        "the run's tasks need), away (were told to come back later).",
    ),
    MetricSpec(
        "fleetlearn_devices_present_ratio", "gauge", RUN,
        "Devices connected or away over the most of them in the last hour.",
    ),
    MetricSpec("fleetlearn_leases", "gauge", RUN, "Tasks that devices have now."),
    MetricSpec("fleetlearn_tasks_given_total", "counter", RUN, "Tasks given to devices."),
    MetricSpec(
        "fleetlearn_tasks_ended_total", "counter", ("run", "cause"),
        "Tasks that ended without a report: lost, late, stalled, stale, surplus, and what the "
        "device said where it failed.",
    ),
    MetricSpec(
        "fleetlearn_task_duration_seconds", "histogram", RUN,
        "From a task's giving to its accepted report.", LONG,
    ),
    MetricSpec(
        "fleetlearn_training_duration_seconds", "histogram", RUN,
        "Time that devices say they trained for an accepted report.", LONG,
    ),
    # reports
    MetricSpec("fleetlearn_reports_accepted_total", "counter", RUN, "Reports that count."),
    MetricSpec(
        "fleetlearn_reports_refused_total", "counter", ("run", "cause"), "Reports refused."
    ),
    MetricSpec(
        "fleetlearn_messages_refused_total", "counter", ("run", "code"),
        "Messages of devices that were refused, those of refused reports included.",
    ),
    MetricSpec(
        "fleetlearn_refused_ratio", "gauge", RUN,
        "Refused reports among all of the last 10 minutes; 0 where there were fewer than 10.",
    ),
    MetricSpec(
        "fleetlearn_not_finite_ratio", "gauge", RUN,
        "Reports that were not finite and trainings that diverged, among all reports and failed "
        "tasks of the last 10 minutes; 1 where the last round's loss is not finite.",
    ),
    MetricSpec(
        "fleetlearn_report_staleness_versions", "histogram", RUN,
        "How many versions newer the model is to which an accepted report is applied than the one "
        "that its task began from.", VERSIONS,
    ),
    MetricSpec(
        "fleetlearn_examples_total",
        "counter",
        RUN,
        "Training examples of accepted reports; 0 in a private run."
    ),
    MetricSpec(
        "fleetlearn_received_bytes_total", "counter", RUN, "Payload of updates that came in."
    ),
    MetricSpec(
        "fleetlearn_sent_bytes_total", "counter", RUN, "Payload of models and bundles sent."
    ),
    MetricSpec(
        "fleetlearn_exchanges_total", "counter", ("run", "kind", "outcome"),
        "Evaluations, and exchanges of other kinds, that are over: valid, or invalid where too few "
        "devices answered.",
    ),
    # canaries
    MetricSpec(
        "fleetlearn_canary_devices_ratio", "gauge", RUN,
        "Share of the old run's devices that have this canary; 0 once it went back.",
    ),
    MetricSpec(
        "fleetlearn_canary_went_back", "gauge", RUN,
        "1 once the canary went back, until its run is removed.",
    ),
    MetricSpec(
        "fleetlearn_canary_tasks", "gauge", ("run", "arm", "outcome"),
        "Tasks of the canary's step, of the devices that have it (arm canary) and of the old run's "
        "(control): given, done, failed, refused, lost, interrupted.",
    ),
    MetricSpec(
        "fleetlearn_canary_training_seconds", "gauge", ("run", "arm"),
        "Median time that training took in the canary's step, to 9 %.",
    ),
    # storage
    MetricSpec(
        "fleetlearn_ledger_write_seconds", "histogram", RUN,
        "Time to write a batch of rows; with durable = \"power\" it holds the fsync.", SECONDS,
    ),
    MetricSpec(
        "fleetlearn_update_sync_seconds", "histogram", RUN,
        "Time until an update's bytes are durable; with durable = \"power\" their fsync.", SECONDS,
    ),
    MetricSpec(
        "fleetlearn_sum_write_seconds", "histogram", RUN,
        "Time to write the sum of a round's updates; with durable = \"power\" it holds the fsync.",
        SECONDS,
    ),
    MetricSpec(
        "fleetlearn_model_write_seconds", "histogram", RUN,
        "Time to write a model's file; with durable = \"power\" it holds the fsyncs.", SECONDS,
    ),
    MetricSpec(
        "fleetlearn_spool_files", "gauge", RUN, "Files that hold updates which are not saved yet."
    ),
    MetricSpec("fleetlearn_disk_free_bytes", "gauge", RUN, "Free on the data directory's disk."),
    # the process
    MetricSpec("fleetlearn_build_info", "gauge", ("version",), "1, with fleetlearn's version."),
    MetricSpec("fleetlearn_ready", "gauge", (), "1 where /readyz says so, else 0."),
    MetricSpec("fleetlearn_connections", "gauge", (), "Connections to the devices' port."),
    MetricSpec(
        "fleetlearn_handshakes_refused_total", "counter", ("cause",),
        "Connections to the devices' port that were refused before they were open: tls (the TLS "
        "handshake failed, or one side has no TLS), credentials (none, or not known here), "
        "web-page (not named in origins), too-many (more than [limits] allows), bad-request (no "
        "request of this protocol), unavailable (credentials could not be looked up).",
    ),
    MetricSpec(
        "fleetlearn_send_queue_bytes", "gauge", (),
        "Bytes that wait to be sent, on all connections."
    ),
    MetricSpec(
        "fleetlearn_send_queue_longest_bytes", "gauge", (),
        "Bytes that wait to be sent on the connection where most do.",
    ),
    MetricSpec(
        "fleetlearn_event_loop_lag_seconds", "histogram", (),
        "How late the event loop does what is due, looked at twice a second.", SECONDS,
    ),
    MetricSpec(
        "fleetlearn_gateway_connections", "gauge", ("gateway",),
        "Connections of a gateway. This and what follows: absent without gateways.",
    ),
    MetricSpec(
        "fleetlearn_gateway_devices", "gauge", ("gateway",), "Devices that are connected to it."
    ),
    MetricSpec(
        "fleetlearn_gateway_received_bytes_total", "counter", ("gateway",),
        "Payload of updates that came in there.",
    ),
    MetricSpec(
        "fleetlearn_gateway_sent_bytes_total", "counter", ("gateway",),
        "Payload of models and bundles sent from there.",
    ),
    MetricSpec(
        "fleetlearn_gateway_event_loop_lag_seconds", "gauge", ("gateway",),
        "How late its event loop was in the last second, at most.",
    ),
    MetricSpec(
        "fleetlearn_certificate_left_seconds", "gauge", (),
        "Until the coordinator's certificate ends; negative once it has. Absent without [tls].",
    ),
)  # fmt: skip
SPECS = {spec.name: spec for spec in CATALOGUE}
PROCESS_METRICS = (
    ("process_cpu_seconds_total", "counter", "CPU time of the coordinator's process."),
    ("process_resident_memory_bytes", "gauge", "Its memory (RSS)."),
    ("process_virtual_memory_bytes", "gauge", "Its address space."),
    ("process_open_fds", "gauge", "Files and sockets that it has open."),
    ("process_max_fds", "gauge", "The most that it may have open."),
    ("process_start_time_seconds", "gauge", "When it began, as a Unix time."),
)
"""What prometheus-client adds where the system has /proc: name, kind, meaning."""


class Buckets:
    """The counts of one histogram."""

    __slots__ = ("_bounds", "_counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        """``bounds``: the upper bounds of its buckets, rising, without the infinite one."""
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.total = 0.0
        """The sum of what was counted."""

    def count(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[tuple[str, float]]:
        """Return each bucket's upper bound, as Prometheus writes it, and how many values are at
        most that large."""
        names = [*map(repr, self._bounds), "+Inf"]
        return list(zip(names, map(float, accumulate(self._counts)), strict=True))


class HistogramValue(NamedTuple):
    """What a histogram has counted, at one moment."""

    buckets: list[tuple[str, float]]
    total: float


class Sample(NamedTuple):
    """One series at one moment."""

    labels: tuple[str, ...]
    """In the order of ``MetricSpec.labels``."""
    value: float | HistogramValue


Samples = dict[str, list[Sample]]
"""Name of a metric -> its series."""


def add_to(samples: Samples, more: Iterable[tuple[str, Sample]]) -> None:
    """Add series of any metrics."""
    for name, sample in more:
        samples.setdefault(name, []).append(sample)
