"""Models that return their own loss, in each form that people write, and batches that are dicts."""

from __future__ import annotations

import copy
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnxruntime
import pytest
import torch
from by_hand import pytorch_training
from fleetlearn_device import open_runtime
from fleetlearn_export import ExportError, LocalStep, export_bundle
from fleetlearn_export.distillation import distillation_of
from fleetlearn_export.model.arguments import arranged
from fleetlearn_export.model.returned_loss import called_by_name, returned_loss
from fleetlearn_protocol.manifest import EVAL, INFER
from fleetlearn_protocol.vector import views
from torch import Tensor, nn
from torch.nn import functional

WORDS, CLASSES = 11, 3


class ModelOutput(OrderedDict[str, Any]):
    """A dict with attributes, as transformers returns it."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class TextModel(nn.Module):
    """A classifier of texts as transformers' are: called by name, with a pooler that the loss does
    not read, and a table of positions without ``requires_grad``."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 8)
        self.positions = nn.Parameter(torch.randn(5, 8), requires_grad=False)
        self.pooler = nn.Linear(8, 8)
        self.head = nn.Linear(8, CLASSES)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None
    ) -> ModelOutput:
        hidden = (self.words(input_ids) + self.positions) * attention_mask[..., None]
        hidden = hidden.sum(1) / attention_mask.sum(1, keepdim=True)
        found = ModelOutput(logits=self.head(hidden), pooled=self.pooler(hidden))
        if labels is not None:
            found["loss"] = functional.cross_entropy(found.logits, labels)
        return found


def texts(n: int, seed: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 6, (n, 1), generator=random)
    return {  # the labels are not the last array, as a data set may have them
        "labels": torch.randint(CLASSES, (n,), generator=random),
        "input_ids": torch.randint(WORDS, (n, 5), generator=random),
        "attention_mask": (torch.arange(5) < lengths).long(),
    }


def accuracy(outputs: ModelOutput, labels: Tensor) -> Tensor:
    return (outputs.logits.argmax(1) == labels).float()


STEPS: list[tuple[LocalStep, Any, dict[str, float]]] = [
    (LocalStep(), torch.optim.SGD, {"lr": 0.1}),
    (LocalStep("adamw"), torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    (
        LocalStep("sgd", weight_decay=True),
        torch.optim.SGD,
        {"lr": 0.1, "weight_decay": 0.05},
    ),
    (
        LocalStep("nesterov", weight_decay=True),
        partial(torch.optim.SGD, nesterov=True),
        {"lr": 0.1, "weight_decay": 0.05, "momentum": 0.9},
    ),
    (LocalStep("adam", weight_decay=True), torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1}),
]
OFTEN = 3
"""Of these the first are trained by the fast tests."""


@pytest.mark.parametrize(
    ("step", "optimizer", "hyper"),
    [*STEPS[:OFTEN], *(pytest.param(*row, marks=pytest.mark.slow) for row in STEPS[OFTEN:])],
    ids=["sgd", "adamw", "decay", "nesterov with decay", "adam with decay"],
)
def test_trains_as_pytorch_does(
    step: LocalStep,
    optimizer: Any,
    hyper: dict[str, float],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """PyTorch's optimizer gets all parameters, as people give them, and skips those that have no
    gradient. The devices' batches are dicts, of other sizes than the example."""
    torch.manual_seed(0)
    model = TextModel()
    before = copy.deepcopy(model.state_dict())
    exported = export_bundle(
        model, example=texts(4, 0), path=tmp_path / "b", step=step, metrics={"accuracy": accuracy}
    )
    assert not model._forward_pre_hooks
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert exported.without_gradient == ("pooler.weight", "pooler.bias")
    (line,) = [row.message for row in caplog.records if row.name == "fleetlearn.export"]
    assert line.startswith("the loss does not depend on pooler.weight, pooler.bias: left alone, as")
    batches = [texts(n, seed) for seed, n in enumerate([6, 3] * 6 + [1], 1)]

    updates = optimizer(model.parameters(), **hyper)
    curve = []
    for batch in batches:
        updates.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        updates.step()
        curve.append(loss.item())
    runtime = open_runtime(exported.bundle.path)
    rows = [{name: value.numpy() for name, value in batch.items()} for batch in batches]
    losses = [runtime.step(row, **hyper) for row in rows]
    assert losses == pytest.approx(curve, abs=1e-5)
    trained = views(runtime.parameters, exported.bundle.manifest.parameters)
    after = model.state_dict()
    assert set(trained) == {"words.weight", "head.weight", "head.bias"}
    for name, value in trained.items():
        np.testing.assert_allclose(value, after[name].numpy(), atol=1e-5)
    for name in after.keys() - trained.keys():
        assert torch.equal(after[name], before[name]), f"PyTorch trains {name}, and we do not"

    found = runtime.evaluate(rows[0])
    with torch.no_grad():
        expected = model(**batches[0])
    assert found.loss_sum == pytest.approx(6 * expected.loss.item(), abs=1e-4)
    hits = accuracy(expected, batches[0]["labels"]).sum().item()
    assert found.metric_sums == {"accuracy": hits}


def test_what_is_frozen_is_in_the_model_for_use_bit_for_bit(tmp_path: Path) -> None:
    """``pooled`` is an output alone: its layer has no gradient, and is the same as before."""
    torch.manual_seed(0)
    model = TextModel()
    step = LocalStep("adam", proximal=True, weight_decay=True)
    exported = export_bundle(model, example=texts(4, 0), path=tmp_path / "b", step=step)
    session = onnxruntime.InferenceSession(exported.bundle.path / INFER)
    assert [row.name for row in session.get_inputs()] == ["input_ids", "attention_mask"]
    assert [row.name for row in session.get_outputs()] == ["output_logits", "output_pooled"]
    batch = texts(3, 1)
    inputs = {name: value.numpy() for name, value in batch.items() if name != "labels"}
    with torch.no_grad():
        expected = model(**batch)
    logits, pooled = session.run(None, inputs)
    np.testing.assert_allclose(logits, expected.logits.numpy(), atol=1e-6)
    np.testing.assert_allclose(pooled, expected.pooled.numpy(), atol=1e-6)


class Pair(NamedTuple):
    logits: Tensor
    loss: Tensor


@dataclass
class Record:
    logits: Tensor
    loss: Tensor | None = None


FORMS = {
    "tuple": lambda logits, loss: (logits, loss),
    "named tuple": lambda logits, loss: Pair(logits, loss),
    "dict": lambda logits, loss: {"loss": loss, "logits": logits, "norm": logits.norm()},
    "dataclass": lambda logits, loss: Record(logits, loss),
    "another name": lambda logits, loss: {"cost": loss, "logits": logits},
}


class Returning(nn.Linear):
    """A model that needs its labels, by place."""

    def __init__(self, form: Any) -> None:
        super().__init__(3, 2)
        self.form = form

    def forward(self, x: Tensor, y: Tensor) -> Any:
        logits = super().forward(x)
        return self.form(logits, functional.cross_entropy(logits, y))


@pytest.mark.parametrize("form", FORMS)
def test_each_form_of_a_returned_loss(form: str) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(4, 3), torch.tensor([0, 1, 1, 0])
    model = Returning(FORMS[form])
    logits = nn.Linear.forward(model, x)
    expected = functional.cross_entropy(logits, y)
    assert torch.equal(returned_loss(model(x, y), y), expected)


def test_a_tuple_of_arrays_and_a_dataclass(tmp_path: Path) -> None:
    """The labels are a required argument; what the outputs do not depend on, infer.onnx does not
    take."""
    torch.manual_seed(0)
    random = torch.Generator().manual_seed(1)
    batches = [
        (torch.randn(5, 3, generator=random), torch.randint(2, (5,), generator=random))
        for _ in range(6)
    ]
    model = Returning(FORMS["dataclass"])
    exported = export_bundle(model, example=batches[0], path=tmp_path / "b")
    assert [row.name for row in exported.bundle.manifest.batch] == ["x", "y"]
    session = onnxruntime.InferenceSession(exported.bundle.path / INFER)
    assert [row.name for row in session.get_inputs()] == ["x"]
    runtime = open_runtime(exported.bundle.path)
    losses = [runtime.step((x.numpy(), y.numpy()), lr=0.1) for x, y in batches]
    plain = nn.Linear(3, 2)
    plain.load_state_dict(model.state_dict())
    _, curve = pytorch_training(plain, functional.cross_entropy, batches, lr=0.1)
    assert losses == pytest.approx(curve, abs=1e-5)


class Decoding(nn.Module):
    """A model whose outputs depend on the labels, as a decoder that is told the words before."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 4)
        self.head = nn.Linear(4, WORDS)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        before = functional.pad(labels, (1, 0))[:, :-1]
        logits = self.head(self.words(before) + self.words(input_ids))
        return {
            "loss": functional.cross_entropy(logits.flatten(0, 1), labels.flatten()),
            "logits": logits,
        }


def test_labels_that_the_outputs_depend_on_are_inputs_of_the_model_for_use(tmp_path: Path) -> None:
    words = torch.randint(WORDS, (4, 5))
    example = {"input_ids": words, "labels": words.flip(1)}
    exported = export_bundle(Decoding(), example=example, path=tmp_path / "b")
    session = onnxruntime.InferenceSession(exported.bundle.path / INFER)
    assert [row.name for row in session.get_inputs()] == ["input_ids", "labels"]


def test_a_dict_with_a_loss_of_ones_own(tmp_path: Path) -> None:
    """The model is called by name and without labels; the loss gets these in the dict's order."""
    torch.manual_seed(0)

    def loss(outputs: ModelOutput, labels: Tensor, weight: Tensor) -> Tensor:
        return (functional.cross_entropy(outputs.logits, labels, reduction="none") * weight).mean()

    model = TextModel()
    example = {**texts(4, 0), "weight": torch.rand(4)}
    exported = export_bundle(
        model, loss, example, tmp_path / "b", targets=["labels", "weight"], train="head"
    )
    names = [row.name for row in exported.bundle.manifest.batch]
    assert names == ["input_ids", "attention_mask", "labels", "weight"]
    runtime = open_runtime(exported.bundle.path)
    found = runtime.step({name: value.numpy() for name, value in example.items()}, lr=0.1)
    weight = example.pop("weight")
    with torch.no_grad():
        assert found == pytest.approx(loss(model(**example), example["labels"], weight).item())
    assert EVAL in exported.bundle.manifest.files


@pytest.mark.parametrize(
    ("outputs", "text"),
    [
        (torch.ones(3), r"returns a tensor of shape \(3,\)"),
        ("text", "returns the type str"),
        ({"loss": torch.ones(3)}, r"a loss of shape \(3,\); .*return its mean"),
        ({"loss": None, "logits": torch.ones(3, 2)}, r"no loss \(loss: NoneType, logits: float32"),
        ((torch.ones(3), torch.ones(2)), r"no scalar \(0: float32 \(3,\), 1: float32 \(2,\)\)"),
        (
            {"box": torch.tensor(1.0), "mask": torch.tensor(2.0)},
            r"several scalars .* a dict in which the one to train on is named loss",
        ),
    ],
)
def test_outputs_without_a_loss_are_refused(outputs: Any, text: str) -> None:
    with pytest.raises(ExportError, match=f"(?s)loss= was not given, .*{text}.*or give loss="):
        returned_loss(outputs)


def test_a_model_that_returns_no_loss_is_refused_with_what_it_returns(tmp_path: Path) -> None:
    example = texts(4, 0)
    del example["labels"]
    with pytest.raises(ExportError, match=r"no scalar \(logits: float32 \(4, 3\), pooled"):
        export_bundle(TextModel(), example=example, path=tmp_path / "b")
    with pytest.raises(ExportError, match=r"a tensor of shape \(4, 2\)"):
        export_bundle(nn.Linear(3, 2), example=(torch.ones(4, 3),), targets=0, path=tmp_path / "b")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"names": ["x", "y", "z"]}, "names=.* the example is a dict, whose keys"),
        ({"targets": 1}, "targets=1 .* a dict; expected the labels' names in a list, of labels"),
        ({"targets": "labels"}, "targets='labels' .* expected the labels' names in a list"),
        ({"targets": ["tags"]}, "targets= names tags; the example has labels, input_ids"),
    ],
)
def test_arguments_that_do_not_fit_a_dict(options: dict[str, Any], text: str) -> None:
    given = {"names": None, "targets": None} | options
    with pytest.raises(ExportError, match=text):
        arranged(texts(2, 0), **given, returns_loss=True)


def test_names_of_labels() -> None:
    two = torch.ones(2)
    example = dict.fromkeys(("start_positions", "word_label", "y", "x", "target", "tags"), two)
    found = arranged(example, None, None, returns_loss=False)
    assert found.names == ["x", "tags", "start_positions", "word_label", "y", "target"]
    assert (found.targets, found.by_name) == (4, ["x", "tags"])
    whole = arranged(example, None, ["tags"], returns_loss=True)
    assert whole.names is not None
    assert (whole.names[-1], whole.targets, whole.by_name) == ("tags", 1, whole.names)
    with pytest.raises(ExportError, match=r"no array of the example is called as labels are: x\."):
        arranged({"x": two}, None, None, returns_loss=False)
    with pytest.raises(ExportError, match="are names, and the example is a tuple"):
        arranged((two, two), None, ["y"], returns_loss=False)


def test_calls_with_other_arguments_stay_as_they_are() -> None:
    """A loss may call the model again."""
    model = TextModel()
    batch = texts(2, 0)
    names = ["labels", "input_ids", "attention_mask"]
    with called_by_name(model, names):
        by_name = model(*(batch[name] for name in names))
        as_before = model(batch["input_ids"], batch["attention_mask"])
    assert torch.equal(by_name.loss, model(**batch).loss)
    assert torch.equal(as_before.logits, by_name.logits)
    assert not model._forward_pre_hooks


def test_what_a_model_with_its_own_loss_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="split= and a model that returns its loss"):
        export_bundle(TextModel(), example=texts(2, 0), path=tmp_path / "b", split="words")
    with pytest.raises(ExportError, match="distillation takes a model that returns logits"):
        distillation_of({"model": TextModel(), "example": texts(2, 0)})
    with pytest.raises(TypeError, match=r"export_bundle needs example, .*, and path"):
        export_bundle(TextModel())


def test_the_example_program(tmp_path: Path) -> None:
    from examples import returns_loss

    assert returns_loss.main(str(tmp_path / "commands.bundle")) > 0.95
