"""Statistics with noise: whatever the noise is, what comes out can be."""

from __future__ import annotations

import numpy as np
from fleetlearn_coordinator.aggregation.computations.statistics import advance_noisy, result
from fleetlearn_protocol.computations import statistics
from fleetlearn_protocol.computations.settings import CategoryColumn, NumberColumn, Statistics


def test_a_result_of_noise_alone_makes_sense() -> None:
    """Counts below 0, and sums that no rows have."""
    asked = Statistics(
        numbers=(NumberColumn("age", range=(0.0, 8.0), quantiles=(0.25, 0.5), bins=4),),
        categories=(CategoryColumn("smoker", values=("yes", "no")),),
        rounds=1,
    )
    first, random = statistics.first_state(asked), np.random.default_rng(2)
    for _ in range(200):
        total = random.integers(-50, 50, statistics.sums_layout(asked).size)
        total[4:7] *= 2**28
        found = result(advance_noisy(first, total, 3, asked, 20.0), asked)
        age, smoker = found["columns"]["age"], found["columns"]["smoker"]
        counts = [found["rows"], age["missing"], age["below"], *age["histogram"]["rows"]]
        assert min(*counts, smoker["others"], *(row["rows"] for row in smoker["values"])) >= 0
        if "mean" in age:
            assert 0 <= age["mean"] <= 8
            assert 0 <= age["variance"] <= 16
        values = [quantile["value"] for quantile in age["quantiles"]]
        assert values == sorted(values)
        assert all(0 <= value <= 8 for value in values)
