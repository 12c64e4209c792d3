"""Where an error is: the user's own file and line."""

from __future__ import annotations

import linecache
from pathlib import Path

import pytest
import torch
from fleetlearn_export import ExportError, export_bundle
from fleetlearn_export.model.source_locations import as_export_error, location_of_error, location_of_operator
from fleetlearn_export.model.user_model import make_user_model
from fleetlearn_export.tracing.trace import export_loss
from torch import nn
from torch.nn import functional

X, Y = torch.randn(4, 16), torch.tensor([0, 1, 2, 0])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.last = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        return self.last(self.middle(hidden))

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Sampled(Net):
    def middle(self, x: torch.Tensor) -> torch.Tensor:
        grid = torch.zeros(1, 4, 4, 2).expand(x.shape[0], 4, 4, 2)
        image = x.reshape(-1, 1, 4, 4)
        return functional.grid_sample(image, grid, align_corners=False).flatten(1)  # no backward operator


class Median(Net):
    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.median(1, keepdim=True).values  # no forward operator


class Fourier(Net):
    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.fft(x).abs()  # complex numbers


class Branch(Net):
    def middle(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:  # control flow
            return 2 * x
        return x


class Random(Net):
    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(x, 0.5)  # chance


class Length(Net):
    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(len(x), 4, 4).flatten(1)  # a length


class Foreign(Net):
    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.from_numpy(x.detach().numpy())  # through numpy


@pytest.mark.parametrize(
    ("model", "comment", "text"),
    [
        (Sampled(), "no backward operator", "operator aten.grid_sampler_2d_backward .*no counterpart in ONNX"),
        (Median(), "no forward operator", "operator aten.median .*no counterpart in ONNX"),
        (Fourier(), "complex numbers", "operator aten.fft_fft.default .*complex numbers"),
        (Branch(), "control flow", "control flow depends on the values .*torch.where"),
        (Random(), "chance", r"in evaluation mode .* random numbers in operator aten\.dropout.default .*self.training"),
        (Length(), "a length", r"the number of examples is fixed .*x\.shape\[0\]"),
        (Foreign(), "through numpy", r"cannot be exported: .*numpy\(\) is not supported"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_an_unsupported_operator_is_named_with_its_line(
    model: nn.Module, comment: str, text: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ExportError, match=text) as caught:
        export_bundle(model, functional.cross_entropy, (X, Y), tmp_path / "b")
    line = next(n for n, text in enumerate(linecache.getlines(__file__), 1) if text.endswith(f"# {comment}\n"))
    assert f"{__file__}:{line} in " in str(caught.value)
    assert not list(tmp_path.iterdir())
    assert capfd.readouterr() == ("", ""), "the error says it all"


def test_an_operator_of_the_loss_is_named_with_its_line(tmp_path: Path) -> None:
    def loss(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(outputs.median(0, keepdim=True).values + outputs, y)  # inside the loss

    line = next(n for n, text in enumerate(linecache.getlines(__file__), 1) if text.endswith("# inside the loss\n"))
    with pytest.raises(ExportError, match=f"operator aten.median at .*:{line} in loss has no counterpart"):
        export_bundle(Net(), loss, (X, Y), tmp_path / "b")


def test_a_module_of_torch_is_named_by_its_path() -> None:
    model = nn.Sequential(nn.Linear(16, 8), nn.Sequential(nn.ReLU(), nn.Dropout(0.2)), nn.Linear(8, 3))
    graph = export_loss(make_user_model(model, functional.cross_entropy, (X, Y), {}, None, 1))
    assert location_of_operator("aten.native_dropout.default", graph) == " in 1.1 (Dropout)"


def test_the_innermost_of_the_users_lines_counts() -> None:
    def inner() -> None:
        torch.zeros(2) + torch.zeros(3)  # inner line

    def outer() -> None:
        try:
            inner()
        except RuntimeError as error:
            raise ValueError("outer") from error

    line = next(n for n, text in enumerate(linecache.getlines(__file__), 1) if text.endswith("# inner line\n"))
    with (
        pytest.raises(ExportError, match=f"what: ValueError: outer at .*:{line} in inner") as caught,
        as_export_error("what"),
    ):
        outer()
    assert isinstance(caught.value.__cause__, ValueError)
    assert location_of_error(KeyError()) == ""


def test_what_passes_is_not_explained() -> None:
    with pytest.raises(KeyError), as_export_error("what", KeyError):
        raise KeyError
    with pytest.raises(ExportError, match=r"^plain$"), as_export_error("what"):
        raise ExportError("plain")
