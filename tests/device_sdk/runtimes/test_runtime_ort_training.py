from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from fleetlearn_device.runtimes.open_runtime import open_runtime
from fleetlearn_device.runtimes.runtime_ort_training import OrtTrainingRuntime
from fleetlearn_protocol import BundleError, open_bundle, read_manifest, write_manifest
from fleetlearn_protocol.manifest import File, Manifest
from fleetlearn_protocol.vector import digest, flatten, views
from line_bundle import write_line_bundle
from safetensors.numpy import save as save_safetensors

pytestmark = pytest.mark.ort_training
Cases = Callable[[str], Any]


def rewritten(case: Any, path: Path, change: Callable[[Manifest, Path], Manifest]) -> Path:
    shutil.copytree(case.path, path)
    manifest = change(read_manifest((path / "manifest.json").read_bytes()), path)
    (path / "manifest.json").write_bytes(write_manifest(manifest))
    return path


def test_a_bundle_without_the_artifacts_says_how_to_get_them(cases: Cases, tmp_path: Path) -> None:
    def without(manifest: Manifest, _: Path) -> Manifest:
        files = {
            name: file
            for name, file in manifest.files.items()
            if not name.startswith("ort_training/")
        }
        return msgspec.structs.replace(manifest, files=files)

    path = rewritten(cases("softmax"), tmp_path / "without.bundle", without)
    with pytest.raises(
        BundleError, match="export again where onnxruntime-training-cpu is installed"
    ):
        open_runtime(path, "ort-training")
    assert open_runtime(path).kind == "onnx"


def test_the_vector_is_in_the_manifests_order_whatever_onnx_runtimes_is(
    cases: Cases, tmp_path: Path
) -> None:
    # The same bundle with its parameter table turned round.
    def reverse(manifest: Manifest, path: Path) -> Manifest:
        rows, place = [], 0
        for row in reversed(manifest.parameters):
            rows.append(msgspec.structs.replace(row, offset=place))
            place += int(np.prod(row.shape))
        return msgspec.structs.replace(manifest, parameters=tuple(rows))

    case = cases("mlp")
    path = rewritten(case, tmp_path / "reversed.bundle", reverse)
    runtime, turned = open_runtime(case.path, "ort-training"), open_runtime(path, "ort-training")
    anchor = np.random.default_rng(1).normal(size=runtime.manifest.size).astype(np.float32)
    table, turned_table = runtime.manifest.parameters, turned.manifest.parameters
    runtime.load(runtime.parameters, anchor=anchor)
    turned.load(turned.parameters, anchor=flatten(views(anchor, table), turned_table))
    assert not np.array_equal(runtime.parameters, turned.parameters)
    for start in range(0, 100, 20):
        batch = case.x[start : start + 20], case.y[start : start + 20]
        assert runtime.step(batch, lr=0.1, mu=0.1) == turned.step(batch, lr=0.1, mu=0.1)
    np.testing.assert_array_equal(
        flatten(views(turned.parameters, turned_table), table), runtime.parameters
    )
    assert runtime.evaluate((case.x, case.y)) == turned.evaluate((case.x, case.y))


def test_a_checkpoint_of_another_model_is_refused(cases: Cases, tmp_path: Path) -> None:
    def rename(manifest: Manifest, path: Path) -> Manifest:
        first, *rest = manifest.parameters
        initial = open_bundle(cases("softmax").path).parameters()
        tensors = dict(views(initial, manifest.parameters))
        tensors["other"] = tensors.pop(first.name)
        content = save_safetensors(tensors)
        (path / "parameters.safetensors").write_bytes(content)
        files = manifest.files | {"parameters.safetensors": File(digest(content), len(content))}
        rows = (msgspec.structs.replace(first, name="other"), *rest)
        return msgspec.structs.replace(manifest, parameters=rows, files=files)

    path = rewritten(cases("softmax"), tmp_path / "other.bundle", rename)
    with pytest.raises(
        BundleError,
        match=r"parameter other of shape \(10, 64\); ort_training/checkpoint has \['bias', 'we",
    ):
        open_runtime(path, "ort-training")


def test_artifacts_that_cannot_be_read_are_refused(cases: Cases, tmp_path: Path) -> None:
    def damage(manifest: Manifest, path: Path) -> Manifest:
        (path / "ort_training" / "training_model.onnx").write_bytes(b"no graph at all")
        files = manifest.files | {
            "ort_training/training_model.onnx": File(digest(b"no graph at all"), 15)
        }
        return msgspec.structs.replace(manifest, files=files)

    path = rewritten(cases("softmax"), tmp_path / "damaged.bundle", damage)
    with pytest.raises(
        BundleError, match=r"onnxruntime-training [\d.]+ cannot load ort_training/: "
    ):
        open_runtime(path, "ort-training")


def test_artifacts_that_were_changed_are_refused(cases: Cases, tmp_path: Path) -> None:
    path = tmp_path / "changed.bundle"
    shutil.copytree(cases("softmax").path, path)
    checkpoint = path / "ort_training" / "checkpoint"
    content = bytearray(checkpoint.read_bytes())
    content[-5] ^= 1
    checkpoint.write_bytes(content)
    with pytest.raises(BundleError, match="ort_training/checkpoint was changed"):
        open_runtime(path, "ort-training")


def test_no_temporary_files_stay_behind(
    cases: Cases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from fleetlearn_protocol import pack_bundle

    case = cases("softmax")
    packed = pack_bundle(case.path, tmp_path / "softmax.zip")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    runtime = open_runtime(packed, "ort-training")
    assert isinstance(runtime, OrtTrainingRuntime)
    assert list(scratch.iterdir()) == []
    runtime.step((case.x[:20], case.y[:20]), lr=0.1)
    runtime.evaluate((case.x[:20], case.y[:20]))
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("has", "words"),
    [
        ({"state": True}, "a state"),
        ({"references": ("anchor", "correction", "previous")}, "a correction, the previous model"),
        ({"personal": True, "random": True}, "personal parameters, a seed"),
    ],
)
def test_a_bundle_with_more_than_it_can_do_is_refused_by_name(
    tmp_path: Path, has: dict[str, Any], words: str
) -> None:
    bundle = write_line_bundle(tmp_path / "line.bundle", **has)
    with pytest.raises(
        BundleError,
        match=f"its step has {words}, which the runtime 'ort-training' cannot run; use 'onnx'",
    ):
        open_runtime(bundle, "ort-training")


def test_its_state_is_empty_and_all_of_it_travels(cases: Cases) -> None:
    runtime = open_runtime(cases("softmax").path, "ort-training")
    assert runtime.state.shape == (0,)
    np.testing.assert_array_equal(runtime.local, runtime.parameters)
    with pytest.raises(ValueError, match="the bundle's step does not read; it reads"):
        runtime.load(runtime.parameters, previous=runtime.parameters)
