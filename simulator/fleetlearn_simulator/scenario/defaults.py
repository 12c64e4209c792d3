"""The parts of a scenario file that depend on each other: the plan, the tiers, and defaults that
follow from other keys.

The functions raise ValueError, and leave values of a wrong type for the conversion to refuse.
"""

from __future__ import annotations

import copy
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fleetlearn_coordinator.plan.plan import Plan
from fleetlearn_coordinator.plan.plugins_section import PluginsSection
from fleetlearn_coordinator.plan.service_settings import ServiceSettings
from fleetlearn_coordinator.plan.toml_errors import Section, near, read_tables
from fleetlearn_protocol import extensions
from fleetlearn_protocol.errors import in_words
from fleetlearn_protocol.extensions import ExtensionPoint
from fleetlearn_protocol.paths import in_home
from msgspec.structs import replace

from fleetlearn_simulator.scenario.own_algorithms import AVAILABILITY_LAW, DATA_SOURCE
from fleetlearn_simulator.scenario.sections import (
    AVAILABILITY,
    DATA,
    OWN_AVAILABILITY,
    OWN_DATA,
    PRESETS,
    REQUIRED,
    Tier,
    TierFailures,
    Weibull,
)

TIER_TABLES: Mapping[str, type[Section]] = {"failures": TierFailures} | {
    f"failures.{phase}": Weibull for phase in ("download", "train", "upload")
}
"""The tables within a tier."""


def read_plan(raw: dict[str, Any], base: Path, label: str) -> Plan:
    """Read the plan from its file and from the keys in [plan]. Raises ValueError and PlanError."""
    plan = {"file": raw["plan"]} if isinstance(raw.get("plan"), str) else raw.get("plan")
    takes = (
        "the path of a plan file, or a table [plan] with a plan's keys, where `file` may name one "
        "to start from"
    )
    if not isinstance(plan, dict):
        raise ValueError(
            f"plan = {plan!r} is refused: it takes {takes}"
            if "plan" in raw
            else f"plan is missing; it takes {takes}"
        )
    own = {key: value for key, value in plan.items() if key != "file"}
    if {"seed"} <= raw.keys() & own.keys() and own["seed"] != raw["seed"]:
        raise ValueError(
            f"plan.seed = {own['seed']!r} and seed = {raw['seed']!r}: both seeds are one; leave "
            "one out"
        )
    if "file" not in plan:
        own.setdefault("name", raw["name"])
        return Plan.read(own, base, file=f"{label}, plan")
    if not isinstance(plan["file"], str) or not plan["file"]:
        raise ValueError(
            f"plan.file = {plan['file']!r} is refused: it takes the path of a plan file"
        )
    path = (base / in_home(plan["file"])).absolute()
    try:
        tables = tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"plan = {plan['file']!r} cannot be read: {in_words(error)}") from None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ValueError(f"plan = {plan['file']!r} is not TOML: {error}") from None
    if isinstance(own.get("bundle"), str) and own["bundle"]:
        own["bundle"] = str((base / in_home(own["bundle"])).absolute())
    return Plan.read(_merge(tables, own), path.parent, file=f"{label}, plan {path}")


def _merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = {**under, **over}
    for key in under.keys() & over.keys():
        if isinstance(under[key], dict) and isinstance(over[key], dict):
            merged[key] = _merge(under[key], over[key])
    return merged


def read_service(raw: Mapping[str, Any], base: Path, label: str) -> ServiceSettings:
    """Read the settings of the coordinator's process, from their file or from [service]. Raises
    ValueError and ServiceError."""
    service = raw.get("service", {})
    if isinstance(service, str) and service:
        return ServiceSettings.load(base / in_home(service))
    if not isinstance(service, dict):
        takes = "the path of a service file, or a table [service] with its keys"
        raise ValueError(f"service = {service!r} is refused: it takes {takes}")
    return ServiceSettings.read(service, base, file=f"{label}, service")


def with_plugins(service: ServiceSettings, modules: Iterable[str], base: Path) -> ServiceSettings:
    """Return settings that allow these modules too. ``base``: the scenario's folder, where they are
    looked for, unless the settings name another."""
    given = service.plugins or PluginsSection(modules=(), folder=base)
    together = tuple(dict.fromkeys([*given.modules, *modules]))
    if not together:
        return service
    return replace(service, plugins=replace(given, modules=together))


def fill_defaults(raw: dict[str, Any], plan: Plan, service: ServiceSettings) -> None:
    """Fill in defaults that depend on other values."""
    raw.setdefault("seed", plan.seed)
    for section in ("population", "data", "compute", "availability", "failures", "coordinator"):
        raw.setdefault(section, {})
    population, data, availability = raw["population"], raw["data"], raw["availability"]
    if (
        isinstance(population, dict)
        and isinstance(size := population.get("size"), int)
        and size > 0
    ):
        population.setdefault("connected", min(service.max_connections, size))
    if isinstance(data, dict):
        data.setdefault("seed", raw["seed"])
        usual = "partition" if "partition" in data else "synthetic"
        _fill_kind("data", data, usual, DATA, ("seed", "test"), (DATA_SOURCE, OWN_DATA))
    if isinstance(availability, dict):
        own = AVAILABILITY_LAW, OWN_AVAILABILITY
        _fill_kind("availability", availability, "always", AVAILABILITY, (), own)


def _fill_kind(
    section: str,
    table: dict[str, Any],
    usual: str,
    kinds: Mapping[str, Mapping[str, Any]],
    always: Iterable[str],
    own: tuple[ExtensionPoint[Any], Mapping[str, Any]] | None = None,
) -> None:
    """``own``: the point that takes other packages' kinds, and the keys of such a kind."""
    kind = table.setdefault("kind", usual)
    if own is not None and extensions.is_extension(own[0], kind):
        kinds = {**kinds, kind: own[1]}
    if kind not in list(kinds):  # a list, because the given value may not be hashable
        hint = near(str(kind), kinds)
        more = "" if own is None else f" Or {own[0].own}."
        raise ValueError(
            f"{section}.kind = {kind!r} is not known{hint} Kinds: {', '.join(kinds)}.{more}"
        )
    takes = kinds[kind]
    for key in table:
        if key not in {"kind", *always, *takes}:
            others = " or ".join(f'"{name}"' for name in kinds if key in kinds[name])
            allowed = f"takes {', '.join(takes)}" if takes else "takes no other key"
            raise ValueError(
                f'{section}.{key} = {table[key]!r}: kind "{kind}" {allowed}; {key} is for kind '
                f"{others}"
            )
    for key, default in takes.items():
        if default is REQUIRED and key not in table:
            raise ValueError(f'{section}.{key} is missing; kind "{kind}" needs it')
        if default is not REQUIRED and default is not None:
            table.setdefault(key, copy.deepcopy(default))


def read_tiers(raw: Mapping[str, Any]) -> dict[str, Tier]:
    given = raw.get("tiers") or {"device": {}}
    if not isinstance(given, dict):
        raise ValueError(f"tiers = {given!r} is refused: it takes tables [tiers.NAME]")
    tiers = {}
    for name, table in given.items():
        where = f"tiers.{name}"
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
            raise ValueError(
                f"tiers.{name!r} is refused: a tier's name is letters, digits and ._-, at most 64"
            )
        if not isinstance(table, dict):
            raise ValueError(
                f"{where} = {table!r} is refused: it takes a table of "
                f"{', '.join(Tier.__struct_fields__)}"
            )
        like = table.get("like")
        if like is not None and like not in list(PRESETS):
            hint = near(str(like), PRESETS)
            raise ValueError(
                f"{where}.like = {like!r} is not known{hint} Presets: {', '.join(PRESETS)}."
            )
        tiers[name] = read_tables(
            {**PRESETS.get(str(like), {}), **table}, "tier", Tier, prefix=f"{where}."
        )
    return tiers
