"""A run with several models beside others on one host: its devices are served by the member that
fits them, and the live page shows what each member does."""

from __future__ import annotations

from pathlib import Path

import pytest
from family_plans import LARGE, RAM, SMALL, family_text
from fleetlearn_coordinator.storage.runs import Runs
from fleetlearn_protocol import open_bundle
from live_page_person import axe_finds, page_at, write_plans
from peers import update_of
from playwright.sync_api import expect
from watched import Watched


def host_with_family(folder: Path, bundle_path: Path) -> Watched:
    write_plans(folder, bundle_path, "other", round__goal=9, round__minimum=9, round__gather=60.0)
    text = family_text(folder, round__goal=2, round__minimum=2, round__gather=30.0)
    (folder / "family.toml").write_text(text.replace('"test"', '"family"', 1))
    runs = Runs(folder / "runs")
    for name in ("family", "other"):
        runs.add(name, folder / f"{name}.toml")
    return Watched(folder, None)


def test_one_of_several_runs_may_have_several_models(tmp_path: Path, bundle_path: Path) -> None:
    with host_with_family(tmp_path, bundle_path) as host:
        peers = {"large": host.join("a", memory=RAM), "small": host.join("b", memory=RAM - 1)}
        for member, size in (("large", LARGE), ("small", SMALL)):
            task = host.do(peers[member].do_round(update_of(1.0, size)))
            assert task.bundle == open_bundle(tmp_path / f"{member}.bundle").sha256


@pytest.mark.slow
def test_the_page_has_a_row_for_each_model(tmp_path: Path, bundle_path: Path) -> None:
    with host_with_family(tmp_path, bundle_path) as host:
        large, small = host.join("a", memory=RAM), host.join("b", memory=RAM - 1)
        host.do(large.do_round(update_of(1.0, LARGE), loss=0.25, evaluation=None))
        host.do(small.do_round(update_of(1.0, SMALL), loss=0.75, evaluation=None))
        for peer in (large, small):
            host.do(peer.task())
        with page_at(host.address, tmp_path) as page:
            page.goto(f"{host.address}/#token={host.token('ada')}")
            expect(page.get_by_text("ada (operates)")).to_be_visible()
            page.goto(f"{host.address}/#/run/family")
            expect(page.get_by_role("heading", name="Models", exact=True)).to_be_visible()
            cells = page.get_by_role("row", name="large").first.get_by_role("cell")
            expect(cells).to_contain_text(["1", "1", "loss 0.25"])
            expect(page.get_by_role("row", name="small").first).to_contain_text("loss 0.75")
            assert axe_finds(page) == []
            page.goto(f"{host.address}/#/run/other")
            expect(page.get_by_role("heading", name="other", level=1)).to_be_visible()
            expect(page.get_by_role("heading", name="Models", exact=True)).to_be_hidden()
