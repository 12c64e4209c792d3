"""Wrong labels, on the devices that have them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from fleetlearn_protocol import open_bundle
from fleetlearn_simulator.data.factory import source_of
from fleetlearn_simulator.scenario.corruptions import CORRUPTIONS, corruptions_of
from line_bundle import write_line_bundle
from virtual import make_scenario


def test_some_devices_have_other_labels_and_the_same_inputs(tmp_path: Path) -> None:
    bundle = write_line_bundle(tmp_path / "line.bundle")
    hostile = [{"share": 0.4, "kind": "labels", "factor": 9.0}, {"share": 0.3, "kind": "flipped"}]
    honest = make_scenario(tmp_path, tmp_path / "line.bundle", 50)
    wrong = make_scenario(tmp_path, tmp_path / "line.bundle", 50, failures__corrupt=hostile)
    codes, _ = corruptions_of(wrong, np.arange(50))
    relabelled = codes == CORRUPTIONS.index("labels")
    assert 10 <= relabelled.sum() <= 30
    right, other = (
        source_of(honest, bundle),
        source_of(wrong, open_bundle(tmp_path / "line.bundle")),
    )
    np.testing.assert_array_equal(right.examples(np.arange(50)), other.examples(np.arange(50)))
    for device in range(50):
        (x, y), (given, labels) = right.arrays(device), other.arrays(device)
        np.testing.assert_array_equal(given, x)
        np.testing.assert_array_equal(labels, np.float32(9) - y if relabelled[device] else y)
        assert labels.dtype == y.dtype
    assert other.test() is None
