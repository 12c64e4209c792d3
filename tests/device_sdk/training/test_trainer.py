"""Tasks of one bundle after each other on a real state directory: what stays on the device and what
does not."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from buffers import trained_model
from features import examples, features_bundle
from fleetlearn_device.storage.errors import DiskFullError
from fleetlearn_device.storage.state_directory import StateDirectory
from fleetlearn_device.training import trainer as trainer_module
from fleetlearn_device.training.algorithms import UnsupportedError, run_algorithm
from fleetlearn_device.training.data import as_data
from fleetlearn_device.training.train import DivergedError, OutOfTimeError, StoppedError
from fleetlearn_device.training.trainer import MAX_STARTS, FinishedUpdate, KilledError, Trainer
from fleetlearn_protocol import Bundle, BundleError, open_bundle, write_bundle
from fleetlearn_protocol.encodings import FLOAT16, FLOAT32, find_encoding
from fleetlearn_protocol.exchanges import EVALUATION, EXCHANGE_KINDS, FIT, content_of
from fleetlearn_protocol.manifest import EVAL, FROZEN, OF_FEATURES, PARAMETERS, STATE, TRAIN
from fleetlearn_protocol.messages import Question, Task
from fleetlearn_protocol.vector import checksum, digest
from line_bundle import INITIAL, INITIAL_STATE, flat, line_data, line_step, write_line_bundle
from roll_call import CONTENTS, ROLL_CALL, Sent

PARTS = {"update": "float32", "buffers": "float32"}
DATA = as_data(line_data(12))
MODELS = [np.array(values, np.float32) for values in ([0, 0, 0, 0], [1, 1, 1, 5], [0.5, 2, -1, 9])]


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("line") / "line.bundle"
    return write_line_bundle(
        folder, personal=True, state=True, references=("anchor", "previous"), random=True
    )


@pytest.fixture
def state(tmp_path: Path) -> Iterator[StateDirectory]:
    opened = StateDirectory(tmp_path / "state")
    yield opened
    opened.close()


def task(bundle: Bundle, number: int, **changes: Any) -> Task:
    model = MODELS[number]
    settings: dict[str, Any] = {
        "round": number,
        "parts": PARTS,
        "hyper": {"lr": 0.05, "mu": 0.3},
        "epochs": 2,
        "batch_size": 5,
        "seed": 100,
        "deadline": 100.0,
    } | changes
    return Task(
        f"t{number}", bundle=bundle.sha256, vectors=(FLOAT32.reference("model", model),), **settings
    )


def question(bundle: Bundle, model: Any) -> Question:
    vectors = (FLOAT32.reference("model", model),)
    return Question("e1", EVALUATION, 100.0, bundle=bundle.sha256, vectors=vectors)


def bring(
    state: StateDirectory, bundle: Bundle, given: Task | Question, models: Sequence[Any] = ()
) -> list[str]:
    """Fetch what the task lacks. Returns its names. models: beside MODELS."""
    contents = {entry.sha256: bundle.read(path) for path, entry in bundle.manifest.files.items()}
    contents |= {bundle.sha256: bundle.read("manifest.json")} | {
        digest(model): model.tobytes() for model in (*MODELS, *models)
    }
    names = []
    while lacking := state.contents.lacking(given, "onnx"):
        for wanted in lacking:
            names.append(wanted.name)
            state.contents.append(wanted, 0, contents[wanted.sha256])
            assert state.contents.finish(wanted)
    return names


def do(
    trainer: Trainer, state: StateDirectory, bundle: Bundle, number: int, save: bool = True
) -> FinishedUpdate:
    given = task(bundle, number)
    bring(state, bundle, given)
    trained = trainer.train(given, 100.0)
    if save:
        state.outbox.save(*trained)
    return trained


def by_hand(number: int, kept: dict[str, Any] | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """The task's steps in numpy: the whole model after it, and what is kept."""
    kept = kept or {
        "h": INITIAL["h"],
        "t": INITIAL_STATE["t"],
        "previous": {"w": MODELS[number][:3]},
    }
    now: dict[str, Any] = {"w": MODELS[number][:3], "seen": MODELS[number][3], "h": kept["h"]}
    references = {"anchor": {"w": MODELS[number][:3]}, "previous": kept["previous"]}
    steps: dict[str, Any] = {"m.w": INITIAL_STATE["m.w"], "t": kept["t"]}
    batches = [batch for epoch in range(2) for batch in DATA.batches(5, 100, epoch)]
    for number_of_step, batch in enumerate(batches):
        now, steps, _ = line_step(now, steps, batch, 0.05, 0.3, 100 + number_of_step, **references)
    return now, {"h": now["h"], "t": steps["t"], "previous": now}


@pytest.mark.parametrize(
    "name", ["float16", "bfloat16", "int8", "int4", "topk-0.3", "topk-0.3-int8"]
)
def test_the_update_is_sent_as_the_task_asks(
    state: StateDirectory, full: Bundle, name: str
) -> None:
    """With the task's own draws: the same task gives the same bytes."""
    exact = FLOAT32.decode(
        do(Trainer(state, DATA, "onnx", 1), state, full, 0, save=False).contents[0]
    )
    given = task(full, 0, parts={"update": name, "buffers": "float32"})
    contents = [Trainer(state, DATA, "onnx", 1).train(given, 100.0) for _ in range(2)]
    assert contents[0].contents == contents[1].contents
    (part, buffers), encoding = contents[0].report.parts, find_encoding(name)
    assert (part.encoding, part.size, part.crc32) == (
        name,
        encoding.size(4),
        checksum(contents[0].contents[0]),
    )
    assert contents[0].contents[0] == encoding.encode(exact, given.seed)
    assert (buffers.name, buffers.encoding, buffers.size) == ("buffers", "float32", 4)
    now, _ = by_hand(0, None)
    assert FLOAT32.decode(contents[0].contents[1]).tolist() == [now["seen"]], (
        "a value, whatever the update's encoding"
    )
    assert exact[3] == 0


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        (
            {"update": "float32"},
            "has buffers that travel, such as BatchNorm's statistics, and the task does not ask",
        ),
        (
            {"update": "float32", "buffers": "int8"},
            "the part buffers as int8; values travel as float32 alone",
        ),
    ],
)
def test_a_task_that_takes_buffers_for_differences_is_refused(
    state: StateDirectory, full: Bundle, parts: dict[str, str], text: str
) -> None:
    given = task(full, 0, parts=parts)
    bring(state, full, given)
    with pytest.raises(UnsupportedError, match=text):
        Trainer(state, DATA, "onnx", 1).train(given, 100.0)


def test_a_task_goes_on_from_the_residual_of_the_one_that_it_names(
    state: StateDirectory, full: Bundle
) -> None:
    """Two updates of top-k: the second one's bytes are those of its update plus what the first left
    out. A set that no task names any more is deleted."""
    encoding, trainer = find_encoding("topk-0.3"), Trainer(state, DATA, "onnx", 1)
    exact = FLOAT32.decode(
        do(Trainer(state, DATA, "onnx", 1), state, full, 0, save=False).contents[0]
    )
    first = trainer.train(
        task(full, 0, parts={"update": encoding.name, "buffers": "float32"}), 100.0
    )
    residual = exact - encoding.decode(first.contents[0], 4)
    assert first.tied is not None
    assert first.tied["residual"].tobytes() == residual.tobytes()
    state.outbox.save(first.report, first.contents, first.bundle, None, first.tied)
    state.outbox.drop("t0")
    given = msgspec.structs.replace(
        task(full, 0, parts={"update": encoding.name, "buffers": "float32"}), task="t1"
    )
    for kept, sent in (("t0", exact + residual), (None, exact), ("t0", exact)):
        again = trainer.train(msgspec.structs.replace(given, kept=kept), 100.0)
        assert again.contents[0] == encoding.encode(sent, given.seed)


def test_an_update_that_its_encoding_cannot_hold_has_diverged(
    state: StateDirectory, full: Bundle
) -> None:
    given = task(
        full,
        0,
        parts={"update": "float16", "buffers": "float32"},
        hyper={"lr": 3000.0, "mu": 0.0},
        epochs=1,
    )
    bring(state, full, given)
    with pytest.raises(DivergedError, match="float16 holds up to 65504"):
        Trainer(state, DATA, "onnx", 1).train(given, 100.0)


def test_a_model_that_came_as_float16_is_what_the_update_is_relative_to(
    state: StateDirectory, full: Bundle
) -> None:
    exact = np.array([0.1, 0.2, 0.3, 0.7], np.float32)
    rounded, found = FLOAT16.decode(FLOAT16.encode(exact)), []
    assert not np.equal(rounded, exact).any()
    bring(state, full, task(full, 0))
    for encoding, model in ((FLOAT16, exact), (FLOAT32, rounded), (FLOAT32, exact)):
        reference = encoding.reference("model", model)
        state.contents.vector_path(reference.sha256).write_bytes(encoding.encode(model))
        given = msgspec.structs.replace(task(full, 0), vectors=(reference,))
        found.append(Trainer(state, DATA, "onnx", 1).train(given, 100.0).contents[0])
    assert found[0] == found[1] != found[2]


def test_what_a_task_needs_on_disk(state: StateDirectory, full: Bundle) -> None:
    names = bring(state, full, task(full, 0))
    assert set(names) == {"manifest.json", "the model", TRAIN, EVAL, PARAMETERS, STATE}
    assert bring(state, full, task(full, 1)) == ["the model"]


def test_tasks_after_each_other(state: StateDirectory, full: Bundle) -> None:
    """Each begins with the personal parameter, the count and the previous model with which the one
    before it ended, and a momentum that is the bundle's; its update is of what travels."""
    trainer = Trainer(state, DATA, "onnx", 1)
    kept = None
    for number in range(3):
        trained = do(trainer, state, full, number)
        now, kept = by_hand(number, kept)
        parts = {
            part.name: FLOAT32.decode(row)
            for part, row in zip(trained.report.parts, trained.contents, strict=True)
        }
        assert [content.nbytes for content in trained.contents] == [16, 4]
        trained_now = trained_model(parts, MODELS[number], full.manifest)
        np.testing.assert_allclose(trained_now, flat(now, full.manifest.travelling), atol=2e-5)
        own = state.kept_states.load(full.sha256, 6)
        assert own is not None
        np.testing.assert_allclose(
            own, [kept["h"], kept["t"], *flat(now, full.manifest.travelling)], atol=2e-5
        )
        assert own[1] == INITIAL_STATE["t"] + 6 * (number + 1)


def test_a_bound_on_the_update_leaves_the_device_s_own_part_alone(
    tmp_path: Path, full: Bundle
) -> None:
    """Personal parameters, kept state and the previous model are not in the update: they are what
    they would be without a bound. Neither are the buffers, which are values."""
    done = {}
    for bound in (None, 0.01):
        state = StateDirectory(tmp_path / str(bound))
        given = task(full, 0, clip=bound)
        bring(state, full, given)
        done[bound] = Trainer(state, DATA, "onnx", 1).train(given, 100.0)
        state.close()
    free, bounded = done.values()
    update = FLOAT32.decode(bounded.contents[0]).astype(np.float64)
    assert np.linalg.norm(FLOAT32.decode(free.contents[0])) > 0.01 >= np.linalg.norm(update)
    assert bytes(bounded.contents[1]) == bytes(free.contents[1])
    assert bounded.kept_state.tobytes() == free.kept_state.tobytes()


def test_another_process_goes_on_from_the_directory(tmp_path: Path, full: Bundle) -> None:
    together = []
    for folder, restarts in (("one", False), ("two", True)):
        state = StateDirectory(tmp_path / folder)
        trainer = Trainer(state, DATA, "onnx", 1)
        for number in range(3):
            trained = do(trainer, state, full, number)
            if restarts:
                state.close()
                state = StateDirectory(tmp_path / folder)
                trainer = Trainer(state, DATA, "onnx", 1)
        state.close()
        together.append((trained.contents[0].tobytes(), trained.kept_state.tobytes()))
    assert together[0] == together[1]


def test_a_training_whose_update_was_not_saved_leaves_nothing(
    state: StateDirectory, full: Bundle
) -> None:
    """The task was cancelled, or the process died. Trained again it gives the same update, also on
    the open runtime."""
    trainer = Trainer(state, DATA, "onnx", 1)
    do(trainer, state, full, 0)
    lost = do(trainer, state, full, 1, save=False)
    again = do(trainer, state, full, 1)
    assert again.contents[0].tobytes() == lost.contents[0].tobytes()
    assert again.kept_state.tobytes() == lost.kept_state.tobytes()
    assert (
        do(trainer, state, full, 1, save=False).contents[0].tobytes() != again.contents[0].tobytes()
    )


def test_a_training_that_was_stopped_leaves_nothing(state: StateDirectory, full: Bundle) -> None:
    trainer = Trainer(state, DATA, "onnx", 1)
    do(trainer, state, full, 0)
    expected = do(trainer, state, full, 1, save=False)
    trainer.halt.set()
    with pytest.raises(StoppedError):
        do(trainer, state, full, 1)
    trainer.halt.clear()
    assert do(trainer, state, full, 1).contents[0].tobytes() == expected.contents[0].tobytes()


def test_a_task_whose_model_was_replaced_before_it_began_was_stopped(
    state: StateDirectory, full: Bundle
) -> None:
    """It was cancelled while its training waited for the thread; the next task's model came."""
    trainer = Trainer(state, DATA, "onnx", 1)
    given, after = task(full, 1), task(full, 2)
    bring(state, full, given)
    bring(state, full, after)
    state.contents.vector_path(given.vectors[0].sha256).unlink(missing_ok=True)
    with pytest.raises(FileNotFoundError):
        trainer.train(given, 100.0)
    trainer.halt.set()
    with pytest.raises(StoppedError, match="before training began"):
        trainer.train(given, 100.0)


def test_an_update_that_nobody_took_leaves_the_personal_part_trained(
    state: StateDirectory, full: Bundle
) -> None:
    trainer = Trainer(state, DATA, "onnx", 1)
    first = do(trainer, state, full, 0)
    state.outbox.drop("t0")  # refused, or too late
    own = state.kept_states.load(full.sha256, 6)
    assert own is not None
    np.testing.assert_array_equal(own, first.kept_state)
    assert own[0] != INITIAL["h"]


def test_a_bundle_that_goes_and_comes_again_finds_its_own(
    state: StateDirectory, full: Bundle, tmp_path: Path
) -> None:
    trainer = Trainer(state, DATA, "onnx", 1)
    do(trainer, state, full, 0)
    expected = do(trainer, state, full, 1, save=False)
    state.contents.delete_bundle(full.sha256)
    other = write_line_bundle(tmp_path / "other.bundle", personal=True)
    begun = do(trainer, state, other, 1)
    fresh = StateDirectory(tmp_path / "fresh")
    assert (
        do(Trainer(fresh, DATA, "onnx", 1), fresh, other, 1).kept_state.tobytes()
        == begun.kept_state.tobytes()
    )
    fresh.close()
    assert do(trainer, state, full, 1).contents[0].tobytes() == expected.contents[0].tobytes()


def test_a_bundle_of_which_nothing_is_kept_writes_nothing(
    state: StateDirectory, tmp_path: Path
) -> None:
    plain = write_line_bundle(tmp_path / "plain.bundle", references=("anchor",))
    zeros = np.zeros(5, np.float32)
    given = Task(
        "t0",
        1,
        plain.sha256,
        (FLOAT32.reference("model", zeros),),
        PARTS,
        {"lr": 0.1},
        1,
        0,
        0,
        100.0,
    )
    contents = {entry.sha256: plain.read(path) for path, entry in plain.manifest.files.items()}
    contents |= {plain.sha256: plain.read("manifest.json"), digest(zeros): zeros.tobytes()}
    names = set()
    while lacking := state.contents.lacking(given, "onnx"):
        for wanted in lacking:
            names.add(wanted.name)
            state.contents.append(wanted, 0, contents[wanted.sha256])
            assert state.contents.finish(wanted)
    assert names == {"manifest.json", "the model", TRAIN, EVAL}
    trained = Trainer(state, DATA, "onnx", 1).train(given, 100.0)
    assert trained.kept_state.shape == (0,)
    state.outbox.save(*trained)
    assert not list((state.path / "kept").iterdir())


def test_a_bundle_that_cannot_be_used_is_not_fetched_again_unless_it_is_damaged(
    state: StateDirectory, full: Bundle, tmp_path: Path
) -> None:
    contents = {path: full.read(path) for path in full.manifest.files} | {TRAIN: b"no graph at all"}
    broken = open_bundle(write_bundle(tmp_path / "broken.bundle", full.manifest, contents))
    given = task(broken, 0)
    trainer = Trainer(state, DATA, "onnx", 1)
    own = do(trainer, state, full, 0).kept_state
    bring(state, broken, given)
    with pytest.raises(BundleError, match=r"cannot load graphs/train\.onnx"):
        trainer.train(given, 100.0)
    assert bring(state, broken, given) == []  # the same bytes would come
    (state.contents.bundle_path(broken.sha256) / TRAIN).write_bytes(b"no graph at ALL")
    with pytest.raises(BundleError):
        trainer.train(given, 100.0)
    assert bring(state, broken, given) == [TRAIN]
    after = do(trainer, state, full, 1, save=False)
    assert FLOAT32.decode(after.contents[0]).any()
    kept = state.kept_states.load(full.sha256, 6)
    assert kept is not None
    np.testing.assert_array_equal(kept, own)


def test_progress_counts_the_batches_of_the_evaluation_and_the_steps(
    state: StateDirectory, full: Bundle
) -> None:
    """12 examples in batches of 5: three to evaluate, and three steps in each of two passes."""
    trainer = Trainer(state, DATA, "onnx", 1)
    given = task(full, 0, evaluate=True)
    bring(state, full, given)
    for _ in range(2):
        trainer.train(given, 100.0)
        assert (trainer.steps, trainer.batches) == (6, 9)


def test_starts_are_counted_until_the_training_ends(state: StateDirectory, full: Bundle) -> None:
    trainer = Trainer(state, DATA, "onnx", 1)
    given = task(full, 0)
    bring(state, full, given)
    for _ in range(MAX_STARTS):  # processes that were killed
        state.training_starts.add("t0")
    with pytest.raises(KilledError, match="killed the process 3 times"):
        trainer.train(given, 100.0)
    assert state.training_starts.count("t0") == 3
    assert state.training_starts.count("t1") == 0
    do(trainer, state, full, 1)
    assert state.training_starts.count("t0") == 0  # another task was trained
    for code, halt in (("ended", False), ("stopped", True)):
        state.training_starts.add("t2")
        trainer.halt.set() if halt else trainer.halt.clear()
        with suppress(StoppedError):
            do(trainer, state, full, 2)
        assert state.training_starts.count("t2") == 0, code


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """No file of this process can grow beyond it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_without_room_for_the_update_shows_before_the_first_step(
    state: StateDirectory, full: Bundle
) -> None:
    trainer = Trainer(state, DATA, "onnx", 1)
    given = task(full, 0)
    bring(state, full, given)
    with (
        largest_file(1000),
        pytest.raises(DiskFullError, match="there is no room for an update of 44 bytes"),
    ):
        trainer.train(given, 100.0)
    assert trainer.steps == 0
    assert not list((state.path / "pending").iterdir())
    do(trainer, state, full, 0)


def test_the_room_held_is_what_the_update_is_written_into(
    state: StateDirectory, full: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(state, DATA, "onnx", 1)
    trained = do(trainer, state, full, 0, save=False)
    held = {
        path.name: (path.stat().st_ino, path.stat().st_size)
        for path in (state.path / "pending").iterdir()
    }
    assert {name: size for name, (_, size) in held.items()} == {
        "update.reserved": sum(content.nbytes for content in trained.contents),
        "kept.reserved": trained.kept_state.nbytes + 4,
        "tied.reserved": 0, "own.reserved": 0, "report.reserved": 2**16,
    }  # fmt: skip
    state.outbox.save(*trained)
    pending = state.path / "pending"
    (update,) = pending.glob("*.bin")
    assert (update.stat().st_ino, update.read_bytes()) == (
        held["update.reserved"][0],
        b"".join(trained.contents),
    )
    assert (pending / "report.json").stat().st_ino == held["report.reserved"][0]
    assert (state.path / "kept" / full.sha256).stat().st_ino == held["kept.reserved"][0]
    assert state.outbox.load() == trained.report
    assert {path.name for path in pending.iterdir()} == {update.name, "report.json"}


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EINVAL])
def test_where_the_file_system_holds_no_room_it_is_written(
    number: int, state: StateDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(descriptor: int, start: int, size: int) -> None:
        raise OSError(number, "not here")

    monkeypatch.setattr(os, "posix_fallocate", refused)
    state.outbox.reserve(3 * 2**20 + 5, 0)
    sizes = {path.name: path.stat().st_size for path in (state.path / "pending").iterdir()}
    kept = {"kept.reserved": 0, "tied.reserved": 0, "own.reserved": 0}
    assert sizes == {"update.reserved": 3 * 2**20 + 5, **kept, "report.reserved": 2**16}
    state.outbox.release()
    assert not list((state.path / "pending").iterdir())


def test_a_training_that_fails_holds_no_room(state: StateDirectory, full: Bundle) -> None:
    trainer = Trainer(state, DATA, "onnx", 1)
    trainer.halt.set()
    with pytest.raises(StoppedError):
        do(trainer, state, full, 0)
    assert not list((state.path / "pending").iterdir())


@pytest.fixture(scope="module")
def with_features(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return features_bundle(tmp_path_factory.mktemp("features") / "features.bundle").bundle


def features_task(bundle: Bundle, number: int) -> tuple[Task, dict[str, bytes]]:
    """A task of a round with another model, and the contents that it names."""
    model = bundle.parameters() + np.float32(0.1 * number)
    contents = {entry.sha256: bundle.read(path) for path, entry in bundle.manifest.files.items()}
    contents |= {bundle.sha256: bundle.read("manifest.json"), digest(model): model.tobytes()}
    vectors = (FLOAT32.reference("model", model),)
    return Task(
        f"t{number}",
        bundle=bundle.sha256,
        vectors=vectors,
        round=number,
        parts={"update": "float32"},
        hyper={"lr": 0.1},
        epochs=2,
        batch_size=8,
        seed=number,
        deadline=100.0,
    ), contents


def rounds(
    trainer: Trainer, state: StateDirectory, bundle: Bundle, *numbers: int
) -> tuple[list[bytes], set[str]]:
    """Train tasks after each other. Returns the updates, and the names of what was fetched."""
    updates, names = [], set()
    for number in numbers:
        given, contents = features_task(bundle, number)
        while lacking := state.contents.lacking(given, trainer.kind, trainer.from_features):
            for wanted in lacking:
                names.add(wanted.name)
                state.contents.append(wanted, 0, contents[wanted.sha256])
                assert state.contents.finish(wanted)
        updates.append(trainer.train(given, 100.0).contents[0].tobytes())
        state.outbox.drop(given.task)
    return updates, names


def test_features_are_kept_from_round_to_round(tmp_path: Path, with_features: Bundle) -> None:
    x, y = examples(50)
    data = as_data((x.numpy(), y.numpy()))
    found = {}
    for limit in (2**20, 0):
        state = StateDirectory(tmp_path / f"{limit}")
        trainer = Trainer(state, data, "onnx", 1, feature_cache=limit)
        updates, names = rounds(trainer, state, with_features, 1, 2, 3)
        assert {*(OF_FEATURES if limit else (TRAIN, EVAL)), FROZEN} == {
            name for name in names if "graphs" in name
        }
        assert str(trainer.features).startswith("features of 50 of 50" if limit else "None")
        # a process that begins again computes them again, and the third task gives the same
        if limit:
            again, _ = rounds(
                Trainer(state, data, "onnx", 1, feature_cache=limit), state, with_features, 3
            )
            assert again == updates[2:]
        found[limit] = [FLOAT32.decode(memoryview(update)) for update in updates]
        state.close()
    np.testing.assert_allclose(found[2**20], found[0], atol=1e-6)


def test_another_bundle_of_the_same_frozen_part_takes_the_features_over(
    state: StateDirectory, with_features: Bundle, full: Bundle, tmp_path: Path
) -> None:
    x, y = examples(50)
    trainer = Trainer(state, as_data((x.numpy(), y.numpy())), "onnx", 1, feature_cache=2**20)
    rounds(trainer, state, with_features, 1)
    kept = trainer.features
    same = features_bundle(tmp_path / "same.bundle", hyper={"lr": 0.3}).bundle
    rounds(trainer, state, same, 2)
    assert trainer.features is kept
    other = features_bundle(tmp_path / "other.bundle", frozen="float16").bundle
    rounds(trainer, state, other, 3)
    assert trainer.features is not kept
    without = features_bundle(tmp_path / "without.bundle", cache_features=False).bundle
    rounds(trainer, state, without, 4)
    assert trainer.features is None


def test_batches_of_the_users_own_train_whole_models(
    state: StateDirectory, with_features: Bundle
) -> None:
    """They may be other examples in each pass."""
    x, y = (value.numpy() for value in examples(16))
    trainer = Trainer(
        state, as_data([(x[:8], y[:8]), (x[8:], y[8:])], 16), "onnx", 1, feature_cache=2**20
    )
    _, names = rounds(trainer, state, with_features, 1)
    assert TRAIN in names
    assert trainer.features is None


@pytest.mark.parametrize("first", ["evaluation", "training"])
def test_what_a_pass_gave_counts_in_later_tasks(
    full: Bundle, state: StateDirectory, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """100 are stated, and a pass gives 12: a later task that ends within its first pass must not
    weigh 100."""
    asked: list[int | None] = []

    def run(*arguments: Any) -> Any:
        asked.append(arguments[-1].counted)
        return run_algorithm(*arguments)

    monkeypatch.setattr(trainer_module, "run_algorithm", run)
    trainer = Trainer(state, as_data([*DATA.batches(5, 0)], 100), "onnx", 1)
    if first == "evaluation":
        given = question(full, MODELS[1])
        bring(state, full, given)
        trainer.answer(given, 100.0)
    assert do(trainer, state, full, 0).report.examples == 12
    assert do(trainer, state, full, 1).report.examples == 12
    assert asked == [12 if first == "evaluation" else None, 12]


def test_an_evaluation_measures_with_what_is_the_device_s_own_and_changes_nothing(
    full: Bundle, state: StateDirectory
) -> None:
    trainer = Trainer(state, DATA, "onnx", 1)
    do(trainer, state, full, 0)
    given = question(full, MODELS[1])
    assert bring(state, full, given) == ["the model"]
    message = trainer.answer(given, 100.0)
    measured = content_of(message)
    assert (message.task, measured.examples) == ("e1", 12)
    trained = trainer.train(task(full, 1, evaluate=True), 100.0)
    assert trained.report.evaluation is not None
    assert trained.report.evaluation.examples == 12
    assert trained.report.evaluation.loss_sum == pytest.approx(measured.loss_sum)
    with pytest.raises(OutOfTimeError, match="longer than the 0 s"):
        trainer.answer(given, 0.0)
    trainer.halt.set()
    with pytest.raises(StoppedError):
        trainer.answer(given, 100.0)
    for _ in range(MAX_STARTS):
        state.training_starts.add("e1")
    with pytest.raises(KilledError):
        trainer.answer(given, 100.0)


def test_the_table_says_which_function_works_an_answer_out(
    state: StateDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kind of exchange that only tests have: no bundle, no model, an answer from what was
    asked."""

    def count(trainer: Trainer, asked: Question, seconds: float) -> Sent:
        assert seconds == 9.0
        return Sent(sum(content_of(asked).who.values()))

    monkeypatch.setitem(EXCHANGE_KINDS, ROLL_CALL, CONTENTS)
    monkeypatch.setitem(trainer_module.ANSWERS, ROLL_CALL, count)
    trainer = Trainer(state, DATA, "onnx", 1)
    asked = Question("r1.2-1", ROLL_CALL, 10.0, phase=2, content={"who": {"a": 1, "b": 2}})
    assert state.contents.lacking(asked, "onnx") == []
    reply = trainer.answer(asked, 9.0)
    assert (reply.task, reply.kind, reply.content) == ("r1.2-1", ROLL_CALL, {"number": 3})
    assert trainer.counted is None, "nothing was measured"


def fit_question(bundle: Bundle, models: Mapping[str, Any]) -> Question:
    vectors = tuple(FLOAT32.reference(name, model) for name, model in models.items())
    content = {"models": [*models]}
    return Question("f1-1", FIT, 100.0, content=content, bundle=bundle.sha256, vectors=vectors)


def test_each_model_is_measured_as_an_evaluation_measures_it(
    state: StateDirectory, full: Bundle
) -> None:
    """With the device's own parameters, in the order of the question; nothing is kept of it, and
    the task that follows fetches no model."""
    trainer = Trainer(state, DATA, "onnx", 1)
    models = {"c2": MODELS[1], "c1": MODELS[0]}
    asked = fit_question(full, models)
    assert {"the c1", "the c2"} <= {*bring(state, full, asked)}
    found = content_of(trainer.answer(asked, 100.0))
    expected = [trainer.evaluate(question(full, model), 100.0) for model in models.values()]
    assert found.examples == expected[0].examples
    assert found.losses == tuple(each.loss_sum / each.examples for each in expected)
    assert found.losses[0] != found.losses[1]
    chosen = task(full, 0)
    assert "the model" not in bring(state, full, chosen)


def test_a_model_that_fits_no_number_fits_worst(state: StateDirectory, full: Bundle) -> None:
    trainer, far = Trainer(state, DATA, "onnx", 1), np.full_like(MODELS[0], 1e30)
    asked = fit_question(full, {"c1": far, "c2": MODELS[0]})
    bring(state, full, asked, [far])
    found = content_of(trainer.answer(asked, 100.0))
    assert found.losses[0] == 1e30 > found.losses[1]
    asked = fit_question(full, {"c1": far})
    with pytest.raises(DivergedError):
        trainer.answer(asked, 100.0)


def test_a_fit_ends_in_its_time(state: StateDirectory, full: Bundle) -> None:
    trainer = Trainer(state, DATA, "onnx", 1)
    asked = fit_question(full, {"c1": MODELS[0]})
    bring(state, full, asked)
    with pytest.raises(OutOfTimeError, match="the measurement took longer than the -1 s that"):
        trainer.answer(asked, -1.0)
