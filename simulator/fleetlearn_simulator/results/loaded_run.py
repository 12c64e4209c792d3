"""A run's folder, read for the report and the comparison: its scenario, its rounds and its
summary."""

from __future__ import annotations

import os
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
from fleetlearn_coordinator.results.run_results import flat
from fleetlearn_protocol.errors import in_words
from numpy.typing import NDArray

from fleetlearn_simulator.errors import SimulatorError
from fleetlearn_simulator.results.run_folder import ROUNDS, SCENARIO, SUMMARY

Floats: TypeAlias = NDArray[np.float64]
Means: TypeAlias = dict[str, float | None]
"""Name -> mean. None stands for NaN and infinity, which JSON does not have."""
Metrics: TypeAlias = dict[str, dict[str, tuple[NDArray[np.int64], Floats]]]
"""Metric -> kind of measurement -> indices of rounds, and the values there."""
KINDS = ("test", "evaluation", "train")
"""Kinds of measurement: on the test data; on the devices before training; on the devices in
training."""


class Round(msgspec.Struct):
    """A line of ``rounds.jsonl``. What is not in the line has not happened."""

    round: int
    how: str = "committed"
    time: float = 0.0
    seconds: float = 0.0
    connected: int = 0
    reports: int = 0
    goal: int | None = None
    """Of a round that has its own (``round.goal_share``)."""
    partial: int = 0
    train: Means = {}
    evaluation: Means = {}
    test: Means = {}
    dropped: dict[str, int] = {}
    causes: dict[str, int] = {}
    assigned: dict[int, int] = {}
    accepted: dict[int, int] = {}
    device_seconds: dict[str, float] = {}
    bytes: dict[str, int] = {}
    change: float | None = None
    privacy: dict[str, float | None] = {}
    """What a private run has spent, and what it released beside the mean, by name."""

    @property
    def wasted(self) -> float:
        """Device-seconds that are not in the model. Of an abandoned round: all."""
        return (
            self.device_seconds.get("wasted", 0.0)
            if self.how == "committed"
            else sum(self.device_seconds.values())
        )

    @property
    def useful(self) -> float:
        """Device-seconds that are in the model."""
        return sum(self.device_seconds.values()) - self.wasted


class LoadedRun(NamedTuple):
    """A run's folder, read."""

    folder: Path
    name: str
    scenario: dict[str, Any]
    """The tables of ``scenario.toml``; empty if there is none."""
    rows: list[Round]
    summary: dict[str, Any]
    """Empty if the run is not finished."""

    @property
    def state(self) -> str:
        return str(self.summary.get("reason") or ("finished" if self.summary else "not finished"))

    @property
    def committed(self) -> list[Round]:
        return [round_ for round_ in self.rows if round_.how == "committed"]

    @property
    def private(self) -> list[Round]:
        """The rounds that made a release of a private run."""
        return [round_ for round_ in self.committed if round_.privacy.get("epsilon") is not None]

    def column(self, value: Callable[[Round], float]) -> Floats:
        """Return ``value`` of each round: shape (rounds,)."""
        return np.array([value(round_) for round_ in self.rows], np.float64)

    def total(self, value: Callable[[Round], Mapping[Any, float]]) -> Counter[Any]:
        """Return the sums of the rounds' counts."""
        sums: Counter[Any] = Counter()
        for round_ in self.rows:
            sums.update(value(round_))
        return sums


def find_runs(folder: Path) -> list[Path]:
    """Return the folder itself if it is a run's. Else return the runs' folders below it, sorted by
    name, with numbers in names sorted by value. Raises SimulatorError if there is none."""
    if (folder / ROUNDS).is_file():
        return [folder]
    folders = [Path(path) for path, _, files in os.walk(folder) if ROUNDS in files]
    if not folders:
        raise SimulatorError(
            f"{folder} holds no run: expected {ROUNDS} in it or in folders below it; give a folder "
            "that `fleetlearn-simulate run` wrote"
        )
    return sorted(folders, key=_natural)


def read_run(folder: Path) -> LoadedRun:
    """Read a run's folder, of a run that is finished or not. Raises SimulatorError if a file is
    missing or damaged."""
    try:
        rounds = (folder / ROUNDS).read_bytes()
        text = (folder / SCENARIO).read_text("utf-8") if (folder / SCENARIO).exists() else ""
        summary = (
            msgspec.json.decode((folder / SUMMARY).read_bytes())
            if (folder / SUMMARY).exists()
            else {}
        )
        # A run that is not finished may have written half of its last line.
        rows = msgspec.json.Decoder(Round).decode_lines(rounds[: rounds.rfind(b"\n") + 1])
        scenario = tomllib.loads(text)
    except (
        OSError,
        UnicodeDecodeError,
        msgspec.DecodeError,
        tomllib.TOMLDecodeError,
        RecursionError,
    ) as error:
        raise SimulatorError(
            f"{folder} cannot be read as a run's folder: {in_words(error)}"
        ) from None
    return LoadedRun(folder, str(scenario.get("name", folder.name)), scenario, rows, summary)


def series(run: LoadedRun) -> Metrics:
    """Return the metrics of the committed rounds in which they were measured."""
    points: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for index, row in enumerate(run.rows):
        if row.how != "committed":
            continue
        for kind, means in (
            ("test", row.test),
            ("evaluation", row.evaluation),
            ("train", row.train),
        ):
            for name, value in means.items():
                if value is not None:
                    points.setdefault(name, {}).setdefault(kind, []).append((index, value))
    return {
        name: {
            kind: (np.array([p for p, _ in kinds[kind]]), np.array([v for _, v in kinds[kind]]))
            for kind in KINDS
            if kind in kinds
        }
        for name, kinds in points.items()
    }


def traffic(run: LoadedRun) -> Floats:
    """Return the bytes sent in both directions up to the end of each round."""
    return np.cumsum(run.column(lambda round_: sum(round_.bytes.values())))


def thinned(values: Floats, most: int = 1000) -> NDArray[np.int64]:
    """Return the indices of at most ``most`` values that draw the same line: the least and the
    greatest of each stretch."""
    count = len(values)
    if count <= most:
        return np.arange(count)
    # Each stretch gives two points.
    edges = np.linspace(0, count, most // 2, dtype=np.int64)
    pairs = [
        (begin + int(np.argmin(values[begin:end])), begin + int(np.argmax(values[begin:end])))
        for begin, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
    ]
    # The line must begin and end where the run does.
    return np.unique([0, count - 1, *(index for pair in pairs for index in pair)])


def binned(values: Floats, most: int = 120) -> tuple[Floats, int]:
    """Return the means over at most ``most`` stretches of equally many values, and the length of a
    stretch."""
    width = max(1, -(-len(values) // most))
    begins = np.arange(0, len(values), width)
    if not len(begins):
        return values, width
    return np.add.reduceat(values, begins) / np.diff(np.append(begins, len(values))), width


def swept_keys(runs: Iterable[LoadedRun]) -> list[str]:
    """Return the keys in which the runs of a sweep differ, without seeds and names. A key that
    follows from another is left out: of ``plan.round.goal`` and the cohort that follows from it,
    the one in the runs' names is returned."""
    runs = list(runs)
    tables = [flat(run.scenario) for run in runs]
    every = {key: None for table in tables for key in table}
    keys = [key for key in every if key.rpartition(".")[2] not in ("seed", "name")]
    columns = {key: tuple(str(table.get(key)) for table in tables) for key in keys}
    varied = [key for key in keys if len(set(columns[key])) > 1]
    varied.sort(
        key=lambda key: not all(f"-{key.rpartition('.')[2]}-" in f"-{run.name}" for run in runs)
    )
    kept: list[str] = []
    for key in varied:
        known = set(zip(*(columns[name] for name in kept), strict=True)) if kept else set()
        joint = set(zip(*(columns[name] for name in (*kept, key)), strict=True))
        # A key that follows from those before makes no new combination of values.
        if not kept or len(joint) > len(known):
            kept.append(key)
    return kept


def _natural(path: Path) -> list[tuple[int, float, str]]:
    """Return a sorting key that puts run-2 before run-10."""
    words = re.split(r"(\d+(?:\.\d+)?)", str(path))
    return [
        (1, float(word), "") if number % 2 else (0, 0.0, word) for number, word in enumerate(words)
    ]
