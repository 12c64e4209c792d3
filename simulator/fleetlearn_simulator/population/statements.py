"""What simulated devices state at their check-ins, for the coordinator's selection."""

from __future__ import annotations

import numpy as np
from fleetlearn_coordinator.rounds.selection_rules import Stated, labels_of
from numpy.typing import NDArray

from fleetlearn_simulator import keyed_random
from fleetlearn_simulator.population.traits import Ids, tiers_of
from fleetlearn_simulator.scenario.scenario import Scenario


def statements_of(scenario: Scenario, ids: Ids, examples: NDArray[np.int64]) -> list[Stated]:
    """Return what these devices state. ``examples``: how many each has. A device always states the
    same.

    Its tier is the scenario's, its memory and its tags are its tier's. With more than one region it
    has the tag ``region-N``."""
    names, tiers = [*scenario.tiers], [*scenario.tiers.values()]
    regions = scenario.failures.regions
    which = tiers_of(scenario, ids)
    charging, unmetered = (
        keyed_random.uniform(scenario.seed, purpose, ids).tolist()
        if any(getattr(tier, purpose) is not None for tier in tiers)
        else [0.0] * len(ids)
        for purpose in ("charging", "unmetered")
    )
    labels = {
        (number, region): labels_of(
            name, (*tier.tags, *([f"region-{region}"] if regions > 1 else []))
        )
        for number, (name, tier) in enumerate(zip(names, tiers, strict=True))
        for region in {*(ids % regions).tolist()}
    }
    rows = zip(
        which.tolist(),
        (ids % regions).tolist(),
        examples.tolist(),
        charging,
        unmetered,
        strict=True,
    )
    statements = []
    for number, region, count, power, network in rows:
        tier = tiers[number]
        statements.append(
            Stated(
                examples=count,
                runtime="onnx",
                memory=None if tier.memory is None else int(tier.memory * 2**20),
                labels=labels[number, region],
                charging=None if tier.charging is None else power < tier.charging,
                network=None
                if tier.unmetered is None
                else "unmetered"
                if network < tier.unmetered
                else "metered",
            )
        )
    return statements
