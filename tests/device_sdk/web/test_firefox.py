"""The SDK for browsers in Firefox: rounds with a Python device, and a page that is loaded again."""

from __future__ import annotations

from pathlib import Path

import pytest
from firefox import firefox
from secure_tabs import KEY_IN_STORE, secure_tabs
from web_page import fleet

pytestmark = pytest.mark.slow


def test_a_page_and_a_python_device_train_one_model(tmp_path: Path) -> None:
    with fleet(tmp_path, rounds=2) as parts, firefox(tmp_path) as tab:
        parts.start()
        tab.goto(parts.site.page)
        parts.finish()
        tab.wait_for("globalThis.states.at(-1).phase === 'stopped'")
        assert tab.evaluate("states.at(-1).accepted") == 2
        assert {"connecting", "waiting", "downloading", "training", "uploading"} <= set(
            tab.evaluate("states.map(s => s.phase)")
        )


def test_a_page_that_is_loaded_again_in_training_goes_on(tmp_path: Path) -> None:
    with fleet(tmp_path, rounds=2, epochs=2500) as parts, firefox(tmp_path) as tab:
        parts.start()
        tab.goto(parts.site.page)
        tab.wait_for("globalThis.states?.some(s => s.phase === 'training' && s.step > 0) ?? false")
        tab.reload()
        parts.finish()
        assert len(parts.site.names()) == 1


def test_a_page_masks_its_updates_and_keeps_its_key(tmp_path: Path) -> None:
    with secure_tabs(tmp_path) as parts, firefox(tmp_path) as tab:
        tab.goto(parts.site.page)
        tab.wait_for("globalThis.ownLine !== undefined")
        line = parts.enrol(tab)
        tab.reload()
        tab.wait_for("globalThis.ownLine !== undefined")
        parts.start()
        parts.finish()
        assert parts.reports() == [4, 4, 4]
        assert tab.evaluate("ownLine()") == line
        assert tab.evaluate(KEY_IN_STORE) == [False, "private"]
