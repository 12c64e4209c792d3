"""What a run is made of: its scenario's values, and files that its results depend on, each with the
SHA-256 of its content.

A sweep, or a run that is resumed, would otherwise mix the results of a file before and after
somebody changed it. Versions of fleetlearn and other packages are not compared: a run goes on after
an upgrade.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from fleetlearn_protocol import Bundle
from fleetlearn_protocol.source_files import source_files

from fleetlearn_simulator.data.sources import Source
from fleetlearn_simulator.scenario.own_algorithms import own_algorithms
from fleetlearn_simulator.scenario.scenario import KEYS, Scenario
from fleetlearn_simulator.scenario.sections import DATA, DataSection

ABSENT = "absent"
VALUES, EXAMPLES = "values", "examples"
MAY_CHANGE = (
    "name",
    "sweep",
    "plan.name",
    "plan.seed",
    "plan.file",
    "plan.data_dir",
    "plan.durable",
    "plan.stop",
    "plan.models",
    "peers",
)
"""Keys that change nothing of what a run has done. It may go on with other stop rules; ``seed``
replaces the plan's; ``peers`` is for training without a coordinator."""
OF_SERVICE = ("service.heartbeat", "service.uploads", "service.downloads")
"""The keys of [service] that a simulation depends on, beside the one that ``population.connected``
repeats."""
SHOWN = 60
"""Most characters of a value in an error."""


def made_of(
    scenario: Scenario, bundles: Mapping[str, Bundle], source: Source | None
) -> dict[str, Any]:
    """Return what a run is made of. ``bundles``: by the names of the family's members; the one
    bundle of another run has the name "".

    What a file is for, with its name -> the SHA-256 of its content: the bundle, the data's arrays,
    the trace of availability, the module of the data's function and the modules beside it that it
    imports. For own algorithms: the version of their package, and the modules that they use of it
    and of the folder of [plugins]. ``values``: dotted key of the scenario ->
    its value; paths are left out, since files may move. ``examples``: number of a device -> the
    SHA-256 of what the data's function makes for it; these few devices tell if the function reads a
    file that changed.

    ``source``: the scenario's data. None is for a scenario whose data no user's code makes.
    """
    parts: dict[str, Any] = {
        f"the bundle of member {name}" if name else "the bundle": bundle.sha256
        for name, bundle in bundles.items()
    }
    plan = scenario.plan
    files = {"data.arrays": scenario.data.arrays, "availability.file": scenario.availability.file}
    if plan.distil is not None:
        files["plan.distil.data"] = plan.distil.data
    if plan.quality is not None and plan.quality.contributions is not None:
        files["plan.evaluation.data"] = plan.evaluation.data
    for key, file in files.items():
        if file is not None:
            parts[f"{key} {file.name}"] = _digest(file)
    if scenario.data.function is not None:
        name = scenario.data.function.partition(":")[0]
        for file in _modules(name, scenario.data.path or scenario.base):
            parts[f"data.function's {file.name}"] = _digest(file)
    if by_code(scenario.data):
        parts[EXAMPLES] = {} if source is None else dict(_sample(source, scenario.population.size))
    computations = [bundle.manifest.computation for bundle in bundles.values()]
    for each in own_algorithms(scenario, computations):
        if _may_change(each.where):  # a stop rule
            continue
        parts[f"{each.where} = {each.origin.name}"] = str(each.origin)
        for module, file in each.files.items():
            parts[f"{each.where}'s module {module}"] = _digest(file)
    rows = (row for section in KEYS for row in values_of(section, getattr(scenario, section)))
    parts[VALUES] = {key: value for key, value in rows if not _may_change(key)}
    return parts


def by_code(data: DataSection) -> bool:
    """Return whether a user's code makes the examples."""
    return data.function is not None or data.kind not in DATA


def changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return what differs: values as ``key was 1 and is 2``, and the names of files whose contents
    differ, or that are there only once. Values that the first does not have are not compared: an
    earlier version wrote it."""
    old, new = before.get(VALUES, {}), now.get(VALUES, {})
    values = [
        f"{key} was {_shown(old[key])} and is {_shown(new.get(key))}"
        for key in old
        if old[key] != new.get(key)
    ]
    files = [
        name
        for name in {**before, **now}
        if name not in (VALUES, EXAMPLES) and before.get(name) != now.get(name)
    ]
    # Another seed or another function makes other examples, and is named already.
    if values or files or EXAMPLES not in before or before[EXAMPLES] == now.get(EXAMPLES):
        return files + values
    return [
        "what the data's code makes, though it is the same (it must read the same files, and "
        "depend on the device's number and the seed alone)"
    ]


def _may_change(key: str) -> bool:
    if key.startswith("service."):
        return key not in OF_SERVICE
    return any(key == own or key.startswith(f"{own}.") for own in MAY_CHANGE)


def values_of(key: str, value: object) -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and their values, as JSON has them."""
    if isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            yield from values_of(f"{key}.{name}", getattr(value, name))
    elif isinstance(value, Mapping) and any(
        isinstance(row, msgspec.Struct) for row in value.values()
    ):
        yield key, sorted(value)
        for name, row in value.items():
            yield from values_of(f"{key}.{name}", row)
    elif not isinstance(value, Path):
        yield (
            key,
            msgspec.json.decode(msgspec.json.encode(value, enc_hook=str, order="deterministic")),
        )


def _sample(source: Source, population: int) -> Iterator[tuple[str, str]]:
    """Yield a few devices' numbers and the SHA-256 of their examples."""
    # Not all of them: that would take as long as making the whole population's data.
    for device in sorted({0, population // 2, population - 1}):
        content = hashlib.sha256()
        for array in source.arrays(device) if source.examples(np.array([device]))[0] else ():
            content.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
        yield str(device), content.hexdigest()


def _shown(value: object) -> str:
    text = "not given" if value is None else msgspec.json.encode(value).decode()
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _modules(name: str, base: Path) -> Iterable[Path]:
    """Return the file of a module, and of the modules in ``base`` that it imports, directly or
    through others."""
    if files := source_files([name], {}, [base]):
        return files.values()
    spec = find_spec(name)  # an installed module
    return [] if spec is None or spec.origin is None else [Path(spec.origin)]


def _digest(file: Path) -> str:
    try:
        state = file.stat()
    except OSError:
        return ABSENT
    return _digest_of_content(file, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=64)
def _digest_of_content(file: Path, modified: int, size: int) -> str:
    """Read the file once for all runs of a sweep."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
