"""A device's whole life, in any order: session, checkpoints, outbox and training together. It is
killed anywhere, stopped, paused and cut off; each task's update is the one of an undisturbed
device, and no update is sent after the coordinator has it."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleetlearn_device.session.commands import (
    Command,
    Commands,
    DropPending,
    Locate,
    SavePending,
    Send,
    StartTraining,
    StopTraining,
)
from fleetlearn_device.session.pause import Pause
from fleetlearn_device.session.session import Session
from fleetlearn_device.session.states import Idle, Offline
from fleetlearn_device.storage.state_directory import StateDirectory
from fleetlearn_device.training import progress
from fleetlearn_device.training.train import StoppedError
from fleetlearn_device.training.trainer import FinishedUpdate, Trainer
from fleetlearn_protocol import Bundle
from fleetlearn_protocol.messages import (
    Accepted,
    CheckIn,
    Failed,
    Heartbeat,
    Report,
    Welcome,
    encode,
)
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from interrupted import BUNDLES, DATA, bring, left, task_of
from line_bundle import write_line_bundle

STEPS = st.integers(0, 7)
"""A task has six steps: after 6 or 7 of them it is done."""


class Killed(BaseException):
    """The process dies here."""


class Life(RuleBasedStateMachine):
    bundle: Bundle
    undisturbed: list[dict[str, Any]]

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="fleetlearn-life-"))
        self.number = 1
        """Of the task that the coordinator wants."""
        self.acknowledged: set[str] = set()
        self.state: StateDirectory | None = None
        self.boot()

    def teardown(self) -> None:
        self.die()
        shutil.rmtree(self.folder, ignore_errors=True)

    # The process

    def boot(self) -> None:
        self.state = StateDirectory(self.folder / "state")
        held = self.state.outbox.load()
        self.session = Session("dev", 12, held=held, algorithms=("scaffold",))
        self.trainer = Trainer(self.state, DATA, "onnx", 1, checkpoint_every=1e-9)
        self.starting: StartTraining | None = None
        self.finished: FinishedUpdate | None = None
        self.connected = False
        self.ends = "finish", 0

    def die(self) -> None:
        if self.state is not None:
            self.state.close()
            self.state = None

    def perform(self, commands: Commands) -> None:
        for command in commands:
            self.do(command)

    def do(self, command: Command) -> None:
        assert self.state is not None
        match command:
            case Send(message=message):
                assert self.connected
                self.hear(message)
            case Locate(task=task):
                bring(self.state, self.bundle, task)  # type: ignore[arg-type]
                self.perform(self.session.located(task.task, [], 0.0))
            case StartTraining():
                self.starting = command
            case StopTraining(keep=keep):
                # It is asked while no step is done: training begins with ``train`` here.
                self.trainer.keep_when_stopped = keep
            case SavePending():
                assert self.finished is not None
                self.state.outbox.save(*self.finished)
                self.trainer.forget_checkpoint()
                self.perform(self.session.saved(self.finished.report.task))
            case DropPending(task_id=task_id):
                self.state.outbox.drop(task_id)

    def hear(self, message: Any) -> None:
        """The coordinator hears a message of the device's."""
        match message:
            case CheckIn(held=held):
                self.perform(self.session.received(encode(Welcome("model", 9.0, 16)), 0.0))
                if held is None:  # the lease waits for its device
                    task = self.task()
                    self.perform(self.session.received(encode(task), 0.0))
            case Report():
                assert message.task not in self.acknowledged, "sent after its acknowledgement"
                assert message.task == f"t{self.number}"
            case Failed() | Heartbeat():
                pass

    def task(self) -> Any:
        kept = f"t{self.number - 1}" if self.number > 1 else None
        return task_of(self.bundle, "plain", self.number, kept)

    # What happens, in any order

    @precondition(lambda self: not self.connected)
    @rule()
    def connect(self) -> None:
        self.connected = True
        self.perform(self.session.connected(0.0))

    @precondition(lambda self: self.connected)
    @rule()
    def cut(self) -> None:
        self.connected = False
        self.perform(self.session.disconnected())

    @rule()
    def kill(self) -> None:
        self.die()
        self.boot()

    @precondition(lambda self: self.starting is not None)
    @rule(steps=STEPS, end=st.sampled_from(["kill", "kill", "stop", "pause", "cancel", "finish"]))
    def train(self, steps: int, end: str) -> None:
        """Train so many steps; then the process is killed, the device stops or pauses in order, or
        the connection alone is cut. Otherwise the task is done."""
        assert self.starting is not None
        starting, self.starting = self.starting, None
        trainer, count = self.trainer, self.trainer._count
        trainer.halt.clear()
        done = 0

        def count_and_end(number: int, loss: float) -> None:
            nonlocal done
            done += 1
            count(number, loss)
            if end == "kill" and done > steps:
                raise Killed
            if end in ("stop", "pause") and done >= max(steps, 1):
                trainer.keep_when_stopped = True
                trainer.halt.set()

        trainer._count = count_and_end  # type: ignore[method-assign]
        try:
            assert not isinstance(starting.task, str)
            finished = trainer.train(starting.task, starting.seconds)
        except Killed:
            self.kill()
            return
        except StoppedError:
            self.stopped(starting.task.task, end)
            return
        finally:
            trainer._count = count  # type: ignore[method-assign]
        found = left(finished)
        assert found == self.undisturbed[self.number - 1]
        if end == "cancel":  # the process dies between the training and the outbox
            self.kill()
            return
        self.finished = finished
        self.perform(self.session.trained(finished.report))

    def stopped(self, task_id: str, end: str) -> None:
        if end == "stop":
            self.perform(self.session.stop(keep=True))
            self.connected = False
            self.perform(self.session.disconnected())
            self.perform(self.session.ended(task_id))
            assert self.session.over
            self.kill()
            return
        pause = Pause(("pause",), "its owner paused it", keeps=True)
        self.perform(self.session.begin_pause(pause))
        self.perform(self.session.ended(task_id))
        self.connected = False
        self.perform(self.session.disconnected())
        assert isinstance(self.session.work, Idle)
        self.perform(self.session.end_pause())

    @precondition(lambda self: self.state.outbox.load() is not None)
    @rule(lost=st.booleans())
    def acknowledge(self, lost: bool) -> None:
        """The coordinator has the update, and says so, unless the connection breaks just then."""
        assert self.state is not None
        report = self.state.outbox.load()
        assert report is not None
        if isinstance(self.session.link, Offline) or self.session.task_id != report.task:
            return
        if lost:
            self.cut()
            return
        self.acknowledged.add(report.task)
        self.number += 1
        self.perform(self.session.received(encode(Accepted(report.task)), 0.0))
        assert self.state.outbox.load() is None
        if self.number <= len(self.undisturbed):
            self.perform(self.session.received(encode(self.task()), 0.0))
        else:  # a new life, so that the tasks that were worked out are enough
            self.die()
            shutil.rmtree(self.folder / "state")
            self.number = 1
            self.acknowledged.clear()
            self.boot()


@pytest.mark.slow
def test_a_device_s_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "WRITE_SHARE", np.inf)
    monkeypatch.setattr(progress, "FLASH_RATE", np.inf)
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    Life.bundle = write_line_bundle(tmp_path / "line", **BUNDLES["everything"])
    Life.undisturbed = []
    state = StateDirectory(tmp_path / "undisturbed")
    for number in range(1, 5):
        task = task_of(Life.bundle, "plain", number, f"t{number - 1}" if number > 1 else None)
        bring(state, Life.bundle, task)
        finished = Trainer(state, DATA, "onnx", 1).train(task, 100.0)
        Life.undisturbed.append(left(finished))
        state.outbox.save(*finished)
        state.outbox.drop(task.task)
    state.close()
    run_state_machine_as_test(
        Life, settings=settings(max_examples=60, stateful_step_count=40, deadline=None)
    )
