"""What a soak says of figures that are known."""

import pytest

from benchmarks._growth import BOUNDS, PAGES, growths

FLAT = dict.fromkeys((*BOUNDS, "database, KiB", "identities, KiB", "rounds", "changes"), 10.0)


def test_neither_the_start_nor_one_sample_decides() -> None:
    started = [FLAT | {"RSS, MiB": 10.0 * min(number, 50)} for number in range(101)]
    assert growths(started)["RSS, MiB"] == pytest.approx(0.0)
    assert 0 < growths([*started[:-1], FLAT | {"RSS, MiB": 550.0}])["RSS, MiB"] < 6, (
        "one is 50 MiB above the others"
    )


def test_a_slow_leak_is_what_it_adds_over_the_second_half() -> None:
    rows = [FLAT | {"RSS, MiB": 1.0 * number} for number in range(101)]
    assert growths(rows)["RSS, MiB"] == pytest.approx(50.0)


def test_databases_are_divided_by_what_stays_in_them() -> None:
    rows = [FLAT | {"rounds": 2.0 * number, "database, KiB": 6.0 * number} for number in range(101)]
    assert growths(rows)["database, KiB a round"] == pytest.approx((300 - PAGES) / 100)
    assert growths(rows)["identities, KiB a change"] == 0.0


def test_one_sample_says_nothing() -> None:
    assert set(growths([FLAT]).values()) == {0.0}
