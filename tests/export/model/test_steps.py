"""Each rule on a case of one or two numbers, worked out in the docstring; w 3, g 2 and lr 0.5
unless it says otherwise.

All the numbers are sums of powers of two where the rule allows it, so that float32 gives them
exactly.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from fleetlearn_export import ExportError
from fleetlearn_export.model.steps import (
    Objective,
    adam,
    adamw,
    built_in,
    clipped,
    contrastive_loss,
    hyper_defaults,
    initial_state,
    keyword_needs,
    momentum,
    nesterov,
    proximal,
    references,
    sgd,
)
from fleetlearn_protocol.manifest import LocalStep
from torch import Tensor, nn

W, G = {"w": torch.tensor(3.0)}, {"w": torch.tensor(2.0)}


def hyper(**values: float) -> dict[str, Tensor]:
    return {
        "lr": torch.tensor(0.5),
        **{name: torch.tensor(value) for name, value in values.items()},
    }


def test_sgd() -> None:
    """3 - 0.5 * 2 = 2."""
    moved, state = sgd(W, G, {}, hyper())
    assert float(moved["w"]) == 2.0
    assert state == {}


def test_proximal() -> None:
    """w 3, g 2, anchor 1, mu 0.25: 2 + 0.25 * 2 = 2.5, and 3 - 0.5 * 2.5 = 1.75. What has no anchor
    is not pulled."""
    gradients = proximal(
        W | {"own": torch.tensor(5.0)},
        G | {"own": torch.tensor(1.0)},
        {"w": torch.tensor(1.0)},
        hyper(mu=0.25)["mu"],
    )
    assert {name: float(value) for name, value in gradients.items()} == {"w": 2.5, "own": 1.0}
    assert float(sgd(W, {"w": gradients["w"]}, {}, hyper())[0]["w"]) == 1.75


def test_momentum_over_two_steps() -> None:
    """momentum 0.5, from b = 0. First: b = 2, w = 3 - 1 = 2. Then with g = 4: b = 1 + 4 = 5, w =
    2 - 2.5 = -0.5."""
    moved, state = momentum(W, G, {"momentum.w": torch.tensor(0.0)}, hyper(momentum=0.5))
    assert (float(moved["w"]), float(state["momentum.w"])) == (2.0, 2.0)
    moved, state = momentum(moved, {"w": torch.tensor(4.0)}, state, hyper(momentum=0.5))
    assert (float(moved["w"]), float(state["momentum.w"])) == (-0.5, 5.0)


def test_nesterov_over_two_steps() -> None:
    """momentum 0.5, from b = 0. First: b = 2, w = 3 - 0.5 * (2 + 1) = 1.5.
    Then with g = 4: b = 1 + 4 = 5, w = 1.5 - 0.5 * (4 + 2.5) = -1.75."""
    moved, state = nesterov(W, G, {"momentum.w": torch.tensor(0.0)}, hyper(momentum=0.5))
    assert (float(moved["w"]), float(state["momentum.w"])) == (1.5, 2.0)
    moved, state = nesterov(moved, {"w": torch.tensor(4.0)}, state, hyper(momentum=0.5))
    assert (float(moved["w"]), float(state["momentum.w"])) == (-1.75, 5.0)


ADAM = {"beta1": 0.5, "beta2": 0.75, "epsilon": 1.0}
ZERO = {name: torch.tensor(0.0) for name in ("t", "m.w", "v.w")}


def test_adam_over_two_steps() -> None:
    """beta1 0.5, beta2 0.75, epsilon 1.

    First: m = 1, v = 1; m^ = 1 / 0.5 = 2, v^ = 1 / 0.25 = 4; w = 3 - 0.5 * 2 / (2 + 1) = 3 - 1/3.
    Then with g = 4: m = 0.5 + 2 = 2.5, v = 0.75 + 4 = 4.75; m^ = 2.5 / 0.75 = 10/3, v^ = 4.75 /
    0.4375 = 76/7; w = 3 - 1/3 - 0.5 * (10/3) / (sqrt(76/7) + 1).
    """
    moved, state = adam(W, G, ZERO, hyper(**ADAM))
    assert float(moved["w"]) == pytest.approx(3 - 1 / 3, abs=1e-6)
    assert [float(state[name]) for name in ("t", "m.w", "v.w")] == [1.0, 1.0, 1.0]
    moved, state = adam(moved, {"w": torch.tensor(4.0)}, state, hyper(**ADAM))
    assert float(moved["w"]) == pytest.approx(
        3 - 1 / 3 - 0.5 * (10 / 3) / (math.sqrt(76 / 7) + 1), abs=1e-6
    )
    assert [float(state[name]) for name in ("t", "m.w", "v.w")] == [2.0, 2.5, 4.75]


def test_adamw_decays_beside_the_gradient() -> None:
    """As Adam's first step, from (1 - 0.5 * 0.25) * 3 = 2.625: w = 2.625 - 1/3; m and v know
    nothing of the decay."""
    moved, state = adamw(W, G, ZERO, hyper(**ADAM, weight_decay=0.25))
    assert float(moved["w"]) == pytest.approx(2.625 - 1 / 3, abs=1e-6)
    assert [float(state[name]) for name in ("t", "m.w", "v.w")] == [1.0, 1.0, 1.0]
    without, _ = adamw(W, G, ZERO, hyper(**ADAM))
    assert torch.equal(without["w"], adam(W, G, ZERO, hyper(**ADAM))[0]["w"])


def test_clipping_scales_all_gradients_by_one_factor() -> None:
    """Gradients (3, 0) and 4 have the norm 5. To 2.5: half of each. To 10: nothing changes. Of 0:
    0, not NaN."""
    gradients = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor(4.0)}
    half = clipped(gradients, torch.tensor(2.5))
    torch.testing.assert_close(
        half, {"a": torch.tensor([1.5, 0.0]), "b": torch.tensor(2.0)}, rtol=1e-6, atol=0
    )
    assert all(
        torch.equal(value, gradients[name])
        for name, value in clipped(gradients, torch.tensor(10.0)).items()
    )
    zero = {name: torch.zeros_like(value) for name, value in gradients.items()}
    assert all(
        torch.equal(value, zero[name]) for name, value in clipped(zero, torch.tensor(2.5)).items()
    )


def test_contrastive_loss() -> None:
    """Temperature 0.5. Features (1, 0): cosine 1 with (5, 0), 0 with (0, 2): -log(e^2 / (e^2 +
    1)) = log(1 + e^-2). Features (0, 3): cosine 0 with (1, 0) and -1 with (0, -1): -log(1 / (1 +
    e^-2)) = the same. So is their mean. With the other two models exchanged: log(1 + e^2)."""
    current = torch.tensor([[[1.0], [0.0]], [[0.0], [3.0]]])
    near = torch.tensor([[[5.0], [0.0]], [[1.0], [0.0]]])
    far = torch.tensor([[[0.0], [2.0]], [[0.0], [-1.0]]])
    half = torch.tensor(0.5)
    assert float(contrastive_loss(current, near, far, half)) == pytest.approx(
        math.log1p(math.exp(-2)), abs=1e-6
    )
    assert float(contrastive_loss(current, far, near, half)) == pytest.approx(
        math.log1p(math.exp(2)), abs=1e-6
    )
    assert float(contrastive_loss(current, near, near, half)) == pytest.approx(
        math.log(2), abs=1e-6
    )


class Scale(nn.Module):
    """x -> w * x."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(7.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x


def mean_of(outputs: Tensor, y: Tensor) -> Tensor:
    return (outputs * y).mean()


OBJECTIVE = Objective(
    Scale(), mean_of, {"largest": lambda outputs, y: outputs.max()}, ["x"], ["y"], ["w"], []
)
BATCH = {"x": torch.tensor([1.0, 3.0]), "y": torch.tensor([1.0, 1.0])}


def run(
    rule: LocalStep, state: dict[str, Tensor] | None = None, **values: float
) -> tuple[Any, Any, Any]:
    """The built-in step at w = 3, where the loss is 2 w = 6 and its gradient 2. Anchor 1,
    correction 0.5."""
    given = {
        name: torch.tensor(value)
        for name, value in (hyper_defaults(rule) | {"lr": 0.5} | values).items()
    }
    return built_in(rule, None)(  # type: ignore[no-any-return]
        W,
        state or initial_state(rule, W),
        BATCH,
        given,
        objective=OBJECTIVE,
        anchor={"w": torch.tensor(1.0)},
        correction={"w": torch.tensor(0.5)},
        previous={},
    )


def test_objective() -> None:
    """At w = 3 the loss is 2 w = 6, its gradient 2; with w^2 added to it 8. The largest output is
    9."""
    found = OBJECTIVE(W, BATCH)
    assert (float(found.loss), float(found.gradients["w"]), found.buffers) == (6.0, 2.0, {})
    assert float(found.metrics["largest"]) == 9.0
    found = OBJECTIVE(W, dict(reversed(BATCH.items())), lambda outputs: outputs[0] ** 2)
    assert (float(found.loss), float(found.gradients["w"])) == (6.0, 8.0)
    assert torch.equal(OBJECTIVE.outputs(W, BATCH), torch.tensor([3.0, 9.0]))
    assert float(OBJECTIVE.model.w.detach()) == 7.0
    assert OBJECTIVE.model.training


@pytest.mark.parametrize(
    ("rule", "values", "expected"),
    [
        (LocalStep(), {}, 2.0),
        (LocalStep(proximal=True), {"mu": 0.25}, 1.75),
        (LocalStep(proximal=True), {}, 2.0),
        # 3 - 0.5 * (2 + 0.5)
        (LocalStep(correction=True), {}, 1.75),
        # 3 - 0.5 * (2 + 0.25 * 3)
        (LocalStep(weight_decay=True), {"weight_decay": 0.25}, 1.625),
        # The norm of 2 + 0.25 * 2 is cut to 1; correction and decay come behind: 3 - 0.5 * (1 +
        # 0.5 + 0.75).
        (
            LocalStep(proximal=True, clip=True, correction=True, weight_decay=True),
            {"mu": 0.25, "max_norm": 1.0, "weight_decay": 0.25},
            1.875,
        ),
        # The first step of momentum is SGD's.
        (LocalStep("momentum", proximal=True), {"mu": 0.25, "momentum": 0.5}, 1.75),
        # 3 - 0.5 * 1.5 * 2.5
        (LocalStep("nesterov", proximal=True), {"mu": 0.25, "momentum": 0.5}, 1.125),
        # m^ = g and v^ = g^2, with g = 2 + 0.25 * 3 = 2.75: 3 - 0.5 * 2.75 / (2.75 + 1)
        (
            LocalStep("adam", weight_decay=True),
            {**ADAM, "weight_decay": 0.25},
            3 - 0.5 * 2.75 / 3.75,
        ),
        (LocalStep("adamw", weight_decay=True), {**ADAM, "weight_decay": 0.25}, 2.625 - 1 / 3),
    ],
    ids=str,
)
def test_built_in_steps(rule: LocalStep, values: dict[str, float], expected: float) -> None:
    params, state, metrics = run(rule, **values)
    assert {name: float(value) for name, value in params.items()} == {
        "w": pytest.approx(expected, abs=2e-6)
    }
    assert {name: float(value) for name, value in metrics.items()} == {"loss": 6.0, "largest": 9.0}
    assert state.keys() == initial_state(rule, W).keys()


def test_what_a_rule_needs() -> None:
    assert hyper_defaults(LocalStep()) == {"lr": None}
    assert hyper_defaults(LocalStep("nesterov", proximal=True, clip=True, weight_decay=True)) == {
        "lr": None,
        "mu": 0.0,
        "max_norm": None,
        "weight_decay": None,
        "momentum": 0.9,
    }
    assert hyper_defaults(LocalStep("adamw", contrastive=True, weight_decay=True)) == {
        "lr": None,
        "mu": None,
        "temperature": 0.5,
        "weight_decay": 0.01,
        "beta1": 0.9,
        "beta2": 0.999,
        "epsilon": 1e-8,
    }
    assert references(LocalStep()) == ()
    assert references(LocalStep(proximal=True, correction=True)) == ("anchor", "correction")
    assert references(LocalStep(contrastive=True)) == ("anchor", "previous")
    trained = {"a": torch.ones(2), "b": torch.ones(())}
    assert initial_state(LocalStep(), trained) == {}
    assert list(initial_state(LocalStep("momentum"), trained)) == ["momentum.a", "momentum.b"]
    state = initial_state(LocalStep("adam"), trained)
    assert {name: tuple(value.shape) for name, value in state.items()} == {
        "m.a": (2,),
        "m.b": (),
        "v.a": (2,),
        "v.b": (),
        "t": (),
    }
    assert not any(value.any() for value in state.values())


def test_named_needs() -> None:
    assert keyword_needs(lambda params, state, batch, hyper: None) == ()
    assert keyword_needs(lambda p, s, b, h, /, *, previous, objective: None) == (
        "objective",
        "previous",
    )
    assert keyword_needs(lambda p, s, b, h, rate=0.1, *, anchor, mine=3, **rest: None) == (
        "anchor",
    )


@pytest.mark.parametrize(
    "step",
    [
        lambda params, state, batch: None,
        lambda params, state, batch, hyper, objective: None,
        lambda params, state, batch, hyper, *, gradient: None,
        lambda *everything: None,
    ],
)
def test_a_step_with_other_parameters_is_refused(step: Any) -> None:
    with pytest.raises(
        ExportError,
        match=r"the step takes \(.*\); expected \(params, state, batch, hyper\), and "
        r"behind a \* any of objective, anchor, correction, previous",
    ):
        keyword_needs(step)


def test_a_step_whose_parameters_cannot_be_read_is_refused() -> None:
    with pytest.raises(ExportError, match="the step's parameters cannot be read"):
        keyword_needs(dict)
