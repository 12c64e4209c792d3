"""Bundles with which a device computes what is frozen once for each example."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from features import Encoded, encoded, examples, features_bundle
from fleetlearn_export import Exported, ExportError, LocalStep, TrainMany, export_bundle
from fleetlearn_export.checks import graph_checks
from fleetlearn_export.checks.comparison import open_session
from fleetlearn_export.graphs import feature_split
from fleetlearn_export.inspection.summary import summary
from fleetlearn_protocol.manifest import (
    EVAL,
    EVAL_FROM_FEATURES,
    FEATURES,
    FROZEN,
    OF_FEATURES,
    TRAIN,
    TRAIN_FROM_FEATURES,
    Input,
)
from torch import Tensor, nn
from torch.nn import functional

PRODUCTS = feature_split.PRODUCTS


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return features_bundle(tmp_path_factory.mktemp("kept") / "kept.bundle")


def graph_of(exported: Exported, file: str) -> onnx.ModelProto:
    return onnx.load(exported.bundle.path / file)


def operators(exported: Exported, file: str) -> list[str]:
    return [node.op_type for node in graph_of(exported, file).graph.node]


def refusal(model: nn.Module, example: Any, tmp_path: Path, **options: Any) -> str:
    given = {"train": "head", "cache_features": True, **options}
    with pytest.raises(ExportError) as caught:
        export_bundle(
            model, functional.cross_entropy, example, tmp_path / "refused.bundle", **given
        )
    assert not (tmp_path / "refused.bundle").exists()
    return str(caught.value)


def test_the_features_are_what_the_encoder_gives(kept: Exported) -> None:
    manifest = kept.bundle.manifest
    y = manifest.batch[1]
    assert manifest.features == (Input("feature0", "float32", (6,)), y)
    assert kept.difference < 1e-5
    x, _ = examples(5, seed=3)
    graph = graph_of(kept, FEATURES).SerializeToString()
    found = open_session(graph).run({"batch.x": x.numpy(), "batch.y": examples(5)[1].numpy()})[
        "batch.feature0"
    ]
    with torch.no_grad():
        assert torch.allclose(torch.from_numpy(found), encoded().eval().encoder(x), atol=1e-6)


def test_the_rest_of_a_step_holds_nothing_frozen(kept: Exported) -> None:
    assert operators(kept, FEATURES).count("Gemm") == 2
    assert PRODUCTS & set(operators(kept, EVAL_FROM_FEATURES)) == {"Gemm"}
    for file in (TRAIN_FROM_FEATURES, EVAL_FROM_FEATURES):
        graph = graph_of(kept, file).graph
        assert max((len(row.raw_data) for row in graph.initializer), default=0) < 64
        assert "batch.x" not in {row.name for row in graph.input}
        assert len(operators(kept, file)) < len(
            operators(kept, TRAIN if file == TRAIN_FROM_FEATURES else EVAL)
        )


def test_a_bundle_is_the_same_but_for_what_is_added(kept: Exported, tmp_path: Path) -> None:
    """Readers that know nothing of features, and simulators, use the other files."""
    without = features_bundle(tmp_path / "without.bundle", cache_features=False)
    files = dict(kept.bundle.manifest.files)
    assert b"features" not in without.bundle.read("manifest.json")
    added = {path: files.pop(path) for path in OF_FEATURES}
    assert files == without.bundle.manifest.files
    assert FROZEN in files
    assert sum(file.size for file in added.values()) < 15_000


@pytest.mark.parametrize(
    "options",
    [
        {"step": LocalStep("adam", proximal=True, clip=True), "hyper": {"mu": 0.1}},
        {"step": LocalStep("momentum", contrastive=True), "features": lambda outputs: outputs},
        {"frozen": "int8"},
        {"personal": ["head.bias"]},
    ],
    ids=["adam", "contrastive", "int8", "personal"],
)
def test_with_other_steps_and_coded_weights(options: dict[str, Any], tmp_path: Path) -> None:
    exported = features_bundle(tmp_path / "b", **options)
    assert [row.shape for row in exported.bundle.manifest.computed_features] == [(6,)]
    assert exported.difference < 1e-5


def test_beside_a_memory_budget_and_a_block_of_devices(tmp_path: Path) -> None:
    exported = features_bundle(
        tmp_path / "b", memory="400 MiB", batch=8, many=TrainMany(3, 2, batch=4)
    )
    assert exported.bundle.manifest.many is not None
    assert [row.shape for row in exported.bundle.manifest.computed_features] == [(6,)]


class Words(nn.Module):
    """Word numbers (n, 7) -> 3 classes, by a frozen recurrent layer; a mean over the words that are
    there."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 8)
        self.recurrent = nn.GRU(8, 12, batch_first=True)
        self.head = nn.Linear(12 + 1, 3)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.recurrent(self.words(x))
        length = (x > 0).float().mean(1, keepdim=True)
        scores: Tensor = self.head(torch.cat([states.mean(1), length], 1))
        return scores


@pytest.mark.slow
def test_a_frozen_recurrent_encoder_of_words(tmp_path: Path) -> None:
    """eval.onnx has one operator for the layer, train.onnx one for each word: the features are the
    same."""
    torch.manual_seed(0)
    x = torch.randint(0, 20, (6, 7))
    exported = export_bundle(  # a recurrent layer holds what makes no key of a cache
        Words(),
        functional.cross_entropy,
        (x, x[:, 0] % 3),
        tmp_path / "b",
        train="head",
        cache_features=True,
    )
    shapes = [row.shape for row in exported.bundle.manifest.computed_features]
    assert shapes in ([(12,)], [(13,)], [(12,), (1,)])
    assert not {"GRU", "Gather"} & set(operators(exported, EVAL_FROM_FEATURES))
    assert exported.difference < 1e-5


class WithDropout(Encoded):
    def forward(self, x: Tensor) -> Tensor:
        # the model itself is in training mode
        first = functional.dropout(self.encoder[:3](x), 0.2, self.training)
        scores: Tensor = self.head(self.encoder[3:](first))
        return scores


class WithBatchStatistics(Encoded):
    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(
            self.encoder[4:](functional.batch_norm(self.encoder[:4](x), None, None, training=True))
        )
        return scores


def line_of(model: type[nn.Module], text: str) -> str:
    lines = Path(__file__).read_text().splitlines()
    begin = next(
        number for number, line in enumerate(lines) if line.startswith(f"class {model.__name__}(")
    )
    return str(next(number for number in range(begin, len(lines)) if text in lines[number]) + 1)


def test_dropout_before_what_is_frozen_is_refused(tmp_path: Path) -> None:
    text = refusal(WithDropout(), examples(6), tmp_path)
    assert "draws random numbers" in text
    assert f"test_cache_features.py:{line_of(WithDropout, 'functional.dropout')} in forward" in text
    assert "move it behind what is frozen" in text


def test_statistics_of_the_batch_before_what_is_frozen_are_refused(tmp_path: Path) -> None:
    text = refusal(WithBatchStatistics(), examples(6), tmp_path)
    assert "depends on the other examples of the batch" in text
    assert (
        f"test_cache_features.py:{line_of(WithBatchStatistics, 'functional.batch_norm')} in forward"
        in text
    )


def test_where_nothing_is_frozen_there_is_nothing_to_keep(tmp_path: Path) -> None:
    text = refusal(encoded(), examples(6), tmp_path, train=lambda name, value: True)
    assert "lies before the first trained parameter" in text
    assert "cache_features needs train=" in refusal(encoded(), examples(6), tmp_path, train=None)


def swapped_rows(graph: onnx.ModelProto) -> None:
    """A step from the features of other examples: each example gets those of its neighbour."""
    graph.graph.initializer.append(onnx.numpy_helper.from_array(torch.tensor([1]).numpy(), "one"))
    output = graph.graph.output[0].name
    for node in graph.graph.node:
        node.output[:] = ["unshifted" if name == output else name for name in node.output]
    for name, (begin, end) in {"front": (1, 2**62), "back": (0, 1)}.items():
        for row, value in (("begin", begin), ("end", end)):
            constant = onnx.numpy_helper.from_array(torch.tensor([value]).numpy(), f"{name}.{row}")
            graph.graph.initializer.append(constant)
        inputs = ["unshifted", f"{name}.begin", f"{name}.end"]
        graph.graph.node.append(onnx.helper.make_node("Slice", inputs, [name]))
    graph.graph.node.append(onnx.helper.make_node("Concat", ["front", "back"], [output], axis=0))


def without_bias(graph: onnx.ModelProto) -> None:
    node = next(node for node in reversed(graph.graph.node) if node.op_type == "Gemm")
    del node.input[2:]


def other_activation(graph: onnx.ModelProto) -> None:
    next(node for node in graph.graph.node if node.op_type == "Tanh").op_type = "Erf"


@pytest.mark.parametrize("mutant", [swapped_rows, without_bias, other_activation])
def test_the_check_finds_other_features(
    mutant: Callable[[onnx.ModelProto], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = feature_split.features_part

    def wrong(*given: Any) -> onnx.ModelProto:
        graph = right(*given)
        mutant(graph)
        return graph

    monkeypatch.setattr("fleetlearn_export.feature_graphs.features_part", wrong)
    text = refusal(encoded(), examples(6), tmp_path)
    assert "than PyTorch" in text or "differs from PyTorch" in text


def test_the_check_finds_another_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = graph_checks.check_eval

    def check(*given: Any, before: bytes, constants: Any) -> float:
        graph = onnx.load_model_from_string(before)
        other_activation(graph)
        return right(*given, before=graph.SerializeToString(), constants=constants)

    monkeypatch.setattr("fleetlearn_export.feature_graphs.check_eval", check)
    assert "the exported evaluation differs from PyTorch" in refusal(
        encoded(), examples(6), tmp_path
    )


def test_the_summary_says_what_features_cost_and_save(kept: Exported) -> None:
    lines = {line.label: line.text for group in summary(kept.bundle) for line in group}
    assert lines["features"].startswith("feature0: float32 (n, 6); 24 bytes for each example")
