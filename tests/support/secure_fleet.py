"""For tests: a helper, a coordinator and devices as processes, whose plan has [secure]."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
from fleetlearn_coordinator.secure.helper_client import HelperAddress, NoHelperError, ask_for_card
from fleetlearn_coordinator.secure.helper_views import HelperView
from peers import plan_text
from processes import Processes, free_port, service_file, wait_for


class SecureFleet:
    """The files and commands of one fleet. ``names``: its devices, in the helper's roster."""

    def __init__(self, run: Processes, minimum: int, names: list[str]) -> None:
        self.run, self.names, self.folder = run, names, run.folder / "helper"
        self.file = self.folder / "helper.toml"
        run.command("helper", "init", self.folder, "127.0.0.1", "--minimum", str(minimum))
        port = free_port()
        self.file.write_text(self.file.read_text().replace("port = 8770", f"port = {port}"))
        self.enrol(*names)
        status = run.command("helper", "status", self.file, "--json").stdout
        self.view = msgspec.json.decode(status, type=HelperView)
        self.address = HelperAddress(self.view.address, self.view.certificate)
        self.port = free_port()
        self.data, self.plan = run.folder / "run", run.folder / "plan.toml"

    def enrol(self, *names: str) -> None:
        """Let devices in, by the lines that they print."""
        roster = self.folder / "roster.txt"
        roster.write_text("".join(map(self.roster_line, names)))
        self.run.command("helper", "enrol", self.file, roster)

    def roster_line(self, name: str) -> str:
        state = self.run.folder / f"{name}.state"
        words = "-m", "fleetlearn_device", "public-key", "--state", state, "--name", name
        process = self.run.start(f"key-{name}", sys.executable, *words)
        assert process.wait(60) == 0, self.run.log(f"key-{name}")
        return self.run.log(f"key-{name}")

    def write_plan(self, bundle: Path, recipe: str = "fedavg", **changed: object) -> None:
        settings: dict[str, object] = {
            "secure__mode": "helper",
            "secure__helper": self.view.address,
            "secure__key": self.view.key,
            "secure__certificate": self.view.certificate,
            "secure__clip": 5.0,
            "local__lr": 0.2,
            "round__goal": len(self.names),
            "round__minimum": len(self.names),
            "round__gather": 30.0,
            "round__grace": 30.0,
            "round__weighting": None,
            "local__evaluate": False,
            "stop__rounds": 3,
        }
        text = plan_text(bundle, self.data, recipe, **(settings | changed))  # type: ignore[arg-type]
        self.plan.write_text(text)
        service_file(self.plan, self.port)

    def start_helper(self, *wrapper: str | Path) -> None:
        words = wrapper or ("-m", "fleetlearn_coordinator", "helper", "serve", self.file)
        self.run.start("helper", sys.executable, *words)
        wait_for(self._listens, "the helper")

    def _listens(self) -> bool:
        try:
            return ask_for_card(self.address, bytes.fromhex(self.view.key), 5.0).minimum > 0
        except NoHelperError:
            return False

    def start_devices(self, shards: list[Path]) -> None:
        for name, shard in zip(self.names, shards, strict=False):
            self.run.device(name, f"ws://127.0.0.1:{self.port}", shard)
