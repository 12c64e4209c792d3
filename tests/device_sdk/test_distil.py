"""Ensemble distillation: what teachers say together, and what a student learns of it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from distilling import distillation_bundle
from fleetlearn_device.distil import LARGEST_LOGIT, Distiller, Models
from fleetlearn_device.training.shuffling import permutation
from fleetlearn_device.training.train import DivergedError
from fleetlearn_export import LocalStep, distillation_loss
from fleetlearn_protocol import Bundle
from fleetlearn_protocol.distillation import DistillationJob, Distilled
from fleetlearn_protocol.vector import Vector
from torch import nn

X = np.random.default_rng(5).normal(size=(30, 4)).astype(np.float32)


def linear() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(4, 3)


def mlp() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("distil")
    np.savez(found / "u.npz", x=X)
    return found


@pytest.fixture(scope="module")
def bundles(folder: Path) -> tuple[Bundle, Bundle]:
    """Of a linear model, and of a small network."""
    x, step = torch.from_numpy(X[:4]), LocalStep("sgd")
    return (
        distillation_bundle(linear(), x, folder / "linear.bundle", step),
        distillation_bundle(mlp(), x, folder / "mlp.bundle", step),
    )


@pytest.fixture
def distiller(bundles: tuple[Bundle, Bundle], folder: Path) -> Distiller:
    return Distiller(bundles, str(folder / "u.npz"))


def job(
    teachers: tuple[int, ...], students: tuple[int, ...] = (0,), **fields: float
) -> DistillationJob:
    values = {"seed": 3, "steps": 7, "batch_size": 8, "lr": 0.5, "temperature": 1.0}
    values |= fields
    return DistillationJob(students=students, teachers=teachers, **values)  # type: ignore[arg-type]


def distil(distiller: Distiller, job: DistillationJob, *models: Vector) -> Models:
    given: Iterator[Vector] = iter(models)
    return distiller.distil(job, lambda size: next(given)[:size])


def models(bundle: Bundle, count: int, scale: float = 1.0) -> list[Vector]:
    rng = np.random.default_rng(7)
    size = bundle.manifest.size
    return [(scale * rng.normal(size=size)).astype(np.float32) for _ in range(count)]


def logits_of(model: Vector) -> torch.Tensor:
    """Of the linear bundle."""
    weight, bias = torch.from_numpy(model[:12].reshape(3, 4)), torch.from_numpy(model[12:])
    return torch.from_numpy(X) @ weight.T + bias


def test_identical_teachers_teach_nothing(
    distiller: Distiller, bundles: tuple[Bundle, Bundle]
) -> None:
    """Of identical devices the mean is the model of each."""
    (model,) = models(bundles[0], 1)
    (found,), (taught,) = distil(distiller, job((0,) * 5), *[model] * 6)
    assert abs(found.loss_before) < 1e-9
    assert abs(found.loss_after) < 1e-9
    assert np.abs(taught - model).max() < 1e-6


def test_the_mean_is_of_logits_whatever_their_order(
    distiller: Distiller, bundles: tuple[Bundle, Bundle]
) -> None:
    three = models(bundles[0], 3)
    expected = sum(map(logits_of, three)) / 3
    found = distiller.mean_logits(iter([(0, model) for model in three]), {"x": X})
    assert np.abs(found - expected.numpy()).max() < 1e-6
    (other,) = models(bundles[1], 1)
    mixed = [*((0, model) for model in three), (1, other)]
    means = [distiller.mean_logits(iter(mixed[k:] + mixed[:k]), {"x": X}) for k in range(4)]
    assert all(np.array_equal(means[0], mean) for mean in means)
    large, small, opposite = (np.zeros(15, np.float32) for _ in range(3))
    large[12:], small[12:], opposite[12:] = 2.0**19, 3.14159e-5, -(2.0**19)
    one, other_order = (
        distiller.mean_logits(iter([(0, model) for model in order]), {"x": X})
        for order in ([large, small, opposite], [large, opposite, small])
    )
    assert np.array_equal(one, other_order), "added up as floats, some of the small one is lost"


def test_a_student_learns_as_in_pytorch(
    distiller: Distiller, bundles: tuple[Bundle, Bundle]
) -> None:
    student, *teachers = models(bundles[0], 3)
    temperature = 2.0
    asked = job((0, 0), temperature=temperature)
    (found,), (taught,) = distil(distiller, asked, student, *teachers)
    mean = sum(map(logits_of, teachers)) / 2
    vector = torch.from_numpy(student.copy()).requires_grad_()
    orders = [permutation(30, 3, epoch) for epoch in (0, 1)]
    rows = [order[begin : begin + 8] for order in orders for begin in range(0, 30, 8)]
    for number, batch in enumerate(rows[:7]):
        x = torch.from_numpy(X[batch])
        outputs = x @ vector[:12].reshape(3, 4).T + vector[12:]
        heat = torch.full((len(batch),), temperature)
        loss = distillation_loss(outputs, mean[torch.from_numpy(batch)], heat)
        (gradient,) = torch.autograd.grad(loss, vector)
        lr = 0.5 * (1 + np.cos(np.pi * number / 7)) / 2
        vector = (vector - lr * gradient).detach().requires_grad_()
    assert np.abs(taught - vector.detach().numpy()).max() < 1e-5
    everyone = torch.full((30,), temperature)
    before = distillation_loss(logits_of(student), mean, everyone).item()
    after = distillation_loss(logits_of(vector.detach().numpy()), mean, everyone).item()
    assert found.loss_before == pytest.approx(before, rel=1e-5)
    assert found.loss_after == pytest.approx(after, rel=1e-4)
    assert after < before


def test_models_of_two_kinds_teach_each_other(
    distiller: Distiller, bundles: tuple[Bundle, Bundle]
) -> None:
    one, other = models(bundles[0], 1)[0], models(bundles[1], 1)[0]
    asked = job((0, 1), (0, 1), steps=40, lr=1.0)
    found, (taught, taught_other) = distil(distiller, asked, one, other, one, other)
    assert all(row.loss_after < row.loss_before / 2 for row in found)
    assert (taught.size, taught_other.size) == (one.size, other.size)
    again = distil(distiller, asked, one, other, one, other)
    assert np.array_equal(again[1][0], taught), "the same job gives the same bits"
    assert np.array_equal(again[1][1], taught_other)


def test_a_teacher_of_huge_logits_counts_as_one_of_the_largest(
    distiller: Distiller, bundles: tuple[Bundle, Bundle]
) -> None:
    (large,) = models(bundles[0], 1, 1e25)
    found = distiller.mean_logits(iter([(0, large)]), {"x": X})
    assert np.abs(found).max() == LARGEST_LOGIT


def test_what_is_not_finite_is_named(distiller: Distiller, bundles: tuple[Bundle, Bundle]) -> None:
    student, teacher = models(bundles[0], 2)
    with pytest.raises(DivergedError, match="the logits of teacher 2 are not finite"):
        distil(distiller, job((0, 0)), student, teacher, np.full_like(teacher, 2e38))
    with pytest.raises(DivergedError, match=r"diverged: its loss was .* a smaller lr may help"):
        distil(distiller, job((0,), lr=1e38), student, teacher)
    with pytest.raises(ValueError, match="there are no teachers"):
        distil(distiller, job(()), student)


def test_models_of_other_classes_cannot_teach_each_other(
    folder: Path, bundles: tuple[Bundle, Bundle]
) -> None:
    manifest = bundles[0].manifest
    outputs = (msgspec.structs.replace(manifest.outputs[0], shape=(4,)),)
    changed = msgspec.structs.replace(manifest, outputs=outputs, name="four")
    with pytest.raises(ValueError, match="the models of bundles linear and four"):
        Distiller([bundles[0], bundles[0]._replace(manifest=changed)], str(folder / "u.npz"))


@pytest.mark.slow
def test_the_process_answers_with_the_same_models(
    folder: Path, distiller: Distiller, bundles: tuple[Bundle, Bundle]
) -> None:
    three = models(bundles[0], 3)
    asked = job((0, 0))
    content = b"".join(model.tobytes() for model in three)
    line = {**msgspec.to_builtins(asked), "bytes": len(content)}
    words = [str(folder / "u.npz"), str(bundles[0].path), str(bundles[1].path)]
    ended = subprocess.run(
        [sys.executable, "-m", "fleetlearn_device.distil", *words],
        input=msgspec.json.encode(line) + b"\n" + content,
        capture_output=True,
        timeout=120,
    )
    answer, _, model = ended.stdout.partition(b"\n")
    found, (expected,) = distil(distiller, asked, *three)
    fields = msgspec.json.decode(answer)
    assert msgspec.convert(fields["students"], list[Distilled]) == found
    assert np.array_equal(np.frombuffer(model, "<f4"), expected)


def test_a_teacher_that_is_not_finite_is_a_divergence(
    distiller: Distiller, bundles: tuple[Bundle, Bundle]
) -> None:
    """It was an error that the coordinator asks again after, for ever: one device's update of
    3e38, added to a large model, held its round."""
    (teacher,) = models(bundles[0], 1)
    teacher[0] = np.inf
    with pytest.raises(DivergedError, match="the model of teacher 1 is not finite"):
        distiller.mean_logits(iter([(0, teacher)]), {"x": X})
