"""A task's algorithm on a real state directory: several vectors down, several parts up, and which
tied vectors a task goes on from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from fleetlearn_device.storage.state_directory import StateDirectory
from fleetlearn_device.training.algorithms import UnsupportedError
from fleetlearn_device.training.data import as_data
from fleetlearn_device.training.trainer import FinishedUpdate, Trainer, task_fingerprint
from fleetlearn_export import LocalStep
from fleetlearn_protocol import Bundle
from fleetlearn_protocol.encodings import FLOAT32, find_encoding
from fleetlearn_protocol.messages import CONTROL, MODEL, UPDATE, PrivacyNote, Task
from fleetlearn_protocol.vector import Vector, digest
from quadratics import TWO, quadratics_bundle

LR, STEPS = 0.05, 3
X, C = np.array([3, 4], np.float32), np.array([0.5, -0.25], np.float32)
ZEROS = np.zeros(2, np.float32)
DEVICE = TWO[0]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return quadratics_bundle(tmp_path_factory.mktemp("quadratics") / "quadratics.bundle")


@pytest.fixture
def state(tmp_path: Path) -> Iterator[StateDirectory]:
    opened = StateDirectory(tmp_path / "state")
    yield opened
    opened.close()


def task(
    bundle: Bundle,
    name: str,
    kept: str | None = None,
    algorithm: str = "scaffold",
    c: Vector = C,
    x: Vector = X,
) -> Task:
    vectors = (FLOAT32.reference(CONTROL, c), FLOAT32.reference(MODEL, x))
    parts = {CONTROL: "float32", UPDATE: "float32"}
    if algorithm in ("plain", "feddyn", "ditto"):
        vectors, parts = vectors[1:], {UPDATE: "float32"}
    return Task(
        name,
        1,
        bundle.sha256,
        vectors,
        parts,
        {"lr": LR, "mu": 0.5 if algorithm in ("feddyn", "ditto") else 0.0},
        STEPS,
        0,
        7,
        100.0,
        evaluate=algorithm == "ditto",
        algorithm=algorithm,
        kept=kept,
        personal_epochs=2 if algorithm == "ditto" else None,
    )


def do(state: StateDirectory, bundle: Bundle, given: Task, save: bool = True) -> FinishedUpdate:
    """Fetch what the task needs, and train it with a new trainer, which has no runtime open."""
    contents = {entry.sha256: bundle.read(path) for path, entry in bundle.manifest.files.items()}
    contents |= {bundle.sha256: bundle.read("manifest.json")}
    contents |= {digest(vector): vector.tobytes() for vector in (X, C, ZEROS)}
    while lacking := state.contents.lacking(given, "onnx"):
        for wanted in lacking:
            state.contents.append(wanted, 0, contents[wanted.sha256])
            assert state.contents.finish(wanted)
    done = Trainer(state, as_data(DEVICE.data), "onnx", 1).train(given, 100.0)
    if save:
        state.outbox.save(*done)
    return done


def by_hand(own: Vector) -> tuple[Vector, Vector]:
    """Return the update and c_k+ of SCAFFOLD, option II."""
    now = X.astype(np.float64)
    for _ in range(STEPS):
        now = now - LR * (DEVICE.gradient(now) + C - own)
    return now - X, own - C + (X - now) / (STEPS * LR)


def test_parts_are_in_the_task_s_order(state: StateDirectory, bundle: Bundle) -> None:
    done = do(state, bundle, task(bundle, "t1"))
    update, own = by_hand(ZEROS)
    assert [part.name for part in done.report.parts] == [CONTROL, UPDATE]
    found = [FLOAT32.decode(content) for content in done.contents]
    np.testing.assert_allclose(found, [own, update], rtol=1e-5)
    assert state.outbox.load() == done.report


def test_a_task_goes_on_from_the_set_that_it_names(state: StateDirectory, bundle: Bundle) -> None:
    """t2 from what t1 made; t3 too, since t2's update was not counted; t4 from nothing."""
    _, first = by_hand(ZEROS)
    _, second = by_hand(first)
    for name, kept, own, expected in (
        ("t1", None, ZEROS, first),
        ("t2", "t1", first, second),
        ("t3", "t1", first, second),
        ("t4", None, ZEROS, first),
    ):
        done = do(state, bundle, task(bundle, name, kept))
        np.testing.assert_allclose(done.tied[CONTROL], expected, rtol=1e-4)
        np.testing.assert_allclose(
            FLOAT32.decode(done.contents[0]), expected - own, rtol=1e-4, atol=1e-5
        )
        state.outbox.drop(name)
    assert [path.name for path in (state.path / "tied").iterdir()] == [f"{bundle.sha256}.t4"]


def test_a_task_of_another_algorithm_leaves_the_sets_alone(
    state: StateDirectory, bundle: Bundle
) -> None:
    do(state, bundle, task(bundle, "t1"))
    do(state, bundle, task(bundle, "t2", algorithm="plain"))
    before = do(state, bundle, task(bundle, "t3", "t1"), save=False)
    np.testing.assert_allclose(before.tied[CONTROL], by_hand(by_hand(ZEROS)[1])[1], rtol=1e-4)


def test_a_training_whose_update_was_not_saved_changes_no_set(
    state: StateDirectory, bundle: Bundle
) -> None:
    do(state, bundle, task(bundle, "t1"))
    lost = do(state, bundle, task(bundle, "t2", "t1"), save=False)
    again = do(state, bundle, task(bundle, "t2", "t1"))
    assert [content.tobytes() for content in again.contents] == [
        content.tobytes() for content in lost.contents
    ]


def test_feddyn_reports_the_update_alone_and_keeps_the_dual(
    state: StateDirectory, bundle: Bundle
) -> None:
    done = do(state, bundle, task(bundle, "t1", algorithm="feddyn"))
    assert [part.name for part in done.report.parts] == [UPDATE]
    np.testing.assert_allclose(
        done.tied["dual"], -0.5 * FLOAT32.decode(done.contents[0]), rtol=1e-6
    )


@pytest.mark.parametrize("encoding", ["float16", "int8", "int4", "topk-0.5"])
def test_feddyn_keeps_what_the_coordinator_gets_of_the_update(
    state: StateDirectory, bundle: Bundle, encoding: str
) -> None:
    """The coordinator's h changes by what the bytes mean: so must lambda_k."""
    given = task(bundle, "t1", algorithm="feddyn")
    exact = do(state, bundle, given, save=False)
    done = do(state, bundle, msgspec.structs.replace(given, parts={UPDATE: encoding}))
    counted = find_encoding(encoding).decode(done.contents[0], 2)
    assert (counted != FLOAT32.decode(exact.contents[0])).any()
    np.testing.assert_allclose(done.tied["dual"], -0.5 * counted, rtol=1e-5, atol=1e-6)


def test_a_lost_set_is_said_in_the_report(state: StateDirectory, bundle: Bundle) -> None:
    assert not do(state, bundle, task(bundle, "t1")).report.lost_tied
    assert not do(state, bundle, task(bundle, "t2", "t1")).report.lost_tied
    assert do(state, bundle, task(bundle, "t3", "gone")).report.lost_tied
    assert not do(state, bundle, task(bundle, "t4", "gone", algorithm="plain")).report.lost_tied


def test_two_vectors_that_are_the_same_are_fetched_once(
    state: StateDirectory, bundle: Bundle
) -> None:
    given = task(bundle, "t1", c=ZEROS, x=ZEROS)
    done = do(state, bundle, given)
    assert (len(done.report.parts), len(state.contents.models())) == (2, 1)


def test_room_is_held_for_parts_and_tied_vectors(state: StateDirectory, bundle: Bundle) -> None:
    done = do(state, bundle, task(bundle, "t1"), save=False)
    held = {
        path.name: (path.stat().st_ino, path.stat().st_size)
        for path in (state.path / "pending").iterdir()
    }
    size = 8 + len(b'["control"]') + 8
    assert {name: row[1] for name, row in held.items()} == {
        "update.reserved": 16, "kept.reserved": 0, "tied.reserved": size, "own.reserved": 0,
        "report.reserved": 2**16,
    }  # fmt: skip
    state.outbox.save(*done)
    (file,) = (state.path / "tied").iterdir()
    assert (file.stat().st_ino, file.stat().st_size) == held["tied.reserved"]


def test_a_bundle_that_is_not_made_for_the_algorithm_costs_no_set(
    state: StateDirectory, bundle: Bundle, tmp_path: Path
) -> None:
    other = quadratics_bundle(tmp_path / "other.bundle", LocalStep("sgd"))
    done = do(state, bundle, task(bundle, "t1"))
    state.outbox.save(done.report, done.contents, other.sha256, None, done.tied)
    with pytest.raises(UnsupportedError, match="needs a step with correction=True"):
        do(state, other, task(other, "t2"))
    assert (state.path / "tied" / f"{other.sha256}.t1").exists()


def ditto_by_hand(own: Vector) -> Vector:
    """Two steps of v <- v - lr (grad F(v) + mu (v - x)), from the kept v."""
    for _ in range(2):
        own = own - LR * (DEVICE.gradient(own) + 0.5 * (own - X))
    return own


def test_ditto_s_personal_model_is_kept_from_task_to_task(
    state: StateDirectory, bundle: Bundle
) -> None:
    """Also past a task of another algorithm, and whether or not the update was taken; the update is
    plain SGD's."""
    own, update = X.astype(np.float64), X.astype(np.float64)
    for _ in range(STEPS):
        update = update - LR * DEVICE.gradient(update)
    for name in ("t1", "t2", "t3"):
        done = do(state, bundle, task(bundle, name, algorithm="ditto"))
        before, own = own, ditto_by_hand(own)
        np.testing.assert_allclose(FLOAT32.decode(done.contents[0]), update - X, rtol=1e-5)
        assert done.personal is not None
        np.testing.assert_allclose(done.personal, own, rtol=1e-5)
        measured, shared = done.report.personal, done.report.evaluation
        assert measured is not None
        np.testing.assert_allclose(
            measured.loss_sum, (DEVICE.gradient(before) * (before - DEVICE.minimum)).sum() / 2
        )
        assert (measured == shared) == (name == "t1"), "the first personal model is the round's"
        state.outbox.drop(name)
        do(state, bundle, task(bundle, f"{name}-plain", algorithm="plain"))
    assert [path.name for path in (state.path / "kept").iterdir()] == [f"{bundle.sha256}.personal"]


def test_a_personal_model_that_was_not_saved_is_not_gone_on_from(
    state: StateDirectory, bundle: Bundle
) -> None:
    do(state, bundle, task(bundle, "t1", algorithm="ditto"))
    lost = do(state, bundle, task(bundle, "t2", algorithm="ditto"), save=False)
    again = do(state, bundle, task(bundle, "t2", algorithm="ditto"))
    assert lost.personal is not None
    assert again.personal is not None
    assert lost.personal.tobytes() == again.personal.tobytes()
    assert again.report.personal == lost.report.personal


@pytest.mark.parametrize("encoding", ["float32", "float16", "int8", "topk-0.5"])
@pytest.mark.parametrize("algorithm", ["plain", "ditto", "feddyn"])
def test_the_update_is_clipped_and_nothing_of_the_device_s_own(
    state: StateDirectory, bundle: Bundle, algorithm: str, encoding: str
) -> None:
    """What stays on the device is as it would be without a bound, except what must agree with what
    the coordinator counts: FedDyn's lambda_k."""
    given = task(bundle, "t1", algorithm=algorithm)
    free = do(state, bundle, given, save=False)
    assert free.report.clipped is None
    bounded = msgspec.structs.replace(given, parts={UPDATE: encoding}, clip=0.25)
    done = do(state, bundle, bounded)
    assert done.report.clipped is True
    counted = find_encoding(encoding).decode(done.contents[0], 2)
    assert 0.1 < np.linalg.norm(counted) <= 0.25
    assert done.kept_state.tobytes() == free.kept_state.tobytes()
    if algorithm == "ditto":
        assert free.personal is not None
        assert done.personal is not None
        assert done.personal.tobytes() == free.personal.tobytes()
    if algorithm == "feddyn":
        np.testing.assert_allclose(done.tied["dual"], -0.5 * counted, rtol=1e-4, atol=1e-6)


def test_a_short_update_travels_bit_for_bit(state: StateDirectory, bundle: Bundle) -> None:
    given = task(bundle, "t1", algorithm="plain")
    free = do(state, bundle, given, save=False)
    done = do(state, bundle, msgspec.structs.replace(given, clip=1e6))
    assert done.report.clipped is False
    assert bytes(done.contents[0]) == bytes(free.contents[0])


def test_another_bound_does_not_begin_the_training_again(bundle: Bundle) -> None:
    """A coordinator that was started again may say another bound, and that more is spent."""
    given = task(bundle, "t1", algorithm="plain")
    note = PrivacyNote(spent=1.0, delta=1e-6)
    other = msgspec.structs.replace(given, clip=0.25, local_noise=0.5, privacy=note)
    assert task_fingerprint(given) == task_fingerprint(other)
    assert task_fingerprint(given) != task_fingerprint(msgspec.structs.replace(given, seed=8))


@pytest.mark.parametrize("encoding", ["float32", "float16", "int8"])
def test_with_noise_of_its_own_a_device_tells_nothing_but_the_noised_update(
    state: StateDirectory, bundle: Bundle, encoding: str
) -> None:
    """Two trainings of the task have the same update and other noise. Nothing on the disk holds the
    update without noise."""
    given = msgspec.structs.replace(
        task(bundle, "t1", algorithm="plain"), parts={UPDATE: encoding}, clip=0.25
    )
    free = do(state, bundle, given, save=False)
    noised = msgspec.structs.replace(given, local_noise=0.5, evaluate=True)
    first = do(state, bundle, noised, save=False)
    done = do(state, bundle, noised)
    assert len({bytes(each.contents[0]) for each in (free, first, done)}) == 3
    report = done.report
    assert (report.examples, report.steps, report.epochs, report.complete) == (1, 1, STEPS, True)
    assert (report.loss, report.metrics, report.seconds, report.clipped) == (0.0, {}, 0.0, None)
    assert report.evaluation is None
    files = [path for path in state.path.rglob("*") if path.is_file()]
    assert any(bytes(done.contents[0]) in path.read_bytes() for path in files)
    assert not any(bytes(free.contents[0]) in path.read_bytes() for path in files)


def test_the_owner_s_log_has_what_the_coordinator_is_not_told(
    state: StateDirectory, bundle: Bundle
) -> None:
    given = msgspec.structs.replace(
        task(bundle, "t1", algorithm="plain"), clip=0.25, local_noise=0.5
    )
    do(state, bundle, given, save=False)
    trainer = Trainer(state, as_data(DEVICE.data), "onnx", 1)
    sent = trainer.train(given, 100.0).report
    assert trainer.own_report is not None
    assert (sent.loss, sent.steps) == (0.0, 1)
    assert trainer.own_report.loss > 0
    assert trainer.own_report.steps == STEPS
