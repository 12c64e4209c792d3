from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from fleetlearn_export import ExportError
from fleetlearn_export.model.arguments import default_array_names
from fleetlearn_export.model.checked_user_model import make_user_model
from fleetlearn_export.model.user_model import (
    EvalModule,
    LossModule,
    evaluation_mode,
    named_outputs,
    training_mode,
)
from torch import nn
from torch.nn import functional

X, Y = torch.randn(4, 3), torch.tensor([0, 1, 1, 0])


def source_of(
    model: Any = None, loss: Any = functional.cross_entropy, example: Any = (X, Y), **options: Any
) -> Any:
    arguments = {"metrics": {}, "names": None, "targets": 1} | options
    return make_user_model(nn.Linear(3, 2) if model is None else model, loss, example, **arguments)


def test_arrays_are_copies_of_at_least_two_rows() -> None:
    x = np.ones((1, 3), np.float32)
    user = source_of(
        loss=lambda outputs, a, b: (outputs - a[:, :2] + b[:, :2]).sum(1).mean(),
        example=(x, X[:1], X[:1]),
        targets=2,
    )
    assert list(user.batch) == ["x", "y0", "y1"]
    assert [tuple(array.shape) for array in user.batch.values()] == [(2, 3)] * 3
    assert len({array.data_ptr() for array in user.batch.values()}) == 3
    assert list(user.inputs()) == ["x"]


def test_default_names() -> None:
    assert default_array_names(1, 1) == ["x", "y"]
    assert default_array_names(2, 0) == ["x0", "x1"]
    assert default_array_names(1, 3) == ["x", "y0", "y1", "y2"]


def test_modules_give_means_and_sums_of_scalars_and_of_values_for_each_example() -> None:
    metrics = {"mean": lambda outputs, y: y.float().mean(), "each": lambda outputs, y: y == 1}
    user = source_of(metrics=metrics)
    with torch.no_grad():
        loss, *means = LossModule(user)(X, Y)
        loss_sum, *sums = EvalModule(user)(X, Y)
    assert [float(value) for value in means] == [0.5, 0.5]
    assert float(loss_sum) == pytest.approx(4 * float(loss))
    assert [float(value) for value in sums] == [2.0, 2.0, 4.0]


def _half() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2).double())


class Projected(nn.Linear):
    """A model with a parameter that only its second output reads, and one that nothing reads."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.scale = nn.Parameter(torch.ones(2))
        self.idle = nn.Parameter(torch.zeros(2))

    def forward(self, x: torch.Tensor) -> Any:
        outputs = super().forward(x)
        return outputs, outputs * self.scale


class Sometimes(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if len(x) % 2 else x @ self.weight.T


class Skipping(nn.Linear):
    """Leaves its bias out by chance."""

    def __init__(self, draw: Callable[[torch.Tensor], Any]) -> None:
        super().__init__(3, 2)
        self.draw = draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.T if self.training and self.draw(x) < 0.5 else super().forward(x)


def _infinite() -> nn.Module:
    model = nn.Linear(3, 2)
    nn.init.constant_(model.bias, torch.inf)
    return model


def _scripted() -> nn.Module:
    with warnings.catch_warnings():
        # its category depends on the version
        warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated")
        return nn.Sequential(nn.Linear(3, 3), torch.jit.script(nn.Linear(3, 2)))


class Metric(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.margin = nn.Parameter(torch.zeros(()))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"model": functional.relu}, "the model is a function; expected a torch.nn.Module"),
        (
            {"model": nn.Linear},
            (
                r"the model is the class Linear; expected an object of the class: write "
                r"Linear\(\.\.\.\)"
            ),
        ),
        (
            {"loss": nn.CrossEntropyLoss},
            r"the loss is the class CrossEntropyLoss; .* write CrossEntropyLoss\(\.\.\.\)",
        ),
        ({"metrics": {"l1": nn.L1Loss}}, "metric l1 is the class L1Loss"),
        (
            {"model": nn.DataParallel(nn.Linear(3, 2))},
            r"the model is wrapped in DataParallel.*give model\.module",
        ),
        (
            {"model": nn.Sequential(nn.DataParallel(nn.Linear(3, 2)))},
            r"^0 is wrapped in DataParallel.*the module inside, model\.0\.module",
        ),
        ({"model": _scripted()}, "^1 is TorchScript .* the torch.nn.Module that it was made from"),
        ({"model": nn.Linear(3, 2).requires_grad_(False)}, "no parameter with requires_grad"),
        ({"model": _half()}, r"parameter 1.weight is torch.float64; .* model.float\(\)"),
        (
            {"model": Sometimes(3, 2)},
            "parameter bias gets a gradient on 4 examples or on 3, not on both",
        ),
        (
            {"model": Skipping(partial(next, itertools.cycle([0.3, 0.6])))},
            r"parameter bias gets a gradient in one run and none in another.*layerdrop=0",
        ),
        ({"model": _infinite()}, "parameter bias holds NaN or infinity"),
        ({"model": nn.LazyLinear(2)}, "weight has no shape yet: run the model on the example once"),
        ({"model": nn.Linear(3, 2, device="meta")}, r"weight is on meta; .* model.cpu\(\)"),
        ({"loss": 3}, "the loss is a int; expected a function"),
        ({"loss": Metric()}, "the loss has a parameter of its own, margin"),
        (
            {"loss": lambda outputs, y: outputs.sum(1)},
            r"the loss is a torch.float32 tensor of shape \(4,\); expected a scalar",
        ),
        (
            {"loss": nn.CrossEntropyLoss(reduction="sum")},
            (
                r"the loss is [\d.]+ on 2 examples, and [\d.]+ with each of them there twice: it "
                r"is a sum"
            ),
        ),
        ({"loss": lambda outputs, y: 0.5}, "the loss is a float; expected a scalar"),
        ({"loss": lambda outputs, y: y.float().mean()}, "does not depend on any parameter"),
        (
            {"loss": lambda outputs: outputs.mean()},
            r"the loss is called with \(outputs, y\), and takes \(outputs\)",
        ),
        ({"metrics": {"a b": functional.l1_loss}}, "metric name 'a b'"),
        (
            {"metrics": {"f1": lambda outputs, y: outputs}},
            r"metric f1 is .* of shape \(4, 2\); expected .* shape \(4,\)",
        ),
        ({"metrics": {"f1": lambda outputs, y: 1.0}}, "metric f1 is a float"),
        ({"example": X}, "the example is a Tensor; expected a tuple"),
        ({"example": (X,)}, "the example has 1 arrays, of which the last 1 are the loss's targets"),
        ({"example": (X, Y[:3])}, r"the first axis .* it has \{'x': 4, 'y': 3\}"),
        ({"example": (X[:0], Y[:0])}, "the first axis .* at least 1"),
        ({"example": (X, torch.tensor(1))}, "example array y is a scalar"),
        (
            {"example": (X.half(), Y)},
            "example array x is float16; arrays are one of float32, .*, bool",
        ),
        ({"example": (["a", "b"], Y)}, "example array x cannot become a tensor"),
        (
            {"example": (X.double(), Y)},
            "an array of the example is float64, .* RuntimeError: .*Double",
        ),
        ({"names": ["x"]}, r"names \['x'\] for an example of 2 arrays"),
        ({"names": ["x", "x"]}, "one identifier for each"),
        ({"names": ["x", "the label"]}, "one identifier for each"),
    ],
)
def test_bad_input_is_refused_by_name(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ExportError, match=text):
        source_of(**options)


def test_parameters_on_which_the_loss_does_not_depend() -> None:
    def loss(outputs: Any, y: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(outputs[0], y)

    assert source_of().without_gradient == ()
    assert source_of(Projected(), loss).without_gradient == ("scale", "idle")
    # A contrastive step differentiates the features too.
    assert source_of(Projected(), loss, features=lambda outputs: outputs[1]).without_gradient == (
        "idle",
    )


class Rerun(torch.autograd.Function):
    """Runs a layer again in its backward, as reversible layers do: autograd does not see the
    layer's parameters."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        return layer(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, None]:  # type: ignore[override]
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            ctx.layer(x).backward(gradient)
        return x.grad, None


class Scale(torch.autograd.Function):
    """The same with a tensor in the place of the layer: the gradient arrives at the tensor, from
    the inner backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.saved = x.detach(), scale
        return x * scale

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        x, scale = ctx.saved
        with torch.enable_grad():
            (x * scale + 0 * x.requires_grad_()).backward(gradient)
        return gradient * scale.detach(), None


@pytest.mark.parametrize("hidden", ["last.bias, last.weight", "scale"])
def test_a_gradient_that_only_backward_inside_a_function_gives_is_refused(hidden: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last, self.scale = (
                nn.Linear(3, 2),
                nn.Linear(2, 2),
                nn.Parameter(torch.ones(2)),
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            result = (
                Scale.apply(self.last(x), self.scale)
                if hidden == "scale"
                else Rerun.apply(x, self.last)
            )
            assert isinstance(result, torch.Tensor)
            return result

    model = Model()
    own = model.last.weight.grad = torch.ones(2, 2)
    with pytest.raises(ExportError, match=rf"Function calls backward\(\) .*: {hidden}$"):
        source_of(model)
    assert model.last.weight.grad is own
    assert bool((own == 1).all())
    assert model.last.bias.grad is None
    for name, value in model.named_parameters():
        value.requires_grad_(name not in hidden)
    left = {"last.bias, last.weight": ("scale",), "scale": ()}  # the first model does not use it
    assert source_of(model).without_gradient == left[hidden]


def test_a_batch_size_written_into_the_model_is_found_with_its_line() -> None:
    class Fixed(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.view(4, 3))  # a fixed number of examples

    with pytest.raises(
        ExportError, match=r"the example's 4 examples work, but on 3 .*shape.* at "
    ) as caught:
        source_of(Fixed(3, 2))
    assert f"{__file__}:{line_of('a fixed number of examples')} in forward" in str(caught.value)


def line_of(comment: str) -> int:
    with open(__file__, encoding="utf-8") as file:  # noqa: PTH123
        return next(number for number, line in enumerate(file, 1) if f"# {comment}" in line)


def test_training_gives_everything_back() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5))
    model[1].eval()
    with training_mode(model):
        assert model[0].training
        assert model[1].training
        first = model(X)
    with training_mode(model):
        assert torch.equal(model(X), first), "randomness begins again from the same state"
    assert [module.training for module in model.modules()] == [True, True, False]
    assert torch.equal(model[0].running_mean, torch.zeros(3))
    assert int(model[0].num_batches_tracked) == 0
    with pytest.raises(ValueError, match="expected 2D"), evaluation_mode(model):
        model(torch.zeros(1))
    assert model.training


def test_the_example_is_not_changed() -> None:
    x = X.clone()
    source_of(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 2)), example=(x, Y))
    assert torch.equal(x, X)


def test_parameters_that_pytorchs_random_numbers_skip_are_left_to_tracing() -> None:
    """It says in which line the model reads them."""
    drawn = []

    def draw(x: torch.Tensor) -> torch.Tensor:
        drawn.append(torch.rand(len(x) - 1)[-1])
        return drawn[-1]

    source_of(Skipping(draw))
    assert drawn[0] == drawn[1], "the same examples with the same seed"
    assert drawn[0] < 0.5 < drawn[2] or drawn[2] < 0.5 < drawn[0], "the case that is tested"


def test_named_outputs() -> None:
    assert named_outputs(X) == {"output": X}
    assert named_outputs((X, Y)) == {"output_0": X, "output_1": Y}
    assert list(named_outputs({"z": X, "a": Y})) == ["output_z", "output_a"]
    assert list(named_outputs((X, {"h": [X, None, Y]}))) == [
        "output_0",
        "output_1_h_0",
        "output_1_h_2",
    ]
    assert named_outputs(None) == {}


def test_a_model_that_writes_into_its_parameters_is_known() -> None:
    class Renormalised(nn.Module):
        def __init__(self, longest: float | None) -> None:
            super().__init__()
            self.rows = nn.Embedding(5, 3, max_norm=longest)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.rows(x)

    example = torch.tensor([0, 1, 2, 3]), Y
    for longest, writes in ((0.1, True), (None, False)):
        model = Renormalised(longest)
        before = model.rows.weight.detach().clone()
        assert source_of(model, example=example).writes is writes
        assert torch.equal(model.rows.weight, before)


def test_a_model_that_fails_after_a_write_has_its_parameters_again() -> None:
    class Failing(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.weight.data.mul_(2)
            raise ValueError("too late")

    model = Failing(3, 2)
    before = model.weight.detach().clone()
    with pytest.raises(ExportError, match="too late"):
        source_of(model)
    assert torch.equal(model.weight, before)
