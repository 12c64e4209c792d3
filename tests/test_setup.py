"""Which Python ``make`` takes, and what it says where there is none that can be used."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOOLS = ("make", "sh", "touch")
PYTHON = """#!{python}
import os, sys

if sys.argv[1] == "-c":
    sys.version_info, found = {version}, {found}
    if not found:
        sys.modules["ensurepip"] = None
    if {machine!r}:
        import platform
        platform.machine = lambda: {machine!r}
    exec(sys.argv[2])
elif sys.argv[1] == "--version":
    print("Python", *{version})
else:  # -m venv FOLDER, or -m pip
    with open("log", "a") as log:
        print(*sys.argv[1:] if sys.argv[2] == "venv" else ("-m pip", sys.argv[-1]), file=log)
    if sys.argv[2] == "venv":
        os.makedirs(sys.argv[-1] + "/bin")
        os.symlink({own!r}, sys.argv[-1] + "/bin/python")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    (tmp_path / "tools").mkdir()
    for name in TOOLS:
        (tmp_path / "tools" / name).symlink_to(str(shutil.which(name)))
    return tmp_path


def add_python(
    folder: Path, name: str, version: tuple[int, int], *, found: bool = True, machine: str = ""
) -> None:
    """A command that notes what it is asked for. ``found``: whether ensurepip is there."""
    file = folder / "tools" / name
    text = PYTHON.format(
        python=sys.executable, version=version, found=found, machine=machine, own=str(file)
    )
    file.write_text(text)
    file.chmod(0o755)


def make(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": str(folder / "tools"), "HOME": os.environ.get("HOME", "/")}
    command = [folder / "tools" / "make", *(arguments or (".venv/.ort-training",))]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=60)


def asked(folder: Path) -> list[str]:
    return (folder / "log").read_text().splitlines()


INSTALLED = ["-m venv .venv", "-m pip .[all,dev]"]
APART = ["-m venv .venv/ort-training", "-m pip .[ort-training,test]"]


@pytest.mark.parametrize(
    ("pythons", "taken", "trains"),
    [
        ({"python3.11": (3, 11), "python3.13": (3, 13)}, "Python 3 11", True),
        ({"python3.12": (3, 12), "python3": (3, 12)}, "Python 3 12", True),
        ({"python3.13": (3, 13)}, "Python 3 13", False),
        ({"python3.14": (3, 14), "python3": (3, 9)}, "Python 3 14", False),
        ({"python3": (3, 13)}, "Python 3 13", False),
    ],
)
def test_the_first_that_is_new_enough_is_taken(
    folder: Path, pythons: dict[str, tuple[int, int]], taken: str, trains: bool
) -> None:
    for name, version in pythons.items():
        add_python(folder, name, version, machine="x86_64")
    done = make(folder)
    assert done.returncode == 0, done.stderr
    assert f"setting up .venv with {taken}: " in done.stdout
    assert asked(folder) == INSTALLED + APART * trains
    assert ("no .venv/ort-training" in done.stdout) != trains
    assert make(folder).stdout.strip() == "make: '.venv/.ort-training' is up to date."


def test_a_command_without_its_python_is_passed_over(folder: Path) -> None:
    """pyenv has such commands for all versions that it knows."""
    (folder / "tools" / "python3.11").write_text(
        "#!/bin/sh\necho 'python3.11: command not found' >&2\nexit 127\n"
    )
    (folder / "tools" / "python3.11").chmod(0o755)
    add_python(folder, "python3.12", (3, 12), found=False)
    add_python(folder, "python3.13", (3, 13))
    done = make(folder, ".venv/.installed")
    assert (done.returncode, done.stderr) == (0, "")
    assert "setting up .venv with Python 3 13" in done.stdout


def test_another_can_be_named(folder: Path) -> None:
    add_python(folder, "python3.11", (3, 11))
    add_python(folder, "mine", (3, 13))
    done = make(folder, ".venv/.installed", "PYTHON=mine")
    assert "setting up .venv with Python 3 13" in done.stdout


def test_no_training_build_on_another_machine(folder: Path) -> None:
    add_python(folder, "python3.11", (3, 11), machine="aarch64")
    done = make(folder)
    assert (
        "no .venv/ort-training: ONNX Runtime's training build needs Linux on x86-64 and"
        in done.stdout
    )
    assert asked(folder) == INSTALLED


@pytest.mark.parametrize(
    ("pythons", "arguments", "text"),
    [
        (
            {"python3": (3, 10)},
            (),
            "none of these is here and Python 3.11 or newer: python3.11 python3.12 ",
        ),
        (
            {},
            ("PYTHON=other",),
            "none of these is here and Python 3.11 or newer: other. Install Python (on Debian",
        ),
        (
            {"python3.12": (3, 12)},
            (),
            "python3.12 has no ensurepip, which making an environment needs; on Debian and",
        ),
    ],
)
def test_what_is_missing_is_said(
    folder: Path, pythons: dict[str, tuple[int, int]], arguments: tuple[str, ...], text: str
) -> None:
    for name, version in pythons.items():
        add_python(folder, name, version, found=False)
    done = make(folder, ".venv/.installed", *arguments)
    assert done.returncode != 0
    assert text in done.stderr
    assert not (folder / "log").exists()


def test_the_environment_of_the_version_before_begins_again(folder: Path) -> None:
    """The old environment held the training build, in the same folder as the stock one."""
    add_python(folder, "python3.11", (3, 11))
    (folder / ".venv" / "device").mkdir(parents=True)
    make(folder, ".venv/.installed")
    assert asked(folder) == ["-m venv --clear .venv", INSTALLED[1]]


PIP = """
import sys
print("Collecting torch==2.14.1")
print("  Downloading torch-2.14.1-cp311-cp311-linux_x86_64.whl (779.2 MB)")
print("  Downloading torch-2.14.1-cp311-cp311-linux_x86_64.whl.metadata (29 kB)")
print("  Using cached onnxruntime-1.32.0-cp311-cp311-linux_x86_64.whl (16.9 MB)")
print("  Downloading rich-15.0.0-py3-none-any.whl (0.3 MB)")
if "--fails" in sys.argv:
    print("ERROR: No matching distribution found for torch==2.14.1", file=sys.stderr)
    sys.exit(1)
print("Installing collected packages: torch, onnxruntime, rich")
print("Successfully installed onnxruntime-1.32.0 rich-15.0.0 torch-2.14.1")
"""


def install(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run what installs packages, with a pip that says what a real one says."""
    (folder / "pip").mkdir()
    (folder / "pip" / "__init__.py").touch()
    (folder / "pip" / "__main__.py").write_text(PIP)
    command = [sys.executable, ROOT / ".ci" / "install.py", *arguments]
    env = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)


def test_an_installation_has_a_line_for_each_step_with_its_time(tmp_path: Path) -> None:
    done = install(tmp_path, "torch")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert all(re.match(r" +[0-9]+ s  \w", line) for line in lines), done.stdout
    assert [line.partition(" s  ")[2] for line in lines] == [
        "looking for the packages",
        "downloading torch (779 MB)",
        "reading from pip's cache: onnxruntime (17 MB)",
        "installing 3 packages",
        "done",
    ]


def test_an_installation_that_fails_says_why(tmp_path: Path) -> None:
    done = install(tmp_path, "torch", "--fails")
    assert done.returncode == 1
    assert "ERROR: No matching distribution found for torch==2.14.1" in done.stderr


def test_the_demo_in_browsers_needs_no_training_build(folder: Path) -> None:
    add_python(folder, "python3.11", (3, 11), machine="x86_64")
    make(folder, "demo-web")
    assert asked(folder)[:2] == INSTALLED
    assert not any("ort-training" in line for line in asked(folder))


@pytest.mark.parametrize(
    ("chosen", "in_training_build"),
    [
        ("tests/coordinator/aggregation/test_staleness.py -k by_hand", ""),
        ("tests/export/ort_training -x", r"tests/export/ort_training/test_\w+\.py .*-x"),
        (
            "tests/device_sdk/runtimes/test_runtime.py::test_name",
            r"tests/device_sdk/runtimes/test_runtime\.py::test_name ",
        ),
    ],
)
def test_the_training_build_runs_chosen_tests_that_need_it(
    chosen: str, in_training_build: str
) -> None:
    """It lacks what the others import, so that to collect them there ended ``make test`` with an
    error."""
    shown = subprocess.run(
        ["make", "-n", "test", f"ARGS={chosen}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert shown.returncode == 0, shown.stderr
    # what sets .venv up may stand before
    (guard,) = re.findall(r'bin/python \] \|\| \[ -z "(.*?)" \]', shown.stdout)
    (command,) = re.findall(r'-m "ort_training and not slow"(.*?)\|\| \[', shown.stdout)
    assert bool(guard) == bool(in_training_build)
    assert not in_training_build or re.search(in_training_build, command)
