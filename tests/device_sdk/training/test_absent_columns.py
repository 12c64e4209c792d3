"""A table that lacks a column, such as a label's name with a letter wrong: training names it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from fleetlearn_device.runtimes.checks import DataError
from fleetlearn_device.training.data import Data, as_data
from fleetlearn_device.training.open_data import open_data
from fleetlearn_device.training.task_data import TaskDataMaker
from fleetlearn_protocol.bundle import open_bundle
from fleetlearn_protocol.computations.boosting_settings import BoostColumn, BoostedTrees
from fleetlearn_protocol.computations.bundle import write_computation_bundle

TOLD = BoostedTrees(columns=(BoostColumn("radius"),), label="benign", loss="logistic")


def of_csv(folder: Path) -> Data:
    (folder / "table.csv").write_text("radius,bening\n0.5,1\n0.25,0\n")
    return open_data(folder / "table.csv")


def of_arrays(_: Path) -> Data:
    return as_data({"radius": np.float32([0.5, 0.25]), "bening": np.array([1, 0])})


@pytest.mark.parametrize("made", [of_csv, of_arrays])
def test_a_misspelt_label_is_named(tmp_path: Path, made: object) -> None:
    assert callable(made)
    bundle = open_bundle(write_computation_bundle(tmp_path / "a.bundle", "a", TOLD))
    with pytest.raises(DataError, match=r"there is no column benign, .* there are radius, bening"):
        TaskDataMaker(made(tmp_path)).of(bundle.manifest).training.fit(bundle.manifest.batch)
