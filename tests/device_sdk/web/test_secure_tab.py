"""A tab in fleets with secure aggregation. It is killed in each phase of a masked task, and never
sends two masked versions of one update."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from browser import browsing, kill_tabs
from fleetlearn_coordinator import read_model
from peers import BUFFERED
from playwright.sync_api import BrowserContext, Page
from secure_tabs import KEY_IN_STORE, SecureTabs, secure_tabs

pytestmark = pytest.mark.slow


def opened(context: BrowserContext, parts: SecureTabs) -> Page:
    page = context.new_page()
    page.goto(parts.site.page)
    page.wait_for_function("globalThis.ownLine !== undefined")
    return page


def test_the_model_is_the_mean_of_what_all_devices_train(tmp_path: Path) -> None:
    with secure_tabs(tmp_path) as parts, browsing(tmp_path / "profile") as context:
        page = opened(context, parts)
        parts.enrol(page)
        parts.start()
        parts.finish()
        assert parts.reports() == [4, 4, 4]
        version, model = read_model(parts.data)
        assert version == 3
        np.testing.assert_allclose(model, parts.expected(3), rtol=0, atol=1e-4)
        accepted = page.evaluate("states.at(-1).accepted")
        assert accepted == 3
        assert page.evaluate(KEY_IN_STORE) == [False, "private"]


PHASES = ("task", "chunk-down", "report", "chunk-up", "uploaded", "accepted")
"""The frames that do not get through while the tab is killed, one in each round."""


def test_a_tab_killed_in_each_phase_sends_one_masked_version(tmp_path: Path) -> None:
    with (
        secure_tabs(tmp_path, stop__rounds=len(PHASES) + 1) as parts,
        browsing(tmp_path / "profile") as context,
    ):
        page = opened(context, parts)
        parts.enrol(page)
        parts.start()
        for round, kind in enumerate(PHASES, 1):
            parts.relay.hold(kind, round)
            parts.wait_held(kind, page)
            kill_tabs()
            page = opened(context, parts)
        parts.finish()
        version, model = read_model(parts.data)
        assert version == len(PHASES) + 1
        np.testing.assert_allclose(model, parts.expected(version), rtol=0, atol=5e-4)
        # Of the killed tabs' reports at least one came again, the same.
        assert len(parts.relay.reports) > version


LATE = ("finished", "weighing", "report", "chunk-up", "accepted")


def test_late_updates_are_masked_once_they_are_weighed(tmp_path: Path) -> None:
    with (
        secure_tabs(
            tmp_path,
            **BUFFERED | {"round__goal": 3, "round__concurrency": 4, "stop__rounds": 15},
            round__weighting="uniform",
        ) as parts,
        browsing(tmp_path / "profile") as context,
    ):
        page = opened(context, parts)
        parts.enrol(page)
        parts.start()
        for kind in LATE:
            parts.relay.hold(kind)
            parts.wait_held(kind, page)
            kill_tabs()
            page = opened(context, parts)
        parts.finish()
        assert read_model(parts.data)[0] == 15
        assert any("it is masked now" in line for line in parts.site.lines), parts.site.lines
