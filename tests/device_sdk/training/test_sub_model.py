"""What a device trains of a model with sparse tables: the rows that its data name."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleetlearn_device.runtimes.checks import DataError
from fleetlearn_device.runtimes.open_runtime import open_runtime
from fleetlearn_device.storage.state_directory import StateDirectory
from fleetlearn_device.training.data import ArrayData, BatchData
from fleetlearn_device.training.sub_model import find_sub_model
from fleetlearn_device.training.task_data import TaskData, TaskDataMaker
from fleetlearn_device.training.trainer import Trainer
from fleetlearn_protocol import Bundle, open_bundle
from fleetlearn_protocol.encodings import FLOAT32, find_encoding
from fleetlearn_protocol.formats.whole import rows_from_bytes
from fleetlearn_protocol.manifest import PARAMETERS, PERSONAL
from fleetlearn_protocol.messages import ROWS, UPDATE, Task
from fleetlearn_protocol.sparse_rows import put_back, row_layout, select, select_bytes
from fleetlearn_protocol.vector import Vector, digest
from sparse_fleet import FILMS, ratings_bundle, ratings_of


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return open_bundle(ratings_bundle(tmp_path_factory.mktemp("ratings"), optimizer="adam"))


@pytest.fixture(scope="module")
def model(bundle: Bundle) -> Vector:
    return bundle.parameters()[: bundle.manifest.size]


def task(bundle: Bundle, model: Vector, parts: dict[str, str], **changes: Any) -> Task:
    settings: dict[str, Any] = {
        "round": 1,
        "hyper": {"lr": 0.05},
        "epochs": 3,
        "batch_size": 8,
        "seed": 9,
        "deadline": 100.0,
    } | changes
    vectors = (FLOAT32.reference("model", model),)
    return Task("t1", bundle=bundle.sha256, vectors=vectors, parts=parts, **settings)


def trained(
    folder: Path, bundle: Bundle, model: Vector, given: Task, data: Any = None, **options: Any
) -> tuple[dict[str, Any], dict[str, int], Trainer]:
    """Return what the task sends, by the names of its parts; what was fetched for it, name -> its
    bytes; and the trainer."""
    state = StateDirectory(folder, "d")
    trainer = Trainer(state, data or ArrayData(ratings_of(0)), "onnx", 1, **options)
    contents = {entry.sha256: bundle.read(path) for path, entry in bundle.manifest.files.items()}
    contents |= {bundle.sha256: bundle.read("manifest.json"), digest(model): model.tobytes()}
    fetched: dict[str, int] = {}
    while True:
        trainer.choose_rows(given)
        infer = trainer.needs_infer
        lacking = state.contents.lacking(given, "onnx", infer=infer, choose=trainer.pieces)
        if not lacking:
            break
        for wanted in lacking:
            content = contents[wanted.sha256]
            if wanted.selection is not None:
                content = select_bytes(partial(part_of, content), wanted.selection, 0)
                object.__setattr__(wanted, "selected", digest(content))
            assert wanted.size in (None, len(content))
            fetched[wanted.name] = len(content)
            state.contents.append(wanted, 0, content)
            assert state.contents.finish(wanted)
    done = trainer.train(given, 100.0)
    sent = {
        part.name: content for part, content in zip(done.report.parts, done.contents, strict=True)
    }
    state.close()
    return sent, fetched, trainer


def part_of(content: bytes, begin: int, size: int) -> bytes:
    return content[begin : begin + size]


def test_the_rows_that_the_data_name_are_trained_as_in_the_whole_model(
    tmp_path: Path, bundle: Bundle, model: Vector
) -> None:
    """Fetched, trained and sent: the rows alone, with the whole model's bits; and the personal
    parameters without the file that has the tables."""
    parts = {ROWS: "uint32", UPDATE: "float32"}
    sent, fetched, _ = trained(tmp_path / "a", bundle, model, task(bundle, model, parts))
    whole, all_of_it, _ = trained(
        tmp_path / "b", bundle, model, task(bundle, model, {UPDATE: "float32"})
    )
    layout = row_layout(bundle.manifest)
    assert layout is not None
    rows = rows_from_bytes(sent[ROWS])
    assert np.array_equal(rows, np.unique(ratings_of(0)["film"]))
    expected = FLOAT32.decode(whole[UPDATE])
    assert np.array_equal(FLOAT32.decode(sent[UPDATE]), select(expected, layout, rows))
    others = np.setdiff1d(np.arange(FILMS), rows)
    assert not select(expected, layout, others)[1:].any()
    assert fetched["the model's rows"] == 4 * layout.elements(len(rows))
    assert "the model" not in fetched
    assert all_of_it["the model"] == 4 * bundle.manifest.size
    assert PERSONAL in fetched
    assert PARAMETERS not in fetched


@pytest.mark.parametrize("encoding", ["int8", "float16"])
def test_rows_in_other_encodings(
    tmp_path: Path, bundle: Bundle, model: Vector, encoding: str
) -> None:
    parts = {ROWS: "uint32", UPDATE: encoding}
    exact, _, _ = trained(
        tmp_path / "a", bundle, model, task(bundle, model, parts | {UPDATE: "float32"})
    )
    sent, _, _ = trained(tmp_path / "b", bundle, model, task(bundle, model, parts))
    update = FLOAT32.decode(exact[UPDATE])
    assert sent[UPDATE] == find_encoding(encoding).encode(update, 9)


def test_a_device_that_needs_the_whole_model_takes_the_rows_out_of_it(
    tmp_path: Path, bundle: Bundle, model: Vector
) -> None:
    """Its own model is the whole one, with what it trained."""
    given = task(bundle, model, {ROWS: "uint32", UPDATE: "float32"})
    own = tmp_path / "own.onnx"
    sent, fetched, _ = trained(tmp_path / "a", bundle, model, given, own_model=own)
    alone, _, _ = trained(tmp_path / "b", bundle, model, given)
    assert sent == alone
    assert fetched["the model"] == 4 * bundle.manifest.size
    layout = row_layout(bundle.manifest)
    assert layout is not None
    changed = select(model, layout, rows_from_bytes(sent[ROWS])) + FLOAT32.decode(sent[UPDATE])
    expected = model.copy()
    put_back(expected, layout, rows_from_bytes(sent[ROWS]), changed)
    content = own.read_bytes()
    for row in bundle.manifest.travelling:
        values = expected[row.offset : row.offset + int(np.prod(row.shape))]
        found = np.frombuffer(content, np.float32, values.size, row.infer_offset)
        assert np.allclose(found, values, atol=1e-6)


def test_held_out_examples_and_batches_name_rows_too(bundle: Bundle) -> None:
    data = ArrayData(ratings_of(1))
    divided = TaskDataMaker(data, 0.3).of(bundle.manifest)
    found = find_sub_model(bundle.manifest, divided)
    assert np.array_equal(found.rows, np.unique(ratings_of(1)["film"]))
    films = [
        found.rows[np.concatenate([batch[0] for batch in each.batches(7, None)])]
        for each in (found.data.training, found.data.held_out)
        if each is not None
    ]
    before = [
        np.concatenate([np.asarray(batch[0]) for batch in each.batches(7, None)])
        for each in (divided.training, divided.held_out)
        if each is not None
    ]
    assert all(np.array_equal(*pair) for pair in zip(films, before, strict=True))

    batches = [{"film": np.array([7, 3]), "rating": np.ones(2, np.float32)}]
    own = find_sub_model(bundle.manifest, TaskData(BatchData(batches, 2)))
    assert own.rows.tolist() == [3, 7]
    assert [each.tolist() for each in next(iter(own.data.training.batches(2, 0)))[:1]] == [[1, 0]]
    batches[0]["film"] = np.array([7, 4])
    with pytest.raises(DataError, match="names row 4"):
        next(iter(own.data.training.batches(2, 0)))


def test_another_fingerprint_for_other_rows(bundle: Bundle) -> None:
    """A checkpoint of other rows is none of this training."""
    marks = []
    for film in (np.array([1, 2]), np.array([1, 3])):
        data = ArrayData({"film": film, "rating": np.ones(2, np.float32)})
        found = find_sub_model(bundle.manifest, TaskDataMaker(data).of(bundle.manifest))
        assert isinstance(found.data.training, ArrayData)
        marks.append(found.data.training.fit(found.manifest.batch).fingerprint())
    assert marks[0] != marks[1]


def test_a_sub_model_is_measured_as_the_whole_is(bundle: Bundle) -> None:
    data = TaskDataMaker(ArrayData(ratings_of(2))).of(bundle.manifest)
    found = find_sub_model(bundle.manifest, data)
    whole = open_runtime(bundle)
    part = open_runtime(
        bundle._replace(manifest=found.manifest),
        model=found.of(bundle.parameters()[: bundle.manifest.size]),
    )
    ((batch, own),) = zip(
        data.training.batches(0, None), found.data.training.batches(0, None), strict=True
    )
    assert part.evaluate(own) == whole.evaluate(batch)
