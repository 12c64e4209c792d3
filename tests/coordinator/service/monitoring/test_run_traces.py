"""A round as a trace: spans against events by hand, and what a real collector's port receives."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from fleetlearn_coordinator.plan.service_settings import ServiceError, TraceSettings
from fleetlearn_coordinator.rounds.commands import Assign, Commit, Ended, Opened
from fleetlearn_coordinator.service.monitoring.run_traces import RunTraces, open_tracing
from fleetlearn_coordinator.service.observers import RoundEnded, RunEvent, UpdateSaved
from fleetlearn_protocol.messages import Part, Report
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from peers import PlanMaker, fleet, serving, update_of
from processes import free_port, wait_for


def spans_of(*events: RunEvent, most_tasks: int = 10) -> list[ReadableSpan]:
    """Return the spans that ended."""
    kept = InMemorySpanExporter()
    tracing = open_tracing(TraceSettings(), SimpleSpanProcessor(kept))
    RunTraces("digits", tracing.get_tracer("x"), most_tasks)(events)
    tracing.shutdown()
    return [*kept.get_finished_spans()]


def assign(task: str, device: str, round: int = 1, *, again: bool = False) -> Assign:
    return Assign(device, task, round, 7, 99.0, again, 0)


def saved(task: str) -> UpdateSaved:
    part = Part(name="update", encoding="float32", size=4, crc32=0)
    report = Report(
        task=task, round=1, parts=(part,), examples=10, steps=5, epochs=1.0, complete=True,
        loss=0.5, seconds=3.0,
    )  # fmt: skip
    return UpdateSaved("a", report, 1, 2)


def ended(outcome: Any = "committed", why: str = "") -> RoundEnded:
    summary = {"reports": 1, "metrics": {"loss": 0.5}}
    return RoundEnded(1, outcome, 4, summary, why)


def test_a_round_holds_its_tasks_and_its_commit() -> None:
    spans = spans_of(
        Opened(1), assign("t1", "a"), assign("t1", "a", again=True), assign("t2", "b"),
        assign("t3", "c"), saved("t1"), Ended("b", "t2", 1, "lost"),
        Ended("c", "t3", 1, "surplus"), Commit(1, {"lost": 1}), ended(),
    )  # fmt: skip
    assert [span.name for span in spans] == ["task", "task", "task", "commit", "round"]
    *within, round = spans
    assert round.parent is None
    assert round.context is not None
    for span in within:
        assert span.parent is not None
        assert span.parent.span_id == round.context.span_id
        assert span.attributes is not None
        assert (span.attributes["fleetlearn.run"], span.attributes["fleetlearn.round"]) == (
            "digits",
            1,
        )
    reported, lost, surplus, _ = within
    assert dict(reported.attributes or {}) == {
        "fleetlearn.run": "digits", "fleetlearn.round": 1, "fleetlearn.task": "t1",
        "fleetlearn.device": "a", "fleetlearn.examples": 10, "fleetlearn.staleness": 2,
        "fleetlearn.training_seconds": 3.0,
    }  # fmt: skip
    assert (lost.status.status_code, lost.status.description) == (StatusCode.ERROR, "lost")
    assert surplus.status.status_code is StatusCode.UNSET, "nobody's fault"
    assert (surplus.attributes or {})["fleetlearn.cause"] == "surplus"
    assert (round.attributes or {})["fleetlearn.metric.loss"] == 0.5
    assert (round.attributes or {})["fleetlearn.version"] == 4


def test_an_abandoned_round_is_an_error() -> None:
    (round,) = spans_of(Opened(1), ended("abandoned", "two reports are too few"))
    assert round.status.status_code is StatusCode.ERROR
    assert round.status.description == "two reports are too few"


def test_tasks_with_a_span_are_bounded_and_those_of_an_unknown_round_have_none() -> None:
    assigned = [assign(f"t{number}", "a") for number in range(5)]
    reports = [saved(f"t{number}") for number in range(5)]
    spans = spans_of(
        assign("old", "a", 0), saved("old"), Opened(1), *assigned, *reports, ended(), most_tasks=2
    )
    assert [span.name for span in spans] == ["task", "task", "round"]


@contextmanager
def collector(answer: threading.Event) -> Iterator[tuple[int, list[Any]]]:
    """Yield a port that takes spans by OTLP over HTTP, once ``answer`` is set, and the spans."""
    found: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            answer.wait(20)
            request = ExportTraceServiceRequest.FromString(body)
            for resource in request.resource_spans:
                for scope in resource.scope_spans:
                    found.extend(scope.spans)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield int(server.server_address[1]), found
    finally:
        answer.set()
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_collector_gets_the_rounds_of_real_devices(make_plan: PlanMaker) -> None:
    answer = threading.Event()
    answer.set()

    async def test(endpoint: str) -> None:
        async with fleet(make_plan(round__goal=1), traces={"endpoint": endpoint}) as (_, join):
            peer = await join("a")
            for _ in range(2):
                await peer.do_round(update_of(1.0))
            await peer.task()  # the second round is over

    with collector(answer) as (port, found):
        asyncio.run(test(f"http://127.0.0.1:{port}/v1/traces"))
        wait_for(lambda: len(found) >= 6, "the spans")
    assert sorted(span.name for span in found) == [
        "commit", "commit", "round", "round", "task", "task",
    ]  # fmt: skip
    rounds = {span.span_id: span for span in found if span.name == "round"}
    tasks = [span for span in found if span.name == "task"]
    assert {span.parent_span_id for span in tasks} == {*rounds}
    for span in tasks:
        whole = rounds[span.parent_span_id]
        assert whole.start_time_unix_nano <= span.start_time_unix_nano
        assert span.end_time_unix_nano <= whole.end_time_unix_nano


@pytest.mark.parametrize("there", [True, False])
def test_a_collector_that_is_silent_or_gone_holds_up_nothing(
    make_plan: PlanMaker, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    module = "fleetlearn_coordinator.service.monitoring"
    monkeypatch.setattr(f"{module}.port.END_TIMEOUT", 0.5)
    monkeypatch.setattr(f"{module}.run_traces.SEND_TIMEOUT", 1.0)

    async def test(port: int) -> None:
        traces = {"endpoint": f"http://127.0.0.1:{port}/v1/traces"}
        async with fleet(make_plan(round__goal=1), traces=traces) as (coordinator, join):
            peer = await join("a")
            for _ in range(3):
                await peer.do_round(update_of(1.0))
            assert coordinator.engine.version >= 2

    with collector(threading.Event()) as (port, _):
        asyncio.run(test(port if there else free_port()))


def test_without_the_extra_the_start_says_what_to_install(
    make_plan: PlanMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "fleetlearn_coordinator.service.monitoring.run_traces")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)

    async def test() -> None:
        async with serving(make_plan(), traces={}):
            pass

    with pytest.raises(ServiceError, match=r'pip install "fleetlearn\[traces\]"'):
        asyncio.run(test())
