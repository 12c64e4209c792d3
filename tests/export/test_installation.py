from __future__ import annotations

from pathlib import Path

import pytest
from fleetlearn_export.installation import check_installation


def test_this_environment_can_export() -> None:
    check_installation()


def test_two_builds_of_onnx_runtime_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("onnxruntime", "onnxruntime-training-cpu"):
        folder = tmp_path / f"{name.replace('-', '_')}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        ImportError,
        match="onnxruntime and onnxruntime-training-cpu are installed in one environment",
    ):
        check_installation()
