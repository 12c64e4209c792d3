"""The SDK in Kotlin, on the JVM: held to the protocol's vectors and to all transcripts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import kotlin_sdk
import numpy as np
import pytest
from line_bundle import line_data, write_line_bundle

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "protocol" / "transcripts"
SIGNED = FOLDER / "signed.json"
MASKED = FOLDER / "masked.json"
VECTORS = Path(__file__).parent / "kotlin" / "Vectors.kt"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(kotlin_sdk.missing()), reason=f"no Kotlin: {kotlin_sdk.missing()}"),
]


@pytest.fixture(scope="module")
def command() -> list[str]:
    """Of Java, with the SDK and the program of the vectors."""
    return kotlin_sdk.compiled(VECTORS)


def test_it_is_held_to_the_vectors(command: list[str]) -> None:
    words = [*command, "VectorsKt", str(ROOT / "protocol" / "vectors")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split()[0]) > 1800, done.stdout


@pytest.mark.parametrize("signed", [False, True], ids=["without keys", "with a key"])
def test_it_holds_to_all_transcripts(command: list[str], tmp_path: Path, signed: bool) -> None:
    write_line_bundle(tmp_path / "line.bundle", references=("anchor",))
    x, y = line_data(20)
    np.savez(tmp_path / "data.npz", x=x, y=y)
    device = [*command, kotlin_sdk.MAIN, "--coordinator", "{url}", "--state", "{state}"]
    device += ["--data", str(tmp_path / "data.npz"), "--base", "0.01"]
    played = [*device, "--trust", "{key}"] if signed else device
    only = ["--file", str(SIGNED)] if signed else []
    words = [sys.executable, str(FOLDER / "run.py"), "--bundle", str(tmp_path / "line.bundle")]
    done = subprocess.run(
        [*words, *only, "--", *played], capture_output=True, text=True, timeout=500
    )
    others = [path for path in FOLDER.glob("*.json") if path not in (SIGNED, MASKED)]
    files = [SIGNED] if signed else others
    count = sum(len(json.loads(path.read_text())) for path in files)
    assert done.stdout.endswith(f"{count} of {count} transcripts went as written\n"), done.stdout
    assert done.returncode == 0
