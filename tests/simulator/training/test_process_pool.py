"""Training on several processes: the same results, in the jobs' order, whoever makes them."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleetlearn_protocol import open_bundle
from fleetlearn_protocol.messages import Evaluation
from fleetlearn_simulator.errors import SimulatorError
from fleetlearn_simulator.scenario.scenario import Scenario
from fleetlearn_simulator.training import process_pool
from fleetlearn_simulator.training.backend import Job, PerDevice, RoundInputs
from fleetlearn_simulator.training.choice import make_backend
from fleetlearn_simulator.training.process_pool import ProcessPool
from fleetlearn_simulator.training.shared_memory import make_shared_arrays
from fleetlearn_simulator.training.trained_devices import (
    NO_DEVICES,
    PendingResults,
    TrainedDevices,
    from_rows,
    read_all,
)
from fleetlearn_simulator.training.worker_pool import DivideJobs
from virtual import bits, make_scenario, one_by_one

JOBS = [Job(device, 1000 + device, 1 if device % 2 else None) for device in (5, 0, 3, 4, 1, 2, 3)]
"""One device twice, as no round has it, but nothing forbids it."""


def twos(jobs: Any) -> list[list[int]]:
    """Pairs from both ends, so that the order is not the jobs'."""
    places = list(range(len(jobs)))
    return [
        sorted({first, last})
        for first, last in zip(places, places[::-1], strict=True)
        if first <= last
    ]


@pytest.fixture(scope="module")
def scenario(line: Path, tmp_path_factory: pytest.TempPathFactory) -> Scenario:
    return make_scenario(tmp_path_factory.mktemp("parallel"), line, 6, plan__local__epochs=2)


def ones(jobs: Any) -> list[list[int]]:
    return [[place] for place in range(len(jobs))]


@pytest.fixture(scope="module")
def one(scenario: Scenario) -> PerDevice:
    backend = make_backend(scenario, "bundle")
    assert isinstance(backend, PerDevice)
    return backend


@pytest.fixture(scope="module", params=["pipe", "memory"])
def two(scenario: Scenario, request: pytest.FixtureRequest) -> Iterator[ProcessPool]:
    """Whose updates come through the pipes, or through shared memory as those of large models
    do."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "memory":
            patch.setattr(process_pool, "LARGE_UPDATE", 1)
        backend = ProcessPool(partial(make_backend, scenario, "bundle"), 2, twos)
        yield backend
        backend.close()


def places(backend: ProcessPool) -> list[list[int]]:
    """Of the shared memory, that hold nothing."""
    return [sorted(worker.free) for worker in backend.workers]


ALL = [1, 2, 3, 4]


InMemory = Callable[[int, DivideJobs], ProcessPool]


@pytest.fixture
def in_memory(scenario: Scenario, monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemory]:
    """Makes back ends with a given number of processes, whose updates come through shared
    memory."""
    monkeypatch.setattr(process_pool, "LARGE_UPDATE", 1)
    with ExitStack() as held:

        def make(workers: int, blocks: DivideJobs) -> ProcessPool:
            backend = ProcessPool(partial(make_backend, scenario, "bundle"), workers, blocks)
            held.callback(backend.close)
            return backend

        yield make


def test_updates_lie_in_shared_memory_as_long_as_somebody_has_them(
    scenario: Scenario, one: PerDevice, in_memory: InMemory
) -> None:
    """More than it has places for come through the pipe."""
    jobs = JOBS * 3
    model = open_bundle(scenario.plan.bundle).parameters()
    backend = in_memory(1, ones)
    assert places(backend) == [ALL]
    take = backend.begin(RoundInputs(model), jobs)
    held = [take([place]) for place in range(len(jobs))]
    assert [row for each in held for row in bits(each)] == bits(one.train(RoundInputs(model), jobs))
    assert places(backend) == [[]]
    view = held[0].updates[0, :1]
    del held
    assert len(places(backend)[0]) == len(ALL) - 1
    assert view[0] == one.train(RoundInputs(model), jobs[:1]).updates[0, 0]
    del view
    assert places(backend) == [ALL]


def test_a_place_comes_back_where_training_fails(
    scenario: Scenario, one: PerDevice, in_memory: InMemory
) -> None:
    model = open_bundle(scenario.plan.bundle).parameters()
    backend = in_memory(1, twos)
    for _ in range(9):
        with pytest.raises(ValueError, match="seed is -1"):
            backend.train(RoundInputs(model), [Job(1, -1, None)])
    assert places(backend) == [ALL]
    assert bits(backend.train(RoundInputs(model), JOBS)) == bits(
        one.train(RoundInputs(model), JOBS)
    )


def test_what_lies_in_the_memory_of_a_process_that_dies_is_there_still(
    scenario: Scenario, one: PerDevice, in_memory: InMemory
) -> None:
    model = open_bundle(scenario.plan.bundle).parameters()
    backend = in_memory(1, twos)
    before = backend.train(RoundInputs(model), JOBS[:2])
    process = backend.workers[0].process
    process.kill()
    process.join()
    after = backend.train(RoundInputs(model + np.float32(0.5)), JOBS)
    assert backend.workers[0].process is not process
    assert bits(before) == bits(one.train(RoundInputs(model), JOBS[:2]))
    assert bits(after) == bits(one.train(RoundInputs(model + np.float32(0.5)), JOBS))
    del after
    assert places(backend) == [ALL]


def test_where_there_is_no_memory_to_share(
    scenario: Scenario, one: PerDevice, in_memory: InMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "memfd_create")
    model = open_bundle(scenario.plan.bundle).parameters()
    backend = in_memory(2, twos)
    assert places(backend) == [[], []]
    assert bits(backend.train(RoundInputs(model), JOBS)) == bits(
        one.train(RoundInputs(model), JOBS)
    )


@pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="a thread cannot choose its core here"
)
def test_the_cores_are_taken_in_turns_where_each_has_a_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, choose = os.sched_getaffinity(0), os.sched_setaffinity
    cores = sorted(before)
    if len(cores) < 2:
        pytest.skip("there is one core only")
    been: list[int] = []

    def watched(thread: int, allowed: Any) -> None:
        choose(thread, allowed)
        if len(set(allowed)) == 1:
            stat = Path("/proc/thread-self/stat").read_text()
            been.append(int(stat.rpartition(")")[2].split()[36]))  # "processor", the 39th

    monkeypatch.setattr(os, "sched_setaffinity", watched)
    for turn in range(3):
        process_pool.take_turns(turn, len(cores))
        assert os.sched_getaffinity(0) == before
    assert been == [cores[0], cores[1], cores[2 % len(cores)]]
    process_pool.take_turns(0, len(cores) - 1)  # the kernel finds the core that is free
    assert been[3:] == []


def test_two_processes_train_as_one_does(
    scenario: Scenario, one: PerDevice, two: ProcessPool
) -> None:
    model = open_bundle(scenario.plan.bundle).parameters()
    expected = one.train(RoundInputs(model), JOBS)
    assert expected.examples.tolist() == [60, 10, 40, 50, 20, 30, 40]
    assert expected.steps.tolist() == [1, 2, 1, 10, 1, 6, 1]
    assert bits(two.train(RoundInputs(model), JOBS)) == bits(expected)
    assert bits(two.train(RoundInputs(model), JOBS[:1])) == bits(expected)[:1]
    assert len(two.train(RoundInputs(model), [])) == 0


def test_two_processes_evaluate_as_one_does(
    scenario: Scenario, one: PerDevice, two: ProcessPool
) -> None:
    model = open_bundle(scenario.plan.bundle).parameters()
    for devices in ([0, 1, 2, 3, 4, 5], [4], []):
        jobs = list(map(Job, devices))
        assert two.evaluate(RoundInputs(model), jobs) == one.evaluate(RoundInputs(model), jobs)


def test_each_call_has_its_own_model(scenario: Scenario, one: PerDevice, two: ProcessPool) -> None:
    model = open_bundle(scenario.plan.bundle).parameters()
    first = two.train(RoundInputs(model), JOBS)
    other = two.train(RoundInputs(model + np.float32(0.5)), JOBS)
    assert bits(other) == bits(one.train(RoundInputs(model + np.float32(0.5)), JOBS))
    assert bits(other) != bits(first)


def test_several_calls_may_be_under_way(
    scenario: Scenario, one: PerDevice, two: ProcessPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results are there in any order, and what nobody waits for any more is not done."""
    model = open_bundle(scenario.plan.bundle).parameters()
    given: list[float] = []
    give = process_pool._Worker.give
    monkeypatch.setattr(
        process_pool._Worker,
        "give",
        lambda self, block: (given.append(block.inputs.model[0]), give(self, block))[1],
    )
    first = two.begin(RoundInputs(model), JOBS)
    other = two.begin(RoundInputs(model + np.float32(0.5)), JOBS)
    dropped = two.begin(RoundInputs(model - np.float32(0.5)), JOBS)
    assert len(two.waiting) == 8
    del dropped
    assert bits(read_all(other, 7)) == bits(one.train(RoundInputs(model + np.float32(0.5)), JOBS))
    last_first = [bits(first([place])) for place in reversed(range(7))]
    assert last_first == [[row] for row in bits(one.train(RoundInputs(model), JOBS))[::-1]]
    assert given == [model[0]] * 4 + [model[0] + np.float32(0.5)] * 4
    assert len(two.waiting) == 0


def test_a_block_that_is_given_ahead_fits_into_the_smallest_pipe() -> None:
    """Otherwise both ends would wait until the other one reads."""
    jobs = [
        Job(10**7 - number, 2**53 - 1 - number, 10**5 + number, 10**6 + number, 10**6 - number)
        for number in range(process_pool.MAX_JOBS_IN_PIPE + 1)
    ]
    inputs, pending = (
        RoundInputs(np.zeros(5, np.float32)),
        PendingResults(lambda pending, place: None),
    )

    def block(count: int, inputs: RoundInputs) -> Any:
        return process_pool._Block(pending, "train", inputs, jobs[:count], list(range(count)))

    worker = object.__new__(process_pool._Worker)  # without its process
    worker.pipe, there = multiprocessing.Pipe()
    worker.inputs, worker.blocks, worker.memory, worker.free = inputs, deque(), None, deque()
    worker.give(block(process_pool.MAX_JOBS_IN_PIPE, inputs))
    assert len(there.recv_bytes()) < 8192
    assert worker.may_take(block(process_pool.MAX_JOBS_IN_PIPE, inputs))
    assert not worker.may_take(block(process_pool.MAX_JOBS_IN_PIPE + 1, inputs))
    assert not worker.may_take(block(1, RoundInputs(inputs.model))), "which would have to be sent"


def test_what_a_process_returns_arrives_as_it_is(scenario: Scenario, one: PerDevice) -> None:
    found = one.train(RoundInputs(open_bundle(scenario.plan.bundle).parameters()), JOBS)
    odd = one_by_one(found)[0]._replace(loss=np.nan, metrics={}, largest=np.inf, diverged=True)
    wide = replace(found, updates=np.arange(7 * 3 * 10**5, dtype=np.float32).reshape(7, -1))
    assert wide.updates.nbytes > 8 * 2**20, "more than a pipe or a socket holds"
    for outcomes in (
        found,
        found.select([3]),
        found.select([]),
        NO_DEVICES,
        from_rows([odd, *one_by_one(found)], 5, ["error", "none"]),
        replace(found, updates=np.empty((7, 0), np.float32)),
        wide,
        wide.select([6, 0]),
        replace(
            found, vectors={"kept_state": wide.updates[:, :2], "none": np.empty((7, 0), np.float32)}
        ),
        replace(wide, vectors={"kept_state": wide.updates[:, ::2]}),
        replace(wide, updates=wide.updates[:, ::3]),
    ):
        here, there = multiprocessing.Pipe()
        with ThreadPoolExecutor(1) as pool:
            sent = pool.submit(process_pool._send, here, outcomes)
            received = process_pool._receive(there)
            sent.result()
        assert isinstance(received, TrainedDevices)
        assert bits(received) == bits(outcomes)
        assert received.updates.shape == outcomes.updates.shape
        assert received.updates.flags.writeable
        assert not there.poll(), "nothing is left over"


def test_values_and_exceptions_arrive_as_they_are() -> None:
    for value in ([Evaluation(2, 3.0, {"a": 2.0})], [], SimulatorError("no such data")):
        here, there = multiprocessing.Pipe()
        process_pool._send(here, value)
        received = process_pool._receive(there)
        assert type(received) is type(value)
        assert repr(received) == repr(value)
        assert not there.poll()


def test_what_is_cut_short_is_a_death(scenario: Scenario, one: PerDevice) -> None:
    """It is not taken for a result whose last elements are whatever was in memory."""
    found = one.train(RoundInputs(open_bundle(scenario.plan.bundle).parameters()), JOBS)
    here, there = multiprocessing.Pipe()
    process_pool._send(here, found)
    sent = os.read(there.fileno(), 10**6)
    assert sent.endswith(found.updates.tobytes() + found.vectors["buffers"].tobytes())
    for length in (
        0,
        3,
        len(sent) // 4,
        len(sent) // 2,
        len(sent) - found.updates.nbytes,
        len(sent) - 1,
        len(sent),
    ):
        here, there = multiprocessing.Pipe()
        os.write(here.fileno(), sent[:length])
        here.close()
        if length == len(sent):
            assert bits(process_pool._receive(there)) == bits(found)
        else:
            with pytest.raises((EOFError, OSError)):  # as the connection itself says it
                process_pool._receive(there)


def test_a_process_that_is_killed_costs_time_alone(scenario: Scenario, one: PerDevice) -> None:
    model = open_bundle(scenario.plan.bundle).parameters()
    backend = ProcessPool(partial(make_backend, scenario, "bundle"), 2, twos)
    try:
        for shift in range(2):
            pending = backend.begin(RoundInputs(model + np.float32(shift)), JOBS)
            victim = next(worker for worker in backend.workers if worker.blocks)
            assert victim.process.pid is not None
            os.kill(victim.process.pid, signal.SIGKILL)
            results = read_all(pending, 7)
        assert bits(results) == bits(one.train(RoundInputs(model + np.float32(1)), JOBS))
    finally:
        backend.close()


def _fail() -> Any:
    os._exit(3)


def test_processes_that_die_again_and_again_are_an_error() -> None:
    """The run does not wait without end."""
    backend = ProcessPool(_fail, 2, twos)
    with pytest.raises(
        SimulatorError, match="3 processes died over the same devices, the last with exit code 3"
    ):
        backend.train(RoundInputs(np.zeros(5, np.float32)), JOBS)
    backend.close()


class _Unportable(Exception):  # noqa: N818
    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} and {two}")


def _raise(kind: str) -> Any:
    raise SimulatorError("no such data") if kind == "plain" else _Unportable("that", "this")


@pytest.mark.parametrize(
    ("kind", "text"), [("plain", "no such data"), ("odd", "_Unportable: that and this")]
)
def test_what_a_process_raises_is_raised(kind: str, text: str) -> None:
    backend = ProcessPool(partial(_raise, kind), 2, twos)
    for _ in range(2):
        with pytest.raises(SimulatorError, match=text) as caught:
            backend.train(RoundInputs(np.zeros(5, np.float32)), JOBS)
    assert "in _raise" in str(caught.value.__notes__)
    backend.close()


@pytest.mark.parametrize(
    "elements", [0, 5, process_pool.ARRAY_ELEMENTS // 2, process_pool.ARRAY_ELEMENTS // 2 + 1]
)
def test_what_a_round_begins_from_arrives_as_it_is(elements: int) -> None:
    """Through the pipe, or through the shared memory if all vectors fit in together."""
    model = np.arange(elements, dtype=np.float32)
    inputs, memory = RoundInputs(model, {"control": model + 1}, {"lr": 0.5}), make_shared_arrays(1)
    for place in (None, memory):
        sent = pickle.loads(pickle.dumps(process_pool._share(inputs, place)))
        fits = place is not None and 2 * elements <= process_pool.ARRAY_ELEMENTS
        assert isinstance(sent.vectors, int) == fits
        received = process_pool._shared(sent, place)
        assert received.model.tobytes() == model.tobytes()
        assert {name: vector.tobytes() for name, vector in received.vectors.items()} == {
            "control": inputs.vectors["control"].tobytes()
        }
        assert received.hyper == {"lr": 0.5}
