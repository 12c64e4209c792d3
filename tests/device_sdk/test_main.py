"""The command fleetlearn-device: what it prints, how it ends, what it imports."""

from __future__ import annotations

import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from fleetlearn_device.__main__ import main
from fleetlearn_device.runtimes.providers import PROVIDERS, Provider
from fleetlearn_device.storage.device_key import device_key
from fleetlearn_device.storage.state_directory import StateDirectory
from fleetlearn_protocol.messages import Part, Report

HEAVY = (
    "torch",
    "onnx",
    "onnxscript",
    "typer",
    "rich",
    "onnxruntime",
    "sympy",
    "fleetlearn_coordinator",
    "fleetlearn_export",
    "cryptography",
)
NOWHERE = "ws://127.0.0.1:9"


@pytest.fixture
def data(tmp_path: Path) -> str:
    np.savez(tmp_path / "data.npz", x=np.zeros((4, 3), np.float32), y=np.zeros(4, np.int64))
    return str(tmp_path / "data.npz")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fleetlearn_device", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def imported_by(statement: str) -> set[str]:
    """The top-level modules that a fresh interpreter has after the statement."""
    program = f"{statement}\nimport sys; print(*{{name.partition('.')[0] for name in sys.modules}})"
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return set(found.stdout.splitlines()[-1].split())


@pytest.mark.parametrize(
    ("statement", "allowed"),
    [
        ("import fleetlearn_device", ()),
        (
            (
                "from fleetlearn_device.__main__ import main\ntry: main(['run', '--help'])\nexcept "
                "SystemExit: pass"
            ),
            (),
        ),
        ("from fleetlearn_device import Device", ()),
        ("from fleetlearn_device import open_runtime", ()),
        (
            "from fleetlearn_device import Device\nimport numpy, asyncio\n"
            "device = Device('ws://127.0.0.1:9', (numpy.zeros((3, 2)),), '/dev/null/state')\n"
            "try: device.run()\nexcept Exception as error: print(error)",
            ("onnxruntime",),
        ),
    ],
)
def test_a_device_imports_nothing_that_it_can_do_without(
    statement: str, allowed: tuple[str, ...]
) -> None:
    assert imported_by(statement) & set(HEAVY) <= set(allowed)


def test_help_needs_neither_numpy_nor_websockets() -> None:
    help_alone = imported_by(
        "from fleetlearn_device.__main__ import main\ntry: main(['--help'])\nexcept SystemExit: "
        "pass"
    )
    assert not help_alone & {"numpy", "websockets", "msgspec", "asyncio"}


def test_the_package_is_imported_in_no_time() -> None:
    """CPU seconds in the process itself, so that a busy machine does not matter; the least of
    three."""
    program = (
        "import time; t = time.process_time(); import fleetlearn_device; print(time.process_time() "
        "- t)"
    )
    runs = [
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        for _ in range(3)
    ]
    assert min(float(found.stdout) for found in runs) < 0.3


def test_help_shows_the_options_and_the_exit_statuses() -> None:
    shown = run("run", "--help")
    assert shown.returncode == 0
    options = (
        "--coordinator",
        "--data",
        "--state",
        "--runtime",
        "--threads",
        "--provider",
        "--feature-cache",
    )
    for option in (*options, "--own-model", "--name", "--until-finished"):
        assert option in shown.stdout
    assert "exit status" in shown.stdout


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "COMMAND"),
        (("train",), "invalid choice"),
        (("run",), "--coordinator"),
        (
            ("run", "--coordinator", NOWHERE, "--data", "d", "--state", "s", "--threads", "0"),
            "from 1 to 1024",
        ),
        (
            ("run", "--coordinator", NOWHERE, "--data", "d", "--state", "s", "--threads", "two"),
            "from 1 to 1024",
        ),
        (
            (
                "run",
                "--coordinator",
                NOWHERE,
                "--data",
                "d",
                "--state",
                "s",
                "--feature-cache",
                "1 GB",
            ),
            "whole number of MiB",
        ),
        (
            ("run", "--coordinator", NOWHERE, "--data", "d", "--state", "s", "--runtime", "tf"),
            "expected auto, onnx or ort-training",
        ),
        (
            ("run", "--coordinator", NOWHERE, "--data", "d", "--state", "s", "--provider", "tpu"),
            "expected cpu or cuda",
        ),
        (
            ("run", "--coord", NOWHERE, "--data", "d", "--state", "s"),
            "fleetlearn-device run: error: unrecognized arguments: --coord",
        ),
        (
            ("check", "--data", "mine.npz", "--bundle", "a.bundle"),
            "usage: fleetlearn-device check [-h]",
        ),
    ],
)
def test_wrong_usage_ends_with_2(
    arguments: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status: object = main(arguments)
    except SystemExit as ended:  # argparse's own way
        status = ended.code
    assert status == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("url", "file", "text"),
    [
        ("http://127.0.0.1:9", None, "expected ws://HOST:PORT or wss://HOST:PORT"),
        (NOWHERE, "missing.npz", "missing.npz does not exist"),
        (NOWHERE, __file__, "its ending does not say of what kind the data are"),
    ],
)
def test_what_cannot_work_ends_with_2(
    url: str,
    file: str | None,
    text: str,
    data: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    status = main(
        ["run", "--coordinator", url, "--data", file or data, "--state", str(tmp_path / "state")]
    )
    assert status == 2
    assert text in capsys.readouterr().err
    assert not (tmp_path / "state").exists()


def test_data_of_unequal_lengths_end_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.savez(tmp_path / "data.npz", x=np.zeros((4, 3)), y=np.zeros(5))
    assert (
        main(
            [
                "run",
                "--coordinator",
                NOWHERE,
                "--data",
                str(tmp_path / "data.npz"),
                "--state",
                str(tmp_path / "s"),
            ]
        )
        == 2
    )
    assert "'x': 4, 'y': 5" in capsys.readouterr().err


def test_a_gpu_that_cannot_be_used_ends_with_1(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(PROVIDERS, "cuda", Provider("NoSuchExecutionProvider", {}, "cuda"))
    arguments = [
        "run",
        "--coordinator",
        NOWHERE,
        "--data",
        data,
        "--state",
        str(tmp_path / "state"),
    ]
    assert main([*arguments, "--provider", "cuda"]) == 1
    assert (
        "fleetlearn-device: the provider 'cuda' is ONNX Runtime's NoSuchExec"
        in capsys.readouterr().err
    )
    assert main([*arguments, "--provider", "cuda", "--runtime", "ort-training"]) == 2


def test_a_directory_in_use_ends_with_1(data: str, tmp_path: Path) -> None:
    state = StateDirectory(tmp_path / "state")
    ended = run("run", "--coordinator", NOWHERE, "--data", data, "--state", str(tmp_path / "state"))
    state.close()
    assert ended.returncode == 1
    assert "in use by another process" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_another_name_ends_with_1(data: str, tmp_path: Path) -> None:
    StateDirectory(tmp_path / "state", "one").close()
    ended = run(
        "run",
        "--coordinator",
        NOWHERE,
        "--data",
        data,
        "--state",
        str(tmp_path / "state"),
        "--name",
        "two",
    )
    assert ended.returncode == 1
    assert "one, not two" in ended.stderr


def test_without_a_coordinator_the_command_waits_and_sigterm_ends_it(
    data: str, tmp_path: Path
) -> None:
    with subprocess.Popen(
        [
            sys.executable,
            "-m",
            "fleetlearn_device",
            "run",
            "--coordinator",
            NOWHERE,
            "--data",
            data,
            "--state",
            str(tmp_path / "state"),
            "--name",
            "sensor-1",
        ],
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        try:
            lines = iter(process.stderr.readline, "")
            assert any("connecting again" in line for line in lines)
            process.terminate()
            assert process.wait(timeout=30) == 0
        finally:
            process.kill()


def test_status_shows_what_a_directory_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = StateDirectory(tmp_path, "sensor-7")
    assert main(["status", "--state", str(tmp_path)]) == 4
    shown = capsys.readouterr().out
    assert "sensor-7" in shown
    assert "none waits" in shown
    report = Report(
        "t3-1", 3, (Part("update", "float32", 8, zlib.crc32(b"12345678")),), 7, 3, 2.0, True, 0.5
    )
    kept = np.zeros(3, np.float32), {"c": np.zeros(1, np.float32)}, np.zeros(2, np.float32)
    state.outbox.save(report, (b"12345678",), "ab" * 32, *kept)
    assert main(["status", "--state", str(tmp_path)]) == 4
    shown = capsys.readouterr().out
    assert "task t3-1 of round 3, 8 bytes" in shown
    assert "own      abababababab  16 bytes that never leave the device (kept state)\n" in shown
    assert "own      abababababab  12 bytes that never leave the device (personal)\n" in shown
    assert "own      abababababab  17 bytes that never leave the device (of task t3-1)" in shown
    state.close()


@pytest.mark.parametrize("command", [("status",), ("rotate",), ("trust", "0f" * 32)])
def test_a_home_folder_that_is_not_known_is_said(
    command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    name, *keys = command
    assert main([name, "--state", "~nobody-of-this-name/state", *keys]) == 1
    assert "no home folder is known for it; write the whole path" in capsys.readouterr().err


def test_status_of_another_directory_ends_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", "--state", str(tmp_path)]) == 1
    assert "is not a state directory" in capsys.readouterr().err


def test_the_keys_that_are_trusted_are_changed_by_hand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state, key = str(tmp_path / "state"), "0f" * 32
    assert main(["trust", "--state", state, key]) == 1
    assert "is not a device's state directory" in capsys.readouterr().err
    StateDirectory(state, "one").close()
    assert main(["trust", "--state", state, "0f"]) == 2
    assert main(["trust", "--state", state, key]) == 0
    capsys.readouterr()
    main(["info", "--state", state])  # as it was called before
    assert f"trusts   {key}\n" in capsys.readouterr().out


def test_public_key_prints_the_line_of_a_roster(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = str(tmp_path / "state")
    assert main(["public-key", "--state", state, "--name", "roof-8"]) == 0
    line = capsys.readouterr().out
    name, key = line.split()
    assert (name, len(bytes.fromhex(key))) == ("roof-8", 32)
    with_lock = StateDirectory(state)  # a device runs
    assert main(["public-key", "--state", state]) == 0
    assert capsys.readouterr().out == line
    with_lock.close()
    private = Ed25519PrivateKey.from_private_bytes(device_key(tmp_path / "state"))
    assert private.public_key().public_bytes_raw().hex() == key
    assert main(["public-key", "--state", state, "--name", "roof-9"]) == 1
    assert "says that this device is roof-8" in capsys.readouterr().err


def test_public_key_without_the_package_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ed25519 = "cryptography.hazmat.primitives.asymmetric.ed25519"
    monkeypatch.setitem(sys.modules, ed25519, None)
    assert main(["public-key", "--state", str(tmp_path / "state")]) == 1
    assert 'pip install "fleetlearn[device,secure]"' in capsys.readouterr().err


def test_without_the_package_for_signatures_a_device_that_wants_them_ends_with_1(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.exceptions", None)
    arguments = [
        "run",
        "--coordinator",
        NOWHERE,
        "--data",
        data,
        "--state",
        str(tmp_path / "state"),
    ]
    monkeypatch.setenv("FLEETLEARN_TRUST", "0f" * 32)
    assert main(arguments) == 1
    assert 'pip install "fleetlearn[device,signatures]"' in capsys.readouterr().err
    monkeypatch.delenv("FLEETLEARN_TRUST")
    assert main(arguments) == 1, "the key is in the state directory"
    assert main([*arguments, "--trust", "0f"]) == 2
