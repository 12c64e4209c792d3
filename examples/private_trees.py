"""Boosted trees with differential privacy: epsilon against the AUC, on breast cancer.

    python examples/private_trees.py [DIVISIONS]

Each of 426 patients is a device with one row; the other 143 are predicted. Ten trees of one split
each are grown, each from one column that is drawn, so that eleven sums are released. Twenty
divisions of the patients are averaged. The ranges are those of the table, a fifth wider: a real
fleet takes them from what is known of such measurements.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from fleetlearn_coordinator.aggregation.computations.registry import RunComputation
from fleetlearn_coordinator.aggregation.privacy.release import begin
from fleetlearn_coordinator.aggregation.privacy.round_release import release_round
from fleetlearn_coordinator.plan.plan import Plan
from fleetlearn_device.computations.boosted_trees import bins_of, scores
from fleetlearn_device.computations.registry import sum_up
from fleetlearn_protocol.computations.boosting_settings import BoostColumn, BoostedTrees
from fleetlearn_protocol.computations.kinds import KINDS
from fleetlearn_protocol.computations.private_sums import clip_sums, in_rows
from fleetlearn_protocol.computations.trees_layout import bin_table, trees_state
from fleetlearn_protocol.vector import Vector

DIVISIONS = 20
EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0)
KIND = "boosted-trees"
PLAN = """
recipe = "boosted-trees"
name = "cancer"
bundle = "cancer.bundle"
[round]
goal = 426
[stop]
rounds = 11
[privacy]
epsilon = {epsilon}
delta = 1e-6
population = 426
clip = 1
"""


def grown(told: BoostedTrees, x: Any, y: Any, epsilon: float | None, seed: int) -> Vector:
    """Return the state at the end of a run. epsilon: None without noise."""
    computation, state = RunComputation(KIND, told), KINDS[KIND].first(told)
    rules = privacy = None
    if epsilon is not None:
        # Without a bundle: only the noise that the plan comes to is taken from it.
        from fleetlearn_coordinator.plan.privacy_terms import privacy_rules

        rules = privacy_rules(Plan.parse(PLAN.format(epsilon=epsilon), Path()), 1)
        assert rules is not None
        secret = np.random.default_rng([seed, int(10 * epsilon)]).bytes(32)
        privacy = begin(rules, secret, state.size)
    while not computation.is_done(state):
        if rules is None or privacy is None:
            state = computation.advance(state, sum_up(state, [{"x": x, "y": y}], told), len(x))
            continue
        groups = KINDS[KIND].groups
        assert groups is not None
        # A device has one row, and counts up to one whole: the scaled sums of all devices are those
        # of one device with all rows that counts up to as many.
        sums = sum_up(state, [{"x": x, "y": y}], told)
        sent = clip_sums(sums, groups(told, state), float(len(x))).sums
        made = release_round(rules, privacy, in_rows(sent, float(len(x))), (), ())
        privacy, noise = made.state, rules.noise * rules.clip
        state = computation.advance_noisy(state, made.mean * rules.goal, len(x), noise)
    return state


def area(found: np.ndarray, y: np.ndarray) -> float:
    """Return the area under the curve: how often a row of class 1 has the larger score, ties as a
    half."""
    ones, zeros = found[y == 1][:, None], found[y == 0][None]
    return float(((ones > zeros) + (ones == zeros) / 2).mean())


def main(divisions: int = DIVISIONS) -> None:
    from sklearn.datasets import load_breast_cancer

    data = load_breast_cancer()
    x, y = data.data.astype(np.float32), data.target.astype(np.int64)
    ends = [float(1.2 * column.max()) for column in x.T]
    print("| epsilon | AUC | least of the divisions |")
    print("|---|---|---|")
    for epsilon in (*EPSILONS, None):
        found = []
        for seed in range(divisions):
            order = np.random.default_rng(seed).permutation(len(x))
            inside, outside = order[:426], order[426:]
            told = BoostedTrees(
                columns=tuple(
                    BoostColumn(f"c{place}", range=(0.0, end)) for place, end in enumerate(ends)
                ),
                loss="logistic",
                rounds=10,
                depth=1,
                bins=8,
                learning_rate=0.5,
                column_share=0.03,
                seed=seed,
            )
            state = grown(told, x[inside], y[inside], epsilon, seed)
            values = trees_state(told).unpack(state)
            bins = bins_of(x[outside], values["edges"], bin_table(told))
            found.append(area(scores(values, bins, told, told.rounds)[:, 0], y[outside]))
        name = "no noise" if epsilon is None else f"{epsilon:g}"
        print(f"| {name} | {np.mean(found):.3f} | {min(found):.3f} |", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
