"""Where the files of data packages are found, and that their arrays are made once."""

import re
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

from benchmarks.studies import _packaged_data
from benchmarks.studies._packaged_data import (
    Arrays,
    MissingDataError,
    Source,
    cached_arrays,
    is_installed,
    packaged_folder,
)

ROOT = Path(__file__).parents[2]
SOURCE = Source("walks-of-cats", "1.2", "CC0", "A. Cat, 2020")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where packages are installed; nothing is there, and nothing is kept."""
    installed = tmp_path / "installed"
    installed.mkdir()
    monkeypatch.setattr(_packaged_data, "INSTALLED", installed)
    monkeypatch.setattr(_packaged_data, "ARRAYS", tmp_path / "kept")
    return installed


def install(folder: Path, version: str = "1.2") -> None:
    """Install a package that has one file, and whose code must not run."""
    (folder / "walks").mkdir()
    (folder / "walks" / "__init__.py").write_text("raise AssertionError('imported')\n")
    (folder / "walks" / "steps.csv").write_text("3\n4\n")
    information = folder / f"walks_of_cats-{version}.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Name: Walks-of-Cats\nVersion: {version}\n")


def steps(folder: Path) -> Arrays:
    return {"steps": np.loadtxt(folder / "walks" / "steps.csv", dtype=np.int64)}


def test_what_is_missing_is_said(folder: Path) -> None:
    with pytest.raises(MissingDataError, match=re.escape("walks-of-cats 1.2, which is not inst")):
        packaged_folder(SOURCE)
    with pytest.raises(MissingDataError, match=r"make \.venv/\.studies.*fleetlearn\[studies\]"):
        cached_arrays(SOURCE, "walks", 1, steps)
    assert not is_installed(SOURCE)


def test_another_version_is_not_read(folder: Path) -> None:
    install(folder, "1.3")
    with pytest.raises(MissingDataError, match=re.escape("walks-of-cats 1.3 is installed, and")):
        packaged_folder(SOURCE)


def test_a_package_is_found_among_the_others_too(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "site-packages"
    elsewhere.mkdir()
    install(elsewhere)
    monkeypatch.syspath_prepend(str(elsewhere))
    assert packaged_folder(SOURCE) == elsewhere
    install(folder)
    assert packaged_folder(SOURCE) == folder


def test_arrays_are_made_once(folder: Path, tmp_path: Path) -> None:
    install(folder)
    assert is_installed(SOURCE)
    first = cached_arrays(SOURCE, "walks", 1, steps)
    np.testing.assert_array_equal(first["steps"], [3, 4])
    (folder / "walks" / "steps.csv").write_text("5\n6\n")
    _packaged_data._cached.cache_clear()  # as another process
    np.testing.assert_array_equal(cached_arrays(SOURCE, "walks", 1, steps)["steps"], [3, 4])
    np.testing.assert_array_equal(cached_arrays(SOURCE, "walks", 2, steps)["steps"], [5, 6])
    kept = sorted(path.name for path in (tmp_path / "kept").iterdir())
    assert kept == ["walks-walks-of-cats-1.2-1.npz", "walks-walks-of-cats-1.2-2.npz"]
    assert "walks" not in sys.modules


def test_objects_are_not_kept(folder: Path, tmp_path: Path) -> None:
    install(folder)
    with pytest.raises(ValueError, match="the array 'names' holds Python objects"):
        cached_arrays(SOURCE, "walks", 1, lambda _: {"names": np.array(["a", None])})
    assert not (tmp_path / "kept").exists()


def test_make_installs_what_the_extra_names_in_the_pinned_version() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = extras["optional-dependencies"]["studies"]
    assert {*pinned} <= {*(ROOT / "constraints.txt").read_text().split()}
    (names,) = re.findall(r"^DATA_PACKAGES := (.*)$", (ROOT / "Makefile").read_text(), re.M)
    assert names.split() == [name.partition("==")[0] for name in pinned]
