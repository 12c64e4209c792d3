"""For all tests: which of them this environment can run, no reports of ONNX Runtime's from those
that import it, and processes that start quickly."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from kept_loggers import loggers_kept
from postgres_server import PostgresServer, postgres_server
from warm_processes import warm_server

assert not {"numpy", "torch"} & sys.modules.keys(), (
    "they read the next lines when they are imported"
)
# The processes of a run share the cores, and so do those that they start. A second thread of
# PyTorch or of numpy's BLAS would wait more than it works, and spins while it waits: without this
# tests of exports take twice the CPU time. Both read it when they are imported.
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

# The modules and tests that are collected stay to the end. To look through them for garbage, while
# they come and again and again later, took 40% of the time of collecting (13.8 s of CPU, 8.1 so).
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


# How long an example takes says how busy the machine is, not whether the code is right.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")

TRAINING_BUILD = any(found.name == "onnxruntime-training-cpu" for found in distributions())


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--kills", type=int, default=100, help="SIGKILLs at random instants in end_to_end/faults"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = (
        "needs ONNX Runtime's training build: make test runs it in .venv/ort-training, where that "
        "can be had"
    )
    for item in items:
        if item.get_closest_marker("ort_training") and not TRAINING_BUILD:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def nothing_said() -> None:
    """The coordinator's log says some things once in ten minutes. Each test begins with nothing
    said."""
    peer_log = sys.modules.get("fleetlearn_coordinator.network.peer_log")
    if peer_log is not None:
        peer_log._said.clear()


@pytest.fixture(autouse=True)
def loggers_as_before() -> Iterator[None]:
    """No test finds the log's level that the command of an earlier test of this process chose."""
    with loggers_kept():
        yield


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A process with all imports done, of which the tests' processes are forks: imports take 4 of a
    kill's 5 s."""
    with warm_server(tmp_path_factory.mktemp("warm")) as address:
        yield address


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL server, where it is installed. Tests use runs of their own there."""
    with postgres_server() as server:
        yield server
