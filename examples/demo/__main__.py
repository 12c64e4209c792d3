"""A fleet of real processes trains a digits model: some devices die, the coordinator dies, the run
goes on.

make demo ARGS="--devices 40 --rounds 60"       or       .venv/bin/python -m examples.demo --help
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from fleetlearn_coordinator.service.status import (
    Closed,
    Status,
    read_model,
    read_status,
    read_tasks,
)
from fleetlearn_coordinator.storage.errors import StoreError
from fleetlearn_device import open_runtime
from fleetlearn_protocol.errors import FleetError, in_words

from examples import digits
from examples.demo import outcome
from examples.demo.command_line import add_number, number, own_folder, parser_of
from examples.demo.fleet import (
    Fleet,
    Paths,
    Phase,
    export,
    give_access,
    goal_of,
    prepare,
    start_coordinator,
    training_build,
)
from examples.demo.processes import DemoError, exit_on_signals
from examples.demo.screen import Round, Screen
from examples.demo.strikes import Strikes

EXIT = """exit status:
  0    the run reached the accuracy
  1    something went wrong, or the accuracy was not reached; the text says what
  2    wrong usage
  130  stopped by Ctrl-C (143 by SIGTERM)
Whatever the status, nothing that the demo started runs any more.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo. Returns its exit status."""
    options = _options(arguments)
    exit_on_signals()
    try:
        with _own(options.output) as paths:
            return _demo(options, paths)
    except (DemoError, FleetError, OSError) as error:
        print(f"demo: {in_words(error, file=True)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("demo: stopped; nothing is left running", file=sys.stderr)
        return 130


def _demo(options: argparse.Namespace, paths: Paths) -> int:
    if options.device_command is not None and shutil.which(options.device_command) is None:
        raise DemoError(f"--device-command {options.device_command} is no program")
    began = time.monotonic()
    access = give_access(paths, options.devices)
    print(f"the live page, once the coordinator is up:\n  {access.link}", flush=True)
    with Screen(options.rounds) as screen:
        screen.event("exporting the model and checking it against PyTorch")
        export(paths, training_build())
        exported = json.loads((paths.logs / "export.log").read_text("utf-8").splitlines()[-1])
        screen.event(
            f"exported {exported['parameters']:,} parameters; "
            f"the largest difference from PyTorch is {exported['largest_difference']:.1e}"
        )
        if training_build() is None:
            screen.event(
                "no device uses ONNX Runtime's training build here: it needs Linux on x86-64 and "
                "Python 3.11 or 3.12"
            )
        elif exported["without_ort_training"] is not None:
            raise DemoError(f"there are no training artifacts: {exported['without_ort_training']}")
        fleet = prepare(
            paths,
            access,
            devices=options.devices,
            rounds=options.rounds,
            seed=options.seed,
            alpha=options.alpha,
            port=options.port,
            command=options.device_command,
        )
        with fleet:
            start_coordinator(fleet)
            strikes = Strikes(fleet, options.rounds, options.kill)
            sizes = [device.examples for device in fleet.devices]
            apart = sum(device.runtime == "ort-training" for device in fleet.devices)
            screen.event(
                (
                    f"the coordinator is up; starting {len(sizes)} devices with {min(sizes)} to "
                    f"{max(sizes)} scans each"
                )
                + (f", {apart} of them on ONNX Runtime's training build" if apart else "")
            )
            for device in fleet.devices:
                device.start()
            rounds = _watch(fleet, strikes, screen, options)
            training_seconds = time.monotonic() - strikes.began
            screen.event("training is finished; everybody goes home")
            _await_ends(fleet)
        if not strikes.done:
            raise DemoError(
                f"{len(strikes.kills)} of {strikes.devices} devices were caught at their work, and "
                f"the coordinator {'was' if strikes.coordinator else 'was not'} caught in "
                f"mid-round, before the {options.rounds} rounds were over. Give it more rounds."
            )
        last = [round_ for round_ in rounds if round_.outcome == "committed"][-1]
        if last.accuracy is None:
            raise DemoError("the last model was not measured")
        outcome.export_model(paths, last.accuracy)
        outcome.plot(rounds, strikes, paths.plot, options.accuracy)
        screen.event(
            "exported the trained model with fleetlearn-coordinator export-model, and tried it"
        )
    summary = outcome.summarize(
        rounds,
        strikes,
        exported,
        seed=options.seed,
        alpha=options.alpha,
        training_seconds=round(training_seconds, 2),
        seconds=round(time.monotonic() - began, 2),
    )
    outcome.write_summary(summary, paths.summary)
    outcome.show(summary, paths)
    if summary["accuracy"] < options.accuracy:
        raise DemoError(
            f"the held-out accuracy is {summary['accuracy']:.1%}; {options.accuracy:.1%} was to be "
            "reached"
        )
    return 0


def _watch(
    fleet: Fleet, strikes: Strikes, screen: Screen, options: argparse.Namespace
) -> list[Round]:
    """Follow the run to its end, strike it as planned, and measure each new model. Raises DemoError
    on a stall."""
    measure = _Measure(fleet.paths)
    rounds: list[Round] = []
    committed, moved = 0, time.monotonic()
    while True:
        running = fleet.coordinator.running  # before the look at the records, which are then final
        status = read_status(fleet.paths.run, since=rounds[-1].number + 1 if rounds else 0)
        for closed in status.rounds:
            committed += closed.outcome == "committed"
            rounds.append(measure.round(closed, committed, strikes.began))
            screen.round(rounds[-1])
            strikes.check_round(closed.number)
            if len(rounds) > 1 and (text := strikes.explain_fall(rounds[-2], rounds[-1])):
                screen.event(text)
            moved = time.monotonic()
        if status.finished is not None and not running:
            if fleet.coordinator.status != 0:
                raise DemoError(fleet.coordinator.last_words())
            return rounds
        if not running:
            raise DemoError(fleet.coordinator.last_words())
        fleet.read_logs()
        if status.finished is None:
            ended = fleet.ended()
            # One that heard of the end ends with 0, perhaps since the look at the records above.
            if ended and (ended.child.status != 0 or read_status(fleet.paths.run).finished is None):
                raise DemoError(ended.child.last_words())
            for event in strikes.step(committed):
                screen.event(event)
                moved = time.monotonic()
        if time.monotonic() - moved > options.stall:
            raise DemoError(f"no round ended for {options.stall:g} s. {_standing(fleet, status)}")
        screen.now(_standing(fleet, status))
        time.sleep(0.02)


class _Measure:
    """Runs the bundle's evaluation graph on the held-out test set."""

    def __init__(self, paths: Paths) -> None:
        self._run = paths.run
        self._runtime = open_runtime(paths.bundle, kind="onnx")
        data = digits.data()
        self._held_out = (data.x_test, data.y_test)

    def round(self, closed: Closed, version: int, began: float) -> Round:
        """The round, with the loss and accuracy of the model it made: ``version``, if it was
        committed."""
        loss = accuracy = None
        if closed.outcome == "committed":
            try:
                _, vector = read_model(self._run, version)
            except StoreError:  # the coordinator keeps the last few models
                pass
            else:
                self._runtime.load(vector)
                sums = self._runtime.evaluate(self._held_out)
                loss, accuracy = (
                    sums.loss_sum / sums.examples,
                    sums.metric_sums["accuracy"] / sums.examples,
                )
        summary = closed.summary
        return Round(
            number=closed.number,
            outcome=closed.outcome,
            reports=summary["reports"],
            dropped=summary["dropped"],
            loss=loss,
            accuracy=accuracy,
            bytes_up=summary["bytes_up"],
            bytes_down=summary["bytes_down"],
            seconds=summary["seconds"],
            ended=round(time.monotonic() - began, 2),
        )


def _standing(fleet: Fleet, status: Status) -> str:
    """Return where the run is, in one line."""
    number, tasks = read_tasks(fleet.paths.run)
    accepted = sum(task.state == "accepted" for task in tasks)
    out = sum(task.state == "assigned" for task in tasks)
    ready = sum(device.phase is not Phase.STARTING for device in fleet.alive)
    where = (
        f"round {number}: {accepted} of {goal_of(len(fleet.devices))} reports, {out} tasks out; "
        if number
        else ""
    )
    return (
        f"{where}{ready} of {len(fleet.devices)} devices up, {len(fleet.dead)} dead; "
        f"{status.version} models"
    )


def _await_ends(fleet: Fleet, timeout: float = 3.0) -> None:
    """Devices end by themselves when they hear that the training is finished. One that just
    connects may not."""
    deadline = time.monotonic() + timeout
    while any(device.child.running for device in fleet.alive) and time.monotonic() < deadline:
        time.sleep(0.02)
    for device in fleet.alive:
        if device.child.status not in (None, 0):
            raise DemoError(device.child.last_words())


@contextmanager
def _own(output: Path) -> Iterator[Paths]:
    """The output directory, for this demo alone, without what an earlier one left."""
    paths = Paths(output)
    with own_folder(output, (paths.bundle, paths.run, paths.devices, paths.identities, paths.logs)):
        for file in (paths.plan, paths.service, paths.summary, paths.plot, paths.model):
            file.unlink(missing_ok=True)
        paths.logs.mkdir()
        yield paths


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    text = (
        "A fleet of real processes trains a digits model, some of them are killed, and the run "
        "goes on."
    )
    parser = parser_of("demo", text, EXIT)
    add = partial(add_number, parser)
    add("--devices", 12, number(int, 6, 140), "device processes")
    add("--rounds", 30, number(int, 6, 10_000), "rounds to commit")
    add(
        "--kill",
        4,
        number(int, 0, 100),
        "devices to kill at their work; the first half of them comes back",
    )
    add("--seed", 0, number(int, 0, 2**31), "of the data's split and of the run")
    add(
        "--alpha",
        0.5,
        number(float, 0.01, 1000),
        "Dirichlet parameter of the split: smaller is less even",
    )
    add("--accuracy", 0.95, number(float, 0, 1), "held-out accuracy that must be reached")
    add(
        "--stall",
        90.0,
        number(float, 1, 3600),
        "seconds without an ended round after which the demo gives up",
    )
    add(
        "--port",
        0,
        number(int, 0, 65535),
        "the coordinator's TCP port on 127.0.0.1; 0: one that is free",
    )
    parser.add_argument(
        "--output",
        default=Path("demo-output"),
        type=Path,
        metavar="DIR",
        help="default: %(default)s",
    )
    parser.add_argument(
        "--device-command",
        metavar="FILE",
        help="what runs each device; default: fleetlearn-device, as make installs it",
    )
    options = parser.parse_args(arguments)
    staying = options.devices - (options.kill - options.kill // 2)
    if staying < goal_of(options.devices) or options.kill // 2 > options.devices // 4:
        parser.error(
            f"--kill {options.kill} leaves too few of {options.devices} devices: a round wants "
            f"{goal_of(options.devices)} reports"
        )
    return options


if __name__ == "__main__":
    sys.exit(main())
