"""The README's own example runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fleetlearn_protocol import open_bundle

README = Path(__file__).parents[2] / "export" / "README.md"


def test_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) == 1
    exec(compile(blocks[0], str(README), "exec"), {})
    assert open_bundle("digits.bundle").manifest.metrics == ("accuracy",)
