"""The names of events in the device's log: the code, the table and the page have the same ones."""

from __future__ import annotations

import ast
from pathlib import Path

import fleetlearn_device
from fleetlearn_device.driver.log_events import EVENTS

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "start" / "device-service.md").read_text("utf-8")


def events_of(source: str) -> set[str]:
    """Return the events that calls of ``said`` and ``Note`` name."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        name = getattr(node.func, "id", "") if isinstance(node, ast.Call) else ""
        if not isinstance(node, ast.Call) or name not in ("said", "Note"):
            continue
        named = [each.value for each in node.keywords if each.arg == "event"]
        named += node.args[:1] if name == "said" else node.args[2:3]
        for each in named:
            assert isinstance(each, ast.Constant), ast.unparse(node)
            found.add(str(each.value))
    return found


def test_every_event_of_the_code_is_in_the_table_and_each_of_the_table_is_in_the_code() -> None:
    folder = Path(fleetlearn_device.__file__).parent
    code = {each for file in folder.rglob("*.py") for each in events_of(file.read_text("utf-8"))}
    assert code == EVENTS.keys() - {"note"}


def test_a_new_event_is_noticed() -> None:
    assert events_of('log.info("x", extra=said("new", a=1)); Note("y", True, "other")') == {
        "new", "other",
    }  # fmt: skip


def test_the_page_has_the_table() -> None:
    section = PAGE.partition("## The log as JSON")[2].partition("\n## ")[0]
    rows = [line.split("|") for line in section.splitlines() if line.startswith("| `")]
    assert {row[1].strip(" `"): row[2].strip() for row in rows} == EVENTS
