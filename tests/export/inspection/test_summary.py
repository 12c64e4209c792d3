from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from bottom_manifest import bottom_manifest
from bundle_cache import cached_export
from fleetlearn_export import Exported, LocalStep
from fleetlearn_export.inspection.summary import Line, summary, travelling
from fleetlearn_protocol import Bundle, open_bundle, write_bundle
from fleetlearn_protocol.manifest import TRAIN, TRAIN_MANY, State, TrainMany
from torch import nn


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """Of each kind something: frozen, personal, buffers, state, references, random."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 8),
        nn.BatchNorm1d(8),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(8, 4),
        nn.Linear(4, 3),
    )
    model[0].requires_grad_(False)
    return cached_export(
        model,
        nn.functional.cross_entropy,
        (torch.randn(4, 6), torch.tensor([0, 1, 2, 0])),
        tmp_path_factory.mktemp("summary") / "all.bundle",
        step=LocalStep("adam", proximal=True, correction=True, clip=True),
        personal=["5"],
    )


def texts(groups: list[list[Line]]) -> dict[str, str]:
    """Label -> text; what goes on is joined by " | "."""
    found: dict[str, str] = {}
    label = ""
    for line in (line for group in groups for line in group):
        label = line.label or label
        found[label] = f"{found[label]} | {line.text}" if label in found else line.text
    return found


def test_everything_that_a_bundle_has(exported: Exported) -> None:
    found = texts(
        summary(
            exported.bundle,
            50,
            frozen=exported.frozen,
            without_ort_training=f"{exported.without_ort_training}\nmore",
        )
    )
    # BatchNorm: 2 x 8 trained, 2 x 8 statistics; Linear: 8 x 4 + 4, then 4 x 3 + 3, which is
    # personal.
    assert found["parameters"] == "67 in 6 tensors, trained"
    assert found["personal"] == "15 in 2 tensors, never leave the device"
    assert found["buffers"] == "16 in 2 tensors, changed by training without a gradient"
    assert found["frozen"] == "56, constants of the graphs"
    assert found["bytes per round"] == f"{4 * (52 + 16)} down, {4 * (52 + 16)} up, as float32"
    assert found["batch"] == "x: float32 (n, 6); y: int64 (n,)"
    assert found["outputs"] == "output: float32 (n, 3)"
    assert found["step"] == "adam with the proximal term, drift correction and clipped gradients"
    assert found["hyper-parameters"].startswith(
        "lr (the plan says), mu (0.0), max_norm (the plan says), beta1 (0.9)"
    )
    assert found["metrics"] == "none"
    assert found["state"].startswith("m: 268 bytes on the device | v: 268 bytes on the device | ")
    assert found["references"] == "anchor (the round's model), correction (c - c_k)"
    assert found["random"] == "yes, from the input seed"
    assert found["holds"] == (
        f"graphs of standard ONNX operators | no ort_training: {exported.without_ort_training}"
    )
    assert found["ONNX Runtime"] == "1.14 or newer, for opset 18"
    assert " with a batch of 50, " in found["FLOPs per step"]
    assert found["memory per step"].startswith("about 6")


def test_what_only_an_export_knows_is_left_out(exported: Exported) -> None:
    found = texts(summary(exported.bundle))
    assert "frozen" not in found
    assert "frozen parameters, and what the step needs" in found["constants"]
    assert found["holds"] == "graphs of standard ONNX operators | no ort_training"


def edited(bundle: Bundle, folder: Path, graph: bytes | None = None, **fields: object) -> Bundle:
    files = {name: bundle.read(name) for name in bundle.manifest.files}
    if fields.get("many"):
        files[TRAIN_MANY] = files[TRAIN]
    if graph is not None:
        files[TRAIN] = graph
    manifest = msgspec.structs.replace(bundle.manifest, **fields)
    return open_bundle(write_bundle(folder / "edited.bundle", manifest, files))


def test_train_many_and_state_that_is_kept(exported: Exported, tmp_path: Path) -> None:
    state = (State("c", (4, 3), 0, kept=True), State("d.x", (2,), 12))
    found = texts(summary(edited(exported.bundle, tmp_path, many=TrainMany(128, 10), state=state)))
    assert "train_many for 128 devices, 10 steps a call" in found["holds"]
    assert (
        found["state"] == "c: 48 bytes on the device, kept between tasks | d: 8 bytes on the device"
    )


def test_a_graph_that_cannot_be_run_here_still_has_a_summary(
    exported: Exported, tmp_path: Path
) -> None:
    # An operator that no runtime knows, in the graph of a bundle with right hashes.
    graph = exported.bundle.read(TRAIN).replace(b"LogSoftmax", b"LogSoftmix")
    found = texts(summary(edited(exported.bundle, tmp_path, graph)))
    assert "LogSoftmix 1" in found["operators"]
    assert found["costs"].startswith(
        "not measured: ONNX Runtime cannot run the graph to measure it"
    )
    assert "memory per step" not in found


def test_the_parts_of_a_split_model_say_what_travels() -> None:
    plain = bottom_manifest(split=msgspec.UNSET)
    assert travelling(plain) == [Line("bytes per round", "8 down, 8 up, as float32")]
    assert travelling(bottom_manifest()) == [
        Line("split model", "its bottom, for bank"),
        Line("bytes per row", "4 up, 4 down in each step, as float32"),
    ]
