"""A device's state directory against a model of its coordinator, while tasks are accepted, refused
and dropped, and the process is killed at any change of the directory."""

from __future__ import annotations

import itertools
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import numpy as np
from fleetlearn_device.storage.state_directory import StateDirectory
from fleetlearn_protocol.encodings import FLOAT32
from fleetlearn_protocol.messages import Report
from fleetlearn_protocol.vector import Vector
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from killed import killed_after

BUNDLE, CONTENT = "b" * 64, b"12345678"
REPORT = Report("t0", 1, (FLOAT32.part("update", CONTENT),), 7, 3, 2.0, True, 0.5)


def vector_of(task: str) -> Vector:
    return np.full(2, int(task[1:]), np.float32)


class Device(RuleBasedStateMachine):
    """``counted``: the last task whose update the coordinator counts. ``done``: the last task that
    was finished."""

    @initialize()
    def first_start(self) -> None:
        self.folder = TemporaryDirectory()
        self.state = StateDirectory(self.folder.name)
        self.tasks = itertools.count(1)
        self.counted: str | None = None
        self.done: str | None = None
        self.held: str | None = None

    def teardown(self) -> None:
        self.state.close()
        self.folder.cleanup()

    def restart(self) -> None:
        self.state.close()
        self.state = StateDirectory(self.folder.name)
        report = self.state.outbox.load()
        self.held = None if report is None else report.task

    @rule(changes=st.one_of(st.none(), st.integers(0, 30)))
    def train(self, changes: int | None) -> None:
        """A task from the coordinator, from its beginning to the saved update; killed after so many
        changes."""
        task, finished = f"t{next(self.tasks)}", False
        with killed_after(10**6 if changes is None else changes):
            if self.held is not None:
                self.state.outbox.drop(self.held)  # the coordinator waits for it no longer
            tied = self.state.tied_vectors.begin(BUNDLE, self.counted, 2)
            expected = {} if self.counted is None else {"control": [float(self.counted[1:])] * 2}
            assert {name: vector.tolist() for name, vector in tied.items()} == expected
            own = self.state.kept_states.load(BUNDLE, 2)
            assert (None if own is None else own.tolist()) == (
                None if self.done is None else vector_of(self.done).tolist()
            )
            self.state.outbox.reserve(len(CONTENT), 8, 100)
            kept = vector_of(task)
            report = msgspec.structs.replace(REPORT, task=task)
            self.state.outbox.save(report, (CONTENT,), BUNDLE, kept, {"control": kept})
            finished = True
        if not finished:
            self.restart()
            assert self.held in (None, task, self.done)
            finished = self.held == task
        if finished:
            self.done = self.held = task

    @rule(counts=st.booleans(), told=st.booleans())
    def upload(self, counts: bool, told: bool) -> None:
        """The coordinator counts the held update, or refuses it; its answer may be lost."""
        if self.held is not None:
            self.counted = self.held if counts else self.counted
            if told:
                self.state.outbox.drop(self.held)
                self.held = None

    @rule()
    def kill(self) -> None:
        self.restart()

    @rule()
    def another_run(self) -> None:
        """The coordinator begins again: from zeros."""
        self.counted = None

    @invariant()
    def nothing_is_left_over(self) -> None:
        names = {path.name for path in Path(self.folder.name, "pending").iterdir()}
        assert names == (
            set() if self.held is None else {"report.json", f"{REPORT.parts[0].crc32:08x}.bin"}
        )
        sets = {
            path.name.removeprefix(f"{BUNDLE}.")
            for path in Path(self.folder.name, "tied").iterdir()
        }
        assert {self.held, self.counted} - {None} <= sets
        assert len(sets) <= 2
        assert not any(name.startswith("damaged") for name in sets)


Device.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestDevice = Device.TestCase
