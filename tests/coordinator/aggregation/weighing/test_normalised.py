"""FedNova: ||a||_1 against steps done one by one, and the fixed points of the paper's
quadratics."""

from __future__ import annotations

import numpy as np
import pytest
from fleetlearn_coordinator.aggregation import aggregators, optimizers
from fleetlearn_coordinator.aggregation.commit import next_model
from fleetlearn_coordinator.aggregation.updates import ArrayUpdate
from fleetlearn_coordinator.aggregation.weighing.normalised import (
    MOST_SCALE,
    STEPS,
    most_alpha,
    normalised,
    work,
)
from fleetlearn_coordinator.aggregation.weighing.weighing import PLAIN, Reported, Weighing
from numpy.typing import NDArray

Array = NDArray[np.float64]
CASES = [
    (optimizer, rho, min(0.999, share * most_alpha(optimizer, rho)))
    for optimizer in STEPS
    for rho in ([0.0] if optimizer == "sgd" else [0.0, 0.5, 0.9, 0.99])
    for share in (0.0, 0.3, 1.0)
]


def gradient_factors(steps: int, optimizer: str, rho: float, alpha: float) -> Array:
    """Return a: how far the model is at the end, in units of -lr, if the gradient of step j alone
    was 1. By brute force: the step's own lines, on all j at once."""
    path, momentum = np.zeros(steps), np.zeros(steps)
    for step in range(steps):
        # the proximal term is mu * (w - anchor), and path is -w / lr
        gradient = np.eye(steps)[step] - alpha * path
        momentum = rho * momentum + gradient
        path = path + (gradient + rho * momentum if optimizer == "nesterov" else momentum)
    return path


@pytest.mark.parametrize(("optimizer", "rho", "alpha"), CASES)
def test_the_work_is_the_norm_of_the_gradients_factors(
    optimizer: str, rho: float, alpha: float
) -> None:
    for steps in (1, 2, 3, 7, 64, 200):
        factors = gradient_factors(steps, optimizer, rho, alpha)
        assert factors.min() > -1e-12, "within most_alpha no gradient counts negatively"
        assert work(steps, optimizer, rho, alpha) == pytest.approx(np.abs(factors).sum(), rel=1e-12)


@pytest.mark.parametrize(
    ("optimizer", "rho"), [("momentum", 0.9), ("nesterov", 0.9), ("momentum", 0.3)]
)
def test_beyond_the_limit_a_gradient_would_count_negatively(optimizer: str, rho: float) -> None:
    assert gradient_factors(400, optimizer, rho, 1.5 * most_alpha(optimizer, rho)).min() < 0


def test_the_paper_s_closed_forms() -> None:
    """Section 4.1: tau; sum of (1 - rho^j) / (1 - rho); (1 - (1 - alpha)^tau) / alpha."""
    assert work(17, "sgd", 0.0, 0.0) == 17
    assert work(17, "momentum", 0.9, 0.0) == pytest.approx(
        sum((1 - 0.9**j) / 0.1 for j in range(1, 18)), rel=1e-13
    )
    assert work(17, "sgd", 0.0, 0.2) == pytest.approx((1 - 0.8**17) / 0.2, rel=1e-13)


def test_any_claimed_number_of_steps_is_done_at_once() -> None:
    assert work(2**31, "sgd", 0.0, 0.0) == 2**31
    assert work(2**31, "sgd", 0.0, 0.1) == pytest.approx(10)
    assert work(2**31, "momentum", 0.5, 0.0) == pytest.approx(2**32, rel=1e-8)


def test_a_device_that_claims_too_many_steps_does_not_decide_how_far_the_model_moves() -> None:
    rule = normalised("sgd", 0.0, 0.0)
    honest = [Reported(1, steps, 0.0) for steps in (3, 4, 5, 4)]
    assert rule.scale(honest, 1.0) == 4
    assert rule.scale([*honest, Reported(1, 2**31, 0.0)], 1.0) == MOST_SCALE * 4


# Two devices of equal weight with f_k = h_k / 2 * (w - e_k)^2, which do different numbers of
# gradient steps.
H, E, STEPS_DONE, LR = np.array([1.0, 3.0]), np.array([0.0, 4.0]), [2, 9], 0.001
OPTIMUM = float((H * E).sum() / H.sum())


def trained(
    start: float, device: int, optimizer: str = "sgd", rho: float = 0.0, mu: float = 0.0
) -> float:
    w, momentum = start, 0.0
    for _ in range(STEPS_DONE[device]):
        gradient = H[device] * (w - E[device]) + mu * (w - start)
        momentum = rho * momentum + gradient
        w -= LR * (gradient + rho * momentum if optimizer == "nesterov" else momentum)
    return w


def fixed_point(
    weighing: Weighing, optimizer: str = "sgd", rho: float = 0.0, mu: float = 0.0
) -> float:
    """Where rounds of both devices end, through the aggregator and the server optimizer."""
    mean, sgd, state = (
        aggregators.make("mean"),
        optimizers.make("sgd", lr=1.0),
        weighing.state_after(None),
    )
    model = np.zeros(1, np.float32)
    for _ in range(1500):
        total, reports = mean.init(1), []
        for device in (0, 1):
            update = np.array(
                [trained(float(model[0]), device, optimizer, rho, mu) - model[0]], np.float32
            )
            reports.append(Reported(1, STEPS_DONE[device], 0.0))
            factor = weighing.factor(reports[-1], state)
            mean.add(total, ArrayUpdate(update), 1, float(abs(update[0])), factor)
        model = next_model(mean, total, sgd, {}, model, scale=weighing.scale(reports, state)).model
    return float(model[0])


def contractions(normalise: bool) -> Array:
    """Each device's update is -c_k * (w - e_k): c_k = 1 - (1 - lr h_k)^tau_k, divided by tau_k for
    FedNova."""
    c: Array = 1 - (1 - LR * H) ** np.array(STEPS_DONE)
    return c / STEPS_DONE if normalise else c


def test_unequal_steps_lead_fedavg_astray_and_fednova_to_the_optimum() -> None:
    """Both fixed points in closed form, sum(c_k e_k) / sum(c_k). As lr falls, FedNova's is the
    optimum 3, and FedAvg's is that of the wrong objective, sum(tau_k h_k e_k) / sum(tau_k h_k)."""
    wrong = float((STEPS_DONE * H * E).sum() / (STEPS_DONE * H).sum())
    assert (OPTIMUM, round(wrong, 3)) == (3.0, 3.724)
    for weighing, limit in ((PLAIN, wrong), (Weighing(normalised("sgd", 0.0, 0.0)), OPTIMUM)):
        c = contractions(weighing.rule is not None)
        expected = float((c * E).sum() / c.sum())
        assert fixed_point(weighing) == pytest.approx(expected, abs=4e-5)
        assert expected == pytest.approx(limit, abs=0.01), "lr is small, not 0"


@pytest.mark.parametrize(
    ("optimizer", "rho", "mu"),
    [("momentum", 0.5, 0.0), ("nesterov", 0.5, 0.0), ("sgd", 0.0, 20.0), ("momentum", 0.3, 5.0)],
)
def test_momentum_and_proximal_steps_reach_it_too(optimizer: str, rho: float, mu: float) -> None:
    weighing = Weighing(normalised(optimizer, rho, LR * mu))
    found, plain = fixed_point(weighing, optimizer, rho, mu), fixed_point(PLAIN, optimizer, rho, mu)
    assert abs(found - OPTIMUM) < 0.02 < 0.3 < abs(plain - OPTIMUM)
