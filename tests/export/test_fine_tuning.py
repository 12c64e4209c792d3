"""Bundles of models that are mostly frozen."""

from __future__ import annotations

import copy
import shutil
import subprocess
import sys
from pathlib import Path

import onnx
import onnxruntime
import pytest
import torch
from backbone import Classifier, classifier, images
from bundle_cache import cached_export
from by_hand import bundle_training, largest_difference, pytorch_training
from fleetlearn_device import open_runtime
from fleetlearn_export import Exported, LocalStep, export_bundle
from fleetlearn_export.inspection import graph_costs
from fleetlearn_export.inspection.summary import summary
from fleetlearn_export.model.frozen_weights import Stored
from fleetlearn_protocol import BundleError, pack_bundle, write_inference_model
from fleetlearn_protocol.manifest import EVAL, FROZEN, TRAIN
from onnx import TensorProto
from torch import nn
from torch.nn import functional

FEWER: list[Stored] = ["int8", "float16"]


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    folder = tmp_path_factory.mktemp("head")
    return cached_export(
        classifier(), functional.cross_entropy, images(8), folder / "head.bundle", train="head.*"
    )


class HeadOnly(Classifier):
    """The same model, as it is fine-tuned by hand in PyTorch."""

    def train(self, mode: bool = True) -> HeadOnly:
        super().train(mode)
        self.backbone.eval()
        return self


def train_graph(exported: Exported) -> onnx.ModelProto:
    return onnx.load(exported.bundle.path / TRAIN)


def test_only_the_head_travels(head: Exported) -> None:
    assert [row.name for row in head.bundle.manifest.parameters] == ["head.1.weight", "head.1.bias"]
    assert not head.bundle.manifest.random, "the frozen backbone's dropout does nothing"
    assert head.batch_of_one
    model = classifier()
    assert head.frozen == sum(value.numel() for value in model.backbone.parameters())


def test_trains_as_pytorch_does_with_the_backbone_in_evaluation_mode(head: Exported) -> None:
    model = classifier()
    model.__class__ = HeadOnly
    model.backbone.requires_grad_(False)
    batches = [images(n, seed) for seed, n in enumerate((8, 3, 8, 1))]
    found, losses = bundle_training(head.bundle, batches, 0.1)
    expected, expected_losses = pytorch_training(model, functional.cross_entropy, batches, 0.1)
    assert largest_difference(found, expected) < 1e-5
    assert losses == pytest.approx(expected_losses, abs=1e-5)
    start = dict(classifier().named_parameters())
    assert abs(found["head.1.weight"] - start["head.1.weight"].detach().numpy()).max() > 0.001


def test_the_backward_pass_stops_at_the_first_trained_layer(head: Exported, tmp_path: Path) -> None:
    """Where all is trained, a step costs three times the forward pass. Where the head is trained,
    once."""
    whole = cached_export(
        classifier(), functional.cross_entropy, images(8), tmp_path / "whole.bundle"
    )
    graphs = [train_graph(head), train_graph(whole)]
    of_head, of_whole = (
        graph_costs.flops(graph, graph_costs.values(graph, 16)) for graph in graphs
    )
    convolutions = 2 * 16 * (16 * 27 * 256 + 32 * 144 * 64)
    assert of_head.products == pytest.approx(convolutions, rel=0.02)
    assert of_whole.products > 2.5 * of_head.products
    assert not any(node.op_type == "ConvTranspose" for node in graphs[0].graph.node)


def test_the_model_is_not_changed(tmp_path: Path) -> None:
    model = classifier().eval()
    before = copy.deepcopy(model.state_dict())
    cached_export(
        model, functional.cross_entropy, images(8), tmp_path / "head.bundle", train=["head"]
    )
    assert all(value.requires_grad for value in model.parameters())
    assert not any(module.training for module in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_frozen_part_is_a_file_that_bundles_share(head: Exported, tmp_path: Path) -> None:
    files = head.bundle.manifest.files
    assert head.bundle.manifest.version == 2
    weights = sum(
        value.nbytes for name, value in classifier().backbone.named_parameters() if value.dim() > 1
    )
    transposed = 4 * 32 * 32  # the linear layer's: train.onnx has it the other way round
    assert weights < files[FROZEN].size < weights + transposed + 1024
    assert files[TRAIN].size + files[EVAL].size < 40_000
    other = cached_export(
        classifier(),
        functional.cross_entropy,
        images(8),
        tmp_path / "adam",
        train="head",
        step=LocalStep("adam"),
    )
    assert other.bundle.manifest.files[FROZEN] == files[FROZEN]
    assert other.bundle.manifest.files[TRAIN] != files[TRAIN]


def test_the_folder_and_its_zip_train_alike(head: Exported, tmp_path: Path) -> None:
    packed = pack_bundle(head.bundle.path, tmp_path / "head.zip")
    found = []
    for path in (head.bundle.path, packed):
        runtime = open_runtime(path)
        losses = [runtime.step(images(8, seed), lr=0.1) for seed in range(3)]
        found.append((losses, runtime.parameters.copy(), runtime.evaluate(images(5))))
    (one, after, sums), (other, after_other, sums_other) = found
    assert one == other
    assert (after == after_other).all()
    assert sums == sums_other


def test_a_changed_frozen_part_is_refused(head: Exported, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(head.bundle.path, tmp_path / "changed"))
    content = bytearray((folder / FROZEN).read_bytes())
    content[-1] ^= 1
    (folder / FROZEN).write_bytes(content)
    with pytest.raises(BundleError, match=r"graphs/frozen\.safetensors was changed"):
        open_runtime(folder)


def test_the_trained_model_is_one_file(head: Exported) -> None:
    content = write_inference_model(head.bundle, head.bundle.parameters())
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    x, _ = images(4)
    with torch.no_grad():
        expected = classifier().eval()(x).numpy()
    assert abs(session.run(None, {"x": x.numpy()})[0] - expected).max() < 1e-5


def test_a_summary_counts_what_is_in_the_frozen_part(head: Exported) -> None:
    lines = {line.label: line.text for group in summary(head.bundle) for line in group}
    assert "constants" in lines
    assert "FLOPs per step" in lines


class WithUnused(nn.Module):
    """A model with a mask token that nothing reads, and a head beside it that the loss does not
    read."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.ones(3))
        self.body = nn.Linear(3, 4)
        self.other = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.body(x)
        return {"classes": self.head(hidden), "other": self.other(hidden)}


def test_what_gets_no_gradient_is_frozen_and_named(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = WithUnused()

    def loss(outputs: dict[str, torch.Tensor], y: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(outputs["classes"], y)

    batches = [(torch.randn(6, 3), torch.randint(2, (6,))) for _ in range(5)]
    exported = export_bundle(
        model, loss, batches[0], tmp_path / "b", step=LocalStep("adamw", weight_decay=True)
    )
    unused = ("token", "other.0.weight", "other.0.bias", "other.1.weight", "other.1.bias")
    assert exported.without_gradient == unused
    assert all(value.requires_grad for value in model.parameters()), "the export changes no model"
    rows = {row.name: row.buffer for row in exported.bundle.manifest.parameters}
    assert [name for name, buffer in rows.items() if not buffer] == [
        "body.weight",
        "body.bias",
        "head.weight",
        "head.bias",
    ]
    # What is not trained stays in training mode, as in PyTorch.
    assert [name for name, buffer in rows.items() if buffer] == [
        "other.0.running_mean",
        "other.0.running_var",
    ]
    groups = summary(exported.bundle, without_gradient=exported.without_gradient)
    lines = {line.label: line.text for group in groups for line in group}
    assert lines["without gradient"].startswith("token, other.0.weight, ")
    plain = export_bundle(model, loss, batches[0], tmp_path / "sgd")
    weights, losses = bundle_training(plain.bundle, batches, lr=0.1)
    expected, curve = pytorch_training(model, loss, batches, lr=0.1)
    assert losses == pytest.approx(curve, abs=1e-5)
    assert largest_difference(weights, {name: expected[name] for name in weights}) < 1e-5
    assert "without gradient" not in {
        line.label for group in summary(plain.bundle) for line in group
    }


@pytest.fixture(scope="module")
def coded(tmp_path_factory: pytest.TempPathFactory) -> dict[Stored, Exported]:
    """The same model with its frozen weights in fewer bits. A BatchNorm below frozen layers is
    trained too."""
    folder = tmp_path_factory.mktemp("coded")
    return {
        stored: cached_export(
            classifier(),
            functional.cross_entropy,
            images(8),
            folder / f"{stored}.bundle",
            train=["head", "backbone.1"],
            frozen=stored,
        )
        for stored in FEWER
    }


@pytest.mark.parametrize("stored", FEWER)
def test_frozen_weights_in_fewer_bits(
    coded: dict[Stored, Exported], head: Exported, stored: Stored
) -> None:
    exported = coded[stored]
    assert exported.difference < 1e-5, "PyTorch is given the same weights"
    assert exported.effect_of_rounding is not None
    assert 0 < exported.effect_of_rounding < (0.1 if stored == "int8" else 1e-3)
    assert head.effect_of_rounding is None
    weights = sum(
        value.nbytes for name, value in classifier().backbone.named_parameters() if value.dim() > 1
    )
    transposed = 4 * 32 * 32
    share = 4 if stored == "int8" else 2
    assert exported.bundle.manifest.file(FROZEN).size < (weights + 2 * transposed) / share + 2048
    graph = train_graph(exported).graph
    codes = [row for row in graph.initializer if row.name.endswith(".codes")]
    assert len(codes) >= 2
    assert {row.data_type for row in codes} == {
        TensorProto.INT8 if stored == "int8" else TensorProto.FLOAT16
    }


@pytest.mark.parametrize("stored", FEWER)
def test_the_device_trains_from_the_codes_and_the_model_for_people_too(
    coded: dict[Stored, Exported], stored: Stored
) -> None:
    runtime = open_runtime(coded[stored].bundle.path)
    x, y = images(64)
    losses = [runtime.step((x, y), lr=0.1, seed=0) for _ in range(20)]
    assert losses[-1] < losses[0]
    evaluation = runtime.evaluate((x, y))
    content = write_inference_model(coded[stored].bundle, runtime.parameters)
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    outputs = torch.from_numpy(session.run(None, {"x": x.numpy()})[0])
    assert float(functional.cross_entropy(outputs, y)) == pytest.approx(
        evaluation.loss_sum / 64, rel=1e-4
    )


MEMORY = """
import sys
from pathlib import Path
import numpy as np
from fleetlearn_device import open_runtime
from fleetlearn_device.runtimes.import_onnxruntime import import_onnxruntime

def private():
    text = Path("/proc/self/smaps_rollup").read_text()
    return int(text.partition("Anonymous:")[2].split()[0]) // 1024

import_onnxruntime()
before = private()
runtime = open_runtime(sys.argv[1])
batch = np.zeros((4, 3, 16, 16), np.float32), np.zeros(4, np.int64)
runtime.step(batch, lr=0.1)
runtime.evaluate(batch)
print(private() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="reads /proc")
def test_both_sessions_read_the_frozen_part_where_it_is_mapped(tmp_path: Path) -> None:
    """A linear layer of 16 MiB: with its own copy in each session it would be 32 MiB or more."""
    model = classifier()
    model.backbone.add_module(
        "wide", nn.Sequential(nn.Linear(32, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU())
    )
    model.head = nn.Sequential(nn.ReLU(), nn.Linear(2048, 5))
    exported = cached_export(
        model, functional.cross_entropy, images(4), tmp_path / "wide.bundle", train="head"
    )
    assert exported.bundle.manifest.file(FROZEN).size > 2**24
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, exported.bundle.path],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert int(done.stdout) < 14
