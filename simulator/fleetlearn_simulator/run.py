"""A whole run: from a scenario to a folder of logs, a model and a summary; and on from its checkpoint."""

from __future__ import annotations

import gc
import heapq
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import cycle
from math import fsum, inf
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
from fleetlearn_coordinator.engine import Phase
from fleetlearn_coordinator.run import settings_of
from fleetlearn_device.train import DivergedError, evaluate_data
from fleetlearn_protocol import Bundle, open_bundle
from fleetlearn_protocol.vector import Vector, digest, views
from threadpoolctl import threadpool_limits

from fleetlearn_simulator.data.factory import Kept, Source, make_source
from fleetlearn_simulator.errors import SimulatorError
from fleetlearn_simulator.fleet.fleet import Event, Fleet, name_of
from fleetlearn_simulator.interrupts import STOP
from fleetlearn_simulator.results.run_folder import (
    OPTIONS,
    ROUNDS,
    SCENARIO,
    SUMMARY,
    Record,
    read_checkpoint,
    read_json,
    read_rows,
    save_model,
    write_json,
    write_whole,
)
from fleetlearn_simulator.scenario.scenario import Scenario
from fleetlearn_simulator.training.backend import Backend, Job, PerDevice, Task, means, task_of
from fleetlearn_simulator.training.process_pool import Blocks, Parallel
from fleetlearn_simulator.training.vectorized import Vectorized, check_many, divide, loads_of, not_for_many

Kind = Literal["auto", "bundle", "vectorized"]
BACKENDS: dict[str, type[PerDevice]] = {"bundle": PerDevice, "vectorized": Vectorized}
KEPT = ("leave", "crash", "fill", "back")
"""Events that outlive a round."""
LOOKED_AT = 100
"""Devices, of whose sizes it is judged whether all are alike."""
SELDOM = 20_000
"""New objects after which Python looks for cycles among them."""
TRIAL = 0.3
"""Seconds that ``auto`` tries each back end for."""


class Options(NamedTuple):
    """How a run is carried out. Nothing here changes what comes of it but the back end, in the last bits."""

    backend: Kind = "auto"
    workers: int | None = None
    """Processes; None: one for each core, or where one call trains a whole round, this one alone."""
    events: bool = True
    """Whether the event log is written."""
    checkpoint: int = 10
    """Rounds from one checkpoint to the next, at least; more where writing them would take over a hundredth of
    the time."""
    test: int = 1
    """Rounds from one test on the data kept back to the next; 0: never."""
    engine: Literal["processes", "ray"] = "processes"
    """Where ``workers`` are: processes here, or on a Ray cluster; None is each of its CPUs then."""
    ray_address: str | None = None
    """As ``cluster.OnRay`` has it."""


LASTING = ("backend", "events", "test")
"""Of the options, those that a run keeps when it is resumed: its files depend on them."""
USUAL = Options()


class Outcome(NamedTuple):
    """What a run came to."""

    folder: Path
    summary: dict[str, Any]
    model: Vector
    """float32, shape (P,)."""

    def report(self, file: str | os.PathLike[str] | None = None) -> Path:
        """Write the run as a page with plots. Default: ``report.html`` in the run's folder."""
        from fleetlearn_simulator.results.run_report import write_report  # plotly takes its time

        return write_report(self.folder, None if file is None else Path(file))


def make_backend(scenario: Scenario, kind: Literal["bundle", "vectorized"]) -> Backend:
    """A back end with its own copy of the data; for one process, whose numeric libraries have one thread from now on:
    the last bits of a product follow from their number, which is not the same here and in a process beside others."""
    bundle = open_bundle(scenario.plan.bundle)
    task = task_of(scenario.plan, bundle)
    backend = BACKENDS[kind](bundle, task, source_of(scenario, bundle))
    threadpool_limits(1)  # of the libraries that are there: the user's module has brought its own
    return backend


def source_of(scenario: Scenario, bundle: Bundle) -> Any:
    made = make_source(scenario.data, scenario.data.seed, scenario.population.size, bundle.manifest, scenario.base)
    return Kept(made)


def simulate(
    scenario: Scenario,
    folder: str | os.PathLike[str] | None = None,
    options: Options = USUAL,
    *,
    resume: bool = False,
    progress: Callable[[Fleet], None] = lambda fleet: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Outcome | None:
    """Run ``scenario``, writing ``folder`` (default: NAME.sim, here). ``progress`` is called after each round. None:
    stopped by ``should_stop``. With ``resume`` it goes on from the folder's checkpoint, with those ``LASTING`` options
    that it was begun with; without a checkpoint it begins anew.

    Raises SimulatorError, PlanError, BundleError; nothing is written then but what was there.
    """
    folder = Path(folder or f"{scenario.name}.sim")
    bundle = open_bundle(scenario.plan.bundle)
    task = task_of(scenario.plan, bundle)
    check_supported(bundle)
    source = source_of(scenario, bundle)
    found = read_checkpoint(folder) if resume else None
    if resume and found is None and not (folder / SCENARIO).exists():
        raise SimulatorError(f"{folder} holds no run to go on with: run the scenario anew")
    of = [bundle.sha256, scenario.seed, scenario.population.size]
    if found and found[1]["of"] != of:
        raise SimulatorError(f"{folder} is of another bundle, seed or population: resume it with its own scenario")
    if resume and (folder / OPTIONS).exists():
        options = options._replace(**read_json(folder / OPTIONS))
    with ExitStack() as held:
        held.enter_context(seldom_collected())
        held.enter_context(threadpool_limits(1))  # what ``make_backend`` does ends with the run
        kind, why = (found[1]["backend"], found[1]["why"]) if found else choose(scenario, bundle, options.backend)
        scenario = with_measured_step(scenario, bundle)
        backend = _backend(scenario, bundle, source, kind, _blocks(bundle, task, source, kind), options)
        held.callback(backend.close)
        prepare(scenario, folder, options)
        record = Record(folder, events=options.events, at=found[1]["logs"] if found else None)
        held.callback(record.close)
        fleet = Fleet(scenario, bundle, source, backend, task, record.note)
        written, not_before = 0, 0.0

        def round_ended(summary: dict[str, Any]) -> None:
            version = fleet.engine.version + 1
            if summary["how"] == "committed" and options.test and version % options.test == 0 and test is not None:
                summary["test"] = tested(runtime, fleet.model, test)
            record.round(summary)
            progress(fleet)

        def before_commit() -> None:
            nonlocal written, not_before
            version, now = fleet.engine.version + 1, time.monotonic()
            if (version - written >= options.checkpoint and now >= not_before) or should_stop():
                record.checkpoint(*snapshot(fleet, {"backend": kind, "why": why, "of": of}))
                written, end = version, time.monotonic()
                not_before = end + 100 * (end - now)

        test = source.test()
        runtime = None if test is None else PerDevice(bundle, task, source).runtime
        fleet.round_ended, fleet.before_commit = round_ended, before_commit
        if found:
            fleet.history = read_rows(folder, ROUNDS)
            written = found[1]["version"]
            restore(fleet, *found)
        try:
            while fleet.advance():
                if should_stop() and written == fleet.engine.version:
                    return None
        finally:  # or they and the fleet would hold each other, and the data, until Python looks for cycles
            fleet.round_ended, fleet.before_commit = lambda summary: None, lambda: None
    save_model(folder, views(fleet.model, bundle.manifest.travelling).items())
    summary = summary_of(fleet) | {"backend": kind, "why": why}
    write_json(folder / SUMMARY, summary)
    return Outcome(folder, summary, fleet.model)


@contextmanager
def seldom_collected() -> Iterator[None]:
    """A round makes thousands of small objects that live until its end, and no cycles: Python need not look for these
    every 700."""
    before = gc.get_threshold()
    gc.set_threshold(max(SELDOM, before[0]) if before[0] else 0, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def prepare(scenario: Scenario, folder: Path, options: Options) -> None:
    """Make a run's folder; ``resume`` begins with what is written there."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / OPTIONS, {name: getattr(options, name) for name in LASTING})
    write_whole(folder / SCENARIO, scenario.to_toml().encode())


def summary_alone(scenario: Scenario, folder: Path, options: Options) -> dict[str, Any] | None:
    """What a run came to, whose folder is prepared or was stopped; in a process of its own that heeds interrupts. None:
    it was stopped, or not begun any more."""
    outcome = None if STOP.is_set() else simulate(scenario, folder, options, resume=True, should_stop=STOP.is_set)
    return None if outcome is None else outcome.summary


def with_measured_step(scenario: Scenario, bundle: Bundle) -> Scenario:
    """The scenario with the seconds of a step on this machine, where it asks for them to be measured."""
    if scenario.compute.step_seconds != "measure":
        return scenario
    backend = make_backend(scenario, "bundle")
    model = bundle.parameters()[: bundle.manifest.size]
    backend.train(model, [Job(0, 0, 1)])  # the first steps make room in memory
    seconds = float(f"{_timed(lambda: int(backend.train(model, [Job(0, 0, None)]).steps[0])):.3g}")
    return msgspec.structs.replace(scenario, compute=msgspec.structs.replace(scenario.compute, step_seconds=seconds))


def check_supported(bundle: Bundle) -> None:
    """Raise SimulatorError where devices would keep something from task to task."""
    manifest = bundle.manifest
    keeps = [row.name for row in manifest.parameters if row.personal] + [row.name for row in manifest.state if row.kept]
    keeps += ["the previous model"] if "previous" in manifest.references else []
    if keeps:
        raise SimulatorError(
            f"bundle {manifest.name}: devices keep {keeps[0]} from task to task, which is not simulated yet: export it "
            "without personal parameters, kept state and contrastive step"
        )


def choose(scenario: Scenario, bundle: Bundle, wanted: Kind) -> tuple[Literal["bundle", "vectorized"], str]:
    """The back end, and why. ``auto`` tries both for a moment on the first devices."""
    if wanted == "vectorized":
        check_many(bundle, scenario.plan.local.batch_size)
    if wanted != "auto":
        return wanted, "chosen"
    if why := not_for_many(bundle, scenario.plan.local.batch_size):
        return "bundle", why
    assert bundle.manifest.many is not None
    jobs = [Job(place % scenario.population.size, place, None) for place in range(bundle.manifest.many.devices)]
    costs: dict[Literal["bundle", "vectorized"], float] = {
        "bundle": _seconds(scenario, bundle, "bundle", [[job] for job in jobs]),
        "vectorized": _seconds(scenario, bundle, "vectorized", [jobs]),
    }
    best = min(costs, key=lambda kind: costs[kind])
    return best, ", ".join(f"{kind} {1e3 * cost:.3g} ms a device" for kind, cost in costs.items())


def _seconds(
    scenario: Scenario, bundle: Bundle, kind: Literal["bundle", "vectorized"], parts: list[list[Job]]
) -> float:
    """What a job takes, of ``parts`` one after the other."""
    backend, model, turns = make_backend(scenario, kind), bundle.parameters()[: bundle.manifest.size], cycle(parts)
    backend.train(model, parts[0])  # the first steps make room in memory
    taken = _timed(lambda: len(backend.train(model, next(turns))))
    backend.close()
    return taken


def _timed(train: Callable[[], int]) -> float:
    """Seconds for each of those that ``train`` says it has done, again and again for a moment."""
    begin, done, taken = time.perf_counter(), 0, 0.0
    while taken < TRIAL:
        done += train()
        taken = time.perf_counter() - begin
    return taken / done


def tested(runtime: Any, model: Vector, test: tuple[Any, ...]) -> dict[str, float]:
    """Means of the model over the data that were kept back; nothing where its loss is beyond any number."""
    runtime.load(model)
    try:
        return means([evaluate_data(runtime, test)])
    except DivergedError:
        return {}


def snapshot(fleet: Fleet, more: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fleet at the moment when a round's model is made: no task is out then."""
    tensors = {
        "model": fleet.model,
        "earlier": fleet.earlier,
        "has_bundle": np.array(sorted(fleet.has_bundle), np.int64),
    }
    tensors |= {f"optimizer.{name}": np.asarray(value) for name, value in fleet.state.items()}
    engine = fleet.engine
    state = {
        "now": fleet.now,
        "version": engine.version + 1,
        "round": engine.round,
        "change": fleet.history[-1]["change"],
        "metrics": fleet.history[-1]["metrics"],
        "connected": [[device, None if end == inf else end] for device, end in fleet.connected.items()],
        "away": list(fleet.away.items()),
        "heap": sorted(event[:4] for event in fleet.heap if event.kind in KEPT),
        "serial": fleet.serial,
        "filling": fleet.filling,
        "arrivals": fleet.arrivals,
    }
    return tensors, state | more


def restore(fleet: Fleet, tensors: dict[str, Any], state: dict[str, Any]) -> None:
    """Go on from ``snapshot``."""
    fleet.model, fleet.earlier = tensors["model"], tensors["earlier"]
    fleet.has_bundle = set(tensors["has_bundle"].tolist())
    prefix = "optimizer."
    fleet.state = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
    fleet.now = fleet.last = state["now"]
    fleet.connected = {device: inf if end is None else end for device, end in state["connected"]}
    fleet.away = dict(map(tuple, state["away"]))
    fleet.heap = [Event(*row[:4]) for row in state["heap"]]
    heapq.heapify(fleet.heap)
    fleet.serial, fleet.arrivals, fleet.filling = state["serial"], state["arrivals"], state["filling"]
    engine = fleet.engine
    engine.version, engine.round, engine.phase = state["version"] - 1, state["round"], Phase.COMMITTING
    engine.resting = {name_of(device) for device in fleet.connected if device not in fleet.away}
    fleet.carry_out(engine.committed(fleet.now, change=state["change"], metrics=state["metrics"]))


def summary_of(fleet: Fleet) -> dict[str, Any]:
    """The run in a few numbers."""
    rows = fleet.history
    causes: Counter[str] = Counter()
    for row in rows:
        causes.update(row["causes"])
    seconds = {key: fsum(row["device_seconds"][key] for row in rows) for key in ("useful", "wasted")}
    committed = [row for row in rows if row["how"] == "committed"]
    return {
        "reason": fleet.finished,
        "rounds": len(committed),
        "abandoned": len(rows) - len(committed),
        "time": fleet.now,
        "reports": sum(row["reports"] for row in committed),
        "lost": dict(sorted(causes.items())),
        "device_seconds": seconds,
        "bytes": {key: sum(row["bytes"][key] for row in rows) for key in ("down", "up")},
        "metrics": committed[-1]["metrics"] if committed else {},
        "test": next((row["test"] for row in reversed(committed) if "test" in row), {}),
        "devices": len(fleet.has_bundle),
        "model": digest(fleet.model),
    }


def _backend(
    scenario: Scenario,
    bundle: Bundle,
    source: Source,
    kind: Literal["bundle", "vectorized"],
    blocks: Blocks,
    options: Options,
) -> Backend:
    """Back ends of ``kind``, where the options have them."""
    make = partial(make_backend, scenario, kind)
    if options.engine == "ray":
        from fleetlearn_simulator.training.ray_pool import OnRay

        model = bundle.parameters()[: bundle.manifest.size]
        return OnRay(make, blocks, model, options.workers, options.ray_address)
    # A round of one block is one process's: passing it on would only cost.
    alone = kind == "vectorized" and not options.workers and _in_one_block(scenario, bundle, source)
    workers = options.workers or (1 if alone else os.cpu_count()) or 1
    return make() if workers == 1 else Parallel(make, workers, blocks)


def _in_one_block(scenario: Scenario, bundle: Bundle, source: Source) -> bool:
    """Whether a call trains a whole round, as far as the first devices tell: those of other sizes are other blocks."""
    many = bundle.manifest.many
    if many is None or settings_of(scenario.plan).cohort > many.devices:
        return False
    return len({*source.examples(np.arange(min(scenario.population.size, LOOKED_AT))).tolist()}) == 1


def _blocks(bundle: Bundle, task: Task, source: Source, kind: str) -> Blocks:
    """How jobs are divided among processes."""
    many = bundle.manifest.many
    # Few, so that all processes have something to do until the end; and of large updates one, to be added up meanwhile.
    few = max(1, min(8, 2**20 // bundle.manifest.size))

    def blocks(jobs: Sequence[Job]) -> list[list[int]]:
        if kind == "vectorized" and many is not None:
            return list(divide(loads_of(task, source, jobs), many.devices))
        return [list(range(start, min(start + few, len(jobs)))) for start in range(0, len(jobs), few)]

    return blocks
