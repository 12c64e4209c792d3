"""Train together in browsers: a coordinator with a page, a few devices, a link, and a QR code.

make demo-web, make demo-web ARGS="--lan", or .venv/bin/python -m examples.demo_web --help
"""

from __future__ import annotations

import argparse
import shutil
import socket
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from fleetlearn_coordinator.aggregation.round_summary import measured_when
from fleetlearn_coordinator.service.status import Closed, read_status
from fleetlearn_coordinator.storage.errors import StoreError
from fleetlearn_protocol.errors import FleetError, in_words

from examples.demo.command_line import add_number, number, own_folder, parser_of
from examples.demo.fleet import Paths, export, free_port
from examples.demo.processes import Child, DemoError, end_all, exit_on_signals
from examples.demo_web import lan, parts

BUILT = Path(__file__).parents[2] / "device_sdk" / "web" / "build" / "page"
NOT_BUILT = """\
there is no page in {folder}.
`make demo-web` builds it with Node 20.19 or newer, and npm, which are not here: https://nodejs.org,
or on Debian 13 and Ubuntu 25.04 `apt install nodejs npm`. Or name a page that was built elsewhere:
--page FOLDER"""
PORTS = 8765, 8767
"""Where the coordinator and the page listen, if nothing else does."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo until Ctrl-C. Returns its exit status."""
    options = _options(arguments)
    exit_on_signals()
    try:
        paths = Paths(options.output.resolve())
        # Certificates and identities stay: a browser that joined once goes on as the same device.
        with own_folder(paths.output, (paths.bundle, paths.run, paths.devices, paths.logs)):
            paths.logs.mkdir()
            _demo(options, paths)
    except (DemoError, FleetError, OSError) as error:
        print(f"demo-web: {in_words(error, file=True)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("demo-web: stopped; nothing is left running", file=sys.stderr)
    return 0


def _demo(options: argparse.Namespace, paths: Paths) -> None:
    page = options.page.resolve()
    if not (page / "index.html").is_file():
        raise DemoError(NOT_BUILT.format(folder=page))
    if options.bundle is None:
        print("exporting the model ...", flush=True)
        export(paths)
    else:
        shutil.copytree(options.bundle, paths.bundle)
    host, tls = "127.0.0.1", None
    if options.lan is not None:
        host = options.lan or lan.find_address()
        tls = lan.certificate_for(paths.output / "tls", host)
    port, page_port = (
        options.port or _port(host, PORTS[0]),
        options.page_port or _port(host, PORTS[1]),
    )
    gather, seed = options.gather, options.seed
    parts.write_plan(
        paths, devices=options.devices, rounds=options.rounds, gather=gather, seed=seed
    )
    parts.write_service(paths, page, host=host, port=port, page_port=page_port, tls=tls)
    token, link = parts.make_link(paths)
    coordinator = parts.coordinator(paths)
    url = f"{'ws' if tls is None else 'wss'}://{f'[{host}]' if ':' in host else host}:{port}"
    ca = None if tls is None else tls / "ca.pem"
    devices = parts.devices(paths, options.devices, url, token, ca, seed)
    try:
        coordinator.start()
        _wait_until_it_listens(coordinator)
        for device in devices:
            device.start()
        _invite(link, tls)
        _watch(paths, coordinator, devices)
    finally:
        end_all([*devices, coordinator])


def _invite(link: str, tls: Path | None) -> None:
    if tls is not None:
        print(f"\n{lan.words(tls)}")
    print(f"\nJoin: {link}\n")
    try:
        import segno
    except ModuleNotFoundError:
        print('(for a QR code: pip install "fleetlearn[qr]")\n')
    else:
        segno.make(link, error="l", micro=False).terminal(compact=True)
    where = "in this machine's browser" if tls is None else "on the phone"
    print(f"Open it {where}. Rounds go on meanwhile. Ctrl-C ends everything.\n", flush=True)


def _watch(paths: Paths, coordinator: Child, devices: Sequence[Child]) -> None:
    """Say how the rounds go, until Ctrl-C. Raises DemoError where a process ends by itself."""
    last, finished = 0, False
    while True:
        try:
            status = read_status(paths.run, since=last + 1)
        except StoreError:  # it is still being made
            time.sleep(0.2)
            continue
        for closed in status.rounds:
            last = closed.number
            print(_line(closed, status.live.get("connected", 0)), flush=True)
        if status.finished is not None and not finished:
            finished = True
            print(
                f"The training is finished: {status.finished}. The page stays until Ctrl-C.",
                flush=True,
            )
        if not coordinator.running:
            raise DemoError(coordinator.last_words())
        for device in devices:
            if device.status not in (None, 0):
                raise DemoError(device.last_words())
        time.sleep(0.2)


def _line(closed: Closed, connected: int) -> str:
    metrics = closed.summary["metrics"]
    measured = ""
    if "accuracy" in metrics:
        figures = f"accuracy {metrics['accuracy']:.1%}, loss {metrics['loss']:.3f}"
        measured = f"; on their own digits, {measured_when(closed.summary)}: {figures}"
    reports = closed.summary["reports"]
    return (
        f"round {closed.number} {closed.outcome} by {reports} devices, {connected} "
        f"connected{measured}"
    )


def _wait_until_it_listens(coordinator: Child, timeout: float = 30.0) -> None:
    """Raises DemoError where it does not."""
    deadline = time.monotonic() + timeout
    while not any("page: http" in line for line in coordinator.new_lines()):
        if not coordinator.running or time.monotonic() > deadline:
            raise DemoError(coordinator.last_words())
        time.sleep(0.02)


def _port(host: str, wanted: int) -> int:
    """Return the port, or one that is free where something listens on it: browsers keep what they
    have by it."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        try:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the coordinator's own
            probe.bind((host, wanted))
        except OSError:
            return free_port()
    return wanted


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    text = "A coordinator with a page on which people draw digits and train together, until Ctrl-C."
    parser = parser_of("demo-web", text)
    add = partial(add_number, parser)
    add("--devices", 4, number(int, 2, 50), "devices that train along, in Python")
    add("--rounds", 400, number(int, 1, 100_000), "rounds")
    add("--gather", 5.0, number(float, 0.1, 3600), "seconds that a round waits for people")
    add("--seed", 0, number(int, 0, 2**31), "of the data's split and of the run")
    add(
        "--port",
        0,
        number(int, 0, 65535),
        f"the coordinator's port; 0: {PORTS[0]}, or one that is free",
    )
    add(
        "--page-port",
        0,
        number(int, 0, 65535),
        f"the page's port; 0: {PORTS[1]}, or one that is free",
    )
    parser.add_argument(
        "--lan",
        nargs="?",
        const="",
        metavar="ADDRESS",
        help=(
            "listen in the local network, with TLS, for phones; ADDRESS: of this machine, where it "
            "has several"
        ),
    )
    parser.add_argument(
        "--page",
        default=BUILT,
        type=Path,
        metavar="DIR",
        help="the built page; default: %(default)s",
    )
    parser.add_argument(
        "--bundle", type=Path, metavar="DIR", help="the digits' bundle; default: it is exported"
    )
    parser.add_argument(
        "--output", default=Path(".demo-web"), type=Path, metavar="DIR", help="default: %(default)s"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
