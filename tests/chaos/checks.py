"""What must hold after a fleet was disturbed."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from fleetlearn_coordinator import Plan, read_model, read_status
from fleetlearn_coordinator.storage.find_storage import find_storage
from fleetlearn_coordinator.storage.sql_reader import SqlReader

from tests.chaos.expected import masked_model, model_of_rows, synchronous_run
from tests.chaos.fault_kinds import Event
from tests.chaos.fleet import End, Fleet, children
from tests.chaos.fleet_files import GOAL
from tests.chaos.scenario import ASYNCHRONOUS, SECURE

MOST_FILES = 200
"""Descriptors of one process."""
MOST_MIB = 300.0
"""Memory of one process that no other one shares, MiB."""
SAID = 2
"""How often it is said of a process that it ended without a cause."""
AFTER = 75.0
"""Seconds after a fault in which it may still end a process: an object store's requests are tried
again for a minute."""
WHY = re.compile(
    "^error: |: cannot |No space left|is away|the lock of the run is lost", re.MULTILINE
)
"""What the last lines of a process say that ends by itself."""
SHARED = {"hub", "store", "database", "helper", "bus", "coordinator", "standby", "engine"}
"""Whose faults may end a coordinator or a gateway, beside those of its own."""
EFFECTS = (
    ("kill-part", "", "coordinators", "was killed by SIGKILL"),
    ("kill", "coordinator", "coordinators", "goes on at model version"),
    ("stop", "coordinator", "coordinators", "goes on at model version"),
    ("reset", "hub-fleet", "devices", "connecting again"),
)
"""Kind of fault, its target (empty: any), whose logs, and what one of them says then."""


class Row(NamedTuple):
    """A task whose update the ledger says was accepted."""

    task: str
    device: str
    round: int
    staleness: int


def accepted_rows(data: Path) -> list[Row]:
    """Return the accepted tasks that the ledger still has."""
    columns = "task, device, round, staleness"
    with find_storage(data).read_ledger() as ledger:
        assert isinstance(ledger, SqlReader)
        found = ledger._db.execute(f"SELECT {columns} FROM tasks WHERE state='accepted'")
        return [Row(*row) for row in found.fetchall()]


def check_model(fleet: Fleet) -> Iterator[str]:
    """The newest model is the undisturbed run's, bit for bit, and so are the others that are
    kept."""
    plan, version = Plan.load(fleet.plan), read_model(fleet.data)[0]
    rows = accepted_rows(fleet.data)
    for number in versions(fleet):
        model = read_model(fleet.data, number)[1]
        if fleet.scenario.plan == ASYNCHRONOUS:
            wanted = model_of_rows(plan, [row[1:] for row in rows], number)
        elif fleet.scenario.plan == SECURE:
            wanted = masked_model(plan, fleet.scenario.names, number)
        else:
            text = re.sub(r'(bundle|data_dir|durable) = ".*?"', "", fleet.plan.read_text())
            wanted = synchronous_run(fleet.plan, text, fleet.scenario.devices).model(number)
        if model.tobytes() != wanted.tobytes():
            differ = int((model != wanted).sum())
            yield (
                f"model {number} of {version} is not the undisturbed run's: {differ} of "
                f"{len(model)} elements differ"
            )


def versions(fleet: Fleet) -> list[int]:
    """Return some of the versions that are kept: the oldest, some in the middle, the newest."""
    newest = read_model(fleet.data)[0]
    found = []
    for number in range(1, newest + 1):
        with suppress(Exception):
            read_model(fleet.data, number)
            found.append(number)
    return sorted({*found[:: max(1, len(found) // 8)], newest})


def check_updates(
    fleet: Fleet, done: Sequence[Event], events: Sequence[dict[str, Any]]
) -> Iterator[str]:
    """What a device was told was accepted counts, once. ``events``: lines of the devices' logs, one
    device after the other."""
    rows = {row.task: row for row in accepted_rows(fleet.data)}
    first = min((row.round for row in rows.values()), default=0)
    powerless = {event.target for event in done if event.kind == "power"}
    told: dict[tuple[str, int], list[str]] = defaultdict(list)
    life = 0
    for event in events:
        if event.get("event") in ("update-accepted", "task-uncounted"):
            told[str(event["task"]), life].append(str(event["event"]))
        # That an update was dropped is not synced: a device without power may offer it once more,
        # and hear that its round is over.
        life += event.get("event") == "started" and event["device"] in powerless
    for (task, _), what in told.items():
        # twice accepted: it was lost, and the device was asked for it again
        if len(what) > 1:
            yield f"the device of task {task} was told {', then '.join(what)}"
        if "update-accepted" in what and round_of(task) > first and task not in rows:
            yield f"the update of task {task} was acknowledged and is lost"
    status = read_status(fleet.data)
    committed = {row.number: row.summary for row in status.rounds if row.outcome == "committed"}
    wanted = GOAL if fleet.scenario.plan == ASYNCHRONOUS else fleet.scenario.devices
    of_round: dict[int, list[str]] = defaultdict(list)
    for row in rows.values():
        of_round[row.round].append(row.device)
    for number, summary in committed.items():
        if summary["reports"] != wanted:
            yield f"round {number} was committed with {summary['reports']} updates, not {wanted}"
        devices = of_round[number]
        if number > first and len(devices) != wanted:
            yield f"round {number} has {len(devices)} accepted updates in the ledger, not {wanted}"
        twice = [name for name, count in Counter(devices).items() if count > 1]
        if twice and fleet.scenario.plan != ASYNCHRONOUS:
            yield f"round {number} counts updates of {', '.join(twice)} twice"


def round_of(task: str) -> int:
    """Return the round that a task was given in."""
    return int(task.split("-")[-2])


def device_events(fleet: Fleet) -> list[dict[str, Any]]:
    """Return the lines of the devices' logs that are JSON."""
    found = []
    for name in fleet.scenario.names:
        for line in (fleet.folder / f"{name}.log").read_text(errors="replace").splitlines():
            with suppress(ValueError):
                found.append({"device": name} | json.loads(line))
    return found


def check_logs(fleet: Fleet) -> Iterator[str]:
    """No process says something that nobody expected."""
    ours = [*fleet.scenario.names, *fleet.scenario.coordinators]
    ours += fleet.scenario.gateways_elsewhere
    for name in [*ours, *(["helper"] if fleet.scenario.plan == SECURE else [])]:
        text = (fleet.folder / f"{name}.log").read_text(errors="replace")
        for word in ("Traceback", "never retrieved", "never awaited", "Task was destroyed"):
            if word in text:
                at = text.index(word)
                yield f'the log of {name} has "{word}": {text[max(0, at - 200) : at + 1500]}'
                break


def check_ends(fleet: Fleet, done: Sequence[Event]) -> Iterator[str]:
    """A process ends by itself only for a fault that explains it, with a line that says so."""
    told: Counter[str] = Counter()
    for end in fleet.ends:
        names = {end.name} | ({"fleet"} if end.name in fleet.scenario.names else SHARED)
        causes = [
            event
            for event in done
            if names & {*event.target.split("-"), event.target.partition(" ")[0]}
            and event.at <= end.at <= event.at + event.seconds + AFTER
        ]
        if not causes:
            problem = "and no fault explains it"
        elif end.status < 0:
            problem = "and the suite sent no signal"
        elif not WHY.search(end.said):
            problem = "and does not say why"
        else:
            continue
        told[end.name] += 1
        if told[end.name] <= SAID:
            yield f"{ended(end)}, {problem}"


def check_effects(fleet: Fleet, done: Sequence[Event]) -> Iterator[str]:
    """What a fault did is in a log."""
    happened = {(event.kind, event.target) for event in done}
    for kind, target, names, words in EFFECTS:
        logs = fleet.scenario.names if names == "devices" else fleet.scenario.coordinators
        if (kind, target) in happened or (target == "" and kind in {kind for kind, _ in happened}):
            text = "".join(
                (fleet.folder / f"{name}.log").read_text(errors="replace") for name in logs
            )
            if words not in text:
                yield f'the logs of the {names} do not say "{words}", after {kind} {target}'


def ended(end: End) -> str:
    return f"{end.name} ended by itself after {end.at:.1f} s with status {end.status} ({end.said})"


def check_resources(fleet: Fleet) -> Iterator[str]:
    """No process holds more files or memory than it needs."""
    scenario = fleet.scenario
    for name in [*scenario.names, *scenario.coordinators, *scenario.gateways_elsewhere]:
        process = fleet.parts[name].process
        if process is None or process.poll() is not None:
            continue
        with suppress(psutil.NoSuchProcess):
            for each in (psutil.Process(process.pid), *children(process.pid)):
                files, memory = each.num_fds(), each.memory_full_info().uss / 2**20
                if files > MOST_FILES:
                    yield f"{name} (process {each.pid}) has {files} open files"
                if memory > MOST_MIB:
                    yield f"{name} (process {each.pid}) has {memory:.0f} MiB"
