"""Bundles of public examples: written, read, and compared with a device's own model."""

from __future__ import annotations

import io
from pathlib import Path

import msgspec
import numpy as np
import pytest
from fleetlearn_protocol import Bundle, open_bundle
from fleetlearn_protocol.bundle import write_inference_model
from fleetlearn_protocol.errors import BundleError
from fleetlearn_protocol.manifest import EVAL, INFER, PUBLIC, TRAIN, File, Input, Manifest
from fleetlearn_protocol.manifest_file import read_manifest, write_manifest
from fleetlearn_protocol.public_examples import (
    consensus_file,
    own_misfit,
    read_public_examples,
    write_public_bundle,
)
from plans import manifest as manifest_of_plan

X = np.arange(12, dtype=np.float32).reshape(6, 2)


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return open_bundle(write_public_bundle(tmp_path / "p.bundle", "six", {"x": X}, 3, ["accuracy"]))


def test_a_bundle_has_the_examples_and_room_for_their_scores(bundle: Bundle) -> None:
    manifest = bundle.manifest
    assert (manifest.size, manifest.version, manifest.has_graphs) == (18, 6, False)
    assert manifest.metrics == ("digest_loss", "accuracy")
    assert not bundle.parameters().any()
    (found,) = read_public_examples(bundle, manifest.batch).values()
    assert np.array_equal(found, X)
    again = write_public_bundle(bundle.path.parent / "q", "six", {"x": X}, 3, ["accuracy"])
    assert again.read_bytes() == bundle.path.read_bytes()


def test_a_model_gets_the_examples_in_its_own_type(bundle: Bundle) -> None:
    arrays = read_public_examples(bundle, (Input("x", "float64", (2,)),))
    assert arrays["x"].dtype == np.float64


def test_the_consensus_is_written_beside_the_examples(bundle: Bundle) -> None:
    scores = np.arange(18, dtype=np.float32)
    with np.load(io.BytesIO(consensus_file(bundle, scores))) as found:
        assert np.array_equal(found["x"], X)
        assert np.array_equal(found["scores"], scores.reshape(6, 3))


def test_there_is_no_model_to_write(bundle: Bundle) -> None:
    with pytest.raises(BundleError, match="each device has a model of its own, which it keeps"):
        write_inference_model(bundle, bundle.parameters())


@pytest.mark.parametrize(
    ("arrays", "classes", "text"),
    [
        ({}, 3, "the arrays are none; expected at least one"),
        ({"x": X, "z": X[:2]}, 3, r"the arrays are x \[6, 2\], z \[2, 2\]"),
        ({"x": X[:0]}, 3, "one row for each example"),
        ({"x": X}, 1, "classes is 1; expected at least 2"),
        ({"x": X}, 2**29, "can have 2147483648. Take fewer examples"),
        ({"x": X.astype(np.float16)}, 3, "array x is float16; expected one of float32"),
        ({"x": X + np.float32(np.inf)}, 3, "array x has values that are not finite"),
        ({"scores": X}, 3, "an array cannot be named scores"),
    ],
)
def test_what_cannot_be_public_examples(
    tmp_path: Path, arrays: dict[str, np.ndarray], classes: int, text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        write_public_bundle(tmp_path / "p.bundle", "p", arrays, classes)


def changed(manifest: Manifest, **changes: object) -> bytes:
    return write_manifest(msgspec.structs.replace(manifest, **changes))


def test_a_manifest_that_contradicts_itself(bundle: Bundle) -> None:
    manifest = bundle.manifest
    files = manifest.files
    graph = {**files, INFER: File("0" * 64, 1)}
    graphs = {**graph, **dict.fromkeys((TRAIN, EVAL), File("0" * 64, 1))}
    cases = {
        "they need version 6": {"version": 5},
        f"{PUBLIC} is missing": {"files": {k: v for k, v in files.items() if k != PUBLIC}},
        "beside them the file graphs/infer.onnx": {"files": graph},
        "expected one row of class scores": {
            "parameters": (msgspec.structs.replace(manifest.parameters[0], shape=(3, 6)),)
        },
        "not one array of 3 class scores": {"outputs": (Input("scores", "float32", (4,)),)},
        "what a step has": {"references": ("anchor",)},
        "the entry is missing": {"public": msgspec.UNSET, "files": graphs},
    }
    for text, changes in cases.items():
        with pytest.raises(BundleError, match=text):
            read_manifest(changed(manifest, **changes))
    assert read_manifest(changed(manifest)) == manifest


def test_which_models_can_score_them(bundle: Bundle) -> None:
    own, inputs = manifest_of_plan(), (Input("x", "float32", (2,)),)
    assert own_misfit(own, inputs, bundle.manifest) is None
    wider = (Input("x", "float32", (5,)),)
    assert "takes x float32 (n, 5); the public examples of bundle six are x float32 (n, 2)" in (
        own_misfit(own, wider, bundle.manifest) or ""
    )
    text = own_misfit(manifest_of_plan(metrics=()), inputs, bundle.manifest)
    assert "asks for the metric accuracy, and bundle digits measures the loss alone" in text  # type: ignore[operator]
    four = msgspec.structs.replace(own, outputs=(Input("scores", "float32", (4,)),))
    assert "returns scores (n, 4); bundle six asks for one array of class scores, (n, 3)" in (
        own_misfit(four, inputs, bundle.manifest) or ""
    )
