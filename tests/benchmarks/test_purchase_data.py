"""Customers' purchases from small files in CDNOW's form, and the model that is fitted to them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

STUDIES = Path(__file__).parents[2] / "benchmarks" / "studies"
MASTER = """ customer_id  date number_of_cds  dollar_value
 00001 19970101  1   11.77
 00001 19970115  2   20.00
 00001 19970115  3   30.00
 00002 19970325  1   12.00
 00002 19980630  5   77.00
 00003 19970102  2   20.76
"""
SAMPLE = """ 00003 0001 19970102  2   20.76
 00001 0002 19970101  1   11.77
 00001 0002 19970115  2   20.00
"""


@pytest.fixture
def purchase(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, which finds its neighbours as a study does."""
    monkeypatch.syspath_prepend(str(STUDIES))
    import _purchase_data

    return _purchase_data


@pytest.fixture
def bgnbd(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(STUDIES))
    import _purchase_bgnbd

    return _purchase_bgnbd


def write(folder: Path, master: str = MASTER) -> Path:
    files = folder / "lifetimes" / "datasets"
    files.mkdir(parents=True)
    (files / "CDNOW_master.txt").write_text(master)
    (files / "CDNOW_sample.txt").write_text(SAMPLE)
    return folder


def test_purchases_are_read(tmp_path: Path, purchase: Any) -> None:
    """Two orders of one day are one purchase."""
    found = purchase.read_purchases(write(tmp_path))
    assert found["customer"].tolist() == [0, 0, 1, 1, 2]
    assert found["day"].tolist() == [0, 14, 83, 545, 1]
    assert found["discs"].tolist() == [1, 5, 1, 5, 2]
    assert found["dollars"].tolist() == [11.77, 50.0, 12.0, 77.0, 20.76]
    assert found["sample"].tolist() == [2, 0]


def test_histories_and_windows(tmp_path: Path, purchase: Any) -> None:
    of = purchase.Purchases(**purchase.read_purchases(write(tmp_path)))
    known = purchase.histories(of, 272)
    assert known.x.tolist() == [1, 0, 0]
    assert known.t_x.tolist() == [2, 0, 0]
    assert known.age.tolist() == [272 / 7, 27, 271 / 7]
    # The day after which is looked does not count, the window's last one does.
    assert purchase.bought(of, 0, 14).tolist() == [1, 0, 1]
    assert purchase.bought(of, 272, 545).tolist() == [0, 1, 0]
    seen = purchase.features(of, 100)
    assert seen.shape == (3, purchase.FEATURES)
    assert np.isfinite(seen).all()
    # What comes later is not known yet: it changes nothing.
    cut = purchase.Purchases(*(values[[0, 1, 2, 4]] for values in of[:4]), of.sample)
    np.testing.assert_array_equal(purchase.features(cut, 100), seen)


@pytest.mark.parametrize(
    ("master", "message"),
    [
        (MASTER.replace("19980630", "19980701"), "19980701 is before 1997 or after June 1998"),
        (MASTER.replace("00002", "00004"), "not numbered from 1 without a gap"),
        (MASTER.replace("11.77", "eleven"), "other files than CDNOW's"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, purchase: Any, master: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        purchase.read_purchases(write(tmp_path, master))


HISTORIES = {
    "x": np.array([0.0, 1.0, 3.0, 12.0]),
    "t_x": np.array([0.0, 5.0, 30.0, 20.0]),
    "age": np.array([30.0, 38.0, 35.5, 39.0]),
}


def test_the_likelihood_of_the_papers_spreadsheet(bgnbd: Any) -> None:
    """Fader, Hardie and Lee, figure 1: customers 0001 (x = 2) and 0003 (x = 0)."""
    state = {"log_parameters": np.log([0.243, 4.414, 0.793, 2.426])}
    rows = {"x": [2.0, 0.0], "t_x": [30.43, 0.0], "age": [38.86, 38.86]}
    for row, expected in ((0, -9.4596), (1, -0.5538)):
        own = {name: np.array(values[row : row + 1]) for name, values in rows.items()}
        assert bgnbd.sums(state, own)["log_likelihood"] == pytest.approx(expected, abs=1e-3)


def test_gradient_and_hessian_are_those_of_the_likelihood(bgnbd: Any) -> None:
    def at(logarithms: Any) -> Any:
        return bgnbd.sums({"log_parameters": logarithms}, HISTORIES)

    begin, little = np.log([0.3, 4.0, 0.8, 2.4]), 1e-5
    steps = little * np.eye(4)
    up, down = [at(begin + each) for each in steps], [at(begin - each) for each in steps]
    for key, derivative in (("log_likelihood", "gradient"), ("gradient", "hessian")):
        pairs = zip(up, down, strict=True)
        expected = [(high[key] - low[key]) / (2 * little) for high, low in pairs]
        np.testing.assert_allclose(at(begin)[derivative], expected, atol=1e-8)


def test_devices_may_call_it(bgnbd: Any) -> None:
    from fleetlearn_device.testing import check_function

    check_function(bgnbd.sums, STUDIES / "_purchase_bgnbd.toml", HISTORIES)


def test_who_is_asked_for_no_weeks_buys_nothing(bgnbd: Any) -> None:
    """And the chance of a purchase is about the number to expect where both are small."""
    fit = np.array([0.243, 4.414, 0.793, 2.426])
    assert bgnbd.expected(fit, **HISTORIES, weeks=0.0) == pytest.approx(np.zeros(4), abs=1e-12)
    soon = bgnbd.expected(fit, **HISTORIES, weeks=1e-3)
    assert bgnbd.chance(fit, **HISTORIES, weeks=1e-3) == pytest.approx(soon, rel=1e-2)
    assert bgnbd.active(fit, **HISTORIES)[0] == 1.0


def test_cdnows_own_files(purchase: Any) -> None:
    """The histories of the sample are those that the package's table has, to its two digits."""
    from _packaged_data import is_installed, packaged_folder

    if not is_installed(purchase.CDNOW):
        pytest.skip("Lifetimes' data are not installed: make .venv/.studies")
    of = purchase.purchases()
    assert purchase.customers(of) == 23_570
    assert of.day[np.unique(of.customer, return_index=True)[1]].max() == purchase.LOOKS_BACK[-1]
    known = purchase.calibration(sample=True)
    table = packaged_folder(purchase.CDNOW) / purchase.FILES / "cdnow_customers_summary.csv"
    published = np.loadtxt(table, delimiter=",", skiprows=1)
    np.testing.assert_array_equal(known.x, published[:, 1])
    np.testing.assert_allclose(known.t_x, published[:, 2], atol=0.00501)
    np.testing.assert_allclose(known.age, published[:, 3], atol=0.00501)
    x, y = purchase.own_windows(5, 0)
    assert x.shape == (8, purchase.FEATURES)
    assert {*y.tolist()} <= {0.0, 1.0}
    assert purchase.answering(False, 1.0, 26.0).mean() == pytest.approx(0.41, abs=0.01)
