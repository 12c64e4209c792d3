"""For tests: a fleet with secure aggregation, with a helper, a coordinator, two Python devices, a
device of the SDK for browsers in Node, and one in a tab."""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
from fleetlearn_coordinator import read_status
from fleetlearn_coordinator.secure.helper_views import HelperView
from fleetlearn_device import open_runtime
from fleetlearn_device.training.train import train
from line_bundle import line_data, write_line_bundle
from peers import plan_text
from processes import Processes, free_port, processes
from web_page import Relay, Site, serving
from web_sdk import script

LR, EPOCHS = 0.05, 2
CLIP = 10.0
"""No update here is longer: the model is the mean of what devices train."""
PYTHON = ("first", "second")
EXAMPLES = {"tab": 12, "node": 8, "first": 20, "second": 16}
MOST_WEIGHT = 16
"""Of which the first has more."""


KEY_IN_STORE = """new Promise((resolve) => {
  indexedDB.open("fleetlearn").onsuccess = ({ target }) => {
    const values = target.result.transaction("values").objectStore("values");
    values.get("device-key-pair").onsuccess = ({ target }) =>
      resolve([target.result.privateKey.extractable, target.result.privateKey.type]);
  };
})"""
"""Whether the device's own key in a page's database can be exported, and what it is."""


class Evaluates(Protocol):
    """A tab of any browser."""

    def evaluate(self, expression: str, /) -> Any: ...


class SecureTabs:
    """The fleet. The tab is behind a relay, and has no options but those it is given."""

    def __init__(self, run: Processes, relay: Relay, site: Site, **settings: Any) -> None:
        """settings: of the plan, beside those of all fleets here."""
        self.run, self.relay, self.site, self.folder = run, relay, site, run.folder
        self.data = self.folder / "run"
        self.bundle = write_line_bundle(self.folder / "line.bundle", buffer=False)
        self._write_data()
        site.give(url=relay.url, timing={"cap": 1}, **self._arrays("tab"))
        self.helper = self.folder / "helper" / "helper.toml"
        run.command("helper", "init", self.helper.parent, "127.0.0.1", "--minimum", "3")
        text = self.helper.read_text().replace("port = 8770", f"port = {free_port()}")
        self.helper.write_text(text)
        shown = run.command("helper", "status", self.helper, "--json").stdout
        self.view = msgspec.json.decode(shown, type=HelperView)
        usual = {
            "local__lr": LR,
            "local__epochs": EPOCHS,
            "local__batch_size": 0,
            "local__evaluate": False,
            "round__goal": 4,
            "round__minimum": 3,
            "round__gather": 60.0,
            "round__grace": 60.0,
            "round__deadline": 600.0,
            "round__weighting": "examples",
            "round__max_weight": MOST_WEIGHT,
            "stop__rounds": 3,
            "secure__mode": "helper",
            "secure__helper": self.view.address,
            "secure__key": self.view.key,
            "secure__certificate": self.view.certificate,
            "secure__minimum": 3,
            "secure__clip": CLIP,
        }
        self.plan = self.folder / "plan.toml"
        self.plan.write_text(plan_text(self.bundle.path, self.data, **(usual | settings)))
        port = relay.target.rpartition(":")[2]
        (self.folder / "service.toml").write_text(f'port = {port}\norigins = ["{site.origin}"]\n')

    def _write_data(self) -> None:
        self.shards = {}
        for seed, (name, examples) in enumerate(EXAMPLES.items()):
            x, y = self.shards[name] = line_data(examples, seed)
            np.savez(self.folder / f"{name}.npz", x=x, y=y)

    def _arrays(self, name: str) -> dict[str, Any]:
        x, y = self.shards[name]
        return {"x": x.tolist(), "y": y.tolist()}

    def _node(self, *options: str) -> tuple[str, ...]:
        places = (self.relay.target, f"{self.folder}/node.npz", f"{self.folder}/node.state")
        return *script("node_device"), *places, "--name", "node", *options

    def enrol(self, page: Evaluates) -> str:
        """Let the helper know all devices, each by the line that it says itself. Returns that of
        the page."""
        lines = [page.evaluate("ownLine()")]
        assert re.fullmatch(r"[\w.-]+ [0-9a-f]{64}", lines[0])
        self.run.start("node.key", *self._node("--roster"))
        python = (sys.executable, "-m", "fleetlearn_device", "public-key")
        for name in PYTHON:
            state = ("--state", self.folder / f"{name}.state", "--name", name)
            self.run.start(f"{name}.key", *python, *state)
        for name in (*PYTHON, "node"):
            assert self.run.wait(f"{name}.key") == 0, self.run.log(f"{name}.key")
            lines.append(self.run.log(f"{name}.key").strip())
        roster = self.folder / "roster.txt"
        roster.write_text("".join(f"{line}\n" for line in lines))
        self.run.command("helper", "enrol", self.helper, roster)
        return str(lines[0])

    def start(self) -> None:
        """Start all processes."""
        command = (sys.executable, "-m", "fleetlearn_coordinator", "helper", "serve", self.helper)
        self.run.start("helper", *command)
        self.run.coordinator(self.plan)
        self.run.start("node", *self._node("--until-finished", "--base", "0.05"))
        for name in PYTHON:
            self.run.device(name, self.relay.target, self.folder / f"{name}.npz")

    def wait_held(self, kind: str, page: Evaluates) -> None:
        """Wait until a frame of this kind is held up."""
        try:
            self.relay.wait_held(kind)
        except AssertionError as error:
            shown = page.evaluate("[states.slice(-3), lines.slice(-10)]")
            raise AssertionError(f"{error}: {shown}; {self.run.log('coordinator')}") from None

    def finish(self) -> None:
        """Wait for the end, and check that no task had two masks, and that nothing measured
        left the tab."""
        assert self.run.wait("coordinator", 180) == 0, self.run.log("coordinator")
        masks = defaultdict(set)
        for report in self.relay.reports:
            masks[report["task"]].add((report["sealed"], report["parts"][0]["crc32"]))
            assert (report["examples"], report["loss"], report["steps"]) == (1, 0, 1)
        assert masks
        assert all(len(found) == 1 for found in masks.values()), masks

    def reports(self) -> list[int]:
        """Return how many updates each committed round has."""
        return [row.summary["reports"] for row in read_status(self.data).rounds]

    def expected(self, rounds: int) -> Any:
        """The model after rounds in which all devices took part."""
        runtime = open_runtime(self.bundle.path)
        model = self.bundle.parameters().astype(np.float64)
        weights = [min(len(y), MOST_WEIGHT) for _, y in self.shards.values()]
        for _ in range(rounds):
            models = []
            for shard in self.shards.values():
                runtime.load(model.astype(np.float32))
                options: dict[str, Any] = {"epochs": EPOCHS, "batch_size": 0, "seed": 0}
                train(runtime, shard, hyper={"lr": LR}, **options)
                models.append(runtime.parameters.astype(np.float64))
            model = np.average(models, axis=0, weights=weights)
        return model


@contextmanager
def secure_tabs(folder: Path, **settings: Any) -> Iterator[SecureTabs]:
    target = f"ws://127.0.0.1:{free_port()}"
    with serving(folder / "site") as site, Relay(target) as relay, processes(folder) as run:
        yield SecureTabs(run, relay, site, **settings)
