"""Write the test vectors: ``python protocol/vectors/make.py [FOLDER]``. README.md says how to read
them.

What is valid and what is refused, and with which code, is said here and in the files beside this
one; the library only gives the bounds of each field. So nothing of its reading decides what its
reading is tested against.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from fleetlearn_protocol.frames import CHUNK_BYTES
from fleetlearn_protocol.vector import checksum, digest
from make_computations import computations
from make_encodings import encodings
from make_learning_rates import learning_rates
from make_manifest import manifest
from make_messages import messages
from make_peers import peers
from make_secure import secure
from make_signing import signing
from make_vertical import vertical


def frames() -> dict[str, Any]:
    def valid(
        name: str, header: str, pieces: list[list[Any]], transfer: int, offset: int
    ) -> dict[str, Any]:
        return {
            "name": name,
            "transfer": transfer,
            "offset": offset,
            "header": header,
            "payload": pieces,
        }

    def invalid(name: str, pieces: list[list[Any]], code: str) -> dict[str, Any]:
        return {"name": name, "frame": pieces, "code": code}

    header = "01000000010000000000000000000000"
    return {
        "valid": [
            valid("one byte", header, [["ff", 1]], 1, 0),
            valid("two float32, 1 and -2", header, [["0000803f000000c0", 1]], 1, 0),
            valid(
                "each byte of the header",
                "01000000040302010800000000000000",
                [["00", 4]],
                0x01020304,
                8,
            ),
            valid(
                "the last transfer number",
                "01000000ffffffff0000000000000000",
                [["00", 4]],
                2**32 - 1,
                0,
            ),
            valid(
                "an offset above 2^32",
                "01000000010000000000020001000000",
                [["00", 4]],
                1,
                2**32 + 131072,
            ),
            valid("a full chunk", header, [["ab", CHUNK_BYTES]], 1, 0),
        ],
        "invalid": [
            invalid("nothing", [], "bad-frame"),
            invalid("half a header", [[header[:16], 1]], "bad-frame"),
            invalid("no payload", [[header, 1]], "bad-frame"),
            invalid("kind 0", [["00" + header[2:] + "ff", 1]], "bad-frame"),
            invalid("kind 2", [["02" + header[2:] + "ff", 1]], "bad-frame"),
            invalid("flags", [["0101" + header[4:] + "ff", 1]], "bad-frame"),
            invalid("reserved", [["01000001" + header[8:] + "ff", 1]], "bad-frame"),
            invalid("reserved, its low byte", [["01000100" + header[8:] + "ff", 1]], "bad-frame"),
            invalid("text", [[b'{"type":"heartbeat"}'.hex(), 1]], "bad-frame"),
            invalid("one byte too many", [[header, 1], ["ab", CHUNK_BYTES + 1]], "too-large"),
        ],
    }


def vector() -> dict[str, Any]:
    model = np.array(
        [1, -2.5, 0.1, 3, 1e-45, -0.0, 3.4028234663852886e38, 0.5, -1.17549435e-38, 7], "<f4"
    )
    trained = np.array([1.5, -2.5, 0.2, 2, 0, 0, 3e38, 0.25, 0, 7], "<f4")
    update = trained - model
    update[7:] = 0  # a buffer: its values travel as they are
    table = [
        {"name": "w", "shape": [2, 3], "offset": 0},
        {"name": "scale", "shape": [], "offset": 6},
        {"name": "b", "shape": [3], "offset": 7, "buffer": True},
    ]

    def vector_of(values: np.ndarray[Any, np.dtype[np.float32]]) -> dict[str, Any]:
        return {"hex": values.tobytes().hex(), "sha256": digest(values), "crc32": checksum(values)}

    def bits(*words: int) -> str:
        return np.array(words, "<u4").tobytes().hex()

    return {
        "encoding": "float32",
        "table": table,
        "tensors": {
            "w": model[:6].reshape(2, 3).tolist(),
            "scale": float(model[6]),
            "b": model[7:].tolist(),
        },
        "model": vector_of(model),
        "trained": vector_of(trained),
        "update": vector_of(update),
        "buffers": vector_of(trained[7:]),
        "invalid": [
            {
                "name": "NaN",
                "hex": bits(0x3F800000, 0x7FC00000),
                "elements": 2,
                "code": "not-finite",
            },
            {
                "name": "a signalling NaN",
                "hex": bits(0x7F800001),
                "elements": 1,
                "code": "not-finite",
            },
            {
                "name": "a negative NaN",
                "hex": bits(0xFFFFFFFF),
                "elements": 1,
                "code": "not-finite",
            },
            {"name": "infinity", "hex": bits(0x7F800000, 0), "elements": 2, "code": "not-finite"},
            {
                "name": "-infinity",
                "hex": bits(0, 0, 0xFF800000),
                "elements": 3,
                "code": "not-finite",
            },
            {"name": "three bytes", "hex": "00803f", "elements": 1, "code": "wrong-length"},
            {"name": "five bytes", "hex": "0000803f00", "elements": 1, "code": "wrong-length"},
            {"name": "an element too few", "hex": bits(0), "elements": 2, "code": "wrong-length"},
            {
                "name": "an element too many",
                "hex": bits(0, 0),
                "elements": 1,
                "code": "wrong-length",
            },
            {"name": "empty", "hex": "", "elements": 1, "code": "wrong-length"},
        ],
    }


def lines(made: dict[str, Any]) -> str:
    """JSON with a line for each case. ASCII, so that every odd character shows."""
    rows = []
    for key, value in made.items():
        inner = (
            ",\n".join(f"  {json.dumps(case)}" for case in value)
            if isinstance(value, list)
            else None
        )
        rows.append(
            f" {json.dumps(key)}: " + (json.dumps(value) if inner is None else f"[\n{inner}\n ]")
        )
    return "{\n" + ",\n".join(rows) + "\n}\n"


def main(folder: Path) -> None:
    for make in (
        messages,
        frames,
        vector,
        encodings,
        manifest,
        signing,
        secure,
        peers,
        computations,
        vertical,
        learning_rates,
    ):
        (folder / f"{make.__name__}.json").write_text(lines(make()), encoding="ascii")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
