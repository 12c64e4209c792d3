from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from fleetlearn_export.installation import check_installation

STOCK = Path(__file__).parents[2] / ".venv" / "device" / "bin" / "python"


def test_this_environment_can_export() -> None:
    check_installation()


def test_two_builds_of_onnx_runtime_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("onnxruntime", "onnxruntime-training-cpu"):
        folder = tmp_path / f"{name.replace('-', '_')}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match="onnxruntime and onnxruntime-training-cpu are installed in one environment"):
        check_installation()


@pytest.mark.skipif(not STOCK.exists(), reason="needs the environment with the device extra alone (make venv)")
def test_what_is_missing_is_named() -> None:
    program = "from fleetlearn_export import ExportError, LocalStep; from fleetlearn_export import export_bundle"
    done = subprocess.run([STOCK, "-c", program], capture_output=True, text=True, timeout=60)
    assert "ImportError: exporting needs torch, onnx, onnxscript, not installed here: pip install" in done.stderr
