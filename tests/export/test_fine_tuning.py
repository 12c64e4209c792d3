"""Bundles of models that are mostly frozen."""

from __future__ import annotations

import copy
from pathlib import Path

import onnx
import pytest
import torch
from backbone import Classifier, classifier, images
from bundle_cache import cached_export
from by_hand import bundle_training, largest_difference, pytorch_training
from fleetlearn_export import Exported
from fleetlearn_export.inspection import graph_costs
from fleetlearn_protocol.manifest import TRAIN
from torch.nn import functional


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    folder = tmp_path_factory.mktemp("head")
    return cached_export(classifier(), functional.cross_entropy, images(8), folder / "head.bundle", train="head.*")


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
    """Where all is trained, a step costs three times the forward pass. Where the head is trained, once."""
    whole = cached_export(classifier(), functional.cross_entropy, images(8), tmp_path / "whole.bundle")
    graphs = [train_graph(head), train_graph(whole)]
    of_head, of_whole = (graph_costs.flops(graph, graph_costs.values(graph, 16)) for graph in graphs)
    convolutions = 2 * 16 * (16 * 27 * 256 + 32 * 144 * 64)
    assert of_head.products == pytest.approx(convolutions, rel=0.02)
    assert of_whole.products > 2.5 * of_head.products
    assert not any(node.op_type == "ConvTranspose" for node in graphs[0].graph.node)


def test_the_model_is_not_changed(tmp_path: Path) -> None:
    model = classifier().eval()
    before = copy.deepcopy(model.state_dict())
    cached_export(model, functional.cross_entropy, images(8), tmp_path / "head.bundle", train=["head"])
    assert all(value.requires_grad for value in model.parameters())
    assert not any(module.training for module in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
