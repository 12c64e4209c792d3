"""A table of 10^6 x 64 of which devices have 100 rows: bytes, memory and the coordinator's time.

    python benchmarks/sparse_rows.py [--rows N] [--json FILE]

One coordinator and a few devices, real processes on this machine, train a model whose embedding has
256 MB. Its graphs, its rows and nothing else of it should travel, and a device should need no
memory for the rest. Then the time of adding one update of 100 rows to a round's sum, for tables of
different sizes: it should not depend on the table's. Takes some minutes and 6 GB of memory, most of
it for the export.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import _measure as measure
import numpy as np
from _nginx import free_port
from fleetlearn_coordinator import read_status
from fleetlearn_coordinator.aggregation.row_mean import row_mean
from fleetlearn_coordinator.aggregation.updates import NO_VALUES, SelectedRows
from fleetlearn_protocol.sparse_rows import RowLayout, RowSegment

WIDTH, OWN = 64, 100
"""Numbers in a row, and rows that a device's data name."""
TABLES = (10**4, 10**5, 10**6)
"""Rows of the tables to whose sums an update is added."""

PLAN = """
name = "rows"
bundle = "items.bundle"
[local]
lr = 0.1
[round]
goal = {devices}
over_selection = 1.0
minimum = {devices}
gather = 600.0
deadline = 600.0
grace = 60.0
[aggregation]
rows = "touched"
[stop]
rounds = {rounds}
"""


def export(folder: Path, rows: int) -> None:
    """Export the model in a process of its own, whose memory is free afterwards."""
    subprocess.run([sys.executable, __file__, "--export", folder, "--rows", str(rows)], check=True)


def write_bundle(folder: Path, rows: int) -> None:
    import torch
    from fleetlearn_export import export_bundle
    from torch import Tensor, nn

    class Items(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.items = nn.Embedding(rows, WIDTH)
            self.out = nn.Linear(WIDTH, 1)

        def forward(self, item: Tensor) -> Tensor:
            found: Tensor = self.out(self.items(item))
            return found[:, 0]

    def loss(outputs: Tensor, y: Tensor) -> Tensor:
        return ((outputs - y) ** 2).mean()

    torch.manual_seed(1)
    example = torch.arange(4), torch.ones(4)
    path = folder / "items.bundle"
    export_bundle(Items(), loss, example, path, names=["item", "y"], sparse=["items"])


def run(folder: Path, rows: int, devices: int, rounds: int) -> dict[str, Any]:
    """Train, and return what it took."""
    (folder / "plan.toml").write_text(PLAN.format(devices=devices, rounds=rounds))
    port, random = free_port(), np.random.default_rng(1)
    (folder / "service.toml").write_text(f"port = {port}\n")
    serve = ["-m", "fleetlearn_coordinator", "serve", "plan.toml", "--service", "service.toml"]
    begun = {"coordinator": _start(folder, "coordinator", serve)}
    for device in range(devices):
        item = random.choice(rows, OWN, replace=False).astype(np.int64)
        np.savez(folder / f"{device}.npz", item=item, y=random.normal(size=OWN).astype(np.float32))
        name = f"device-{device}"
        options = ["--coordinator", f"ws://127.0.0.1:{port}", "--data", f"{device}.npz"]
        options += ["--state", f"{name}.state", "--name", name, "--until-finished"]
        begun[name] = _start(folder, name, ["-m", "fleetlearn_device", "run", *options])
    peaks, seconds = dict[str, float](), dict[str, float]()
    for name, process in begun.items():
        _, status, usage = os.wait4(process.pid, 0)
        if status:
            raise SystemExit((folder / f"{name}.log").read_text()[-2000:])
        peaks[name] = usage.ru_maxrss / 1024
        seconds[name] = usage.ru_utime + usage.ru_stime
    status_ = read_status(folder / "rows.run")
    summaries = [row.summary for row in status_.rounds]
    state = sum(
        path.stat().st_size for path in (folder / "device-0.state").rglob("*") if path.is_file()
    )
    own = [peaks[name] for name in peaks if name != "coordinator"]
    return {
        "down": [row["bytes_down"] / devices for row in summaries],
        "up": [row["bytes_up"] / devices for row in summaries],
        "coordinator MiB": peaks["coordinator"],
        "device MiB": statistics.median(own),
        "coordinator CPU-s": seconds["coordinator"],
        "folder": state,
    }


def _start(folder: Path, name: str, words: Sequence[str]) -> subprocess.Popen[bytes]:
    with (folder / f"{name}.log").open("wb") as log:
        command = [sys.executable, *words]
        return subprocess.Popen(command, cwd=folder, stdout=log, stderr=subprocess.STDOUT)


def seconds_of_an_update(rows: int, repeats: int = 200) -> float:
    """Return the median seconds of adding an update of OWN rows to a sum."""
    layout = RowLayout(rows, (RowSegment(0, rows * WIDTH, WIDTH),))
    aggregator, random = row_mean(layout, touched=True), np.random.default_rng(rows)
    state = aggregator.init(layout.size)
    taken = []
    for _ in range(repeats):
        own = np.sort(random.choice(rows, OWN, replace=False))
        values = random.normal(size=OWN * WIDTH).astype(np.float32)
        largest = float(np.abs(values).max())
        begin = time.perf_counter()
        aggregator.add(state, SelectedRows(values, own), 1, largest, 1.0, NO_VALUES)
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


def show(rows: int, found: Mapping[str, Any], times: Mapping[int, float]) -> str:
    whole = 4 * (rows * WIDTH + WIDTH + 1)
    lines = [
        ("figure", "rows alone", "whole table"),
        ("down, first round", f"{found['down'][0]:,.0f} B", f"{whole:,} B and the bundle"),
        ("down, later rounds", f"{found['down'][-1]:,.0f} B", f"{whole:,} B"),
        ("up", f"{found['up'][-1]:,.0f} B", f"{whole:,} B"),
        ("memory of a device at its peak", f"{found['device MiB']:.0f} MiB", ""),
        ("a device's folder", f"{found['folder']:,} B", ""),
        ("memory of the coordinator at its peak", f"{found['coordinator MiB']:.0f} MiB", ""),
    ]
    lines += [
        (f"adding an update, {table:,} rows", f"{1e6 * taken:.0f} us", "")
        for table, taken in times.items()
    ]
    return measure.table(lines)


def main() -> None:
    options = measure.parser(__doc__)
    options.add_argument("--rows", type=int, default=10**6, help="of the table")
    options.add_argument("--devices", type=int, default=4)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--export", type=Path, help="only write the bundle, into this folder")
    chosen = options.parse_args()
    if chosen.export is not None:
        write_bundle(chosen.export, chosen.rows)
        return
    with measure.scratch() as folder:
        export(folder, chosen.rows)
        size = (folder / "items.bundle" / "parameters.safetensors").stat().st_size
        found = run(folder, chosen.rows, chosen.devices, chosen.rounds)
    times = {rows: seconds_of_an_update(rows) for rows in TABLES}
    print(show(chosen.rows, found, times))
    settings = {key: value for key, value in vars(chosen).items() if key not in ("json", "export")}
    results = {**found, "table bytes": size, "seconds of an update": times}
    measure.write_json(chosen.json, settings, results)


if __name__ == "__main__":
    main()
