"""The table of commands: each is there, its help can be shown, and the page has it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fleetlearn_device.__main__ import main
from fleetlearn_device.commands.table import COMMANDS, FORMERLY

PAGE = (Path(__file__).parents[3] / "docs" / "start" / "devices.md").read_text("utf-8")


@pytest.mark.parametrize("name", [*COMMANDS, *FORMERLY])
def test_each_command_shows_its_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert f"usage: fleetlearn-device {FORMERLY.get(name, name)} " in capsys.readouterr().out


def test_the_page_has_every_command() -> None:
    section = PAGE.partition("## Commands")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `([a-z-]+)` \| \w", section, re.MULTILINE) == [*COMMANDS]


def test_a_name_of_before_leads_to_a_command() -> None:
    assert {*FORMERLY.values()} <= COMMANDS.keys()
    assert not FORMERLY.keys() & COMMANDS.keys()
