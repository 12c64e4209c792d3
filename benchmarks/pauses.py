"""How long a coordinator leaves a ping unanswered while it takes in updates of a large model.

A few devices take and send a model of 400 MB (10^8 float32), as those of ``rounds.py`` do. Beside
them, a separate process (_pings.py) sends WebSocket pings on a connection that does nothing else,
each 10 ms after the answer to the last. The longest wait for an answer is the longest pause of the
coordinator's event loop. In each round the coordinator also saves its sum, if there are more
devices than ``--held``.

``--begin`` measures something else: a host with several runs, to which one with such a model is
added, stopped, and added again. No device takes part.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import _measure as measure
import _servers
import _websocket_device
from fleetlearn_coordinator import ServiceSettings
from fleetlearn_coordinator.service.several.operations import operating
from fleetlearn_coordinator.storage.runs import Population
from rounds import quantile, together

SHOWN = 0.1
"""Seconds from which on a pause is counted."""


@contextmanager
def pings(url: str, results: list[float]) -> Iterator[None]:
    """Send pings while the block runs; ``results`` then has the seconds until each answer."""
    command = [sys.executable, str(Path(__file__).with_name("_pings.py")), url]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()  # it has begun
        try:
            yield
        finally:
            output, _ = process.communicate("\n")
    results += map(float, output.splitlines())


def run(
    devices: int, size: int, rounds: int, held: int, durable: str, limit: float
) -> dict[str, float]:
    """Figures of one run."""
    update, log = _websocket_device.make_update(size), _websocket_device.Log()
    waits: list[float] = []
    with _servers.coordinator(
        size=size, devices=devices, rounds=rounds, durable=durable, held=held
    ) as server:
        began, before = time.monotonic(), measure.usage(server.pid)
        with pings(server.url, waits):
            parts = (
                _websocket_device.take_part(server.url, f"d{i}", update, log)
                for i in range(devices)
            )
            asyncio.run(together(parts, limit))
        seconds, after = time.monotonic() - began, measure.usage(server.pid)
    if (accepted := sum(moments.accepted for moments in log.values())) != devices * rounds:
        raise RuntimeError(f"{accepted} updates were accepted, of {devices * rounds}")
    return {
        "longest_pause_ms": 1e3 * max(waits),
        "second_longest_pause_ms": 1e3 * sorted(waits)[-2],
        "p99_ms": 1e3 * quantile(waits, 0.99),
        "p50_ms": 1e3 * quantile(waits, 0.5),
        "pauses_above_100_ms": sum(wait > SHOWN for wait in waits),
        "paused_part": sum(wait for wait in waits if wait > SHOWN) / seconds,
        "pings": len(waits),
        "seconds": seconds,
        "cpu_s": after.cpu - before.cpu,
        "peak_rss_mib": after.peak_rss,
    }


def begin(size: int) -> dict[str, float]:
    """Figures of a host to which a run is added, which begins with its bundle, and once more with
    its model."""
    waits: list[float] = []
    with measure.scratch() as folder:
        _servers.write_placeholder_bundle(folder / "bundle", size)
        plan, settings, log = (
            folder / "plan.toml",
            folder / "service.toml",
            folder / "coordinator.log",
        )
        values = {
            "bundle": "bundle",
            "local": "",
            "durable": "process",
            "devices": 1,
            "minimum": 1,
            "deadline": 600.0,
            "encoding": "float32",
        }
        plan.write_text(_servers.PLAN.format(**values, rounds=1, participation=""))
        settings.write_text('port = 0\nruns = "runs"\n')
        command = [sys.executable, "-m", "fleetlearn_coordinator", "serve", str(settings)]
        with _servers.server_process(command, log) as process:
            url = _servers.wait_for(r"listening on (ws://\S+:\d+)", process, log)
            with operating(ServiceSettings.load(settings)) as operations, pings(url, waits):
                operations.add("large", plan, Population())
                _servers.wait_for("run large is (served|stopped:)", process, log)
                operations.change("large", "stopped")
                _servers.wait_for("run large is (stopped;)", process, log)
                operations.change("large", "resumed")
                _servers.wait_for("(?s)run large is stopped;.*run large is (served)", process, log)
            usage = measure.usage(process.pid)
    return {
        "longest_pause_ms": 1e3 * max(waits),
        "pauses_above_100_ms": sum(wait > SHOWN for wait in waits),
        "paused_s": sum(wait for wait in waits if wait > SHOWN),
        "pings": len(waits),
        "cpu_s": usage.cpu,
        "peak_rss_mib": usage.peak_rss,
    }


def main() -> None:
    options = measure.parser(__doc__)
    options.add_argument("--devices", type=int, default=6)
    options.add_argument(
        "--size", type=int, default=100_000_000, help="parameters of the model, float32"
    )
    options.add_argument("--rounds", type=int, default=2)
    options.add_argument(
        "--held", type=int, default=4, help="updates after which the sum is saved (as a rule 32)"
    )
    options.add_argument(
        "--durable", choices=("process", "power"), default="process", help="the plan's durable"
    )
    options.add_argument("--repeats", type=int, default=1)
    options.add_argument(
        "--limit", type=float, default=600.0, help="seconds that one repeat may take"
    )
    options.add_argument(
        "--begin", action="store_true", help="a host with several runs, to which one is added"
    )
    chosen = options.parse_args()
    runs = [
        begin(chosen.size)
        if chosen.begin
        else run(
            chosen.devices, chosen.size, chosen.rounds, chosen.held, chosen.durable, chosen.limit
        )
        for _ in range(chosen.repeats)
    ]
    results = {key: measure.middle([run[key] for run in runs]) for key in runs[0]}
    print(
        measure.table(
            [
                ("figure", "coordinator"),
                *((key, measure.show(value)) for key, value in results.items()),
            ]
        )
    )
    settings = {key: value for key, value in vars(chosen).items() if key != "json"}
    measure.write_json(chosen.json, settings, {"fleetlearn": results, "runs": runs})


if __name__ == "__main__":
    main()
