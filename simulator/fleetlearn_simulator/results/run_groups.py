"""The lines of a comparison. A line is a run, or all runs of a sweep with the same setting."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fleetlearn_coordinator.results.run_results import flat

from fleetlearn_simulator.results.html_page import ABSENT
from fleetlearn_simulator.results.loaded_run import (
    KINDS,
    LoadedRun,
    Metrics,
    find_runs,
    read_run,
    series,
    swept_keys,
)


class Group(NamedTuple):
    """Runs that differ only in their seeds."""

    label: str
    runs: list[LoadedRun]
    metrics: list[Metrics]
    """The metrics of each run."""


def read_groups(folders: Sequence[Path]) -> list[Group]:
    """Make a group of each run, and of each setting of a sweep."""
    groups: list[tuple[str, list[LoadedRun]]] = []
    for folder in folders:
        found = find_runs(folder)
        runs = list(map(read_run, found))
        if found == [folder]:
            groups.append((runs[0].name, runs))
            continue
        keys = swept_keys(runs)
        words = {key: key if _ambiguous(key, keys) else key.rpartition(".")[2] for key in keys}
        prefix = f"{folder.name}: " if len(folders) > 1 else ""
        settings: dict[str, list[LoadedRun]] = {}
        for run in runs:
            table = flat(run.scenario)
            label = (
                ", ".join(f"{words[key]} = {_value(table.get(key))}" for key in keys)
                or runs[0].name
            )
            settings.setdefault(prefix + label, []).append(run)
        groups += settings.items()
    labels = [label for label, _ in groups]
    return [
        Group(
            f"{label} ({runs[0].folder})" if labels.count(label) > 1 else label,
            runs,
            list(map(series, runs)),
        )
        for label, runs in groups
    ]


def kinds_of(groups: Sequence[Group]) -> dict[str, str]:
    """Return, for each metric, the kind that is shown: the first that all runs with the metric
    have, or else the first that any run has."""
    measured = [metrics for group in groups for metrics in group.metrics]
    kinds = {}
    for name in dict.fromkeys(name for metrics in measured for name in metrics):
        sets = [set(metrics[name]) for metrics in measured if name in metrics]
        common = set.intersection(*sets) or set.union(*sets)
        kinds[name] = next(kind for kind in KINDS if kind in common)
    return kinds


def _ambiguous(key: str, keys: Sequence[str]) -> bool:
    return sum(other.rpartition(".")[2] == key.rpartition(".")[2] for other in keys) > 1


def _value(value: object) -> str:
    return (
        Path(value).name
        if isinstance(value, str) and "/" in value
        else ABSENT
        if value is None
        else str(value)
    )
