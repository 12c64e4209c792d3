"""pFedMe and APFL against softmax regression in NumPy, written from the papers' equations, against
hand-worked steps, and against the closed form that pFedMe has on quadratics."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bundle_cache import cached_export
from fleetlearn_device.runtimes.open_runtime import open_runtime
from fleetlearn_device.training.algorithms import (
    UnsupportedError,
    personal_size,
    run_algorithm,
)
from fleetlearn_device.training.data import as_data
from fleetlearn_device.training.train import evaluate_data
from fleetlearn_device.training.two_models import mixed_model
from fleetlearn_device.training.work import Inputs, TaskOutcome, TaskSettings
from fleetlearn_export import LocalStep
from fleetlearn_protocol import Bundle, open_bundle
from fleetlearn_protocol.messages import UPDATE
from hypothesis import given, settings
from hypothesis import strategies as st
from line_bundle import line_data, write_line_bundle
from numpy.typing import NDArray
from quadratics import Quadratic, quadratics_bundle
from torch import nn
from torch.nn import functional

FEATURES, CLASSES, BATCH, EPOCHS, LR = 6, 3, 8, 2, 0.1
COUNTS, SEED = (20, 12), 7
LAMBDA, TURNS, ETA = 0.8, 3, 0.5
ALPHA, ADAPT = 0.6, 1.0
Floats = NDArray[np.float64]
PFEDME = {"lr": LR, "mu": LAMBDA, "inner_steps": TURNS, "outer_lr": ETA}
APFL = {"lr": LR, "alpha": ALPHA, "adapt_alpha": ADAPT}
HYPER: Mapping[str, Mapping[str, float]] = {"pfedme": PFEDME, "apfl": APFL}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = nn.Linear(FEATURES, CLASSES)
    example = torch.randn(4, FEATURES), torch.tensor([0, 1, 2, 0])
    path = tmp_path_factory.mktemp("softmax") / "softmax.bundle"
    step = LocalStep("sgd", proximal=True)
    cached_export(model, functional.cross_entropy, example, path, step=step)
    return open_bundle(path)


@pytest.fixture(scope="module")
def quadratics(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return quadratics_bundle(tmp_path_factory.mktemp("quadratics") / "quadratics.bundle")


def device_data(device: int) -> tuple[Any, Any]:
    luck, count = np.random.default_rng(device), COUNTS[device]
    return luck.normal(size=(count, FEATURES)).astype(np.float32), luck.integers(0, CLASSES, count)


def gradient(flat: Floats, x: Any, y: Any) -> Floats:
    """Of the mean cross-entropy of softmax regression; the vector is the weight, then the bias."""
    weight, bias = flat[: FEATURES * CLASSES].reshape(CLASSES, FEATURES), flat[-CLASSES:]
    scores = np.exp(x.astype(np.float64) @ weight.T + bias)
    off = scores / scores.sum(1, keepdims=True) - np.eye(CLASSES)[y]
    return np.concatenate([(off.T @ x / len(x)).ravel(), off.mean(0)])


def batches(device: int, seed: int) -> list[Any]:
    data = as_data(device_data(device))
    return [row for epoch in range(EPOCHS) for row in data.batches(BATCH, seed, epoch)]


def by_algorithm_1_of_pfedme(model: Floats, device: int, seed: int) -> tuple[Floats, Floats]:
    """Return (w, theta) after a device's part of a round."""
    local, theta = model.copy(), model.copy()
    for x, y in batches(device, seed):
        for _ in range(TURNS):
            theta = theta - LR * (gradient(theta, x, y) + LAMBDA * (theta - local))
        local = local - ETA * LAMBDA * (local - theta)
    return local, theta


def by_algorithm_1_of_apfl(
    model: Floats, own: Floats, alpha: float, device: int, seed: int
) -> tuple[Floats, Floats, float]:
    """Return (w, v, alpha) after a device's part of a round."""
    local = model.copy()
    for x, y in batches(device, seed):
        mixed = gradient(alpha * own + (1 - alpha) * local, x, y)
        later = alpha - ADAPT * LR * np.dot(own - local, mixed)
        own = own - LR * alpha * mixed
        local = local - LR * gradient(local, x, y)
        alpha = min(max(later, 0.0), 1.0)
    return local, own, alpha


def task(
    bundle: Bundle, algorithm: str, inputs: Inputs, device: int = 0, **changes: Any
) -> TaskOutcome:
    chosen = TaskSettings(HYPER[algorithm], EPOCHS, BATCH, SEED, evaluate=True)
    return run_algorithm(
        algorithm,
        open_runtime(bundle),
        bundle,
        device_data(device),
        inputs,
        chosen._replace(**changes),
    )


def test_two_rounds_of_pfedme_by_the_paper(bundle: Bundle) -> None:
    model = bundle.parameters().astype(np.float64)
    for seed in (SEED, SEED + 1):
        ends = []
        for device in range(2):
            local, theta = by_algorithm_1_of_pfedme(model, device, seed)
            found = task(bundle, "pfedme", Inputs(np.float32(model)), device, seed=seed)
            np.testing.assert_allclose(found.parts[UPDATE], local - model, atol=1e-6)
            assert found.personal is not None
            np.testing.assert_allclose(found.personal, theta, atol=1e-6)
            assert np.abs(theta - local).max() > 0.03, "the two models differ"
            ends.append(local)
        model = np.mean(ends, axis=0)


def test_two_rounds_of_apfl_by_the_paper(bundle: Bundle) -> None:
    size, start = bundle.manifest.size, bundle.parameters().astype(np.float64)
    model, own, alphas = start, [start, start], [ALPHA, ALPHA]
    kept: list[Any] = [None, None]
    for seed in (SEED, SEED + 1):
        ends = []
        for device in range(2):
            local, own[device], alphas[device] = by_algorithm_1_of_apfl(
                model, own[device], alphas[device], device, seed
            )
            inputs = Inputs(np.float32(model), personal=kept[device])
            found = task(bundle, "apfl", inputs, device, seed=seed)
            np.testing.assert_allclose(found.parts[UPDATE], local - model, atol=1e-6)
            kept[device] = found.personal
            assert kept[device].size == 2 * size + 1 == personal_size("apfl", bundle.manifest)
            mixed = alphas[device] * own[device] + (1 - alphas[device]) * local
            np.testing.assert_allclose(kept[device][:size], mixed, atol=1e-6)
            np.testing.assert_allclose(kept[device][size:-1], own[device], atol=1e-6)
            assert kept[device][-1] == pytest.approx(alphas[device], abs=1e-6)
            ends.append(local)
        model = np.mean(ends, axis=0)
    assert abs(alphas[0] - ALPHA) > 0.001, "alpha has moved"
    assert abs(alphas[0] - alphas[1]) > 0.0005


def test_apfl_s_update_is_plain_training_s(bundle: Bundle) -> None:
    inputs = Inputs(bundle.parameters(), personal=bundle.parameters() + np.float32(0.5))
    ours = task(bundle, "apfl", inputs)
    plain = run_algorithm(
        "plain",
        open_runtime(bundle),
        bundle,
        device_data(0),
        Inputs(inputs.model),
        TaskSettings({"lr": LR}, EPOCHS, BATCH, SEED, evaluate=True),
    )
    assert ours.parts[UPDATE].tobytes() == plain.parts[UPDATE].tobytes()
    for name in ("steps", "epochs", "seen", "loss", "metrics", "evaluation", "examples"):
        assert getattr(ours.result, name) == getattr(plain.result, name), name


@pytest.mark.parametrize("algorithm", HYPER)
def test_personal_models_are_measured_before_their_training(bundle: Bundle, algorithm: str) -> None:
    first = task(bundle, algorithm, Inputs(bundle.parameters()))
    assert first.personal is not None
    assert first.personal_evaluation == first.result.evaluation, "it is the round's model"
    model = bundle.parameters() + np.float32(0.25)
    second = task(bundle, algorithm, Inputs(model, personal=first.personal))
    runtime, size = open_runtime(bundle), bundle.manifest.size
    mixed = mixed_model(first.personal, model, bundle.manifest)
    runtime.load(first.personal if algorithm == "pfedme" else mixed)
    expected = evaluate_data(runtime, device_data(0), batch_size=BATCH)
    assert second.personal_evaluation == expected != second.result.evaluation
    np.testing.assert_allclose(
        mixed_model(np.float32([1, 2, 3, 4, 0.25]), np.float32([9, 5]), bundle.manifest),
        [0.25 * 3 + 0.75 * 9, 0.25 * 4 + 0.75 * 5],
    )
    unasked = task(bundle, algorithm, Inputs(model, personal=first.personal), evaluate=False)
    assert unasked.personal_evaluation is unasked.result.evaluation is None
    assert unasked.personal is not None
    np.testing.assert_array_equal(unasked.personal[:size], second.personal[:size])


def on_quadratic(
    bundle: Bundle, algorithm: str, model: Any, hyper: Mapping[str, float], **changes: Any
) -> TaskOutcome:
    device = Quadratic((1.0, 4.0), (3.0, -2.0), 2)
    chosen = TaskSettings(hyper, 1, 0, SEED)._replace(**changes)
    inputs = Inputs(np.float32(model), personal=changes.pop("personal", None))
    data = tuple(device.data.values())
    return run_algorithm(algorithm, open_runtime(bundle), bundle, data, inputs, chosen)


def test_a_step_of_pfedme_by_hand(quadratics: Bundle) -> None:
    """f = 1/2 (w1 - 3)^2 + 4/2 (w2 + 2)^2 at (1, 0): the gradient is (-2, 8). With lr 0.1 theta is
    (1.2, -0.8) after one step; the second adds 0.5 times (0.2, -0.8) to (-1.8, 4.8)."""
    hyper = {"lr": 0.1, "mu": 0.5, "outer_lr": 0.4, "inner_steps": 1.0}
    one = on_quadratic(quadratics, "pfedme", (1, 0), hyper)
    np.testing.assert_allclose(one.personal, (1.2, -0.8), rtol=1e-6)
    np.testing.assert_allclose(one.parts[UPDATE], (0.2 * 0.2, 0.2 * -0.8), rtol=1e-5)
    two = on_quadratic(quadratics, "pfedme", (1, 0), hyper | {"inner_steps": 2.0})
    theta = (1.2 - 0.1 * (-1.8 + 0.1), -0.8 - 0.1 * (4.8 - 0.4))
    np.testing.assert_allclose(two.personal, theta, rtol=1e-6)
    np.testing.assert_allclose(two.parts[UPDATE], (0.2 * 0.37, 0.2 * -1.24), rtol=1e-5)


def test_a_step_of_apfl_by_hand(quadratics: Bundle) -> None:
    """w = (1, 0), v = (5, 0), alpha 1/4: the mixture is (2, 0), its gradient (-1, 8), and <v - w,
    g> = -4, so that alpha rises by 0.1 * 4."""
    hyper = {"lr": 0.1, "alpha": 0.25, "adapt_alpha": 1.0}
    kept = np.float32([0, 0, 5, 0, 0.25])
    device = tuple(Quadratic((1.0, 4.0), (3.0, -2.0), 2).data.values())
    found = run_algorithm(
        "apfl",
        open_runtime(quadratics),
        quadratics,
        device,
        Inputs(np.float32([1, 0]), personal=kept),
        TaskSettings(hyper, 1, 0, SEED),
    )
    np.testing.assert_allclose(found.parts[UPDATE], (0.2, -0.8), rtol=1e-6)
    own, alpha = np.array([5 + 0.1 * 0.25, -0.1 * 0.25 * 8]), 0.65
    mixed = alpha * own + (1 - alpha) * np.array([1.2, -0.8])
    np.testing.assert_allclose(found.personal, [*mixed, *own, alpha], rtol=1e-6)


@settings(max_examples=12, deadline=None)
@given(mu=st.floats(0.5, 4), share=st.floats(0.1, 1), start=st.tuples(*[st.floats(-5, 5)] * 2))
def test_pfedme_s_closed_form_on_quadratics(
    quadratics: Bundle, mu: float, share: float, start: tuple[float, float]
) -> None:
    """With theta solved: (c m + lambda w) / (c + lambda) for f = c/2 (w - m)^2. Each batch brings w
    nearer to m by the factor 1 - eta lambda c / (c + lambda)."""
    c, m, rounds = np.array([1.0, 4.0]), np.array([3.0, -2.0]), 3
    hyper = {"lr": 0.2, "mu": mu, "outer_lr": share / mu, "inner_steps": 150.0}
    found = on_quadratic(quadratics, "pfedme", start, hyper, epochs=rounds)
    model = m + (np.float32(start) - m) * (1 - share * c / (c + mu)) ** rounds
    np.testing.assert_allclose(np.float32(start) + found.parts[UPDATE], model, atol=1e-4)
    before = m + (np.float32(start) - m) * (1 - share * c / (c + mu)) ** (rounds - 1)
    np.testing.assert_allclose(found.personal, (c * m + mu * before) / (c + mu), atol=1e-4)


@pytest.mark.parametrize(("algorithm", "each"), [("pfedme", TURNS), ("apfl", 2)])
def test_all_steps_are_told_and_cost_time(bundle: Bundle, algorithm: str, each: int) -> None:
    """Six batches. In the time of four, three are done: a fourth begins only if it fits."""
    told: list[int] = []
    inputs = Inputs(bundle.parameters())
    found = task(bundle, algorithm, inputs, on_step=lambda steps, loss: told.append(steps))
    assert told == [each * number for number in range(1, 7)]
    assert (found.result.steps, found.result.epochs, found.result.complete) == (6, 2.0, True)
    told.clear()
    short = task(
        bundle,
        algorithm,
        inputs,
        on_step=lambda steps, loss: told.append(steps),
        time_budget=4.0 * each - 1,
        clock=lambda: float(told[-1] if told else 0),
    )
    assert (short.result.steps, short.result.complete) == (3, False)


@pytest.mark.parametrize(("algorithm", "changes", "said"), [
    ("pfedme", {"inner_steps": 2.5}, "inner_steps is 2.5; expected a whole number from 1 to 10000"),
    ("pfedme", {"inner_steps": 0.0}, "inner_steps is 0.0"),
    ("apfl", {"alpha": 1.5}, "alpha from 0 to 1"),
    ("apfl", {"adapt_alpha": -1.0}, "adapt_alpha not negative"),
    ("apfl", {"alpha": None}, r"the algorithm apfl needs the hyper-parameters \['alpha'\] too"),
    ("pfedme", {"alpha": 1.0}, r"hyper-parameters \['alpha'\] are not the bundle's"),
])  # fmt: skip
def test_numbers_that_are_refused(
    bundle: Bundle, algorithm: str, changes: dict[str, float | None], said: str
) -> None:
    hyper = {
        name: value for name, value in {**HYPER[algorithm], **changes}.items() if value is not None
    }
    with pytest.raises(ValueError, match=said):
        task(bundle, algorithm, Inputs(bundle.parameters()), hyper=hyper)


def test_bundles_that_are_refused(tmp_path: Path) -> None:
    other = write_line_bundle(tmp_path / "line.bundle")
    inputs, settings = Inputs(np.zeros(other.manifest.size, np.float32)), TaskSettings({}, 1, 0, 0)
    for algorithm, said in (
        ("pfedme", "needs a step with proximal=True"),
        ("apfl", "needs a step with the optimizer sgd"),
    ):
        with pytest.raises(UnsupportedError, match=said):
            run_algorithm(algorithm, open_runtime(other), other, line_data(4), inputs, settings)


def test_another_algorithm_s_personal_model_is_where_apfl_begins(bundle: Bundle) -> None:
    """And APFL's mixture is what the others take."""
    size, other = bundle.manifest.size, bundle.parameters() + np.float32(1)
    from_ditto = task(bundle, "apfl", Inputs(bundle.parameters(), personal=other))
    kept = np.concatenate([np.zeros(size), other, [ALPHA]]).astype(np.float32)
    own = task(bundle, "apfl", Inputs(bundle.parameters(), personal=kept))
    assert from_ditto.personal is not None
    assert from_ditto.personal.tobytes() == own.personal.tobytes()  # type: ignore[union-attr]
    settings = TaskSettings({"lr": LR, "mu": 1.0}, 1, BATCH, SEED)
    for personal in (kept, kept[:size]):
        found = run_algorithm(
            "ditto",
            open_runtime(bundle),
            bundle,
            device_data(0),
            Inputs(bundle.parameters(), personal=personal),
            settings,
        )
        assert found.personal is not None
        assert found.personal.size == size
