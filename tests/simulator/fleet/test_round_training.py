"""A round's training: which devices are trained together, from which model, and what they send."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from weakref import ref

import numpy as np
import pytest
from fleetlearn_protocol.encodings import FLOAT32, Encoding, find_encoding
from fleetlearn_protocol.messages import Evaluation
from fleetlearn_simulator.fleet import round_training
from fleetlearn_simulator.fleet.kept_by_devices import KeptByDevices
from fleetlearn_simulator.fleet.round_training import RoundTraining
from fleetlearn_simulator.fleet.running_tasks import RunningTask, RunningTasks
from fleetlearn_simulator.training.backend import Job, RoundInputs
from fleetlearn_simulator.training.kept_rows import NO_FILES, RowFile
from fleetlearn_simulator.training.trained_devices import (
    PendingResults,
    ResultReader,
    TrainedDevices,
)
from rounds import running_task, trained_device, trained_devices
from virtual import bits

MODEL, EARLIER = np.array([1, 2], np.float32), np.array([5, 7], np.float32)


def tasks(*running: RunningTask) -> list[str]:
    return [task.task for task in running]


def taken(training: RoundTraining, *running: RunningTask) -> list[TrainedDevices]:
    """All that comes of them, as it comes."""
    due, found = tasks(*running), list[TrainedDevices]()
    while due:
        found.append(training.results_for(due))
        due = due[len(found[-1]) :]
    return found


class Doubles:
    """A back end whose updates are the model's; it remembers who was begun together. Device
    ``wild`` diverges."""

    def __init__(self, wild: int = -1) -> None:
        self.wild = wild
        self.begun: list[tuple[list[float], list[int]]] = []

    def train(self, inputs: RoundInputs, jobs: Sequence[Job]) -> TrainedDevices:
        return trained_devices(
            *(
                trained_device(
                    inputs.model.tolist(), 10 + job.device, diverged=job.device == self.wild
                )
                for job in jobs
            )
        )

    def begin(self, inputs: RoundInputs, jobs: Sequence[Job]) -> ResultReader:
        self.begun.append((inputs.model.tolist(), [job.device for job in jobs]))
        return self.train(inputs, jobs).select

    def evaluate(self, inputs: RoundInputs, jobs: Sequence[Job]) -> list[Evaluation | None]:
        raise AssertionError

    evaluate_personal = evaluate

    def close(self) -> None: ...


def opened(backend: Any, encoding: Encoding = FLOAT32) -> RoundTraining:
    """The training of the round that ``running_task`` is of."""
    training = RoundTraining(backend, 1, encoding)
    training.begin_round(3, [RoundInputs(MODEL)], [EARLIER])
    return training


@pytest.mark.parametrize("name", ["int8", "int4", "topk-0.5", "float16"])
def test_updates_are_what_the_coordinator_decodes(name: str) -> None:
    """Encoded with each task's own seed, after a corruption; what cannot be encoded has
    diverged."""
    encoding = find_encoding(name)
    training = opened(Doubles(wild=3), encoding)
    out = [
        running_task(1, 10.0),
        running_task(2, 20.0, corrupt="scaled", factor=50_000.0),
        running_task(3, 30.0),
    ]
    training.expect(RunningTasks.from_rows(out), room=3)
    (found,) = taken(training, *out)
    expected = [MODEL, np.float32(50_000) * MODEL]
    for row, update in enumerate(expected):
        if name == "float16" and row == 1:
            assert found.diverged.tolist() == [False, True, True], "100000 is beyond its range"
            continue
        decoded = encoding.decode(encoding.encode(update, out[row].seed), 2)
        assert found.updates[row].tobytes() == decoded.tobytes()
        assert found.largest[row] == np.abs(decoded).max()
    assert found.diverged[2]


def test_what_top_k_leaves_out_is_added_to_the_next_update_that_follows_one_that_counted(
    tmp_path: Path,
) -> None:
    encoding = find_encoding("topk-0.5")
    kept = KeptByDevices(NO_FILES, 9, RowFile(tmp_path / "residuals", 2))
    training = RoundTraining(Doubles(), 1, encoding, kept)
    task = running_task(1, 10.0)

    def sent() -> list[float]:
        """What the device sends of the update MODEL, 1 and 2."""
        training.begin_round(3, [RoundInputs(MODEL)], [EARLIER])
        training.expect(RunningTasks.from_rows([task]), room=1)
        (found,) = taken(training, task)
        kept.accepted([1], found)
        updates: list[list[float]] = found.updates.tolist()
        return updates[0]

    assert sent() == [0, 2]
    kept.end_round(committed=True)
    assert sent() == [2, 0], "1 + 1 is as much as 2: the first of the two"
    kept.end_round(committed=False)
    assert sent() == [2, 0], "what an abandoned round took does not count"
    kept.end_round(committed=True)
    assert sent() == [0, 4]


def test_the_first_who_report_are_begun_together() -> None:
    backend = Doubles()
    training = opened(backend)
    out = [
        running_task(5, 5.0, corrupt="stale"),
        running_task(1, 10.0, "crash"),
        running_task(4, 20.0),
        running_task(2, 20.0),
        running_task(3, 30.0),
    ]
    assert not training.started
    training.expect(RunningTasks.from_rows(out), room=3)
    assert training.started
    # Stale updates are of the model before.
    assert backend.begun == [([1.0, 2.0], [4, 2]), ([5.0, 7.0], [5])]
    assert training.results_for(tasks(out[0])).updates.tolist() == [[5.0, 7.0]]
    assert training.results_for(tasks(out[2])).examples.tolist() == [14]
    # Device 3 is due, then whoever is not begun yet and will report first. What was begun together
    # is read together.
    later = [
        running_task(9, 0.5, "crash"),
        running_task(8, 1.0),
        running_task(6, 2.0),
        running_task(7, 3.0),
    ]
    training.expect(RunningTasks.from_rows(later), room=3)
    assert len(backend.begun) == 2
    training.drop(RunningTasks.from_rows(later), 1, 0.0)
    training.begin_with(out[4].task, room=2)
    assert backend.begun[2:] == [([1.0, 2.0], [3, 6])]
    with pytest.raises(KeyError):
        training.results_for(tasks(out[2]))
    training.drop(RunningTasks.from_rows(out), 4, 0.0)
    training.drop(RunningTasks.from_rows(out), 4, 0.0)
    with pytest.raises(KeyError):
        training.results_for(tasks(out[4]))


@pytest.mark.parametrize(("most", "apart"), [(0, True), (5, False)], ids=["large", "small"])
def test_what_was_begun_together_is_taken_together(
    monkeypatch: pytest.MonkeyPatch, most: int, apart: bool
) -> None:
    """What was begun separately comes the next time, unless there is little of it."""
    monkeypatch.setattr(round_training, "MOST_GATHERED", most)
    training = opened(Doubles())
    out = [
        running_task(0, 1.0),
        running_task(1, 2.0),
        running_task(2, 3.0, corrupt="stale"),
        running_task(3, 4.0),
        running_task(4, 5.0),
    ]
    training.expect(RunningTasks.from_rows(out), room=5)
    came = taken(training, *out)
    examples = [found.examples.tolist() for found in came]
    assert examples == ([[10, 11], [12], [13, 14]] if apart else [[10, 11, 12, 13, 14]])
    updates = [update for found in came for update in found.updates.tolist()]
    assert updates == [[1.0, 2.0], [1.0, 2.0], [5.0, 7.0], [1.0, 2.0], [1.0, 2.0]]
    assert not training.begun


def test_as_many_are_begun_as_memory_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round_training, "MAX_BYTES_AHEAD", 2 * MODEL.nbytes + 1)
    backend = Doubles()
    out = [running_task(device, float(device)) for device in range(5)]
    training = opened(backend)
    training.expect(RunningTasks.from_rows(out), room=4)
    monkeypatch.setattr(round_training, "MAX_BYTES_AHEAD", 1)
    training.begin_with(out[2].task, room=4)
    assert [devices for _, devices in backend.begun] == [[0, 1], [2]]


@pytest.mark.parametrize(
    ("corrupt", "expected"), [("scaled", [3.0, 6.0]), ("flipped", [-3.0, -6.0])]
)
def test_corruption_is_of_the_update_that_was_trained(corrupt: str, expected: list[float]) -> None:
    """No other update that was trained with it is corrupted."""
    training = opened(Doubles())
    out = [
        running_task(0, 1.0),
        running_task(1, 2.0, corrupt=corrupt, factor=3.0),
        running_task(2, 3.0),
    ]
    training.expect(RunningTasks.from_rows(out), room=3)
    found = training.results_for(tasks(*out))
    assert found.updates.tolist() == [[1.0, 2.0], expected, [1.0, 2.0]]
    assert found.largest.tolist() == [2.0, 6.0, 2.0]


def test_what_has_diverged_is_not_spoilt() -> None:
    training = opened(Doubles(wild=0))
    out = [running_task(device, 1.0, corrupt="scaled", factor=3.0) for device in range(2)]
    training.expect(RunningTasks.from_rows(out), room=2)
    found = training.results_for(tasks(*out))
    assert found.largest.tolist() == [2.0, 6.0]
    assert found.diverged.tolist() == [True, False]


def test_garbage_is_as_long_as_the_update_times_its_factor() -> None:
    made = []
    for device in (0, 0, 1):
        training = opened(Doubles())
        sent = running_task(device, 1.0, corrupt="garbage", factor=4.0)
        training.expect(RunningTasks.from_rows([sent]), room=1)
        made.append(training.results_for(tasks(sent)).updates[0])
    np.testing.assert_allclose(
        [np.linalg.norm(update) for update in made], 4 * np.sqrt(5), rtol=1e-6
    )
    assert made[0].tolist() == made[1].tolist()
    assert made[0].tolist() != made[2].tolist()


def test_what_is_put_back_is_taken_once_more_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """An update that was spoilt is not spoilt a second time."""
    monkeypatch.setattr(round_training, "MOST_GATHERED", 0)
    training = opened(Doubles())
    corrupt = {1: "scaled", 2: "garbage", 3: "flipped"}
    out = [
        running_task(device, float(device), corrupt=corrupt.get(device, ""), factor=3.0)
        for device in range(5)
    ]
    training.expect(RunningTasks.from_rows(out), room=5)
    found = training.results_for(tasks(*out[:4]))
    before = bits(found)
    assert found.updates[1].tolist() == [3.0, 6.0]
    training.put_back(tasks(*out[1:4]), found.select(range(1, 4)))
    with pytest.raises(KeyError):
        training.results_for(tasks(*out[:1]))
    again = training.results_for(tasks(*out[1:3]))
    assert bits(again) == before[1:3]
    training.put_back(tasks(*out[2:3]), again.select([1]))
    training.put_back([], again.select([]))
    # Device 2 was put back by itself, device 3 before, device 4 was not taken yet.
    came = taken(training, *out[2:])
    assert [bits(row) for row in came[:2]] == [before[2:3], before[3:4]]
    assert came[2].updates.tolist() == [[1.0, 2.0]]
    for sent in out:
        with pytest.raises(KeyError):
            training.results_for(tasks(sent))


@pytest.mark.parametrize("corrupt", ["", "scaled"])
def test_what_nobody_takes_is_gone_with_its_round(corrupt: str) -> None:
    """At once, and not when Python looks for cycles: its updates would wait for that, and its
    blocks still be done."""

    class Kept(Doubles):
        def begin(self, inputs: RoundInputs, jobs: Sequence[Job]) -> ResultReader:
            pending = PendingResults(
                lambda pending, place: pending.put(range(len(jobs)), self.train(inputs, jobs))
            )
            left.append(ref(pending))
            return pending.read

    left: list[Any] = []
    training = opened(Kept())
    out = [running_task(device, float(device), corrupt=corrupt) for device in range(3)]
    training.expect(RunningTasks.from_rows(out), room=3)
    training.results_for(tasks(*out[:1]))
    gc.disable()
    try:
        assert left[0]() is not None
        del training
        assert left[0]() is None
    finally:
        gc.enable()
