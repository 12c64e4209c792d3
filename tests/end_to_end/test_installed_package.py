"""The package of examples/own_package as a stranger uses it: its wheel is installed by pip, and
plans, scenarios and devices name its functions by the short names of its entry points."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleetlearn_coordinator import read_model, read_status
from fleetlearn_coordinator.storage.sqlite_ledger import DATABASE
from fleetlearn_protocol.computations.bundle import write_computation_bundle
from fleetlearn_protocol.computations.function_settings import (
    FunctionSums,
    RowArray,
    StateArray,
    SumArray,
)
from line_bundle import line_data, write_line_bundle
from package_wheel import Environment, build_wheel, copy_package
from peers import plan_text
from processes import Processes, free_port, processes, wait_for
from virtual import write_scenario

DEVICES = ("a", "b", "c")
ROUNDS = 3
PLUGINS = '[plugins]\nmodules = ["own_package"]\n'
SHORT = {
    "selection__strategy": "most-examples",
    "selection__parameters": {"least": 5},
    "stop__rule": "enough-reports",
    "stop__parameters": {"reports": len(DEVICES) * ROUNDS},
    "aggregation__aggregator": "without-longest",
    "server__optimizer": "heavy-ball",
    "server__parameters": {"momentum": 0.5},
    "local__algorithm": "shortened",
    "local__parameters": {"longest": 0.05},
    "encoding__up": "upper-bytes",
    "encoding__parameters": {"block": 256},
}
"""Of a plan: what it names of the package."""
WHOLE = SHORT | {
    "selection__strategy": "own_package.rounds:most_examples",
    "stop__rule": "own_package.rounds:enough_reports",
    "aggregation__aggregator": "own_package.server:without_longest",
    "server__optimizer": "own_package.server:heavy_ball",
    "local__algorithm": "own_package.devices:shortened",
    "encoding__up": "own_package.formats:upper_bytes",
}
ALLOWED = tuple(
    names[key] for names in (SHORT, WHOLE) for key in ("local__algorithm", "encoding__up")
)


WAITING = """
import time
from pathlib import Path

from own_package import devices

def shortened(work, *, longest: float):
    while not Path("go").exists():
        time.sleep(0.01)
    return devices.shortened(work, longest=longest)
"""
"""A device's function that waits for a file."""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two versions of the package. The newer one's aggregator has another default."""
    folder = tmp_path_factory.mktemp("wheels")
    newer = {"server": ("least: int = 3", "least: int = 4")}
    return {
        "1.0": build_wheel(copy_package(folder / "first"), folder),
        "1.1": build_wheel(copy_package(folder / "second", "1.1", **newer), folder),
    }


class Site:
    """A folder with plans, a service file and devices' data; the environment that it runs in."""

    def __init__(self, run: Processes, environment: Environment) -> None:
        self.run, self.environment = run, environment
        self.folder = run.folder
        self.bundle = write_line_bundle(self.folder / "line.bundle", buffer=False).path
        for number, name in enumerate(DEVICES):
            x, y = line_data(20 + number, seed=number)
            np.savez(self.folder / f"{name}.npz", x=x, y=y)
        self.port = free_port()

    def plan(self, name: str, **settings: Any) -> Path:
        whole = {
            "local__lr": 0.1,
            "local__evaluate": False,
            "round__goal": len(DEVICES),
            "round__minimum": len(DEVICES),
            "round__gather": 60.0,
            "round__deadline": 120.0,
            **settings,
        }
        file = self.folder / f"{name}.toml"
        file.write_text(plan_text(self.bundle, self.folder / f"{name}.run", "fedavg", **whole))
        return file

    def service(self, more: str = "", plugins: str = PLUGINS) -> Path:
        file = self.folder / "service.toml"
        file.write_text(f"port = {self.port}\n{more}{plugins}")
        return file

    def command(self, *words: str | Path, expected: int = 0) -> str:
        done = self.environment.run("fleetlearn_coordinator", *words, cwd=self.folder)
        assert done.returncode == expected, (words, done.stdout, done.stderr)
        return done.stdout + done.stderr

    def start(self, name: str, *words: str | Path) -> Any:
        python, env = self.environment.python, self.environment.env
        return self.run.start(name, python, "-m", *words, cwd=self.folder, env=env)

    def serve(self, *words: str | Path, name: str = "coordinator") -> Any:
        return self.start(name, "fleetlearn_coordinator", "serve", *words)

    def device(self, name: str, *more: str, allowed: tuple[str, ...] = ALLOWED) -> Any:
        words = ["--coordinator", f"ws://127.0.0.1:{self.port}", "--name", name]
        words += ["--data", f"{name}.npz", "--state", f"{name}.state", *more]
        for each in allowed:
            words += ["--allow-function", each]
        return self.start(name, "fleetlearn_device", "run", *words)

    def ended(self, *names: str) -> None:
        for name in names:
            assert self.run.wait(name) == 0, self.run.log(name)

    def accepted(self, plan: str) -> int:
        """Return how many updates of the run were accepted."""
        file = self.folder / f"{plan}.run" / DATABASE
        if not file.exists():
            return 0
        try:
            with sqlite3.connect(f"file:{file}?mode=ro", uri=True) as ledger:
                query = "SELECT count(*) FROM tasks WHERE state = 'accepted'"
                return int(ledger.execute(query).fetchone()[0])
        except sqlite3.OperationalError:  # its tables are not there yet
            return 0


@pytest.fixture
def site(tmp_path: Path, wheels: dict[str, Path]) -> Iterator[Site]:
    environment = Environment(tmp_path / "env")
    environment.install(wheels["1.0"])
    with processes(tmp_path) as run:
        yield Site(run, environment)


def checks(site: Site, plan: Path, service: Path, expected: int = 0) -> list[dict[str, str]]:
    done = site.command("doctor", plan, "--service", service, "--json", expected=expected)
    found: list[dict[str, str]] = json.loads(done[: done.rindex("]") + 1])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("gateways", [0, 2])
def test_short_names_make_the_models_of_whole_names(site: Site, gateways: int) -> None:
    """In two runs of one coordinator, also where gateways read the updates."""
    service = site.service(f'runs = "runs"\ngateways = {gateways}\n')
    for name, names in (("short", SHORT), ("whole", WHOLE)):
        site.command("run", "add", service, name, site.plan(name, **names))
    site.serve(service)
    for name in DEVICES:
        site.device(name)
    for name in ("short", "whole"):
        wait_for(
            lambda name=name: site.accepted(name) == len(DEVICES) * ROUNDS,  # type: ignore[misc]
            f"the reports of {name}: {site.run.log('coordinator')}",
        )

    def states() -> list[str]:
        rows = json.loads(site.command("run", "list", service, "--json"))
        return [row["state"] for row in rows]

    wait_for(lambda: states() == ["finished"] * 2, "the end of both runs")
    log = site.run.log("coordinator")
    for key, name in (
        ("selection.strategy", "most-examples"),
        ("stop.rule", "own_package.rounds:enough_reports"),
        ("aggregation.aggregator", "without-longest"),
        ("server.optimizer", "own_package.server:heavy_ball"),
        ("encoding.up", "upper-bytes"),
    ):
        assert f"{key} = {name} 1.0 " in log, key
    (version, short), (_, whole) = (
        read_model(site.folder / f"{name}.run") for name in ("short", "whole")
    )
    assert version == ROUNDS
    assert short.tobytes() == whole.tobytes()
    status = read_status(site.folder / "short.run")
    assert status.finished == f"{len(DEVICES) * ROUNDS} reports are enough"


@pytest.mark.slow
def test_a_newer_version_after_a_kill(site: Site, wheels: dict[str, Path]) -> None:
    """In the middle of a round: log and doctor say both versions, and no report is lost."""
    names = {"stop__parameters": {"reports": 2 * len(DEVICES)}}
    plan, service = site.plan("plan", **{**SHORT, **names}), site.service()
    (site.folder / "waiting.py").write_text(WAITING)
    site.serve(plan, "--service", service)
    for name in DEVICES[:2]:
        site.device(name, "--until-finished")
    site.device("c", "--until-finished", allowed=("shortened=waiting:shortened", "upper-bytes"))
    wait_for(lambda: site.accepted("plan") == 2, "two reports of the first round")
    site.run.kill("coordinator")
    before = site.run.log("coordinator")

    site.environment.install(wheels["1.1"])
    found = [row["found"] for row in checks(site, plan, service) if row["what"] == "own algorithm"]
    assert [row for row in found if row.startswith("aggregation.aggregator = without-longest 1.1 ")]
    site.serve(plan, "--service", service)
    (site.folder / "go").touch()
    site.ended("coordinator", *DEVICES)
    log = site.run.log("coordinator").removeprefix(before)
    (line,) = [row for row in log.splitlines() if "own algorithms are others than when" in row]
    assert "WARNING" in line
    assert "aggregation.aggregator was without-longest 1.0 " in line
    assert "and is without-longest 1.1 " in line
    status = read_status(site.folder / "plan.run")
    assert [row.summary["reports"] for row in status.rounds] == [3, 3]


@pytest.mark.slow
def test_a_package_that_is_gone_loses_nothing(site: Site, wheels: dict[str, Path]) -> None:
    plan, service = site.plan("plan", **SHORT), site.service()
    site.serve(plan, "--service", service)
    for name in DEVICES:
        site.device(name, "--until-finished")
    wait_for(lambda: site.accepted("plan") >= len(DEVICES) + 1, "a round and a report")
    site.run.kill("coordinator")
    counted = site.accepted("plan")

    site.environment.uninstall()
    for text in ("is not known", "or a short name that an installed package gives"):
        assert text in site.command("serve", plan, "--service", service, expected=1)
        assert text in json.dumps(checks(site, plan, service, expected=6))
    whole = site.plan("whole", **WHOLE)
    refused = site.command("serve", whole, "--service", service, expected=1)
    assert "[plugins] of the service: the module own_package is not there" in refused
    assert "Install its package in this environment" in refused
    assert site.accepted("plan") == counted
    site.command("status", site.folder / "plan.run", expected=3)

    site.environment.install(wheels["1.0"])
    site.serve(plan, "--service", service)
    site.ended("coordinator", *DEVICES)
    assert "own algorithms are others" not in site.run.log("coordinator")
    assert site.accepted("plan") == len(DEVICES) * ROUNDS


@pytest.mark.slow
def test_a_module_that_is_not_listed(site: Site) -> None:
    plan, service = site.plan("plan", **SHORT), site.service(plugins="")
    refused = site.command("serve", plan, "--service", service, expected=1)
    assert '[plugins] modules = ["own_package.rounds"]' in refused
    assert not (site.folder / "plan.run").exists()
    table = site.command("algorithms", service)
    assert "own_package.server:without_longest" in table
    assert "no: own_package is not listed" in table
    assert "--allow-function shortened" in table


@pytest.mark.slow
def test_a_standby_goes_on_with_it(site: Site) -> None:
    plan, service = site.plan("plan", **SHORT), site.service()
    site.serve(plan, "--service", service, "--standby", name="first")
    wait_for(lambda: "listening" in site.run.log("first"), "the first to serve")
    site.serve(plan, "--service", service, "--standby", name="second")
    wait_for(lambda: "standing by" in site.run.log("second"), "the second to stand by")
    for name in DEVICES:
        site.device(name, "--until-finished")
    wait_for(lambda: site.accepted("plan") >= len(DEVICES) + 1, "a round and a report")
    site.run.kill("first")
    site.ended("second", *DEVICES)
    assert "own algorithms: selection.strategy = most-examples 1.0 " in site.run.log("second")
    assert read_status(site.folder / "plan.run").version == ROUNDS


@pytest.mark.slow
def test_own_functions_by_short_names(site: Site) -> None:
    settings = FunctionSums(
        device="totals",
        coordinator="mean",
        rows={"x": RowArray((3,))},
        state={"x": StateArray((3,))},
        sums={"x": SumArray((3,))},
    )
    for name in DEVICES:
        with np.load(site.folder / f"{name}.npz") as arrays:
            only = arrays["x"].astype(np.float64)
        np.savez(site.folder / f"{name}.npz", x=only)
    site.bundle = write_computation_bundle(site.folder / "mean.bundle", "mean", settings)
    plan, service = site.folder / "plan.toml", site.service()
    goal = len(DEVICES)
    plan.write_text(
        f'recipe = "function"\nname = "mean"\nbundle = "{site.bundle}"\ndata_dir = "run"\n'
        f"[round]\ngoal = {goal}\nminimum = {goal}\nover_selection = 1.0\ndeadline = 120.0\n"
    )
    (row,) = [row for row in checks(site, plan, service) if row["what"] == "own algorithm"]
    assert row["found"].startswith("the bundle's coordinator = mean 1.0 ")
    site.serve(plan, "--service", service)
    for name in DEVICES:
        site.device(name, "--until-finished", allowed=("totals",))
    site.ended("coordinator", *DEVICES)
    x = np.concatenate([line_data(20 + number, seed=number)[0] for number in range(3)])
    found = json.loads(site.command("result", plan, "--json"))["result"]
    assert np.allclose(found["state"]["x"], x.mean(axis=0, dtype=np.float64), atol=1e-6)


LAWS = {
    "availability": {"kind": "at-night", "parameters": {"share": 0.9, "begin": 0, "end": 24}},
    "failures": {"law": "half-way", "parameters": {"chance": 0.3}},
    "data": {"kind": "lines", "parameters": {"noise": 0.2}},
}
WHOLE_LAWS = {
    "availability": LAWS["availability"] | {"kind": "own_package.fleets:at_night"},
    "failures": LAWS["failures"] | {"law": "own_package.fleets:half_way"},
    "data": LAWS["data"] | {"kind": "own_package.fleets:lines"},
}


@pytest.mark.slow
def test_rehearsals_by_short_names_in_several_processes(site: Site) -> None:
    found = []
    for name, laws, names, workers in (
        ("short", LAWS, SHORT, "2"),
        ("whole", WHOLE_LAWS, WHOLE, "1"),
    ):
        folder = site.folder / name
        folder.mkdir()
        plan = {f"plan__{key}": value for key, value in names.items()}
        plan |= {"plan__stop__parameters": {"reports": 12}, "plan__stop__rounds": 50}
        goal = {"goal": 4, "minimum": 3, "over_selection": 1.5, "deadline": 1000.0}
        scenario = write_scenario(folder, site.bundle, 20, **{**laws, "plan__round": goal, **plan})
        words = ["fleetlearn_simulator", "run", scenario, "--workers", workers]
        refused = site.environment.run(*words, cwd=folder)
        assert refused.returncode == 1
        assert "--plugin own_package" in refused.stderr
        done = site.environment.run(*words, "--plugin", "own_package", cwd=folder)
        assert done.returncode == 0, done.stderr
        summary = json.loads((folder / "scenario.sim" / "summary.json").read_text())
        assert all(" 1.0 " in origin for origin in summary["own"].values()), summary["own"]
        assert {"data.kind", "failures.law", "availability.kind", "plan.local.algorithm"} < {
            *summary["own"]
        }
        assert summary["lost"]["download"] > 0
        found.append((folder / "scenario.sim" / "model.safetensors").read_bytes())
    assert found[0] == found[1]


@pytest.mark.slow
def test_a_package_that_is_edited_in_place(site: Site, tmp_path: Path) -> None:
    """pip install --editable: its version is known, and a change of a helper module is seen."""
    site.environment.uninstall()
    source = copy_package(tmp_path / "work", "1.2.dev0")
    with (source / "pyproject.toml").open("a") as project:
        project.write('[tool.hatch.build]\ndev-mode-dirs = ["."]\n')  # needs no package `editables`
    helper = source / "own_package" / "weights.py"
    helper.write_text("least = 3\n")
    server = source / "own_package" / "server.py"
    server.write_text(f"from own_package.weights import least as _least\n{server.read_text()}")
    site.environment.install("--editable", source)
    plan, service = site.plan("plan", aggregation__aggregator="without-longest"), site.service()

    def origin() -> list[str]:
        (row,) = [row for row in checks(site, plan, service) if row["what"] == "own algorithm"]
        return row["found"].split(" = ")[1].split()

    name, version, before = origin()
    assert (name, version) == ("without-longest", "1.2.dev0")
    helper.write_text("least = 4\n")
    assert origin()[:2] == [name, version]
    assert origin()[2] != before
