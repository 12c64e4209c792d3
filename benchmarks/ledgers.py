"""A run's ledger in PostgreSQL and in SQLite: rows a second, and what a round takes.

Rows are written as a coordinator writes them: a task given and a report accepted, in batches of
some size, each batch durable before the next begins. Then devices that return at once run rounds
with small updates (rounds.py), so that rows are a good part of a round: with the ledger in SQLite,
in SQLite with ``durable = "power"``, and in PostgreSQL. The server is one of this machine
(PostgreSQL's own programs; fsync is on), and the socket is local: a network adds its round trips.
"""

from __future__ import annotations

import sys
import time
from contextlib import closing
from pathlib import Path
from secrets import token_hex

import _measure as measure
import rounds
from fleetlearn_coordinator.storage.find_storage import begin_elsewhere, find_storage
from fleetlearn_coordinator.storage.ledger import ReportAccepted, Row, TaskGiven
from fleetlearn_coordinator.storage.stored_elsewhere import StoredElsewhere
from fleetlearn_protocol.encodings import FLOAT32
from fleetlearn_protocol.messages import Report

sys.path.append(str(Path(__file__).parents[1] / "tests/support"))
from postgres_server import PostgresServer, postgres_server

STORES = ("postgres", "sqlite_power", "sqlite")
"""The last one is what the others are compared with."""


def write_rows(folder: Path, ledger: str | None, power: bool, batch: int, seconds: float) -> float:
    """Write batches of ``batch`` rows for ``seconds``. Returns rows a second."""
    begin_elsewhere(folder, StoredElsewhere(token_hex(8), ledger))
    storage = find_storage(folder)
    part = FLOAT32.part("update", bytes(8))
    written = 0
    with storage.lock(), closing(storage.open_ledger(power=power, any_thread=False)) as opened:
        opened.create({"run": "r"})
        began = time.perf_counter()
        while time.perf_counter() - began < seconds:
            rows: list[Row] = []
            for number in range(written, written + batch, 2):
                task = f"t-{number}"
                report = Report(task, 1, (part,), 10, 5, 1.0, True, 0.5)
                rows.append(TaskGiven(task, 1, f"d-{number % 1000}", 0))
                rows.append(ReportAccepted(report, 10, 0))
            opened.write(rows)
            written += len(rows)
        return written / (time.perf_counter() - began)


def rows_per_second(server: PostgresServer, batches: list[int], seconds: float) -> dict[str, float]:
    """Return rows a second of each store, by store and batch."""
    found = {}
    for batch in batches:
        for name in STORES:
            with measure.scratch() as folder:
                ledger = server.url() if name == "postgres" else None
                power = name == "sqlite_power"
                found[f"{name}_{batch}"] = write_rows(folder / "run", ledger, power, batch, seconds)
    return found


def main() -> None:
    options = measure.parser(__doc__)
    options.add_argument("--devices", type=int, default=20)
    options.add_argument("--size", type=int, default=1000, help="parameters of the model")
    options.add_argument("--rounds", type=int, default=50)
    options.add_argument("--batches", type=int, nargs="+", default=[2, 20, 200], help="rows")
    options.add_argument("--seconds", type=float, default=1.0, help="that rows are written")
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--limit", type=float, default=120.0, help="seconds for one repeat")
    chosen = options.parse_args()
    batches = [max(2, batch - batch % 2) for batch in chosen.batches]
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in STORES}
    latency: dict[str, list[dict[str, float]]] = {name: [] for name in STORES}
    with postgres_server(fsync="on") as server:
        for _ in range(chosen.repeats):
            found = rows_per_second(server, batches, chosen.seconds)
            for name in STORES:
                keys = {f"rows_per_second_by_{batch}": f"{name}_{batch}" for batch in batches}
                rows[name].append({key: found[own] for key, own in keys.items()})
                settings = {}
                if name == "postgres":
                    database = token_hex(8)
                    server.make_database(database)
                    settings = {"ledger": f'"{server.url(database)}"'}
                figures, gaps = rounds.fleetlearn(
                    chosen.devices,
                    chosen.size,
                    chosen.rounds,
                    chosen.limit,
                    durable="power" if name == "sqlite_power" else "process",
                    service=settings,
                )
                figures["next_task_after_report_ms"] = 1e3 * rounds.quantile(gaps.after_report, 0.5)
                latency[name].append(figures)
            print(".", end="", flush=True, file=sys.stderr)
    print(file=sys.stderr)
    results = {
        f"{what} of {name}": measure.summary({name: runs[name], STORES[-1]: runs[STORES[-1]]})
        for what, runs in (("rows", rows), ("rounds", latency))
        for name in STORES[:-1]
    }
    for name, values in results.items():
        print(f"\n{name}:\n{measure.side_by_side(values)}")
    settings_of_run = {key: value for key, value in vars(chosen).items() if key != "json"}
    measure.write_json(chosen.json, settings_of_run, results)


if __name__ == "__main__":
    main()
