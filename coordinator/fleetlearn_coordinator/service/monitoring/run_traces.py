"""A round as a trace of OpenTelemetry: an observer (observers.py). A round is a span; its tasks and
the making of its model are spans within it.

Spans are sent by a thread of opentelemetry's SDK, which drops what it cannot send: a collector that
is slow or gone holds up no round. A round that an earlier process opened has no span.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, Status, StatusCode, Tracer, set_span_in_context

from fleetlearn_coordinator.network.host import SOFTWARE
from fleetlearn_coordinator.plan.service_settings import TraceSettings
from fleetlearn_coordinator.rounds.commands import (
    GIVEN_BACK,
    SURPLUS,
    Assign,
    Commit,
    Ended,
    Opened,
)
from fleetlearn_coordinator.service.observers import RoundEnded, RunEvent, UpdateSaved

SEND_TIMEOUT = 10.0
"""Seconds in which a collector must take spans."""
NO_FAULT = (SURPLUS, *GIVEN_BACK)
"""Causes of a task's end that are nobody's fault."""


def open_tracing(settings: TraceSettings, processor: SpanProcessor | None = None) -> TracerProvider:
    """Return what makes spans, and sends them to the endpoint. ``processor``: takes the spans in
    place of that."""
    name, _, version = SOFTWARE.partition(" ")
    resource = Resource({"service.name": f"{name}-coordinator", "service.version": version})
    tracing = TracerProvider(resource=resource, shutdown_on_exit=False)
    if processor is None:
        exporter = OTLPSpanExporter(endpoint=settings.endpoint, timeout=SEND_TIMEOUT)
        processor = BatchSpanProcessor(exporter)
    tracing.add_span_processor(processor)
    return tracing


class RunTraces:
    """An observer that makes spans of one run's rounds."""

    def __init__(self, run: str, tracer: Tracer, most_tasks: int) -> None:
        """``run``: its name. ``most_tasks``: tasks of a round that have a span; further ones have
        none."""
        self._run, self._tracer, self._most = run, tracer, most_tasks
        self._rounds: dict[int, Span] = {}
        """Number of a round that is open -> its span."""
        self._tasks: dict[str, Span] = {}
        self._counts: dict[int, int] = {}
        """Number of a round that is open -> tasks of it that had a span."""
        self._commits: dict[int, Span] = {}
        self._trace_of: Mapping[type, Callable[[Any], None]] = {
            Opened: self._open,
            Assign: self._assign,
            UpdateSaved: self._report,
            Ended: self._end_task,
            Commit: self._commit,
            RoundEnded: self._end_round,
        }

    def __call__(self, events: Sequence[RunEvent]) -> None:
        """Begin and end spans."""
        for event in events:
            trace = self._trace_of.get(type(event))
            if trace is not None:
                trace(event)

    def _begin(self, name: str, within: Span | None, **attributes: str | int) -> Span:
        known: dict[str, str | int] = {"fleetlearn.run": self._run}
        known |= {f"fleetlearn.{key}": value for key, value in attributes.items()}
        context = None if within is None else set_span_in_context(within)
        return self._tracer.start_span(name, context, attributes=known)

    def _open(self, event: Opened) -> None:
        own = {} if event.goal is None else {"goal": event.goal}
        self._rounds[event.round] = self._begin("round", None, round=event.round, **own)
        self._counts[event.round] = 0

    def _assign(self, event: Assign) -> None:
        within = self._rounds.get(event.round)
        if event.again or within is None or self._counts[event.round] >= self._most:
            return
        self._counts[event.round] += 1
        self._tasks[event.task] = self._begin(
            "task", within, round=event.round, task=event.task, device=event.device
        )

    def _report(self, event: UpdateSaved) -> None:
        span = self._tasks.pop(event.report.task, None)
        if span is not None:
            if not event.private:
                span.set_attribute("fleetlearn.examples", event.report.examples)
            span.set_attribute("fleetlearn.staleness", event.staleness)
            span.set_attribute("fleetlearn.training_seconds", event.report.seconds)
            span.end()

    def _end_task(self, event: Ended) -> None:
        span = self._tasks.pop(event.task, None)
        if span is not None:
            span.set_attribute("fleetlearn.cause", event.cause)
            if event.cause not in NO_FAULT:
                span.set_status(Status(StatusCode.ERROR, event.cause))
            span.end()

    def _commit(self, event: Commit) -> None:
        within = self._rounds.get(event.round)
        if within is not None:
            self._commits[event.round] = self._begin("commit", within, round=event.round)

    def _end_round(self, event: RoundEnded) -> None:
        if (commit := self._commits.pop(event.number, None)) is not None:
            commit.end()
        self._counts.pop(event.number, None)
        span = self._rounds.pop(event.number, None)
        if span is None:
            return
        span.set_attribute("fleetlearn.version", event.version)
        span.set_attribute("fleetlearn.reports", event.summary["reports"])
        for name, value in event.summary["metrics"].items():
            span.set_attribute(f"fleetlearn.metric.{name}", value)
        if event.outcome == "abandoned":
            span.set_status(Status(StatusCode.ERROR, event.why))
        span.end()
