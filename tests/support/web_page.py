"""For tests: a page with a device of the SDK for browsers, served to a browser, and what stands
between it and its coordinator."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
from browser import served
from fleetlearn_coordinator import read_model, read_status
from fleetlearn_device import open_runtime
from fleetlearn_device.training.train import train
from fleetlearn_protocol.messages import PROTOCOL_NAME
from line_bundle import line_data, write_line_bundle
from peers import plan_text
from processes import Processes, free_port, processes, status_of, wait_for
from web_sdk import built, link_runtime
from websockets.asyncio.client import ClientConnection, connect
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed, WebSocketException
from websockets.typing import Subprotocol


class Site(ThreadingHTTPServer):
    """Serves the page of ``browser_page.ts``, and keeps what it logs."""

    daemon_threads = True

    def __init__(self, folder: Path, **settings: Any) -> None:
        """``settings``: what the device of the page is given: url, x, y and options."""
        super().__init__(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
        self.lines: list[str] = []
        self.origin = f"http://127.0.0.1:{self.server_address[1]}"
        self.page = f"{self.origin}/index.html"
        self.folder = folder
        folder.mkdir()
        for name in ("page.js", "worker.js"):
            (folder / name).write_bytes(built(f"browser/{name}").read_bytes())
        link_runtime(folder)
        (folder / "index.html").write_text('<script type="module" src="page.js"></script>')
        self.give(**settings)

    def give(self, **settings: Any) -> None:
        (self.folder / "settings.json").write_text(json.dumps(settings))

    def names(self) -> set[str]:
        """The names under which devices checked in."""
        return {line.split(" as ")[1] for line in self.lines if line.startswith("checked in")}

    def wait_for_line(self, part: str, count: int = 1) -> None:
        wait_for(
            lambda: sum(part in line for line in self.lines) >= count, f"{part!r} of {self.lines}"
        )


class Handler(SimpleHTTPRequestHandler):
    server: Site

    def do_POST(self) -> None:
        self.server.lines.append(self.rfile.read(int(self.headers["Content-Length"])).decode())
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving(folder: Path, **settings: Any) -> Iterator[Site]:
    site = Site(folder, **settings)
    with served(site):
        yield site


class Relay:
    """Passes the frames of a device on to its coordinator and back, and can hold one up."""

    def __init__(self, target: str) -> None:
        self.target, self.port = target, free_port()
        self.url = f"ws://127.0.0.1:{self.port}"
        self.connections = 0
        """Handshakes that were begun."""
        self.held = threading.Event()
        """The frame that was to be held up has come, and waits."""
        self.last: dict[str, Any] = {}
        """The message that was held up last."""
        self.reports: list[dict[str, Any]] = []
        """Those that devices sent, held up or not."""
        self._wanted: tuple[str, int] | None = None
        self._devices: set[ServerConnection] = set()
        self._release = asyncio.Event()
        self._round = 0
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()

    def hold(self, kind: str, round: int = 0) -> None:
        """Hold up the next frame of this kind (a message's type, ``chunk-down``, ``chunk-up``),
        from this round on, and all behind it in its direction."""
        self.held.clear()
        self._wanted = (kind, round)

    def wait_held(self, what: str) -> None:
        assert self.held.wait(60), f"waited 60 s for {what}, which did not come"

    def let_go(self) -> None:
        self._loop.call_soon_threadsafe(self._release.set)

    def cut(self) -> None:
        """Break all connections."""

        def abort() -> None:
            for connection in list(self._devices):
                connection.transport.abort()

        self._loop.call_soon_threadsafe(abort)

    def __enter__(self) -> Relay:
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._run(),))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()
        self._loop.close()

    async def _run(self) -> None:
        protocols = [Subprotocol(PROTOCOL_NAME)]
        options: dict[str, Any] = {"compression": None, "max_size": None, "close_timeout": 1}
        async with serve(self._relay, "127.0.0.1", self.port, subprotocols=protocols, **options):
            await self._over.wait()

    async def _relay(self, device: ServerConnection) -> None:
        self.connections += 1
        self._devices.add(device)
        assert device.request is not None
        offered = device.request.headers["Sec-WebSocket-Protocol"].split(",")
        protocols = [Subprotocol(name.strip()) for name in offered]
        with suppress(OSError, WebSocketException):
            async with connect(
                self.target, subprotocols=protocols, compression=None, max_size=None
            ) as coordinator:
                jobs = [
                    self._pass_on(device, coordinator, "up"),
                    self._pass_on(coordinator, device, "down"),
                    device.wait_closed(),  # also while a frame is held up
                    coordinator.wait_closed(),
                ]
                tasks = {asyncio.create_task(job) for job in jobs}
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in tasks:
                    task.cancel()
        self._devices.discard(device)
        device.transport.abort()

    async def _pass_on(
        self,
        source: ServerConnection | ClientConnection,
        target: ServerConnection | ClientConnection,
        way: str,
    ) -> None:
        with suppress(ConnectionClosed):
            async for frame in source:
                await self._held_up(frame, way)
                await target.send(frame)

    async def _held_up(self, frame: str | bytes, way: str) -> None:
        message = json.loads(frame) if isinstance(frame, str) else {"type": f"chunk-{way}"}
        if message["type"] == "task":
            self._round = message["round"]
        if message["type"] == "report":
            self.reports.append(message)
        if self._wanted is None:
            return
        kind, round = self._wanted
        if message["type"] == kind and self._round >= round:
            self._wanted, self.last = None, message
            self._release.clear()
            self.held.set()
            await self._release.wait()


class Fleet:
    """One coordinator, whose rounds need a device of a page and a Python device; the page's is
    behind a relay."""

    LR, MOST = 0.05, 1e-4

    def __init__(
        self, run: Processes, relay: Relay, site: Site, rounds: int, epochs: int, grace: float
    ) -> None:
        folder = run.folder
        self.run, self.relay, self.site, self.rounds, self.epochs = run, relay, site, rounds, epochs
        self.data_dir, self.plan = folder / "run", folder / "plan.toml"
        self.bundle = write_line_bundle(folder / "line.bundle", references=("anchor",))
        self.plan.write_text(
            plan_text(
                self.bundle.path,
                self.data_dir,
                local__lr=self.LR,
                local__epochs=epochs,
                local__batch_size=0,
                round__goal=2,
                round__minimum=2,
                round__gather=60.0,
                round__grace=grace,
                round__deadline=600.0,
                stop__rounds=rounds,
            )
        )
        (folder / "service.toml").write_text(
            f'port = {relay.target.rpartition(":")[2]}\norigins = ["{site.origin}"]\n'
        )
        x, y = line_data(20)
        self.shards = [(x[:12], y[:12]), (x[12:], y[12:])]
        np.savez(folder / "python.npz", x=x[12:], y=y[12:])
        self._settings = {"url": relay.url, "x": x[:12].tolist(), "y": y[:12].tolist()}
        self.give()

    def give(self, **options: Any) -> None:
        """What the device of a page that is opened from now on is given beside its data."""
        self.site.give(**self._settings | options)

    def start(self) -> None:
        self.run.coordinator(self.plan)
        self.run.device("python", self.relay.target, self.run.folder / "python.npz")

    def version(self) -> int:
        """The newest model's version; 0 before the first round ended."""
        found = status_of(self.data_dir)
        return 0 if found is None else found.version

    def wait_for_version(self, version: int) -> None:
        wait_for(
            lambda: self.version() >= version, f"model {version}; the page says {self.site.lines}"
        )

    def finish(self) -> None:
        """Wait for the end, and check that the model is what the updates make, each counted
        once."""
        assert self.run.wait("coordinator") == 0, self.run.log("coordinator")
        found, model = read_model(self.data_dir)
        assert found == self.rounds
        assert [row.summary["reports"] for row in read_status(self.data_dir).rounds] == [2] * found
        runtime, expected = (
            open_runtime(self.bundle.path),
            self.bundle.parameters().astype(np.float64),
        )
        for _ in range(self.rounds):
            models = []
            for shard in self.shards:
                runtime.load(expected.astype(np.float32))
                options: dict[str, Any] = {"epochs": self.epochs, "batch_size": 0, "seed": 0}
                train(runtime, shard, hyper={"lr": self.LR, "mu": 0.0}, **options)
                models.append(runtime.parameters.astype(np.float64))
            expected = np.average(models, axis=0, weights=[len(y) for _, y in self.shards])
        np.testing.assert_allclose(model, expected, rtol=0, atol=self.MOST)


@contextmanager
def fleet(folder: Path, *, rounds: int, epochs: int = 2, grace: float = 60.0) -> Iterator[Fleet]:
    target = f"ws://127.0.0.1:{free_port()}"
    with serving(folder / "site") as site, Relay(target) as relay, processes(folder) as run:
        yield Fleet(run, relay, site, rounds, epochs, grace)
