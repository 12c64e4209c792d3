"""The port of programs that watch a coordinator: what it exposes is strictly of Prometheus'
formats, says what happened, and names no device."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import tempfile
import urllib.error
import urllib.request
from math import isfinite
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fleetlearn_coordinator.network.connection import DeviceConnection
from fleetlearn_coordinator.network.host import Host
from fleetlearn_coordinator.plan.service_settings import MetricsPort, ServiceError, ServiceSettings
from fleetlearn_coordinator.service.monitoring.catalogue import CATALOGUE, PROCESS_METRICS, SPECS
from fleetlearn_coordinator.service.monitoring.gauges import host_gauges
from fleetlearn_coordinator.service.private_ca import make_certificate
from fleetlearn_coordinator.service.several_runs import hosting
from fleetlearn_coordinator.storage.runs import Runs
from fleetlearn_protocol.messages import Failed
from peers import PlanMaker, fleet, plan_text, serving, update_of
from processes import free_port
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families as parse_text

OPENMETRICS = "application/openmetrics-text; version=1.0.0"
UNITS = ("seconds", "bytes", "ratio", "versions", "total", "info")
COUNTED = {
    "fleetlearn_round", "fleetlearn_round_open", "fleetlearn_round_goal",
    "fleetlearn_round_minimum", "fleetlearn_round_reports", "fleetlearn_model_version",
    "fleetlearn_model_change", "fleetlearn_training_metric", "fleetlearn_evaluation_metric",
    "fleetlearn_held_out_metric", "fleetlearn_member_training_metric",
    "fleetlearn_paused", "fleetlearn_finished", "fleetlearn_run_failed", "fleetlearn_ready",
    "fleetlearn_devices", "fleetlearn_devices_connected", "fleetlearn_leases",
    "fleetlearn_spool_files", "fleetlearn_connections",
    "fleetlearn_canary_tasks", "fleetlearn_canary_went_back",
    "fleetlearn_privacy_epsilon", "fleetlearn_privacy_budget", "fleetlearn_privacy_releases",
    "fleetlearn_privacy_releases_left", "fleetlearn_helper_tries", "fleetlearn_devices_held",
    "fleetlearn_gateway_connections", "fleetlearn_gateway_devices", "fleetlearn_region_reports",
    "fleetlearn_region_goal", "fleetlearn_region_devices",
}  # fmt: skip
"""Gauges that count things, or have the unit of what devices measure: they need none in the
name."""


async def get(
    address: str, path: str, accept: str = "", method: str = "GET", **more: Any
) -> tuple[int, str, dict[str, str]]:
    """Return what is answered, whatever its status: status, text, headers."""

    def ask() -> tuple[int, str, dict[str, str]]:
        request = urllib.request.Request(address + path, headers={"Accept": accept}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=20, **more) as answer:
                return answer.status, answer.read().decode(), dict(answer.headers)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode(), dict(error.headers)

    return await asyncio.to_thread(ask)


def values(text: str) -> dict[str, float]:
    """Return series -> value, as the text has them."""
    lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {series: float(value) for series, _, value in lines}


async def until(address: str, series: str, value: float) -> dict[str, float]:
    """Scrape until a series has this value."""
    async with asyncio.timeout(20):
        while True:
            found = values((await get(address, "/metrics"))[1])
            if found.get(series) == value:
                return found
            await asyncio.sleep(0.05)


def check_strictly(text: str) -> None:
    """Fail where ``promtool check metrics`` would, or a scraper of another format would stumble."""
    families = {family.name: family for family in parse_text(text)}
    for family in families.values():
        assert family.documentation, family.name
        assert family.type in ("counter", "gauge", "histogram"), family.name
        assert re.fullmatch("[a-z_]+", family.name)
        name = family.name + ("_total" if family.type == "counter" else "")
        if not name.startswith("process_"):
            assert SPECS[name].help == family.documentation
            assert SPECS[name].kind == family.type
            assert name.endswith(UNITS) or name in COUNTED, f"{name} has no unit"
        assert name.endswith("_total") == (family.type == "counter"), name
        for sample in family.samples:
            assert len(sample.labels) <= 3 + ("le" in sample.labels)
    helped = re.findall(r"^# HELP (\S+) ", text, re.MULTILINE)
    assert helped == re.findall(r"^# TYPE (\S+) ", text, re.MULTILINE)
    assert len(helped) == len(set(helped))
    assert set(SPECS) <= set(helped)
    series = [line.rpartition(" ")[0] for line in text.splitlines() if line[0] != "#"]
    assert len(series) == len(set(series)), "a series exists once"


def test_a_run_of_devices_is_told_in_both_formats(make_plan: PlanMaker) -> None:
    """One device reports twice, another fails: each number is known."""

    async def test() -> None:
        port = free_port()
        plan, address = make_plan(round__goal=1, stop__rounds=40), f"http://127.0.0.1:{port}"
        async with fleet(plan, metrics={"port": port}) as (_, join):
            first = await join("a-secret-name")
            for _ in range(2):
                await first.do_round(update_of(1.0))
            found = await until(address, 'fleetlearn_model_version{run="test"}', 2.0)
            own = {
                series.partition("{")[0]: value
                for series, value in found.items()
                if series.endswith('{run="test"}')
            }
            assert own["fleetlearn_reports_accepted_total"] == 2
            assert own["fleetlearn_tasks_given_total"] == 3
            assert own["fleetlearn_leases"] == 1
            assert own["fleetlearn_devices_connected"] == 1
            assert own["fleetlearn_round_goal"] == 1
            assert own["fleetlearn_received_bytes_total"] >= 2 * 4 * 8
            assert own["fleetlearn_report_staleness_versions_count"] == 2
            assert own["fleetlearn_ledger_write_seconds_count"] > 4
            assert own["fleetlearn_update_sync_seconds_count"] == 2
            assert own["fleetlearn_disk_free_bytes"] > 0
            assert own["fleetlearn_round_age_seconds"] < 20
            assert own["fleetlearn_finished"] == own["fleetlearn_paused"] == 0
            assert found['fleetlearn_rounds_total{outcome="committed",run="test"}'] == 2
            assert found['fleetlearn_devices{run="test",state="training"}'] == 1
            assert found['fleetlearn_training_metric{metric="loss",run="test"}'] == 0.7
            assert found["fleetlearn_connections"] == found["fleetlearn_ready"] == 1
            assert found["process_resident_memory_bytes"] > 1e7
            assert all(map(isfinite, found.values()))

            _, text, headers = await get(address, "/metrics")
            assert headers["Content-Type"].startswith("text/plain; version=0.0.4")
            check_strictly(text)
            _, strict, headers = await get(address, "/metrics", OPENMETRICS)
            assert headers["Content-Type"].startswith("application/openmetrics-text; version=1")
            assert strict.endswith("# EOF\n")
            families = list(parse_openmetrics(strict))
            assert {family.name for family in families} >= {
                spec.name.removesuffix("_total") for spec in CATALOGUE
            }
            assert "secret" not in text + strict, "no device is named"

    asyncio.run(test())


def test_a_cause_is_a_label_and_a_device_is_none(
    make_plan: PlanMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many devices that fail have the series of one."""
    monkeypatch.setattr("fleetlearn_coordinator.service.monitoring.monitor.FRESH", 0.0)

    async def test() -> None:
        port = free_port()
        address = f"http://127.0.0.1:{port}"
        plan = make_plan(round__goal=50, round__minimum=1)
        async with fleet(plan, metrics={"port": port}) as (_, join):
            counts = []
            for number in range(12):
                peer = await join(f"device-{number}")
                task = await peer.task()
                await peer.send(Failed(task.task, "bad-data", f"KeyError: {number}"))
                series = 'fleetlearn_tasks_ended_total{cause="failed: bad-data",run="test"}'
                counts.append(len(await until(address, series, number + 1.0)))
            assert len(set(counts)) == 1, counts
            check_strictly((await get(address, "/metrics"))[1])

    asyncio.run(test())


def test_the_checks_can_fail() -> None:
    """Planted mistakes in the text."""
    for fault in (
        '# HELP x_total y\n# TYPE x_total counter\nx_total{run="a"} 1\nx_total{run="a"} 1\n',
        "# TYPE fleetlearn_round gauge\nfleetlearn_round 1\n",
        "# HELP fleetlearn_rounds y\n# TYPE fleetlearn_rounds counter\nfleetlearn_rounds 1\n",
        'x{run="a} 1\n',
    ):
        with pytest.raises((AssertionError, ValueError, KeyError)):
            check_strictly(fault)


def test_promtool_finds_nothing_to_say(make_plan: PlanMaker) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not here: apt-get install prometheus")

    async def test() -> None:
        port = free_port()
        async with fleet(make_plan(round__goal=1), metrics={"port": port}) as (_, join):
            await (await join("a")).do_round(update_of(1.0))
            text = (await get(f"http://127.0.0.1:{port}", "/metrics"))[1]
            found = await asyncio.to_thread(
                subprocess.run,
                [promtool, "check", "metrics"],
                input=text,
                capture_output=True,
                text=True,
                timeout=60,
            )
            assert (found.returncode, found.stdout + found.stderr) == (0, "")

    asyncio.run(test())


def test_health_and_readiness(make_plan: PlanMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        port = free_port()
        address = f"http://127.0.0.1:{port}"
        monkeypatch.setattr("fleetlearn_coordinator.service.monitoring.monitor.FRESH", 0.0)
        async with serving(make_plan(), metrics={"port": port}) as coordinator:
            assert (await get(address, "/healthz"))[:2] == (200, '{"healthy":true}\n')
            status, text, _ = await get(address, "/readyz")
            assert (status, json.loads(text)) == (200, {"ready": True, "why": []})
            with monkeypatch.context() as patched:
                patched.setattr(tempfile, "TemporaryFile", _full)
                status, text, _ = await get(address, "/readyz")
                (why,) = json.loads(text)["why"]
                assert status == 503
                assert re.fullmatch("run test cannot write into .*: no space left on device", why)
                assert (await get(address, "/healthz"))[0] == 200
                assert values((await get(address, "/metrics"))[1])["fleetlearn_ready"] == 0
            assert (await get(address, "/readyz"))[0] == 200
            coordinator.done.set_exception(OSError("the disk is gone"))
            assert json.loads((await get(address, "/readyz"))[1])["why"] == [
                "run test was stopped by an error"
            ]
            coordinator.done.exception()
            for path, method, expected in (
                ("/", "GET", 404), ("/metrics", "POST", 405), ("/metrics", "HEAD", 200),
                ("/healthz", "HEAD", 200),
            ):  # fmt: skip
                status, text, _ = await get(address, path, method=method)
                assert status == expected
                assert method != "HEAD" or not text

    asyncio.run(test())


def _full(**_: Any) -> Any:
    raise OSError(28, "No space left on device")


def test_a_connection_that_has_not_begun_has_nothing_to_send() -> None:
    """asyncio makes the connection known a turn of the event loop before its transport."""
    new = DeviceConnection.__new__(DeviceConnection)
    host: Any = SimpleNamespace(connections=[SimpleNamespace(connection=new)], refused={})
    now = Host.connections_now(host)
    host = SimpleNamespace(connections_now=lambda: now, gateways_now=list, certificate_ends=None)
    found = {name: sample.value for name, sample in host_gauges(host)}
    assert found == {
        "fleetlearn_connections": 1.0,
        "fleetlearn_send_queue_bytes": 0.0,
        "fleetlearn_send_queue_longest_bytes": 0.0,
    }


def test_what_cannot_be_told_is_an_answer_too(
    make_plan: PlanMaker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(host: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("fleetlearn_coordinator.service.monitoring.monitor.host_gauges", fail)

    async def test() -> None:
        port = free_port()
        address = f"http://127.0.0.1:{port}"
        async with fleet(make_plan(), metrics={"port": port}):
            status, text, _ = await get(address, "/metrics")
            assert (status, text) == (500, "this could not be told: the log says why\n")
            assert (await get(address, "/healthz"))[0] == 200

    asyncio.run(test())
    assert "a monitor's request for /metrics could not be answered" in caplog.text
    assert "ZeroDivisionError" in caplog.text


def test_runs_of_a_host_are_labels_of_one_endpoint(tmp_path: Path, bundle_path: Path) -> None:
    port = free_port()
    for name in "ab":
        (tmp_path / f"{name}.toml").write_text(plan_text(bundle_path, tmp_path / f"{name}.run"))
    service = ServiceSettings.read({"port": 0, "runs": "runs", "metrics": {"port": port}}, tmp_path)
    address = f"http://127.0.0.1:{port}"

    async def test() -> None:
        runs = Runs(tmp_path / "runs")
        for name in "ab":
            runs.add(name, tmp_path / f"{name}.toml")
        stopping = False
        async with hosting(service, lambda: stopping):
            await until(address, 'fleetlearn_run_failed{run="b"}', 0.0)
            found = await until(address, "fleetlearn_ready", 1.0)
            for name in "ab":
                assert found[f'fleetlearn_model_version{{run="{name}"}}'] == 0
            runs.want("b", "stopped")
            (failed,) = [run for run in runs.runs() if run.name == "b"]
            runs.failed(failed, "its disk is full")
            found = await until(address, 'fleetlearn_run_failed{run="b"}', 1.0)
            assert 'fleetlearn_model_version{run="b"}' not in found
            check_strictly((await get(address, "/metrics"))[1])
            stopping = True
            async with asyncio.timeout(20):
                while (await get(address, "/readyz"))[0] != 503:
                    await asyncio.sleep(0.1)
        runs.close()

    asyncio.run(test())


def test_with_tls_it_has_tls_and_says_when_the_certificate_ends(
    make_plan: PlanMaker, tmp_path: Path
) -> None:
    import ssl

    make_certificate(tmp_path, ["127.0.0.1"], 30)
    context = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
    tls = {"certificate": str(tmp_path / "certificate.pem"), "key": str(tmp_path / "key.pem")}

    async def test() -> None:
        port = free_port()
        async with serving(make_plan(), tls=tls, metrics={"port": port}):
            address = f"https://127.0.0.1:{port}"
            text = (await get(address, "/metrics", context=context))[1]
            left = values(text)["fleetlearn_certificate_left_seconds"]
            assert 29 * 86400 < left <= 30 * 86400

    asyncio.run(test())


def test_who_may_connect_is_said(tmp_path: Path) -> None:
    read = ServiceSettings.read
    assert read({}, tmp_path).metrics is None
    settings = read({"metrics": {}}, tmp_path).metrics
    assert settings is not None
    assert (settings.host, settings.port) == ("127.0.0.1", 8768)
    with pytest.raises(ServiceError, match=r'metrics\.host = "0\.0\.0\.0" lets other machines'):
        read({"metrics": {"host": "0.0.0.0"}}, tmp_path)
    assert read({"metrics": {"host": "0.0.0.0"}, "insecure": True}, tmp_path).metrics is not None
    assert read({}).with_metrics_port(None).metrics is None
    assert read({}).with_metrics_port(7).metrics == MetricsPort(port=7)
    named = {"metrics": {"host": "127.0.0.2", "port": 5}}
    assert read(named).with_metrics_port(0).metrics == MetricsPort(host="127.0.0.2", port=0)


def test_slow_scrapers_hold_nothing_up(make_plan: PlanMaker) -> None:
    """Connections that ask and do not read, and more of them than there is room for, while a device
    does its rounds and another scraper is answered."""

    async def test() -> None:
        port = free_port()
        async with fleet(make_plan(round__goal=1), metrics={"port": port}) as (_, join):
            peer = await join("a")
            slow = [await asyncio.open_connection("127.0.0.1", port) for _ in range(12)]
            for number, (_, writer) in enumerate(slow):
                asked = b"GET /metrics HTTP/1.1\r\nHost: x\r\n"
                writer.write(asked + (b"\r\n" if number % 2 else b""))
            for _ in range(3):
                await peer.do_round(update_of(1.0))
            address = f"http://127.0.0.1:{port}"
            await until(address, 'fleetlearn_reports_accepted_total{run="test"}', 3.0)
            for _, writer in slow:
                writer.close()

    asyncio.run(test())


def test_process_metrics_are_those_that_the_page_lists(make_plan: PlanMaker) -> None:
    async def test() -> None:
        port = free_port()
        async with serving(make_plan(), metrics={"port": port}):
            text = (await get(f"http://127.0.0.1:{port}", "/metrics"))[1]
            kinds = dict(re.findall(r"^# TYPE (process_\S+) (\S+)", text, re.MULTILINE))
            assert kinds == {name: kind for name, kind, _ in PROCESS_METRICS}

    asyncio.run(test())
