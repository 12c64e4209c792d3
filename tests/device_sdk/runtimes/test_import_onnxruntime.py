from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from fleetlearn_device.runtimes import import_onnxruntime as ort
from fleetlearn_device.runtimes.import_onnxruntime import RuntimeUnavailableError

MODULE = "fleetlearn_device.runtimes.import_onnxruntime"
FOREIGN = "print([name for name in ('torch', 'onnx', 'sympy') if name in sys.modules])"


def python(code: str, *options: str) -> str:
    """Return what a fresh interpreter prints. Warnings are errors there too."""
    done = subprocess.run(
        [sys.executable, "-W", "error", *options, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.ort_training
def test_the_training_build_is_imported_without_its_front_end() -> None:
    code = (
        f"import sys; from {MODULE} import *; import_onnxruntime(); import_training_api(); "
        f"{FOREIGN}"
    )
    assert find_spec("torch") is not None
    assert python(code) == "[]"


@pytest.mark.ort_training
def test_the_front_end_can_still_be_imported_afterwards() -> None:
    code = (
        f"import sys, warnings; from {MODULE} import *; api = import_training_api(); "
        "warnings.simplefilter('ignore'); import onnxruntime; from onnxruntime.training import "
        "artifacts; from onnxruntime.training.api import Module; print(Module is api.Module, "
        "onnxruntime.training.artifacts is artifacts, 'onnx' in sys.modules)"
    )
    assert python(code) == "True True True"


def test_two_distributions_in_one_environment_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(ort.installed()) == 1
    for name in ("onnxruntime", "onnxruntime-training-cpu"):
        folder = tmp_path / f"{name.replace('-', '_')}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert ort.installed() == ["onnxruntime", "onnxruntime-training-cpu"]
    with pytest.raises(RuntimeUnavailableError) as caught:
        ort.import_onnxruntime.__wrapped__()
    assert "onnxruntime and onnxruntime-training-cpu are installed in one environment" in str(
        caught.value
    )
    assert "pip uninstall onnxruntime onnxruntime-training-cpu" in str(caught.value)


def test_without_onnxruntime_the_error_says_what_to_install() -> None:
    # -S leaves out site-packages, and with them every distribution.
    code = (
        f"import runpy; names = runpy.run_path({ort.__file__!r})\ntry:\n    "
        "names['import_onnxruntime']()\nexcept names['RuntimeUnavailableError'] as error:\n    "
        "print(error)"
    )
    assert (
        python(code, "-I", "-S") == 'onnxruntime is not installed: pip install "fleetlearn[device]"'
    )
