"""What is read of a run and of its host at the moment of a scrape, on the event loop."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from fleetlearn_coordinator.network.run_host import RunHost
from fleetlearn_coordinator.privacy.budget import PrivacyAccount
from fleetlearn_coordinator.rounds.settings import Phase
from fleetlearn_coordinator.service.monitoring.catalogue import Sample
from fleetlearn_coordinator.service.server import RunServer


def run_gauges(run: str, server: RunServer, live: dict[str, Any]) -> Iterator[tuple[str, Sample]]:
    """Yield the name and series of each metric. ``live``: what ``server.live()`` returned."""
    engine = server.engine
    finished = server.run.finished is not None
    single = {
        "round": live["round"],
        "round_open": engine.phase is Phase.OPEN,
        "round_goal": engine.settings.goal,
        "round_minimum": engine.settings.minimum,
        "round_reports": live["accepted"],
        "model_version": live["version"],
        "paused": engine.paused,
        "finished": finished,
        "devices_connected": live["connected"],
        "leases": live["leases"],
        "spool_files": server.run.store.spool_files,
    }
    for name, value in single.items():
        yield f"fleetlearn_{name}", Sample((run,), float(value))
    to_go = max(0, server.run.plan.stop.rounds - engine.version)
    for name, value in _privacy(server.run.budget.account, to_go).items():
        yield f"fleetlearn_privacy_{name}", Sample((run,), float(value))
    if (sums := server.run.mask_sums) is not None:
        yield "fleetlearn_helper_tries", Sample((run,), float(sums.tries))
        yield "fleetlearn_devices_held", Sample((run,), float(len(engine.selection.held)))
    moving = live["uploading"] + live["queued"]
    states = {
        "idle": live["idle"],
        "training": max(0, live["leases"] - moving),
        "uploading": live["uploading"],
        "queued": live["queued"],
        "unable": server.unable,
        "away": live.get("away", 0),
    }
    for state, count in states.items():
        yield "fleetlearn_devices", Sample((run, state), float(count))
    for region in live.get("regions", ()):
        labels = run, region["name"]
        yield "fleetlearn_region_reports", Sample(labels, float(region["reports"]))
        yield "fleetlearn_region_goal", Sample(labels, float(region["goal"]))
        for state, key in (("waiting", "waiting"), ("training", "tasks")):
            yield "fleetlearn_region_devices", Sample((*labels, state), float(region[key]))
    present, most = server.present(), server.minutes.most_present()
    yield "fleetlearn_devices_present_ratio", Sample((run,), present / most if most else 1.0)


def _privacy(account: PrivacyAccount | None, to_go: int) -> dict[str, float]:
    """Return what is known of a private run's budget. ``to_go``: rounds until stop.rounds."""
    if account is None:
        return {}
    found = {"epsilon": account.epsilon, "releases": account.releases}
    found["releases_left"] = to_go if account.left is None else min(to_go, account.left)
    if account.budget is not None:
        found |= {"budget": account.budget, "spent_ratio": account.epsilon / account.budget}
    return found


def waits(server: RunServer) -> bool:
    """Return whether the run waits for rounds: it is neither paused nor finished nor drained."""
    engine = server.engine
    return not (
        engine.paused
        or server.run.finished is not None
        or server.done.done()
        or (engine.draining and engine.phase is Phase.GATHERING)
    )


def host_gauges(host: RunHost) -> Iterator[tuple[str, Sample]]:
    """Yield the name and series of each metric of the process's connections."""
    now = host.connections_now()
    yield "fleetlearn_connections", Sample((), float(now.open))
    for cause, count in now.refused.items():
        yield "fleetlearn_handshakes_refused_total", Sample((cause,), float(count))
    yield "fleetlearn_send_queue_bytes", Sample((), float(now.unsent))
    yield "fleetlearn_send_queue_longest_bytes", Sample((), float(now.longest))
    for gateway in host.gateways_now():
        labels = (str(gateway.number),)
        yield "fleetlearn_gateway_connections", Sample(labels, float(gateway.connections))
        yield "fleetlearn_gateway_devices", Sample(labels, float(gateway.devices))
        yield "fleetlearn_gateway_received_bytes_total", Sample(labels, float(gateway.bytes_up))
        yield "fleetlearn_gateway_sent_bytes_total", Sample(labels, float(gateway.bytes_down))
        yield "fleetlearn_gateway_event_loop_lag_seconds", Sample(labels, gateway.lag)
    if (ends := host.certificate_ends) is not None:
        yield "fleetlearn_certificate_left_seconds", Sample((), ends - time.time())
