"""The lines of ``--history`` logged by Weights & Biases' own package, as docs/operate/results.md
shows, and read back from the file that it writes offline."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from fleetlearn_coordinator import RunResults
from fleetlearn_coordinator.results.trackers import HistoryFile
from hand_written_run import write_hand_written_run
from processes import ROOT

PAGE = ROOT / "docs" / "operate" / "results.md"
BLOCK = 32 * 1024
READ = """
import json, sys
from wandb.proto.wandb_internal_pb2 import Record
for line in sys.stdin:
    record = Record.FromString(bytes.fromhex(line))
    if record.WhichOneof("record_type") == "history":
        row = {each.key or "/".join(each.nested_key): each for each in record.history.item}
        print(json.dumps({key: json.loads(each.value_json) for key, each in row.items()}))
"""


def records(content: bytes) -> Iterator[bytes]:
    """Records of a log in LevelDB's format, after W&B's own 7 bytes: a header of checksum, length
    and type (1: whole, 2: first, 3: middle, 4: last) before each part, which is in one block."""
    at, whole = 7, b""
    while at + 7 <= len(content):
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        whole += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield whole
            whole = b""


def python(code: str, folder: Path, given: str = "") -> str:
    quiet = {"WANDB_SILENT": "true", "WANDB_DIR": str(folder), "HOME": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=given,
        cwd=folder,
        env=os.environ | quiet,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_each_line_is_logged_under_its_step(tmp_path: Path) -> None:
    if find_spec("wandb") is None:
        pytest.skip("wandb is not here (pip install wandb)")
    file = tmp_path / "history.jsonl"
    HistoryFile(file).add(RunResults.load(write_hand_written_run(tmp_path / "trial")))
    lines: list[dict[str, Any]] = [json.loads(line) for line in file.read_text().splitlines()]
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (code,) = (block for block in blocks if "wandb" in block)
    python(code, tmp_path)
    (written,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    sent = "\n".join(record.hex() for record in records(written.read_bytes()))
    found = [json.loads(line) for line in python(READ, tmp_path, sent).splitlines()]
    expected: dict[int, dict[str, Any]] = {}
    for line in lines:  # lines of one step are one row there
        expected.setdefault(line["_step"], {}).update(line)
    assert [row["_step"] for row in found] == [*expected]
    for row, line in zip(found, expected.values(), strict=True):
        own = {"_runtime": row["_runtime"]}  # wandb counts that itself
        assert row == pytest.approx(line | own)
