"""What a split run sends for each device, beside Federated Averaging of the same model.

    python benchmarks/split_bytes.py [--json FILE]

The digits model of ``examples/splitfed.py`` and a wider one are divided behind their first layer.
The messages of a step and of a round are made by the code that makes them in a run, and their
frames are counted; of Federated Averaging the frames with the model and the update. WebSocket and
TCP add a few bytes to each frame, and a task of Federated Averaging has some text. Takes 10 s.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from fleetlearn_device.runtimes.split import Bottom, Top
from fleetlearn_protocol import open_bundle
from fleetlearn_protocol.frames import pack_chunks
from fleetlearn_protocol.vertical.arrays import encode_arrays
from fleetlearn_protocol.vertical.messages import (
    PartyActivations,
    PartyGradients,
    SplitBegin,
    SplitBottom,
    encode_from_party,
    encode_to_party,
)
from torch import nn

from examples import splitfed

BATCH = splitfed.BATCH
WIDTHS = {"32 and 64 units": (32, 64), "32 and 4,096 units": (32, 4096)}
"""Name -> width of the bottom's layer, of the top's."""


class SplitBytes(NamedTuple):
    """Bytes of one device."""

    model: str
    encoding: str
    step: int
    """Both directions, for a step of 32 rows."""
    round: int
    """Both directions, for the bottom, once in a round."""
    fedavg: int
    """Both directions, for a round of Federated Averaging."""

    @property
    def break_even(self) -> float:
        """Steps in a round from which on Federated Averaging sends less."""
        return (self.fedavg - self.round) / self.step


def frames(text: str, content: bytes) -> int:
    """Return the bytes of a message's frames."""
    return len(text.encode()) + sum(len(frame) for frame in pack_chunks(0, content))


def vector_frames(elements: int) -> int:
    """Return the bytes of the frames with a float32 vector."""
    return sum(len(frame) for frame in pack_chunks(0, bytes(4 * elements)))


def measured(folder: Path) -> Iterator[SplitBytes]:
    """Yield a row for each model and encoding."""
    devices, _ = splitfed.tables()
    data = devices["attic"]
    for name, (below, above) in WIDTHS.items():
        splitfed.model = lambda below=below, above=above: nn.Sequential(  # type: ignore[misc]
            nn.Linear(64, below), nn.Tanh(), nn.Linear(below, above), nn.Tanh(),
            nn.Linear(above, 10),
        )  # fmt: skip
        parts = splitfed.export(folder, data)
        bottom = Bottom(open_bundle(parts / "device.bundle"))
        top = Top(open_bundle(parts / "top.bundle"))
        whole = open_bundle(folder / "digits.bundle").manifest.local_size
        x, y = data.x[:BATCH], data.y[:BATCH]
        made = bottom.activations([x])
        found = top.step([made, y], lr=0.1)
        bottom_bytes = bottom.local.astype("<f4").tobytes()
        size = len(bottom_bytes)
        begin = encode_to_party(SplitBegin(100, 10, 140, 14, size, 2**31))
        end = encode_from_party(SplitBottom(100, size, 2**31))
        for encoding in ("float32", "float16"):
            up: list[tuple[str, Any]] = [("activations_device", made), ("y", y)]
            step = 0
            arrays, content = encode_arrays(up, encoding)
            step += frames(encode_from_party(PartyActivations(100, 140, None, arrays)), content)
            arrays, content = encode_arrays([("gradient", found.gradients[0])], encoding)
            message = PartyGradients(100, 140, arrays, float(np.float32(found.loss)))
            step += frames(encode_to_party(message), content)
            once = frames(begin, bottom_bytes) + frames(end, bottom_bytes)
            yield SplitBytes(name, encoding, step, once, 2 * vector_frames(whole))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows there")
    options = parser.parse_args()
    with TemporaryDirectory(prefix="fleetlearn-split-bytes-") as folder:
        rows = list(measured(Path(folder)))
    print("| model | activations as | a step | the bottom, once in a round | a round of FedAvg |")
    print("|---|---|---|---|---|")
    for row in rows:
        print(f"| {row.model} | {row.encoding} | {row.step:,} | {row.round:,} | {row.fedavg:,} |")
    for row in rows:
        print(f"{row.model}, {row.encoding}: FedAvg sends less from {row.break_even:.1f} steps on")
    if options.json:
        found: list[dict[str, Any]] = [row._asdict() for row in rows]
        options.json.write_text(json.dumps(found, indent=1), "utf-8")


if __name__ == "__main__":
    main()
