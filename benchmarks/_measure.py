"""What the benchmarks share: what processes cost, and how figures are shown."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from _process_usage import Usage as Usage
from _process_usage import usage as usage


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder that is removed afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="fleetlearn-benchmark-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def middle(values: Sequence[float]) -> dict[str, float]:
    """Median, least and greatest, as the JSON has them."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def summary(runs: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, Any]:
    """Return the middle of each figure of all contenders, and of the ratios of the first's figures
    to those of each other in the same repeat: ``ratio`` is to the second, ``ratio to NAME`` to
    further ones."""
    (_, ours), *others = runs.items()
    result: dict[str, Any] = {
        name: {key: middle([row[key] for row in rows]) for key in rows[0]}
        for name, rows in runs.items()
    }
    for number, (name, rows) in enumerate(others):
        ratios = {
            key: [a[key] / b[key] for a, b in zip(ours, rows, strict=True) if b[key]]
            for key in rows[0]
        }
        label = f"ratio to {name}" if number else "ratio"
        result[label] = {key: middle(values) for key, values in ratios.items() if values}
    return {**result, "runs": dict(runs)}


def side_by_side(result: Mapping[str, Any]) -> str:
    """A table of what ``summary`` gave."""
    names = list(result["runs"])
    ratios = [key for key in result if key.startswith("ratio")]
    labels = [f"ratio to {name}" for name in names[1:]] if len(names) > 2 else ["ratio"]
    rows = [("figure", *names, *(f"{label}, same repeat" for label in labels))]
    for key in result[names[0]]:
        shown = [show(result[name][key]) if key in result[name] else "" for name in names]
        shown += [show(result[ratio][key]) if key in result[ratio] else "" for ratio in ratios]
        rows.append((key, *shown))
    return table(rows)


def show(values: Mapping[str, float]) -> str:
    """``median [min-max]`` with three digits."""
    median, least, greatest = (_digits(values[key]) for key in ("median", "min", "max"))
    return median if least == greatest else f"{median} [{least}-{greatest}]"


def _digits(value: float) -> str:
    whole = math.isfinite(value) and (value == round(value) or abs(value) >= 100)
    return f"{value:.0f}" if whole else f"{value:.3g}"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows, the first of them the headings, as a Markdown table with aligned columns."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    options = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    options.add_argument(
        "--json", type=Path, metavar="FILE", help="write the figures to FILE as well"
    )
    return options


def write_json(file: Path | None, settings: Mapping[str, Any], results: Mapping[str, Any]) -> None:
    """The figures, with the settings and the machine that they belong to."""
    if file is not None:
        content = {"machine": machine(), "settings": dict(settings), "results": dict(results)}
        file.write_text(json.dumps(content, indent=1) + "\n")


def machine() -> dict[str, Any]:
    """Return what the figures depend on beside the code. The load shows how much of the machine
    others used."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "packages": {
            name: version(name) for name in ("fleetlearn", "websockets", "numpy", "msgspec")
        },
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(
            line.partition(":")[2].strip() for line in lines if line.startswith("model name")
        )
    except (OSError, StopIteration):
        return platform.machine()
