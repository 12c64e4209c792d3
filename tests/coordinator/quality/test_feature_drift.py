"""Features unlike the fleet's: the lecture's four hospitals, one with a damaged sensor."""

from __future__ import annotations

import numpy as np
import pytest
from fleetlearn_coordinator.quality.feature_drift import FeatureMoments, feature_drifts

Rows = list[np.ndarray]


def moments_of(rows: np.ndarray) -> FeatureMoments:
    means = np.nanmean(rows, axis=0)
    away = rows - means
    powers = (np.nanmean(away**order, axis=0) for order in (2, 4))
    return FeatureMoments(len(rows), np.isnan(rows).sum(axis=0), means, *powers)


def hospitals(seed: int, count: int = 4) -> Rows:
    generator = np.random.default_rng(seed)
    return [generator.uniform(-2, 2, (1000, 2)) for _ in range(count)]


def drifts(rows: Rows, alarm: float = 0.01) -> list[tuple[str, int, str]]:
    fleet = {f"hospital-{place}": moments_of(each) for place, each in enumerate(rows)}
    return [(each.device, each.feature, each.what) for each in feature_drifts(fleet, alarm)]


@pytest.mark.parametrize("seed", range(10))
def test_the_damaged_sensor_is_found_and_it_alone(seed: int) -> None:
    rows = hospitals(seed)
    assert drifts(rows) == []
    rows[2][:, 1] += 4
    assert drifts(rows) == [("hospital-2", 1, "mean")]


def test_how_far_and_how_sure() -> None:
    rows = hospitals(1)
    rows[2][:, 1] += 4
    fleet = {f"{place}": moments_of(each) for place, each in enumerate(rows)}
    (found,) = feature_drifts(fleet, 0.01)
    assert found.found.value == pytest.approx(4, abs=0.2)
    assert found.found.others == pytest.approx(0, abs=0.1)
    assert found.found.deviations > 50
    assert found.found.log10_p < -2.4


def test_a_sensor_that_stands_still_and_one_that_is_silent() -> None:
    rows = hospitals(2, 8)
    rows[5][:, 0] = 0.01
    rows[6][:400, 1] = np.nan
    found = drifts(rows)
    assert ("hospital-5", 0, "spread") in found
    assert ("hospital-6", 1, "missing") in found
    assert {device for device, _, _ in found} == {"hospital-5", "hospital-6"}


def test_fleets_that_differ_by_nature_raise_no_alarm() -> None:
    """Each device has its own mean: with 1,000 rows any two differ by many standard errors."""
    generator = np.random.default_rng(3)
    rows = [generator.normal(generator.normal(), 1, (1000, 3)) for _ in range(30)]
    assert drifts(rows) == []


def test_few_rows_are_not_judged() -> None:
    rows = [*hospitals(4), np.full((5, 2), 100.0)]
    assert drifts(rows) == []


def test_a_feature_that_only_some_devices_have_is_compared_among_these() -> None:
    wide = [np.hstack([each, each[:, :1]]) for each in hospitals(5, 5)]
    wide[0][:, 2] += 9
    assert drifts([*wide, *hospitals(6, 3)]) == [("hospital-0", 2, "mean")]


def test_a_rare_value_accuses_nobody() -> None:
    """Ink in the corner of an image: most devices have some, one by chance has none; in another
    corner one alone has any."""
    generator = np.random.default_rng(8)
    rows = [(generator.random((140, 40)) < 0.01).astype(float) for _ in range(10)]
    rows[7][:, 3] = 0.0
    for each in rows:
        each[:, 5] = 0.0
    rows[2][7, 5] = 1.0
    assert drifts(rows) == []
