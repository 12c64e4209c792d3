"""nginx, as examples/nginx_cache.conf has it, in front of a coordinator with gateways, as
processes."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from awaited import awaited
from fetching import fetch_model
from fleetlearn_device.driver.http_fetch import http_parts
from fleetlearn_device.driver.timing import Timing
from nginx_cache import PROGRAM, nginx_cache
from peers import plan_text, write_test_bundle
from processes import free_port, processes, wait_for
from slow_link import slow_link

SIZE = 3_000_000
"""Parameters of the model: 12 MB, three parts of the cache."""
DEVICES = 12


@pytest.mark.slow
@pytest.mark.skipif(PROGRAM is None, reason="nginx is not here; on Debian: apt-get install nginx")
@awaited
async def test_a_cache_asks_once_whoever_comes(tmp_path: Path) -> None:
    bundle = write_test_bundle(tmp_path / "large.bundle", SIZE)
    model = np.linspace(-1, 1, SIZE, dtype=np.float32).tobytes()
    port, origin, cache = free_port(), free_port(), free_port()
    plan = tmp_path / "plan.toml"
    plan.write_text(plan_text(bundle, tmp_path / "run", round__goal=DEVICES, round__deadline=600.0))
    (tmp_path / "service.toml").write_text(
        f"port = {port}\ngateways = 2\n[contents]\nport = {origin}\n"
        f'address = "http://127.0.0.1:{cache}/fleet"\n'
    )
    async with slow_link(origin, 1e9) as link:
        behind = int(link.address.rpartition(":")[2])
        with nginx_cache(tmp_path / "nginx", behind, cache), processes(tmp_path) as run:
            run.coordinator(plan)
            listens = partial(wait_for, lambda: "listening on" in run.log("coordinator"), "it")
            await asyncio.to_thread(listens)
            async with asyncio.timeout(120):
                url = f"ws://127.0.0.1:{port}"
                fetching = (fetch_model(url, f"d{n}", http=True) for n in range(DEVICES))
                fetched = await asyncio.gather(*fetching)
                assert all(content == model for content, _ in fetched)
                (where,) = {where for _, where in fetched}
                assert str(where).startswith(f"http://127.0.0.1:{cache}/fleet/contents/")
                assert len(model) < link.down < 1.1 * len(model), "the cache asked once"
                await asyncio.to_thread(run.kill, "coordinator")
                parts = http_parts(str(where), 5_000_000, len(model), Timing())
                assert b"".join([part async for part in parts]) == model[5_000_000:]
