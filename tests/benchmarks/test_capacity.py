"""What a fleet takes, worked out by hand, and a day of a small one."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import _simulated_day
import capacity

# The files' names are other packages' too, such as float16: nobody else is to find them.
BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")
sys.path[:] = [path for path in sys.path if not path.startswith(BENCHMARKS)]

COSTS = capacity.Costs(0.1, 0.4, 0.5, 0.2, 1.0, 2.0, 0.048, 0.002, 16.0, 1.0)
USE = capacity.Use(86_400_000, 1.0, 0.1, 1.5, 100.0, 1.0, 2**20 / 1e6, 2**20 / 1e6, 2.0, 0.5)


def test_what_a_fleet_takes_by_hand() -> None:
    need = capacity.needed(COSTS, USE)
    assert (need.check_ins_per_s, need.updates_per_s) == pytest.approx((2000, 200))
    assert need.connected == pytest.approx(200 * 1.5 * 100 * 2)
    # check-ins 800 ms, updates 200 (1 + 2 * 1.25) ms, 60,000 devices at 0.001 + 0.002 ms a second
    assert need.gateway_cores == pytest.approx((800 + 700 + 180) / 1000 / 0.5)
    assert need.engine_cores == pytest.approx((200 + 200 * 0.7) / 1000 / 0.5)
    assert (need.gateways, need.engines) == (4, 1)
    assert need.gateway_gib == pytest.approx((60_000 * 16 / 1024 + 4 * 70) / 1024)
    assert need.tb_up == pytest.approx(8_640_000 * 2**20 / 1e12)
    assert need.gbit_down == pytest.approx(8 * 300 * 2**20 / 1e9)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--devices", "1e6", "-5"], "--devices -5: 0 or more is expected"),
        (["--load", "60"], "--load 60: a share of a core is expected"),
    ],
)
def test_numbers_that_no_fleet_has_are_refused(
    words: list[str],
    error: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["capacity.py", *words])
    with pytest.raises(SystemExit):
        capacity.parse()
    assert error in capsys.readouterr().err


def test_money_by_hand() -> None:
    need = capacity.needed(COSTS, USE)
    money = capacity.monthly(need, capacity.Prices(0.1, 0.01, 0.05))
    assert money["processors"] == pytest.approx(720 * 5 * 0.1)
    assert money["bytes out"] == pytest.approx(30 * need.tb_down * 1000 * 0.05)


def test_costs_of_two_sizes_are_a_line() -> None:
    storm = dict.fromkeys(
        (
            "engine_ms_per_check_in",
            "gateway_ms_per_check_in",
            "gateway_kib_per_connection",
            "kernel_kib_per_connection",
            "engine_kib_per_connection",
        ),
        1.0,
    )
    idle = {"gateway_us_per_sign_of_life": 40.0, "silent_gateways_cpu_ms_per_s": 100.0}
    found = [
        {
            "settings": {"size": mib * 2**18, "devices": 1000},
            "results": {
                "storm": storm,
                "idle": idle,
                "rounds": {
                    "engine_ms_per_update": 3.0 + 2.0 * mib,
                    "gateway_ms_per_update": 1.0 + 4.0 * mib,
                },
            },
        }
        for mib in (1, 4)
    ]
    costs = capacity.costs_of(*found)
    assert costs[2:6] == pytest.approx((3.0, 2.0, 1.0, 4.0))
    assert (costs.sign_of_life, costs.idle_second, costs.connection_kib) == (0.04, 0.1, 2.0)


def test_the_measured_costs_are_there() -> None:
    content = json.loads(capacity.COSTS.read_text())
    plain, tls = (capacity.Costs(**content[part]["costs"]) for part in ("plain", "tls"))
    assert min(plain + tls) >= 0
    assert plain.gateway_check_in < tls.gateway_check_in
    assert plain.connection_kib < tls.connection_kib


def test_costs_are_saved_beside_the_others(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    capacity.save(file, {"machine": {}, "settings": {"tls": True}}, COSTS)
    other = COSTS._replace(engine_mib=7.0)
    capacity.save(file, {"machine": {}, "settings": {"tls": False}}, other)
    content = json.loads(file.read_text())
    assert capacity.Costs(**content["tls"]["costs"]) == COSTS
    assert capacity.Costs(**content["plain"]["costs"]) == other


def test_a_day_of_a_small_fleet() -> None:
    """What follows from the first check-ins is the real engine's doing."""
    told: list[_simulated_day.Hour] = []
    steering = {"connected": 30, "check_ins": 1.0, "longest": 3600.0}
    day = _simulated_day.simulate_day(600, 10, steering, 2, told.append)
    assert day == told
    first, second = day
    assert first.devices <= first.check_ins
    assert first.devices <= second.devices <= 600
    assert second.connected <= 30 + 13
    assert all(hour.rounds >= 5 and hour.reports == 10 * hour.rounds for hour in day)
    use = capacity.use_of(day, USE)
    assert use.devices == second.devices
    assert use.check_ins == pytest.approx(
        12 * (first.check_ins + second.check_ins) / second.devices
    )
