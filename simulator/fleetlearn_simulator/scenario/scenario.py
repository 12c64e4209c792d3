"""A scenario: a plan, a population of devices, and what goes wrong, in a TOML file. ``init_text``
shows every key."""

from __future__ import annotations

import copy
import itertools
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from math import inf, prod
from pathlib import Path
from typing import Any

import msgspec
from fleetlearn_coordinator.plan.plan import Plan, PlanError
from fleetlearn_coordinator.plan.service_settings import ServiceError, ServiceSettings
from fleetlearn_coordinator.plan.toml_errors import Section, paths_from, read_tables, refuse_unknown
from fleetlearn_protocol.errors import in_words
from fleetlearn_protocol.messages import Identifier
from fleetlearn_protocol.paths import in_home

from fleetlearn_simulator.errors import SimulatorError
from fleetlearn_simulator.scenario import toml
from fleetlearn_simulator.scenario.availability_trace import read_trace
from fleetlearn_simulator.scenario.defaults import (
    TIER_TABLES,
    fill_defaults,
    read_plan,
    read_service,
    read_tiers,
    with_plugins,
)
from fleetlearn_simulator.scenario.family_rules import family_contradictions
from fleetlearn_simulator.scenario.law_rules import law_contradictions
from fleetlearn_simulator.scenario.peers_section import PeersSection
from fleetlearn_simulator.scenario.poisson_rules import poisson_contradictions
from fleetlearn_simulator.scenario.regions_rules import region_contradictions
from fleetlearn_simulator.scenario.sections import (
    Availability,
    Compute,
    Coordinator,
    Corrupt,
    DataSection,
    Failures,
    Outage,
    PopulationSection,
    Seed,
    Tier,
    Weibull,
    Zone,
)

MAX_RUNS = 10_000
"""The most runs that a sweep may have."""


class Scenario(Section, frozen=True, kw_only=True):
    """A checked scenario. ``Scenario.load`` reads it from a file."""

    name: Identifier
    """The run's name: letters, digits, ``._-``."""
    seed: Seed
    """The seed of all random numbers. It replaces the plan's seed. Default: the plan's."""
    plan: Plan
    """The coordinator's plan: the path of a file, or a table [plan] of its keys. In the table,
    ``file`` may name a plan to start from."""
    service: ServiceSettings
    """The settings of the coordinator's process: the path of a file, or a table [service] of its
    keys."""
    population: PopulationSection
    data: DataSection
    compute: Compute
    tiers: dict[str, Tier]
    """Name -> tier. Default: one tier ``device``, with a tier's defaults."""
    availability: Availability
    failures: Failures
    coordinator: Coordinator
    peers: PeersSection | None = None
    """How peers train without a coordinator. ``fleetlearn-simulate peers`` needs it, and nothing
    else reads it."""
    sweep: dict[str, list[Any]]
    """Dotted key -> values: there is a run for each combination. ``expand`` makes these runs. The
    scenario itself is the first of them."""
    setting: dict[str, Any]
    """For a run of a sweep: dotted key -> its value. Not a key of the file."""
    file: str
    """Where the scenario was read from, for messages. Not a key of the file."""
    base: Path
    """The folder that paths are relative to. Not a key of the file."""
    tables: dict[str, Any]
    """The tables of the file, as they were read. Not a key of the file."""

    @classmethod
    def load(cls, path: str | os.PathLike[str], plugins: Sequence[str] = ()) -> Scenario:
        """Read a scenario file. Raises SimulatorError.

        ``plugins``: modules that may bring own algorithms, beside those of
        ``service.plugins``. They are the installed ones, or in the scenario's folder.
        """
        try:
            path = in_home(path)
        except ValueError as error:
            raise SimulatorError(f"the scenario cannot be read: {error}") from None
        raw = _tables(_text(path), str(path))
        return cls.read(raw, path.absolute().parent, file=str(path), plugins=plugins)

    @classmethod
    def load_of_run(cls, path: Path) -> Scenario:
        """Read the scenario in a run's folder, also of an earlier version: it had the settings of
        the coordinator's process in the plan. Raises SimulatorError."""
        raw = _tables(_text(path), str(path))
        match raw:
            case {"plan": {"service": {"durable": durable, **service}} as plan}:
                raw["plan"] = {key: value for key, value in plan.items() if key != "service"} | {
                    "durable": durable
                }
                raw["service"] = service
        return cls.read(raw, path.absolute().parent, file=str(path))

    @classmethod
    def parse(cls, text: str, base: Path, *, file: str = "scenario") -> Scenario:
        """Read a scenario from text. ``base``: the folder that paths are relative to. Raises
        SimulatorError."""
        return cls.read(_tables(text, file), base, file=file)

    @classmethod
    def read(
        cls,
        raw: dict[str, Any],
        base: Path,
        *,
        file: str = "scenario",
        plugins: Sequence[str] = (),
    ) -> Scenario:
        """Make a scenario from a file's tables. Raises SimulatorError. ``plugins``: as for
        ``load``."""
        tables = {key: value for key, value in raw.items() if key != "sweep"}
        try:
            sweep = _swept(raw.get("sweep", {}))
            if (runs := prod(map(len, sweep.values()))) > MAX_RUNS:
                raise ValueError(f"sweep has {runs} combinations; the limit is {MAX_RUNS}")
        except ValueError as error:
            raise SimulatorError(f"{file}: {error}") from None
        first = {key: values[0] for key, values in sweep.items()}
        return _one(tables, base, file, sweep, first, plugins)

    def to_toml(self) -> str:
        """Return the text of a file that holds this scenario alone: with the plan in it, absolute
        paths, all defaults, and no sweep."""
        tables = {
            key: msgspec.to_builtins(getattr(self, key), enc_hook=str)
            for key in KEYS
            if key != "sweep"
        }
        del tables["plan"]["file"]
        return toml.dump(tables)


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SimulatorError(f"{path}: the scenario cannot be read: {in_words(error)}") from None


def _tables(text: str, file: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise SimulatorError(f"{file}: this is not TOML: {error}") from None


HIDDEN = ("setting", "file", "base", "tables")
"""Fields of a scenario that are not keys of the file."""
KEYS = tuple(key for key in Scenario.__struct_fields__ if key not in HIDDEN)
SECTIONS: Mapping[str, type[Section]] = {
    "population": PopulationSection,
    "data": DataSection,
    "compute": Compute,
    "availability": Availability,
    "availability.zones": Zone,
    "failures": Failures,
    "failures.download": Weibull,
    "failures.train": Weibull,
    "failures.upload": Weibull,
    "failures.outages": Outage,
    "failures.corrupt": Corrupt,
    "coordinator": Coordinator,
    "peers": PeersSection,
}


def expand(scenario: Scenario) -> list[Scenario]:
    """Return the runs of a sweep; the values of the last key change fastest. Without a sweep,
    return the scenario.

    Each run has its own name, and its values in ``setting``. Raises SimulatorError if a
    combination is not a valid scenario.
    """
    if not scenario.sweep:
        return [scenario]
    settings = [
        dict(zip(scenario.sweep, row, strict=True))
        for row in itertools.product(*scenario.sweep.values())
    ]
    plugins = scenario.service.plugins
    modules = () if plugins is None else plugins.modules
    runs = [
        _one(scenario.tables, scenario.base, scenario.file, {}, setting, modules)
        for setting in settings
    ]
    words = [
        [f"{key.rpartition('.')[2]}-{value}" for key, value in setting.items()]
        for setting in settings
    ]
    names = [
        re.sub(r"[^A-Za-z0-9._-]+", "_", "-".join([run.name, *row]))
        for run, row in zip(runs, words, strict=True)
    ]
    if len(set(names)) < len(names) or max(map(len, names)) > 64:
        names = [f"{scenario.name[:59]}-{number}" for number in range(len(names))]
    return [msgspec.structs.replace(run, name=name) for run, name in zip(runs, names, strict=True)]


def init_text() -> str:
    """Return a scenario file with every key, its default and its meaning."""
    return Path(__file__).with_name("example.toml").read_text("utf-8")


def _swept(given: object, prefix: str = "") -> dict[str, list[Any]]:
    """Return the dotted keys of a sweep and their values. Raises ValueError."""
    if isinstance(given, dict):
        axes = [_swept(value, f"{prefix}.{key}" if prefix else key) for key, value in given.items()]
        return {key: values for row in axes for key, values in row.items()}
    if isinstance(given, list) and given:
        return {prefix: given}
    where = f"sweep.{prefix}" if prefix else "sweep"
    raise ValueError(
        f"{where} = {given!r} is refused: it takes a list of values, with a run for each"
    )


def _set(raw: dict[str, Any], key: str, value: object) -> None:
    *path, last = key.split(".")
    for part in path:
        if part == "plan" and isinstance(raw.get(part), str):
            raw[part] = {"file": raw[part]}
        raw = raw.setdefault(part, {})
        if not isinstance(raw, dict):
            raise ValueError(f"{part} is not a table")
    raw[last] = value


def _one(
    tables: Mapping[str, Any],
    base: Path,
    file: str,
    sweep: dict[str, list[Any]],
    setting: dict[str, Any],
    plugins: Sequence[str],
) -> Scenario:
    """Make the scenario of these tables, with the setting's values. Raises SimulatorError.
    ``plugins``: as for ``Scenario.load``."""
    raw = copy.deepcopy(dict(tables))
    label = file
    if setting:
        label += f" (sweep: {', '.join(f'{key} = {value!r}' for key, value in setting.items())})"

    try:
        for key, value in setting.items():
            _set(raw, key, value)
        raw.setdefault("name", Path(file).stem)
        names = (
            [name for name in raw["tiers"] if isinstance(name, str)]
            if isinstance(raw.get("tiers"), dict)
            else []
        )
        tiers = {f"tiers.{name}": Tier for name in names} | {
            f"tiers.{name}.{key}": kind for name in names for key, kind in TIER_TABLES.items()
        }
        refuse_unknown(raw, "scenario", Scenario, {**SECTIONS, **tiers}, HIDDEN)
        service = with_plugins(read_service(raw, base, label), plugins, base)
        if service.plugins is not None:
            service.plugins.allow()
        plan = read_plan(raw, base, label)
        plan.check_service(service)
        fill_defaults(raw, plan, service)
        hidden = {"sweep": sweep, "setting": setting, "file": file, "base": base, "tables": tables}
        values = {**raw, **hidden, "plan": plan, "service": service, "tiers": read_tiers(raw)}
        scenario = read_tables(values, "scenario", Scenario, paths_from(base))
        for problem in _contradictions(scenario):
            raise ValueError(problem)
    except (PlanError, ServiceError) as error:
        raise SimulatorError(error.text) from None  # it names the file and the label
    except SimulatorError as error:
        raise SimulatorError(f"{label}: {error.text}") from None
    except ValueError as error:
        raise SimulatorError(f"{label}: {error}") from None
    return msgspec.structs.replace(scenario, plan=msgspec.structs.replace(plan, seed=scenario.seed))


def _contradictions(scenario: Scenario) -> Iterator[str]:
    yield from _fleet_contradictions(scenario)
    yield from _tier_contradictions(scenario)
    yield from _data_contradictions(scenario.data)
    yield from _availability_contradictions(scenario.availability)
    yield from _failure_contradictions(scenario.failures)
    yield from law_contradictions(scenario)
    yield from poisson_contradictions(scenario)
    if scenario.plan.algorithm.computes and scenario.failures.corrupt:
        yield (
            "failures.corrupt spoils updates of a model, and devices compute sums: leave it out. "
            "A device that sends wrong sums makes a wrong total, as nothing bounds what it counts"
        )
    if scenario.plan.algorithm.scores:
        yield (
            f'plan.recipe = "{scenario.plan.recipe}": simulated devices have one bundle, and here '
            "each device has a model of its own. benchmarks/studies/fedmd.py trains such a fleet; "
            "how its rounds go, a plan with fedavg and a model of as many parameters simulates"
        )
    yield from family_contradictions(scenario)
    yield from region_contradictions(scenario)
    if scenario.plan.clusters is not None and scenario.failures.corrupt:
        yield (
            "failures.corrupt with plan.clusters: what a bad device sends is made of one model, "
            "and it may choose another in each round. Leave one out"
        )


def _fleet_contradictions(scenario: Scenario) -> Iterator[str]:
    """Yield why the fleet is too small for the plan's rounds, or too large for the service."""
    population, plan = scenario.population, scenario.plan
    minimum, most_each = plan.round.minimum, plan.most_updates_of_a_device
    if most_each is not None:
        for key in ("size", "connected"):
            devices = getattr(population, key)
            if devices * most_each < minimum:
                yield (
                    f"population.{key} = {devices} is less than plan.round.minimum = {minimum}; "
                    f"with at most {most_each} of each device's updates in a round, none could "
                    "ever be committed"
                )
    for key, most in {
        "population.size": population.size,
        "service.max_connections": scenario.service.max_connections,
    }.items():
        if population.connected > most:
            yield f"population.connected = {population.connected} is more than {key} = {most}"
    if scenario.coordinator.masks and (plan.secure is None or plan.secure.mode != "helper"):
        yield (
            'coordinator.masks = true needs a plan with [secure] and mode = "helper": no other has '
            "masks that a helper adds up"
        )
    rest = plan.selection.once_in or 1
    if rest > 1 and population.size < rest * minimum:
        yield (
            f"population.size = {population.size} is less than plan.selection.once_in = {rest} "
            f"times plan.round.minimum = {minimum}; rounds would wait for devices that may not "
            "take part yet"
        )


def _tier_contradictions(scenario: Scenario) -> Iterator[str]:
    chosen, tiers = scenario.plan.selection.tiers, scenario.tiers
    if chosen and not {*chosen} & tiers.keys():
        yield (
            f"plan.selection.tiers = {list(chosen)} names no tier of the scenario, which has "
            f"{', '.join(tiers)}; no device would be eligible"
        )
    largest = max(inf if tier.memory is None else tier.memory for tier in tiers.values())
    if scenario.compute.memory > largest:
        yield (
            f"compute.memory = {scenario.compute.memory} MiB is more than any tier has: {largest}; "
            "none could train"
        )


def _availability_contradictions(availability: Availability) -> Iterator[str]:
    share, swing = availability.share, availability.swing
    if availability.kind == "diurnal" and share is not None and swing is not None:
        # Over a day the share runs between two values whose ratio is the swing and whose mean is
        # the given share.
        top = share * 2 * swing / (swing + 1)
        if top > 1:
            yield (
                f"availability.share = {share} with availability.swing = {swing} has {top:.3g} of "
                "the devices online at the peak; it takes a share of at most "
                f"{(swing + 1) / (2 * swing):.3g}"
            )
    if availability.file is not None:
        read_trace(str(availability.file), availability.repeat)


def _failure_contradictions(failures: Failures) -> Iterator[str]:
    for number, outage in enumerate(failures.outages):
        where = f"failures.outages[{number}]"
        if outage.end <= outage.begin:
            yield f"{where}.end = {outage.end} is not after its begin = {outage.begin}"
        if outage.region >= failures.regions:
            yield (
                f"{where}.region = {outage.region} is not a region; with failures.regions = "
                f"{failures.regions} they are 0 to {failures.regions - 1}"
            )
    if (total := sum(corruption.share for corruption in failures.corrupt)) > 1 + 1e-9:
        yield f"failures.corrupt: the shares add up to {total:.6g}; it takes at most 1"


def _data_contradictions(data: DataSection) -> Iterator[str]:
    if (
        data.largest is not None
        and data.power is None
        and (data.kind != "synthetic" or data.examples is not None)
    ):
        yield (
            f"data.largest = {data.largest} needs sizes that differ: data.power, or synthetic "
            "without data.examples"
        )
    if data.power is not None and data.examples is None and data.kind == "synthetic":
        yield f"data.power = {data.power} needs data.examples, the fewest that a device has"
    if data.largest is not None and data.largest < (data.examples or 1):
        yield f"data.largest = {data.largest} is less than data.examples = {data.examples}"
    if data.iid and (data.alpha or data.beta):
        yield (
            f"data.iid = true has one model for all devices: data.alpha = {data.alpha} and "
            f"data.beta = {data.beta} must be 0, or left out"
        )
    if data.kind == "dirichlet" and data.alpha == 0:
        yield 'data.alpha = 0.0 is refused: the concentration of kind "dirichlet" is above 0'
