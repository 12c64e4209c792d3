"""A model that is larger than what a tab may keep in memory until it is stored: Chromium, with
IndexedDB, against a real coordinator on a network without limits."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from math import inf
from pathlib import Path

import psutil
import pytest
from browser import FLAGS, chromium
from peers import plan_text, write_test_bundle
from processes import free_port, processes
from slow_link import SlowLink, slow_link
from web_page import serving

MIB = 2**20
MODEL = 96 * MIB
"""Bytes of the model: IndexedDB stores them more slowly than they come."""
MOST = 40 * MIB
"""What a tab may take beyond what it took before: 8 MiB that wait, and garbage of JavaScript."""
PATIENCE = 400.0


@contextmanager
def linked(port: int) -> Iterator[SlowLink]:
    """A link without limits to this port, in a thread, that counts what crosses it."""
    loop, ready, over = asyncio.new_event_loop(), threading.Event(), asyncio.Event()
    found: list[SlowLink] = []

    async def run() -> None:
        async with slow_link(port, inf) as link:
            found.append(link)
            ready.set()
            await over.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),))
    thread.start()
    ready.wait()
    try:
        yield found[0]
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()
        loop.close()


def tab_memory(process: psutil.Process) -> int:
    """Return the bytes of memory of the browser's largest tab."""
    tabs = [0]
    for child in process.children(recursive=True):
        with suppress(psutil.Error):
            if "--type=renderer" in child.cmdline():
                tabs.append(child.memory_info().rss)
    return max(tabs)


@pytest.mark.slow
def test_what_a_tab_has_not_stored_does_not_pile_up(tmp_path: Path) -> None:
    port = free_port()
    browser = [chromium(), *FLAGS[:-1], "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
    bundle = write_test_bundle(tmp_path / "large.bundle", MODEL // 4)
    plan = tmp_path / "plan.toml"
    plan.write_text(plan_text(bundle, tmp_path / "run", round__goal=1, round__deadline=600.0))
    with linked(port) as link:
        settings = {"url": link.address, "x": [[0.0]] * 4, "y": [0.0] * 4}
        with serving(tmp_path / "site", **settings) as site, processes(tmp_path) as run:
            (tmp_path / "service.toml").write_text(f'port = {port}\norigins = ["{site.origin}"]\n')
            run.coordinator(plan)
            run.start("browser", *browser, f"--user-data-dir={tmp_path / 'profile'}", site.page)
            process = psutil.Process(run.running["browser"].pid)
            until = time.monotonic() + PATIENCE
            while link.down < 4 * MIB:
                assert time.monotonic() < until, site.lines
                time.sleep(0.02)
            before = peak = tab_memory(process)
            while link.down < MODEL - 4 * MIB:
                assert time.monotonic() < until, (link.down, site.lines)
                peak = max(peak, tab_memory(process))
                time.sleep(0.02)
            peak = max(peak, tab_memory(process))
            print(f"{before / MIB:.0f} MiB before, {peak / MIB:.0f} MiB at most")
            assert peak - before < MOST
