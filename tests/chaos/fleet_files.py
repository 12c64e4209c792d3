"""The files of one fleet: its plan, the settings of its processes, the devices' data, the helper's
roster."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
from fleetlearn_coordinator.secure.helper_views import HelperView
from marked_update import CLIP
from peers import plan_text
from processes import Processes, free_port

from tests.chaos.bundles import write_data
from tests.chaos.machines import Machines
from tests.chaos.scenario import ASYNCHRONOUS, PLANS, SECURE, Scenario

BUCKET = "fleet-bucket"
GOAL = 40
"""Updates that make a model of the asynchronous plan."""


class FleetFiles:
    """The files of one fleet, as soon as ``write`` is called."""

    def __init__(
        self, folder: Path, scenario: Scenario, machines: Machines, run: Processes
    ) -> None:
        self.folder, self.scenario, self.machines, self.run = folder, scenario, machines, run
        self.data = machines.disk("hub") / "run"
        self.plan, self.service = folder / "plan.toml", folder / "service.toml"
        self.port, self.bus_port = free_port(), free_port()

    def write(self, bundle: Path, database: str | None) -> None:
        """``database``: the URL of the ledger's; None: it is in SQLite."""
        names, settings = self.scenario.names, dict(PLANS[self.scenario.plan])
        goal = len(names)
        usual: dict[str, Any] = {
            "local__lr": 0.05,
            "local__epochs": 5,
            "local__batch_size": 0,
            "round__goal": goal,
            "round__minimum": goal,
            # After three failures in a row a device is in doubt, and a round waits this long for
            # another one in its place.
            "round__gather": 5.0,
            "round__grace": 30.0,
            "round__deadline": 60.0,
            "round__stall": 30.0,
            "stop__rounds": 1_000_000,
            "models__last": 50,
        }
        if settings["recipe"] == "scaffold":
            usual["server__devices"] = goal
        if self.scenario.plan == SECURE:
            self._write_helper()
            usual |= {
                "secure__mode": "helper",
                "secure__helper": self.helper.address,
                "secure__key": self.helper.key,
                "secure__certificate": self.helper.certificate,
                "secure__clip": CLIP,
                "secure__minimum": goal,
                "round__weighting": "uniform",
                "local__evaluate": False,
                "round__deadline": 3600.0,
                "round__grace": 600.0,
            }
        if self.scenario.plan == ASYNCHRONOUS:
            usual |= {
                "round__goal": GOAL,
                "round__concurrency": goal,
                "round__minimum": None,
                "round__over_selection": None,
                "round__gather": None,
                "stop__rounds": 95,
            }
        recipe = settings.pop("recipe")
        text = plan_text(bundle, self.data, recipe, **(usual | settings))
        self.plan.write_text(f'durable = "{self.scenario.durable}"\n{text}')
        service = [
            f'host = "{self.machines.address("hub")}"',
            f"port = {self.port}",
            "insecure = true",
            "open = true",
            "heartbeat = 3.0",
        ]
        if database is not None:
            service.append(f'ledger = "{database}"')
        if self.scenario.blobs == "s3":
            service.append(f'blobs = "s3://{BUCKET}/runs"')
        if self.scenario.distant:
            service.append(f'bus = "nats://{self.machines.address("store")}:{self.bus_port}"')
        limits = ["[limits]", 'exempt = ["127.0.0.0/8", "10.7.0.0/24"]', ""]
        self.service.write_text("\n".join([*service, *limits]))
        for gateway in self.scenario.gateways_elsewhere:
            own = ["[gateway]", 'run = "test"', f'name = "{gateway}"']
            own.append(f'data_dir = "{self.machines.disk(gateway) / "gateway"}"')
            changed = {
                "host": f'host = "{self.machines.address(gateway)}"',
                "port": f"port = {self.gateway_port(gateway)}",
            }
            lines = [changed.get(line.partition(" ")[0], line) for line in service]
            lines = [line for line in lines if not line.startswith("ledger")]
            (self.folder / f"{gateway}.toml").write_text("\n".join([*lines, *own, *limits]))
        for number, name in enumerate(names):
            write_data(self.folder / f"{name}.npz", number)

    def gateway_port(self, name: str) -> int:
        """Return the port of a gateway elsewhere, which may be on one machine with the others."""
        return self.port + 1 + self.scenario.gateways_elsewhere.index(name)

    def _write_helper(self) -> None:
        folder, address = self.folder / "helper", self.machines.address("store")
        minimum = str(len(self.scenario.names))
        self.run.command("helper", "init", folder, address, "--minimum", minimum)
        self.helper_file = folder / "helper.toml"
        text = self.helper_file.read_text().replace('host = "127.0.0.1"', f'host = "{address}"')
        self.helper_file.write_text(text.replace("port = 8770", f"port = {free_port()}"))
        (folder / "roster.txt").write_text("".join(map(self._roster_line, self.scenario.names)))
        self.run.command("helper", "enrol", self.helper_file, folder / "roster.txt")
        self.machines.sync()  # what wrote the devices' keys was not watched
        view = self.run.command("helper", "status", self.helper_file, "--json").stdout
        self.helper = msgspec.json.decode(view, type=HelperView)

    def _roster_line(self, name: str) -> str:
        words = "-m", "fleetlearn_device", "public-key", "--state", self.state(name)
        process = self.run.start(f"key-{name}", sys.executable, *words, "--name", name)
        assert process.wait(60) == 0, self.run.log(f"key-{name}")
        return self.run.log(f"key-{name}")

    def state(self, name: str) -> Path:
        return self.machines.disk(name) / "state"
