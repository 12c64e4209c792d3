"""When devices are online, against closed forms; and that the answer for one moment agrees with
that for another."""

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from fleetlearn_simulator.population.availability import next_online, online, until
from fleetlearn_simulator.population.availability_laws import HORIZON
from fleetlearn_simulator.population.traits import offsets, tiers_of
from fleetlearn_simulator.scenario.scenario import Scenario

PLAN = '[plan]\nbundle = "a.bundle"\nround.goal = 4\n'
IDS = np.arange(20_000)
KINDS = {
    "always": 'kind = "always"',
    "bernoulli": 'kind = "bernoulli"\nshare = 0.3\nslot = 600',
    "diurnal": 'kind = "diurnal"\nzones = [{hours = -5}, {hours = 3}]',
    "markov": 'kind = "markov"\non = 500\noff = 1500',
    "trace": 'kind = "trace"\nfile = "t.csv"\nrepeat = 1000',
}


def scenario(
    availability: str, failures: str = "", *, base: Path = Path("/base"), size: int = 20_000
) -> Scenario:
    text = (
        "seed = 5\n[population]\nsize = "
        f"{size}\n{PLAN}[availability]\n{availability}\n[failures]\n{failures}"
    )
    return Scenario.parse(text, base, file="a.toml")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "t.csv").write_text("device,on,off\na,0,100\nb,250.5,400\na,300,1000\n")
    return tmp_path


def close(share: float, expected: float, count: int) -> bool:
    """Within 4.5 standard deviations of a binomial share."""
    return abs(share - expected) < 4.5 * math.sqrt(expected * (1 - expected) / count)


@pytest.mark.parametrize("kind", KINDS)
def test_a_device_is_the_same_in_any_population_and_any_order(kind: str, folder: Path) -> None:
    small, large = (scenario(KINDS[kind], base=folder, size=size) for size in (100, 10_000_000))
    some = np.array([7, 99, 0, 3, 7])
    for t in (0.0, 314.0, 86_400.0 * 40):
        assert np.array_equal(online(small, some, t), online(large, np.arange(100), t)[some])
        assert np.array_equal(until(small, some, t), until(large, np.arange(100), t)[some])
    assert online(small, some[:0], 5.0).shape == until(small, some[:0], 5.0).shape == (0,)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("t", [0.0, 1234.5, 86_400.0 * 40])
def test_a_device_is_online_until_it_is_not(kind: str, t: float, folder: Path) -> None:
    """At moments up to the end of its time it is online, just after it is not; one that is offline
    has no time."""
    rule = scenario(KINDS[kind], base=folder)
    ids = IDS[:300]
    there, end = online(rule, ids, t), until(rule, ids, t)
    assert (end[~there] == t).all()
    assert (end[there] > t).all()
    if kind == "always":
        assert np.isinf(end).all()
        return
    assert 0 < there.sum() < len(ids) or kind == "trace"
    for device, last in zip(ids[there][:60].tolist(), end[there][:60].tolist(), strict=True):
        one = np.array([device])
        for fraction in (0.01, 0.3, 0.7, 0.99):
            assert online(rule, one, t + fraction * (last - t))
            assert until(rule, one, t + fraction * (last - t)) == pytest.approx(last)
        assert not online(rule, one, last + 1e-3)


def test_bernoulli_is_a_coin_for_each_slot_and_device() -> None:
    rule = scenario(KINDS["bernoulli"])
    states = np.array([online(rule, IDS, 600.0 * k) for k in range(6)])
    assert close(states.mean(), 0.3, states.size)
    assert close((states[0] & states[1]).mean(), 0.09, len(IDS))
    # Slots begin at another time for each device, so that of those that change in ten minutes a
    # third does in 200 s.
    early = online(rule, IDS, 200.0)
    assert close((states[0] != early).mean(), 2 * 0.3 * 0.7 / 3, len(IDS))


def test_bernoulli_times_online_are_geometric() -> None:
    """From any moment on, the rest of the slot (300 s on average), and 600 s more for each success
    of a coin of 0.3."""
    rule = scenario(KINDS["bernoulli"])
    times = (until(rule, IDS, 5000.0) - 5000.0)[online(rule, IDS, 5000.0)]
    deviation = math.sqrt(600**2 / 12 + 600**2 * 0.3 / 0.7**2)
    assert abs(times.mean() - (300 + 600 * 0.3 / 0.7)) < 4.5 * deviation / math.sqrt(len(times))


def test_a_share_of_one_is_for_ever_and_a_long_time_is_cut() -> None:
    assert np.isinf(until(scenario('kind = "bernoulli"\nshare = 1.0'), IDS[:3], 50.0)).all()
    end = until(scenario('kind = "bernoulli"\nshare = 0.999999'), IDS[:100], 50.0)
    assert np.median(end) == 50.0 + HORIZON


def test_the_day_swings_as_it_should() -> None:
    """share (1 + a cos(2 pi (h - peak) / 24)), with slots so short that the hour in them is one."""
    rule = scenario('kind = "diurnal"\nshare = 0.25\nswing = 4\npeak = 3\nslot = 60')
    shares = {
        hour: float(online(rule, IDS, 86_400.0 * 5 + 3600.0 * hour).mean())
        for hour in range(0, 24, 3)
    }
    for hour, share in shares.items():
        assert close(share, 0.25 * (1 + 0.6 * math.cos(2 * math.pi * (hour - 3) / 24)), len(IDS))
    error = 4.5 * math.sqrt((0.6 / 0.4 + 0.9 / 0.1) / len(IDS))  # of the logarithm of the quotient
    assert abs(math.log(shares[3] / shares[15] / 4)) < error


def test_a_zone_has_its_own_day() -> None:
    rule = scenario('kind = "diurnal"\nslot = 60\nzones = [{hours = 6}]')
    at_its_three, at_its_fifteen = (
        online(rule, IDS, 86_400.0 + 3600 * hour).mean() for hour in (21, 9)
    )
    assert close(at_its_three, 0.4, len(IDS))
    assert close(at_its_fifteen, 0.1, len(IDS))


def test_a_wrong_clock_moves_the_day() -> None:
    right, wrong = (
        scenario('kind = "diurnal"', failures) for failures in ("", "clock_skew = 30000")
    )
    assert not np.array_equal(online(right, IDS, 0.0), online(wrong, IDS, 0.0))
    # Blurred by clocks so far apart, exp(-s^2 / 2) of the swing is left: s in turns of a day, times
    # 2 pi.
    left = math.exp(-((2 * math.pi * 30000 / 86400) ** 2) / 2)
    assert close(online(wrong, IDS, 3600 * 3.0).mean(), 0.25 * (1 + 0.6 * left), len(IDS))


def test_markov_is_in_equilibrium_at_any_time() -> None:
    rule = scenario(KINDS["markov"])
    for t in (0.0, 777.0, 1e6, 1e8):
        assert close(online(rule, IDS, t).mean(), 0.25, len(IDS))


def test_markov_forgets_as_the_chain_does() -> None:
    """P(on at t | on at 0) = p + (1 - p) exp(-(1/on + 1/off) t), with p = on / (on + off)."""
    rule = scenario(KINDS["markov"])
    before = online(rule, IDS, 10_000.0)
    for later in (50.0, 375.0, 1500.0, 20_000.0):
        now = online(rule, IDS, 10_000.0 + later)
        assert close(now[before].mean(), 0.25 + 0.75 * math.exp(-later / 375), int(before.sum()))
        assert close(
            now[~before].mean(), 0.25 - 0.25 * math.exp(-later / 375), int((~before).sum())
        )


def test_markov_times_online_are_exponential() -> None:
    rule = scenario(KINDS["markov"])
    times = (until(rule, IDS, 10_000.0) - 10_000.0)[online(rule, IDS, 10_000.0)] / 500
    assert abs(times.mean() - 1) < 4.5 / math.sqrt(len(times))
    for x in (0.1, 1.0, 3.0):
        assert close((times > x).mean(), math.exp(-x), len(times))


def walk(rule: Scenario, device: int, begin: float, end: float) -> Iterator[tuple[float, float]]:
    """The times online of a device, found by asking every five seconds."""
    one, t = np.array([device]), begin
    while t < end:
        if online(rule, one, t):
            last = float(until(rule, one, t)[0])
            yield t, last
            t = last
        t += 5.0


def test_whole_times_online_have_their_mean_too() -> None:
    """Not only the rest of those met at some moment: of a few devices, one after the other."""
    rule = scenario('kind = "markov"\non = 60\noff = 30')
    times = [end - begin for device in range(12) for begin, end in walk(rule, device, 0.0, 3600.0)]
    # Met at some moment, what is left of an exponential time is one of the same mean.
    assert abs(np.mean(times) / 60 - 1) < 4.5 / math.sqrt(len(times))
    assert len(times) > 300


def test_rare_and_common_events_cost_the_same() -> None:
    """A device that is nearly always online: the search goes by its own windows, not by seconds."""
    rule = scenario('kind = "markov"\non = 20_000_000\noff = 1')
    assert online(rule, IDS[:1000], 1e9).all()
    assert abs(np.mean(until(rule, IDS, 1e9) - 1e9) / 2e7 - 1) < 4.5 / math.sqrt(len(IDS))


def test_a_trace_is_followed_and_begins_again(folder: Path) -> None:
    """Devices 0, 2, 4, ... are the file's a, devices 1, 3, ... its b."""
    once, again = (
        scenario(f'kind = "trace"\nfile = "t.csv"\n{more}', base=folder)
        for more in ("", "repeat = 2000")
    )
    ids = np.arange(4)
    assert online(once, ids, 0.0).tolist() == [True, False, True, False]
    assert online(once, ids, 100.0).tolist() == [False] * 4
    assert online(once, ids, 250.5).tolist() == [False, True, False, True]
    assert online(once, ids, 350.0).tolist() == [True] * 4
    assert until(once, ids, 350.0).tolist() == [1000.0, 400.0, 1000.0, 400.0]
    assert online(once, ids, 1000.0).tolist() == [False] * 4
    assert online(once, ids, 2050.0).tolist() == [False] * 4
    assert online(again, ids, 2050.0).tolist() == [True, False, True, False]
    assert until(again, ids, 6350.0).tolist() == [7000.0, 6400.0, 7000.0, 6400.0]


def test_a_wrong_clock_moves_a_trace(folder: Path) -> None:
    """Each device is online from 0 to 100 s and from 300 to 1000 s by its own clock."""
    rule = scenario('kind = "trace"\nfile = "t.csv"', "clock_skew = 1000", base=folder)
    ids = np.arange(0, 100, 2)
    skew = offsets(rule, ids)
    t = float(50 - skew[0])
    own = t + skew
    assert np.array_equal(
        online(rule, ids, t), ((own >= 0) & (own < 100)) | ((own >= 300) & (own < 1000))
    )
    assert until(rule, ids, t)[0] == pytest.approx(t + 50)


def test_an_outage_hides_a_region() -> None:
    rule = scenario(
        'kind = "always"', "regions = 4\noutages = [{region = 1, begin = 100, end = 200}]"
    )
    ids = np.arange(8)
    for t, hidden in ((99.0, False), (100.0, True), (199.0, True), (200.0, False)):
        assert online(rule, ids, t).tolist() == [
            not (hidden and device % 4 == 1) for device in range(8)
        ]
    # the outage is of the network, not of the device
    assert np.isinf(until(rule, ids, 150.0)).all()


def test_devices_without_the_memory_never_take_part() -> None:
    tiers = (
        "[tiers.small]\nmemory = 100\n[tiers.large]\nmemory = "
        "200\n[tiers.unknown]\n[compute]\nmemory = "
    )
    rule, enough = (scenario('kind = "always"', tiers + need) for need in ("150.0", "100.0"))
    assert np.array_equal(online(rule, IDS, 5.0), tiers_of(rule, IDS) != 0)
    assert online(enough, IDS, 5.0).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("t", [0.0, 1234.5, 86_400.0 * 40])
def test_a_device_is_next_online_when_it_was_offline_until_then(
    kind: str, t: float, folder: Path
) -> None:
    rule = scenario(KINDS[kind], base=folder)
    ids = IDS[:300]
    there, begin = online(rule, ids, t), next_online(rule, ids, t)
    assert (begin[there] == t).all()
    assert (begin[~there] > t).all()
    for device in ids[~there][:40]:
        one, first = np.array([device]), float(begin[device])
        # a trace's times are rounded to a millisecond
        assert online(rule, one, first + 0.002).all()
        for part in (0.001, 0.3, 0.7, 0.999):
            assert not online(rule, one, t + part * (first - t) - 1e-6).any() or first - t < 0.01


def test_who_is_never_online_again_and_who_waits_for_the_network(folder: Path) -> None:
    once = scenario('kind = "trace"\nfile = "t.csv"', base=folder)
    # Device a: 0 to 100 and 300 to 1000; device b: 250.5 to 400.
    assert next_online(once, np.arange(2), 150.0).tolist() == [300.0, 250.5]
    assert next_online(once, np.arange(2), 300.0).tolist() == [300.0, 300.0]
    assert np.isinf(next_online(once, np.arange(2), 1000.0)).all()
    outages = scenario(
        'kind = "always"', "regions = 2\noutages = [{region = 1, begin = 10.0, end = 20.0}]"
    )
    assert next_online(outages, np.arange(4), 15.0).tolist() == [15.0, 20.0, 15.0, 20.0]
    tiers = "[compute]\nmemory = 100\n[tiers.a]\nmemory = 50\n[tiers.b]\n"
    small = Scenario.parse(
        f"seed = 5\n[population]\nsize = 99\n{PLAN}{tiers}", folder, file="a.toml"
    )
    assert np.array_equal(
        np.isinf(next_online(small, np.arange(99), 0.0)), tiers_of(small, np.arange(99)) == 0
    )
