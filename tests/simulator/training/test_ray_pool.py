"""Training on Ray's own local cluster: the same bytes as on one process, whatever becomes of the
workers."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import psutil
import pytest
import virtual
from fleetlearn_protocol import open_bundle
from fleetlearn_protocol.vector import Vector
from fleetlearn_simulator import Options, simulate
from fleetlearn_simulator.errors import SimulatorError
from fleetlearn_simulator.results.run_folder import EVENTS, MODEL, ROUNDS, SCENARIO, SUMMARY
from fleetlearn_simulator.scenario.scenario import Scenario
from fleetlearn_simulator.training import ray_pool
from fleetlearn_simulator.training.backend import Backend, Job, RoundInputs
from fleetlearn_simulator.training.choice import make_backend
from fleetlearn_simulator.training.ray_pool import OWN_CLUSTER_ENVIRONMENT, RayPool, connect
from fleetlearn_simulator.training.trained_devices import read_all
from fleetlearn_simulator.training.worker_pool import MAX_DEATHS
from line_bundle import write_line_bundle
from virtual import MODULE, bits, make_scenario, write_scenario

FILES = (SCENARIO, EVENTS, ROUNDS, MODEL, SUMMARY)
MESSY: dict[str, Any] = {
    "seed": 11,
    "failures": {
        "train": 0.002,
        "stragglers": 0.3,
        "corrupt": [
            {"share": 0.3, "kind": "scaled", "factor": 2.0},
            {"share": 0.2, "kind": "garbage"},
        ],
    },
    "plan__local": {"epochs": 2, "batch_size": 10, "lr": 0.002, "evaluate": True},
    "plan__round": {"goal": 8, "over_selection": 1.2, "minimum": 5, "deadline": 300.0},
    "plan__server": {"optimizer": "adam", "lr": 0.01},
    "plan__stop__rounds": 3,
}
OWN_SOURCE = """
class Lines:
    def __init__(self, last):
        self.last = last
    def examples(self, ids, seed):
        return np.where(ids > self.last, 0, 10 * (ids + 1))
    def arrays(self, device, seed):
        return columns(device, seed)
    def test(self, seed):
        return None

def lines(last: int):
    return Lines(last)
"""
SOFTMAX = virtual.SOFTMAX | {
    "plan__stop__rounds": 2,
    "plan__round": {"goal": 24, "minimum": 4, "over_selection": 1.2, "deadline": 1000.0},
}
ONE = Options(backend="bundle", workers=1)
RAY = Options(backend="bundle", workers=2, engine="ray")
JOBS = [Job(device, 1000 + device, 1 if device % 2 else None) for device in (5, 0, 3, 4, 1, 2, 3)]


def name_of(process: psutil.Process) -> str:
    """Return a process's name; nothing once it has ended."""
    try:
        return str(process.name())
    except psutil.NoSuchProcess:
        return ""


@pytest.fixture(scope="module", autouse=True)
def ray() -> Iterator[Any]:
    """Ray on two CPUs, started as the back end starts it. Afterwards none of its processes may be
    left."""
    others = set(psutil.Process().children(recursive=True))  # as the tests before have left
    ray, ours = connect("local", 2)
    assert ours
    started = set(psutil.Process().children(recursive=True)) - others
    assert {"raylet", "gcs_server"} <= {name_of(process) for process in started}
    yield ray
    workers = [
        child
        for child in psutil.Process().children(recursive=True)
        if name_of(child).startswith("ray::")
    ]
    ray.shutdown()
    assert psutil.wait_procs([*started, *workers], timeout=60)[1] == []


@pytest.fixture(scope="module")
def scenario(line: Path, tmp_path_factory: pytest.TempPathFactory) -> Scenario:
    return make_scenario(tmp_path_factory.mktemp("cluster"), line, 6, plan__local__epochs=2)


@pytest.fixture(scope="module")
def model(line: Path) -> Vector:
    return open_bundle(line).parameters()


def ones(jobs: Any) -> list[list[int]]:
    """A block for each, the last first."""
    return [[place] for place in range(len(jobs))][::-1]


def on_ray(scenario: Scenario, model: Vector, workers: int | None = 2) -> RayPool:
    return RayPool(partial(make_backend, scenario, "bundle"), ones, model, workers)


def run(scenario: Scenario, folder: Path, options: Options) -> dict[str, bytes]:
    outcome = simulate(scenario, folder, options)
    assert outcome is not None
    return bytes_of(folder)


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in FILES}


def test_a_run_is_the_same_bytes_on_one_process_on_two_and_on_ray(
    line: Path, tmp_path: Path
) -> None:
    scenario = make_scenario(tmp_path, line, 12, **MESSY)
    one = run(scenario, tmp_path / "one", ONE)
    assert run(scenario, tmp_path / "two", ONE._replace(workers=2)) == one
    assert run(scenario, tmp_path / "ray", RAY) == one
    assert run(scenario, tmp_path / "ray1", RAY._replace(workers=1)) == one
    assert one[EVENTS].count(b'"accepted"') > 20


def test_what_devices_keep_is_sent_to_the_workers(tmp_path: Path) -> None:
    bundle = write_line_bundle(
        tmp_path / "line.bundle", personal=True, references=["anchor", "previous"]
    )
    scenario = make_scenario(tmp_path, bundle.path, 12, **MESSY)
    assert run(scenario, tmp_path / "ray", RAY) == run(scenario, tmp_path / "one", ONE)


def test_and_with_many_devices_in_a_call(softmax: Path, tmp_path: Path) -> None:
    scenario = make_scenario(tmp_path, softmax, 30, **SOFTMAX)
    one = run(scenario, tmp_path / "one", ONE._replace(backend="vectorized"))
    assert run(scenario, tmp_path / "ray", RAY._replace(backend="vectorized")) == one


def test_workers_make_an_own_source_of_data(line: Path, tmp_path: Path) -> None:
    """They are told which modules are allowed, and where they are."""
    (tmp_path / "ray_source.py").write_text(MODULE.replace("def make", "def columns") + OWN_SOURCE)
    own = MESSY | {"data": {"kind": "ray_source:lines", "parameters": {"last": 9}}}
    path = write_scenario(tmp_path, line, 12, **own)
    scenario = Scenario.load(path, plugins=["ray_source"])
    assert run(scenario, tmp_path / "ray", RAY) == run(scenario, tmp_path / "one", ONE)


def test_workers_train_and_evaluate_as_one_process_does(scenario: Scenario, model: Vector) -> None:
    """Several rounds on the same workers, each with a model of its own; results that can be written
    to."""
    one, two = make_backend(scenario, "bundle"), on_ray(scenario, model, None)
    assert two.workers == 2, "the cluster's CPUs"
    for given in (model, model + np.float32(0.5)):
        found = two.train(RoundInputs(given), JOBS)
        assert bits(found) == bits(one.train(RoundInputs(given), JOBS))
        assert found.updates.flags.writeable
        assert bits(two.train(RoundInputs(given), JOBS[:1])) == bits(
            one.train(RoundInputs(given), JOBS[:1])
        )
        for devices in ([0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5], [4], []):
            jobs = list(map(Job, devices))
            assert two.evaluate(RoundInputs(given), jobs) == one.evaluate(RoundInputs(given), jobs)
    assert len(two.train(RoundInputs(model), [])) == 0
    two.close()
    two.close()


@pytest.mark.slow
def test_several_calls_may_be_under_way(scenario: Scenario, model: Vector) -> None:
    """Results are there in any order, and what nobody waits for any more is not done."""
    one, two = make_backend(scenario, "bundle"), on_ray(scenario, model)
    first = two.begin(RoundInputs(model), JOBS)
    dropped = two.begin(RoundInputs(model - np.float32(0.5)), JOBS)
    other = two.begin(RoundInputs(model + np.float32(0.5)), JOBS)
    del dropped
    assert bits(read_all(other, 7)) == bits(one.train(RoundInputs(model + np.float32(0.5)), JOBS))
    last_first = [bits(first([place])) for place in reversed(range(7))]
    assert last_first == [[row] for row in bits(one.train(RoundInputs(model), JOBS))[::-1]]
    assert len(two.waiting) == 0
    two.close()


def test_a_large_round_comes_back_in_small_parts(
    scenario: Scenario, model: Vector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds for any number of parts with any blocks in them."""
    jobs = [Job(device % 6, device, None) for device in range(40)]
    backend = on_ray(scenario, model)
    found = bits(backend.train(RoundInputs(model), jobs))
    monkeypatch.setattr(ray_pool, "MAX_PART_BYTES", 3 * model.nbytes)
    assert bits(backend.train(RoundInputs(model), jobs)) == found
    backend.close()


PAUSES = """
import signal, time
from pathlib import Path
import psutil

plain, here = make, Path(__file__).parent

def make(device, seed):
    if not psutil.Process().name().startswith("ray::"):
        return plain(device, seed)  # the command itself looks at the examples of a few devices
    if device != int((here / "device").read_text()):
        while (here / "once").exists() and not (here / "told").exists():
            # else the other worker could end the run before Ray tells of the death
            time.sleep(0.01)
        return plain(device, seed)
    try:
        (here / "once").touch(exist_ok=False)
    except FileExistsError:
        return plain(device, seed)
    with (here / "pid").open("w") as pipe:
        print(os.getpid(), file=pipe)
    signal.pause()
"""


class Touch(logging.Handler):
    """Makes a file when something is logged."""

    def __init__(self, path: Path) -> None:
        super().__init__(logging.WARNING)
        self.path = path

    def emit(self, record: logging.LogRecord) -> None:
        self.path.touch()


@pytest.mark.parametrize("device", [0, pytest.param(7, marks=pytest.mark.slow)])
def test_a_worker_killed_costs_no_result(
    line: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, device: int
) -> None:
    """In mid-round: device 7 waits, in the data's function, for the kill. While it begins: device 0
    does. The other worker waits until the death was told."""
    scenario = make_scenario(tmp_path, line, 12, **MESSY)
    (tmp_path / "lines.py").write_text(f"import os\n{MODULE}{PAUSES}")
    (tmp_path / "device").write_text(str(device))
    one = run(scenario, tmp_path / "one", ONE)
    os.mkfifo(tmp_path / "pid")
    killed: list[str] = []

    def kill() -> None:
        pid = int((tmp_path / "pid").read_text())
        killed.append(psutil.Process(pid).name())
        os.kill(pid, signal.SIGKILL)

    killer = Thread(target=kill, daemon=True)
    killer.start()
    handler = Touch(tmp_path / "told")
    ray_pool.logger.addHandler(handler)
    try:
        with caplog.at_level(logging.WARNING, "fleetlearn.simulator"):
            assert run(scenario, tmp_path / "ray", RAY) == one
    finally:
        ray_pool.logger.removeHandler(handler)
    killer.join(60)
    assert killed == ["ray::Worker.begin" if device == 0 else "ray::Worker.train"]
    assert [record.getMessage().partition(",")[0] for record in caplog.records] == ["a worker died"]


FAILS = """
from pathlib import Path

plain, here = make, Path(__file__).parent

def make(device, seed):
    if device == 3:
        with (here / "calls").open("a") as calls:
            calls.write("x")
        raise KeyError("no such patient")
    if device == 5:
        os._exit(3)
    return plain(device, seed)
"""


@pytest.fixture
def failing(line: Path, tmp_path: Path) -> Scenario:
    scenario = make_scenario(tmp_path, line, 6)
    (tmp_path / "lines.py").write_text(f"import os\n{MODULE}{FAILS}")
    return scenario


def test_an_error_of_the_datas_function_is_raised_once(
    failing: Scenario, model: Vector, tmp_path: Path
) -> None:
    """It is raised unchanged, with where it was raised, and the workers go on."""
    backend = on_ray(failing, model)
    with pytest.raises(SimulatorError) as caught:
        backend.train(RoundInputs(model), [Job(device, 1, None) for device in (0, 1, 3, 4)])
    assert caught.value.text.startswith(
        "lines:make(3, 0) failed: KeyError: 'no such patient' (in make, lines.py line "
    )
    (note,) = caught.value.__notes__
    assert note.startswith("Raised by a worker on Ray's node 127.0.0.1:\n")
    assert 'raise KeyError("no such patient")' in note
    assert (tmp_path / "calls").read_text() == "x"
    jobs = [Job(device, 1, None) for device in (0, 1, 2, 4)]
    assert bits(backend.train(RoundInputs(model), jobs)) == bits(
        make_backend(failing, "bundle").train(RoundInputs(model), jobs)
    )
    backend.close()


@pytest.mark.slow
def test_a_device_that_ends_each_worker_is_an_error(
    failing: Scenario, model: Vector, caplog: pytest.LogCaptureFixture
) -> None:
    """The run does not go on without end."""
    backend = on_ray(failing, model)
    with (
        caplog.at_level(logging.WARNING, "fleetlearn.simulator"),
        pytest.raises(
            SimulatorError, match=r"3 workers died over the same devices.*Worker exit type"
        ),
    ):
        backend.train(RoundInputs(model), [Job(device, 1, None) for device in (0, 1, 5, 4)])
    # More where a worker's result before was still on its way, to which its death is then put down.
    assert MAX_DEATHS <= len(caplog.records) < 2 * MAX_DEATHS
    backend.close()


@pytest.mark.slow
def test_workers_that_die_while_they_begin_are_an_error(model: Vector) -> None:
    with pytest.raises(
        SimulatorError, match="3 workers, one in place of the other, died while they started"
    ):
        RayPool(_die, ones, model, 1)


def test_a_bundle_that_a_node_cannot_open(line: Path, tmp_path: Path, model: Vector) -> None:
    scenario = make_scenario(tmp_path, line, 6)
    elsewhere = tmp_path / "elsewhere.bundle"
    make = partial(make_backend, _with_bundle(scenario, elsewhere), "bundle")
    with pytest.raises(
        SimulatorError, match=rf"worker on Ray's node 127\.0\.0\.1 could not start: .*{elsewhere}"
    ):
        RayPool(make, ones, model, 2)


def _with_bundle(scenario: Scenario, bundle: Path) -> Scenario:
    from msgspec.structs import replace

    return replace(scenario, plan=replace(scenario.plan, bundle=bundle))


def _die() -> Backend:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def _odd() -> Backend:
    class OddError(Exception):
        """Which cannot be pickled."""

    raise OddError("out of luck")


def test_an_error_that_cannot_travel_is_told(model: Vector) -> None:
    with pytest.raises(SimulatorError, match=r"OddError: out of luck") as caught:
        RayPool(_odd, ones, model, 1)
    assert caught.value.__cause__ is not None
    assert "in _odd" in caught.value.__cause__.__notes__[0]


DIFFERS = """
from pathlib import Path

plain, here = make, Path(__file__).parent

def make(device, seed):
    made = plain(device, seed)
    try:
        (here / "once").touch(exist_ok=False)
    except FileExistsError:
        return made
    made["y"][0] += 0.001
    return made
"""


@pytest.mark.slow
def test_workers_that_do_not_make_the_same_bits_are_refused(
    line: Path, tmp_path: Path, model: Vector
) -> None:
    scenario = make_scenario(tmp_path, line, 6)
    (tmp_path / "lines.py").write_text(MODULE + DIFFERS)

    def work() -> None:
        """Until the second, which may come when the first is at work."""
        backend = on_ray(scenario, model)
        try:
            while backend.busy:
                backend.train(RoundInputs(model), JOBS[:1])
        finally:
            backend.close()

    with pytest.raises(SimulatorError, match="compute the same step with different bits"):
        work()


@pytest.mark.slow
def test_a_cluster_with_no_cpu_to_spare(
    scenario: Scenario, model: Vector, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = on_ray(scenario, model)
    holder.train(RoundInputs(model), JOBS)
    monkeypatch.setattr(ray_pool, "START_TIMEOUT", 0.5)
    with pytest.raises(SimulatorError, match=r"none of 2 workers.*has 2 CPUs; 0 are free"):
        on_ray(scenario, model)
    holder.close()


def test_without_ray(scenario: Scenario, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SimulatorError, match=r'pip install "fleetlearn\[ray\]"'):
        simulate(scenario, tmp_path / "run", RAY)
    assert not (tmp_path / "run").exists()


SUPPORT = str(Path(__file__).parents[2] / "support")
"""Which the data's module imports from."""


def command(
    scenario: Path, output: Path, *more: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "fleetlearn_simulator",
            "run",
            str(scenario),
            "--output",
            str(output),
            *more,
        ],
        env=os.environ | {"PYTHONPATH": SUPPORT, "COLUMNS": "1000"} | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


@pytest.mark.slow
def test_the_command_on_a_cluster_of_its_own(line: Path, tmp_path: Path) -> None:
    """Which is gone when it ends."""
    path = write_scenario(tmp_path, line, 12, **MESSY)
    done = command(path, tmp_path / "one", "--workers", "1")
    assert done.returncode == 0
    done = command(path, tmp_path / "ray", "--engine", "ray", "--workers", "2", FLEET=str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "")
    assert "3 rounds done" in done.stderr
    assert bytes_of(tmp_path / "ray") == bytes_of(tmp_path / "one")
    assert [process for process in psutil.process_iter() if _is_of(process, str(tmp_path))] == []


def _is_of(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get("FLEET") == mark
    except psutil.Error:
        return False


@pytest.mark.slow
def test_the_command_goes_on_with_a_run_on_ray(line: Path, tmp_path: Path) -> None:
    path = write_scenario(tmp_path, line, 12, **MESSY)
    command(path, tmp_path / "one", "--workers", "1")
    stopped = simulate(
        Scenario.load(path),
        tmp_path / "two",
        ONE._replace(backend="auto"),
        should_stop=lambda: True,
    )
    assert stopped is None
    subprocess.run(
        [
            sys.executable,
            "-m",
            "fleetlearn_simulator",
            "resume",
            str(tmp_path / "two"),
            "--engine",
            "ray",
        ],
        env=os.environ | {"PYTHONPATH": SUPPORT},
        check=True,
        timeout=300,
    )
    assert bytes_of(tmp_path / "two") == bytes_of(tmp_path / "one")


ELSEWHERE = """
from pathlib import Path
import psutil

plain, here = make, Path(__file__).parent

def make(device, seed):
    if not psutil.Process().name().startswith("ray::"):
        return plain(device, seed)
    if device and os.environ.get("ELSEWHERE"):
        with (here / "there").open("w") as pipe:
            print(os.getpid(), file=pipe)
        signal.pause()
    elif device and not (here / "gone").exists():
        (here / "go").read_text()
    return plain(device, seed)
"""


@pytest.fixture
def nodes() -> Iterator[Any]:
    """A cluster of two nodes of one CPU; the second's workers have ELSEWHERE in their
    environment."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    yield cluster, cluster.add_node(num_cpus=1, env_vars={"ELSEWHERE": "1"})
    cluster.shutdown()


@pytest.mark.slow
def test_a_machine_lost_costs_no_result(line: Path, tmp_path: Path, nodes: Any) -> None:
    """In mid-round. Its worker waits, in the data's function, for the loss; the other machine's has
    all the rest."""
    cluster, second = nodes
    # Blocks of eight devices: more of them than the first worker can have in hand while it waits
    # for the loss.
    path = write_scenario(tmp_path, line, 40, **(MESSY | {"plan__round__goal": 36}))
    (tmp_path / "lines.py").write_text(f"import os, signal\n{MODULE}{ELSEWHERE}")
    command(path, tmp_path / "one", "--workers", "1")
    for name in ("there", "go"):
        os.mkfifo(tmp_path / name)
    lost: list[str] = []

    def lose() -> None:
        lost.append(psutil.Process(int((tmp_path / "there").read_text())).name())
        cluster.remove_node(second, allow_graceful=False)
        (tmp_path / "gone").touch()
        (tmp_path / "go").write_text("")

    Thread(target=lose, daemon=True).start()
    done = command(
        path,
        tmp_path / "ray",
        "--engine",
        "ray",
        "--ray-address",
        cluster.address,
        **OWN_CLUSTER_ENVIRONMENT,
    )
    assert done.returncode == 0, done.stderr
    assert "a worker died, and its work is done again" in done.stderr
    assert lost == ["ray::Worker.train"]
    assert bytes_of(tmp_path / "ray") == bytes_of(tmp_path / "one")


@pytest.mark.slow
def test_a_node_without_the_data_is_named(line: Path, tmp_path: Path, nodes: Any) -> None:
    cluster, _ = nodes
    # Longer than the other worker takes to begin: the first does not wait for it.
    path = write_scenario(tmp_path, line, 12, **MESSY | {"plan__stop__rounds": 100_000})
    with (tmp_path / "lines.py").open("a") as module:
        module.write("import os\nif os.environ.get('ELSEWHERE'):\n    open('/nowhere/at/all')\n")
    done = command(
        path,
        tmp_path / "ray",
        "--engine",
        "ray",
        "--ray-address",
        cluster.address,
        **OWN_CLUSTER_ENVIRONMENT,
    )
    assert done.returncode == 1
    assert "could not start: data.function = 'lines:make'" in done.stderr
    assert "/nowhere/at/all" in done.stderr
    assert "must be at the same paths on all nodes" in done.stderr
