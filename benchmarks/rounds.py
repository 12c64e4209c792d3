"""Rounds with 20 devices that return at once: what a coordinator adds to a round.

The devices take the model (1M float32, 4 MB) and send an update that was made beforehand; they are
real ones, on ``websockets`` and the protocol package, all in this process. The coordinator is a
process of its own. Interleaved with it runs the floor (_rounds_floor.py): bare ``websockets`` and
numpy moving the same bytes. So does an asynchronous coordinator, which makes a model with every 20
updates and gives each device that reports its next task at once.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import _measure as measure
import _rounds_floor
import _servers
import _websocket_device
from fleetlearn_protocol.encodings import find_encoding

WARM = 3
"""Rounds at the start that do not count."""


async def together(parts: Iterable[Awaitable[None]], limit: float) -> None:
    """All devices, or an error from one of them, or TimeoutError."""
    async with asyncio.timeout(limit), asyncio.TaskGroup() as group:
        for part in parts:
            group.create_task(part)  # type: ignore[arg-type]


class Watch:
    """Looks at the server's usage when the first counted round begins, and when the last one
    does."""

    def __init__(self, pid: int, rounds: int) -> None:
        self.began: dict[int, float] = {}
        self.used: dict[int, measure.Usage] = {}
        self.own: dict[int, float] = {}
        self.pid, self.marks = pid, (WARM + 1, WARM + 1 + rounds)

    def __call__(self, round: int) -> None:
        if round not in self.began:
            self.began[round] = time.perf_counter()
            if round in self.marks:
                self.used[round], self.own[round] = measure.usage(self.pid), time.process_time()

    def figures(self, devices: int) -> dict[str, float]:
        first, last = self.marks
        rounds = last - first
        cpu = self.used[last].cpu - self.used[first].cpu
        seconds = self.began[last] - self.began[first]
        return {
            "seconds_per_round": seconds / rounds,
            "rounds_per_second": rounds / seconds,
            "updates_per_second": rounds * devices / seconds,
            "cpu_ms_per_update": 1e3 * cpu / rounds / devices,
            "devices_cpu_ms_per_update": 1e3
            * (self.own[last] - self.own[first])
            / rounds
            / devices,
            "peak_rss_mib": self.used[last].peak_rss,
        }


class Gaps(NamedTuple):
    """Between two rounds, in seconds, one value for each round that counts."""

    after_report: list[float]
    """From the last device's last byte of a round, given to its socket, to the first task of the
    next."""
    after_accepted: list[float]
    """From the last `accepted` of a round."""


def fleetlearn(
    devices: int,
    size: int,
    rounds: int,
    limit: float,
    uploads: int = 16,
    durable: str = "process",
    *,
    asynchronous: bool = False,
    encoding: str = "float32",
    enrolled: bool = False,
    beside: Callable[[_servers.Server], AbstractContextManager[None]] | None = None,
    service: Mapping[str, Any] | None = None,
    tables: str = "",
) -> tuple[dict[str, float], Gaps]:
    """Figures of the coordinator, and how long it took between rounds. ``enrolled``: whether the
    devices have credentials. ``beside``: a context that is open meanwhile. ``service``: further
    settings of its process, as TOML. ``tables``: further tables of the plan."""
    update = _websocket_device.make_update(size, encoding=find_encoding(encoding))
    log = _websocket_device.Log()
    total = WARM + rounds + 1

    def take_part(name: str) -> Awaitable[None]:
        credential = f"Bearer {_servers.credential_of(name)}"
        headers = {"Authorization": credential} if enrolled else {}
        return _websocket_device.take_part(server.url, name, update, log, watch, **headers)

    with _servers.coordinator(
        size=size,
        devices=devices,
        rounds=total,
        uploads=uploads,
        durable=durable,
        asynchronous=asynchronous,
        encoding=encoding,
        enrolled=devices if enrolled else 0,
        tables=tables,
        **(service or {}),
    ) as server:
        watch = Watch(server.pid, rounds)
        with nullcontext() if beside is None else beside(server):
            asyncio.run(together((take_part(f"d{i}") for i in range(devices)), limit))
    # an update may count for the round after its task's, and some are under way at the end
    if asynchronous:
        if (accepted := sum(moments.accepted for moments in log.values())) < total * devices:
            raise RuntimeError(
                f"{accepted} updates were accepted, {total} rounds need {total * devices}"
            )
        return watch.figures(devices), Gaps([], [])
    for round in range(1, WARM + rounds + 2):
        if log[round].accepted != devices:
            raise RuntimeError(f"round {round} accepted {log[round].accepted} of {devices} updates")
    pairs = [(log[i], log[i + 1].first_task) for i in range(WARM + 1, WARM + 1 + rounds)]
    gaps = Gaps(
        [task - end.last_uploaded for end, task in pairs],
        [task - end.last_accepted for end, task in pairs],
    )
    return watch.figures(devices), gaps


def bare(devices: int, size: int, rounds: int, limit: float) -> dict[str, float]:
    """Figures of the floor."""
    content = _websocket_device.make_update(size).content
    total = WARM + rounds + 1
    with _servers.floor("_rounds_floor.py", devices, size, total) as server:
        watch = Watch(server.pid, rounds)
        asyncio.run(
            together(
                (
                    _rounds_floor.take_part(server.url, content, total, watch)
                    for _ in range(devices)
                ),
                limit,
            )
        )
    return watch.figures(devices)


def quantile(values: Iterable[float], part: float) -> float:
    """The smallest value that at least ``part`` of them do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


def main() -> None:
    options = measure.parser(__doc__)
    options.add_argument("--devices", type=int, default=20)
    options.add_argument(
        "--size", type=int, default=1_000_000, help="parameters of the model, float32"
    )
    options.add_argument(
        "--rounds", type=int, default=30, help=f"rounds that count, after {WARM} that do not"
    )
    options.add_argument("--uploads", type=int, default=16, help="the service's uploads")
    options.add_argument(
        "--durable", choices=("process", "power"), default="process", help="the plan's durable"
    )
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument(
        "--limit", type=float, default=120.0, help="seconds that one repeat may take"
    )
    chosen = options.parse_args()
    sizes = chosen.devices, chosen.size, chosen.rounds, chosen.limit
    runs: dict[str, list[dict[str, float]]] = {"fleetlearn": [], "floor": [], "asynchronous": []}
    gaps = Gaps([], [])
    for _ in range(chosen.repeats):
        runs["floor"].append(bare(*sizes))
        figures, gaps_of_turn = fleetlearn(*sizes, chosen.uploads, chosen.durable)
        runs["fleetlearn"].append(figures)
        gaps.after_report.extend(gaps_of_turn.after_report)
        gaps.after_accepted.extend(gaps_of_turn.after_accepted)
        figures, _ = fleetlearn(*sizes, chosen.uploads, chosen.durable, asynchronous=True)
        runs["asynchronous"].append(figures)
        print(".", end="", flush=True, file=sys.stderr)
    print(file=sys.stderr)
    asynchronous = measure.summary(
        {"asynchronous": runs.pop("asynchronous"), "floor": runs["floor"]}
    )
    results = measure.summary(runs) | {"asynchronous": asynchronous}
    for name, values in gaps._asdict().items():
        results[f"next_task_{name}_ms"] = {
            "p50": 1e3 * quantile(values, 0.5),
            "p99": 1e3 * quantile(values, 0.99),
            "max": 1e3 * max(values),
        }
    print(measure.side_by_side(results))
    for name, words in (("after_report", "last report"), ("after_accepted", "last `accepted`")):
        line = ", ".join(
            f"{key} {value:.1f}" for key, value in results[f"next_task_{name}_ms"].items()
        )
        print(f"\nms from a round's {words} to the next round's first task: {line}")
    print(f"\nasynchronous:\n{measure.side_by_side(asynchronous)}")
    settings = {key: value for key, value in vars(chosen).items() if key != "json"}
    measure.write_json(chosen.json, settings, results)


if __name__ == "__main__":
    main()
