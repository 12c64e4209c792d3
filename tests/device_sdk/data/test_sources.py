"""Each kind of data, from its file to a training step that is the arrays' own."""

from __future__ import annotations

import sqlite3
import sys
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleetlearn_device import open_runtime
from fleetlearn_device.data.sources import SOURCES, parse
from fleetlearn_device.runtimes.checks import DataError
from fleetlearn_device.training.data import as_data
from fleetlearn_device.training.open_data import open_data
from fleetlearn_device.training.source_data import SourceData
from fleetlearn_device.training.train import train
from numpy.typing import NDArray

N = 12
Arrays = tuple[NDArray[np.float32], NDArray[np.int64]]
FEATURES = [f"p{i}" for i in range(64)]
COLUMNS = f"x={','.join(FEATURES)}&y=digit"


@pytest.fixture(scope="module")
def given(cases: Callable[[str], Any]) -> Arrays:
    case = cases("softmax")
    return case.x[:N], case.y[:N]


def after_a_step(path: Path, data: Any) -> NDArray[np.float32]:
    """The model after one step on all data."""
    runtime = open_runtime(path)
    train(runtime, data, hyper={"lr": 0.1, "mu": 0.0}, epochs=1, batch_size=0, seed=3)
    return runtime.parameters.copy()


def write_csv(path: Path, x: Any, y: Any, delimiter: str = ",") -> Path:
    lines = [delimiter.join([*FEATURES, "digit", "remark"])]
    for row, label in zip(x, y, strict=True):
        lines.append(delimiter.join([*(repr(float(value)) for value in row), str(label), '"a b"']))
    path.write_text("\n".join(lines) + "\n")
    return path


def npz(folder: Path, x: Any, y: Any) -> str:
    np.savez(folder / "a.npz", x=x, y=y)
    return str(folder / "a.npz")


def packed_npz(folder: Path, x: Any, y: Any) -> str:
    np.savez_compressed(folder / "a.dat", x=x, y=y)
    (folder / "a.dat.npz").rename(folder / "a.dat")
    return str(folder / "a.dat")  # known by how it begins


def npy_folder(folder: Path, x: Any, y: Any) -> str:
    np.save(folder / "x.npy", x)
    np.save(folder / "y.npy", y)
    return str(folder)


def structured_npy(folder: Path, x: Any, y: Any) -> str:
    table = np.empty(len(x), [("x", "f4", (64,)), ("y", "i4")])
    table["x"], table["y"] = x, y
    np.save(folder / "a.npy", table)
    return str(folder / "a.npy")


def csv(folder: Path, x: Any, y: Any) -> str:
    return f"{write_csv(folder / 'a.csv', x, y)}?{COLUMNS}"


def semicolons(folder: Path, x: Any, y: Any) -> str:
    return f"csv:{write_csv(folder / 'a.log', x, y, ';')}?x=p*&y=digit"


def parquet(folder: Path, x: Any, y: Any) -> str:
    polars = pytest.importorskip("polars")
    columns = {name: x[:, i] for i, name in enumerate(FEATURES)}
    polars.DataFrame({**columns, "digit": y}).write_parquet(folder / "a.parquet")
    return f"{folder / 'a.parquet'}?{COLUMNS}"


def sqlite(folder: Path, x: Any, y: Any) -> str:
    with sqlite3.connect(folder / "a.db") as database:
        database.execute(f"CREATE TABLE t ({', '.join(FEATURES)}, digit)")
        rows = [(*map(float, row), int(label)) for row, label in zip(x, y, strict=True)]
        database.executemany(f"INSERT INTO t VALUES ({', '.join('?' * 65)})", rows)
    database.close()
    return f"{folder / 'a.db'}?query=SELECT * FROM t ORDER BY rowid&{COLUMNS}"


def function(folder: Path, x: Any, y: Any) -> str:
    np.savez(folder / "own.npz", x=x, y=y)
    (folder / "own_data.py").write_text(
        "import numpy, pathlib\n"
        "def load():\n"
        "    return dict(numpy.load(pathlib.Path(__file__).with_name('own.npz')))\n"
    )
    return "own_data:load"


def frame(folder: Path, x: Any, y: Any) -> Any:
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame(x, columns=FEATURES)
    table["digit"] = y
    return open_data(table, x=FEATURES, y="digit")


def polars_frame(folder: Path, x: Any, y: Any) -> Any:
    polars = pytest.importorskip("polars")
    return open_data(polars.DataFrame({"x": x, "y": y}))


def loader(folder: Path, x: Any, y: Any) -> Any:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    return DataLoader(TensorDataset(torch.from_numpy(x), torch.from_numpy(y)), batch_size=len(x))


@pytest.mark.parametrize(
    "write",
    [
        npz,
        packed_npz,
        npy_folder,
        structured_npy,
        csv,
        semicolons,
        parquet,
        sqlite,
        function,
        frame,
        polars_frame,
        loader,
    ],
)
def test_a_source_trains_as_its_arrays_do(
    write: Callable[..., Any],
    cases: Callable[[str], Any],
    given: Arrays,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = cases("softmax").path
    data = open_data(write(tmp_path, *given))
    assert data.examples == N
    # A loader decides the order of its examples itself.
    expected = as_data([given], N) if write is loader else given
    np.testing.assert_array_equal(after_a_step(path, data), after_a_step(path, expected))


@pytest.mark.parametrize("told", ["folders", "table"])
def test_images_train_as_their_arrays_do(
    told: str, cases: Callable[[str], Any], given: Arrays, tmp_path: Path
) -> None:
    image = pytest.importorskip("PIL.Image")
    x, y = given
    pixels = (x * 255).round().astype(np.uint8).reshape(N, 8, 8)
    names = [f"{label}/{number:02d}.png" for number, label in enumerate(y)]
    for name, picture in zip(names, pixels, strict=True):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        image.fromarray(picture).save(tmp_path / name)
    options = "mode=gray&divide=255"
    if told == "table":
        rows = "".join(f"{name},class {label}\n" for name, label in zip(names, y, strict=True))
        (tmp_path / "labels.csv").write_text(f"file,label\n{rows}")
        options += f"&labels=labels.csv&classes={','.join(f'class {i}' for i in range(10))}"
    order = np.argsort(names) if told == "folders" else np.arange(N)
    arrays = (pixels[order, None] / np.float32(255), y[order])
    path = cases("cnn").path
    data = open_data(f"{tmp_path}?{options}")
    np.testing.assert_array_equal(after_a_step(path, data), after_a_step(path, arrays))


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_sounds_train_as_their_arrays_do(
    width: int, cases: Callable[[str], Any], given: Arrays, tmp_path: Path
) -> None:
    x, y = given
    steps = np.round(x * 100).astype(np.int64)  # whole numbers that every width holds
    for number, (row, label) in enumerate(zip(steps, y, strict=True)):
        (tmp_path / str(label)).mkdir(exist_ok=True)
        with wave.open(str(tmp_path / str(label) / f"{number:02d}.wav"), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(width)
            file.setframerate(8000)
            values = row + 128 if width == 1 else row
            file.writeframes(
                b"".join(int(v).to_bytes(width, "little", signed=width > 1) for v in values)
            )
    order = np.lexsort((np.arange(N), [str(label) for label in y]))
    arrays = ((steps / 2.0 ** (8 * width - 1)).astype(np.float32)[order], y[order])
    path = cases("softmax").path
    data = open_data(f"{tmp_path}?length=64&rate=8000")
    np.testing.assert_array_equal(after_a_step(path, data), after_a_step(path, arrays))


def test_a_datasets_columns_are_read() -> None:
    """Hugging Face's library is not among what the tests install: a class of its name."""

    class Dataset:
        __module__ = "datasets.arrow_dataset"

        def with_format(self, kind: str) -> Any:
            assert kind == "numpy"
            return self

        def __getitem__(self, rows: slice) -> Any:
            return {"x": np.ones((2, 3)), "y": np.arange(2)}

        def __len__(self) -> int:
            return 2

    data = open_data(Dataset())
    assert isinstance(data, SourceData)
    assert data.examples == 2


def test_a_path_is_taken_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse("csv:a/b.log?x=a,b&y=c%26d") == ("csv", "a/b.log", {"x": "a,b", "y": "c&d"})
    assert parse("C:/data/a.csv") == (None, "C:/data/a.csv", {})
    assert parse("a.db?query=SELECT a=1 FROM t") == (None, "a.db", {"query": "SELECT a=1 FROM t"})
    monkeypatch.chdir(tmp_path)
    Path("why?.csv").touch()
    assert parse("why?.csv") == (None, "why?.csv", {})


CSV = "ax,ay,az,label\n1,2,3,0\n4,5,6,1\n"


@pytest.mark.parametrize(
    ("name", "content", "options", "words"),
    [
        ("a.csv", CSV, "", "a.csv: there is no array x, y; expected x float32 (n, 64), y int64"),
        ("a.csv", CSV, "", "Say which columns they are: ?x=COLUMN,COLUMN&y=COLUMN"),
        ("a.csv", CSV, "?x=ax,bx&y=label", "there is no column bx; the columns are ax, ay, az"),
        ("a.csv", CSV, "?delimeter=;", "delimeter=; was given, and there is no column ;"),
        ("a.csv", CSV.replace("5", "five"), "?x=ax,ay&y=label", "a.csv, line 3, ay: 'five' is no"),
        ("a.csv", CSV.replace(",1\n", ",1.5\n"), "?x=ax&y=label", "line 3, y: 1.5 is not a whole"),
        ("a.csv", CSV.replace(",1\n", ",10\n"), "?x=ax&y=label", "line 3, y: 10; expected 0 to 9"),
        ("a.csv", CSV + "\n7,8,9\n", "", "a.csv, line 5: 3 cells; the first line has 4"),
        ("a.csv", "ax,ay\n", "", "a.csv has no row of data"),
        ("a.csv", "", "", "a.csv: the first line is ''; expected the columns' names"),
        ("a.csv", None, "", "a.csv does not exist; expected"),
        ("a.xyz", "?", "", "its ending does not say of what kind the data are; say KIND:"),
        ("a.csv", CSV, "?what", "'what' stands behind the ?; expected NAME=VALUE"),
        ("a.db", None, "?x=a", "an SQLite database was given without a query"),
        ("a.db", None, "?query=SELECT 1", "a.db does not exist; expected an SQLite database"),
        ("a.npy", "no array", "", "a.npy is not a plain array (.npy), or is damaged"),
        ("a.parquet", "no table", "", "a.parquet cannot be read as Parquet"),
        (".", None, "?classes=a", "its ending does not say of what kind the data are"),
        (".", None, "?size=3", "its ending does not say of what kind the data are"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(
    name: str,
    content: str | None,
    options: str,
    words: str,
    cases: Callable[[str], Any],
    tmp_path: Path,
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    path = tmp_path / name
    bundle = cases("softmax").path
    with pytest.raises(DataError) as caught:
        after_a_step(bundle, open_data(f"{path}{options}"))
    assert words in str(caught.value)


def test_a_query_names_the_row_of_a_missing_value(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "a.db") as database:
        database.execute("CREATE TABLE t (a, b)")
        database.executemany("INSERT INTO t VALUES (?, ?)", [(1, 2), (3, None)])
    database.close()
    with pytest.raises(DataError, match="row 2 of the query, b: NULL; expected a number"):
        open_data(f"{tmp_path / 'a.db'}?query=SELECT a, b FROM t")
    with pytest.raises(DataError, match=r"failed: no such column: c"):
        open_data(f"{tmp_path / 'a.db'}?query=SELECT c FROM t")
    with pytest.raises(DataError, match=r"failed: attempt to write a readonly database"):
        open_data(f"{tmp_path / 'a.db'}?query=DELETE FROM t")


def test_a_class_that_was_not_named_is_refused(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        image.new("RGB", (4, 4)).save(tmp_path / name / "1.png")
    with pytest.raises(DataError, match="there are the classes dog; expected those of classes=cat"):
        open_data(f"{tmp_path}?classes=cat,bird")
    image.new("RGB", (5, 4)).save(tmp_path / "dog" / "2.png")
    with pytest.raises(DataError, match=r"2.png is 5x4, and .*1.png is 4x4; expected one size"):
        open_data(f"{tmp_path}?classes=cat,dog")
    assert open_data(f"{tmp_path}?classes=cat,dog&size=3x2").examples == 3


def test_every_kind_has_a_way_to_be_known() -> None:
    for name, row in SOURCES.items():
        assert row.endings or row.holds, name


def test_large_files_are_mapped_and_give_the_same_arrays(
    tmp_path: Path, given: Arrays, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fleetlearn_device.data import arrays

    monkeypatch.setattr(arrays, "MAPPED_FROM", 1)
    x, y = given
    columns: dict[str, Any] = {
        "x": x,
        "y": y,
        "f": np.asfortranarray(x),
        "none": x[:0],
        "text": np.array(["a", "bc"]),
    }
    np.savez(tmp_path / "a.npz", **columns)
    found = arrays.mapped_npz(tmp_path / "a.npz")
    assert {*found} == {*columns}
    assert isinstance(found["x"], np.memmap)
    for name, array in columns.items():
        np.testing.assert_array_equal(found[name], array)
        assert found[name].dtype == array.dtype
    np.savez_compressed(tmp_path / "b.npz", x=x)
    assert arrays.mapped_npz(tmp_path / "b.npz") == {}
    np.savez(tmp_path / "c.npz", x=np.array([None]))
    assert arrays.mapped_npz(tmp_path / "c.npz") == {}
    whole = (tmp_path / "a.npz").read_bytes()
    (tmp_path / "d.npz").write_bytes(whole[: len(whole) // 2])
    assert arrays.mapped_npz(tmp_path / "d.npz") == {}


@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_mapped_arrays_train_as_arrays_in_memory_do(
    dtype: str,
    tmp_path: Path,
    given: Arrays,
    cases: Callable[[str], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from fleetlearn_device.data import arrays
    from fleetlearn_device.training import data as in_parts

    monkeypatch.setattr(arrays, "MAPPED_FROM", 1)
    monkeypatch.setattr(in_parts, "CHECKED_TOGETHER", 5)
    x, y = given
    np.savez(tmp_path / "a.npz", x=x.astype(dtype), y=y.astype("i4"))
    path = cases("softmax").path
    data = open_data(tmp_path / "a.npz")
    np.testing.assert_array_equal(after_a_step(path, data), after_a_step(path, given))
    np.savez(tmp_path / "a.npz", x=x.astype(dtype), y=np.where(np.arange(N) == 7, 10, y))
    with pytest.raises(DataError, match=r"y has the value 10 in example 7 \(the first is 0\)"):
        after_a_step(path, open_data(tmp_path / "a.npz"))


def test_data_that_change_are_read_at_the_next_fit(
    tmp_path: Path, given: Arrays, cases: Callable[[str], Any], caplog: pytest.LogCaptureFixture
) -> None:
    from fleetlearn_protocol.bundle import open_bundle

    inputs = open_bundle(cases("softmax").path).manifest.batch
    x, y = given
    path = write_csv(tmp_path / "a.csv", x[:5], y[:5])
    data = open_data(f"{path}?{COLUMNS}")
    first: Any = data.fit(inputs)
    assert data.fit(inputs) is first  # nothing changed: nothing is read
    write_csv(path, x, y)
    second: Any = data.fit(inputs)
    assert (first.examples, second.examples, data.examples) == (5, N, N)
    np.testing.assert_array_equal(second.columns[0], x)
    # A program that is in the middle of writing ends nothing.
    path.write_text(path.read_text()[:-40])
    with caplog.at_level("WARNING"):
        assert data.fit(inputs) is second
    assert "the data are used as they were before" in caplog.text
    path.unlink()
    assert data.fit(inputs) is second
    write_csv(path, x[:7], y[:7])
    assert data.fit(inputs).examples == 7
