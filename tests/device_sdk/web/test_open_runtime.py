"""A bundle by itself, without a coordinator: the SDK for browsers gives the numbers of Python's
``open_runtime``."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from fleetlearn_device import open_runtime
from fleetlearn_protocol import open_bundle
from fleetlearn_protocol.bundle import write_inference_model
from web_sdk import script

TOLERANCE = 1e-5


@pytest.mark.parametrize("name", ["cnn", "personal"])
def test_it_trains_measures_and_predicts_as_python_does(
    cases: Callable[[str], Any], name: str, tmp_path: Path
) -> None:
    case = cases(name)
    x, y = case.x[:50], case.y[:50]
    np.savez(tmp_path / "data.npz", x=x, y=y)
    command = [*script("open_runtime"), case.path, tmp_path / "data.npz", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "numbers.json").read_text())

    def vector(file: str) -> Any:
        return np.fromfile(tmp_path / file, np.float32)

    runtime = open_runtime(case.path)
    np.testing.assert_array_equal(vector("initial.bin"), runtime.local)
    losses = [runtime.step((x[:20], y[:20]), lr=0.1, seed=seed) for seed in range(3)]
    np.testing.assert_allclose(found["losses"], losses, rtol=TOLERANCE)
    assert found["metrics"] == pytest.approx(runtime.metrics, rel=TOLERANCE)
    np.testing.assert_allclose(vector("parameters.bin"), runtime.parameters, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(vector("local.bin"), runtime.local, rtol=0, atol=TOLERANCE)
    expected = runtime.evaluate((x, y))
    assert found["evaluation"]["examples"] == expected.examples
    assert found["evaluation"]["loss_sum"] == pytest.approx(expected.loss_sum, rel=TOLERANCE)
    model = write_inference_model(open_bundle(case.path), np.array(runtime.local))
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    (output,) = session.run(["output"], {"x": x})
    assert found["shapes"] == [list(output.shape)] * 2
    np.testing.assert_allclose(
        vector("predicted.bin").reshape(output.shape), output, rtol=0, atol=TOLERANCE
    )
    assert found["zeros"] is True
    # what openSharedModel predicts, of the same model in a device's store
    assert found["shared"] <= TOLERANCE
    unknown, length, array, damaged, not_fetched = found["errors"]
    assert "hyper-parameters rate are not the bundle's" in unknown
    assert "a vector of 3 elements was given; expected" in length
    assert "arrays ['z'] were given; expected x float32" in array
    assert "graphs/train.onnx is not the file that the manifest names" in damaged
    assert "give `Device` the option `predicts: true`" in not_fetched
