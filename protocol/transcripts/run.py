"""Play transcripts to a device: ``python protocol/transcripts/run.py --bundle
BUNDLE -- COMMAND {url} {state}``.

The device is a process that this program starts. The program plays the coordinator's side over a
real WebSocket, and compares what the device says with the transcript. README.md describes the
steps.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from fleetlearn_protocol import open_bundle
from fleetlearn_protocol.errors import FleetError
from fleetlearn_protocol.frames import MAX_FRAME_BYTES
from fleetlearn_protocol.messages import PROTOCOL_NAME
from values import Mismatch, shown
from websockets.asyncio.server import ServerConnection, serve
from websockets.typing import Subprotocol

from coordinator import Coordinator

FOLDER = Path(__file__).parent
SIGNED = FOLDER / "signed.json"
"""For devices that take a key to trust: those whose command has {key}."""
MASKED = FOLDER / "masked.json"
"""For devices that say ``secure`` when they check in: with --masked."""


class Device:
    """The device's process and its state, which several transcripts may share. ``command`` has
    {url} and {state}."""

    def __init__(self, command: list[str], port: int, folder: Path, log: Path) -> None:
        self.command, self.port, self.folder, self.log = command, port, folder, log
        self.states = self.starts = 0
        self.process: subprocess.Popen[bytes] | None = None
        self._keys: dict[str, bytes] = {}

    def start(self) -> str:
        """Start the process. Returns the path of the address that it is given."""
        self.starts += 1
        url, state = (
            f"ws://127.0.0.1:{self.port}/{self.starts}",
            str(self.folder / f"state-{self.states}"),
        )
        command = [part.replace("{url}", url).replace("{state}", state) for part in self.command]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        return f"/{self.starts}"

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        self.process = None

    def public_key(self, command: list[str]) -> bytes:
        """Return the device's own key: the last word that this command prints. It has {state}."""
        state = str(self.folder / f"state-{self.states}")
        if state not in self._keys:
            words = [part.replace("{state}", state) for part in command]
            printed = subprocess.run(words, stdout=subprocess.PIPE, check=True, text=True).stdout
            self._keys[state] = bytes.fromhex(printed.split()[-1])
        return self._keys[state]

    def forget(self) -> None:
        """Go on with another device: a new process, with a new state."""
        self.kill()
        self.states += 1

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None


async def play(transcript: dict[str, Any], coordinator: Coordinator, device: Device) -> str | None:
    """Play a transcript. Returns None, or what was different."""
    if transcript.get("new device") or not device.running:
        device.forget()
        coordinator.leave()
        coordinator.path = device.start()
    coordinator.begin()
    for number, step in enumerate(transcript["steps"], 1):
        try:
            match step:
                case {"kill": _}:
                    device.kill()
                    coordinator.leave()
                case {"start": _}:
                    coordinator.path = device.start()
                case {"stays away": seconds}:
                    await coordinator.expect_no_connection(seconds, lambda: device.running)
                case _:
                    await coordinator.do(step, lambda: device.running)
        except (Mismatch, FleetError) as difference:
            device.forget()
            coordinator.leave()
            return f"step {number}, {shown(step)}\n    {difference}"
    coordinator.leave()
    return None


async def run(options: argparse.Namespace, folder: Path) -> int:
    signer = None
    if any("{key}" in part for part in options.command):
        from signatures import Signer  # needs cryptography

        signer = Signer()
    command = [
        part if signer is None else part.replace("{key}", signer.key) for part in options.command
    ]
    masks = None
    if options.masked:
        from masks import Masks  # needs cryptography

        asked = shlex.split(options.public_key or "")
        masks = Masks((lambda: device.public_key(asked)) if asked else None)
    left_out = {*([] if signer else [SIGNED]), *([] if masks else [MASKED])}
    files = options.file or [path for path in sorted(FOLDER.glob("*.json")) if path not in left_out]
    coordinator = Coordinator(open_bundle(options.bundle), options.patience, signer, masks)

    async def connected(connection: ServerConnection) -> None:
        await coordinator.connected(connection)

    async with serve(
        connected, "127.0.0.1", 0, compression=None, subprotocols=[Subprotocol(PROTOCOL_NAME)],
        max_size=MAX_FRAME_BYTES, close_timeout=1, ping_interval=None,
    ) as server:  # fmt: skip
        port = next(iter(server.sockets)).getsockname()[1]
        device = Device(command, port, folder, options.log or folder / "device.log")
        failed = played = 0
        try:
            for file in files:
                for transcript in json.loads(file.read_text(encoding="utf-8")):
                    if options.only in transcript["name"]:
                        played += 1
                        difference = await play(transcript, coordinator, device)
                        failed += difference is not None
                        print(
                            f"{'ok' if difference is None else 'DIFFERENT':<10} "
                            f"{transcript['name']}",
                            flush=True,
                        )
                        if difference is not None:
                            print(f"    {difference}", flush=True)
        finally:
            device.kill()
            coordinator.leave()
    print(f"{played - failed} of {played} transcripts went as written")
    return 1 if failed or not played else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--bundle", required=True, type=Path, help="the training bundle that the tasks name"
    )
    parser.add_argument(
        "--only",
        default="",
        metavar="WORDS",
        help="the transcripts with these words in their names",
    )
    parser.add_argument(
        "--file",
        action="append",
        type=Path,
        help="a file of transcripts; default: all beside this one",
    )
    parser.add_argument(
        "--masked",
        action="store_true",
        help="the device masks updates (`secure` in its check-in): play masked.json too",
    )
    parser.add_argument(
        "--public-key",
        metavar="COMMAND",
        help="prints the device's own key as its last word, for --masked; {state} is filled in. "
        "Default: its signatures are not checked",
    )
    parser.add_argument(
        "--patience", default=30.0, type=float, help="seconds to wait for the device; default: 30"
    )
    parser.add_argument(
        "--log", type=Path, help="file for what the device prints; default: it is not kept"
    )
    parser.add_argument(
        "command", nargs="+", help="starts the device; {url}, {state} and {key} are filled in"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(run(options, Path(folder)))


if __name__ == "__main__":
    sys.exit(main())
