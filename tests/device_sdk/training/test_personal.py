"""Ditto and FedRep by their papers' equations: two rounds of two devices against PyTorch in
float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from buffers import trained_model
from bundle_cache import cached_export
from fleetlearn_device.runtimes.open_runtime import open_runtime
from fleetlearn_device.training.algorithms import UnsupportedError, run_algorithm
from fleetlearn_device.training.data import as_data
from fleetlearn_device.training.personal import PERSONAL_SEED
from fleetlearn_device.training.train import DivergedError, evaluate_data
from fleetlearn_device.training.work import Inputs, TaskOutcome, TaskSettings
from fleetlearn_export import LocalStep
from fleetlearn_protocol import Bundle, Manifest, open_bundle
from fleetlearn_protocol.messages import BUFFERS, UPDATE
from fleetlearn_protocol.vector import Vector, gather, scatter
from torch import Tensor, nn
from torch.nn import functional

EXAMPLES, BATCH, EPOCHS, PERSONAL_EPOCHS, LR, LAMBDA = (20, 12), 8, 2, 3, 0.05, 0.4
SEED = 2**53 - 3
HEAD = ("3.weight", "3.bias")
Values = dict[str, Tensor]


def network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def exported(path: Path, **options: Any) -> Bundle:
    example = torch.randn(4, 6), torch.tensor([0, 1, 2, 0])
    cached_export(network(), functional.cross_entropy, example, path, **options)
    return open_bundle(path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return exported(
        tmp_path_factory.mktemp("whole") / "whole.bundle", step=LocalStep("sgd", proximal=True)
    )


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The last layer stays on the device."""
    return exported(
        tmp_path_factory.mktemp("split") / "split.bundle", step=LocalStep("sgd"), personal=["3"]
    )


def device_data(device: int) -> tuple[Any, Any]:
    luck, count = np.random.default_rng(device), EXAMPLES[device]
    return luck.normal(size=(count, 6)).astype(np.float32), luck.integers(0, 3, count)


def flat(values: Mapping[str, Tensor], manifest: Manifest, personal: bool | None = None) -> Any:
    """float64: the rows of the table that are personal, or not; None: all."""
    rows = [row for row in manifest.parameters if personal in (None, row.personal)]
    return np.concatenate([values[row.name].numpy().ravel() for row in rows])


def start() -> Values:
    state = network().double().state_dict()
    return {name: value for name, value in state.items() if value.is_floating_point()}


def sgd(
    values: Values,
    device: int,
    epochs: int,
    seed: int,
    trained: Callable[[str], bool],
    pull: Values | None = None,
) -> Values:
    """Return the values after these passes of w <- w - lr (grad F_k(w) + lambda (w - pull)). What
    is not ``trained`` stays as it is, statistics too."""
    module = network().double().train()
    module.load_state_dict(values, strict=False)
    tensors = {
        name: value for name, value in module.state_dict(keep_vars=True).items() if name in values
    }
    for epoch in range(epochs):
        for x, y in as_data(device_data(device)).batches(BATCH, seed, epoch):
            before = {name: value.detach().clone() for name, value in tensors.items()}
            module.zero_grad()
            functional.cross_entropy(
                module(torch.from_numpy(x).double()), torch.from_numpy(y)
            ).backward()
            with torch.no_grad():
                for name, value in tensors.items():
                    if not trained(name):
                        value.copy_(before[name])
                    elif value.grad is not None:
                        pulled = 0 if pull is None else LAMBDA * (before[name] - pull[name])
                        value -= LR * (value.grad + pulled)
    return {name: value.detach().clone() for name, value in tensors.items()}


def everything(name: str) -> bool:
    return True


class Round(NamedTuple):
    outcomes: list[TaskOutcome]
    model: Vector


def two_rounds(bundle: Bundle, algorithm: str, model: Any, mu: Mapping[str, float]) -> list[Round]:
    """The algorithm on both devices, and the mean by examples. Each device keeps what is its
    own."""
    runtime, rounds = open_runtime(bundle), []
    kept: list[Inputs] = [Inputs(np.zeros(0, np.float32))] * 2
    for number in range(2):
        outcomes = []
        for device in range(2):
            settings = TaskSettings(
                {"lr": LR, **mu},
                EPOCHS,
                BATCH,
                SEED + number,
                evaluate=True,
                personal_epochs=PERSONAL_EPOCHS,
            )
            inputs = kept[device]._replace(model=np.float32(model))
            outcomes.append(
                run_algorithm(algorithm, runtime, bundle, device_data(device), inputs, settings)
            )
            kept[device] = Inputs(
                model, outcomes[device].result.kept_state, personal=outcomes[device].personal
            )
        models = [trained_model(row.parts, np.float32(model), bundle.manifest) for row in outcomes]
        model = np.average(models, 0, EXAMPLES)
        rounds.append(Round(outcomes, model))
    return rounds


def test_two_rounds_of_ditto_by_hand(whole: Bundle) -> None:
    """Algorithm 1: w_k from w_t by SGD; v_k <- v_k - lr (grad F_k(v_k) + lambda (v_k - w_t)), and
    v_k is kept."""
    manifest, model, own = whole.manifest, start(), [start(), start()]
    for number, found in enumerate(
        two_rounds(whole, "ditto", flat(model, manifest), {"mu": LAMBDA})
    ):
        after = []
        for device in range(2):
            after.append(sgd(model, device, EPOCHS, SEED + number, everything))
            seed = (SEED + number + PERSONAL_SEED) % 2**53
            own[device] = sgd(own[device], device, PERSONAL_EPOCHS, seed, everything, pull=model)
            outcome = found.outcomes[device]
            trained = trained_model(outcome.parts, np.float32(flat(model, manifest)), manifest)
            np.testing.assert_allclose(trained, flat(after[device], manifest), atol=1e-5)
            assert outcome.personal is not None
            np.testing.assert_allclose(outcome.personal, flat(own[device], manifest), atol=1e-5)
        model = {name: (20 * after[0][name] + 12 * after[1][name]) / 32 for name in model}
        np.testing.assert_allclose(found.model, flat(model, manifest), atol=1e-5)
    assert np.abs(flat(own[0], manifest) - flat(own[1], manifest)).max() > 0.1, (
        "the personal models differ"
    )


def test_two_rounds_of_fedrep_by_hand(split: Bundle) -> None:
    """Algorithm 1: the head from the kept one with the body of the round, then the body with that
    head."""
    manifest, model, heads = split.manifest, start(), [start(), start()]
    for number, found in enumerate(two_rounds(split, "fedrep", flat(model, manifest, False), {})):
        after = []
        for device in range(2):
            both = model | {name: heads[device][name] for name in HEAD}
            seed = (SEED + number + PERSONAL_SEED) % 2**53
            heads[device] = sgd(both, device, PERSONAL_EPOCHS, seed, HEAD.__contains__)
            after.append(
                sgd(heads[device], device, EPOCHS, SEED + number, lambda name: name not in HEAD)
            )
            outcome = found.outcomes[device]
            trained = trained_model(
                outcome.parts, np.float32(flat(model, manifest, False)), manifest
            )
            np.testing.assert_allclose(trained, flat(after[device], manifest, False), atol=1e-5)
            np.testing.assert_allclose(
                outcome.result.kept_state, flat(heads[device], manifest, True), atol=1e-5
            )
            assert outcome.personal is None
        model = {name: (20 * after[0][name] + 12 * after[1][name]) / 32 for name in model}
        np.testing.assert_allclose(found.model, flat(model, manifest, False), atol=1e-5)
    assert np.abs(flat(heads[0], manifest, True) - flat(heads[1], manifest, True)).max() > 0.1


def task(bundle: Bundle, algorithm: str, inputs: Inputs, **changes: Any) -> TaskOutcome:
    hyper = {"lr": LR, "mu": LAMBDA} if bundle.manifest.step.proximal else {"lr": LR}
    settings = TaskSettings(
        hyper, EPOCHS, BATCH, 5, evaluate=True, personal_epochs=PERSONAL_EPOCHS
    )._replace(**changes)
    return run_algorithm(algorithm, open_runtime(bundle), bundle, device_data(0), inputs, settings)


def test_ditto_s_update_is_plain_training_s(whole: Bundle) -> None:
    inputs = Inputs(whole.parameters(), personal=whole.parameters() + np.float32(0.5))
    ours = task(whole, "ditto", inputs)
    plain = task(whole, "plain", Inputs(inputs.model), hyper={"lr": LR, "mu": 0.0})
    assert ours.parts[UPDATE].tobytes() == plain.parts[UPDATE].tobytes()
    for name in ("steps", "epochs", "seen", "loss", "evaluation", "examples"):
        assert getattr(ours.result, name) == getattr(plain.result, name), name


def test_the_personal_model_is_measured_before_its_training(whole: Bundle) -> None:
    first = task(whole, "ditto", Inputs(whole.parameters()))
    assert first.personal is not None
    assert first.personal_evaluation == first.result.evaluation, "it is the round's model"
    runtime = open_runtime(whole)
    runtime.load(first.personal)
    second = task(whole, "ditto", Inputs(whole.parameters(), personal=first.personal))
    assert second.personal_evaluation == evaluate_data(runtime, device_data(0), batch_size=BATCH)
    assert second.personal_evaluation != second.result.evaluation == first.result.evaluation
    unasked = task(
        whole, "ditto", Inputs(whole.parameters(), personal=first.personal), evaluate=False
    )
    assert unasked.personal_evaluation is unasked.result.evaluation is None


def test_without_lambda_the_personal_model_is_trained_alone(whole: Bundle) -> None:
    """mu = 0: it does not depend on the round's model."""
    personal, model = whole.parameters(), whole.parameters()
    alone = [
        task(whole, "ditto", Inputs(row, personal=personal), hyper={"lr": LR, "mu": 0.0})
        for row in (model, model + 1)
    ]
    assert alone[0].personal is not None
    assert np.array_equal(alone[0].personal, alone[1].personal)


def test_fedrep_measures_the_round_s_model_with_the_kept_head(split: Bundle) -> None:
    manifest = split.manifest
    kept = np.linspace(-1, 1, manifest.local_size - manifest.size, dtype=np.float32)
    body = split.parameters()[: manifest.size]
    runtime = open_runtime(split)
    runtime.load(np.concatenate([body, kept]))
    outcome = task(split, "fedrep", Inputs(body, kept))
    assert outcome.result.evaluation == evaluate_data(runtime, device_data(0), batch_size=BATCH)
    assert outcome.personal_evaluation is None


def test_an_optimizer_s_state_begins_anew_in_each_phase(tmp_path: Path) -> None:
    """With momentum: the body's passes are those of a task that begins with the trained head."""
    bundle = exported(tmp_path / "momentum.bundle", step=LocalStep("momentum"), personal=["3"])
    size = bundle.manifest.size
    body = bundle.parameters()[:size]
    outcome = task(bundle, "fedrep", Inputs(body), evaluate=False)
    runtime = open_runtime(bundle)
    runtime.load(np.concatenate([body, outcome.result.kept_state]))
    for epoch in range(EPOCHS):
        for batch in as_data(device_data(0)).batches(BATCH, 5, epoch):
            runtime.step(batch, lr=LR, momentum=0.9)
            whole = np.concatenate([runtime.parameters, outcome.result.kept_state])
            runtime.load(whole, anchor=body, state=runtime.state)
    expected = runtime.parameters - body
    scatter(expected, bundle.manifest.buffers, 0.0)
    assert outcome.parts[UPDATE].tobytes() == expected.tobytes()
    assert (
        outcome.parts[BUFFERS].tobytes()
        == gather(runtime.parameters, bundle.manifest.buffers).tobytes()
    )


@pytest.mark.parametrize("algorithm", ["ditto", "fedrep"])
def test_steps_count_on_from_part_to_part(whole: Bundle, split: Bundle, algorithm: str) -> None:
    """The device tells of the steps of both parts, and reports those of the update."""
    bundle = whole if algorithm == "ditto" else split
    told: list[int] = []
    inputs = Inputs(bundle.parameters()[: bundle.manifest.size])
    outcome = task(bundle, algorithm, inputs, on_step=lambda steps, loss: told.append(steps))
    assert told == [*range(1, 16)]
    assert (outcome.result.steps, outcome.result.epochs, outcome.result.complete) == (6, 2.0, True)


@pytest.mark.parametrize(("algorithm", "budget", "steps", "total"), [
    ("ditto", 15.0, 6, 15),
    ("ditto", 10.0, 4, 10),
    ("fedrep", 10.0, 4, 10),
    ("fedrep", 0.5, 1, 2),
])  # fmt: skip
def test_a_time_budget_is_shared_by_the_passes(
    whole: Bundle, split: Bundle, algorithm: str, budget: float, steps: int, total: int
) -> None:
    """A clock that counts steps: two fifths of them are the update's, and each part does at least
    one."""
    bundle = whole if algorithm == "ditto" else split
    done = 0

    def count(steps: int, loss: float) -> None:
        nonlocal done
        done = steps

    inputs = Inputs(bundle.parameters()[: bundle.manifest.size])
    outcome = task(
        bundle, algorithm, inputs, time_budget=budget, clock=lambda: float(done), on_step=count
    )
    assert (outcome.result.steps, done, outcome.result.complete) == (steps, total, budget == 15.0)


def test_what_diverged_is_named(whole: Bundle) -> None:
    far = np.full(whole.manifest.size, 1e30, np.float32)
    with pytest.raises(
        DivergedError, match="in the training of the personal model: before training"
    ):
        task(whole, "ditto", Inputs(whole.parameters(), personal=far))


@pytest.mark.parametrize(
    ("algorithm", "options", "text"),
    [
        (
            "ditto",
            {},
            r"needs a step with proximal=True; .*again with step=LocalStep\('sgd', proximal=True\)",
        ),
        (
            "ditto",
            {"step": LocalStep(proximal=True), "personal": ["3"]},
            "has a whole model for each device, and of bundle other devices keep parts from task "
            "to task. Export the model again without personal= and kept=",
        ),
        (
            "fedrep",
            {},
            r'needs personal parameters, and bundle other has none.*again with personal=\["head"\]',
        ),
        (
            "fedrep",
            {"step": LocalStep(clip=True), "personal": ["3"]},
            (
                r"needs a step with clip=False; .*LocalStep\('sgd', clip=True\).*again with "
                r"step=LocalStep\('sgd'\)"
            ),
        ),
    ],
)
def test_bundles_that_are_refused(
    tmp_path: Path, algorithm: str, options: dict[str, Any], text: str
) -> None:
    bundle = exported(tmp_path / "other.bundle", **options)
    with pytest.raises(UnsupportedError, match=text):
        task(
            bundle, algorithm, Inputs(bundle.parameters()[: bundle.manifest.size]), hyper={"lr": LR}
        )


def test_a_personal_model_of_another_size_is_refused(whole: Bundle) -> None:
    with pytest.raises(ValueError, match="the personal model is float32 of shape"):
        task(whole, "ditto", Inputs(whole.parameters(), personal=np.zeros(1, np.float32)))
