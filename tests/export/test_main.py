from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from fleetlearn_export.__main__ import main
from fleetlearn_protocol import open_bundle, pack_bundle

MODULE = """
import torch
from fleetlearn_export import LocalStep

def export():
    torch.manual_seed(0)
    return {
        "model": torch.nn.Linear(3, 2),
        "loss": torch.nn.functional.cross_entropy,
        "example": (torch.randn(4, 3), torch.tensor([0, 1, 1, 0])),
        "step": LocalStep("sgd", proximal=True),
    }

def median():
    return export() | {"loss": lambda outputs, y: outputs.median(1).values.mean()}

def wrong():
    return export() | {"modle": 1}

def number():
    return 7

constant = 1
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_task.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_task", raising=False)
    return tmp_path


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["fleetlearn-export", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    return int(caught.value.code or 0)


def test_export_and_inspect_as_processes(folder: Path) -> None:
    command = [sys.executable, "-m", "fleetlearn_export"]
    done = subprocess.run(
        [*command, "my_task:export", "--output", "my.bundle"], capture_output=True, text=True, timeout=300, check=True
    )
    bundle = open_bundle(folder / "my.bundle")
    assert done.stderr == ""
    for line in (
        r"bundle\s.*" + bundle.sha256[:20],
        r"parameters\s.*8 in 2 tensors",
        r"bytes per round\s.*32 down, 32 up",
        r"batch\s.*x: float32 \(n, 3\), y: int64 \(n,\)",
        r"step\s.*sgd with proximal term",
        r"hyper-parameters\s.*lr \(the plan says\), mu \(0.0\)",
        r"train.onnx\s.*operators of opset 18, IR 8",
        r"ort_training\s.*yes",
        r"checked\s.*largest difference from PyTorch \d",
    ):
        assert re.search(line, done.stdout), line
    pack_bundle(bundle.path, folder / "my.zip")
    inspected = subprocess.run([*command, "inspect", "my.zip"], capture_output=True, text=True, timeout=60, check=True)
    assert bundle.sha256[:20] in inspected.stdout
    assert "checked" not in inspected.stdout


@pytest.mark.parametrize(
    ("function", "text"),
    [
        ("my_task", "expected MODULE:FUNCTION"),
        ("no_task:export", "there is no module no_task"),
        ("my_task:exprot", "has no function exprot"),
        ("my_task:constant", "has no function constant"),
        ("my_task:number", "returned a int; expected a dict"),
        ("my_task:wrong", "unexpected keyword argument 'modle'"),
        ("my_task:median", "operator aten.median"),
    ],
)
def test_errors_are_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], function: str, text: str
) -> None:
    assert run(monkeypatch, function, "--output", "my.bundle") == 1
    error = capsys.readouterr().err
    assert text in error
    assert error.count("\n") == 1
    assert not (folder / "my.bundle").exists()


def test_a_damaged_bundle_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "old.bundle").mkdir()
    (folder / "old.bundle" / "manifest.json").write_text("{}")
    assert run(monkeypatch, "inspect", "old.bundle") == 1
    assert "manifest" in capsys.readouterr().err
