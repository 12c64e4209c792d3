"""A whole run: from a scenario to a folder with logs, a model and a summary; or from a checkpoint
to the end."""

from __future__ import annotations

import gc
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import repeat
from math import fsum
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from fleetlearn_coordinator.aggregation.round_summary import MEMBERS
from fleetlearn_coordinator.service.observers import ExchangeSummarised, RoundEnded, RunEvent
from fleetlearn_coordinator.service.training_run.members import identity_of, open_bundles
from fleetlearn_device.runtimes.providers import ProviderName
from fleetlearn_protocol.manifest import Manifest
from fleetlearn_protocol.vector import Vector, digest, views
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from fleetlearn_simulator.data.made_of import VALUES, by_code, changed, made_of, values_of
from fleetlearn_simulator.data.sources import Source
from fleetlearn_simulator.errors import SimulatorError
from fleetlearn_simulator.fleet.checkpoint import restore, state_of
from fleetlearn_simulator.fleet.fleet import Fleet
from fleetlearn_simulator.fleet.spoilt_updates import LITTLE
from fleetlearn_simulator.interrupts import STOP_REQUESTED
from fleetlearn_simulator.population.availability import availability_law
from fleetlearn_simulator.population.failure_laws import own_law
from fleetlearn_simulator.population.members import count_members
from fleetlearn_simulator.results.family_runs import OWN
from fleetlearn_simulator.results.model_tests import MemberTest, add_tests, tested_member
from fleetlearn_simulator.results.run_folder import (
    CHECKPOINT,
    MADE_OF,
    OPTIONS,
    ROUNDS,
    SCENARIO,
    SUMMARY,
    RunLogs,
    exchanges_file,
    read_checkpoint,
    read_json,
    read_rows,
    save_model,
    write_json,
    write_whole,
)
from fleetlearn_simulator.results.secure_runs import secure_words
from fleetlearn_simulator.scenario.own_algorithms import (
    allow_plugins,
    find_local_algorithm,
    own_algorithms,
)
from fleetlearn_simulator.scenario.scenario import Scenario
from fleetlearn_simulator.training.choice import (
    BackendChoice,
    EngineChoice,
    check_provider,
    choose_backends,
    from_json,
    start_backend,
    to_json,
    with_measured_step,
)
from fleetlearn_simulator.training.kept_rows import residual_file, row_files
from fleetlearn_simulator.training.run_bundles import (
    bundles_by_member,
    run_bundles,
    source_of_run,
)

STEP_SECONDS = "compute.step_seconds"
GC_THRESHOLD = 20_000
"""New objects after which Python looks for reference cycles."""


class Options(NamedTuple):
    """How a run is carried out. Only the back end and the provider change results, in their last
    bits."""

    backend: BackendChoice = "auto"
    workers: int | None = None
    """Processes that train. Default: one for each core; or none but this one, if one call trains a
    whole round, or on a GPU."""
    events: bool = True
    """Whether the event log is written."""
    checkpoint: int = 10
    """Least number of rounds between checkpoints. They are rarer if writing them would take more
    than a hundredth of the time."""
    test: int = 1
    """Rounds between tests on the test data. 0: never."""
    engine: EngineChoice = "processes"
    """Where the workers are: processes of this machine, or a Ray cluster. With Ray the default for
    ``workers`` is one for each of its CPUs."""
    ray_address: str | None = None
    """See ``RayPool``."""
    provider: ProviderName = "cpu"
    """Where ONNX Runtime trains and tests: on the CPU or on a GPU (``cuda``). Not on Ray."""


OPTIONS_KEPT_ON_RESUME = ("backend", "events", "test", "provider")
"""Options that a resumed run takes from its folder: its files depend on them."""
DEFAULT_OPTIONS = Options()


class Outcome(NamedTuple):
    """What a finished run gave."""

    folder: Path
    summary: dict[str, Any]
    model: Vector
    """float32, shape (P,)."""

    def report(self, file: str | os.PathLike[str] | None = None) -> Path:
        """Write a page with plots of the run. Default: ``report.html`` in the run's folder."""
        # to import plotly takes long
        from fleetlearn_simulator.results.run_report import write_report

        return write_report(self.folder, None if file is None else Path(file))


def simulate(
    scenario: Scenario,
    folder: str | os.PathLike[str] | None = None,
    options: Options = DEFAULT_OPTIONS,
    *,
    resume: bool = False,
    progress: Callable[[Fleet], None] = lambda fleet: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Outcome | None:
    """Run a scenario.

    Args:
        scenario: What is simulated.
        folder: Where the run is written. Default: NAME.sim in the working directory.
        options: How the run is carried out.
        resume: Go on from the folder's checkpoint, with the options in ``OPTIONS_KEPT_ON_RESUME``
            that the run began with. Without a checkpoint the run begins again. The scenario, its
            bundle, its data and its files must be those that the run began with; only stop rules
            may change.
        progress: Called after each round.
        should_stop: Asked after each round. If it returns True, a checkpoint is written and the run
            stops.

    Where updates may be stale and devices have the corruption "little", there are no checkpoints: a
    run that was stopped begins again.

    Returns None if ``should_stop`` stopped the run. Raises SimulatorError, PlanError and
    BundleError; the folder is unchanged then.
    """
    folder = Path(folder or f"{scenario.name}.sim")
    check_own_algorithms(scenario)
    bundles = run_bundles(scenario)
    source = source_of_run(scenario, bundles)
    checkpoint = read_checkpoint(folder) if resume else None
    if resume and checkpoint is None and not (folder / SCENARIO).exists():
        raise SimulatorError(f"{folder} holds no run to resume: run the scenario again")
    if resume and (folder / OPTIONS).exists():
        options = options._replace(**read_json(folder / OPTIONS))
    check_provider(options.provider, options.engine)
    with ExitStack() as held:
        held.enter_context(rare_garbage_collection())
        # undoes what ``make_backend`` does when the run ends
        held.enter_context(threadpool_limits(1))
        before = read_json(folder / MADE_OF) if resume and (folder / MADE_OF).exists() else {}
        scenario = with_recorded_step(scenario, before)
        content = made_of(scenario, bundles_by_member(bundles), source)
        identity = [
            identity_of(bundles_by_member(bundles)),
            scenario.seed,
            scenario.population.size,
        ]
        _refuse_changes(folder, before, content, identity, checkpoint)
        if checkpoint:
            kinds, why = from_json(checkpoint[1]["backend"]), checkpoint[1]["why"]
        else:
            kinds, why = choose_backends(bundles, options.backend, options.provider)
        scenario = with_measured_step(scenario, bundles)
        manifests = [each.bundle.manifest for each in bundles]
        local = bundles[0].local
        files = row_files(folder, manifests, local.algorithm)
        residuals = residual_file(folder, manifests[0], scenario.plan.encoding)
        backend = start_backend(
            scenario,
            bundles,
            kinds,
            options.workers,
            options.engine,
            options.ray_address,
            options.provider,
            folder,
        )
        held.callback(backend.close)
        if not checkpoint:  # a checkpoint of an earlier run must not meet what this one is made of
            (folder / CHECKPOINT).unlink(missing_ok=True)
        content[VALUES].update(values_of(STEP_SECONDS, scenario.compute.step_seconds))
        prepare(scenario, folder, options, content)
        logs = RunLogs(
            folder, events=options.events, at=checkpoint[1]["logs"] if checkpoint else None
        )
        held.callback(logs.close)
        opened = [each.bundle for each in bundles]
        fleet = Fleet(scenario, opened, source, backend, local, logs.write_events, files, residuals)
        about = {"backend": to_json(kinds), "why": why}
        checkpoints = CheckpointWriter(
            fleet, logs, about | {"of": identity}, options.checkpoint, should_stop
        )
        tests = [tested_member(each, options.provider) for each in bundles]
        summaries = SummaryWriter(fleet, logs, options.test, [*filter(None, tests)], progress)
        fleet.observers.append(summaries)
        fleet.before_commit = checkpoints.before_commit
        if checkpoint:
            _read_history(fleet, folder)
            checkpoints.version = checkpoint[1]["version"]
            restore(fleet, *checkpoint)
        try:
            while fleet.advance():
                saved = checkpoints.version == fleet.engine.version or not has_checkpoints(fleet)
                if should_stop() and saved:
                    return None
        finally:
            # else the writers and the fleet hold each other, and the data, until Python looks for
            # cycles
            fleet.observers.clear()
            fleet.before_commit = lambda: None
    save_model(folder, _tensors(fleet, manifests))
    summary = summary_of(fleet) | {"backend": to_json(kinds), "why": why}
    write_json(folder / SUMMARY, summary)
    return Outcome(folder, summary, fleet.model)


def check_own_algorithms(scenario: Scenario) -> None:
    """Make what the scenario names of other packages. Raises SimulatorError."""
    allow_plugins(scenario)
    availability_law(scenario)
    own_law(scenario)
    find_local_algorithm(scenario)
    scenario.plan.check_own_rules(scenario.service)


def _read_history(fleet: Fleet, folder: Path) -> None:
    """Let a fleet that goes on have the summaries that the folder's logs hold."""
    fleet.history.extend(read_rows(folder, ROUNDS))
    for kind, summaries in fleet.exchanges.summaries.items():
        if (folder / exchanges_file(kind)).exists():
            summaries.extend(read_rows(folder, exchanges_file(kind)))


def _refuse_changes(
    folder: Path,
    before: dict[str, Any],
    content: dict[str, Any],
    identity: list[Any],
    checkpoint: tuple[Mapping[str, Any], dict[str, Any]] | None,
) -> None:
    """Raise SimulatorError where a resumed run would be of something else than it began with.

    before, content: what the run was made of, empty where it did not say so, and what it is made of
    now."""
    if before and (changes := changed(before, content)):
        raise SimulatorError(
            f"{folder}: since this run, or its sweep, was begun, this has changed: "
            f"{'; '.join(changes)}. Its results would be of both. Put back what there was, or "
            "begin again in another folder"
        )
    # A checkpoint of an earlier version, which wrote no ``MADE_OF``.
    if checkpoint and checkpoint[1]["of"] != identity:
        raise SimulatorError(
            f"{folder} is of another bundle, seed or population: resume it with its own scenario"
        )


class SummaryWriter:
    """Writes the summaries of rounds and exchanges, and tests the model after some rounds: an
    observer."""

    def __init__(
        self,
        fleet: Fleet,
        logs: RunLogs,
        every: int,
        tests: Sequence[MemberTest],
        progress: Callable[[Fleet], None],
    ) -> None:
        """``every``: versions between two tests; 0: none is tested. ``tests``: of the models that
        have test data."""
        self.fleet, self.logs, self.every = fleet, logs, every
        self.tests, self.progress = tests, progress

    def __call__(self, events: Sequence[RunEvent]) -> None:
        for event in events:
            match event:
                case RoundEnded(number, outcome, version):
                    self._end_round(number, outcome == "committed", version)
                case ExchangeSummarised(kind=kind, summary=summary):
                    self.logs.write_exchange(kind, summary)

    def _end_round(self, number: int, committed: bool, version: int) -> None:
        summary = next(row for row in reversed(self.fleet.history) if row["round"] == number)
        due = committed and self.every and version % self.every == 0
        if due and self.tests:
            add_tests(
                summary, self.tests, self.fleet.coordinator.family.models_of(self.fleet.model)
            )
        self.logs.write_round(summary)
        self.progress(self.fleet)


class CheckpointWriter:
    """Writes checkpoints: after some versions, and when the run is to stop."""

    def __init__(
        self,
        fleet: Fleet,
        logs: RunLogs,
        about: dict[str, Any],
        every: int,
        should_stop: Callable[[], bool],
    ) -> None:
        """``about``: what is written into each beside the fleet's state. ``every``: versions
        between two."""
        self.fleet, self.logs, self.about, self.every, self.should_stop = (
            fleet,
            logs,
            about,
            every,
            should_stop,
        )
        self.version = 0
        """The version of the newest checkpoint."""
        self._not_before = 0.0

    def before_commit(self) -> None:
        if not has_checkpoints(self.fleet):
            return
        version, now = self.fleet.engine.version + 1, time.monotonic()
        due = version - self.version >= self.every and now >= self._not_before
        if due or self.should_stop():
            tensors, state = state_of(self.fleet)
            self.logs.write_checkpoint(tensors, state | self.about)
            self.version, end = version, time.monotonic()
            # At most a hundredth of the time goes into checkpoints.
            self._not_before = end + 100 * (end - now)


def has_checkpoints(fleet: Fleet) -> bool:
    """Return whether a checkpoint holds all of the run's state. It does not hold which devices
    conspired, of whom some have a task and others do not any more."""
    kinds = {row.kind for row in fleet.scenario.failures.corrupt}
    return not fleet.engine.settings.outlive or LITTLE not in kinds


@contextmanager
def rare_garbage_collection() -> Iterator[None]:
    """Let Python look for reference cycles less often than every 700 new objects. A round makes
    thousands of small objects that live until its end, and no cycles."""
    before = gc.get_threshold()
    gc.set_threshold(max(GC_THRESHOLD, before[0]) if before[0] else 0, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def with_recorded_step(scenario: Scenario, before: Mapping[str, Any]) -> Scenario:
    """Return the scenario with the seconds of a step that were measured when the run began, if it
    asks for a measurement. ``before``: what the run was made of then."""
    values = before.get(VALUES, {})
    seconds = values.get(STEP_SECONDS)
    if scenario.compute.step_seconds != "measure" or seconds is None:
        return scenario
    if isinstance(seconds, list):  # the names of a family's members
        seconds = {name: values[f"{STEP_SECONDS}.{name}"] for name in seconds}
    return msgspec.structs.replace(
        scenario, compute=msgspec.structs.replace(scenario.compute, step_seconds=seconds)
    )


def prepare(scenario: Scenario, folder: Path, options: Options, content: Mapping[str, Any]) -> None:
    """Make a run's folder, with what ``resume`` needs to begin. ``content``: what ``made_of``
    returns."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / MADE_OF, dict(content))
    write_json(folder / OPTIONS, {name: getattr(options, name) for name in OPTIONS_KEPT_ON_RESUME})
    write_whole(folder / SCENARIO, scenario.to_toml().encode())


def prepare_sweep(runs: Sequence[Scenario], folder: Path, options: Options) -> None:
    """Make the folders of a sweep's runs, each with its run's name. A file that is changed before
    the last run began stops the sweep. Raises SimulatorError and BundleError; nothing is written
    then."""
    sources: dict[bytes, Source] = {}
    contents = []
    with threadpool_limits(1):  # as in ``simulate``: the last bits of products depend on it
        for run in runs:
            check_own_algorithms(run)
            opened = open_bundles(run.plan)
            bundles = opened if run.plan.family else {"": next(iter(opened.values()))}
            # Of which devices a member is decides whose arrays its function makes.
            by = (run.tiers, run.seed, run.failures.regions) if run.plan.family else ()
            made_by = [run.data, run.population.size, run.failures.corrupt, identity_of(bundles)]
            key = msgspec.json.encode([made_by, by], enc_hook=str)
            if key not in sources and by_code(run.data):
                sources[key] = source_of_run(run, run_bundles(run))
            contents.append(made_of(run, bundles, sources.get(key)))
    for run, content in zip(runs, contents, strict=True):
        prepare(run, folder / run.name, options, content)


def summary_alone(scenario: Scenario, folder: Path, options: Options) -> dict[str, Any] | None:
    """Run or resume a prepared folder, in a separate process that heeds Ctrl-C. Returns the
    summary; None if the run was stopped, or did not begin."""
    stop = STOP_REQUESTED.is_set
    outcome = None if stop() else simulate(scenario, folder, options, resume=True, should_stop=stop)
    return None if outcome is None else outcome.summary


def summary_of(fleet: Fleet) -> dict[str, Any]:
    """Return the run in a few numbers."""
    rows = fleet.history
    causes: Counter[str] = Counter()
    for row in rows:
        causes.update(row["causes"])
    seconds = {
        key: fsum(row["device_seconds"][key] for row in rows) for key in ("useful", "wasted")
    }
    committed = [row for row in rows if row["how"] == "committed"]
    return {
        "reason": fleet.finished,
        "rounds": len(committed),
        "abandoned": len(rows) - len(committed),
        "time": fleet.now,
        "reports": sum(round_["reports"] for round_ in committed),
        "lost": dict(sorted(causes.items())),
        "device_seconds": seconds,
        "bytes": {key: sum(row["bytes"][key] for row in rows) for key in ("down", "up")},
        "metrics": committed[-1]["metrics"] if committed else {},
        **({"evaluation": fleet.evaluations[-1]["metrics"]} if fleet.evaluations else {}),
        "test": next((row["test"] for row in reversed(committed) if "test" in row), {}),
        **({"privacy": committed[-1]["privacy"]} if committed and _is_private(fleet) else {}),
        **_secure_part(fleet),
        "devices": len(fleet.tasks.has_bundle),
        **(
            {"without_examples": len(without)}
            if (without := fleet.connections.without_examples)
            else {}
        ),
        "model": digest(fleet.model),
        **_own_part(fleet),
        **_members_part(fleet),
        **_held_out_part(fleet),
        **_result_part(fleet),
    }


def _result_part(fleet: Fleet) -> dict[str, Any]:
    """Return what a run without a model found."""
    computation = fleet.coordinator.rules.computation
    return {} if computation is None else {"result": computation.result(fleet.model)}


def _own_part(fleet: Fleet) -> dict[str, Any]:
    """Return what the run used of other packages: key of the scenario -> name, version and
    source."""
    computation = fleet.coordinator.rules.computation
    settings = () if computation is None else (computation.settings,)
    found = {each.where: str(each.origin) for each in own_algorithms(fleet.scenario, settings)}
    return {OWN: found} if found else {}


def _members_part(fleet: Fleet) -> dict[str, Any]:
    """Return what the summary says of each member of a plan's family: the population's devices that
    train it, its reports in all rounds, and what was measured last."""
    if not fleet.scenario.plan.family:
        return {}
    devices, without = count_members(fleet.scenario)
    rows = [row[MEMBERS] for row in fleet.history if row["how"] == "committed"]
    found = {
        name: {
            "devices": count,
            "reports": sum(row[name]["reports"] for row in rows),
            "metrics": next(
                (row[name]["metrics"] for row in reversed(rows) if row[name]["reports"]), {}
            ),
            "test": next((row[name]["test"] for row in reversed(rows) if "test" in row[name]), {}),
        }
        for name, count in devices.items()
    }
    return {MEMBERS: found, "without_member": without}


def _held_out_part(fleet: Fleet) -> dict[str, Any]:
    """Return on which data the worth of updates was measured, if it was."""
    held_out = fleet.coordinator.contributions.held_out
    return {} if held_out is None else {"held_out": held_out.data}


def _secure_part(fleet: Fleet) -> dict[str, Any]:
    """Return what the summary says of a run with secure aggregation, in words."""
    scenario = fleet.scenario
    if scenario.plan.secure is None:
        return {}
    plan = scenario.plan
    told = ({"secure": plan.secure, "local": plan.local}, scenario.coordinator)
    return {"secure": secure_words(*msgspec.to_builtins(told, enc_hook=str))}


def _is_private(fleet: Fleet) -> bool:
    return fleet.coordinator.account is not None


def _tensors(fleet: Fleet, manifests: Sequence[Manifest]) -> list[tuple[str, NDArray[Any]]]:
    """Return the tensors of the run's models by name; of several NAME/TENSOR. ``manifests``: of the
    run's bundles."""
    found = []
    models = fleet.coordinator.family.models_of(fleet.model)
    each = manifests if len(manifests) > 1 else repeat(manifests[0])
    for (member, model), manifest in zip(models.items(), each, strict=False):
        prefix = f"{member}/" if member else ""
        tensors = views(model, manifest.travelling).items()
        found += [(f"{prefix}{name}", tensor) for name, tensor in tensors]
    return found
