"""What metrics and alerts cost a coordinator: the rounds of ``rounds.py``, with and without them.

In turns: a coordinator as it is, and one with a metrics' port that is scraped each second
(Prometheus asks one to twelve times a minute) and with [alerts]. Half of the repeats begin with the
one, half with the other. The default updates are small: what is done for each report weighs most
then.
"""

from __future__ import annotations

import re
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

import _measure as measure
import _servers
from rounds import fleetlearn

EVERY = 1.0
"""Seconds between two scrapes."""
MONITORED = {"metrics": "{port = 0}", "alerts": '{command = ["true"], off = ["DiskLow"]}'}
"""Settings of the service, as TOML."""
AS_IT_IS = "as it is"


@contextmanager
def scraped(server: _servers.Server) -> Iterator[None]:
    """Scrape a coordinator's metrics until the block is left. Raises RuntimeError where that
    failed."""
    match = re.search(r"metrics: (http://\S+)", server.log.read_text())
    if match is None:
        raise RuntimeError(f"{server.log} does not say where metrics are")
    url, ended, found = match.group(1), threading.Event(), list[bytes | OSError]()

    def scrape() -> None:
        while not ended.is_set():
            try:
                with urllib.request.urlopen(url, timeout=30) as answer:
                    found.append(answer.read())
            except OSError as error:
                found.append(error)
                return
            ended.wait(EVERY)

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    last = found[-1]
    if isinstance(last, OSError) or b"fleetlearn_reports_accepted_total" not in last:
        raise RuntimeError(f"no metrics were scraped: {last!r}")


def compare(
    description: str | None,
    name: str,
    beside: Callable[[_servers.Server], AbstractContextManager[None]],
    service: Mapping[str, str],
    *,
    enrolled: bool = False,
) -> None:
    """Compare a coordinator that is watched with one as it is, in turns, as the command line says.

    Args:
        description: Of the benchmark.
        name: Of the coordinator that is watched, in the results.
        beside: What watches it, while devices do rounds.
        service: The watched coordinator's settings, as TOML.
        enrolled: Whether the devices of both have credentials.
    """
    options = measure.parser(description)
    options.add_argument("--devices", type=int, default=20)
    options.add_argument(
        "--size", type=int, default=10_000, help="parameters of the model, float32"
    )
    options.add_argument("--rounds", type=int, default=100, help="rounds that count")
    options.add_argument("--repeats", type=int, default=6)
    options.add_argument(
        "--limit", type=float, default=120.0, help="seconds that one repeat may take"
    )
    chosen = options.parse_args()
    sizes = chosen.devices, chosen.size, chosen.rounds, chosen.limit
    runs: dict[str, list[dict[str, float]]] = {name: [], AS_IT_IS: []}
    for repeat in range(chosen.repeats):
        for one in sorted(runs, reverse=bool(repeat % 2)):
            watched = (beside, service) if one == name else (None, None)
            figures, _ = fleetlearn(
                *sizes, enrolled=enrolled, beside=watched[0], service=watched[1]
            )
            runs[one].append(figures)
        print(".", end="", flush=True, file=sys.stderr)
    print(file=sys.stderr)
    results = measure.summary(runs)
    print(measure.side_by_side(results))
    settings = {key: value for key, value in vars(chosen).items() if key != "json"}
    measure.write_json(chosen.json, settings, results)


if __name__ == "__main__":
    compare(__doc__, "monitored", scraped, MONITORED)
