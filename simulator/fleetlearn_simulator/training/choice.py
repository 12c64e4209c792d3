"""Which back end trains a scenario, in how many processes, and how its jobs are divided among
them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from fleetlearn_device.runtimes.import_onnxruntime import RuntimeUnavailableError
from fleetlearn_device.runtimes.providers import ProviderName, open_provider
from threadpoolctl import threadpool_limits

from fleetlearn_simulator.errors import SimulatorError
from fleetlearn_simulator.scenario.own_algorithms import allow_plugins
from fleetlearn_simulator.scenario.scenario import Scenario
from fleetlearn_simulator.training.backend import Backend, Job, PerDevice, RoundInputs
from fleetlearn_simulator.training.computing import ComputesSums
from fleetlearn_simulator.training.family_backend import FamilyBackend
from fleetlearn_simulator.training.fit_for_many import check_many, not_for_many
from fleetlearn_simulator.training.kept_rows import (
    NOTHING_KEPT,
    KeptRows,
    RowFile,
    RowReader,
    row_files,
)
from fleetlearn_simulator.training.process_pool import ProcessPool
from fleetlearn_simulator.training.run_bundles import RunBundle, numbers_of, run_bundles
from fleetlearn_simulator.training.vectorized import (
    Vectorized,
    divide_into_blocks,
    workloads_of,
)
from fleetlearn_simulator.training.worker_pool import DivideJobs

BackendName = Literal["bundle", "vectorized", "computation"]
BackendChoice = Literal["auto", "bundle", "vectorized"]
EngineChoice = Literal["processes", "ray"]
Kinds = Mapping[str, BackendName]
"""Name of each member -> its back end. A run with one bundle has the name ""."""
BACKENDS: dict[str, type[PerDevice] | type[ComputesSums]] = {
    "bundle": PerDevice,
    "vectorized": Vectorized,
    "computation": ComputesSums,
}
TRIAL_SECONDS = 0.3
"""Seconds for which ``auto`` tries each back end."""


def to_json(kinds: Kinds) -> str | dict[str, str]:
    """Return what a run's files say of its back ends: one name, or one for each member."""
    return kinds.get("", {**kinds})


def from_json(saved: Any) -> Kinds:
    """Undo ``to_json``."""
    return saved if isinstance(saved, dict) else {"": saved}


def check_provider(provider: ProviderName, engine: EngineChoice) -> None:
    """Raise SimulatorError if devices cannot be trained there."""
    if provider != "cpu" and engine == "ray":
        raise SimulatorError(
            f"provider {provider!r}: workers on Ray train on the CPU; use engine 'processes'"
        )
    try:
        open_provider(provider)
    except (ValueError, RuntimeUnavailableError, MemoryError) as error:
        raise SimulatorError(str(error)) from error


def make_backend(
    scenario: Scenario,
    kind: BackendName,
    provider: ProviderName = "cpu",
    folder: Path | None = None,
) -> Backend:
    """Make a back end with its own copy of the data, for this process alone. ``folder``: the run's,
    where the jobs' rows are, if they have any. Sets the number of threads of the numeric libraries
    to 1: the last bits of a product depend on that number, which would not be the same in each
    process."""
    return make_backends(scenario, {"": kind}, provider, folder)


def make_backends(
    scenario: Scenario,
    kinds: Kinds,
    provider: ProviderName = "cpu",
    folder: Path | None = None,
) -> Backend:
    """Do the same for each of the run's bundles."""
    if scenario.plan.local.function is not None:
        allow_plugins(scenario)  # in a process of its own nothing is allowed yet
    bundles = run_bundles(scenario)
    kept = kept_in(folder, bundles)
    made = [
        BACKENDS[kinds[each.member]](each.bundle, each.local, each.source, provider, kept)
        for each in bundles
    ]
    threadpool_limits(1)  # now that all libraries are loaded, the user's module's too
    numbers = numbers_of(scenario)
    return made[0] if numbers is None else FamilyBackend(made, numbers)


def kept_in(
    folder: Path | None, bundles: Sequence[RunBundle]
) -> KeptRows[RowReader] | KeptRows[RowFile]:
    """Return where the rows of jobs are in a run's folder."""
    if folder is None:
        return NOTHING_KEPT
    manifests = [each.bundle.manifest for each in bundles]
    return row_files(folder, manifests, bundles[0].local.algorithm)


def with_measured_step(scenario: Scenario, bundles: Sequence[RunBundle]) -> Scenario:
    """Return the scenario with the measured seconds of a step on this machine's CPU, if it asks for
    that: of each member in a family."""
    if scenario.compute.step_seconds != "measure":
        return scenario
    found = {each.member: _measured_step(each) for each in bundles}
    seconds = found if scenario.plan.family else found[""]
    return msgspec.structs.replace(
        scenario, compute=msgspec.structs.replace(scenario.compute, step_seconds=seconds)
    )


def _measured_step(run: RunBundle) -> float:
    computes = run.scenario.plan.algorithm.computes
    backend = make_backend(run.scenario, "computation" if computes else "bundle")
    inputs = RoundInputs(run.bundle.parameters()[: run.bundle.manifest.size])
    (device,) = first_with_examples(run, 1)
    backend.train(inputs, [Job(device, 0, 1)])  # the first steps allocate memory
    return float(f"{_timed(lambda: int(backend.train(inputs, [Job(device)]).steps[0])):.3g}")


def first_with_examples(run: RunBundle, count: int) -> list[int]:
    """Return the first ``count`` of the bundle's devices that have examples, or fewer if there are
    no more among those that are looked at. Raises SimulatorError if there are none."""
    devices = list[int]()
    for device in run.devices:
        if run.source.examples(np.array([device]))[0]:
            devices.append(device)
            if len(devices) == count:
                break
    if not devices:
        raise SimulatorError(
            f"none of the first {len(run.devices)} devices has examples: there is nothing to "
            "measure training with. Give compute.step_seconds a number, and choose a back end"
        )
    return devices


def choose_backends(
    bundles: Sequence[RunBundle], wanted: BackendChoice, provider: ProviderName = "cpu"
) -> tuple[Kinds, str]:
    """Return the back end of each of the run's bundles, and why."""
    found = {each.member: choose_backend(each, wanted, provider) for each in bundles}
    why = [f"{name}: {why}" if name else why for name, (_, why) in found.items()]
    return {name: kind for name, (kind, _) in found.items()}, "; ".join(dict.fromkeys(why))


def choose_backend(
    run: RunBundle, wanted: BackendChoice, provider: ProviderName = "cpu"
) -> tuple[BackendName, str]:
    """Return the back end, and why. ``auto`` tries both for a moment, on the first devices."""
    local, bundle = run.scenario.plan.local, run.bundle
    by_step = local.step_schedule is not None
    if run.scenario.plan.algorithm.computes:
        if wanted != "auto":
            raise SimulatorError(
                f'back end "{wanted}": the bundle has a computation in place of graphs; leave the '
                "back end to be chosen"
            )
        return "computation", "the bundle has a computation"
    if wanted == "vectorized":
        check_many(bundle, local.batch_size, local.algorithm, by_step=by_step)
    if wanted != "auto":
        return wanted, "chosen"
    if why := not_for_many(bundle, local.batch_size, local.algorithm, by_step=by_step):
        return "bundle", why
    assert bundle.manifest.many is not None
    count = bundle.manifest.many.devices
    devices = first_with_examples(run, count)
    jobs = [Job(devices[number % len(devices)], number) for number in range(count)]
    costs: dict[BackendName, float] = {
        "bundle": _seconds(run, "bundle", provider, [[job] for job in jobs]),
        "vectorized": _seconds(run, "vectorized", provider, [jobs]),
    }
    best = min(costs, key=lambda kind: costs[kind])
    return best, ", ".join(f"{kind} {1e3 * cost:.3g} ms a device" for kind, cost in costs.items())


def _seconds(
    run: RunBundle, kind: BackendName, provider: ProviderName, parts: list[list[Job]]
) -> float:
    """Return the seconds that a job takes. ``parts`` are trained one after the other, again and
    again."""
    backend, turns = make_backend(run.scenario, kind, provider), cycle(parts)
    inputs = RoundInputs(run.bundle.parameters()[: run.bundle.manifest.size])
    backend.train(inputs, parts[0])  # the first steps allocate memory
    taken = _timed(lambda: len(backend.train(inputs, next(turns))))
    backend.close()
    return taken


def _timed(train: Callable[[], int]) -> float:
    """Call ``train`` again and again for a moment. Returns the seconds for each of the jobs or
    steps that it counts."""
    begin, done, taken = time.perf_counter(), 0, 0.0
    while taken < TRIAL_SECONDS:
        done += train()
        taken = time.perf_counter() - begin
    return taken / done


def start_backend(
    scenario: Scenario,
    bundles: Sequence[RunBundle],
    kinds: Kinds,
    workers: int | None,
    engine: EngineChoice,
    ray_address: str | None,
    provider: ProviderName = "cpu",
    folder: Path | None = None,
) -> Backend:
    """Start the back end, with its workers. ``kinds``: of each bundle, as ``choose_backends``
    returned them. ``folder``: the run's. The other arguments are those of
    ``fleetlearn_simulator.Options``."""
    if "computation" in kinds.values():
        if engine == "ray":
            raise SimulatorError("engine 'ray': sums are computed in this process")
        return make_backends(scenario, kinds, provider, folder)
    divide = _divider(scenario, bundles, kinds)
    if engine == "ray":
        return _on_ray(scenario, bundles, kinds, divide, workers, ray_address, provider, folder)
    # If a round is one block, one process trains it: to hand it to another would only cost time.
    # Processes share a GPU by turns, and each takes some of its memory for CUDA itself.
    alone = provider != "cpu" or (
        kinds.get("") == "vectorized" and not workers and _in_one_block(bundles[0])
    )
    count = workers or (1 if alone else os.cpu_count()) or 1
    make = partial(make_backends, scenario, kinds, provider, folder)
    return make() if count == 1 else ProcessPool(make, count, divide)


def _on_ray(
    scenario: Scenario,
    bundles: Sequence[RunBundle],
    kinds: Kinds,
    divide: DivideJobs,
    workers: int | None,
    address: str | None,
    provider: ProviderName,
    folder: Path | None,
) -> Backend:
    from fleetlearn_simulator.training.ray_pool import RayPool

    if scenario.plan.family:
        raise SimulatorError(
            "engine 'ray' with [family]: workers on Ray train one bundle. Use engine 'processes'"
        )
    make = partial(make_backends, scenario, kinds, provider)  # its workers do not see the folder
    bundle = bundles[0].bundle
    model = bundle.parameters()[: bundle.manifest.size]
    return RayPool(make, divide, model, workers, address, kept_in(folder, bundles))


def _in_one_block(run: RunBundle) -> bool:
    """Return whether one call trains a whole round, judged by the first devices. Devices with other
    numbers of examples would be in other blocks."""
    many = run.bundle.manifest.many
    if many is None or run.scenario.plan.round.cohort > many.devices:
        return False
    return len({*run.source.examples(np.array(run.devices)).tolist()}) == 1


def _divider(scenario: Scenario, bundles: Sequence[RunBundle], kinds: Kinds) -> DivideJobs:
    """Return the function that divides jobs, which are of one bundle, into blocks."""
    dividers = [_divider_of(each, kinds[each.member]) for each in bundles]
    numbers = numbers_of(scenario)
    if numbers is None:
        return dividers[0]

    def divide(jobs: Sequence[Job]) -> list[list[int]]:
        (number,) = numbers([jobs[0].device])
        return dividers[number](jobs)

    return divide


def _divider_of(run: RunBundle, kind: BackendName) -> DivideJobs:
    manifest = run.bundle.manifest
    many, local, source = manifest.many, run.local, run.source
    # Small blocks keep all processes busy until the end. Large updates come one by one, and are
    # added up meanwhile.
    few = max(1, min(8, 2**20 // manifest.size))

    def divide(jobs: Sequence[Job]) -> list[list[int]]:
        if kind == "vectorized" and many is not None:
            return list(divide_into_blocks(workloads_of(local, source, jobs), many.devices))
        return [
            list(range(start, min(start + few, len(jobs)))) for start in range(0, len(jobs), few)
        ]

    return divide
