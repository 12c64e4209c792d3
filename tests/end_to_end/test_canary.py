"""Canaries with real processes: bundles that kill devices, fail or are slow reach a few of them and
go back; a good one reaches all, while its host is killed in each step and at each point."""

from __future__ import annotations

import json
import runpy
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from fleetlearn_coordinator import read_model
from fleetlearn_coordinator.service.canary.canary_views import canary_views
from fleetlearn_coordinator.service.several.population import place
from fleetlearn_coordinator.service.views.records import CanaryView
from fleetlearn_coordinator.storage.runs import Runs
from fleetlearn_protocol import read_manifest, write_manifest
from peers import plan_text
from processes import PATIENCE, Processes, free_port, wait_for

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(HERE))
    CRASH = runpy.run_path(str(HERE / "crash_canary.py"))
    KILLED = runpy.run_path(str(HERE / "harmed_device.py"))["KILLED"]
POINTS = list(CRASH["POINTS"])
DEVICES = [f"d{number}" for number in range(6)]
STEPS = (0.4, 0.7, 1.0)
RULES: dict[str, Any] = {
    "steps": list(STEPS),
    "tasks": 12,
    "hold": 0.04,
    "probation": 0.0,
    "patience": 10.0,
}


def inside(share: float) -> set[str]:
    """Return the devices that have the canary, whose run is the host's second."""
    return {name for name in DEVICES if place("canary 2", name) < share}


def renamed(bundle: Path, folder: Path, name: str) -> Path:
    """Return a copy of the bundle under another name: another bundle with the same model."""
    path = folder / f"{name}.bundle"
    shutil.copytree(bundle, path)
    manifest = read_manifest((path / "manifest.json").read_bytes())
    changed = msgspec.structs.replace(manifest, name=name)
    (path / "manifest.json").write_bytes(write_manifest(changed))
    return path


class Fleet:
    """A host with the run ``digits``, and devices that are started again when they die."""

    def __init__(self, run: Processes, bundle: Path, shards: list[Path]) -> None:
        self.run, self.folder, self._shards = run, run.folder, shards
        self.port, self.deaths = free_port(), dict.fromkeys(DEVICES, 0)
        rules = "\n".join(f"{key} = {json.dumps(value)}" for key, value in RULES.items())
        self.service = self.folder / "service.toml"
        self.service.write_text(
            f'port = {self.port}\nruns = "runs"\nheartbeat = 1.0\n[canary]\n{rules}\n'
        )
        settings: dict[str, Any] = {
            "round__goal": 2, "round__concurrency": 20, "round__minimum": None,
            "round__over_selection": None, "round__gather": None, "round__grace": 1.0,
            "round__deadline": 20.0, "local__lr": 0.05, "local__epochs": 1,
            "stop__rounds": 100_000,
        }  # fmt: skip
        plan = self.folder / "digits.toml"
        plan.write_text(plan_text(bundle, self.folder / "digits.run", "fedbuff", **settings))
        run.command("run", "add", self.service, "digits", plan)

    def serve(self, *wrapper: str | Path) -> None:
        words = wrapper or ("-m", "fleetlearn_coordinator")
        self.run.start("coordinator", sys.executable, *words, "serve", self.service)

    def start_device(self, name: str) -> None:
        number = DEVICES.index(name)
        self.run.start(
            name, sys.executable, HERE / "harmed_device.py", "run",
            "--coordinator", f"ws://127.0.0.1:{self.port}",
            "--data", self._shards[number],
            "--state", self.folder / f"{name}.state",
            "--name", name,
        )  # fmt: skip

    def tend(self) -> None:
        """Start devices again whose processes ended."""
        for name in DEVICES:
            process = self.run.running.get(name)
            if process is None or process.poll() is not None:
                self.deaths[name] += process is not None and process.poll() == KILLED
                self.start_device(name)

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Wait, while devices are started again."""

        def tended() -> bool:
            self.tend()
            return condition()

        wait_for(tended, what, 2 * PATIENCE)

    def canary(self) -> CanaryView:
        with closing(Runs(self.folder / "runs")) as runs:
            (found,) = canary_views(runs)
        return found

    def version(self, data: str = "digits.run") -> int:
        try:
            return read_model(self.folder / data)[0]
        except Exception:  # there is none yet
            return -1

    def begin(self, bundle: Path) -> None:
        self.run.command("canary", "start", self.service, "digits", "--bundle", bundle)

    def grows(self, data: str = "digits.run") -> None:
        """Wait for three more versions of a run's model."""
        before = self.version(data)
        self.wait(lambda: self.version(data) >= before + 3, f"versions of {data}")


@pytest.fixture
def fleet(run: Processes, bundle_path: Path, shards: list[Path]) -> Fleet:
    found = Fleet(run, bundle_path, shards)
    assert 0 < len(inside(STEPS[0])) < len(inside(STEPS[1])) < len(DEVICES)
    return found


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        ("killing", ("interrupted: ", "lost: ")),
        ("failing", ("failed: ",)),
        ("slow", ("time: ",)),
    ],
)
def test_a_harmful_bundle_reaches_a_few_devices_and_goes_back(
    fleet: Fleet, bundle_path: Path, harm: str, words: tuple[str, ...]
) -> None:
    fleet.serve()
    fleet.wait(lambda: fleet.version() >= 20, "the run's first versions")
    fleet.begin(renamed(bundle_path, fleet.folder, harm))
    fleet.wait(lambda: fleet.canary().phase != "running", "the canary's end")
    found = fleet.canary()
    assert (found.phase, found.step) == ("back", 1)
    assert any(word in found.next for word in words), found.next
    harmed = {name for name, deaths in fleet.deaths.items() if deaths}
    assert harmed <= inside(STEPS[0])
    assert bool(harmed) == (harm == "killing")
    fleet.grows()
    assert np.isfinite(read_model(fleet.folder / "digits.run")[1]).all()
    deaths = dict(fleet.deaths)
    for name in inside(STEPS[0]):
        done = fleet.run.log(name).count("training")
        fleet.wait(lambda: fleet.run.log(name).count("training") > done, f"a task of {name}")  # noqa: B023
    assert fleet.deaths == deaths, "nobody dies of the old bundle"


def test_a_good_bundle_reaches_all_devices_though_its_host_is_killed_in_each_step(
    fleet: Fleet, bundle_path: Path
) -> None:
    fleet.serve()
    fleet.wait(lambda: fleet.version() >= 5, "the run's first versions")
    fleet.begin(renamed(bundle_path, fleet.folder, "good"))
    for step in (1, 2, 3):
        fleet.wait(
            lambda: fleet.canary().step >= step or fleet.canary().phase != "running",  # noqa: B023
            f"step {step}",
        )
        fleet.run.kill("coordinator")
        fleet.serve()
    finishes(fleet)


@pytest.mark.parametrize("point", POINTS)
def test_a_host_that_is_killed_at_any_point_goes_on(
    fleet: Fleet, bundle_path: Path, point: str
) -> None:
    fleet.serve(HERE / "crash_canary.py", point, "1")
    fleet.wait(lambda: fleet.version() >= 5, "the run's first versions")
    fleet.begin(renamed(bundle_path, fleet.folder, "good"))
    host = fleet.run.running["coordinator"]
    fleet.wait(lambda: host.poll() is not None, f"the host's end: {point}")
    assert host.poll() == -9, fleet.run.log("coordinator")
    fleet.serve()
    finishes(fleet)


def test_a_run_that_was_served_alone_is_moved_as_the_page_says(
    run: Processes, bundle_path: Path, shards: list[Path]
) -> None:
    """docs/operate/canary.md, "A run that is served alone": its model and its devices go on."""
    fleet = Fleet(run, bundle_path, shards)
    plan, alone = fleet.folder / "digits.toml", fleet.folder / "alone.toml"
    run.command("run", "remove", fleet.service, "digits")
    alone.write_text(f"port = {fleet.port}\nheartbeat = 1.0\n")
    run.start(
        "coordinator", sys.executable, "-m", "fleetlearn_coordinator", "serve", plan,
        "--service", alone,
    )  # fmt: skip
    fleet.wait(lambda: fleet.version() >= 5, "the run's first versions")
    words = ("canary", "start", plan, "digits", "--model", "1")
    assert "run add SERVICE.toml" in run.command(*words, expected=1).stderr
    devices = {name: run.running[name] for name in DEVICES}
    run.running["coordinator"].send_signal(signal.SIGTERM)
    assert run.wait("coordinator") == 0, run.log("coordinator")
    before = fleet.version()
    run.command("run", "add", fleet.service, "digits", plan)
    fleet.serve()
    fleet.grows()
    assert fleet.version() > before
    assert {name: run.running[name] for name in DEVICES} == devices, "nobody was started again"
    run.command("run", "add", fleet.service, "other", plan, expected=1)  # its data are taken
    fleet.begin(renamed(bundle_path, fleet.folder, "good"))
    fleet.wait(lambda: fleet.canary().canary.done > 0, "a device's work for the canary")


def finishes(fleet: Fleet) -> None:
    """The canary takes the old run's place, and all devices serve it."""
    fleet.wait(lambda: fleet.canary().phase != "running", "the canary's end")
    found = fleet.canary()
    assert (found.phase, found.name, found.of) == ("finished", "digits", "digits.before"), found
    with closing(Runs(fleet.folder / "runs")) as runs:
        rows = {run.name: (run.number, run.wanted) for run in runs.runs()}
    assert rows == {"digits.before": (1, "stopped"), "digits": (2, "running")}
    old = fleet.version()
    new = "runs/digits.canary.run"
    fleet.grows(new)
    assert fleet.version() == old, "nothing changes the old run's model any more"
    assert fleet.version(new) > old
    for name in DEVICES:
        done = fleet.run.log(name).count("training")
        fleet.wait(lambda: fleet.run.log(name).count("training") > done, f"a task of {name}")  # noqa: B023
    assert not any(fleet.deaths.values())
