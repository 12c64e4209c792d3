from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from bundle_cache import cached_export
from fleetlearn_export import LocalStep
from fleetlearn_export.__main__ import main
from fleetlearn_protocol import Bundle, open_bundle, pack_bundle, write_bundle
from fleetlearn_protocol.distillation import misfit
from fleetlearn_protocol.manifest import INFER, TRAIN

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

def mode():
    return export() | {"loss": lambda outputs, y: outputs.mode(1).values.mean()}

def wrong():
    return export() | {"modle": 1}

def number():
    return 7

constant = 1
"""
COMMAND = [sys.executable, "-m", "fleetlearn_export"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_task.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_task", raising=False)
    return tmp_path


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    torch.manual_seed(0)
    return cached_export(
        torch.nn.Linear(3, 2),
        torch.nn.functional.cross_entropy,
        (torch.randn(4, 3), torch.tensor([0, 1, 1, 0])),
        tmp_path_factory.mktemp("main") / "linear.bundle",
        step=LocalStep("sgd", proximal=True),
    ).bundle


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["fleetlearn-export", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    return int(caught.value.code or 0)


def on_a_terminal(command: list[str]) -> tuple[str, str]:
    """Standard output of a process, and what it showed on a terminal as its standard error, without
    control codes."""
    terminal, other_side = pty.openpty()
    environment = {**os.environ, "TERM": "xterm"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=other_side, text=True, env=environment
    )
    os.close(other_side)
    shown = b""
    with contextlib.suppress(OSError):  # on Linux, when the other side is closed
        while part := os.read(terminal, 65536):
            shown += part
    os.close(terminal)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, shown
    return output, re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", shown.decode())


@pytest.mark.slow
def test_export_and_inspect_as_processes(folder: Path) -> None:
    printed, shown = on_a_terminal([*COMMAND, "my_task:export", "--output", "my.bundle"])
    finished = re.findall(r"✓ (.*?)\s+\d:\d\d:\d\d", shown)
    assert finished[0] == "tracing the model"
    assert finished[-1] == "measuring what a step costs"
    assert "Warning" not in shown
    bundle = open_bundle(folder / "my.bundle")
    shared = [
        r"SHA-256\s.*" + bundle.sha256[:20],
        r"holds\s.*standard ONNX operators",
        r"ort_training",  # they are there, or it says why not
        r"parameters\s.*8 in 2 tensors, trained",
        r"bytes per round\s.*32 down, 32 up",
        r"batch\s.*x: float32 \(n, 3\); y: int64 \(n,\)",
        r"step\s.*sgd with the proximal term",
        r"hyper-parameters\s.*lr \(the plan says\), mu \(0.0\)",
        r"references\s.*anchor",
        r"train.onnx\s.*operators of",
        r"ONNX Runtime\s.*1.14 or newer, for opset 18",
        r"FLOPs per step\s.*with a batch of 20",
        r"memory per step\s.*about 6\d MiB",
    ]
    for line in (*shared, r"frozen\s.*none", r"checked\s.*largest difference from PyTorch \d"):
        assert re.search(line, printed), line
    pack_bundle(bundle.path, folder / "my.zip")
    inspected = subprocess.run(
        [*COMMAND, "inspect", "my.zip"], capture_output=True, text=True, timeout=60, check=True
    )
    for line in shared:
        assert re.search(line, inspected.stdout), line
    assert "checked" not in inspected.stdout
    assert inspected.stderr == ""


@pytest.mark.parametrize(
    ("function", "text"),
    [
        ("my_task", "expected MODULE:FUNCTION"),
        ("no_task:export", "there is no module no_task"),
        ("my_task:exprot", "has no function exprot"),
        ("my_task:constant", "has no function constant"),
        ("my_task:number", "returned a int; expected a dict"),
        ("my_task:wrong", "unexpected keyword argument 'modle'"),
        ("my_task:mode", "operator aten.mode"),
    ],
)
def test_errors_are_one_line(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    function: str,
    text: str,
) -> None:
    assert run(monkeypatch, function, "--output", "my.bundle") == 1
    error = capsys.readouterr().err
    assert text in error
    assert error.count("\n") == 1
    assert not (folder / "my.bundle").exists()


def edit(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


def edit_manifest(**fields: object) -> Callable[[Path], None]:
    return lambda path: edit(
        path / "manifest.json", lambda content: json.dumps(json.loads(content) | fields).encode()
    )


def other_graph(path: Path) -> None:
    """A bundle whose hashes are right, and whose graph is not ONNX."""
    found = open_bundle(path)
    files = {name: found.read(name) for name in found.manifest.files}
    write_bundle(path, found.manifest, files | {TRAIN: b"no graph"})


def packed(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        pack_bundle(path, path.with_name("packed"))
        shutil.rmtree(path)
        path.with_name("packed").rename(path)
        edit(path, change)

    return damage


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (
            lambda path: edit(path / TRAIN, lambda c: c[:100] + bytes([c[100] ^ 1]) + c[101:]),
            "train.onnx was changed",
        ),
        (lambda path: edit(path / TRAIN, lambda c: c[:-1]), "bytes; the manifest says"),
        (
            lambda path: (path / INFER).unlink(),
            "has no graphs/infer.onnx: not a bundle, or damaged",
        ),
        (
            lambda path: (path / "manifest.json").unlink(),
            "has no manifest.json: not a bundle, or damaged",
        ),
        (
            lambda path: edit(path / "manifest.json", lambda c: c[:-50]),
            "is not a bundle's manifest",
        ),
        (lambda path: (path / "manifest.json").write_text("{}"), "is not a bundle's manifest"),
        (edit_manifest(format="another"), "is of format 'another'; expected 'fleetlearn.bundle'"),
        (
            edit_manifest(version=99),
            "of version 99; this fleetlearn reads versions 1 to 6. Update fleetlearn",
        ),
        (edit_manifest(parameters=[]), "manifest.json is damaged"),
        (
            packed(lambda c: c[: len(c) // 2]),
            "is damaged, or neither a bundle's folder nor its zip",
        ),
        (
            packed(lambda c: b"PK" + c[2:100]),
            "is damaged, or neither a bundle's folder nor its zip",
        ),
        (shutil.rmtree, "does not exist"),
        (other_graph, "graphs/train.onnx is not an ONNX model"),
    ],
    ids=[
        "changed",
        "shorter",
        "no-file",
        "no-manifest",
        "cut-manifest",
        "empty-manifest",
        "foreign",
        "newer",
        "table",
        "zip-cut",
        "zip-not",
        "none",
        "graph",
    ],
)
def test_damaged_and_foreign_bundles_are_refused_by_name(
    bundle: Bundle,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[Path], None],
    text: str,
) -> None:
    path = tmp_path / "some.bundle"
    shutil.copytree(bundle.path, path)
    damage(path)
    monkeypatch.setattr("onnxruntime.InferenceSession", None)  # nothing is run
    assert run(monkeypatch, "inspect", str(path)) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"fleetlearn-export: {path}")
    assert text in printed.err
    assert printed.err.count("\n") == 1


def test_costs_are_for_the_batch_asked_for(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "inspect", str(bundle.path), "--batch", "1000") == 0
    assert "with a batch of 1000" in capsys.readouterr().out
    assert run(monkeypatch, "inspect", str(bundle.path), "--batch", "0") == 2


def test_quantize(
    bundle: Bundle,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    x = np.random.default_rng(0).normal(size=(50, 3)).astype(np.float32)
    np.savez(tmp_path / "set.npz", x=x, y=np.zeros(50, np.int64))
    np.savez(tmp_path / "unlabelled.npz", x=x)
    output = tmp_path / "int8.onnx"
    arguments = ["--data", str(tmp_path / "set.npz"), "--output", str(output)]
    assert run(monkeypatch, "quantize", str(bundle.path), *arguments) == 0
    size = bundle.manifest.files[INFER].size
    printed = capsys.readouterr()
    for line in (
        rf"size\s.*{size:,} -> {output.stat().st_size:,} bytes",
        r"weights\s.*6 of 8 in 8 bits",
        r"operators\s.*Gemm 1",
        r"examples\s.*50",
        r"accuracy\s.*0\.\d+ -> 0\.\d+",
        r"difference\s.*at most",
    ):
        assert re.search(line, printed.out), line
    assert printed.err == ""

    (tmp_path / "infer.onnx").write_bytes(bundle.read(INFER))
    before = output.read_bytes()
    unlabelled = ["--data", str(tmp_path / "unlabelled.npz"), "--output", str(output)]
    assert run(monkeypatch, "quantize", str(tmp_path / "infer.onnx"), *unlabelled) == 0
    assert "the set has no targets that fit" in capsys.readouterr().out
    assert output.read_bytes() == before

    for wrong, text in (
        ([str(tmp_path / "set.npz"), *arguments], "has no manifest.json: not a bundle"),
        ([str(tmp_path / "none.onnx"), *arguments], "none.onnx cannot be read"),
        (
            [str(bundle.path), *arguments[:2], "-o", str(tmp_path / "none" / "int8.onnx")],
            "int8.onnx cannot be written",
        ),
    ):
        assert run(monkeypatch, "quantize", *wrong) == 1
        error = capsys.readouterr().err
        assert text in error
        assert error.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "infer.onnx",
        "int8.onnx",
        "set.npz",
        "unlabelled.npz",
    ]
    assert output.read_bytes() == before


def test_a_folder_in_which_nothing_can_be_written_is_named_before_the_export(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "file").write_text("no folder")
    monkeypatch.setattr(
        sys, "argv", ["fleetlearn-export", "my_task:export", "--output", "file/my.bundle"]
    )
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert said == (
        "fleetlearn-export: --output file/my.bundle: nothing can be written in file: file exists\n"
    )


def test_errors_of_bundles_have_no_codes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["fleetlearn-export", "inspect", "nowhere"])
    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().err == "fleetlearn-export: nowhere does not exist\n"


@pytest.mark.slow
def test_a_distillation_bundle_of_the_same_model(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for options in ([], ["--distillation"]):
        output = str(folder / f"made{len(options)}.bundle")
        words = ["fleetlearn-export", "my_task:export", "--output", output, *options]
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code
    trained, distilled = (open_bundle(folder / f"made{count}.bundle").manifest for count in (0, 1))
    assert misfit(trained, distilled) is None
    assert [row.name for row in distilled.batch] == ["x", "teacher", "temperature"]
    assert distilled.step.optimizer == "adam"
