"""PROTOCOL.md is held to the types, and describe.py to what it claims to write."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from fleetlearn_protocol import describe, encodings, errors, frames, messages, vector
from fleetlearn_protocol.splitmix64 import GAMMA, ROUNDING
from msgspec import inspect as types

DOCUMENT = Path(describe.__file__).parents[1] / "PROTOCOL.md"


def test_the_tables_are_those_of_the_types() -> None:
    document = DOCUMENT.read_text(encoding="utf-8")
    assert describe.rewrite(document) == document, (
        "run: python -m fleetlearn_protocol.describe protocol/PROTOCOL.md"
    )


def test_each_table_stands_in_the_document_once() -> None:
    names = re.findall(r"<!-- described: ([a-z-]+) -->", DOCUMENT.read_text(encoding="utf-8"))
    assert sorted(names) == sorted(describe.tables())


@pytest.mark.parametrize(
    "word", [kind.__struct_config__.tag for kind in get_args(messages.FromDevice)]
)
def test_every_message_from_the_device_has_its_row_of_answers(word: str) -> None:
    assert re.search(
        rf"^\| `{word}`.*\|.*\|.*\|.*\|.*\|$", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE
    )


@pytest.mark.parametrize(
    "word", [kind.__struct_config__.tag for kind in get_args(messages.FromCoordinator)]
)
def test_every_message_from_the_coordinator_has_its_row_of_reactions(word: str) -> None:
    assert re.search(
        rf"^\| `{word}` \|.*\|.*\|$", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE
    )


@pytest.mark.parametrize("code", errors.Code)
def test_every_code_is_used_outside_its_table(code: errors.Code) -> None:
    text = re.sub(
        r"<!-- described.*?<!-- end -->", "", DOCUMENT.read_text(encoding="utf-8"), flags=re.DOTALL
    )
    assert re.search(rf"(?<![a-z-]){code.value}(?![a-z-])", text)


@pytest.mark.parametrize(
    "fact",
    [
        messages.PROTOCOL_NAME,
        f"{frames.CHUNK_BYTES:,} bytes",
        f"{frames.MAX_FRAME_BYTES:,} bytes",
        f"header of {frames.HEADER.size} bytes",
        f"more than {messages.MAX_REFUSALS} refused",
        f"silent for {messages.SILENT_HEARTBEATS}\nheartbeats",
        "larger than 64 KiB",
        *(f"| `{name}` | {encoding.block} |" for name, encoding in encodings.ENCODINGS.items()),
        f"| `topk-S` | {encodings.TOP_K_BLOCK} |",
        f"mix(mix(`task.seed`) + 2^{ROUNDING.bit_length() - 1})",
        f"*i* 0x{int(GAMMA):X}",
        f"`123456789` give 0x{vector.checksum(b'123456789'):X}",
    ],
)
def test_figures_in_the_prose(fact: str) -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert " ".join(fact.split()) in " ".join(text.split())


def test_every_field_has_a_meaning() -> None:
    for name, table in describe.tables().items():
        for row in table.splitlines():
            if row.startswith("|"):
                assert not re.search(r"\|\s*\|", row), (name, row)


def test_a_table_by_hand() -> None:
    assert """### `welcome`

Checked in. Send a heartbeat at least every `heartbeat` seconds; wait for a task.

| field | type | default | meaning |
| --- | --- | --- | --- |
| `coordinator` | label | required | The coordinator's software and version, for people. |
| `heartbeat` | number, 0.01 to 86400 | required | \
Longest pause between two messages of the device, in seconds. |
| `chunk_bytes` | integer, 4 to 2^17, a multiple of 4 | required | \
Largest payload of a chunk that the device may send, in bytes. |
""" in describe.tables()["from-coordinator"]


def test_rewriting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.md"
    path.write_text(
        "before\n<!-- described: codes -->\nstale text\n<!-- end -->\nafter\n", encoding="utf-8"
    )
    describe.main([str(path)])
    text = path.read_text(encoding="utf-8")
    assert text.startswith("before\n<!-- described: codes -->\n\n| code | meaning |\n")
    assert text.endswith("|\n\n<!-- end -->\nafter\n")
    assert "stale text" not in text
    assert describe.rewrite(text) == text
    assert capsys.readouterr().out == ""


def test_an_unknown_block() -> None:
    with pytest.raises(KeyError, match="nonsense"):
        describe.rewrite("<!-- described: nonsense -->\n<!-- end -->")


def test_printing(capsys: pytest.CaptureFixture[str]) -> None:
    describe.main([])
    printed = capsys.readouterr().out
    assert describe.rewrite(printed) == printed
    assert len(re.findall("<!-- described", printed)) == len(describe.tables())


def test_the_command(tmp_path: Path) -> None:
    path = tmp_path / "PROTOCOL.md"
    emptied = re.sub(
        r"(<!-- described: \S+ -->\n).*?(?=<!-- end)",
        r"\1",
        DOCUMENT.read_text("utf-8"),
        flags=re.DOTALL,
    )
    path.write_text(emptied, "utf-8")
    subprocess.run(
        [sys.executable, "-m", "fleetlearn_protocol.describe", path], check=True, timeout=60
    )
    assert path.read_text("utf-8") == DOCUMENT.read_text("utf-8")


def test_a_type_without_words() -> None:
    with pytest.raises(TypeError, match="no words for"):
        describe._kind(types.BytesType(None, None))
