"""What docs/operate/secure-aggregation.md tells a reader to type, typed: a helper, a coordinator
and three devices on 127.0.0.1."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
import typed
from processes import ROOT, free_port

FIRST = (ROOT / "docs" / "start" / "first-fleet.md").read_text()
PAGE = (ROOT / "docs" / "operate" / "secure-aggregation.md").read_text()
HELPER_PORT = "8770"


@pytest.mark.slow
def test_a_helper_a_coordinator_and_three_devices(tmp_path: Path) -> None:
    port, helper_port = free_port(), str(free_port())
    page = PAGE.replace(HELPER_PORT, helper_port)
    page = re.sub(r"serve (\w+\.toml)", r"serve \1 --service ports.toml", page)
    typed.write_files(FIRST, tmp_path, port)
    typed.write_files(page, tmp_path, port)
    (tmp_path / "ports.toml").write_text(f"port = {port}\n")

    def check(command: typed.Command, printed: str, status: int) -> None:
        typed.assert_shown(command, printed, status, tmp_path)
        if "helper init" in command.text:
            file = tmp_path / "helper" / "helper.toml"
            file.write_text(file.read_text().replace(HELPER_PORT, helper_port))

    first = typed.commands(FIRST)[:2]
    typed.type_in(first, tmp_path, port, functools.partial(typed.assert_shown, folder=tmp_path))
    typed.type_in(typed.commands(page), tmp_path, port, check)
