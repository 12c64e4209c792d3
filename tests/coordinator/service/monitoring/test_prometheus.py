"""A real Prometheus, Debian's, scrapes a coordinator; its alert rules fire on planted faults."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fleetlearn_coordinator.plan.service_settings import AlertSettings
from fleetlearn_coordinator.service.monitoring.alert_rules import RULES, prometheus_rules
from peers import PlanMaker, fleet, update_of
from processes import free_port

pytestmark = pytest.mark.slow
CONFIG = """
global: {{scrape_interval: 1s, evaluation_interval: 1s}}
rule_files: [rules.yml]
scrape_configs:
  - job_name: fleetlearn
    static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
"""


@asynccontextmanager
async def prometheus(folder: Path, port: int, rules: str) -> AsyncIterator[str]:
    """Run a Prometheus that scrapes this port. Yields the URL of its API."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("prometheus is not here: apt-get install prometheus, or make test-all as root")
    (folder / "rules.yml").write_text(rules)
    (folder / "prometheus.yml").write_text(CONFIG.format(port=port))
    own = free_port()
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                program,
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{own}",
            ],
            stdout=log,
            stderr=log,
        )
    try:
        yield f"http://127.0.0.1:{own}/api/v1"
    finally:
        process.terminate()
        try:
            await asyncio.to_thread(process.wait, 20)
        finally:
            process.kill()


async def ask(api: str, path: str, **query: str) -> Any:
    """Return what Prometheus' API says."""

    def get() -> Any:
        with urllib.request.urlopen(
            f"{api}/{path}?{urllib.parse.urlencode(query)}", timeout=10
        ) as answer:
            return json.load(answer)["data"]

    return await asyncio.to_thread(get)


async def until(api: str, path: str, holds: Callable[[Any], bool], **query: str) -> Any:
    found: Any = None
    try:
        async with asyncio.timeout(60):
            while True:
                try:
                    found = await ask(api, path, **query)
                except OSError:  # it begins
                    found = None
                if found is not None and holds(found):
                    return found
                await asyncio.sleep(0.1)
    except TimeoutError:
        pytest.fail(f"{path} {query} is still {found}")


def firing(found: Any) -> dict[str, str]:
    """Return the alerts that fire, with what they say."""
    return {
        alert["labels"]["alertname"]: alert["annotations"]["summary"]
        for alert in found["alerts"]
        if alert["state"] == "firing"
    }


def test_it_scrapes_and_its_alerts_fire_on_planted_faults(
    make_plan: PlanMaker, tmp_path: Path
) -> None:
    # As shipped, but that nothing must last for the test to see it.
    settings = AlertSettings(no_round=0.05, disk_free=0.0)
    rules = prometheus_rules(settings).replace("for: 30s", "for: 0s")

    async def test() -> None:
        port = free_port()
        plan = make_plan(round__goal=1, stop__rounds=40)
        async with (
            fleet(plan, metrics={"port": port}) as (coordinator, join),
            prometheus(tmp_path, port, rules) as api,
        ):
            peer = await join("a")
            for _ in range(2):
                await peer.do_round(update_of(1.0))
            found = await until(
                api,
                "query",
                lambda found: bool(found["result"]) and found["result"][0]["value"][1] == "2",
                query="fleetlearn_reports_accepted_total",
            )
            assert found["result"][0]["metric"]["run"] == "test"
            (target,) = (await ask(api, "targets"))["activeTargets"]
            assert (target["health"], target["lastError"]) == ("up", "")
            groups = (await ask(api, "rules"))["groups"]
            states = {rule["name"]: rule["health"] for rule in groups[0]["rules"]}
            assert len(states) == len(RULES) + 1
            await until(
                api,
                "rules",
                lambda found: all(rule["health"] == "ok" for rule in found["groups"][0]["rules"]),
            )
            # no device reports any more
            found = await until(api, "alerts", lambda found: "FleetlearnNoRound" in firing(found))
            assert firing(found)["FleetlearnNoRound"].startswith("run test: no round was committed")
            assert set(firing(found)) == {"FleetlearnNoRound"}
            await peer.do_round(update_of(1.0))
            coordinator.done.set_exception(OSError("the disk is gone"))
            found = await until(api, "alerts", lambda found: "FleetlearnRunFailed" in firing(found))
            assert firing(found)["FleetlearnRunFailed"].startswith("run test: the run was stopped")
            coordinator.done.exception()

    asyncio.run(test())
