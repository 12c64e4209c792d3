"""A coordinator that tells somebody itself: from what happens to a command's input."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from fleetlearn_coordinator.plan.service_settings import ServiceError, ServiceSettings
from fleetlearn_coordinator.service.monitoring import alert_rules, alerts, monitor
from fleetlearn_coordinator.service.several_runs import hosting
from fleetlearn_coordinator.storage.runs import Runs
from peers import PlanMaker, fleet, plan_text, serving, update_of

KEEP = "import sys; open(sys.argv[1], 'a').write(sys.stdin.read() + '\\n')"


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alerts are looked at every second, and nothing must last."""
    rules = tuple(rule._replace(lasts=0.0) for rule in alert_rules.RULES)
    monkeypatch.setattr(alerts, "RULES", rules)
    monkeypatch.setattr(alerts, "OVER", 0.0)
    monkeypatch.setattr(monitor, "EVALUATION_PAUSE", 0.0)
    monkeypatch.setattr(monitor, "FRESH", 0.0)


def settings(file: Path, **limits: Any) -> dict[str, Any]:
    """Return [alerts] that writes what is told into a file, a line for each."""
    off = ["DiskLow"]
    return {"command": [sys.executable, "-c", KEEP, str(file)], "off": off, **limits}


def told(file: Path) -> list[str]:
    """Return what was told so far."""
    lines = file.read_text().splitlines() if file.exists() else []
    found = [json.loads(line) for line in lines]
    return [f"{each['alert']} {each['run']} {each['state']}" for each in found]


async def until_told(file: Path, expected: list[str]) -> None:
    async with asyncio.timeout(20):
        while told(file) != expected:
            await asyncio.sleep(0.05)


@pytest.mark.usefixtures("at_once")
def test_no_round_is_told_once_over_restarts_and_once_when_it_is_over(
    make_plan: PlanMaker, tmp_path: Path
) -> None:
    plan, file = make_plan(round__goal=1, stop__rounds=10**6), tmp_path / "told"
    own = settings(file, no_round=0.01)
    fires, over = "NoRound test firing", "NoRound test resolved"

    async def test() -> None:
        async with serving(plan, alerts=own):  # no device comes
            await until_told(file, [fires])
        async with fleet(plan, alerts=own) as (coordinator, join):
            looks = 0
            live = coordinator.live

            def look() -> dict[str, Any]:
                nonlocal looks
                looks += 1
                return live()

            coordinator.live = look
            while looks < 6:  # at what the process before left
                await asyncio.sleep(0.05)
            assert told(file) == [fires]
            peer = await join("a")
            async with asyncio.timeout(20):
                while told(file)[:2] != [fires, over]:
                    await peer.do_round(update_of(1.0))
                    await asyncio.sleep(0.05)

    asyncio.run(test())


def test_a_run_that_fails_is_told_before_the_process_ends(
    make_plan: PlanMaker, tmp_path: Path
) -> None:
    file = tmp_path / "told"

    async def test() -> None:
        async with serving(make_plan(), alerts=settings(file)) as coordinator:
            coordinator.fail(OSError("the disk is gone"))
            coordinator.done.exception()

    asyncio.run(test())
    assert told(file) == ["RunFailed test firing"]


@pytest.mark.usefixtures("at_once")
def test_a_failed_run_of_several_is_told(tmp_path: Path, bundle_path: Path) -> None:
    file = tmp_path / "told"
    (tmp_path / "a.toml").write_text(plan_text(bundle_path, tmp_path / "a.run"))
    service = ServiceSettings.read({"port": 0, "runs": "runs", "alerts": settings(file)}, tmp_path)

    async def test() -> None:
        runs = Runs(tmp_path / "runs")
        runs.add("a", tmp_path / "a.toml")
        async with hosting(service) as host:
            async with asyncio.timeout(20):
                while not [*host.servers()]:
                    await asyncio.sleep(0.05)
            next(iter(host.servers()))[1].fail(OSError("the disk is gone"))
            await until_told(file, ["RunFailed a firing"])
            runs.want("a", "running")
            await until_told(file, ["RunFailed a firing", "RunFailed a resolved"])
        runs.close()

    asyncio.run(test())


def test_a_ca_that_is_none_is_refused_at_the_start(make_plan: PlanMaker, tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("no PEM")
    own = {"webhook": "https://localhost/", "webhook_ca": str(tmp_path / "ca.pem")}

    async def test() -> None:
        async with serving(make_plan(), alerts=own):
            pass

    with pytest.raises(ServiceError, match=r"alerts\.webhook_ca = .*ca\.pem cannot be used"):
        asyncio.run(test())
