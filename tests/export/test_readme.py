"""The examples of the room's README and of docs/start/export.md run as they stand, one after the
other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fleetlearn_protocol import open_bundle

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "export" / "README.md", ROOT / "docs" / "start" / "export.md")


def test_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = [
        re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL) for page in PAGES
    ]
    assert [len(found) for found in blocks] == [1, 2]
    names: dict[str, object] = {}
    for block in (*blocks[0], *blocks[1]):
        exec(compile(block, "a page's example", "exec"), names)
    assert open_bundle("digits.bundle").manifest.metrics == ("accuracy",)
    texts = open_bundle("texts.bundle").manifest
    assert [row.name for row in texts.batch] == ["input_ids", "labels"]
    manifest = open_bundle("lion.bundle").manifest
    assert manifest.references == ("anchor",)
    assert len(manifest.state) == 4
