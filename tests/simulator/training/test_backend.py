"""The devices' training: the two back ends against each other, and against the device's own loop
and its steps."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from bundle_cache import cached_export
from features import features_bundle
from fleetlearn_device.runtimes.open_runtime import open_runtime
from fleetlearn_device.runtimes.providers import CPU, PROVIDERS, Provider
from fleetlearn_device.training.data import as_data
from fleetlearn_device.training.kept_state import kept_state_size
from fleetlearn_device.training.train import train
from fleetlearn_export import LocalStep, TrainMany, export_bundle
from fleetlearn_protocol import Bundle, open_bundle
from fleetlearn_protocol.messages import Evaluation, StepSchedule
from fleetlearn_simulator.data.generators import Arrays
from fleetlearn_simulator.data.sources import Source
from fleetlearn_simulator.errors import SimulatorError
from fleetlearn_simulator.training.backend import (
    Job,
    LocalSettings,
    PerDevice,
    RoundInputs,
    jobs_from_columns,
    means,
    steps_of,
)
from fleetlearn_simulator.training.fit_for_many import not_for_many
from fleetlearn_simulator.training.kept_rows import NO_ROW, row_files
from fleetlearn_simulator.training.trained_devices import KEPT_STATE, TrainedDevices, concatenate
from fleetlearn_simulator.training.vectorized import (
    Vectorized,
    divide_into_blocks,
    workloads_of,
)
from numpy.typing import NDArray
from torch import nn
from virtual import bits, one_by_one

needs_cuda = pytest.mark.skipif(
    "CUDAExecutionProvider" not in onnxruntime.get_available_providers(),
    reason="needs onnxruntime-gpu and a GPU; ONNX Runtime here has no CUDAExecutionProvider",
)
Tensors = dict[str, torch.Tensor]
SIZES = [1, 7, 10, 10, 25, 30, 30, 30, 30, 30, 30, 30, 30, 30, 41, 60, 7, 300]
"""Ragged: alone, tails alone, no tails, more alike than a block has places, more steps than a
call."""


class Own(Source):
    """Each device's own data, of these sizes; device ``wild``'s inputs are ``huge``."""

    def __init__(
        self, sizes: list[int], features: int, wild: int = -1, huge: float = 1e38, classes: int = 10
    ) -> None:
        self.sizes, self.features, self.wild, self.huge = (
            np.array(sizes, np.int64),
            features,
            wild,
            huge,
        )
        self.classes = classes
        self.asked: list[int] = []

    def examples(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.asarray(self.sizes[ids])

    def arrays(self, device: int) -> Arrays:
        self.asked.append(device)
        rng = np.random.default_rng(device)
        x = rng.normal(device % 3, 1, (self.sizes[device], self.features)).astype(np.float32)
        if device == self.wild:
            x[:] = self.huge
        return x, rng.integers(self.classes, size=self.sizes[device])

    def test(self) -> Arrays | None:
        return None


def some_jobs(sizes: list[int]) -> list[Job]:
    """Every third does one step less than half of its own, in an order of their own."""
    order = np.random.default_rng(0).permutation(len(sizes)).tolist()
    return [
        Job(device, 2**52 + 7919 * device, 1 + sizes[device] // 20 if device % 3 == 0 else None)
        for device in order
    ]


def both(path: Path, task: LocalSettings, source: Source) -> tuple[PerDevice, Vectorized]:
    bundle = open_bundle(path)
    return PerDevice(bundle, task, source), Vectorized(bundle, task, source)


def check_alike(first: TrainedDevices, second: TrainedDevices, tolerance: float) -> None:
    assert first.updates.dtype == second.updates.dtype == np.float32
    for one, other in zip(one_by_one(first), one_by_one(second), strict=True):
        assert (one.examples, one.steps, one.seen, one.complete) == (
            other.examples,
            other.steps,
            other.seen,
            other.complete,
        )
        np.testing.assert_allclose(other.update, one.update, rtol=0, atol=tolerance)
        assert other.loss == pytest.approx(one.loss, rel=1e-5)
        assert other.metrics == pytest.approx(one.metrics, rel=1e-5, abs=1e-6)
        assert one.largest == np.abs(one.update).max()
        assert other.largest == np.abs(other.update).max()
        assert not one.diverged
        assert not other.diverged


@pytest.mark.parametrize("batch_size", [10, 0, 4])
def test_the_back_ends_agree(softmax: Path, batch_size: int) -> None:
    source = Own(SIZES, 60)
    task = LocalSettings({"lr": 0.05, "mu": 0.1}, 2, batch_size)
    one, many = both(softmax, task, source)
    model = open_bundle(softmax).parameters()
    jobs = some_jobs(SIZES)
    first, second = one.train(RoundInputs(model), jobs), many.train(RoundInputs(model), jobs)
    assert np.abs(first.updates).max() > 0.1
    assert len({*first.steps.tolist()}) > (1 if batch_size == 0 else 5)
    check_alike(first, second, 2e-6)


@pytest.mark.parametrize(
    ("place", "tolerance"), [("stand-in", 2e-6), pytest.param("cuda", 1e-4, marks=needs_cuda)]
)
def test_both_back_ends_on_a_gpu_agree_with_the_cpu(
    softmax: Path, place: str, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stand-in is the CPU with memory of its own."""
    if place == "stand-in":
        monkeypatch.setitem(PROVIDERS, "cuda", Provider(CPU, {}, "cpu"))
    source, task, bundle = (
        Own(SIZES, 60),
        LocalSettings({"lr": 0.05, "mu": 0.1}, 2, 10),
        open_bundle(softmax),
    )
    model, jobs = bundle.parameters(), some_jobs(SIZES)
    expected = PerDevice(bundle, task, source).train(RoundInputs(model), jobs)
    for kind in (PerDevice, Vectorized):
        found = kind(bundle, task, source, "cuda").train(RoundInputs(model), jobs)
        np.testing.assert_allclose(found.updates, expected.updates, rtol=0, atol=tolerance)
        np.testing.assert_allclose(found.loss, expected.loss, rtol=1e-4)
        assert found.steps.tolist() == expected.steps.tolist()


def test_a_device_trains_the_same_way_alone(softmax: Path) -> None:
    """It trains in a block of one as in a block of eight with other devices, except for the last
    bits."""
    source = Own(SIZES, 60)
    _, many = both(softmax, LocalSettings({"lr": 0.05, "mu": 0.1}, 2, 10), source)
    model = open_bundle(softmax).parameters()
    jobs = some_jobs(SIZES)
    check_alike(
        many.train(RoundInputs(model), jobs),
        concatenate([many.train(RoundInputs(model), [job]) for job in jobs]),
        1e-6,
    )
    check_alike(
        many.train(RoundInputs(model), jobs),
        many.train(RoundInputs(model), jobs[::-1]).select(range(len(jobs))[::-1]),
        1e-6,
    )


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 8, 9, None])
def test_partial_work_is_that_of_the_devices_own_loop(softmax: Path, steps: int | None) -> None:
    """30 examples in tens, three epochs: nine steps; cut after any of them, the update is as after
    that many steps."""
    source = Own([30], 60)
    bundle = open_bundle(softmax)
    task = LocalSettings({"lr": 0.05, "mu": 0.0}, 3, 10)
    one, many = both(softmax, task, source)
    runtime = open_runtime(bundle, kind="onnx")
    model = bundle.parameters()
    runtime.load(model)
    (job,) = jobs = [Job(0, 1234, steps)]
    done: list[float] = []
    updates: list[NDArray[np.float32]] = []

    def look(count: int, loss: float) -> None:
        done.append(loss)
        updates.append(runtime.parameters - runtime.anchor)

    train(
        runtime,
        as_data(source.arrays(0)),
        hyper=task.hyper,
        epochs=3,
        batch_size=10,
        seed=job.seed,
        on_step=look,
    )
    expected = steps or 9
    for outcomes, tolerance in (
        (one.train(RoundInputs(model), jobs), 0.0),
        (many.train(RoundInputs(model), jobs), 1e-6),
    ):
        (found,) = one_by_one(outcomes)
        assert (found.steps, found.seen, found.complete) == (expected, 10 * expected, expected == 9)
        np.testing.assert_allclose(found.update, updates[expected - 1], rtol=0, atol=tolerance)
        assert found.loss == pytest.approx(np.mean(done[:expected]), rel=1e-6)


def test_divergence_is_told_and_touches_nobody_else(softmax: Path) -> None:
    """A device whose inputs are too large, in a block with others."""
    source = Own([30] * 6, 60, wild=2)
    calm = Own([30] * 6, 60)
    task = LocalSettings({"lr": 0.05, "mu": 0.0}, 1, 10)
    model = open_bundle(softmax).parameters()
    jobs = [Job(device, device, None) for device in range(6)]
    for backend, plain in zip(both(softmax, task, source), both(softmax, task, calm), strict=True):
        found = backend.train(RoundInputs(model), jobs)
        assert found.diverged.tolist() == [False, False, True, False, False, False]
        others = [0, 1, 3, 4, 5]
        assert bits(found.select(others)) == bits(
            plain.train(RoundInputs(model), jobs).select(others)
        )


@pytest.mark.parametrize("size", [30, 5, 25])
def test_a_loss_beyond_what_the_protocol_has_is_divergence(softmax: Path, size: int) -> None:
    """Finite in float32, as the update is; in a call, alone, and in the last, smaller batch."""
    source = Own([size] * 4, 60, wild=1, huge=1e32)
    task = LocalSettings({"lr": 1e-32, "mu": 0.0}, 1, 10)
    jobs = [Job(device, device, None) for device in range(4)]
    for backend in both(softmax, task, source):
        found = backend.train(RoundInputs(open_bundle(softmax).parameters()), jobs)
        assert found.diverged.tolist() == [False, True, False, False]


def test_nobody_is_trained_in_vain(softmax: Path) -> None:
    """Whose results are not asked for, one by one or block by block."""
    jobs = [Job(device, device, None) for device in (3, 1, 0, 2)]
    model = open_bundle(softmax).parameters()
    source = Own([30, 30, 40, 40], 60)
    one, many = both(softmax, LocalSettings({"lr": 0.05, "mu": 0.0}, 1, 0), source)
    begun = one.begin(RoundInputs(model), jobs), many.begin(RoundInputs(model), jobs)
    assert source.asked == []
    first, second = begun[0]([2, 1, 0, 3]), begun[1]([2, 0, 3])
    assert {*source.asked[:1]} == {0}
    assert {*source.asked[1:]} == {0, 1}
    check_alike(first, second, 1e-6)
    assert bits(first) == bits(one.train(RoundInputs(model), jobs).select([2]))
    # Device 1 is there already.
    source.asked.clear()
    check_alike(begun[0]([1, 0]), begun[1]([1, 0]), 1e-6)
    assert source.asked == [1]


def test_nothing_is_carried_from_one_round_to_the_next(softmax: Path) -> None:
    source = Own(SIZES, 60)
    model = open_bundle(softmax).parameters()
    jobs = some_jobs(SIZES)
    for backend in both(softmax, LocalSettings({"lr": 0.05, "mu": 0.1}, 1, 10), source):
        first = backend.train(RoundInputs(model), jobs)
        backend.train(RoundInputs(model + 1), jobs[:5])
        again = backend.train(RoundInputs(model), jobs)
        assert bits(first) == bits(again)


def test_the_model_that_is_given_stays_as_it_is(softmax: Path) -> None:
    model = open_bundle(softmax).parameters()
    before = model.tobytes()
    for backend in both(softmax, LocalSettings({"lr": 0.5, "mu": 0.1}, 1, 10), Own(SIZES, 60)):
        backend.train(RoundInputs(model), some_jobs(SIZES))
        backend.evaluate(RoundInputs(model), [Job(0), Job(1)])
        assert model.tobytes() == before


def accuracy(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (outputs.argmax(1) == y).float()


def export(path: Path, make: Callable[[], nn.Module], step: LocalStep, many: TrainMany) -> Bundle:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model, x, y = make(), torch.randn(10, 6), torch.randint(10, (10,))
    return export_bundle(
        model,
        nn.functional.cross_entropy,
        (x, y),
        path,
        step=step,
        metrics={"accuracy": accuracy},
        many=many,
    ).bundle


@pytest.mark.slow
def test_dropout_and_adam(tmp_path: Path) -> None:
    """Random steps draw from the task's seed and the step's number; Adam's state begins at 0 in
    each task."""
    bundle = export(
        tmp_path / "dropout.bundle",
        lambda: nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.4), nn.Linear(16, 10)),
        LocalStep("adam"),
        TrainMany(4, 3),
    )
    assert bundle.manifest.random
    assert bundle.manifest.state
    one, many = both(bundle.path, LocalSettings({"lr": 0.01}, 2, 10), Own(SIZES, 6))
    model, jobs = bundle.parameters(), some_jobs(SIZES)
    first = one.train(RoundInputs(model), jobs)
    check_alike(first, many.train(RoundInputs(model), jobs), 2e-5)
    # The largest seeds; and other seeds give other masks.
    late = [job._replace(seed=2**53 - 100) for job in jobs]
    check_alike(one.train(RoundInputs(model), late), many.train(RoundInputs(model), late), 2e-5)
    assert not np.allclose(
        one.train(RoundInputs(model), late).updates[0], first.updates[0], atol=1e-3
    )


@pytest.mark.slow
def test_blocks_of_a_fixed_batch(tmp_path: Path) -> None:
    """Smaller batches are done one by one."""
    bundle = export(
        tmp_path / "fixed.bundle",
        lambda: nn.Linear(6, 10),
        LocalStep("momentum"),
        TrainMany(4, 3, batch=10),
    )
    assert bundle.manifest.many is not None
    assert bundle.manifest.many.batch == 10
    one, many = both(
        bundle.path, LocalSettings({"lr": 0.05, "momentum": 0.5}, 2, 10), Own(SIZES, 6)
    )
    model, jobs = bundle.parameters(), some_jobs(SIZES)
    check_alike(one.train(RoundInputs(model), jobs), many.train(RoundInputs(model), jobs), 2e-6)


@pytest.mark.slow
def test_blocks_of_another_batch_than_the_plans(tmp_path: Path) -> None:
    """The graph takes tens, the plan asks for fives and for everything at once."""
    bundle = export(
        tmp_path / "fixed.bundle", lambda: nn.Linear(6, 10), LocalStep(), TrainMany(4, 3, batch=10)
    )
    model = bundle.parameters()
    for batch_size in (5, 0):
        task = LocalSettings({"lr": 0.05}, 2, batch_size)
        with pytest.raises(
            SimulatorError,
            match=f"takes batches of 10; the plan's local.batch_size is {batch_size}",
        ):
            Vectorized(bundle, task, Own(SIZES, 6)).train(RoundInputs(model), some_jobs(SIZES))


def test_steps_by_hand() -> None:
    examples = np.array([1, 9, 10, 11, 100])
    assert steps_of(LocalSettings({}, 3, 10), examples).tolist() == [3, 3, 3, 6, 30]
    assert steps_of(LocalSettings({}, 3, 0), examples).tolist() == [3, 3, 3, 3, 3]


def test_blocks_hold_what_is_alike() -> None:
    """The same size of a batch, then those together that have most to do."""
    source = Own([10, 20, 10, 7, 25, 10, 7], 2)
    task = LocalSettings({}, 2, 10)
    steps = [None, None, 1, None, 3, 99, 1]
    jobs = [Job(device, 0, count) for device, count in enumerate(steps)]
    loads = workloads_of(task, source, jobs)
    assert loads.examples.tolist() == source.sizes.tolist()
    assert loads.batch.tolist() == [10, 10, 10, 7, 10, 10, 7]
    assert loads.steps.tolist() == [2, 4, 1, 2, 3, 2, 1]
    assert list(divide_into_blocks(loads, 2)) == [[3, 6], [1, 4], [0, 5], [2]]
    assert list(divide_into_blocks(loads, 9)) == [[3, 6], [1, 4, 0, 5, 2]]
    at_once = workloads_of(task._replace(batch_size=0), source, jobs)
    assert at_once.batch.tolist() == source.sizes.tolist()
    assert list(divide_into_blocks(at_once, 9)) == [[3, 6], [0, 5, 2], [1], [4]]
    alike = workloads_of(task, source, [jobs[0]] * 5)
    assert list(divide_into_blocks(alike, 2)) == [[0, 1], [2, 3], [4]]
    assert list(divide_into_blocks(workloads_of(task, source, []), 2)) == []


def test_means_are_over_all_examples() -> None:
    parts = [Evaluation(2, 3.0, {"a": 2.0, "b": 1.0}), Evaluation(6, 1.0, {"a": 2.0})]
    assert means(parts) == {"loss": 0.5, "a": 0.5}


def test_an_evaluation_is_the_devices_own(line: Path) -> None:
    """Against numpy."""
    from line_bundle import line_data

    class Lines(Own):
        def arrays(self, device: int) -> Arrays:
            return line_data(int(self.sizes[device]), device)

    bundle = open_bundle(line)
    backend = PerDevice(bundle, LocalSettings({"lr": 0.1}, 1, 10), Lines([7, 300], 3))
    model = bundle.parameters()
    for device, found in enumerate(backend.evaluate(RoundInputs(model), [Job(0), Job(1)])):
        x, y = line_data([7, 300][device], device)
        error = x.astype(np.float64) @ model[:3] + model[4] - y
        assert found.examples == len(y)
        assert found.loss_sum == pytest.approx((error**2).sum(), rel=1e-5)
        assert found.metric_sums["error"] == pytest.approx(np.abs(error).sum(), rel=1e-5)


def test_wanting_blocks_of_a_bundle_without_them(line: Path) -> None:
    task = LocalSettings({"lr": 0.1}, 1, 10)
    with pytest.raises(SimulatorError, match='choose the back end "bundle"'):
        Vectorized(open_bundle(line), task, Own([1], 3))


def test_jobs_are_made_of_columns() -> None:
    jobs = jobs_from_columns([5, 6], [1, 2], [None, 3], [NO_ROW, 7], [8, NO_ROW])
    assert jobs == [Job(5, 1, None, tied=8), Job(6, 2, 3, 7)]
    assert {type(job) for job in jobs} == {Job}
    assert jobs_from_columns([], [], [], [], []) == []
    with pytest.raises(ValueError, match="zip"):
        jobs_from_columns([1, 2], [1], [None], [NO_ROW], [NO_ROW])


def test_bundles_with_features_are_simulated_by_whole_models(tmp_path: Path) -> None:
    """Both back ends run the graphs that the bundle would have without features."""
    bundle = features_bundle(tmp_path / "features.bundle", many=TrainMany(3, 2, batch=4)).bundle
    assert bundle.manifest.computed_features
    source, local = Own([4, 8, 8], 10, classes=3), LocalSettings({"lr": 0.2}, 2, 4)
    jobs, model = [Job(0, 1), Job(1, 2), Job(2, 3)], bundle.parameters()
    for backend in (PerDevice(bundle, local, source), Vectorized(bundle, local, source)):
        found = backend.train(RoundInputs(model), jobs)
        for row, job in enumerate(jobs):
            runtime = open_runtime(bundle)
            runtime.load(model)
            x, y = source.arrays(job.device)
            alone = train(runtime, (x, y), hyper=local.hyper, epochs=2, batch_size=4, seed=job.seed)
            np.testing.assert_allclose(found.updates[row], alone.update, atol=1e-5)


def own_momentum(
    params: Tensors, state: Tensors, batch: Tensors, hyper: Tensors, *, objective: Any
) -> Any:
    """Momentum that outlives the task, and a count of its steps that does not."""
    found = objective(params, batch)
    velocity = {
        name: 0.9 * state[f"v.{name}"] + gradient for name, gradient in found.gradients.items()
    }
    after = {name: value - hyper["lr"] * velocity[name] for name, value in params.items()}
    state = {f"v.{name}": value for name, value in velocity.items()} | {"steps": state["steps"] + 1}
    return after, state, {"loss": found.loss, **found.metrics}


KEPT_WHAT: dict[str, dict[str, Any]] = {
    "moon": {"step": LocalStep(contrastive=True), "features": lambda outputs: outputs},
    "personal head": {"step": LocalStep("momentum"), "personal": ["1.*"]},
    "own state": {
        "step": own_momentum,
        "hyper": {"lr": None},
        "kept": ["v.*"],
        "state": {
            "v.0.weight": torch.full((8, 6), 0.01),
            "v.0.bias": torch.zeros(8),
            "v.1.weight": torch.zeros(10, 8),
            "v.1.bias": torch.zeros(10),
            "steps": torch.zeros(()),
        },
    },
}


@pytest.mark.parametrize(
    "what",
    [pytest.param(what, marks=pytest.mark.slow if what == "moon" else ()) for what in KEPT_WHAT],
)
def test_the_back_ends_agree_about_what_devices_keep(tmp_path: Path, what: str) -> None:
    """Two rounds; in the second, devices go on from what they kept in the first, and one has kept
    nothing."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        module, x, y = (
            nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 10)),
            torch.randn(10, 6),
            torch.randint(10, (10,)),
        )
    options = KEPT_WHAT[what] | {"many": TrainMany(4, 3), "metrics": {"accuracy": accuracy}}
    bundle = cached_export(
        module, nn.functional.cross_entropy, (x, y), tmp_path / "kept.bundle", **options
    ).bundle
    files = row_files(tmp_path, [bundle.manifest], "plain")
    file = files.states
    assert file is not None
    task = LocalSettings({"lr": 0.05} | ({"mu": 0.5} if what == "moon" else {}), 2, 10)
    one, many = (kind(bundle, task, Own(SIZES, 6), kept=files) for kind in (PerDevice, Vectorized))
    inputs, jobs = RoundInputs(bundle.parameters()[: bundle.manifest.size]), some_jobs(SIZES)
    first = one.train(inputs, jobs)
    assert first.vectors[KEPT_STATE].shape == (len(jobs), kept_state_size(bundle.manifest))
    check_alike(first, many.train(inputs, jobs), 2e-6)
    np.testing.assert_allclose(
        many.train(inputs, jobs).vectors[KEPT_STATE], first.vectors[KEPT_STATE], atol=2e-6
    )

    for row, kept in enumerate(first.vectors[KEPT_STATE][1:]):
        file.write(row, kept)
    inputs = RoundInputs(inputs.model + first.updates.mean(axis=0))
    later = [jobs[0], *(job._replace(kept=row) for row, job in enumerate(jobs[1:]))]
    second, other = one.train(inputs, later), many.train(inputs, later)
    check_alike(second, other, 5e-6)
    np.testing.assert_allclose(other.vectors[KEPT_STATE], second.vectors[KEPT_STATE], atol=5e-6)
    without = one.train(inputs, jobs)
    changed = np.abs(without.updates - second.updates).max(axis=1)
    assert changed[0] == 0
    assert (changed[1:] > 1e-5).all(), "what is kept matters"
    evaluated = [one.evaluate(inputs, some) for some in (jobs, later)]
    assert evaluated == [many.evaluate(inputs, some) for some in (jobs, later)]
    assert (evaluated[0][1:] == evaluated[1][1:]) == (what != "personal head")


@pytest.mark.parametrize("algorithm", [pytest.param("scaffold", marks=pytest.mark.slow), "feddyn"])
def test_the_back_ends_agree_about_tied_vectors(tmp_path: Path, algorithm: str) -> None:
    """A round in which every second device goes on from tied vectors; some do a part of their
    steps."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        module, x, y = (
            nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8)),
            torch.randn(10, 6),
            torch.randint(8, (10,)),
        )
    step, many = LocalStep("sgd", proximal=True, correction=True), TrainMany(4, 3)
    bundle = cached_export(
        module, nn.functional.cross_entropy, (x, y), tmp_path / "tied.bundle", step=step, many=many
    )
    manifest = bundle.bundle.manifest
    files = row_files(tmp_path, [manifest], algorithm)
    assert files.tied is not None
    # BatchNorm needs two
    random, sizes = np.random.default_rng(1), [size for size in SIZES if size > 1]
    task = LocalSettings({"lr": 0.05, "mu": 0.1}, 2, 0, algorithm)
    source = Own(sizes, 6, classes=8)
    one, many_at_once = (
        kind(bundle.bundle, task, source, kept=files) for kind in (PerDevice, Vectorized)
    )
    buffers = [
        slice(row.offset, row.offset + prod(row.shape)) for row in manifest.parameters if row.buffer
    ]
    assert buffers

    def noise() -> NDArray[np.float32]:
        made = random.normal(0, 0.01, manifest.size).astype(np.float32)
        for place in buffers:
            made[place] = 0
        return made

    control = noise()
    inputs = RoundInputs(
        bundle.bundle.parameters(), {"control": control} if algorithm == "scaffold" else {}
    )
    jobs = some_jobs(sizes)
    for row in range(0, len(jobs), 2):
        files.tied.write(row, noise())
        jobs[row] = jobs[row]._replace(tied=row)
    first, second = one.train(inputs, jobs), many_at_once.train(inputs, jobs)
    check_alike(first, second, 5e-6)
    assert {*first.vectors} == {
        "buffers",
        "tied",
        *(["control"] if algorithm == "scaffold" else []),
    }
    for name, vectors in first.vectors.items():
        np.testing.assert_allclose(second.vectors[name], vectors, atol=2e-4, rtol=1e-4)
        if name == "buffers":
            assert vectors.shape == (len(jobs), 16)
            assert (vectors[:, 8:] > 0).all(), "variances"
            continue
        for place in buffers:
            assert not vectors[:, place].any()
            assert not second.vectors[name][:, place].any()
    plain = one.train(inputs, [job._replace(tied=NO_ROW) for job in jobs])
    assert (np.abs(plain.updates - first.updates).max(axis=1) > 1e-4).tolist() == [
        job.tied != NO_ROW for job in jobs
    ]


def test_what_trains_device_by_device_says_so(softmax: Path) -> None:
    bundle = open_bundle(softmax)
    assert not_for_many(bundle, 10) is None
    assert (
        not_for_many(bundle, 10, "scaffold-gradient")
        == "the algorithm scaffold-gradient trains device by device"
    )
    with pytest.raises(
        SimulatorError, match='trains device by device: choose the back end "bundle"'
    ):
        Vectorized(bundle, LocalSettings({"lr": 0.1}, 1, 10, "scaffold-gradient"), Own([10], 60))


SCHEDULES = [
    StepSchedule("cosine", warm_up=2, start=0.3),
    StepSchedule("step", every=3, factor=0.5, first=2),
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.kind)
def test_the_back_ends_agree_about_a_learning_rate_by_step(
    tmp_path: Path, schedule: StepSchedule
) -> None:
    """Devices have different numbers of steps, more than a call has; SCAFFOLD sums the rates."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        module, x, y = nn.Linear(6, 8), torch.randn(10, 6), torch.randint(8, (10,))
    bundle = cached_export(
        module,
        nn.functional.cross_entropy,
        (x, y),
        tmp_path / "rates.bundle",
        step=LocalStep("sgd", correction=True),
        many=TrainMany(4, 3, lr_by_step=True),
    ).bundle
    task = LocalSettings({"lr": 0.5}, 2, 10, "scaffold", schedule=schedule)
    source = Own(SIZES, 6, classes=8)
    one, many = (kind(bundle, task, source) for kind in (PerDevice, Vectorized))
    control = np.full(bundle.manifest.size, 0.01, np.float32)
    inputs, jobs = RoundInputs(bundle.parameters(), {"control": control}), some_jobs(SIZES)
    first, second = one.train(inputs, jobs), many.train(inputs, jobs)
    check_alike(first, second, 5e-6)
    np.testing.assert_allclose(
        second.vectors["control"], first.vectors["control"], atol=2e-5, rtol=1e-4
    )
    plain = RoundInputs(*inputs[:2], schedule=StepSchedule("constant"))
    still, fixed = one.train(plain, jobs), many.train(plain, jobs)
    check_alike(still, fixed, 5e-6)
    assert (np.abs(still.updates - first.updates).max(axis=1) > 1e-4).sum() > len(jobs) // 2
    without = PerDevice(bundle, task._replace(schedule=None), source).train(inputs, jobs)
    assert bits(without) == bits(still), "a factor of 1 changes no bit"


def test_a_graph_with_one_learning_rate_says_so(softmax: Path) -> None:
    bundle = open_bundle(softmax)
    why = not_for_many(bundle, 10, by_step=True)
    assert why is not None
    assert why.endswith(
        "has one learning rate for all of its steps, and the plan has [local.step_schedule]"
    )
    task = LocalSettings({"lr": 0.1}, 1, 10, schedule=SCHEDULES[0])
    with pytest.raises(SimulatorError, match="TrainMany\\(devices, steps, lr_by_step=True\\)"):
        Vectorized(bundle, task, Own([10], 60))
