"""Tabs that die, and a coordinator that is killed, in each phase of a task: nothing that was
acknowledged is lost or counted twice, and the model is what the updates make. Each round has a
device of a tab and a Python device."""

from __future__ import annotations

from pathlib import Path

import pytest
from browser import browsing, kill_tabs
from playwright.sync_api import BrowserContext, Page
from web_page import Fleet, fleet

PHASES = [
    ("waiting", "task"),
    ("downloading", "chunk-down"),
    ("training", ""),
    ("saved", "report"),
    ("uploading", "chunk-up"),
    ("reported", "accepted"),
]
"""Phase -> the frame that does not get through in it. There is one round for each, after one for
`connecting`."""
EPOCHS = 2500
"""A second of training, in which the tab can be caught."""


def wait_for_phase(parts: Fleet, page: Page, phase: str, round: int) -> None:
    if phase == "training":
        page.wait_for_function(
            f"globalThis.states?.some(s => s.phase === 'training' && s.round === {round} && s.step "
            "> 0)"
        )
    else:
        parts.relay.wait_held(f"{phase} in round {round}; the page says {parts.site.lines}")


def opened(context: BrowserContext, parts: Fleet) -> Page:
    page = context.new_page()
    page.goto(parts.site.page)
    return page


@pytest.mark.slow
def test_a_tab_killed_in_each_phase(tmp_path: Path) -> None:
    with (
        fleet(tmp_path, rounds=1 + len(PHASES), epochs=EPOCHS) as parts,
        browsing(tmp_path / "profile") as context,
    ):
        parts.relay.hold("welcome")
        parts.start()
        page = opened(context, parts)
        parts.relay.wait_held("the welcome")
        for round, (phase, frame) in enumerate(PHASES, 2):
            kill_tabs()
            parts.relay.hold(frame, round)
            page = opened(context, parts)
            wait_for_phase(parts, page, phase, round)
        kill_tabs()
        opened(context, parts)
        parts.finish()
        assert len(parts.site.names()) == 1


@pytest.mark.slow
def test_a_coordinator_killed_in_each_phase(tmp_path: Path) -> None:
    with (
        fleet(tmp_path, rounds=1 + len(PHASES), epochs=EPOCHS) as parts,
        browsing(tmp_path / "profile") as context,
    ):
        parts.relay.hold("welcome")
        parts.start()
        page = opened(context, parts)
        parts.relay.wait_held("the welcome")
        for round, (phase, frame) in enumerate(PHASES, 2):
            parts.run.kill("coordinator")
            parts.relay.hold(frame, round)
            parts.run.coordinator(parts.plan)
            wait_for_phase(parts, page, phase, round)
        parts.run.kill("coordinator")
        parts.run.coordinator(parts.plan)
        parts.finish()
        assert len(parts.site.names()) == 1
