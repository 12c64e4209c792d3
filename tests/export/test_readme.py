"""The README's own examples run as they stand, one after the other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fleetlearn_protocol import open_bundle

README = Path(__file__).parents[2] / "export" / "README.md"


def test_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) == 2
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(README), "exec"), names)
    assert open_bundle("digits.bundle").manifest.metrics == ("accuracy",)
    manifest = open_bundle("lion.bundle").manifest
    assert manifest.references == ("anchor",)
    assert len(manifest.state) == 4
