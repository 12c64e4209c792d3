"""Statistics with differential privacy: epsilon against the error of mean, deviation and median.

    python examples/private_statistics.py [RUNS]

A thousand devices have 20 to 60 rows each of one column, ages; each device's own mean differs. For
each epsilon a hundred runs of one round are made over the same rows, with the coordinator's own
functions, and the root of the mean squared error is shown, in years, beside what `result` says.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from fleetlearn_coordinator.aggregation.computations.registry import RunComputation
from fleetlearn_coordinator.aggregation.privacy.release import begin
from fleetlearn_coordinator.aggregation.privacy.round_release import release_round
from fleetlearn_coordinator.plan.plan import Plan
from fleetlearn_device.computations.registry import sum_up
from fleetlearn_protocol.bundle import Bundle, open_bundle
from fleetlearn_protocol.computations.bundle import write_computation_bundle
from fleetlearn_protocol.computations.private_sums import clip_sums, in_rows
from fleetlearn_protocol.computations.settings import NumberColumn, Statistics
from fleetlearn_protocol.computations.statistics import private_groups

DEVICES, RUNS, CLIP = 1000, 100, 40
EPSILONS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
ASKED = Statistics(
    numbers=(NumberColumn("age", range=(0.0, 120.0), quantiles=(0.5, 0.9), bins=120),), rounds=1
)
PLAN = """
recipe = "statistics"
name = "ages"
bundle = "ages.bundle"
[round]
goal = {devices}
[stop]
rounds = 1
[privacy]
epsilon = {epsilon}
delta = 1e-6
population = 5000
clip = {clip}
"""


def ages() -> list[np.ndarray]:
    """Return each device's ages."""
    random, found = np.random.default_rng(11), []
    for _ in range(DEVICES):
        own = 35 + random.gamma(4.0, 5.0)
        found.append(random.normal(own, 12.0, random.integers(20, 61)).clip(0, 110))
    return found


def results(bundle: Bundle, sums: np.ndarray, epsilon: float, runs: int) -> list[dict[str, Any]]:
    """Return what ``runs`` runs find. ``sums``: of all devices, clipped."""
    text = PLAN.format(devices=DEVICES, epsilon=epsilon, clip=CLIP)
    rules = Plan.parse(text, Path(bundle.path).parent).round_rules(bundle.manifest).privacy
    assert rules is not None
    computation, found = RunComputation("statistics", ASKED), []
    for run in range(runs):
        secret = np.random.default_rng([run, int(100 * epsilon)]).bytes(32)
        state = begin(rules, secret, bundle.manifest.size)
        made = release_round(rules, state, in_rows(sums, CLIP), (), ())
        noisy, noise = made.mean * rules.goal, rules.noise * CLIP
        after = computation.advance_noisy(bundle.parameters(), noisy, DEVICES, noise)
        found.append(computation.result(after)["columns"]["age"])
    return found


def error(found: list[float], exact: float) -> str:
    return f"{np.sqrt(np.mean((np.array(found) - exact) ** 2)):.3g}"


def main(runs: int = RUNS) -> None:
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "ages.bundle")
        bundle = open_bundle(write_computation_bundle(target, "ages", ASKED))
        state, tables = bundle.parameters(), ages()
        groups = private_groups(ASKED, state)
        sums = np.sum(
            [
                clip_sums(sum_up(state, [{"age": rows}], ASKED), groups, CLIP).sums
                for rows in tables
            ],
            axis=0,
        )
        rows = np.concatenate(tables)
        print(f"{len(rows)} rows: mean {rows.mean():.4g}, deviation {rows.std():.4g}, ", end="")
        median, ninth = np.quantile(rows, [0.5, 0.9])
        print(f"median {median:.4g}, 90 % below {ninth:.4g}\n")
        print("| epsilon | mean | said of the mean | deviation | median | 90 % below |")
        print("|---|---|---|---|---|---|")
        for epsilon in EPSILONS:
            found = results(bundle, sums, epsilon, runs)
            said = np.mean([each["noise"]["mean"] for each in found])
            columns = (
                f"{epsilon:g}",
                error([each["mean"] for each in found], rows.mean()),
                f"{said:.3g}",
                error([each["deviation"] for each in found], rows.std()),
                error([each["quantiles"][0]["value"] for each in found], median),
                error([each["quantiles"][1]["value"] for each in found], ninth),
            )
            print(f"| {' | '.join(columns)} |")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
