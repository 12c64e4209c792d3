"""Which back end trains a scenario, in how many processes, and how its jobs are divided among
them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
from fleetlearn_device.runtimes.import_onnxruntime import RuntimeUnavailableError
from fleetlearn_device.runtimes.providers import ProviderName, open_provider
from fleetlearn_protocol import Bundle, open_bundle
from threadpoolctl import threadpool_limits

from fleetlearn_simulator.data.factory import source_of
from fleetlearn_simulator.data.sources import Source
from fleetlearn_simulator.errors import SimulatorError
from fleetlearn_simulator.scenario.scenario import Scenario
from fleetlearn_simulator.training.backend import (
    Backend,
    Job,
    PerDevice,
    RoundInputs,
    local_settings,
)
from fleetlearn_simulator.training.computing import ComputesSums
from fleetlearn_simulator.training.kept_rows import NOTHING_KEPT, row_files
from fleetlearn_simulator.training.process_pool import ProcessPool
from fleetlearn_simulator.training.vectorized import (
    Vectorized,
    check_many,
    divide_into_blocks,
    not_for_many,
    workloads_of,
)
from fleetlearn_simulator.training.worker_pool import DivideJobs

BackendName = Literal["bundle", "vectorized", "computation"]
BackendChoice = Literal["auto", "bundle", "vectorized"]
EngineChoice = Literal["processes", "ray"]
BACKENDS: dict[str, type[PerDevice] | type[ComputesSums]] = {
    "bundle": PerDevice,
    "vectorized": Vectorized,
    "computation": ComputesSums,
}
SIZES_SAMPLED = 100
"""Devices whose numbers of examples are looked at, to guess whether all devices have the same
number."""
TRIAL_SECONDS = 0.3
"""Seconds for which ``auto`` tries each back end."""


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
    bundle = open_bundle(scenario.plan.bundle)
    local = local_settings(scenario.plan, bundle)
    kept = NOTHING_KEPT if folder is None else row_files(folder, bundle.manifest, local.algorithm)
    backend = BACKENDS[kind](bundle, local, source_of(scenario, bundle), provider, kept)
    threadpool_limits(1)  # now that all libraries are loaded, the user's module's too
    return backend


def with_measured_step(scenario: Scenario, bundle: Bundle) -> Scenario:
    """Return the scenario with the measured seconds of a step on this machine's CPU, if it asks for
    that."""
    if scenario.compute.step_seconds != "measure":
        return scenario
    computes = scenario.plan.algorithm.computes
    backend = make_backend(scenario, "computation" if computes else "bundle")
    inputs = RoundInputs(bundle.parameters()[: bundle.manifest.size])
    (device,) = first_with_examples(scenario, bundle, 1)
    backend.train(inputs, [Job(device, 0, 1)])  # the first steps allocate memory
    seconds = float(f"{_timed(lambda: int(backend.train(inputs, [Job(device)]).steps[0])):.3g}")
    return msgspec.structs.replace(
        scenario, compute=msgspec.structs.replace(scenario.compute, step_seconds=seconds)
    )


def first_with_examples(scenario: Scenario, bundle: Bundle, count: int) -> list[int]:
    """Return the first ``count`` devices that have examples, or fewer if there are no more among
    the first ``SIZES_SAMPLED``. Raises SimulatorError if there are none."""
    source, devices = source_of(scenario, bundle), list[int]()
    looked_at = min(scenario.population.size, SIZES_SAMPLED)
    for device in range(looked_at):
        if source.examples(np.array([device]))[0]:
            devices.append(device)
            if len(devices) == count:
                break
    if not devices:
        raise SimulatorError(
            f"none of the first {looked_at} devices has examples: there is nothing to measure "
            "training with. Give compute.step_seconds a number, and choose a back end"
        )
    return devices


def choose_backend(
    scenario: Scenario, bundle: Bundle, wanted: BackendChoice, provider: ProviderName = "cpu"
) -> tuple[BackendName, str]:
    """Return the back end, and why. ``auto`` tries both for a moment, on the first devices."""
    if scenario.plan.algorithm.computes:
        if wanted != "auto":
            raise SimulatorError(
                f'back end "{wanted}": the bundle has a computation in place of graphs; leave the '
                "back end to be chosen"
            )
        return "computation", "the bundle has a computation"
    if wanted == "vectorized":
        check_many(bundle, scenario.plan.local.batch_size, scenario.plan.local.algorithm)
    if wanted != "auto":
        return wanted, "chosen"
    if why := not_for_many(bundle, scenario.plan.local.batch_size, scenario.plan.local.algorithm):
        return "bundle", why
    assert bundle.manifest.many is not None
    count = bundle.manifest.many.devices
    devices = first_with_examples(scenario, bundle, count)
    jobs = [Job(devices[number % len(devices)], number) for number in range(count)]
    costs: dict[BackendName, float] = {
        "bundle": _seconds(scenario, bundle, "bundle", provider, [[job] for job in jobs]),
        "vectorized": _seconds(scenario, bundle, "vectorized", provider, [jobs]),
    }
    best = min(costs, key=lambda kind: costs[kind])
    return best, ", ".join(f"{kind} {1e3 * cost:.3g} ms a device" for kind, cost in costs.items())


def _seconds(
    scenario: Scenario,
    bundle: Bundle,
    kind: BackendName,
    provider: ProviderName,
    parts: list[list[Job]],
) -> float:
    """Return the seconds that a job takes. ``parts`` are trained one after the other, again and
    again."""
    backend, turns = make_backend(scenario, kind, provider), cycle(parts)
    inputs = RoundInputs(bundle.parameters()[: bundle.manifest.size])
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
    bundle: Bundle,
    source: Source,
    kind: BackendName,
    workers: int | None,
    engine: EngineChoice,
    ray_address: str | None,
    provider: ProviderName = "cpu",
    folder: Path | None = None,
) -> Backend:
    """Start the back end, with its workers. ``source``: the scenario's, to learn the devices'
    numbers of examples. ``folder``: the run's. The other arguments are those of
    ``fleetlearn_simulator.Options``."""
    if kind == "computation":
        if engine == "ray":
            raise SimulatorError("engine 'ray': sums are computed in this process")
        return make_backend(scenario, kind, provider, folder)
    make, divide = (
        partial(make_backend, scenario, kind, provider, folder),
        _divider(scenario, bundle, source, kind),
    )
    if engine == "ray":
        from fleetlearn_simulator.training.ray_pool import RayPool

        make = partial(make_backend, scenario, kind, provider)  # its workers do not see the folder
        local = local_settings(scenario.plan, bundle)
        kept = (
            NOTHING_KEPT if folder is None else row_files(folder, bundle.manifest, local.algorithm)
        )
        return RayPool(
            make, divide, bundle.parameters()[: bundle.manifest.size], workers, ray_address, kept
        )
    # If a round is one block, one process trains it: to hand it to another would only cost time.
    # Processes share a GPU by turns, and each takes some of its memory for CUDA itself.
    alone = provider != "cpu" or (
        kind == "vectorized" and not workers and _in_one_block(scenario, bundle, source)
    )
    count = workers or (1 if alone else os.cpu_count()) or 1
    return make() if count == 1 else ProcessPool(make, count, divide)


def _in_one_block(scenario: Scenario, bundle: Bundle, source: Source) -> bool:
    """Return whether one call trains a whole round, judged by the first devices. Devices with other
    numbers of examples would be in other blocks."""
    many = bundle.manifest.many
    if many is None or scenario.plan.round.cohort > many.devices:
        return False
    return (
        len({*source.examples(np.arange(min(scenario.population.size, SIZES_SAMPLED))).tolist()})
        == 1
    )


def _divider(scenario: Scenario, bundle: Bundle, source: Source, kind: str) -> DivideJobs:
    """Return the function that divides jobs into blocks."""
    many, local = bundle.manifest.many, local_settings(scenario.plan, bundle)
    # Small blocks keep all processes busy until the end. Large updates come one by one, and are
    # added up meanwhile.
    few = max(1, min(8, 2**20 // bundle.manifest.size))

    def divide(jobs: Sequence[Job]) -> list[list[int]]:
        if kind == "vectorized" and many is not None:
            return list(divide_into_blocks(workloads_of(local, source, jobs), many.devices))
        return [
            list(range(start, min(start + few, len(jobs)))) for start in range(0, len(jobs), few)
        ]

    return divide
