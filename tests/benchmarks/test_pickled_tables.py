"""Tables and arrays of pickles are read, and nothing that a pickle names is called."""

import lzma
import os
import pickle
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from benchmarks.studies._pickled_tables import read_pickled_array, read_table

CLASSES = {
    "pandas.core.frame": ("DataFrame",),
    "pandas.core.indexes.base": ("Index", "_new_Index"),
    "pandas.core.indexes.range": ("RangeIndex",),
    "pandas.core.internals.managers": ("BlockManager",),
    "pandas._libs.internals": ("_unpickle_block",),
}


class Part:
    """What pickles as a call of its class."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __reduce__(self) -> Any:
        return type(self), self.arguments


class Frame:
    """What pickles as an object with a state."""


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A table of three rows as pandas 2 pickles it. pandas need not be here."""
    made: dict[str, Any] = {}
    for module in ("pandas", "pandas.core", "pandas.core.indexes", "pandas.core.internals"):
        monkeypatch.setitem(sys.modules, module, ModuleType(module))
    monkeypatch.setitem(sys.modules, "pandas._libs", ModuleType("pandas._libs"))
    for module, names in CLASSES.items():
        monkeypatch.setitem(sys.modules, module, ModuleType(module))
        for name in names:
            kind = type(name, (Frame if name == "DataFrame" else Part,), {"__module__": module})
            made[name] = kind
            setattr(sys.modules[module], name, kind)
    block = made["_unpickle_block"]
    numbers = np.array([[1, 2, 3], [7, 8, 9]])
    scores = np.array([[0.5, np.nan, 2.0]])
    words = np.array([["one", None, "three"]], object)
    blocks = (
        block(numbers, np.array([0, 3]), 2),
        block(scores, slice(1, 2, 1), 2),
        block(words, slice(2, 3, 1), 2),
    )
    columns = np.array(["row", "score", "word", "seven"], object)
    names = made["_new_Index"](made["Index"], {"data": columns, "name": None})
    rows = made["_new_Index"](made["RangeIndex"], {"start": 0, "stop": 3, "step": 1})
    frame = made["DataFrame"]()
    frame.__dict__ = {"_mgr": made["BlockManager"](blocks, [names, rows]), "_typ": "dataframe"}
    path = tmp_path / "table.pkl.compress"
    path.write_bytes(lzma.compress(pickle.dumps(frame, protocol=5)))
    return path


def test_the_columns_that_are_asked_for(table: Path) -> None:
    found = read_table(table, ["word", "seven", "row", "score"])
    assert list(found) == ["word", "seven", "row", "score"]
    np.testing.assert_array_equal(found["word"], ["one", "", "three"])
    np.testing.assert_array_equal(found["seven"], [7, 8, 9])
    np.testing.assert_array_equal(found["row"], [1, 2, 3])
    np.testing.assert_array_equal(found["score"], [0.5, np.nan, 2.0])
    assert not any(column.dtype.hasobject for column in found.values())


def test_a_column_that_is_not_there(table: Path) -> None:
    with pytest.raises(ValueError, match="has no column 'eight'; it has row, score, word, seven"):
        read_table(table, ["row", "eight"])


class Harm:
    def __reduce__(self) -> Any:
        return os.mkdir, ("harmed",)


def test_nothing_that_a_file_names_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("table").write_bytes(lzma.compress(pickle.dumps(Harm())))
    with pytest.raises(ValueError, match=r"it names (posix|nt)\.mkdir, which is not known"):
        read_table(Path("table"), ["a"])
    np.save("array.npy", np.array({"a": Harm()}, object), allow_pickle=True)
    with pytest.raises(ValueError, match=r"it names (posix|nt)\.mkdir, which is not known"):
        read_pickled_array(Path("array.npy"))
    assert not Path("harmed").exists()


@pytest.mark.parametrize("content", [b"no table", lzma.compress(b"no pickle")])
def test_other_files(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "table").write_bytes(content)
    with pytest.raises(ValueError, match=r"table is not (packed|read)"):
        read_table(tmp_path / "table", ["a"])


def test_another_pickle(tmp_path: Path) -> None:
    (tmp_path / "table").write_bytes(lzma.compress(pickle.dumps([1, 2])))
    with pytest.raises(ValueError, match="is no table as pandas 2 pickles them"):
        read_table(tmp_path / "table", ["a"])


def test_an_array_of_objects(tmp_path: Path) -> None:
    walks = [np.ones((3, 6)), np.zeros((2, 6), np.float32)]
    content = {"X": walks, "names": ["a", "b"], "y": np.array([1, 0])}
    np.save(tmp_path / "walks.npy", np.array(content, object), allow_pickle=True)
    found = read_pickled_array(tmp_path / "walks.npy")
    assert found["names"] == ["a", "b"]
    np.testing.assert_array_equal(found["y"], [1, 0])
    for read, written in zip(found["X"], walks, strict=True):
        np.testing.assert_array_equal(read, written)
        assert read.dtype == written.dtype


def test_an_array_without_objects(tmp_path: Path) -> None:
    np.save(tmp_path / "plain.npy", np.ones(3))
    with pytest.raises(ValueError, match=r"holds no Python objects: np\.load reads it"):
        read_pickled_array(tmp_path / "plain.npy")
