"""What ``check`` and ``doctor`` say of the functions that a device's owner allows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from fleetlearn_device.__main__ import main
from fleetlearn_device.doctor.functions import check_functions
from fleetlearn_protocol.computations.bundle import write_computation_bundle
from own_functions import EXAMPLES, points, questions


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """Data and a bundle of k-means, whose module may be imported."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    height, weight = points(1)[0]["x"].T
    np.savez(tmp_path / "mine.npz", height=height, weight=weight)
    bundle = write_computation_bundle(tmp_path / "a.bundle", "centres", questions("kmeans"))
    return str(tmp_path / "mine.npz"), str(bundle)


@pytest.mark.parametrize(
    ("allowed", "text"),
    [
        ([], "the function kmeans:sums, and the device's owner allows none"),
        (["newton:sums"], "the device's owner allows newton:sums"),
        (["kmeans:sums=kmeans:nothing"], "has no function nothing"),
        (["no_such_module:sums"], "no_such_module cannot be imported"),
        (["kmeans:sums=newton:sums"], "kmeans:sums failed: KeyError: 'model'"),
    ],
)
def test_what_is_missing_is_said(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str], allowed: list[str], text: str
) -> None:
    options = [word for each in allowed for word in ("--allow-function", each)]
    assert main(["check", *files, *options]) == 2
    shown = capsys.readouterr().out
    assert "BAD      functions" in shown
    assert text in shown


def test_the_function_is_called_with_the_data(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", *files, "--allow-function", "kmeans:sums"]) == 0
    assert "kmeans:sums returned what the bundle declares, of 130 rows" in capsys.readouterr().out


def test_without_a_bundle_the_functions_are_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    (found,) = check_functions(["kmeans:sums", "newton=newton:sums"], None)
    assert (found.state, found.found) == ("good", "runs may compute by kmeans:sums, newton")
    assert not [*check_functions([], None)]
