"""Files that are no .npz files: what they are is said."""

from __future__ import annotations

import pickle
import re
import zipfile
from pathlib import Path

import numpy as np
import pytest
from fleetlearn_protocol.npz import TABLE, NpzError, read_npz

SAVE = "expected an .npz file of plain arrays: numpy.savez(path, x=..., y=...) writes one"


def test_the_arrays_are_read_by_name(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.arange(3), y=np.ones(2))
    assert {name: array.tolist() for name, array in read_npz(tmp_path / "a.npz").items()} == {
        "x": [0, 1, 2],
        "y": [1.0, 1.0],
    }
    assert [
        *read_npz(tmp_path / "a.npz", lambda names: [name for name in names if name == "y"])
    ] == ["y"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", f"is empty; {SAVE}"),
        (b"1.5,2.5,0\n0.1,0.2,1\n", f"is a text file, such as CSV; {SAVE}. {TABLE}"),
        ("länge;größe\n1;2\n".encode(), f"is a text file, such as CSV; {SAVE}. {TABLE}"),
        ("x" * 63 + "ä", f"is a text file, such as CSV; {SAVE}. {TABLE}"),
        (pickle.dumps([1.0, 2.0]), f"is a binary file of another kind; {SAVE}"),
        (
            b"PK\x03\x04 and no archive",
            "is not an .npz file of plain arrays, or is damaged: File is not a zip file",
        ),
    ],
)
def test_a_file_that_is_none(tmp_path: Path, content: bytes | str, words: str) -> None:
    file = tmp_path / "a.npz"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(NpzError) as caught:
        read_npz(file)
    assert str(caught.value) == f"{file} {words}"


def test_the_way_from_a_table_leads_to_arrays_that_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.csv").write_text("length,width,label\n1.5,2.5,0\n0.1,0.2,1\n")
    with pytest.raises(NpzError) as caught:
        read_npz("mine.csv")
    found = re.search(r"becomes one by: (.*), with the names", str(caught.value))
    assert found is not None
    exec(found[1], {"numpy": np})
    arrays = read_npz("mine.npz")
    assert arrays["x"].tolist() == [[1.5, 2.5], [0.1, 0.2]]
    assert (arrays["y"].tolist(), arrays["y"].dtype.kind) == ([0, 1], "i")


def test_a_zip_of_other_files_is_none(tmp_path: Path) -> None:
    """As PyTorch's and spreadsheets' files are: numpy gives their contents as bytes."""
    with zipfile.ZipFile(tmp_path / "model.pt", "w") as archive:
        archive.writestr("archive/data.pkl", b"...")
    with pytest.raises(
        NpzError,
        match=r"model\.pt: it is a zip with other files than arrays in it, such as archive/dat",
    ):
        read_npz(tmp_path / "model.pt")


def test_arrays_of_objects_and_single_arrays(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.ones(3), y=np.array([1, None, 2]))
    with pytest.raises(
        NpzError,
        match=r"a\.npz: the array y holds Python objects; .* numpy.asarray\(y, numpy.float32\)",
    ):
        read_npz(tmp_path / "a.npz")
    np.save(tmp_path / "a.npy", np.ones(3))
    with pytest.raises(
        NpzError, match=r"a\.npy is a single array \(\.npy\); expected an \.npz file"
    ):
        read_npz(tmp_path / "a.npy")
    with pytest.raises(NpzError, match=r"b\.npz does not exist; expected an \.npz file"):
        read_npz(tmp_path / "b.npz")
    with pytest.raises(NpzError, match="or is damaged: is a directory"):
        read_npz(tmp_path)
