"""What devices are: shares of tiers and zones, log-normal speeds, and nothing that depends on the
population."""

import math
from pathlib import Path

import numpy as np
from fleetlearn_simulator.population.traits import offsets, tiers_of, traits
from fleetlearn_simulator.scenario.scenario import Scenario

PLAN = '[plan]\nbundle = "a.bundle"\nround.goal = 4\n'
IDS = np.arange(50_000)
TIERS = """
[tiers.slow]
like = "pi-zero-2"
share = 3
spread = 0
[tiers.fast]
speed = 2.0
download = 4e6
upload = 1e6
spread = 0.5
latency = 0.01
"""


def scenario(text: str = "", size: int = 50_000, seed: int = 5) -> Scenario:
    return Scenario.parse(
        f"seed = {seed}\n[population]\nsize = {size}\n{PLAN}{text}", Path("/base"), file="a.toml"
    )


def test_a_device_is_the_same_in_any_population_and_any_order() -> None:
    small, large = scenario(TIERS, 100), scenario(TIERS, 10_000_000)
    some = np.array([7, 99, 0, 3, 7])
    everywhere = traits(large, np.arange(100))
    for column, whole in zip(traits(small, some), everywhere, strict=True):
        assert np.array_equal(column, whole[some])
    assert not np.array_equal(
        traits(scenario(TIERS, 100, seed=6), some).speed, everywhere.speed[some]
    )


def test_without_tiers_all_devices_are_alike() -> None:
    found = traits(scenario(), IDS[:5])
    assert [column.tolist() for column in found] == [
        [0] * 5,
        [1.0] * 5,
        [2.5e6] * 5,
        [1.25e6] * 5,
        [0.05] * 5,
        [math.inf] * 5,
        [0.0] * 5,
    ]


def test_shares_of_tiers() -> None:
    """Three to one, within 4.5 standard deviations of a binomial."""
    share = float((tiers_of(scenario(TIERS), IDS) == 0).mean())
    assert abs(share - 0.75) < 4.5 * math.sqrt(0.75 * 0.25 / len(IDS))


def test_speeds_are_log_normal_around_the_tiers_median() -> None:
    """Quantiles of exp(N(log median, spread)), within 4.5 standard errors; a quantile's is sqrt(p
    (1 - p) / n) over the density there."""
    found = traits(scenario(TIERS), IDS)
    fast = found.tier == 1
    assert set(found.speed[~fast].tolist()) == {0.08}
    for values, median in ((found.speed, 2.0), (found.download, 4e6), (found.upload, 1e6)):
        standard = np.log(values[fast] / median) / 0.5
        for p, z in ((0.1, -1.2815516), (0.5, 0.0), (0.9, 1.2815516)):
            density = math.exp(-z * z / 2) / math.sqrt(2 * math.pi)
            error = math.sqrt(p * (1 - p) / fast.sum()) / density
            assert abs(np.quantile(standard, p) - z) < 4.5 * error
    speeds = np.log(found.speed[fast]), np.log(found.download[fast])
    assert abs(np.corrcoef(*speeds)[0, 1]) < 4.5 / math.sqrt(fast.sum())


def test_memory_is_the_tiers() -> None:
    found = traits(scenario(TIERS), IDS[:1000])
    assert set(found.memory[found.tier == 0].tolist()) == {256.0}
    assert set(found.memory[found.tier == 1].tolist()) == {math.inf}


def test_time_zones_and_clocks_that_are_wrong() -> None:
    zones = (
        '[availability]\nkind = "diurnal"\nzones = [{hours = -6, share = 1}, {hours = 2, share = '
        "3}]\n"
    )
    found = offsets(scenario(zones), IDS)
    assert set(found.tolist()) == {-6 * 3600.0, 2 * 3600.0}
    assert abs((found > 0).mean() - 0.75) < 4.5 * math.sqrt(0.75 * 0.25 / len(IDS))
    skewed = offsets(scenario(zones + "[failures]\nclock_skew = 60"), IDS) - found
    assert abs(skewed.std() / 60 - 1) < 4.5 / math.sqrt(2 * len(IDS))
    assert abs(skewed.mean()) < 4.5 * 60 / math.sqrt(len(IDS))
