"""For tests: an engine process, gateways on other machines (folders of their own), a NATS server,
an object store and perhaps PostgreSQL, as real processes, each of which may be killed."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fleetlearn_coordinator import Plan, read_model
from gateway_processes import accepted_in
from nats_server import NatsServer
from object_server import BUCKET, ObjectServer
from peers import SIZE, plan_text, write_test_bundle
from postgres_server import PostgresServer
from processes import Processes, free_port
from random_kills import Devices, by_hand


class SpreadDevices(Devices):
    """Devices that connect to any of several gateways."""

    def __init__(self, urls: list[str], names: Iterable[str], **settings: Any) -> None:
        self._urls = urls
        super().__init__("", names, **settings)

    @property
    def url(self) -> str:
        return random.choice(self._urls)

    @url.setter
    def url(self, url: str) -> None:
        """They have several."""


class Site:
    """Everything that a run with gateways on other machines needs."""

    def __init__(
        self,
        run: Processes,
        bus: NatsServer,
        objects: ObjectServer,
        postgres: tuple[PostgresServer, str] | None,
        *,
        gateways: int = 2,
        rounds: int,
        devices: int,
        size: int = SIZE,
        **settings: Any,
    ) -> None:
        """``postgres``: a server, and the URL of a database; None: the ledger is in SQLite."""
        self.run, self.bus, self.objects, self.postgres = run, bus, objects, postgres
        self.rounds, self.size = rounds, size
        folder = run.folder
        bundle = write_test_bundle(folder / "test.bundle", size)
        usual = {
            "round__goal": devices,
            "round__minimum": devices,
            "round__deadline": 120.0,
            "round__grace": 60.0,
            "stop__rounds": rounds,
        }
        self.plan = folder / "plan.toml"
        self.plan.write_text(plan_text(bundle, folder / "run", **(usual | settings)))
        shared = f'bus = "{bus.url()}"\nblobs = "s3://{BUCKET}/runs"\n'
        ledger = "" if postgres is None else f'ledger = "{postgres[1]}"\n'
        self._service = folder / "engine.toml"
        self._service.write_text(shared + ledger)
        self.urls = []
        self._gateway_files = []
        for number in range(gateways):
            port, file = free_port(), folder / f"gateway-{number}.toml"
            own = f'[gateway]\nrun = "test"\nname = "g{number}"\ndata_dir = "gateway-{number}"\n'
            file.write_text(f"port = {port}\n{shared}{own}")
            self.urls.append(f"ws://127.0.0.1:{port}")
            self._gateway_files.append(file)
        names = [f"device-{number}" for number in range(devices)]
        self.devices = SpreadDevices(self.urls, names, size=size)
        self.engine: Any = None
        self.gateways: list[Any] = [None] * gateways
        self.environment = {**os.environ, **objects.environment}

    def _command(self, name: str, *words: str | Path) -> Any:
        command = (sys.executable, "-m", "fleetlearn_coordinator", *words)
        return self.run.start(name, *command, env=self.environment)

    def start_engine(self) -> None:
        self.engine = self._command(
            "engine", "serve", self.plan, "--service", self._service, "--standby"
        )

    def start_gateway(self, number: int) -> None:
        file = self._gateway_files[number]
        self.gateways[number] = self._command(f"gateway-{number}", "serve-gateway", file)

    def start(self) -> None:
        self.start_engine()
        for number in range(len(self.gateways)):
            self.start_gateway(number)

    def kill(self, part: str, luck: random.Random) -> None:
        """SIGKILL a part, and start it again, perhaps a little later."""
        pause = luck.choice([0.0, 0.3])
        match part:
            case "engine":
                kill(self.engine)
                time.sleep(pause)
                self.start_engine()
            case "gateway":
                number = luck.randrange(len(self.gateways))
                kill(self.gateways[number])
                time.sleep(pause)
                self.start_gateway(number)
            case "bus":
                self.bus.kill()
                time.sleep(pause)
                self.bus.start()
            case "store":
                self.objects.stop()
                time.sleep(pause)
                self.objects.start()
            case "postgres":
                assert self.postgres is not None
                self.postgres[0].kill()
                time.sleep(pause)
                self.postgres[0].start()
            case "paused bus":
                self.bus.pause()
                time.sleep(10 * pause)
                self.bus.go_on()
            case "paused gateway":
                process = luck.choice(self.gateways)
                process.send_signal(signal.SIGSTOP)
                time.sleep(10 * pause)
                process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        for process in self.gateways:
            process.terminate()
        for number, process in enumerate(self.gateways):
            assert process.wait(30) == 0, self.run.log(f"gateway-{number}")

    def check(self) -> None:
        """Check that what was acknowledged counts, once, and that the model is made of it."""
        folder = self.run.folder / "run"
        acknowledged = self.devices.acknowledged
        version, model = read_model(folder)
        found = accepted_in(folder)
        assert version == self.rounds
        assert {*acknowledged} <= {task for task, _, _ in found}, "an update was lost"
        assert len(acknowledged) == len({*acknowledged}), "or acknowledged twice"
        counted = Counter(number for _, number, _ in found)
        each = len(self.devices.names)
        assert counted == dict.fromkeys(range(1, self.rounds + 1), each)
        assert by_hand(Plan.load(self.plan), found, version).tobytes() == model.tobytes()


def kill(process: Any) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()
