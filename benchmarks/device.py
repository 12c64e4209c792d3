"""What a device costs its owner: memory, CPU, bytes, wake-ups and writes to flash in rounds of a
small CNN, beside a device in PyTorch and Flower's SuperNode.

Each contender takes part as one process (Flower's: with its children) in rounds of the same
training: one epoch of the same data from the same model. At first it is connected and waits: that
is when it is measured idle. Its rounds begin when a second device comes, which sends an update made
beforehand. All its bytes go through a relay that counts them.

``written_share``: bytes written to storage by the bytes of all its updates. Flower's SuperNode
starts a process for each message, which imports PyTorch again; so it does fewer rounds. It needs
an environment of its own, and takes part with ``--flower``:

    python3.11 -m venv peers && peers/bin/pip install flwr torch && python benchmarks/device.py \\
        --flower peers/bin/python
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import _device_flower
import _measure as measure
import _servers
import _websocket_device
import numpy as np
from _device_meter import Meter, Relay
from fleetlearn_export import export_bundle
from fleetlearn_protocol import open_bundle

sys.path.append(str(Path(__file__).parents[1] / "tests/support"))
import zoo

HERE = Path(__file__).parent
BATCH, LR = 20, 0.05
SETTLED = 3.0
"""Seconds in which a device that has just connected comes to rest."""
LIMIT = 600.0
"""Seconds that the rounds of one contender may take."""
AIMS = {"idle_rss_mib": 65.0, "idle_wakeups_per_s": 0.0, "written_share": 1.2}

Figures = dict[str, float]


def export(model: str, folder: Path, examples: int) -> None:
    """Write the model's bundle, and the data of a device."""
    case = zoo.make(model)
    folder.mkdir(parents=True, exist_ok=True)
    bundle, data = folder / f"{model}.bundle", folder / f"{model}-{examples}.npz"
    if not bundle.exists():
        export_bundle(case.module, case.loss, case.batch(BATCH), bundle, targets=case.targets)
    x, y = case.batch(examples)
    np.savez(data, x=x.numpy(), y=y.numpy())


async def idle(meter: Meter, relay: Relay, seconds: float) -> Figures:
    """Return what the device costs while it waits, for this long."""
    async with asyncio.timeout(LIMIT):
        while not relay.up:
            await asyncio.sleep(0.1)
    await asyncio.sleep(SETTLED)
    meter.look()
    before, sent, received = meter.total(), relay.up, relay.down
    await asyncio.sleep(seconds)
    meter.look()
    after = meter.total()
    return {
        "idle_rss_mib": meter.rss[-1],
        "idle_wakeups_per_s": (after.wakeups - before.wakeups) / seconds,
        "idle_cpu_ms_per_s": 1e3 * (after.cpu - before.cpu) / seconds,
        "idle_bytes_per_s": (relay.up - sent + relay.down - received) / seconds,
    }


async def in_rounds(
    meter: Meter, relay: Relay, rounds: int, size: int, work: Callable[[], Any]
) -> Figures:
    """Return what the rounds cost that ``work`` waits for. ``size``: bytes of an update."""
    meter.look()
    before, sent, received, looks = meter.total(), relay.up, relay.down, len(meter.rss)
    begin = time.monotonic()
    await asyncio.wait_for(work(), LIMIT)
    seconds = time.monotonic() - begin
    meter.look()
    after, rss = meter.total(), meter.rss[looks:]
    return {
        "mean_rss_mib": float(np.mean(rss)),
        "peak_rss_mib": max(meter.rss),
        "cpu_s_per_round": (after.cpu - before.cpu) / rounds,
        "clock_s_per_round": seconds / rounds,
        "mb_up_per_round": (relay.up - sent) / rounds / 1e6,
        "mb_down_per_round": (relay.down - received) / rounds / 1e6,
        "mb_written_per_round": (after.written - before.written) / rounds / 1e6,
        "written_share": (after.written - before.written) / rounds / size,
    }


@asynccontextmanager
async def started(
    command: list[str], log: Path, environment: dict[str, str] | None = None
) -> AsyncIterator[Meter]:
    """Run a device."""
    with _servers.server_process(command, log, environment) as process:
        meter = Meter(process.pid)
        try:
            yield meter
            if process.poll() not in (None, 0):
                raise RuntimeError(f"{command[0]} ended with status {process.returncode}")
        finally:
            meter.close()


async def in_a_fleet(
    command: list[str], bundle: Path, rounds: int, seconds: float, folder: Path
) -> Figures:
    """Measure a device of a coordinator of this project. ``command``: the device's, which the
    coordinator's address follows."""
    size = open_bundle(bundle).manifest.size
    prepared = _websocket_device.make_update(size)
    log = _websocket_device.Log()
    local = f"batch_size = {BATCH}\nlr = {LR}"
    with _servers.coordinator(
        size=size, devices=2, rounds=rounds, bundle=bundle, local=local
    ) as server:
        port = int(server.url.rpartition(":")[2])
        async with (
            Relay().open(port) as relay,
            started([*command, f"ws://127.0.0.1:{relay.port}"], folder / "device.log") as meter,
        ):
            figures = await idle(meter, relay, seconds)
            figures |= await in_rounds(
                meter,
                relay,
                rounds,
                4 * size,
                lambda: _websocket_device.take_part(server.url, "second", prepared, log),
            )
            await asyncio.sleep(0.2)  # it may still be reading that all is over
            if sum(moments.accepted for moments in log.values()) != rounds:
                raise RuntimeError("not every round ended with the device's update")
    losses = re.findall(r"\bloss ([0-9.]+)", (folder / "device.log").read_text())
    if len(losses) != rounds:
        raise RuntimeError(f"the device trained {len(losses)} times in {rounds} rounds")
    return figures | {"loss": float(losses[-1])}


async def in_flower(
    flower: _device_flower.Flower, rounds: int, size: int, seconds: float
) -> Figures:
    """Measure a SuperNode. ``size``: bytes of an update."""

    async def work() -> None:
        await asyncio.to_thread(flower.start_run)
        while flower.losses() is None:
            await asyncio.sleep(0.2)

    link_log, log = flower.folder / "superlink.log", flower.folder / "supernode.log"
    with _servers.server_process(flower.superlink(), link_log, flower.environment) as link:
        _servers.wait_for("(Uvicorn running)", link, link_log)
        async with (
            Relay().open(flower.port) as relay,
            started(flower.supernode(relay.port), log, flower.environment) as meter,
        ):
            figures = await idle(meter, relay, seconds)
            figures |= await in_rounds(meter, relay, rounds, size, work)
    losses = flower.losses()
    if losses is None or len(losses) != rounds:
        raise RuntimeError(f"Flower's rounds gave {losses}")
    return figures | {"loss": losses[-1]}


def main() -> None:
    options = measure.parser(__doc__)
    options.add_argument("--model", default="mcmahan", help="of tests/support/zoo.py")
    options.add_argument("--examples", type=int, default=600)
    options.add_argument("--rounds", type=int, default=20)
    options.add_argument("--idle", type=float, default=40.0, help="seconds to look at it idle")
    options.add_argument("--repeats", type=int, default=1)
    options.add_argument("--flower", metavar="PYTHON", help="of an environment with flwr and torch")
    options.add_argument("--flower-rounds", type=int, default=5)
    options.add_argument("--bundles", type=Path, metavar="FOLDER", help="keep what is exported")
    chosen = options.parse_args()
    runs: dict[str, list[Figures]] = {}
    with measure.scratch() as scratch:
        folder = chosen.bundles or scratch
        # not in this process: the exporter takes memory that the model's size is small beside
        code = "import device, pathlib, sys; m, f, n = sys.argv[1:]; "
        code += "device.export(m, pathlib.Path(f), int(n))"
        arguments = [chosen.model, str(folder.absolute()), str(chosen.examples)]
        quiet = {**os.environ, "PYTHONWARNINGS": "ignore"}
        subprocess.run([sys.executable, "-c", code, *arguments], cwd=HERE, check=True, env=quiet)
        bundle = folder / f"{chosen.model}.bundle"
        data = folder / f"{chosen.model}-{chosen.examples}.npz"
        torch_device = [sys.executable, str(HERE / "_pytorch_device.py")]
        ours = [str(Path(sys.executable).with_name("fleetlearn-device")), "run"]
        for repeat in range(chosen.repeats):
            state = scratch / f"state-{repeat}"
            kept = ["--data", str(data), "--state", str(state), "--name", "measured"]
            commands: dict[str, list[str]] = {
                "fleetlearn": [*ours, *kept, "--coordinator"],
                "pytorch": [*torch_device, str(data), chosen.model, str(BATCH), str(LR)],
            }
            for name, command in commands.items():
                work = in_a_fleet(command, bundle, chosen.rounds, chosen.idle, scratch)
                runs.setdefault(name, []).append(asyncio.run(work))
                print(".", end="", flush=True, file=sys.stderr)
            if chosen.flower:
                size, rounds = 4 * open_bundle(bundle).manifest.size, chosen.flower_rounds
                trained = data, chosen.model, rounds, BATCH, LR
                with _device_flower.prepared(chosen.flower, scratch, *trained) as flower:
                    work = in_flower(flower, rounds, size, chosen.idle)
                    runs.setdefault("flower", []).append(asyncio.run(work))
                print(".", end="", flush=True, file=sys.stderr)
    print(file=sys.stderr)
    results: dict[str, Any] = {
        name: {key: measure.middle([row[key] for row in rows]) for key in rows[0]}
        for name, rows in runs.items()
    }
    print(show(results))
    if not chosen.flower:
        print("\nFlower's SuperNode was not measured: --flower names no environment that has it.")
    measure.write_json(chosen.json, vars(chosen) | {"json": None, "bundles": None}, results)


def show(results: dict[str, Any]) -> str:
    """A row for each figure, a column for each contender, and the aims."""
    rows = [("figure", *results, "aim")]
    for key in results["fleetlearn"]:
        aim = f"at most {AIMS[key]:g}" if key in AIMS else ""
        rows.append((key, *(measure.show(found[key]) for found in results.values()), aim))
    return measure.table(rows)


if __name__ == "__main__":
    main()
