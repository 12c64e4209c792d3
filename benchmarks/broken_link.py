"""A large model and its update over a slow link that breaks again and again, while the coordinator
is restarted.

One device fetches the model and sends an update of the same size, through a proxy that bounds the
rate in each direction and breaks all connections at a fixed interval. The coordinator is stopped
(SIGTERM) or killed (SIGKILL) in the middle of the upload, and started again on the same data
directory. What crosses the link is counted. Interleaved runs the same without a restart.

The full case takes ten minutes for each column, and little CPU: ``--megabytes 500 --rate 2 --each
20``.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import _measure as measure
import _servers
import numpy as np

sys.path.append(str(Path(__file__).parents[1] / "tests/support"))
from slow_link import ReturningDevice, slow_link

MB = 1_000_000
PLAN = """
name = "benchmark"
bundle = "bundle"
[round]
goal = 1
over_selection = 1
minimum = 1
deadline = 36000
grace = 600
[stop]
rounds = 1
"""
HOW = {"undisturbed": None, "stopped": signal.SIGTERM, "killed": signal.SIGKILL}


class Restarted:
    """A coordinator that can be ended and begun again on the same port."""

    def __init__(self, folder: Path, size: int, plan: str = PLAN, settings: str = "") -> None:
        """``settings``: more of the service file."""
        _servers.write_placeholder_bundle(folder / "bundle", size)
        (folder / "plan.toml").write_text(plan)
        self._settings = folder / "service.toml"
        self._settings.write_text(f"port = 0\n{settings}")
        self._log = folder / "coordinator.log"
        self._command = [sys.executable, "-m", "fleetlearn_coordinator", "serve"]
        self._command += [str(folder / "plan.toml"), "--service", str(self._settings)]
        self.begin()
        self._settings.write_text(f"port = {self.port}\n{settings}")

    def begin(self) -> None:
        with self._log.open("wb") as output:
            self.process = subprocess.Popen(self._command, stdout=output, stderr=subprocess.STDOUT)
        found = _servers.wait_for(r"listening on ws://\S+:(\d+)", self.process, self._log)
        self.port = int(found)

    def end(self, how: int) -> None:
        self.process.send_signal(how)
        self.process.wait()


@contextmanager
def restarted(size: int) -> Iterator[Restarted]:
    with measure.scratch() as folder:
        coordinator = Restarted(folder, size)
        try:
            yield coordinator
        finally:
            coordinator.process.kill()
            coordinator.process.wait()


async def deliver(
    coordinator: Restarted, size: int, rate: float, each: float, restarts: int, how: int | None
) -> dict[str, float]:
    update = np.random.default_rng(0).standard_normal(size, np.float32)
    began = time.monotonic()
    async with slow_link(coordinator.port, rate) as link:
        device = ReturningDevice(link, update)
        delivery = asyncio.ensure_future(device.deliver())
        breaking = asyncio.ensure_future(link.break_each(each))
        for number in range(0 if how is None else restarts):
            due = update.nbytes * (number + 1) // (restarts + 1)
            while not delivery.done() and device.came() < due:
                await asyncio.sleep(0.05)
            assert how is not None
            await asyncio.to_thread(coordinator.end, how)
            await asyncio.to_thread(coordinator.begin)
        await delivery
        breaking.cancel()
    return {
        "update_mb": update.nbytes / MB,
        "sent_mb": link.up / MB,
        "sent_again_mb": (link.up - update.nbytes) / MB,
        "fetched_again_mb": (link.down - update.nbytes) / MB,
        "breaks": link.breaks,
        "grants": len(device.offsets),
        "seconds": time.monotonic() - began,
    }


def run(size: int, rate: float, each: float, restarts: int, how: str) -> dict[str, float]:
    """Figures of one delivery."""
    with restarted(size) as coordinator:
        return asyncio.run(deliver(coordinator, size, rate, each, restarts, HOW[how]))


def main() -> None:
    options = measure.parser(__doc__)
    options.add_argument("--megabytes", type=float, default=50, help="of the model, and the update")
    options.add_argument("--rate", type=float, default=5, help="megabytes a second, each way")
    options.add_argument("--each", type=float, default=4, help="seconds until the link breaks")
    options.add_argument("--restarts", type=int, default=2, help="of the coordinator")
    options.add_argument("--how", nargs="+", choices=[*HOW], default=[*HOW])
    chosen = options.parse_args()
    size = int(chosen.megabytes * MB / 4)
    runs = {
        how: [run(size, chosen.rate * MB, chosen.each, chosen.restarts, how)] for how in chosen.how
    }
    print(
        measure.table(
            [
                ("figure", *runs),
                *(
                    (key, *(f"{values[0][key]:.4g}" for values in runs.values()))
                    for key in next(iter(runs.values()))[0]
                ),
            ]
        )
    )
    results = {
        how: {key: measure.middle([values[0][key]]) for key in values[0]}
        for how, values in runs.items()
    }
    settings = {key: value for key, value in vars(chosen).items() if key != "json"}
    measure.write_json(chosen.json, settings, results)


if __name__ == "__main__":
    main()
