"""Predictions from a state directory: with which model, equal to ONNX Runtime's, while the device
takes newer models."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from computing import computed
from fleetlearn_device.__main__ import main
from fleetlearn_device.predictor import Predictor
from fleetlearn_device.runtimes.checks import DataError
from fleetlearn_device.storage.errors import StateError
from fleetlearn_device.storage.model_in_use import FOLDER, ModelInUse, ModelsInUse, NoModelError
from fleetlearn_device.storage.state_directory import StateDirectory
from fleetlearn_device.training.data import as_data
from fleetlearn_device.training.newest_model import NewestModel
from fleetlearn_device.training.train import StoppedError
from fleetlearn_device.training.trainer import Trainer
from fleetlearn_protocol import open_bundle, write_inference_model
from fleetlearn_protocol.computations.boosting_settings import BoostColumn, BoostedTrees
from fleetlearn_protocol.computations.bundle import write_computation_bundle
from fleetlearn_protocol.encodings import find_encoding
from fleetlearn_protocol.exchanges import EVALUATION
from fleetlearn_protocol.messages import Question, Task
from fleetlearn_protocol.vector import Vector, digest


class Board:
    """A device's state directory, and the tasks that it is given."""

    def __init__(self, folder: Path, case: Any) -> None:
        self.state, self.case = StateDirectory(folder), case
        self.bundle = open_bundle(case.path)
        self.folder = folder
        self.tasks = 0
        self.better: list[str] = []
        self.examples, self.hold_out = 20, 0.0

    def model(self, scale: float) -> Vector:
        return self.bundle.parameters()[: self.bundle.manifest.size] * np.float32(scale)

    def vector(self, scale: float, encoding: str = "float32") -> tuple[Any, bytes]:
        encoded = find_encoding(encoding)
        model = self.model(scale)
        return encoded.reference("model", model), bytes(encoded.encode(model, 0))

    def bring(self, work: Task | Question, content: bytes) -> None:
        files = self.bundle.manifest.files
        contents = {entry.sha256: self.bundle.read(path) for path, entry in files.items()}
        contents |= {self.bundle.sha256: self.bundle.read("manifest.json")}
        contents[digest(content)] = content
        while lacking := self.state.contents.lacking(work, "onnx", infer=True):
            for wanted in lacking:
                self.state.contents.append(wanted, 0, contents[wanted.sha256])
                assert self.state.contents.finish(wanted)

    def trainer(self) -> Trainer:
        newest = NewestModel(
            ModelsInUse(self.folder), lambda model: self.better.append(model.model)
        )
        data = as_data((self.case.x[: self.examples], self.case.y[: self.examples]))
        return Trainer(self.state, data, "onnx", 1, newest=newest, hold_out=self.hold_out)

    def task(self, scale: float, algorithm: str = "plain", encoding: str = "float32") -> Task:
        """Do a task that brings a model."""
        self.tasks += 1
        reference, content = self.vector(scale, encoding)
        task = Task(
            f"t{self.tasks}",
            self.tasks,
            self.bundle.sha256,
            (reference,),
            {"update": "float32"},
            {"lr": 0.1},
            epochs=1,
            batch_size=10,
            seed=self.tasks,
            deadline=100.0,
            algorithm=algorithm,
        )
        self.bring(task, content)
        self.state.outbox.save(*self.trainer().train(task, 100.0))
        self.state.outbox.drop(task.task)
        return task

    def expected(self, vector: Vector, x: Any) -> Any:
        """What ONNX Runtime gives for infer.onnx with these parameters."""
        content = write_inference_model(self.bundle, vector)
        return onnxruntime.InferenceSession(content).run(None, {"x": x})[0]


@pytest.fixture
def board(tmp_path: Path, cases: Callable[[str], Any]) -> Iterator[Board]:
    made = Board(tmp_path / "state", cases("plain"))
    yield made
    made.state.close()


def test_the_shared_model_is_the_one_that_came_last(board: Board) -> None:
    x = board.case.x[:50]
    board.task(1.0)
    predictor = Predictor(board.folder)
    np.testing.assert_array_equal(predictor.predict(x, 50), board.expected(board.model(1.0), x))
    board.task(0.5)
    np.testing.assert_array_equal(predictor.predict(x, 50), board.expected(board.model(0.5), x))
    assert board.better == [digest(board.vector(scale)[1]) for scale in (1.0, 0.5)]
    assert predictor.model.model == board.better[-1]
    left = {path.name for path in (board.folder / FOLDER).iterdir()}
    assert left == {"current.json", board.better[-1], f"bundle-{board.bundle.sha256}"}


def test_batches_give_what_one_batch_gives(board: Board) -> None:
    board.task(1.0)
    predictor, x = Predictor(board.folder), board.case.x[:50]
    whole = predictor.predict(x, 50)
    assert isinstance(whole, np.ndarray)
    np.testing.assert_allclose(predictor.predict(x, 7), whole, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(predictor.predict({"x": x, "y": board.case.y[:50]}, 50), whole)


def test_a_model_that_came_smaller(board: Board) -> None:
    board.task(1.0, encoding="float16")
    rounded = find_encoding("float16").decode(board.vector(1.0, "float16")[1])
    x = board.case.x[:5]
    np.testing.assert_array_equal(Predictor(board.folder).predict(x), board.expected(rounded, x))


def test_what_is_measured_is_used_too(board: Board) -> None:
    """A device that takes part in evaluations alone has the newest model as well."""
    reference, content = board.vector(0.25)
    question = Question("e1", EVALUATION, 9.0, bundle=board.bundle.sha256, vectors=(reference,))
    board.bring(question, content)
    board.trainer().answer(question, 9.0)
    x = board.case.x[:5]
    expected = board.expected(board.model(0.25), x)
    np.testing.assert_array_equal(Predictor(board.folder).predict(x), expected)


def test_personal_parameters(tmp_path: Path, cases: Callable[[str], Any]) -> None:
    board = Board(tmp_path / "state", cases("personal"))
    board.task(1.0)
    size, manifest = board.bundle.manifest.size, board.bundle.manifest
    kept = np.fromfile(board.folder / "kept" / board.bundle.sha256, "<f4")
    own = np.concatenate([board.model(1.0), kept[: manifest.local_size - size]])
    x = board.case.x[:5]
    personal = Predictor(board.folder)
    np.testing.assert_array_equal(personal.predict(x), board.expected(own, x))
    shared = Predictor(board.folder, which="shared").predict(x)
    np.testing.assert_array_equal(shared, board.expected(board.model(1.0), x))
    assert not np.array_equal(shared, personal.predict(x))
    board.task(0.5)  # what is the device's own changed, too
    kept = np.fromfile(board.folder / "kept" / board.bundle.sha256, "<f4")
    own = np.concatenate([board.model(0.5), kept[: manifest.local_size - size]])
    np.testing.assert_array_equal(personal.predict(x), board.expected(own, x))
    board.state.close()


def test_ditto_s_personal_model(tmp_path: Path, cases: Callable[[str], Any]) -> None:
    board = Board(tmp_path / "state", cases("mlp"))
    board.task(1.0, "ditto")
    kept = np.fromfile(board.folder / "kept" / f"{board.bundle.sha256}.personal", "<f4")[:-1]
    x = board.case.x[:5]
    np.testing.assert_array_equal(Predictor(board.folder).predict(x), board.expected(kept, x))
    board.state.close()


def test_with_a_hold_out_the_better_model_stays(
    board: Board, caplog: pytest.LogCaptureFixture
) -> None:
    board.examples, board.hold_out = 60, 0.6
    zeros, trained = 0.0, None
    board.task(zeros)
    first = board.better[-1]
    with caplog.at_level(logging.INFO):
        board.task(-40.0)  # far from anything that is right
    assert board.better == [first]
    assert any("is not better on the local hold-out" in message for message in caplog.messages)
    assert Predictor(board.folder).model.model == first
    trained = train_by_hand(board)
    board.model = lambda scale: trained  # type: ignore[method-assign]
    board.task(1.0)
    assert board.better == [first, digest(trained.tobytes())]
    loss = Predictor(board.folder).model.loss
    assert loss is not None
    assert loss < 2.302, "better than ten classes at random"


def train_by_hand(board: Board) -> Vector:
    from fleetlearn_device.runtimes.open_runtime import open_runtime

    runtime = open_runtime(board.case.path)
    for _ in range(30):
        runtime.step((board.case.x[:60], board.case.y[:60]), lr=0.5)
    return runtime.parameters.copy()


def test_a_callback_that_fails_costs_nothing(
    board: Board, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(model: Any) -> None:
        raise KeyError("mine")

    reference, content = board.vector(1.0)
    newest = NewestModel(ModelsInUse(board.folder), fail)
    with caplog.at_level(logging.WARNING):
        assert newest.offer(board.bundle, reference, content, lambda model: None)
    assert "on_better_model failed: KeyError: 'mine'" in caplog.text
    assert not newest.offer(board.bundle, reference, content, lambda model: None), "the same again"


def test_a_stop_goes_through(board: Board) -> None:
    def stop(model: Any) -> float | None:
        raise StoppedError("now")

    reference, content = board.vector(1.0)
    with pytest.raises(StoppedError):
        NewestModel(ModelsInUse(board.folder)).offer(board.bundle, reference, content, stop)


def test_before_a_model_came(tmp_path: Path) -> None:
    StateDirectory(tmp_path).close()
    with pytest.raises(NoModelError, match="runs with --keep-model"):
        Predictor(tmp_path)


@pytest.mark.parametrize("file", ["current.json", "model", "infer.onnx", "manifest.json"])
def test_damage_is_found(board: Board, caplog: pytest.LogCaptureFixture, file: str) -> None:
    board.task(1.0)
    folder = board.folder / FOLDER
    place = {
        "current.json": folder / "current.json",
        "model": folder / board.better[0],
        "infer.onnx": folder / f"bundle-{board.bundle.sha256}" / "graphs" / "infer.onnx",
        "manifest.json": folder / f"bundle-{board.bundle.sha256}" / "manifest.json",
    }[file]
    content = bytearray(place.read_bytes())
    content[len(content) // 2] ^= 1
    place.unlink()  # the cache may have the same file
    place.write_bytes(content)
    with pytest.raises(StateError, match="is damaged") as error:
        Predictor(board.folder)
    assert str(folder) in str(error.value)
    with caplog.at_level(logging.WARNING):
        board.task(0.5)  # the next one takes its place
    assert f"the model for predictions in {folder} is damaged" in caplog.text
    Predictor(board.folder).predict(board.case.x[:2])


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (np.zeros((2, 3), np.float32), "has shape"),
        (np.zeros((0, 64), np.float32), "no examples"),
        ({"z": np.zeros((2, 64), np.float32)}, "expected x"),
        (np.array([["a"] * 64]), "dtype"),
    ],
)
def test_inputs_that_do_not_fit(board: Board, x: Any, text: str) -> None:
    board.task(1.0)
    with pytest.raises(DataError, match=text):
        Predictor(board.folder).predict(x)


def test_predictions_while_models_change(board: Board) -> None:
    """Threads predict while the device takes one model after the other: each prediction is of one
    whole model."""
    board.task(1.0)
    x = board.case.x[:4]
    known = {
        board.expected(board.model(scale), x).tobytes() for scale in (1.0, 0.5, 0.25, 0.125, 2.0)
    }
    predictor, over, wrong = Predictor(board.folder), threading.Event(), list[Any]()

    def predict() -> None:
        while not over.is_set():
            found = predictor.predict(x)
            assert isinstance(found, np.ndarray)
            if found.tobytes() not in known:
                wrong.append(found)

    threads = [threading.Thread(target=predict) for _ in range(2)]
    for thread in threads:
        thread.start()
    for scale in (0.5, 0.25, 0.125, 2.0):
        board.task(scale)
    over.set()
    for thread in threads:
        thread.join()
    assert wrong == []
    np.testing.assert_array_equal(predictor.predict(x), board.expected(board.model(2.0), x))


def test_the_commands(
    board: Board, tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    board.task(1.0)
    x = board.case.x[:3]
    expected = board.expected(board.model(1.0), x)
    np.savez(tmp_path / "mine.npz", x=x, y=board.case.y[:3])
    state, mine = ["--state", str(board.folder)], str(tmp_path / "mine.npz")
    assert main(["predict", *state, mine]) == 0
    lines = capsysbinary.readouterr().out.splitlines()
    found = [next(iter(json.loads(line).values())) for line in lines]
    np.testing.assert_array_equal(np.array(found, np.float32), expected)
    assert main(["predict", *state, mine, "--output", str(tmp_path / "out.npy"), "--shared"]) == 0
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), expected)
    assert main(["predict", *state, mine, "--output", str(tmp_path / "out.npz")]) == 0
    (name,) = np.load(tmp_path / "out.npz").files
    np.testing.assert_array_equal(np.load(tmp_path / "out.npz")[name], expected)
    assert main(["export-model", *state, str(tmp_path / "model.onnx")]) == 0
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    np.testing.assert_array_equal(session.run(None, {"x": x})[0], expected)


def test_a_command_without_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    StateDirectory(tmp_path / "state").close()
    assert main(["export-model", "--state", str(tmp_path / "state"), "m.onnx"]) == 1
    assert "has no model for predictions" in capsys.readouterr().err


def test_a_computation_s_model_is_made_of_its_state(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    """Trees that devices boosted: no graph came with the bundle, and predictions are made."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(80, 2)).astype(np.float32)
    told = BoostedTrees(
        columns=(BoostColumn("a"), BoostColumn("b")), loss="logistic", rounds=3, label="ill"
    )
    rows = {"x": x, "y": (x[:, 0] > 0).astype(np.int64)}
    _, states = computed(told, [rows])
    path = write_computation_bundle(tmp_path / "trees.bundle", "trees", told)
    bundle = open_bundle(path)
    # As the device has it in its cache: a folder, of which it fetched the manifest alone.
    folder = tmp_path / "bundle"
    folder.mkdir()
    (folder / "manifest.json").write_bytes(bundle.read("manifest.json"))
    state, content = tmp_path / "state", states[-1].tobytes()
    state.mkdir()
    model = ModelInUse(bundle.sha256, "trees", digest(content), "float32", since=0.0)
    ModelsInUse(state).take(model, content, open_bundle(folder, files=()))
    found = Predictor(state).predict({"a": x[:, 0], "b": x[:, 1]})
    assert isinstance(found, dict)
    assert (found["class"] == rows["y"]).mean() > 0.95
    assert found["probabilities"].shape == (80, 2)
    table = tmp_path / "new.csv"
    table.write_text("b,a\n0.5,2\n,-2\n")
    assert main(["predict", "--state", str(state), str(table)]) == 0
    lines = [json.loads(line) for line in capsysbinary.readouterr().out.splitlines()]
    assert [line["class"] for line in lines] == [1, 0]
