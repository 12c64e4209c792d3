"""Tasks of a computation on a real state directory: every kind of data gives the same sums, and
nothing needs a runtime."""

from __future__ import annotations

import csv
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from fleetlearn_device.computations import registry
from fleetlearn_device.data import arrays as arrays_module
from fleetlearn_device.runtimes.checks import DataError
from fleetlearn_device.session.abilities import unsupported
from fleetlearn_device.storage.state_directory import StateDirectory
from fleetlearn_device.training import computing
from fleetlearn_device.training.algorithms import UnsupportedError, known_algorithms
from fleetlearn_device.training.data import Data, as_data
from fleetlearn_device.training.open_data import open_data
from fleetlearn_device.training.train import OutOfTimeError, StoppedError
from fleetlearn_device.training.trainer import FinishedUpdate, Trainer
from fleetlearn_protocol.bundle import Bundle
from fleetlearn_protocol.computations.kinds import KINDS
from fleetlearn_protocol.computations.private_sums import in_rows, is_short, unscale
from fleetlearn_protocol.computations.settings import CategoryColumn, NumberColumn, Statistics
from fleetlearn_protocol.computations.statistics import private_groups, sums_layout
from fleetlearn_protocol.encodings import FLOAT32, MASKED64
from fleetlearn_protocol.formats.masked import words_from_bytes
from fleetlearn_protocol.formats.whole import sums_from_bytes, sums_to_bytes
from fleetlearn_protocol.messages import SecureTask, Task
from fleetlearn_protocol.secure.about import about_update
from fleetlearn_protocol.secure.masks import mask_of
from fleetlearn_protocol.secure.sealed import unseal
from fleetlearn_protocol.secure.task_terms import terms_of, update_of
from fleetlearn_protocol.secure.whole_words import sums_to_words
from fleetlearn_protocol.withheld import without_data
from msgspec.structs import replace
from statistics_bundle import QUESTIONS, raw_table, statistics_bundle

TABLE = raw_table(300, 1)
HELPER = X25519PrivateKey.from_private_bytes(bytes(range(32)))
SECURE = SecureTask(
    "helper", 2, 16, helper=HELPER.public_key().public_bytes_raw().hex(), reports=1000
)


@pytest.fixture
def state(tmp_path: Path) -> Iterator[StateDirectory]:
    opened = StateDirectory(tmp_path / "state")
    yield opened
    opened.close()


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return statistics_bundle(tmp_path)


def given(bundle: Bundle, **changes: Any) -> Task:
    settings: dict[str, Any] = {
        "round": 1,
        "bundle": bundle.sha256,
        "vectors": (FLOAT32.reference("model", bundle.parameters()),),
        "parts": {"sums": "int64"},
        "hyper": {},
        "epochs": 1,
        "batch_size": 0,
        "seed": 0,
        "deadline": 100.0,
        "algorithm": "statistics",
    }
    return Task("t1", **(settings | changes))


def masked(bundle: Bundle, **changes: Any) -> Task:
    return given(bundle, **({"parts": {"sums": "masked64"}, "secure": SECURE} | changes))


def do(
    state: StateDirectory,
    bundle: Bundle,
    data: Data,
    seconds: float = 100.0,
    task: Task | None = None,
    **more: Any,
) -> FinishedUpdate:
    task = given(bundle) if task is None else task
    contents = {
        bundle.sha256: bundle.read("manifest.json"),
        task.vectors[0].sha256: bundle.parameters().tobytes(),
    }
    while lacking := state.contents.lacking(task, "onnx"):
        for wanted in lacking:
            state.contents.append(wanted, 0, contents[wanted.sha256])
            assert state.contents.finish(wanted)
    trainer = Trainer(state, data, "onnx", 1, **more)
    finished = trainer.train(task, seconds)
    state.outbox.save(*finished)
    return finished


def as_npz(folder: Path) -> str:
    np.savez(folder / "table.npz", **TABLE, surplus=np.zeros((300, 3)))
    return str(folder / "table.npz")


def as_csv(folder: Path) -> str:
    with (folder / "table.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(TABLE)
        for row in zip(*TABLE.values(), strict=True):
            writer.writerow(["" if value != value else value for value in row])
    return str(folder / "table.csv")


def as_sqlite(folder: Path) -> str:
    columns = [column.tolist() for column in TABLE.values()]
    rows = [
        tuple(None if value == "" or value != value else value for value in row)
        for row in zip(*columns, strict=True)
    ]
    with closing(sqlite3.connect(folder / "table.db")) as database:
        database.execute("CREATE TABLE people(age, income, city, smoker)")
        database.executemany("INSERT INTO people VALUES(?, ?, ?, ?)", rows)
        database.commit()
    return f"{folder / 'table.db'}?nulls=missing&query=SELECT * FROM people"


def as_folder(folder: Path) -> str:
    (folder / "table").mkdir()
    for name, column in TABLE.items():
        np.save(folder / "table" / f"{name}.npy", column)
    return str(folder / "table")


@pytest.mark.parametrize("write", [as_npz, as_csv, as_sqlite, as_folder])
def test_every_kind_of_data_gives_the_same_sums(
    tmp_path: Path, state: StateDirectory, bundle: Bundle, write: Callable[[Path], str]
) -> None:
    data = open_data(write(tmp_path))
    finished = do(state, bundle, data)
    expected = do(state, bundle, as_data(TABLE))
    assert bytes(finished.contents[0]) == bytes(expected.contents[0])
    sums = sums_layout(QUESTIONS).unpack(
        sums_from_bytes(finished.contents[0], sums_layout(QUESTIONS).size)
    )
    assert sums["rows"] == finished.report.examples == 300
    assert sums["number0.counts"].tolist()[0] == np.isnan(TABLE["age"]).sum()
    assert sums["category1.counts"].tolist() == [
        (TABLE["smoker"] == value).sum() for value in ("yes", "no")
    ]
    assert sums["category1.missing"] == (TABLE["smoker"] == "").sum()
    assert (finished.report.steps, finished.report.loss) == (1, 0.0)
    assert not (tmp_path / "state" / "runtime").exists()


def test_batches_and_held_out_rows_change_nothing(
    state: StateDirectory, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = do(state, bundle, as_data(TABLE))
    monkeypatch.setattr(computing, "BATCH", 64)
    parts = do(state, bundle, as_data(TABLE), hold_out=0.3)
    assert bytes(parts.contents[0]) == bytes(whole.contents[0])
    assert (parts.report.examples, whole.report.steps) == (300, 1)
    assert parts.report.steps > 4
    own = [{name: column[at : at + 70] for name, column in TABLE.items()} for at in (0, 70, 140)]
    own.append({name: column[210:] for name, column in TABLE.items()})
    users = do(state, bundle, as_data(own, 300))  # type: ignore[arg-type]
    assert bytes(users.contents[0]) == bytes(whole.contents[0])


def test_a_large_file_is_read_batch_by_batch(
    tmp_path: Path, state: StateDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers that lie on the disk stay there: no array of all rows is made."""
    monkeypatch.setattr(arrays_module, "MAPPED_FROM", 1000)
    asked = Statistics(numbers=(NumberColumn("x", range=(0.0, 1.0)),))
    bundle = statistics_bundle(tmp_path, asked)
    values = np.random.default_rng(1).random(50_000)
    np.savez(tmp_path / "large.npz", x=values)
    seen: list[np.ndarray] = []
    compute = registry.REGISTRY["statistics"]

    def watched(state: Any, columns: Any, settings: Any) -> Any:
        seen.append(columns["x"])
        return compute(state, columns, settings)

    monkeypatch.setitem(registry.REGISTRY, "statistics", watched)  # type: ignore[arg-type]
    finished = do(state, bundle, open_data(str(tmp_path / "large.npz")))
    assert [len(part) for part in seen] == [16384, 16384, 16384, 848]
    data = open_data(str(tmp_path / "large.npz"))
    (column,) = data.fit_to(bundle.manifest.batch, bundle.manifest.preprocessing).data.columns
    while column.base is not None and not isinstance(column, np.memmap):
        column = column.base
    assert isinstance(column, np.memmap)
    sums = sums_layout(asked).unpack(sums_from_bytes(finished.contents[0], sums_layout(asked).size))
    assert sums["rows"] == 50_000


def test_a_task_that_is_stopped_or_has_no_time_sends_nothing(
    state: StateDirectory, bundle: Bundle
) -> None:
    with pytest.raises(OutOfTimeError, match="did not pass over the rows"):
        do(state, bundle, as_data(TABLE), seconds=0.0)
    trainer = Trainer(state, as_data(TABLE), "onnx", 1)
    for event in (trainer.halt, trainer.enough):
        assert isinstance(event, threading.Event)
        event.set()
        with pytest.raises(StoppedError):
            trainer.train(given(bundle), 100.0)
        event.clear()


def test_rows_that_cannot_be_added_up_are_named(
    tmp_path: Path, state: StateDirectory, bundle: Bundle
) -> None:
    wrong = {**TABLE, "age": np.array(["old", *["3"] * 299])}
    with pytest.raises(DataError, match="age: old was found; expected a number or nothing"):
        do(state, bundle, as_data(wrong))
    without = {name: column for name, column in TABLE.items() if name != "city"}
    with pytest.raises(DataError, match="there is no column city"):
        do(state, bundle, as_data(without))


def test_a_task_of_another_computation_is_given_back(state: StateDirectory, bundle: Bundle) -> None:
    computing.check_computation(given(bundle), bundle.manifest)
    computing.check_computation(masked(bundle), bundle.manifest)
    with pytest.raises(UnsupportedError, match="has statistics"):
        computing.check_computation(given(bundle, algorithm="boosted"), bundle.manifest)
    for wrong in (
        given(bundle, parts={"sums": "float32"}),
        given(bundle, parts={"sums": "masked64"}),
        given(bundle, secure=SECURE),
    ):
        with pytest.raises(UnsupportedError, match="its only part is sums"):
            computing.check_computation(wrong, bundle.manifest)


def test_masked_sums_are_those_of_a_plain_task(
    tmp_path: Path, state: StateDirectory, bundle: Bundle
) -> None:
    """Once the mask is taken off, whose seed the helper can open, they are the same numbers. The
    report says nothing of the data, not even how many rows there are, and no file has the sums."""
    plain = do(state, bundle, as_data(TABLE))
    size = bundle.manifest.elements_of("sums")
    sums = sums_from_bytes(plain.contents[0], size)
    task = masked(bundle)
    made = do(state, bundle, as_data(TABLE), task=task)
    report = made.report
    assert report.parts[0].encoding == "masked64"
    assert report.parts[0].size == MASKED64.size(size) == len(made.contents[0])
    assert report.sealed is not None
    about = about_update(terms_of(task, 3 * size), update_of(task, state.device))
    seed = unseal(bytes.fromhex(report.sealed), HELPER, about)
    words = words_from_bytes(made.contents[0]) - mask_of(seed, 3 * size)
    np.testing.assert_array_equal(words, sums_to_words(sums))
    assert report == without_data(report, 1)
    assert (report.examples, report.steps) == (1, 1)
    raw = bytes(sums_to_bytes(sums)[:200])
    files = [path.read_bytes() for path in (tmp_path / "state").rglob("*") if path.is_file()]
    assert any(bytes(made.contents[0]) in content for content in files)
    assert not any(raw in content for content in files)


def test_sums_that_might_not_fit_into_a_total_are_not_masked(
    state: StateDirectory, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator refuses such plain sums. Masked ones it cannot see."""
    most = 2**62 // 1000

    def large(state: object, columns: object, settings: object, sign: int = 1) -> np.ndarray:
        return np.array([sign * most, *[0] * (bundle.manifest.elements_of("sums") - 1)])

    task = masked(bundle)
    monkeypatch.setitem(registry.REGISTRY, "statistics", large)  # type: ignore[arg-type]
    do(state, bundle, as_data(TABLE), task=task)
    most += 1
    with pytest.raises(DataError, match="beyond 4611686018427387, which is 2^62".replace("^", ".")):
        do(state, bundle, as_data(TABLE), task=task)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, None),
        ({"secure": None}, "asks for the parts sums (masked64)"),
        ({"parts": {"sums": "int64"}}, "asks for the parts sums (int64)"),
        ({"parts": {"sums": "masked"}}, "asks for the parts sums (masked)"),
        ({"parts": {"sums": "masked64", "update": "masked"}}, "asks for the parts"),
        ({"noise": 9.0}, "are not noised or multiplied"),
        ({"least_factor": 0.5}, "are not noised or multiplied"),
        ({"reports": None}, "does not say how many are added up"),
        ({"bits": 20}, "in words of 20 bits; expected 16"),
        ({"helper": None}, "names no helper's key"),
    ],
)
def test_a_session_looks_at_what_is_masked(
    bundle: Bundle, changes: dict[str, Any], text: str | None
) -> None:
    own = {name: changes[name] for name in changes.keys() & set(SECURE.__struct_fields__)}
    rest = {name: value for name, value in changes.items() if name not in own}
    task = masked(bundle, **({"secure": replace(SECURE, **own)} | rest))
    found = unsupported(task, ["statistics"], [], can_mask=True)
    assert (text in found) if found and text else found is text, found
    assert "needs the package" in (unsupported(masked(bundle), ["statistics"], []) or "")


@pytest.mark.parametrize("clip", [1000.0, 40.0])
def test_a_device_clips_what_it_sends(clip: float, state: StateDirectory, tmp_path: Path) -> None:
    """300 rows, which are more than one clip norm and less than the other."""
    asked = Statistics(numbers=(NumberColumn("age", range=(0.0, 100.0)),), rounds=1)
    private = statistics_bundle(tmp_path, asked)
    finished = do(state, private, as_data(TABLE), task=given(private, clip=clip))
    sent = sums_from_bytes(finished.contents[0], private.manifest.elements_of("sums"))
    assert is_short(sent)
    assert finished.report.clipped == (clip == 40.0)
    groups = private_groups(asked, private.parameters())
    rows = int(unscale(in_rows(sent, clip), groups)[0])
    assert rows == 300 if clip == 1000.0 else 40 <= rows < 80


def test_a_device_clips_no_sums_that_it_knows_no_bound_of(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    unbounded = {"statistics": KINDS["statistics"]._replace(groups=None)}
    monkeypatch.setattr(computing, "KINDS", unbounded)
    with pytest.raises(UnsupportedError, match="cannot clip"):
        computing.check_computation(given(bundle, clip=1.0), bundle.manifest)


def test_a_device_masks_clipped_sums(state: StateDirectory, tmp_path: Path) -> None:
    asked = Statistics(numbers=(NumberColumn("age", range=(0.0, 100.0)),), rounds=1)
    private = statistics_bundle(tmp_path, asked)
    clipped = do(state, private, as_data(TABLE), task=given(private, clip=40.0))
    size = private.manifest.elements_of("sums")
    task = masked(private, clip=40.0)
    assert unsupported(task, ["statistics"], [], can_mask=True) is None
    made = do(state, private, as_data(TABLE), task=task)
    about = about_update(terms_of(task, 3 * size), update_of(task, state.device))
    assert made.report.sealed is not None
    assert made.report.clipped is None
    seed = unseal(bytes.fromhex(made.report.sealed), HELPER, about)
    words = words_from_bytes(made.contents[0]) - mask_of(seed, 3 * size)
    sums = sums_from_bytes(clipped.contents[0], size)
    np.testing.assert_array_equal(words, sums_to_words(sums))


def test_a_device_says_what_it_computes() -> None:
    for kind in ("onnx", "ort-training"):
        assert "statistics" in known_algorithms(kind)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, None),
        ({"algorithm": "plain"}, "asks for the parts sums (int64); expected update"),
        ({"parts": {"sums": "float32"}}, "sums"),
        ({"parts": {"update": "float32"}}, "update"),
    ],
)
def test_a_session_looks_at_parts_and_algorithm(
    bundle: Bundle, changes: dict[str, Any], text: str | None
) -> None:
    found = unsupported(given(bundle, **changes), ["statistics"], [], can_mask=False)
    assert (found is None) == (text is None), found
    assert unsupported(given(bundle), [], [], can_mask=False) is not None


def test_a_column_of_whole_numbers_names_categories(tmp_path: Path, state: StateDirectory) -> None:
    asked = Statistics(categories=(CategoryColumn("code", values=("3", "1.5", "-7"), longest=8),))
    bundle = statistics_bundle(tmp_path, asked)
    for column in (np.array([3.0, 3.0, 1.5, np.nan]), np.array(["3", "3", "1.5", ""])):
        finished = do(state, bundle, as_data({"code": column}))
        sums = sums_layout(asked).unpack(
            sums_from_bytes(finished.contents[0], sums_layout(asked).size)
        )
        assert sums["category0.counts"].tolist() == [2, 1, 0]
        assert sums["category0.missing"] == 1
