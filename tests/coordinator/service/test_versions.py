"""The versions of a run's model, as people see them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from fleetlearn_coordinator import Plan
from fleetlearn_coordinator.service.versions import compare
from fleetlearn_coordinator.service.views.model_views import model_views
from fleetlearn_coordinator.storage.errors import StoreError
from fleetlearn_coordinator.storage.find_storage import find_storage
from fleetlearn_coordinator.storage.ledger import (
    ExchangeBegun,
    ExchangeEnded,
    ModelMade,
    RoundClosed,
    RoundOpened,
)
from fleetlearn_coordinator.storage.store import open_store
from fleetlearn_protocol import open_bundle
from fleetlearn_protocol.vector import digest
from peers import PERSONAL, SIZE, plan_text, write_personal_bundle


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    """Three versions: of zeros, of ones, and with two elements of 4; and one whose file is gone."""
    bundle = write_personal_bundle(tmp_path / "test.bundle")
    settings = {"models__last": 1, "models__best": 1, "models__metric": "accuracy"}
    plan = Plan.parse(plan_text(bundle, tmp_path / "run", **settings), tmp_path)
    store = open_store(plan.data_dir, open_bundle(bundle).sha256)
    vectors = [np.zeros(SIZE - PERSONAL, np.float32), np.ones(SIZE - PERSONAL, np.float32)]
    vectors += [vectors[1].copy(), vectors[1]]
    vectors[2][:2] = 4.0
    for version, vector in enumerate(vectors):
        if version:
            store.write([RoundOpened(version, 0.0)])
        summary = {
            "change": version / 2,
            "metrics": {"accuracy": 0.9 - version / 10},
            "behind": {"accuracy": 5},
        }
        rows = store.write_model(ModelMade(version, digest(vector), version, 5.0), vector, {})
        store.write([*rows, RoundClosed(version, "committed", summary, 5.0)] if version else rows)
    vector = vectors[1]
    store.write(
        store.write_model(ModelMade(4, digest(vector), 0, 6.0, restores=1), vector, {}, [3])
    )
    measured = {"metrics": {"loss": 0.25}, "behind": {}}
    begun = ExchangeBegun("evaluation", 1, 1, 2, None, None, 1.0)
    store.write([begun, ExchangeEnded("evaluation", 1, 1, "valid", measured, 2.0)])
    find_storage(plan.data_dir).held_out.write(1, {"examples": 3, "metrics": {"accuracy": 0.75}})
    store.close()
    return plan


def test_each_version_has_its_reason_and_what_was_measured_of_it(plan: Plan) -> None:
    rows = model_views(plan, gone=True)
    assert [row.version for row in model_views(plan)] == [0, 1, 2, 4]
    assert [row.version for row in model_views(plan, most=2)] == [2, 4]
    assert [(row.version, row.round, row.restores, row.change) for row in rows] == [
        (0, None, None, None),
        (1, 1, None, 0.5),
        (2, 2, None, 1.0),
        (3, 3, None, 1.5),
        (4, None, 1, None),
    ]
    assert [row.kept for row in rows] == ["initial", "needed", "needed", None, "newest"]
    assert rows[3].size is None
    assert all(
        row.size is not None and row.size > 4 * (SIZE - PERSONAL)
        for row in rows
        if row.version != 3
    )
    assert [row.metrics.get("round") for row in rows] == [
        {"accuracy": 0.8}, {"accuracy": 0.7}, {"accuracy": pytest.approx(0.6)}, None, None
    ], "a round measures the version that it begins from"  # fmt: skip
    assert rows[1].metrics["held-out"] == {"accuracy": 0.75}
    assert rows[2].metrics["evaluation"] == {"loss": 0.25}


def test_two_versions_beside_each_other(plan: Plan) -> None:
    """By hand: two elements differ by 3."""
    size = SIZE - PERSONAL
    found = compare(plan, 1, 2)
    assert found.distance == pytest.approx(18**0.5)
    other = size - 2 + 32
    assert found.norms == pytest.approx((size**0.5, other**0.5))
    assert found.cosine == pytest.approx((size - 2 + 8) / (size * other) ** 0.5)
    (row,) = found.parameters
    assert (row.name, row.shape, row.largest) == ("w", (size,), 3.0)
    assert (row.change, row.norm) == pytest.approx((18**0.5, size**0.5))
    assert found.metrics["round"]["accuracy"] == (0.7, pytest.approx(0.6))
    assert found.metrics["held-out"]["accuracy"] == (0.75, None)
    assert found.metrics["evaluation"]["loss"] == (None, 0.25)
    assert compare(plan, 0, 1).cosine is None
    assert compare(plan, 1, 4).distance == 0.0
    with pytest.raises(StoreError, match="has no model of version 3"):
        compare(plan, 1, 3)
