"""Where an error is: the user's own file and line."""

from __future__ import annotations

import linecache
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from fleetlearn_export import ExportError, export_bundle
from fleetlearn_export.model.checked_user_model import make_user_model
from fleetlearn_export.model.source_locations import (
    as_export_error,
    location_of_error,
    location_of_operator,
)
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


class Digamma(Net):
    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return torch.digamma(x.abs() + 1)


class Mode(Net):
    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mode(1, keepdim=True).values  # no forward operator


class Fourier(Net):
    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.fft(x).exp().abs()  # complex numbers


class Branch(Net):
    def middle(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:  # control flow
            return 2 * x
        return x


class Random(Net):
    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(x, 0.5)  # chance


class Drawing(Net):
    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, torch.multinomial(torch.ones(16), 16)]  # another draw


class Length(Net):
    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(int(x.shape[0]), 4, 4).flatten(1)  # a length


class Pieces(Net):
    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(x.chunk(math.ceil(len(x) / 128)))  # pieces of a batch


class Foreign(Net):
    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.from_numpy(x.detach().numpy())  # through numpy


@pytest.mark.parametrize(
    ("model", "comment", "text"),
    [
        (Mode(), "no forward operator", "operator aten.mode .*no counterpart in ONNX"),
        (Fourier(), "complex numbers", r"operator aten\.\S+ .*complex numbers"),
        (Branch(), "control flow", "control flow depends on the values .*torch.where"),
        (
            Random(),
            "chance",
            r"in evaluation mode the model drops elements by chance .*self.training",
        ),
        (
            Drawing(),
            "another draw",
            r"random operator aten\.multinomial.* cannot be drawn from the graph's seed",
        ),
        (Length(), "a length", r"the number of examples is fixed .*x\.shape\[0\]"),
        (
            Pieces(),
            "pieces of a batch",
            (
                r"the number n of examples decides what is computed at .*; on the example "
                r"math\.ceil\(n / 128\) == 1\. A"
            ),
        ),
        (Foreign(), "through numpy", r"cannot be exported: .*numpy\(\) is not supported"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_an_unsupported_operator_is_named_with_its_line(
    model: nn.Module, comment: str, text: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ExportError, match=text) as caught:
        export_bundle(model, functional.cross_entropy, (X, Y), tmp_path / "b")
    line = next(
        n
        for n, text in enumerate(linecache.getlines(__file__), 1)
        if text.endswith(f"# {comment}\n")
    )
    assert f"{__file__}:{line} in " in str(caught.value)
    assert not list(tmp_path.iterdir())
    assert capfd.readouterr() == ("", ""), "the error says it all"


def test_the_line_that_fixes_a_size_is_named_not_one_where_two_arrays_meet(tmp_path: Path) -> None:
    class Masked(Net):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            masked = x * mask
            return super().forward(masked.reshape(int(x.shape[0]), 16))  # fixed here

    line = next(
        n
        for n, text in enumerate(linecache.getlines(__file__), 1)
        if text.endswith("# fixed here\n")
    )
    with pytest.raises(
        ExportError, match=rf"the number of examples is fixed at .*:{line} in forward"
    ):
        export_bundle(Masked(), functional.cross_entropy, (X, torch.ones(4, 16), Y), tmp_path / "b")


def test_an_operator_of_the_backward_pass_alone_is_named(tmp_path: Path) -> None:
    """With the line of what it differentiates."""
    line = next(n for n, text in enumerate(linecache.getlines(__file__), 1) if "digamma(" in text)
    with pytest.raises(
        ExportError, match=rf"operator aten\.polygamma at .*:{line} in middle has no counterpart"
    ):
        export_bundle(Digamma(), functional.cross_entropy, (X, Y), tmp_path / "b")


def test_an_operator_of_the_loss_is_named_with_its_line(tmp_path: Path) -> None:
    def loss(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        mode = outputs.mode(0, keepdim=True).values  # inside the loss
        return functional.cross_entropy(mode + outputs, y)

    line = next(
        n
        for n, text in enumerate(linecache.getlines(__file__), 1)
        if text.endswith("# inside the loss\n")
    )
    with pytest.raises(
        ExportError, match=f"operator aten.mode at .*:{line} in loss has no counterpart"
    ):
        export_bundle(Net(), loss, (X, Y), tmp_path / "b")


def test_a_module_of_torch_is_named_by_its_path() -> None:
    model = nn.Sequential(
        nn.Linear(16, 8), nn.Sequential(nn.ReLU(), nn.Dropout(0.2)), nn.Linear(8, 3)
    )
    graph = export_loss(make_user_model(model, functional.cross_entropy, (X, Y), {}, None, 1))
    assert location_of_operator("aten.native_dropout.default", graph) == " in 1.1 (Dropout)"
    assert location_of_operator("aten.relu_backward.default", graph) == " in 1.0 (ReLU)"


def test_the_innermost_of_the_users_lines_counts() -> None:
    def inner() -> None:
        torch.zeros(2) + torch.zeros(3)  # inner line

    def outer() -> None:
        try:
            inner()
        except RuntimeError as error:
            raise ValueError("outer") from error

    line = next(
        n
        for n, text in enumerate(linecache.getlines(__file__), 1)
        if text.endswith("# inner line\n")
    )
    with (
        pytest.raises(
            ExportError, match=f"what: ValueError: outer at .*:{line} in inner"
        ) as caught,
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


@pytest.mark.parametrize(
    "result", ["2 * x if x.sum() > 0 else x", "x * int(x.shape[0])", "x * 2 if len(x) > 3 else x"]
)
def test_a_library_s_line_is_told_with_what_a_setting_can_do(result: str, tmp_path: Path) -> None:
    library: dict[str, Any] = {}
    code = f"def middle(x):\n    return {result}\n"
    exec(compile(code, "/place/site-packages/library/layers.py", "exec"), library)

    class Library(Net):
        def middle(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = library["middle"](x)
            return result

    with pytest.raises(
        ExportError,
        match=(
            r"library/layers\.py:2 in middle[.;].*a library's line.*layerdrop=0.*apply_spec_augment"
        ),
    ):
        export_bundle(Library(), functional.cross_entropy, (X, Y), tmp_path / "b")
