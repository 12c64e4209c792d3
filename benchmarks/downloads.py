"""What devices fetch by their WebSockets, from an HTTP cache (nginx) and from an object store
(moto's server): what is sent twice over a link that breaks, and what it costs the coordinator.

``link``: one device fetches a large model over a slow link that breaks again and again, while the
coordinator is stopped (SIGTERM) and killed (SIGKILL) in turn, and started again. What crosses the
link is counted. The full case takes five minutes for each column: ``link --megabytes 500 --rate 2
--each 20``.

``fleet``: many devices fetch the same model at once. The CPU of the coordinator, and of the cache,
is counted.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from math import inf
from pathlib import Path

import _measure as measure
import _servers
import numpy as np
from _nginx import free_port
from _process_usage import family, usage
from broken_link import MB, Restarted
from fleetlearn_device import Device
from fleetlearn_device.driver.timing import Timing

sys.path.append(str(Path(__file__).parents[1] / "tests/support"))
from fetching import fetch_model
from nginx_cache import nginx_cache
from slow_link import SlowLink, slow_link

HERE = "127.0.0.1"
_servers.START_LIMIT = 600.0
"""On a busy machine a coordinator takes a minute to write its first model of 500 MB."""
WAYS = ("websocket", "cache", "store")
FLEET_WAYS = ("websocket", "own port", "cache")
FIRST = asyncio.FIRST_COMPLETED
ENDS = signal.SIGTERM, signal.SIGKILL
PLAN = """
name = "benchmark"
bundle = "bundle"
[round]
goal = {goal}
over_selection = 1
minimum = 1
deadline = 36000
grace = 600
[stop]
rounds = 1
"""


@contextmanager
def coordinator_of(size: int, goal: int, settings: str) -> Iterator[Restarted]:
    """A coordinator whose model has ``size`` parameters. ``settings``: more of its service file."""
    with measure.scratch() as folder:
        coordinator = Restarted(folder, size, PLAN.format(goal=goal), settings)
        try:
            yield coordinator
        finally:
            coordinator.process.kill()
            coordinator.process.wait()


@contextmanager
def object_store(port: int, endpoint: str) -> Iterator[None]:
    """moto's server on ``port``, and in the environment where it is found: at ``endpoint``."""
    from moto import mock_aws
    from moto.s3.models import s3_backends
    from moto.server import ThreadedMotoServer

    with mock_aws():
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        server = ThreadedMotoServer(HERE, port, verbose=False)
        server.start()
        s3_backends["123456789012"]["aws"].create_bucket("fleet", "us-east-1")
        os.environ |= {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "benchmark",
            "AWS_SECRET_ACCESS_KEY": "a secret",
        }
        try:
            yield
        finally:
            server.stop()


# Over a link that breaks


@contextmanager
def told_of_training(trains: asyncio.Event) -> Iterator[None]:
    """Set the event when the device begins to train: it has all that it fetches. (It fails then:
    the bundle has no graphs.)"""
    log = logging.getLogger("fleetlearn.device")

    class Watch(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if getattr(record, "event", "") == "training":
                trains.set()

    watch, level, propagates = Watch(), log.level, log.propagate
    log.addHandler(watch)
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(watch)
        log.setLevel(level)
        log.propagate = propagates


async def fetch_over(
    coordinator: Restarted, links: list[SlowLink], each: float, restarts: int, size: int
) -> dict[str, float]:
    """Let a device fetch a model of ``size`` bytes. ``links``: to the coordinator first."""
    began, trains = time.monotonic(), asyncio.Event()
    with measure.scratch() as folder, told_of_training(trains):
        data = {"x": np.zeros((4, 1), np.float32), "y": np.zeros(4, np.int64)}
        timing = Timing(base=0.2, cap=1.0)
        device = Device(
            links[0].address, data, folder / "device", download_from=[HERE], timing=timing
        )
        serving = asyncio.create_task(device.serve())
        breaking = [asyncio.create_task(link.break_each(each)) for link in links]
        for number in range(restarts):
            due = size * (number + 1) // (restarts + 1)
            while sum(link.down for link in links) < due:
                await asyncio.sleep(0.05)
            await asyncio.to_thread(coordinator.end, ENDS[number % 2])
            await asyncio.to_thread(coordinator.begin)
        await asyncio.wait({asyncio.create_task(trains.wait()), serving}, return_when=FIRST)
        seconds = time.monotonic() - began
        down = [link.down for link in links]
        for task in breaking:
            task.cancel()
        device.stop()
        await asyncio.wait({serving})
    return {
        "model_mb": size / MB,
        "by_websocket_mb": down[0] / MB,
        "by_http_mb": sum(down[1:]) / MB,
        "sent_twice_mb": (sum(down) - size) / MB,
        "breaks": links[0].breaks,
        "seconds": seconds,
    }


async def over_a_link(way: str, chosen: argparse.Namespace) -> dict[str, float]:
    """Figures of one way."""
    size, rate = int(chosen.megabytes * MB / 4), chosen.rate * MB
    origin, cache = free_port(), free_port()
    async with AsyncExitStack() as ends:
        settings, links = "", []
        if way != "websocket":
            link = await ends.enter_async_context(slow_link(cache, rate))
            link.rate_up = inf  # what the coordinator writes to the store crosses no slow link
            links = [link]
            where = link.address.replace("ws://", "http://")
        if way == "cache":
            settings = f'[contents]\naddress = "{where}/fleet"\nport = {origin}\n'
            folder = ends.enter_context(measure.scratch())
            ends.enter_context(nginx_cache(folder, origin, cache))
        elif way == "store":
            settings = 'blobs = "s3://fleet/runs"\n[contents]\naddress = "store"\n'
            ends.enter_context(object_store(cache, where))
        # In a thread: it speaks to the store over a link of this event loop.
        started = coordinator_of(size, 1, settings)
        coordinator = await asyncio.to_thread(ends.enter_context, started)
        first = await ends.enter_async_context(slow_link(coordinator.port, rate))
        links = [first, *links]
        return await fetch_over(coordinator, links, chosen.each, chosen.restarts, 4 * size)


# Many devices at once


async def fleet_of(way: str, chosen: argparse.Namespace) -> dict[str, float]:
    """Figures of one way."""
    size, origin, cache = int(chosen.megabytes * MB / 4), free_port(), free_port()
    with ExitStack() as ends:
        settings = f"downloads = {chosen.devices}\n"
        nginx = None
        if way != "websocket":
            where = f"{HERE}:{cache}/fleet" if way == "cache" else f"{HERE}:{origin}"
            settings += f'[contents]\naddress = "http://{where}"\n'
            settings += f"port = {origin}\n"
        if way == "cache":
            nginx = ends.enter_context(
                nginx_cache(ends.enter_context(measure.scratch()), origin, cache)
            )
        coordinator = ends.enter_context(coordinator_of(size, chosen.devices, settings))
        processes = [coordinator.process.pid, *([] if nginx is None else family(nginx.pid))]
        url, http = f"ws://{HERE}:{coordinator.port}", way != "websocket"
        before, began = [usage(each).cpu for each in processes], time.monotonic()
        fetching = [
            fetch_model(url, f"device-{number}", http=http, keep=False)
            for number in range(chosen.devices)
        ]
        came = sum(int(size) for size, _ in await asyncio.gather(*fetching))
        seconds = time.monotonic() - began
        spent = [usage(each).cpu - earlier for each, earlier in zip(processes, before, strict=True)]
        return {
            "devices": chosen.devices,
            "model_mb": 4 * size / MB,
            "fetched_mb": came / MB,
            "coordinator_cpu_s": spent[0],
            "cache_cpu_s": sum(spent[1:]),
            "coordinator_peak_mib": usage(processes[0]).peak_rss,
            "seconds": seconds,
        }


def main() -> None:
    options = measure.parser(__doc__)
    options.add_argument("what", choices=["link", "fleet"], nargs="?", default="link")
    options.add_argument("--megabytes", type=float, default=16, help="of the model")
    options.add_argument("--rate", type=float, default=2, help="megabytes a second of the link")
    options.add_argument("--each", type=float, default=3, help="seconds until the link breaks")
    options.add_argument("--restarts", type=int, default=2, help="of the coordinator")
    options.add_argument("--devices", type=int, default=100)
    options.add_argument("--ways", nargs="+")
    chosen = options.parse_args()
    ways = chosen.ways or [*(WAYS if chosen.what == "link" else FLEET_WAYS)]
    one = over_a_link if chosen.what == "link" else fleet_of
    runs = {way: asyncio.run(one(way, chosen)) for way in ways}
    keys = next(iter(runs.values()))
    rows = [(key, *(f"{run[key]:.4g}" for run in runs.values())) for key in keys]
    print(measure.table([("figure", *runs), *rows]))
    results = {
        way: {key: measure.middle([value]) for key, value in run.items()}
        for way, run in runs.items()
    }
    settings = {key: value for key, value in vars(chosen).items() if key != "json"}
    measure.write_json(chosen.json, settings, results)


if __name__ == "__main__":
    main()
