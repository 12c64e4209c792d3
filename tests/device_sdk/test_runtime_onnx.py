from __future__ import annotations

import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from fleetlearn_device.runtime import open_runtime
from fleetlearn_device.runtime_onnx import OnnxRuntime, StepError, borrow
from fleetlearn_protocol import BundleError, open_bundle, read_manifest, write_manifest
from fleetlearn_protocol.manifest import EVAL, TRAIN, File
from fleetlearn_protocol.vector import digest, views

Cases = Callable[[str], Any]


def address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


def opened(case: Any) -> OnnxRuntime:
    runtime = open_runtime(case.path)
    assert isinstance(runtime, OnnxRuntime)
    return runtime


def test_an_ort_value_borrows_the_arrays_memory() -> None:
    vector = np.arange(6, dtype=np.float32)
    value = borrow(vector[2:].reshape(2, 2))
    assert value.data_ptr() == address(vector) + 8
    vector[2] = 9
    assert value.numpy()[0, 0] == 9


def test_steps_write_into_the_flat_buffers_themselves(cases: Cases) -> None:
    case = cases("cnn")
    runtime = opened(case)
    buffers = {address(runtime.parameters)}
    for step in range(4):
        binding, target = runtime._binding, runtime._next
        expected = {f"next.param.{name}": address(a) for name, a in views(target, runtime.manifest.parameters).items()}
        runtime.step((case.x[:20], case.y[:20]), lr=0.1)
        written = dict(zip(_bound(runtime), binding.get_outputs(), strict=True))
        assert {name: written[name].data_ptr() for name in expected} == expected
        assert address(runtime.parameters) == address(target)
        buffers.add(address(runtime.parameters))
        assert len(buffers) == 2, step


def _bound(runtime: OnnxRuntime) -> list[str]:
    """The outputs in the order in which they were bound."""
    names = [row.name for row in runtime.manifest.parameters]
    return ["loss", *(f"metric.{name}" for name in runtime.manifest.metrics), *(f"next.param.{name}" for name in names)]


def test_a_step_allocates_nothing_of_the_models_size_in_python(cases: Cases) -> None:
    case = cases("cnn")
    runtime = opened(case)
    batch = case.x[:20], case.y[:20]
    runtime.step(batch, lr=0.1)
    tracemalloc.start()
    try:
        for _ in range(5):
            runtime.step(batch, lr=0.1)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < runtime.manifest.size * 4 / 4, f"{peak} bytes at peak; the model has {runtime.manifest.size * 4}"


def test_what_training_read_before_is_still_there_after_one_step(cases: Cases) -> None:
    case = cases("softmax")
    runtime = opened(case)
    before = runtime.parameters
    kept = before.copy()
    runtime.step((case.x[:20], case.y[:20]), lr=0.1)
    np.testing.assert_array_equal(before, kept)
    assert not np.array_equal(runtime.parameters, kept)


def test_a_step_that_fails_inside_onnx_runtime_changes_nothing(cases: Cases, capfd: pytest.CaptureFixture[str]) -> None:
    case = cases("softmax")
    runtime = opened(case)
    batch = case.x[:20], case.y[:20]
    runtime.step(batch, lr=0.1)
    before, metrics = runtime.parameters.copy(), runtime.metrics
    with pytest.raises(
        StepError, match=r"could not run graphs/train.onnx on a batch of shapes \[\(20, 64\), \(20,\)\]: "
    ):
        runtime.step((case.x[:20], np.full(20, 10)), lr=0.1)
    np.testing.assert_array_equal(runtime.parameters, before)
    assert runtime.metrics == metrics
    # And it trains on as if nothing had been.
    loss = runtime.step(batch, lr=0.1)
    again = opened(case)
    again.step(batch, lr=0.1)
    assert again.step(batch, lr=0.1) == loss
    np.testing.assert_array_equal(runtime.parameters, again.parameters)
    assert capfd.readouterr().err == ""


def test_arrays_that_the_caller_drops_are_kept_for_the_step(cases: Cases) -> None:
    case = cases("softmax")
    runtime, other = opened(case), opened(case)
    for start in range(0, 200, 20):
        x, y = case.x[start : start + 20], case.y[start : start + 20]
        assert runtime.step((x.astype(np.float64), y.astype(np.uint8)), lr=0.1) == other.step((x, y), lr=0.1)


def test_the_eval_graph_is_loaded_when_it_is_first_needed(cases: Cases, tmp_path: Path) -> None:
    case = cases("softmax")
    path = tmp_path / "copy.bundle"
    shutil.copytree(case.path, path)
    runtime = open_runtime(open_bundle(path))
    (path / EVAL).unlink()
    runtime.step((case.x[:20], case.y[:20]), lr=0.1)
    with pytest.raises(BundleError, match=r"cannot load graphs/eval.onnx"):
        runtime.evaluate((case.x[:20], case.y[:20]))


def changed(case: Any, path: Path, train: bytes) -> Path:
    """A copy of the bundle with another train.onnx, of which its manifest knows."""
    shutil.copytree(case.path, path)
    manifest = read_manifest((path / "manifest.json").read_bytes())
    files = manifest.files | {TRAIN: File(digest(train), len(train))}
    (path / TRAIN).write_bytes(train)
    (path / "manifest.json").write_bytes(write_manifest(msgspec.structs.replace(manifest, files=files)))
    return path


def test_a_graph_that_onnx_runtime_cannot_read_is_named(cases: Cases, tmp_path: Path) -> None:
    path = changed(cases("softmax"), tmp_path / "bad.bundle", b"no graph at all")
    with pytest.raises(BundleError, match=r"ONNX Runtime [\d.]+ cannot load graphs/train.onnx: "):
        open_runtime(path)


def test_a_graph_with_other_names_than_the_manifest_is_refused(cases: Cases, tmp_path: Path) -> None:
    other = cases("plain").path / TRAIN
    path = changed(cases("softmax"), tmp_path / "mixed.bundle", other.read_bytes())
    with pytest.raises(BundleError) as caught:
        open_runtime(path)
    assert (
        "graphs/train.onnx and the manifest differ in these inputs: ['anchor.bias', 'anchor.weight', 'hyper.mu']"
        in str(caught.value)
    )
