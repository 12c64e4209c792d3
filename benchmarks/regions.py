"""What a straggling region costs, with and without regions.

The fleet is the one of examples/regions_rehearsal.toml: its own plan, and flat rounds of as many
reports, with over-selection and without, and with the longest of the regions' deadlines. All times
are virtual, so that the figures are the same on each machine and in each run. A fifth of the digits
is kept for the test. From the root of the repository:

    PYTHONPATH=. python benchmarks/regions.py
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import _measure as measure
import numpy as np
from fleetlearn_simulator import Options, simulate
from fleetlearn_simulator.population.traits import tiers_of
from fleetlearn_simulator.results.run_folder import EVENTS, ROUNDS, read_rows
from fleetlearn_simulator.scenario.scenario import Scenario

from examples import digits

EXAMPLE = Path(digits.__file__).with_name("regions_rehearsal.toml")
GOAL = 50
"""Reports of a round, all regions together."""
ROUNDS_OF = {
    "regions": {},
    "flat, over-selection 1.3": {"goal": GOAL, "over_selection": 1.3, "deadline": 600.0},
    "flat, none": {"goal": GOAL, "over_selection": 1.0, "deadline": 600.0},
    "flat, none, deadline 120 s": {"goal": GOAL, "over_selection": 1.0, "deadline": 120.0},
}
"""What is compared -> [round] of a plan without regions. Empty: the example as it is."""


class Costs(NamedTuple):
    """What the rounds of a plan came to."""

    plan: str
    seconds: float
    """Mean length of a round, in virtual seconds."""
    reports: float
    """Mean of a round."""
    shares: dict[str, float]
    """Tier -> its share of all reports that count."""
    lost: float
    """Mean number of tasks of a round that ended without a report."""
    accuracy: float
    """Of the last model, on the test data."""


def scenario(folder: Path, round_: Mapping[str, Any]) -> Scenario:
    """Return the example, or the same fleet with flat rounds."""
    tables = tomllib.loads(EXAMPLE.read_text("utf-8"))
    tables["data"]["test"] = 0.2
    if round_:
        del tables["plan"]["regions"]
        tables["plan"]["round"] = dict(round_)
    return Scenario.read(tables, folder)


def costs(folder: Path, name: str, round_: Mapping[str, Any]) -> Costs:
    """Simulate the plan."""
    made = scenario(folder, round_)
    outcome = simulate(made, folder / name.replace(" ", "-"), Options(workers=1))
    assert outcome is not None
    rows = read_rows(outcome.folder, ROUNDS)
    counted = {row["round"]: row.get("regions") for row in rows}
    tiers = [*made.tiers]
    found = Counter[str]()
    for event in read_rows(outcome.folder, EVENTS):
        if event["event"] != "accepted":
            continue
        tier = tiers[int(tiers_of(made, np.array([event["device"]]))[0])]
        regions = counted.get(int(event["task"].split("-")[1]))
        if regions is None or regions[tier]["done"]:
            found[tier] += 1
    total = found.total()
    return Costs(
        name,
        float(np.mean([row["seconds"] for row in rows])),
        float(np.mean([row["reports"] for row in rows])),
        {tier: found[tier] / total for tier in tiers},
        float(np.mean([sum(row["dropped"].values()) for row in rows])),
        float(outcome.summary["test"]["accuracy"]),
    )


def measured(folder: Path) -> Iterator[Costs]:
    """Yield a row for each plan."""
    told = ["examples.digits:export", "--output", str(folder / "digits.bundle")]
    subprocess.run(
        [sys.executable, "-m", "fleetlearn_export", *told], check=True, stdout=subprocess.DEVNULL
    )
    x, y = digits.data()[:2]
    np.savez(folder / "digits.npz", x=x, y=y)
    for name, round_ in ROUNDS_OF.items():
        yield costs(folder, name, round_)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows there")
    options = parser.parse_args()
    with TemporaryDirectory(prefix="fleetlearn-regions-") as folder:
        rows = list(measured(Path(folder)))
    tiers = [*rows[0].shares]
    head = ["rounds", "seconds", "reports", *(f"{tier}, %" for tier in tiers), "lost", "accuracy"]
    lines = [
        [
            row.plan,
            f"{row.seconds:.0f}",
            f"{row.reports:.1f}",
            *(f"{100 * row.shares[tier]:.1f}" for tier in tiers),
            f"{row.lost:.1f}",
            f"{row.accuracy:.3f}",
        ]
        for row in rows
    ]
    print(measure.table([head, *lines]))
    if options.json:
        found: list[dict[str, Any]] = [row._asdict() for row in rows]
        options.json.write_text(json.dumps(found, indent=1), "utf-8")


if __name__ == "__main__":
    main()
