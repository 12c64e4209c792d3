"""A scenario: a plan, a population of devices, and what befalls them, in a TOML file. ``init_text`` shows every key."""

from __future__ import annotations

import copy
import itertools
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from math import inf, prod
from pathlib import Path
from typing import Any

import msgspec
from fleetlearn_coordinator.plan import Plan, PlanError
from fleetlearn_coordinator.tables import Section, explain, near, refuse_unknown
from fleetlearn_protocol.messages import Identifier

from fleetlearn_simulator.errors import SimulatorError
from fleetlearn_simulator.scenario import toml
from fleetlearn_simulator.scenario.availability_trace import read_trace
from fleetlearn_simulator.scenario.sections import (
    AVAILABILITY,
    DATA,
    MUST,
    PRESETS,
    Availability,
    Compute,
    Coordinator,
    Corrupt,
    Data,
    Failures,
    Outage,
    Population,
    Seed,
    Tier,
    TierFailures,
    Weibull,
    Zone,
)

MAX_RUNS = 10_000
"""Most runs of a sweep."""


class Scenario(Section, frozen=True, kw_only=True):
    """A checked scenario. ``Scenario.load`` reads one."""

    name: Identifier
    """Of the run: letters, digits, ``._-``."""
    seed: Seed
    """Of all that is drawn, by the plan too: its own seed is replaced by it. Default: the plan's."""
    plan: Plan
    """The coordinator's plan: a file's path, or a table [plan] of its keys, where ``file`` names one to start from."""
    population: Population
    data: Data
    compute: Compute
    tiers: dict[str, Tier]
    """By name. Default: one, ``device``, with a tier's defaults."""
    availability: Availability
    failures: Failures
    coordinator: Coordinator
    sweep: dict[str, list[Any]]
    """Dotted key -> values: a run for each combination of them. ``expand`` makes them; the scenario itself is the
    first of them."""
    setting: dict[str, Any]
    """Of a run of a sweep: dotted key -> its value. Not a key of the file."""
    file: str
    """Where the scenario came from, for messages. Not a key of the file."""
    base: Path
    """What its paths are relative to. Not a key of the file."""
    tables: dict[str, Any]
    """The file, as it was read. Not a key of it."""

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Scenario:
        """Read a scenario file. Raises SimulatorError."""
        path = Path(path).expanduser()
        try:
            text = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise SimulatorError(f"{path}: the scenario cannot be read: {error}") from None
        return cls.parse(text, path.absolute().parent, file=str(path))

    @classmethod
    def parse(cls, text: str, base: Path, *, file: str = "scenario") -> Scenario:
        """Read a scenario from text; ``base`` is what its paths are relative to. Raises SimulatorError."""
        try:
            raw = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise SimulatorError(f"{file}: this is not TOML: {error}") from None
        return cls.read(raw, base, file=file)

    @classmethod
    def read(cls, raw: dict[str, Any], base: Path, *, file: str = "scenario") -> Scenario:
        """A scenario from a file's tables. Raises SimulatorError."""
        tables = {key: value for key, value in raw.items() if key != "sweep"}
        try:
            sweep = _swept(raw.get("sweep", {}))
            if (runs := prod(map(len, sweep.values()))) > MAX_RUNS:
                raise ValueError(f"sweep has {runs} combinations; the limit is {MAX_RUNS}")
        except ValueError as error:
            raise SimulatorError(f"{file}: {error}") from None
        return _one(tables, base, file, sweep, {key: values[0] for key, values in sweep.items()})

    def to_toml(self) -> str:
        """The scenario as a file of its own: the plan within it, paths absolute, defaults filled in, no sweep."""
        tables = {key: msgspec.to_builtins(getattr(self, key), enc_hook=str) for key in KEYS if key != "sweep"}
        del tables["plan"]["file"]
        return toml.dump(tables)


HIDDEN = ("setting", "file", "base", "tables")
"""Fields of a scenario that are not keys of its file."""
KEYS = tuple(key for key in Scenario.__struct_fields__ if key not in HIDDEN)
SECTIONS: Mapping[str, type[Section]] = {
    "population": Population,
    "data": Data,
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
}
TIER: Mapping[str, type[Section]] = {"failures": TierFailures} | {
    f"failures.{phase}": Weibull for phase in ("download", "train", "upload")
}
"""The tables of a tier."""


def expand(scenario: Scenario) -> list[Scenario]:
    """The runs of a sweep, the last key's values changing fastest; of a scenario without one, itself.

    Each has a name of its own and, in ``setting``, what it was swept with. Raises SimulatorError where a combination
    is not a scenario.
    """
    if not scenario.sweep:
        return [scenario]
    settings = [dict(zip(scenario.sweep, row, strict=True)) for row in itertools.product(*scenario.sweep.values())]
    runs = [_one(scenario.tables, scenario.base, scenario.file, {}, setting) for setting in settings]
    words = [[f"{key.rpartition('.')[2]}-{value}" for key, value in setting.items()] for setting in settings]
    names = [re.sub(r"[^A-Za-z0-9._-]+", "_", "-".join([run.name, *row])) for run, row in zip(runs, words, strict=True)]
    if len(set(names)) < len(names) or max(map(len, names)) > 64:
        names = [f"{scenario.name[:59]}-{number}" for number in range(len(names))]
    return [msgspec.structs.replace(run, name=name) for run, name in zip(runs, names, strict=True)]


def init_text() -> str:
    """A scenario file with every key, its default and what it means."""
    return Path(__file__).with_name("example.toml").read_text("utf-8")


def _swept(given: object, prefix: str = "") -> dict[str, list[Any]]:
    """The dotted keys of a sweep and their values. Raises ValueError."""
    if isinstance(given, dict):
        found = [_swept(value, f"{prefix}.{key}" if prefix else key) for key, value in given.items()]
        return {key: values for row in found for key, values in row.items()}
    if isinstance(given, list) and given:
        return {prefix: given}
    where = f"sweep.{prefix}" if prefix else "sweep"
    raise ValueError(f"{where} = {given!r} is refused: it takes a list of values, for a run with each of them")


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
    tables: Mapping[str, Any], base: Path, file: str, sweep: dict[str, list[Any]], setting: dict[str, Any]
) -> Scenario:
    """The scenario of these tables with the setting's values. Raises SimulatorError."""
    raw = copy.deepcopy(dict(tables))
    label = file
    if setting:
        label += f" (sweep: {', '.join(f'{key} = {value!r}' for key, value in setting.items())})"

    def place(_: type, given: object) -> Path:
        if isinstance(given, Path):
            return given
        if not isinstance(given, str) or not given:
            raise TypeError("Expected a path")
        return (base / Path(given).expanduser()).absolute()

    try:
        for key, value in setting.items():
            _set(raw, key, value)
        raw.setdefault("name", Path(file).stem)
        names = [name for name in raw["tiers"] if isinstance(name, str)] if isinstance(raw.get("tiers"), dict) else []
        tiers = {f"tiers.{name}": Tier for name in names} | {
            f"tiers.{name}.{key}": kind for name in names for key, kind in TIER.items()
        }
        refuse_unknown(raw, "scenario", Scenario, {**SECTIONS, **tiers}, HIDDEN)
        plan = _plan(raw, base, label)
        _fill(raw, plan)
        hidden = {"sweep": sweep, "setting": setting, "file": file, "base": base, "tables": tables}
        scenario = msgspec.convert({**raw, **hidden, "plan": plan, "tiers": _tiers(raw)}, Scenario, dec_hook=place)
        for problem in _contradictions(scenario):
            raise ValueError(problem)
    except PlanError as error:
        raise SimulatorError(error.text) from None  # it names the plan and the label
    except SimulatorError as error:
        raise SimulatorError(f"{label}: {error.text}") from None
    except msgspec.ValidationError as error:
        raise SimulatorError(f"{label}: {explain(error, raw, 'scenario', Scenario, SECTIONS)}") from None
    except ValueError as error:
        raise SimulatorError(f"{label}: {error}") from None
    return msgspec.structs.replace(scenario, plan=msgspec.structs.replace(plan, seed=scenario.seed))


def _plan(raw: dict[str, Any], base: Path, label: str) -> Plan:
    """The plan, from its file and the keys in [plan]. Raises ValueError and PlanError."""
    given = {"file": raw["plan"]} if isinstance(raw.get("plan"), str) else raw.get("plan")
    takes = "the path of a plan file, or a table [plan] with a plan's keys, where `file` may name one to start from"
    if not isinstance(given, dict):
        raise ValueError(
            f"plan = {given!r} is refused: it takes {takes}" if "plan" in raw else f"plan is missing; it takes {takes}"
        )
    own = {key: value for key, value in given.items() if key != "file"}
    if {"seed"} <= raw.keys() & own.keys() and own["seed"] != raw["seed"]:
        raise ValueError(f"plan.seed = {own['seed']!r} and seed = {raw['seed']!r}: both seeds are one; leave one out")
    if "file" not in given:
        own.setdefault("name", raw["name"])
        return Plan.read(own, base, file=f"{label}, plan")
    if not isinstance(given["file"], str) or not given["file"]:
        raise ValueError(f"plan.file = {given['file']!r} is refused: it takes the path of a plan file")
    path = (base / Path(given["file"]).expanduser()).absolute()
    try:
        tables = tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"plan = {given['file']!r} cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"plan = {given['file']!r} is not TOML: {error}") from None
    if isinstance(own.get("bundle"), str) and own["bundle"]:
        own["bundle"] = str((base / Path(own["bundle"]).expanduser()).absolute())
    return Plan.read(_merge(tables, own), path.parent, file=f"{label}, plan {path}")


def _merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = {**under, **over}
    for key in under.keys() & over.keys():
        if isinstance(under[key], dict) and isinstance(over[key], dict):
            merged[key] = _merge(under[key], over[key])
    return merged


def _fill(raw: dict[str, Any], plan: Plan) -> None:
    """Put in what depends on other values. Leaves what has a wrong type for the conversion to refuse."""
    raw.setdefault("seed", plan.seed)
    for section in ("population", "data", "compute", "availability", "failures", "coordinator"):
        raw.setdefault(section, {})
    population, data, availability = raw["population"], raw["data"], raw["availability"]
    if isinstance(population, dict) and isinstance(size := population.get("size"), int) and size > 0:
        population.setdefault("connected", min(plan.service.max_connections, size))
    if isinstance(data, dict):
        data.setdefault("seed", raw["seed"])
        _fill_kind("data", data, "synthetic", DATA, ("seed", "test"))
    if isinstance(availability, dict):
        _fill_kind("availability", availability, "always", AVAILABILITY, ())


def _fill_kind(
    section: str, table: dict[str, Any], usual: str, kinds: Mapping[str, Mapping[str, Any]], always: Iterable[str]
) -> None:
    kind = table.setdefault("kind", usual)
    if kind not in list(kinds):  # a list, since what was given may not be hashable
        hint = near(str(kind), kinds)
        raise ValueError(f"{section}.kind = {kind!r} is not known{hint} Kinds: {', '.join(kinds)}.")
    takes = kinds[kind]
    for key in table:
        if key not in {"kind", *always, *takes}:
            others = " or ".join(f'"{name}"' for name in kinds if key in kinds[name])
            allowed = f"takes {', '.join(takes)}" if takes else "takes no other key"
            raise ValueError(f'{section}.{key} = {table[key]!r}: kind "{kind}" {allowed}; {key} is for kind {others}')
    for key, default in takes.items():
        if default is MUST and key not in table:
            raise ValueError(f'{section}.{key} is missing; kind "{kind}" needs it')
        if default is not MUST and default is not None:
            table.setdefault(key, copy.deepcopy(default))


def _tiers(raw: Mapping[str, Any]) -> dict[str, Tier]:
    given = raw.get("tiers") or {"device": {}}
    if not isinstance(given, dict):
        raise ValueError(f"tiers = {given!r} is refused: it takes tables [tiers.NAME]")
    tiers = {}
    for name, table in given.items():
        where = f"tiers.{name}"
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
            raise ValueError(f"tiers.{name!r} is refused: a tier's name is letters, digits and ._-, at most 64")
        if not isinstance(table, dict):
            raise ValueError(f"{where} = {table!r} is refused: it takes a table of {', '.join(Tier.__struct_fields__)}")
        like = table.get("like")
        if like is not None and like not in list(PRESETS):
            hint = near(str(like), PRESETS)
            raise ValueError(f"{where}.like = {like!r} is not known{hint} Presets: {', '.join(PRESETS)}.")
        try:
            tiers[name] = msgspec.convert({**PRESETS.get(str(like), {}), **table}, Tier)
        except msgspec.ValidationError as error:
            raise ValueError(explain(error, table, "tier", Tier, TIER, prefix=f"{where}.")) from None
    return tiers


def _contradictions(scenario: Scenario) -> Iterator[str]:
    population, plan, failures = scenario.population, scenario.plan, scenario.failures
    if population.size < plan.round.minimum:
        yield (
            f"population.size = {population.size} is less than plan.round.minimum = {plan.round.minimum}; "
            "no round could ever be committed"
        )
    for key, most in {
        "population.size": population.size,
        "plan.service.max_connections": plan.service.max_connections,
    }.items():
        if population.connected > most:
            yield f"population.connected = {population.connected} is more than {key} = {most}"
    if population.connected < plan.round.minimum:
        yield (
            f"population.connected = {population.connected} is less than plan.round.minimum = {plan.round.minimum}; "
            "no round could ever be committed"
        )
    largest = max(inf if tier.memory is None else tier.memory for tier in scenario.tiers.values())
    if scenario.compute.memory > largest:
        yield f"compute.memory = {scenario.compute.memory} MiB is more than any tier has: {largest}; none could train"
    yield from _data_contradictions(scenario.data)
    availability = scenario.availability
    if availability.kind == "diurnal" and availability.share is not None and availability.swing is not None:
        top = availability.share * 2 * availability.swing / (availability.swing + 1)
        if top > 1:
            yield (
                f"availability.share = {availability.share} with availability.swing = {availability.swing} has "
                f"{top:.3g} of the devices online at the peak; it takes a share of at most "
                f"{(availability.swing + 1) / (2 * availability.swing):.3g}"
            )
    if availability.file is not None:
        read_trace(str(availability.file), availability.repeat)
    for number, outage in enumerate(failures.outages):
        where = f"failures.outages[{number}]"
        if outage.end <= outage.begin:
            yield f"{where}.end = {outage.end} is not after its begin = {outage.begin}"
        if outage.region >= failures.regions:
            yield (
                f"{where}.region = {outage.region} is not a region; with failures.regions = {failures.regions} they "
                f"are 0 to {failures.regions - 1}"
            )
    if (total := sum(row.share for row in failures.corrupt)) > 1 + 1e-9:
        yield f"failures.corrupt: the shares add up to {total:.6g}; it takes at most 1"


def _data_contradictions(data: Data) -> Iterator[str]:
    if data.largest is not None and data.power is None and (data.kind != "synthetic" or data.examples is not None):
        yield f"data.largest = {data.largest} needs sizes that differ: data.power, or synthetic without data.examples"
    if data.power is not None and data.examples is None and data.kind == "synthetic":
        yield f"data.power = {data.power} needs data.examples, the fewest that a device has"
    if data.largest is not None and data.largest < (data.examples or 1):
        yield f"data.largest = {data.largest} is less than data.examples = {data.examples}"
    if data.iid and (data.alpha or data.beta):
        yield (
            f"data.iid = true has one model for all devices: data.alpha = {data.alpha} and data.beta = {data.beta} "
            "must be 0, or left out"
        )
    if data.kind == "dirichlet" and data.alpha == 0:
        yield 'data.alpha = 0.0 is refused: the concentration of kind "dirichlet" is above 0'
