from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from by_hand import bundle_training, largest_difference, pytorch_training
from export_cases import Case
from fleetlearn_export import ExportError, LocalStep, export_bundle
from fleetlearn_export.emission.table import OPERATORS
from fleetlearn_export.inspection.summary import summary
from fleetlearn_protocol import open_bundle, write_inference_model
from fleetlearn_protocol.manifest import EVAL, INFER, TRAIN
from fleetlearn_protocol.preprocessing import read_preprocessing
from fleetlearn_protocol.vector import flatten, views
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves

Cases = Callable[[str], Case]
SIZES = [20, 7] * 12 + [1]
"""Two batch sizes in turn, and a last batch of one."""
MODELS = ["softmax", "mlp", "cnn", pytest.param("mcmahan", marks=pytest.mark.slow)]


def run(content: bytes, feed: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    return dict(
        zip([row.name for row in session.get_outputs()], session.run(None, feed), strict=True)
    )


TOLD = {
    "arrays": {
        "x": {"columns": ["a", "b"], "steps": [{"op": "scale", "factor": 2}]},
        "y": {"columns": "label"},
    }
}


def test_preprocessing_travels_with_the_bundle(tmp_path: Path) -> None:
    x, y = torch.randn(4, 2), torch.tensor([0, 1, 0, 1])
    made = []
    for factor in (2, 3):
        told: Any = copy.deepcopy(TOLD)
        told["arrays"]["x"]["steps"][0]["factor"] = factor
        export_bundle(
            nn.Linear(2, 2), functional.cross_entropy, (x, y), tmp_path / "m", preprocessing=told
        )
        made.append(open_bundle(tmp_path / "m"))
        assert made[-1].manifest.version == 3
        assert made[-1].manifest.preprocessing == read_preprocessing(told)
    assert made[0].sha256 != made[1].sha256


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"arrays": {"x": {"columns": "x"}}}, "makes the arrays x; expected those of the example"),
        ({"arrays": {}}, "preprocessing: Expected `object` of length >= 1"),
        ("missing.toml", "missing.toml cannot be read"),
    ],
)
def test_preprocessing_of_other_arrays_is_refused(told: Any, words: str, tmp_path: Path) -> None:
    x, y = torch.randn(4, 2), torch.tensor([0, 1, 0, 1])
    with pytest.raises(ExportError) as caught:
        export_bundle(
            nn.Linear(2, 2), functional.cross_entropy, (x, y), tmp_path / "m", preprocessing=told
        )
    assert words in str(caught.value)


@pytest.mark.parametrize("name", MODELS)
def test_train_matches_pytorch(cases: Cases, name: str) -> None:
    case = cases(name)
    found, losses = bundle_training(
        case.exported.bundle, case.batches(SIZES[:11] if name == "mcmahan" else SIZES), 0.1
    )
    sizes = SIZES[:11] if name == "mcmahan" else SIZES
    expected, expected_losses = pytorch_training(case.model, case.loss, case.batches(sizes), 0.1)
    assert largest_difference(found, expected) < 1e-5
    assert losses == pytest.approx(expected_losses, abs=1e-5)
    start = {name: value.detach().numpy() for name, value in case.model.named_parameters()}
    assert largest_difference(found, start) > 0.01, "training did not move the model"


@pytest.mark.parametrize("name", ["softmax", "cnn"])
def test_proximal_term_is_the_gradient_of_half_mu_times_the_squared_distance(
    cases: Cases, name: str
) -> None:
    case = cases(name)
    random = torch.Generator().manual_seed(3)
    anchor = {
        name: value.detach() + 0.1 * torch.randn(value.shape, generator=random)
        for name, value in case.model.named_parameters()
    }
    arrays = {name: value.numpy() for name, value in anchor.items()}
    found, losses = bundle_training(case.exported.bundle, case.batches(SIZES), 0.1, 0.3, arrays)
    expected, expected_losses = pytorch_training(
        case.model, case.loss, case.batches(SIZES), 0.1, 0.3, anchor
    )
    assert largest_difference(found, expected) < 1e-5
    assert losses == pytest.approx(expected_losses, abs=1e-5), (
        "the loss is the user's, without the penalty"
    )
    without, _ = pytorch_training(case.model, case.loss, case.batches(SIZES), 0.1)
    assert largest_difference(found, without) > 1e-3, "the term did nothing"


def test_one_step_by_hand(tmp_path: Path) -> None:
    """w = 2, anchor 1, loss (w * 1 - 0)^2 = 4, gradient 4; lr 0.1, mu 0.5: 2 - 0.1 * (4 + 0.5 *
    (2 - 1)) = 1.55."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 2.0)
    x, y = torch.ones(2, 1), torch.zeros(2, 1)
    bundle = export_bundle(
        model,
        functional.mse_loss,
        (x, y),
        tmp_path / "one",
        step=LocalStep(proximal=True),
        hyper={"mu": 0.5},
    ).bundle
    found, losses = bundle_training(
        bundle, [(x, y)], 0.1, 0.5, {"weight": np.ones((1, 1), np.float32)}
    )
    assert found["weight"] == pytest.approx(1.55)
    assert losses == [4.0]
    assert [(row.name, row.default) for row in bundle.manifest.hyper] == [("lr", None), ("mu", 0.5)]


def test_without_proximal_term_neither_anchor_nor_mu_is_in_the_graph(cases: Cases) -> None:
    bundle = cases("mlp").exported.bundle
    session = onnxruntime.InferenceSession(bundle.read(TRAIN), providers=["CPUExecutionProvider"])
    parameters = ["0.weight", "0.bias", "2.weight", "2.bias"]
    inputs = [*(f"param.{name}" for name in parameters), "batch.x", "batch.y", "hyper.lr"]
    assert [row.name for row in session.get_inputs()] == inputs
    outputs = [*(f"next.param.{name}" for name in parameters), "loss", "metric.accuracy"]
    assert [row.name for row in session.get_outputs()] == outputs
    assert [row.name for row in bundle.manifest.hyper] == ["lr"]


def test_metric_is_the_mean_over_the_batch(cases: Cases) -> None:
    case = cases("softmax")
    feed = {
        f"param.{name}": value.detach().numpy() for name, value in case.model.named_parameters()
    }
    feed |= {
        f"anchor.{name}": value.detach().numpy() for name, value in case.model.named_parameters()
    }
    feed |= {"batch.x": case.x[:50].numpy(), "batch.y": case.y[:50].numpy()}
    feed |= {"hyper.lr": np.array(0.1, np.float32), "hyper.mu": np.array(0, np.float32)}
    right = int((case.model(case.x[:50]).argmax(1) == case.y[:50]).sum())
    assert run(case.exported.bundle.read(TRAIN), feed)["metric.accuracy"] == pytest.approx(
        right / 50
    )


def test_eval_gives_sums(cases: Cases) -> None:
    """Against softmax regression in numpy, float64: -log of the label's share of exp(x W^T + b)."""
    case = cases("softmax")
    x, y = case.x[:37].numpy(), case.y[:37].numpy()
    weight, bias = (value.detach().numpy() for value in case.model.parameters())
    found = run(
        case.exported.bundle.read(EVAL),
        {"param.weight": weight, "param.bias": bias, "batch.x": x, "batch.y": y},
    )
    scores = x.astype(np.float64) @ weight.T + bias
    shares = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    assert found["loss_sum"] == pytest.approx(-np.log(shares[np.arange(37), y]).sum(), rel=1e-6)
    assert found["metric_sum.accuracy"] == (scores.argmax(1) == y).sum()
    assert found["examples"] == 37
    assert found["examples"].dtype == np.int64
    assert {value.shape for value in found.values()} == {()}


@pytest.mark.parametrize("name", ["softmax", "mlp", "cnn"])
def test_infer_takes_other_parameters_by_replacing_bytes(cases: Cases, name: str) -> None:
    case = cases(name)
    bundle = case.exported.bundle
    vector = np.random.default_rng(5).normal(0, 0.3, bundle.manifest.size).astype(np.float32)
    other = copy.deepcopy(case.model)
    other.load_state_dict(
        {
            name: torch.from_numpy(value)
            for name, value in views(vector, bundle.manifest.parameters).items()
        }
    )
    found = run(write_inference_model(bundle, vector), {"x": case.x[:9].numpy()})
    np.testing.assert_allclose(found["output"], other(case.x[:9]).detach(), rtol=1e-5, atol=1e-5)


def test_manifest_describes_the_model(cases: Cases) -> None:
    case = cases("cnn")
    bundle = open_bundle(case.exported.bundle.path)
    manifest = bundle.manifest
    state = {name: value.numpy() for name, value in case.model.state_dict().items()}
    assert {row.name: row.shape for row in manifest.parameters} == {
        name: value.shape for name, value in state.items()
    }
    np.testing.assert_array_equal(bundle.parameters(), flatten(state, manifest.parameters))
    assert [(row.name, row.dtype, row.shape) for row in manifest.batch] == [
        ("x", "float32", (1, 8, 8)),
        ("y", "int64", ()),
    ]
    assert [(row.name, row.dtype, row.shape) for row in manifest.outputs] == [
        ("output", "float32", (10,))
    ]
    assert manifest.metrics == ("accuracy",)
    assert manifest.step == LocalStep("sgd", proximal=True)
    assert manifest.name == "cnn"
    assert bundle.sha256 == case.exported.bundle.sha256
    assert case.exported.difference < 1e-5


def test_the_same_export_gives_the_same_bytes(cases: Cases, tmp_path: Path) -> None:
    case = cases("mlp")
    again = export_bundle(
        case.model,
        case.loss,
        (case.x[:8], case.y[:8]),
        tmp_path / "mlp.bundle",
        metrics={"accuracy": _accuracy},
    ).bundle
    assert again.manifest.files == case.exported.bundle.manifest.files
    assert again.sha256 == case.exported.bundle.sha256


def _accuracy(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (outputs.argmax(1) == y).float()


class Normalised(nn.Module):
    """Batch norm, a frozen layer, a buffer that never changes, two inputs and two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.norm = nn.BatchNorm1d(6)
        self.frozen = nn.Linear(3, 6).requires_grad_(False)
        self.register_buffer("shift", torch.randn(6))
        self.last = nn.Linear(6, 4)

    def forward(self, u: torch.Tensor, v: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.norm(self.first(u)) + self.frozen(v) + self.shift
        return {"score": self.last(torch.tanh(hidden)), "hidden": hidden}


def _two_losses(outputs: dict[str, torch.Tensor], a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return functional.mse_loss(outputs["score"], a) + 0.5 * functional.mse_loss(
        outputs["hidden"], b
    )


def test_buffers_frozen_parameters_and_several_arrays(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = Normalised().eval()
    model.norm.train()
    before = copy.deepcopy(model.state_dict())
    modes = [module.training for module in model.modules()]
    random = torch.get_rng_state()
    batches = [
        (torch.randn(n, 5), torch.randn(n, 3), torch.randn(n, 4), torch.randn(n, 6))
        for n in (8, 5, 8, 5, 8, 5, 8, 2)
    ]
    torch.set_rng_state(random)
    exported = export_bundle(
        model,
        _two_losses,
        batches[0],
        tmp_path / "norm",
        targets=2,
        names=["u", "v", "a", "b"],
        name="two",
    )
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), random)

    manifest = exported.bundle.manifest
    assert [row.name for row in manifest.parameters if row.buffer] == [
        "norm.running_mean",
        "norm.running_var",
    ]
    assert not any(row.name.startswith(("frozen", "shift")) for row in manifest.parameters)
    assert [row.name for row in manifest.outputs] == ["output_score", "output_hidden"]
    assert not exported.batch_of_one
    assert "norm.running_mean" in (exported.without_ort_training or "")

    found, losses = bundle_training(exported.bundle, batches, 0.1)
    expected, expected_losses = pytorch_training(model, _two_losses, batches, 0.1, targets=2)
    assert largest_difference(found, expected) < 1e-5
    assert losses == pytest.approx(expected_losses, abs=1e-5)
    assert abs(found["norm.running_var"] - before["norm.running_var"].numpy()).max() > 0.01

    trained = copy.deepcopy(model)
    trained.load_state_dict(
        {name: torch.from_numpy(value) for name, value in found.items()}, strict=False
    )
    vector = flatten(found, manifest.parameters)
    outputs = run(
        write_inference_model(exported.bundle, vector),
        {"u": batches[1][0].numpy(), "v": batches[1][1].numpy()},
    )
    expected_outputs = trained.eval()(*batches[1][:2])
    np.testing.assert_allclose(
        outputs["output_score"], expected_outputs["score"].detach(), atol=1e-5
    )
    np.testing.assert_allclose(
        outputs["output_hidden"], expected_outputs["hidden"].detach(), atol=1e-5
    )


def test_one_array_may_be_input_and_target(tmp_path: Path) -> None:
    """An autoencoder's example, in which both arrays are one tensor, of one row."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(6, 2), nn.Tanh(), nn.Linear(2, 6))
    x = torch.randn(1, 6)
    bundle = export_bundle(model, functional.mse_loss, (x, x), tmp_path / "auto").bundle
    batches = [(a, a) for a in (torch.randn(4, 6), torch.randn(1, 6))]
    found, _ = bundle_training(bundle, batches, 0.1)
    expected, _ = pytorch_training(model, functional.mse_loss, batches, 0.1)
    assert largest_difference(found, expected) < 1e-5


def test_a_target_in_a_home_folder_that_is_not_known_is_refused() -> None:
    with pytest.raises(
        ExportError, match=r"the bundle cannot be written: .* no home folder is known for it; write"
    ):
        export_bundle(
            nn.Linear(4, 2),
            functional.mse_loss,
            (torch.zeros(1, 4), torch.zeros(1, 2)),
            "~no-such-user/b",
        )


def test_a_failed_export_leaves_what_was_there(cases: Cases, tmp_path: Path) -> None:
    first = shutil.copytree(cases("softmax").exported.bundle.path, tmp_path / "b")
    before = open_bundle(first).sha256
    model, x, y = nn.Linear(4, 2), torch.randn(4, 4), torch.zeros(4, dtype=torch.int64)
    with pytest.raises(ExportError):
        export_bundle(model, lambda outputs, y: outputs.mode(1).values.mean(), (x, y), first)
    assert [path.name for path in tmp_path.iterdir()] == ["b"]
    assert open_bundle(first).sha256 == before
    second = export_bundle(model, functional.cross_entropy, (x, y), first).bundle
    assert [path.name for path in tmp_path.iterdir()] == ["b"]
    assert open_bundle(first).sha256 == second.sha256 != before


@pytest.mark.parametrize("kind", ["folder", "file", "no parent"])
def test_what_is_not_a_bundle_is_not_replaced(tmp_path: Path, kind: str) -> None:
    target = tmp_path / "thesis"
    if kind == "folder":
        target.mkdir()
        (target / "chapter.txt").write_text("years of work")
    elif kind == "file":
        target.write_text("years of work")
    else:
        target = target / "b"
    with pytest.raises(ExportError, match="thesis"):
        export_bundle(
            nn.Linear(2, 2), functional.mse_loss, (torch.ones(2, 2), torch.ones(2, 2)), target
        )
    assert (
        kind == "no parent"
        or "years of work" in next(p for p in tmp_path.rglob("*") if p.is_file()).read_text()
    )


class Odd(nn.Module):
    """A parameter that only training uses, an input changed in place, and no batch of one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.temperature = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        if x.shape[0] == 1:
            raise ValueError("one is too few")
        outputs = self.linear(x)
        return outputs * self.temperature if self.training else outputs


def test_a_parameter_that_evaluation_does_not_use(tmp_path: Path) -> None:
    torch.manual_seed(4)
    model, x, y = Odd(), torch.randn(4, 3), torch.tensor([0, 1, 1, 0])
    before = x.clone()
    exported = export_bundle(model, functional.cross_entropy, (x, y), tmp_path / "odd")
    assert torch.equal(x, before)
    assert not exported.batch_of_one
    offsets = {row.name: row.infer_offset for row in exported.bundle.manifest.parameters}
    assert offsets["temperature"] is None
    assert offsets["linear.weight"] is not None
    session = onnxruntime.InferenceSession(
        exported.bundle.read(EVAL), providers=["CPUExecutionProvider"]
    )
    inputs = {"param.linear.weight", "param.linear.bias", "param.temperature", "batch.x", "batch.y"}
    assert {row.name for row in session.get_inputs()} == inputs
    found, _ = bundle_training(exported.bundle, [(x, y)] * 5, 0.1)
    expected, _ = pytorch_training(
        model, functional.cross_entropy, [(x.clone(), y) for _ in range(5)], 0.1
    )
    assert largest_difference(found, expected) < 1e-5


class Returning(nn.Linear):
    """Returns what a function makes of a linear layer's outputs."""

    def __init__(self, returned: Callable[[torch.Tensor], object]) -> None:
        super().__init__(3, 2)
        self.returned = returned

    def forward(self, x: torch.Tensor) -> object:
        return self.returned(super().forward(x))


def first_output_loss(outputs: Any, y: torch.Tensor) -> torch.Tensor:
    if isinstance(outputs, dict):
        outputs = outputs["score"]
    return functional.mse_loss(outputs[0] if isinstance(outputs, tuple) else outputs, y)


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        (
            lambda z: z.sum(),
            r"no output with a row for each example: output has shape \(\) for 2 examples",
        ),
        (lambda z: {"score": z.T}, r"output_score has shape \(2, 4\) for 4 examples"),
        (lambda z: (z, z.half()), "outputs do not fit a bundle: .*float16"),
    ],
)
def test_outputs_that_are_not_one_row_an_example_are_refused(
    returned: Callable[[torch.Tensor], object], text: str, tmp_path: Path
) -> None:
    def loss(outputs: Any, y: torch.Tensor) -> torch.Tensor:
        return torch.stack([row.float().mean() for row in tree_leaves(outputs)]).sum() - y.mean()

    with pytest.raises(ExportError, match=text):
        export_bundle(
            Returning(returned), loss, (torch.randn(4, 3), torch.randn(4, 2)), tmp_path / "b"
        )


class Cache:
    """What a language model keeps for its next call."""


@pytest.mark.parametrize(
    ("returned", "outputs", "left_out"),
    [
        (lambda z: (z, z.sum(0)), ["output_0"], {"output_1": "shape (2,) for 4 examples"}),
        # A state of two layers, with the examples on the second axis, and two examples.
        (
            lambda z: (z, (torch.stack([z, z]), [z])),
            ["output_0", "output_1_1_0"],
            {"output_1_0": "shape (2, 4, 2) for 4 examples"},
        ),
        (
            lambda z: {"score": z, "cache": Cache(), "nothing": None},
            ["output_score"],
            {"output_cache": "the type Cache"},
        ),
    ],
)
def test_what_has_no_row_for_each_example_is_left_out(
    returned: Callable[[torch.Tensor], object],
    outputs: list[str],
    left_out: dict[str, str],
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    model, batches = Returning(returned), [(torch.randn(2, 3), torch.randn(2, 2)) for _ in range(3)]
    exported = export_bundle(model, first_output_loss, batches[0], tmp_path / "b")
    assert exported.outputs_left_out == left_out
    session = onnxruntime.InferenceSession(
        exported.bundle.read(INFER), providers=["CPUExecutionProvider"]
    )
    assert [row.name for row in session.get_outputs()] == outputs
    (first, *_) = session.run(None, {"x": batches[0][0].numpy()})
    assert first == pytest.approx(
        nn.Linear.forward(model, batches[0][0]).detach().numpy(), abs=1e-6
    )
    lines = [
        line.text for group in summary(exported.bundle, outputs_left_out=left_out) for line in group
    ]
    assert [text for text in lines if text.startswith("not ")] == [
        f"not {name}: it has {what}" for name, what in left_out.items()
    ]
    _, losses = bundle_training(exported.bundle, batches, 0.1)
    _, expected = pytorch_training(model, first_output_loss, batches, 0.1)
    assert losses == pytest.approx(expected, abs=1e-6)


def test_a_model_that_asks_for_a_fused_kernel_of_attention(tmp_path: Path) -> None:
    class Attention(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = super().forward(x).chunk(3, -1)
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                return functional.scaled_dot_product_attention(q, k, v).mean((1, 2))

    torch.manual_seed(0)
    model, batches = (
        Attention(8, 24),
        [(torch.randn(n, 2, 5, 8), torch.randint(8, (n,))) for n in (4, 3)],
    )
    exported = export_bundle(model, functional.cross_entropy, batches[0], tmp_path / "b")
    assert not exported.by_pytorch
    _, losses = bundle_training(exported.bundle, batches, 0.1)
    assert losses == pytest.approx(
        pytorch_training(model, functional.cross_entropy, batches, 0.1)[1], abs=1e-6
    )


def test_a_model_that_converts_a_layer_to_the_dtype_that_it_has(tmp_path: Path) -> None:
    class Converting(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.to(x.dtype)[0].float()(x)  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model, batches = Converting(nn.Linear(3, 2)), [(torch.randn(4, 3), torch.tensor([0, 1, 1, 0]))]
    before = nn.Module._apply
    exported = export_bundle(model, functional.cross_entropy, batches[0], tmp_path / "b")
    assert nn.Module._apply is before
    _, losses = bundle_training(exported.bundle, batches, 0.1)
    assert losses == pytest.approx(
        pytorch_training(model, functional.cross_entropy, batches, 0.1)[1], abs=1e-6
    )


def test_why_neither_exporter_can_write_a_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*given: object) -> None:
        raise ExportError("its own reason")

    monkeypatch.setattr("fleetlearn_export.checked_graphs.to_onnx", failing)
    monkeypatch.delitem(OPERATORS, torch.ops.aten.tanh.default)
    model = Returning(torch.tanh)
    with pytest.raises(
        ExportError,
        match=(
            r"operator aten\.tanh\.default at .*test_bundle\.py:\d+ in forward is not in our "
            r"table.*: its own reason"
        ),
    ):
        export_bundle(
            model, functional.mse_loss, (torch.randn(4, 3), torch.randn(4, 2)), tmp_path / "b"
        )


def test_other_steps_are_refused(tmp_path: Path) -> None:
    model, example = nn.Linear(2, 2), (torch.ones(2, 2), torch.ones(2, 2))
    with pytest.raises(
        ExportError,
        match="optimizer 'lion'; a LocalStep has one of sgd, momentum, nesterov, adam, adamw",
    ):
        export_bundle(model, functional.mse_loss, example, tmp_path / "b", step=LocalStep("lion"))
    with pytest.raises(
        ExportError, match=r"the step is the text 'sgd'; expected LocalStep\('sgd'\)"
    ):
        export_bundle(model, functional.mse_loss, example, tmp_path / "b", step="sgd")


class WithTable(nn.Linear):
    """Keeps a table of its parameters between calls in evaluation mode, as LeViT and
    EfficientFormer do."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.shift = nn.Parameter(torch.ones(2))
        self.tables: dict[str, torch.Tensor] = {}

    def train(self, mode: bool = True) -> WithTable:
        if mode:
            self.tables = {}
        return super().train(mode)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            return super().forward(x) + self.shift.exp()
        if "shift" not in self.tables:
            self.tables["shift"] = self.shift.exp()
        return super().forward(x) + self.tables["shift"]


def test_a_table_that_a_model_keeps_in_evaluation_mode_is_no_constant(tmp_path: Path) -> None:
    model = WithTable().eval()
    x, y = torch.randn(4, 3), torch.tensor([0, 1, 1, 0])
    model(x)
    bundle = export_bundle(model, functional.cross_entropy, (x, y), tmp_path / "b").bundle
    assert all(row.infer_offset is not None for row in bundle.manifest.parameters)
    assert list(model.tables) == ["shift"], "the user's own"
    assert not model.training


def test_an_embedding_with_max_norm_trains_as_in_pytorch_and_the_export_leaves_its_rows(
    tmp_path: Path,
) -> None:
    model = nn.Sequential(nn.Embedding(5, 3, max_norm=0.1), nn.Flatten(), nn.Linear(12, 2))
    random = torch.Generator().manual_seed(0)
    batches = [
        (torch.randint(0, 5, (4, 4), generator=random), torch.randint(0, 2, (4,), generator=random))
        for _ in range(3)
    ]
    before = copy.deepcopy(model.state_dict())
    exported = export_bundle(model, functional.cross_entropy, batches[0], tmp_path / "bundle")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    found, losses = bundle_training(exported.bundle, batches, 0.5)
    expected, expected_losses = pytorch_training(model, functional.cross_entropy, batches, 0.5)
    assert largest_difference(found, expected) < 1e-5
    assert losses == pytest.approx(expected_losses, abs=1e-5)


def test_a_model_that_keeps_results_by_sizes_of_the_batch_is_exported(tmp_path: Path) -> None:
    @cache
    def weights(rows: int, columns: int) -> torch.Tensor:
        return torch.full((rows, columns), 1.0 / rows)

    class Cached(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x * weights(*x.shape))

    model = Cached(3, 2)
    batches = [(torch.ones(rows, 3), torch.arange(rows) % 2) for rows in (4, 2, 5)]
    exported = export_bundle(model, functional.cross_entropy, batches[0], tmp_path / "bundle")
    found, losses = bundle_training(exported.bundle, batches, 0.5)
    expected, expected_losses = pytorch_training(model, functional.cross_entropy, batches, 0.5)
    assert largest_difference(found, expected) < 1e-6
    assert losses == pytest.approx(expected_losses, abs=1e-6)
