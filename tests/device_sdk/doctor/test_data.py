"""Data against a bundle: ``check DATA BUNDLE``, and what doctor says of data."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from fleetlearn_device.__main__ import main
from fleetlearn_device.doctor.data import check_data, read_bundle
from fleetlearn_device.storage.content_cache import cached_manifest
from fleetlearn_device.storage.state_directory import StateDirectory
from fleetlearn_protocol import open_bundle
from fleetlearn_protocol.manifest import Input
from line_bundle import write_line_bundle
from msgspec.structs import replace


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle whose batch is x float32 (n, 3) and y float32 (n,)."""
    path = tmp_path_factory.mktemp("bundle") / "line.bundle"
    write_line_bundle(path)
    return path


@pytest.fixture
def data(tmp_path: Path) -> Path:
    np.savez(tmp_path / "mine.npz", x=np.zeros((40, 3), "f4"), y=np.zeros(40, "f4"))
    return tmp_path / "mine.npz"


def test_data_that_fit(data: Path, bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(data), str(bundle)]) == 0
    shown = capsys.readouterr().out
    assert "40 examples fit" in shown
    assert "x float32 (n, 3), y float32 (n,)" in shown


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        ({"x": np.zeros((4, 3)), "z": np.zeros(4)}, "mine.npz: there is no "),
        ({"x": np.zeros((4, 2)), "y": np.zeros(4)}, "array x has shape (4, 2)"),
        ({"x": np.zeros((4, 3), complex), "y": np.zeros(4)}, "array x has dtype complex128"),
        ({"x": np.zeros((4, 3)), "y": np.zeros(5)}, "'x': 4, 'y': 5"),
    ],
)
def test_data_that_do_not_fit(
    arrays: dict[str, np.ndarray], text: str, tmp_path: Path, bundle: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    np.savez(tmp_path / "mine.npz", **arrays)  # type: ignore[arg-type]
    assert main(["check", str(tmp_path / "mine.npz"), str(bundle)]) == 2
    shown = capsys.readouterr().out
    assert text in shown
    assert "BAD" in shown
    assert " -> mend the data" in shown


def test_a_label_that_names_no_class_is_named(tmp_path: Path, bundle: Path) -> None:
    manifest = open_bundle(bundle).manifest
    y = Input("y", "int64", (), below=10)
    manifest = replace(manifest, batch=(manifest.batch[0], y))
    labels = np.zeros(40, np.int64)
    labels[7] = 12
    np.savez(tmp_path / "mine.npz", x=np.zeros((40, 3), "f4"), y=labels)
    (found,) = check_data(str(tmp_path / "mine.npz"), manifest)
    assert found.state == "bad"
    assert "array y has the value 12 in example 7 (the first is 0); expected 0 to 9" in found.found


def test_nan_is_a_warning_since_a_model_may_take_it_for_a_missing_value(
    tmp_path: Path, bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    x = np.zeros((3000, 3), "f4")
    x[2500, 1] = np.nan
    np.savez(tmp_path / "mine.npz", x=x, y=np.zeros(3000, "f4"))
    assert main(["check", str(tmp_path / "mine.npz"), str(bundle)]) == 0
    assert "array x has the value nan in example 2500 (the first is 0), at [1]" in (
        capsys.readouterr().out
    )


def test_what_cannot_be_read(
    tmp_path: Path, data: Path, bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(tmp_path / "no.npz"), str(bundle)]) == 2
    assert "no.npz" in capsys.readouterr().out
    assert main(["check", str(data), str(tmp_path / "no.bundle")]) == 1
    assert "no.bundle" in capsys.readouterr().err


def test_doctor_takes_the_bundle_that_was_used_last(
    tmp_path: Path, data: Path, bundle: Path
) -> None:
    assert cached_manifest(tmp_path / "s") is None
    state = StateDirectory(tmp_path / "s")
    state.close()
    (found,) = check_data(str(data), cached_manifest(tmp_path / "s"))
    assert (found.state, "40 examples" in found.found) == ("unknown", True)
    shutil.copytree(bundle, tmp_path / "s" / "bundles" / ("ab" * 32))
    found_manifest = cached_manifest(tmp_path / "s")
    assert found_manifest == read_bundle(str(bundle))
    (found,) = check_data(str(data), found_manifest)
    assert found.state == "good"
    (tmp_path / "s" / "bundles" / ("ab" * 32) / "manifest.json").write_text("{")
    assert cached_manifest(tmp_path / "s") is None


def test_a_bundle_in_the_place_of_the_data_is_said(
    data: Path, bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(bundle), str(data)]) == 2
    told = capsys.readouterr().err
    assert f"{bundle} is a bundle, and {data} is none: the data come first" in told
