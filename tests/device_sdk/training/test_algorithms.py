"""Each algorithm by hand: on quadratics with a server of a few lines, and a round against PyTorch's
autograd."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from buffers import trained_model
from bundle_cache import cached_export
from fleetlearn_device.computations.registry import REGISTRY
from fleetlearn_device.runtimes.open_runtime import open_runtime
from fleetlearn_device.runtimes.runtime import Runtime
from fleetlearn_device.training.algorithms import (
    ALGORITHMS,
    DUAL,
    UnsupportedError,
    known_algorithms,
    run_algorithm,
)
from fleetlearn_device.training.data import as_data
from fleetlearn_device.training.train import DivergedError, StoppedError
from fleetlearn_device.training.work import Inputs, TaskOutcome, TaskSettings
from fleetlearn_export import LocalStep
from fleetlearn_protocol import Bundle, open_bundle
from fleetlearn_protocol.algorithms import EXCHANGES
from fleetlearn_protocol.computations.kinds import KINDS
from fleetlearn_protocol.messages import CONTROL, MODEL, SUMS, UPDATE, StepSchedule
from fleetlearn_protocol.vector import Vector
from quadratics import OPTIMUM, TWO, Quadratic, fedavg_fixed_point, optimum, quadratics_bundle
from torch import nn
from torch.nn import functional

START = np.array([3.0, 4.0], np.float32)
ALL_STEPS = LocalStep("sgd", proximal=True, correction=True)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return quadratics_bundle(tmp_path_factory.mktemp("quadratics") / "quadratics.bundle")


@dataclass
class Fleet:
    """Devices that keep their tied vectors, and a server that keeps the sums of its algorithm, in
    float64."""

    algorithm: str
    bundle: Bundle
    devices: Sequence[Quadratic] = TWO
    lr: float = 0.1
    steps: int = 20
    alpha: float = 0.0
    model: Any = field(default_factory=lambda: START.astype(np.float64))

    def __post_init__(self) -> None:
        self.runtime = open_runtime(self.bundle)
        self.tied: list[Mapping[str, Vector]] = [{} for _ in self.devices]
        self.control = np.zeros(2)
        self.momentum = np.zeros(2)

    def train(self, device: int) -> TaskOutcome:
        vectors = (
            {CONTROL: self.control.astype(np.float32)}
            if CONTROL in EXCHANGES[self.algorithm].vectors
            else {}
        )
        inputs = Inputs(self.model.astype(np.float32), None, vectors, self.tied[device])
        hyper = {"lr": self.lr, "mu": self.alpha}
        settings = TaskSettings(hyper, epochs=self.steps, batch_size=0, seed=0)
        data = as_data(self.devices[device].data)
        outcome = run_algorithm(self.algorithm, self.runtime, self.bundle, data, inputs, settings)
        self.tied[device] = outcome.tied
        return outcome

    def round(self, chosen: Iterable[int] | None = None) -> list[TaskOutcome]:
        """SCAFFOLD's algorithm 1 with a server rate of 1; FedDyn's with u = -h / alpha."""
        outcomes = [
            self.train(device)
            for device in (range(len(self.devices)) if chosen is None else chosen)
        ]
        part = len(outcomes) / len(self.devices)
        mean = np.mean([row.parts[UPDATE] for row in outcomes], 0, dtype=np.float64)
        if self.algorithm == "feddyn":
            self.momentum += part * mean
            mean = mean + self.momentum
        self.model = self.model + mean
        if CONTROL in EXCHANGES[self.algorithm].parts:
            self.control = self.control + part * np.mean(
                [row.parts[CONTROL] for row in outcomes], 0, dtype=np.float64
            )
        return outcomes


def test_the_protocol_s_table_and_the_device_s_name_the_same_algorithms() -> None:
    assert ALGORITHMS.keys() | KINDS.keys() == EXCHANGES.keys()
    for name, exchange in EXCHANGES.items():
        assert exchange.vectors[0] == MODEL
        assert exchange.parts[0] == (SUMS if name in KINDS else UPDATE)


def test_the_training_build_knows_plain_training_and_computations_alone() -> None:
    assert known_algorithms("ort-training") == tuple(REGISTRY)
    assert known_algorithms("onnx") == (
        *(name for name in ALGORITHMS if name not in ("plain", "fedmd", "own")),
        *REGISTRY,
    )


def test_plain_stays_at_fedavg_s_fixed_point(bundle: Bundle) -> None:
    """Which is not the optimum: the devices of FedAvg drift."""
    fleet = Fleet("plain", bundle)
    for _ in range(60):
        fleet.round()
    np.testing.assert_allclose(fleet.model, fedavg_fixed_point(TWO, 0.1, 20), atol=1e-5)
    assert np.abs(fleet.model - OPTIMUM).max() > 3


@pytest.mark.parametrize(
    ("algorithm", "alpha", "rounds"),
    [("scaffold", 0.0, 120), ("scaffold-gradient", 0.0, 120), ("feddyn", 0.5, 120)],
)
def test_the_optimum_with_many_local_steps(
    bundle: Bundle, algorithm: str, alpha: float, rounds: int
) -> None:
    fleet = Fleet(algorithm, bundle, alpha=alpha)
    for _ in range(rounds):
        fleet.round()
    np.testing.assert_allclose(fleet.model, OPTIMUM, atol=1e-5)


MANY = tuple(
    Quadratic(
        (1 + number % 3, 0.5 + number % 2), (10.0 * number - 17, 8.0 - 5 * number), 1 + number % 2
    )
    for number in range(5)
)


@pytest.mark.parametrize(
    ("algorithm", "alpha"), [("scaffold", 0.0), ("scaffold-gradient", 0.0), ("feddyn", 0.5)]
)
def test_the_optimum_where_two_of_five_devices_take_part_in_a_round(
    bundle: Bundle, algorithm: str, alpha: float
) -> None:
    fleet = Fleet(algorithm, bundle, MANY, lr=0.05, steps=15, alpha=alpha)
    luck = np.random.default_rng(7)
    for _ in range(500):
        fleet.round(luck.choice(5, 2, replace=False))
    np.testing.assert_allclose(fleet.model, optimum(MANY), atol=2e-5)
    if algorithm != "feddyn":
        own = [row.get(CONTROL, np.zeros(2)) for row in fleet.tied]
        np.testing.assert_allclose(fleet.control, np.mean(own, 0), atol=1e-5)


def test_the_first_rounds_of_scaffold_by_hand(bundle: Bundle) -> None:
    """In float64: w <- w - lr (g + c - c_k), K times; then option II."""
    fleet = Fleet("scaffold", bundle, lr=0.05, steps=3)
    model, server, own = START.astype(float), np.zeros(2), [np.zeros(2), np.zeros(2)]
    for _ in range(3):
        fleet.round()
        updates, changes = [], []
        for number, device in enumerate(TWO):
            now = model.copy()
            for _ in range(3):
                now -= 0.05 * (device.gradient(now) + server - own[number])
            after = own[number] - server + (model - now) / (3 * 0.05)
            updates.append(now - model)
            changes.append(after - own[number])
            own[number] = after
        model, server = model + np.mean(updates, 0), server + np.mean(changes, 0)
        np.testing.assert_allclose(fleet.model, model, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(fleet.control, server, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose([row[CONTROL] for row in fleet.tied], own, rtol=1e-4, atol=1e-4)


def test_scaffold_counts_each_gradient_with_its_step_s_rate(bundle: Bundle) -> None:
    """In float64: c_k is the mean of the gradients, weighed by the learning rates."""
    schedule = StepSchedule("exponential", factor=0.5, warm_up=1, start=0.25)
    device, control = TWO[0], np.array([0.5, -0.25])
    settings = TaskSettings({"lr": 0.2, "mu": 0.0}, 4, 0, 0, schedule=schedule)
    inputs = Inputs(START, None, {CONTROL: control.astype(np.float32)}, {})
    outcome = run_algorithm(
        "scaffold", open_runtime(bundle), bundle, as_data(device.data), inputs, settings
    )
    now, weighed, rates = START.astype(float), np.zeros(2), [0.05, 0.2, 0.1, 0.05]
    for rate in rates:
        gradient = device.gradient(now)
        now -= rate * (gradient + control)
        weighed += rate * gradient
    np.testing.assert_allclose(outcome.parts[UPDATE], now - START, rtol=1e-5)
    np.testing.assert_allclose(outcome.tied[CONTROL], weighed / sum(rates), rtol=1e-5)


def test_the_first_rounds_of_feddyn_by_hand(bundle: Bundle) -> None:
    """The paper's equations in float64: theta_k from its regularised loss, lambda_k, h, and the
    server's model."""
    alpha = 0.5
    fleet = Fleet("feddyn", bundle, lr=0.05, steps=4, alpha=alpha)
    model, dual, h = START.astype(float), [np.zeros(2), np.zeros(2)], np.zeros(2)
    for _ in range(3):
        fleet.round()
        after = []
        for number, device in enumerate(TWO):
            now = model.copy()
            for _ in range(4):
                now -= 0.05 * (device.gradient(now) - dual[number] + alpha * (now - model))
            dual[number] = dual[number] - alpha * (now - model)
            after.append(now)
        h -= alpha / 2 * np.sum([row - model for row in after], 0)
        model = np.mean(after, 0) - h / alpha
        np.testing.assert_allclose(fleet.model, model, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose([row[DUAL] for row in fleet.tied], dual, rtol=1e-4, atol=1e-4)


def test_option_1_keeps_the_gradient_at_the_round_s_model(bundle: Bundle) -> None:
    fleet = Fleet("scaffold-gradient", bundle, MANY)
    before = fleet.model
    fleet.round()
    for device, tied in zip(MANY, fleet.tied, strict=True):
        np.testing.assert_allclose(tied[CONTROL], device.gradient(before), rtol=1e-6)


def test_what_a_device_keeps_is_the_sum_of_what_it_reported(bundle: Bundle) -> None:
    for algorithm in ("scaffold", "scaffold-gradient"):
        fleet, total = Fleet(algorithm, bundle), np.zeros(2, np.float32)
        for _ in range(5):
            total += fleet.round()[1].parts[CONTROL]
            np.testing.assert_array_equal(fleet.tied[1][CONTROL], total)


def test_partial_work_divides_by_the_steps_that_were_done(bundle: Bundle) -> None:
    """A clock that counts steps, and a budget of 3 of the 10."""
    device, ticks = TWO[0], iter([0.0, *map(float, range(100))])
    settings = TaskSettings(
        {"lr": 0.05, "mu": 0.0}, 10, 0, 0, time_budget=3.0, clock=lambda: next(ticks)
    )
    inputs = Inputs(START, None, {CONTROL: np.zeros(2, np.float32)})
    outcome = run_algorithm("scaffold", open_runtime(bundle), bundle, device.data, inputs, settings)
    assert (outcome.result.steps, outcome.result.complete) == (3, False)
    steps = [START.astype(float)]
    for _ in range(3):
        steps.append(steps[-1] - 0.05 * device.gradient(steps[-1]))
    mean = np.mean([device.gradient(row) for row in steps[:3]], 0)
    np.testing.assert_allclose(outcome.tied[CONTROL], mean, rtol=1e-5)


# With PyTorch's autograd: a network with BatchNorm, several devices, batches, control variates that
# are not 0.

EXAMPLES, BATCH, EPOCHS, LR, MU = 20, 8, 2, 0.05, 0.3


def network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


@pytest.fixture(scope="module")
def network_bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    example = torch.randn(4, 6), torch.tensor([0, 1, 2, 0])
    path = tmp_path_factory.mktemp("network") / "network.bundle"
    cached_export(network(), functional.cross_entropy, example, path, step=ALL_STEPS)
    return open_bundle(path)


def device_data(device: int) -> tuple[Any, Any]:
    luck = np.random.default_rng(device)
    return luck.normal(size=(EXAMPLES, 6)).astype(np.float32), luck.integers(0, 3, EXAMPLES)


def flat(values: Mapping[str, Any], manifest: Any, buffers: bool) -> Vector:
    """The tensors in the manifest's order; where ``buffers`` is False those of buffers are
    zeros."""
    rows = [
        np.zeros(row.shape) if row.buffer and not buffers else np.asarray(values[row.name])
        for row in manifest.travelling
    ]
    return np.concatenate([row.ravel() for row in rows]).astype(np.float32)


def by_autograd(
    manifest: Any, model: nn.Module, device: int, correction: Vector, mu: float
) -> tuple[Vector, Vector, int]:
    """Train a copy of the model. Returns the model after it, the gradient at the model itself, and
    the steps."""
    module = network().train()
    module.load_state_dict(model.state_dict())
    slices = {
        row.name: slice(row.offset, row.offset + int(np.prod(row.shape)))
        for row in manifest.travelling
    }
    added = {
        name: torch.from_numpy(correction[slices[name]]).view_as(w)
        for name, w in module.named_parameters()
    }
    anchor = {name: w.detach().clone() for name, w in module.named_parameters()}
    data, steps = as_data(device_data(device)), 0
    at_model = {name: torch.zeros_like(w) for name, w in module.named_parameters()}
    for x, y in data.batches(BATCH, None):
        probe = network().train()
        probe.load_state_dict(model.state_dict())
        functional.cross_entropy(probe(torch.from_numpy(x)), torch.from_numpy(y)).backward()
        for name, w in probe.named_parameters():
            assert w.grad is not None
            at_model[name] += w.grad * len(x) / EXAMPLES
    for epoch in range(EPOCHS):
        for x, y in data.batches(BATCH, 5, epoch):
            module.zero_grad()
            functional.cross_entropy(module(torch.from_numpy(x)), torch.from_numpy(y)).backward()
            with torch.no_grad():
                for name, w in module.named_parameters():
                    assert w.grad is not None
                    w -= LR * (w.grad + mu * (w - anchor[name]) + added[name])
            steps += 1
    gradient = flat(at_model, manifest, False)
    return flat(module.state_dict(), manifest, True), gradient, steps


@pytest.mark.parametrize("algorithm", ["scaffold", "scaffold-gradient", "feddyn"])
def test_a_round_against_autograd(network_bundle: Bundle, algorithm: str) -> None:
    manifest, model = network_bundle.manifest, network()
    start = flat(model.state_dict(), manifest, True)
    runtime = open_runtime(network_bundle)
    luck = np.random.default_rng(3)
    buffers = (
        flat({row.name: np.ones(row.shape) for row in manifest.travelling}, manifest, False) == 0
    )
    assert buffers.any()
    server = (0.1 * luck.normal(size=manifest.size)).astype(np.float32)
    for device in range(3):
        own = (0.1 * luck.normal(size=manifest.size)).astype(np.float32)
        own[buffers] = 0
        mu = MU if algorithm == "feddyn" else 0.0
        settings = TaskSettings({"lr": LR, "mu": mu}, EPOCHS, BATCH, 5)
        if algorithm == "feddyn":
            inputs, correction = Inputs(start, None, {}, {DUAL: own}), -own
        else:
            inputs, correction = (
                Inputs(start, None, {CONTROL: server}, {CONTROL: own}),
                server - own,
            )
        outcome = run_algorithm(
            algorithm, runtime, network_bundle, device_data(device), inputs, settings
        )
        after, gradient, steps = by_autograd(manifest, model, device, correction, mu)
        update = after - start
        trained = trained_model(outcome.parts, start, manifest)
        np.testing.assert_allclose(trained, after, atol=1e-5)
        if algorithm == "feddyn":
            expected = own - MU * update
        elif algorithm == "scaffold":
            expected = own - server - update / (steps * LR)
        else:
            expected = gradient
        expected[buffers] = 0
        ((_, kept),) = outcome.tied.items()
        np.testing.assert_allclose(kept, expected, atol=1e-5)
        assert not kept[buffers].any()
        assert (trained != start)[buffers].any()
        if CONTROL in outcome.parts:
            np.testing.assert_allclose(outcome.parts[CONTROL], expected - own, atol=1e-5)


# What is refused


@pytest.mark.parametrize(
    ("step", "algorithm", "text"),
    [
        (
            LocalStep("sgd"),
            "scaffold",
            r"needs a step with correction=True; .* is LocalStep\('sgd'\)",
        ),
        (
            LocalStep("sgd", proximal=True),
            "feddyn",
            r"correction=True; .* is LocalStep\('sgd', proximal=True\)",
        ),
        (
            LocalStep("sgd"),
            "feddyn",
            r"correction=True and proximal=True;.*LocalStep\('sgd', correction=True, prox",
        ),
        (
            LocalStep("momentum", correction=True),
            "scaffold-gradient",
            (
                r"the optimizer sgd, since .*Export the model again with step=LocalStep\('sgd', "
                r"correction=True\)"
            ),
        ),
    ],
)
def test_a_bundle_whose_step_is_not_made_for_it(
    tmp_path: Path, step: LocalStep, algorithm: str, text: str
) -> None:
    bundle = quadratics_bundle(tmp_path / "other.bundle", step)
    inputs = Inputs(START, None, {CONTROL: np.zeros(2, np.float32)})
    settings = TaskSettings({"lr": 0.1}, 1, 0, 0)
    with pytest.raises(UnsupportedError, match=text):
        run_algorithm(algorithm, open_runtime(bundle), bundle, TWO[0].data, inputs, settings)


def test_a_step_that_computes_in_float16_may_do_nothing(tmp_path: Path) -> None:
    path = tmp_path / "half.bundle"
    model = nn.Linear(6, 3)
    cached_export(
        model, functional.cross_entropy, (torch.randn(4, 6), torch.tensor([0, 1, 2, 0])), path,
        step=LocalStep("sgd", correction=True), compute="float16",
    )  # fmt: skip
    bundle = open_bundle(path)
    zeros = np.zeros(bundle.manifest.size, np.float32)
    inputs, settings = Inputs(zeros, None, {CONTROL: zeros}), TaskSettings({"lr": 0.1}, 1, 0, 0)
    with pytest.raises(UnsupportedError, match="a step whose gradient overflows changes nothing"):
        run_algorithm("scaffold", open_runtime(bundle), bundle, device_data(0), inputs, settings)


def scaffold(bundle: Bundle, **changes: Any) -> TaskOutcome:
    settings = TaskSettings({"lr": 0.1}, 1, 0, 0)._replace(**changes)
    inputs = Inputs(START, None, {CONTROL: np.zeros(2, np.float32)})
    return run_algorithm(
        "scaffold-gradient", open_runtime(bundle), bundle, TWO[0].data, inputs, settings
    )


def test_scaffold_divides_by_lr(bundle: Bundle) -> None:
    fleet = Fleet("scaffold", bundle, lr=0.0)
    with pytest.raises(ValueError, match=r"lr is 0\.0; the algorithm scaffold divides by it"):
        fleet.train(0)


def test_the_gradient_s_batches_count_as_progress_and_can_be_stopped(bundle: Bundle) -> None:
    counted: list[int] = []
    scaffold(
        bundle,
        on_evaluated=lambda: counted.append(1),
        on_step=lambda steps, loss: counted.append(2),
    )
    assert counted == [1, 2]
    with pytest.raises(StoppedError, match="before its first step"):
        scaffold(bundle, should_stop=lambda: True)


def test_a_tied_vector_that_is_not_finite_is_not_kept(bundle: Bundle) -> None:
    """One step of 1.2: mu times that is beyond float32, while the proximal term is 0."""
    with pytest.raises(
        DivergedError,
        match="the dual after training is not finite: element 0 of the vector is -inf",
    ):
        Fleet("feddyn", bundle, steps=1, alpha=3e38).train(0)


def test_a_vector_of_another_size_is_refused(bundle: Bundle) -> None:
    """numpy would stretch one element to all."""
    one, settings = np.zeros(1, np.float32), TaskSettings({"lr": 0.1}, 1, 0, 0)
    for inputs in (
        Inputs(START, None, {CONTROL: one}),
        Inputs(START, None, {CONTROL: START}, {CONTROL: one}),
    ):
        with pytest.raises(
            ValueError, match=r"the control is float32 of shape \(1,\); expected .* \(2,\)"
        ):
            run_algorithm("scaffold", open_runtime(bundle), bundle, TWO[0].data, inputs, settings)


def test_what_was_loaded_before_does_not_matter(bundle: Bundle) -> None:
    """The runtime is the one of another device's task, of another algorithm."""
    runtime: Runtime = open_runtime(bundle)
    fresh, used = Fleet("scaffold", bundle), Fleet("feddyn", bundle, alpha=0.5)
    used.round()
    fresh.runtime = runtime
    again = Fleet("scaffold", bundle)
    again.runtime = used.runtime
    for one, other in zip(fresh.round(), again.round(), strict=True):
        for name in (UPDATE, CONTROL):
            assert one.parts[name].tobytes() == other.parts[name].tobytes()
