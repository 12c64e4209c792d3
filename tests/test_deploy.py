"""deploy/: containers, compose, Prometheus and Grafana's dashboard. No container runs here: each
file is read by a parser, Prometheus' own where it is there, and the coordinator runs as a container
would run it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml
from fleetlearn_coordinator.plan.service_settings import ServiceSettings
from fleetlearn_coordinator.service.monitoring.catalogue import CATALOGUE, PROCESS_METRICS
from fleetlearn_coordinator.service.private_ca import make_certificate
from line_bundle import write_line_bundle
from peers import plan_text, write_test_bundle
from processes import ROOT, Processes, free_port, processes, service_file, wait_for

DEPLOY = ROOT / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana" / "fleetlearn.json").read_text())
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
WITH_POSTGRES = yaml.safe_load((DEPLOY / "compose.postgres.yaml").read_text())
CONTAINERFILES = sorted(DEPLOY.glob("Containerfile.*"))
PARTS = {"histogram": ("_bucket", "_sum", "_count"), "gauge": ("",), "counter": ("",)}
SERIES = {
    spec.name + part: {*spec.labels, *(["le"] if part == "_bucket" else [])}
    for spec in CATALOGUE
    for part in PARTS[spec.kind]
} | {name: set[str]() for name, _, _ in PROCESS_METRICS}
"""Name of a series as Prometheus has it -> its labels, beside those of every scrape."""
SCRAPED = {"job", "instance"}


def queries() -> Iterator[tuple[str, str, str]]:
    """Yield (title of the panel, query, legend) of the dashboard."""
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"], target["legendFormat"]


def mistakes(query: str, legend: str) -> list[str]:
    """Return what a query, or its legend, names that no metric has."""
    names = set(re.findall(r"\b(?:fleetlearn|process)_\w+", query))
    found = [f"metric {name}" for name in names - SERIES.keys()]
    known = SCRAPED.union(*(SERIES.get(name, ()) for name in names))
    used = set(re.findall(r"(\w+)\s*=~?\s*\"", query)) | set(re.findall(r"{{(\w+)}}", legend))
    for group in re.findall(r"\bby \(([^)]*)\)", query):
        used |= {label.strip() for label in group.split(",")}
    return found + [f"label {label}" for label in used - known]


def test_each_query_of_the_dashboard_names_metrics_that_are_there() -> None:
    found = {title: mistakes(query, legend) for title, query, legend in queries()}
    assert len(found) > 20
    assert not {title: each for title, each in found.items() if each}


@pytest.mark.parametrize(
    ("query", "legend", "found"),
    [
        ("fleetlearn_rounds", "", ["metric fleetlearn_rounds"]),
        ("fleetlearn_round_duration_seconds", "", ["metric fleetlearn_round_duration_seconds"]),
        ('fleetlearn_round{cause="x"}', "", ["label cause"]),
        ("sum by (state) (fleetlearn_round)", "", ["label state"]),
        ("fleetlearn_round", "{{device}}", ["label device"]),
    ],
)
def test_a_query_with_a_mistake_is_noticed(query: str, legend: str, found: list[str]) -> None:
    assert mistakes(query, legend) == found


def test_panels_fill_the_page_and_none_covers_another() -> None:
    places = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & places, panel["title"]
        places |= cells
    assert max(x for x, _ in places) == 23
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def promtool(*words: str | Path) -> str:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is not here: apt-get install prometheus")
    done = subprocess.run([found, *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_prometheus_reads_each_query(tmp_path: Path) -> None:
    rules = [
        {"record": f"query:{number}", "expr": query.replace("$__rate_interval", "1m")}
        for number, (_, query, _) in enumerate(queries())
    ]
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    assert f"{len(rules)} rules found" in promtool("check", "rules", file)


def test_prometheus_reads_its_configuration(tmp_path: Path) -> None:
    text = (DEPLOY / "prometheus.yml").read_text()
    make_certificate(tmp_path, ["coordinator"], 30)
    (tmp_path / "alerts.yml").write_text("groups: []\n")
    (tmp_path / "prometheus.yml").write_text(text.replace("/etc/prometheus", str(tmp_path)))
    promtool("check", "config", tmp_path / "prometheus.yml")


def test_compose_runs_nothing_with_more_rights_than_needed() -> None:
    for name, service in COMPOSE["services"].items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        for mount in service["volumes"]:
            source, target, *options = mount.split(":")
            if not source.startswith("./"):
                assert source in COMPOSE["volumes"], mount
            elif not source.startswith("./data"):  # made by the operator
                assert (DEPLOY / source).is_file(), mount
                assert options == ["ro"], mount
            assert target.startswith("/")
        for port in service["ports"]:
            assert port == "8765:8765" or port.startswith("127.0.0.1:"), name


def test_what_compose_brings_together_agrees(tmp_path: Path) -> None:
    """The ports, names and paths that one file says to another."""
    (tmp_path / "service.toml").write_text((DEPLOY / "service.toml").read_text())
    settings = ServiceSettings.load(tmp_path / "service.toml")
    assert settings.metrics is not None
    prometheus = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    (job,) = prometheus["scrape_configs"]
    (target,) = job["static_configs"][0]["targets"]
    assert target == f"coordinator:{settings.metrics.port}"
    assert "coordinator" in COMPOSE["services"]
    (source,) = yaml.safe_load((DEPLOY / "grafana" / "datasources.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    used = {
        target["datasource"]["uid"]
        for each in DASHBOARD["panels"]
        for target in each.get("targets", ())
    }
    assert used == {source["uid"]}
    (provider,) = yaml.safe_load((DEPLOY / "grafana" / "dashboards.yaml").read_text())["providers"]
    mounts = [each.split(":")[1] for each in COMPOSE["services"]["grafana"]["volumes"]]
    assert f"{provider['options']['path']}/fleetlearn.json" in mounts
    build = COMPOSE["services"]["coordinator"]["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).is_file()


def test_compose_with_postgresql_agrees_with_what_it_is_beside() -> None:
    assert WITH_POSTGRES["services"].keys() - COMPOSE["services"].keys() == {"postgres"}
    server, coordinator = (WITH_POSTGRES["services"][name] for name in ("postgres", "coordinator"))
    assert server["read_only"] is True
    assert (server["cap_drop"], server["security_opt"]) == (["ALL"], ["no-new-privileges:true"])
    assert int(server["user"].split(":")[0]) > 0
    assert "ports" not in server, "the coordinator alone reaches it"
    assert coordinator["depends_on"]["postgres"]["condition"] == "service_healthy"
    (secret,) = server["secrets"]
    assert server["environment"]["POSTGRES_PASSWORD_FILE"] == f"/run/secrets/{secret}"
    page = (ROOT / "docs" / "operate" / "postgresql.md").read_text()
    for file in (
        WITH_POSTGRES["secrets"][secret]["file"],
        coordinator["environment"]["PGPASSFILE"],
    ):
        assert f"deploy/data/{Path(file).name}" in page
    user, database = (server["environment"][f"POSTGRES_{name}"] for name in ("USER", "DB"))
    assert f'ledger = "postgresql://{user}@postgres/{database}"' in page
    assert f"postgres:5432:{database}:{user}:" in page
    install = (DEPLOY / "Containerfile.coordinator").read_text()
    assert re.search(r"\[[a-z,]*\bpostgres\b", install), "the image has psycopg"


def instructions(file: Path) -> list[tuple[str, str]]:
    """Return (instruction, rest) of a Containerfile."""
    text = re.sub(r"\\\n\s*", "", re.sub(r"^#.*\n", "", file.read_text(), flags=re.MULTILINE))
    rows = [line.partition(" ") for line in text.splitlines() if line.strip()]
    return [(name, rest.strip()) for name, _, rest in rows]


@pytest.mark.parametrize("file", CONTAINERFILES, ids=lambda file: file.name)
def test_a_container_has_no_root_and_a_first_process_that_takes_signals(file: Path) -> None:
    rows = instructions(file)
    last = len(rows) - [name for name, _ in rows][::-1].index("FROM")
    final = dict(rows[last:])
    assert final["USER"].isdigit(), "a number, so that it can be seen not to be root's"
    assert int(final["USER"]) > 0
    program = f"fleetlearn-{file.suffix[1:]}"
    assert json.loads(final["ENTRYPOINT"]) == ["tini", "--", program]
    assert isinstance(json.loads(final["CMD"]), list)
    assert "tini" in " ".join(rest for name, rest in rows[last:] if name == "RUN")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert program in project["scripts"]
    (install,) = (rest for name, rest in rows if name == "RUN" and "pip install" in rest)
    extras = re.findall(r'\[([a-z,]+)\]"$', install)[0].split(",")
    if "fleetlearn_device" in install:
        alone = (ROOT / "device_sdk" / "pyproject.toml").read_text()
        project = tomllib.loads(alone)["project"]
    assert {*extras} <= project["optional-dependencies"].keys()
    assert not [name for name, _ in rows if name == "ADD"]
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert ignored == ["*", "!constraints.txt", "!dist/*.whl"], "what a build may see"


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    bundle = write_test_bundle(tmp_path / "test.bundle")
    file = tmp_path / "data" / "plan.toml"
    file.parent.mkdir()
    file.write_text(plan_text(bundle, "run"))
    service_file(file, 0)
    return file


def test_as_the_first_process_of_its_own_system_it_ends_at_sigterm(
    plan: Path, tmp_path: Path
) -> None:
    first = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child"]
    if subprocess.run([*first, "true"], capture_output=True).returncode:
        pytest.skip("this user may make no namespaces")
    # Without tini, which only hands the signal on.
    words = [sys.executable, "-m", "fleetlearn_coordinator", "serve", plan]
    with processes(tmp_path) as run:
        run.start("first", *first, *words, "--service", plan.with_name("service.toml"))
        wait_for(lambda: "listening on" in run.log("first"), "the coordinator")
        (child,) = children(run.running["first"].pid)
        os.kill(child, signal.SIGTERM)
        assert run.wait("first") == 0, run.log("first")
        assert "SIGTERM: telling the devices to come back later" in run.log("first")


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


WATCHED = """\
import os, runpy, sys
folder = sys.argv.pop(1)

def watch(event, arguments):
    path = arguments[0] if arguments else None
    writes = event in ("os.mkdir", "os.remove", "os.rename", "os.link", "os.symlink")
    if event == "open" and isinstance(path, (str, bytes)):
        mode, flags = arguments[1] or "", arguments[2] or 0
        writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT
        writes = any(each in mode for each in "wax+") or flags & writing
    if writes and not os.path.abspath(os.fsdecode(path)).startswith((folder, "/dev/null")):
        print("WRITES", event, path, file=sys.stderr, flush=True)

sys.addaudithook(watch)
runpy.run_module("fleetlearn_coordinator", run_name="__main__", alter_sys=True)
"""


def test_it_writes_in_its_data_folder_alone(plan: Path, tmp_path: Path) -> None:
    """So its root may be read-only. Python tells of files that it opens; SQLite and safetensors get
    their paths from the same folder."""
    script, home = tmp_path / "watched.py", plan.parent
    script.write_text(WATCHED)
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "HOME": str(home)}
    with processes(tmp_path) as run:
        words = [sys.executable, script, home, "serve", plan]
        run.start("watched", *words, "--service", plan.with_name("service.toml"), cwd=home, env=env)
        wait_for(lambda: "listening on" in run.log("watched"), "the coordinator")
        run.running["watched"].send_signal(signal.SIGTERM)
        assert run.wait("watched") == 0, run.log("watched")
        assert "WRITES" not in run.log("watched"), run.log("watched")
        assert_noticed(run, script, plan, env)


READ_ONLY = """\
mount --bind "$1" "$1" && mount -o remount,bind,ro / || exit 77
if touch /written 2>/dev/null; then exit 78; fi
shift
exec "$@"
"""
"""Runs a command in a system of its own in which nothing but one folder can be written."""


@pytest.mark.slow
def test_a_device_with_a_read_only_root_and_without_a_home_trains(tmp_path: Path) -> None:
    """As in a container: the kernel refuses whatever it would write elsewhere."""
    state = tmp_path / "state"
    state.mkdir()
    alone = ["unshare", "--user", "--map-root-user", "--mount"]
    words = [*alone, "sh", "-c", READ_ONLY, "sh", str(state), "true"]
    if subprocess.run(words, capture_output=True).returncode == 77:
        pytest.skip("this user may not mount")
    write_line_bundle(tmp_path / "line.bundle")
    np.savez(tmp_path / "mine.npz", x=np.ones((40, 3), "f4"), y=np.zeros(40, "f4"))
    plan, port = tmp_path / "plan.toml", free_port()
    settings = {"round__goal": 1, "stop__rounds": 2, "local__lr": 0.05}
    plan.write_text(plan_text(tmp_path / "line.bundle", tmp_path / "run", **settings))
    service_file(plan, port)
    variables = {
        "PATH": os.environ["PATH"], "FLEETLEARN_STATE": str(state / "device"),
        "FLEETLEARN_COORDINATOR": f"ws://127.0.0.1:{port}", "FLEETLEARN_UNTIL_FINISHED": "yes",
        "FLEETLEARN_DATA": str(tmp_path / "mine.npz"), "PYTHONDONTWRITEBYTECODE": "1",
    }  # fmt: skip
    with processes(tmp_path) as run:
        run.coordinator(plan)
        words = [*alone, "sh", "-c", READ_ONLY, "sh", str(state), sys.executable]
        words += ["-m", "fleetlearn_device", "run", "--log-file", str(tmp_path / "device.log")]
        run.start("refused", *words, cwd=Path("/"), env=variables)
        assert run.wait("refused") == 2, "the log file is outside of the state directory"
        run.start("device", *words[:-2], cwd=Path("/"), env=variables)
        assert run.wait("coordinator", 120) == 0, run.log("coordinator")
        assert run.wait("device") == 0, run.log("device")
    log = run.log("device")
    assert log.count("update accepted") == 2, log
    assert "Read-only" not in log


def assert_noticed(run: Processes, script: Path, plan: Path, env: dict[str, str]) -> None:
    """The same with a folder that it does not write in: that is noticed."""
    run.start("other", sys.executable, script, "/nowhere", "serve", plan, env=env)
    wait_for(lambda: "WRITES" in run.log("other"), "what is written elsewhere")
