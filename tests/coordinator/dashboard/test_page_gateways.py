"""The live page has a row for each gateway of a coordinator."""

from __future__ import annotations

from pathlib import Path

import pytest
from fleetlearn_coordinator.network.run_host import GatewayNow
from live_page_person import axe_finds, page_at
from playwright.sync_api import expect
from watched import Watched


@pytest.mark.slow
def test_the_page_has_a_row_for_each_gateway(
    tmp_path: Path, bundle_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the figures that an engine process has of its gateways."""
    found: list[GatewayNow] = []
    monkeypatch.setattr(
        "fleetlearn_coordinator.network.host.Host.gateways_now", lambda host: list(found)
    )
    (tmp_path / "runs").mkdir()
    with Watched(tmp_path, None) as host, page_at(host.address, tmp_path) as page:
        page.goto(f"{host.address}/#token={host.token('ada')}")
        expect(page.get_by_role("heading", name="The coordinator")).to_be_visible()
        gateways = page.get_by_role("table", name="Gateways")
        expect(gateways).to_be_hidden()
        found += [GatewayNow(0, 71, 5, 4, 2048, 0, 0.25), GatewayNow(1, 72, 0, 0, 0, 0, 0.0)]
        row = gateways.get_by_role("row").nth(1)
        expect(row).to_contain_text("71")
        expect(row.get_by_role("cell")).to_contain_text(
            ["71", "4", "5", "2.05 kB", "0 B", "250 ms"]
        )
        expect(gateways.get_by_role("row")).to_have_count(3)
        assert axe_finds(page) == []
