"""vectors/vertical.json, read as another SDK reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fleetlearn_protocol.errors import ProtocolError
from fleetlearn_protocol.vertical.alignment import digest_of, hash_rows, hashes_as_bytes
from fleetlearn_protocol.vertical.messages import decode_from_party, decode_to_party
from fleetlearn_protocol.vertical.schedule import order_of_epoch, seed_of_step

FILE = Path(__file__).parents[3] / "protocol" / "vectors" / "vertical.json"
VECTORS: dict[str, Any] = json.loads(FILE.read_text("ascii"))
READ = {"from-party": decode_from_party, "to-party": decode_to_party}


@pytest.mark.parametrize("case", VECTORS["valid"], ids=lambda case: case["name"])
def test_valid_messages_are_read(case: Any) -> None:
    message = READ[case["direction"]](case["text"])
    assert json.loads(msgspec.json.encode(message)) == case["read"]


@pytest.mark.parametrize("case", VECTORS["invalid"], ids=lambda case: case["name"])
def test_invalid_messages_are_refused(case: Any) -> None:
    with pytest.raises(ProtocolError, match=case["code"]):
        READ[case["direction"]](case["text"])


def test_hashes_orders_and_seeds() -> None:
    hashes = hash_rows([row["id"] for row in VECTORS["hashes"]], VECTORS["key"].encode())
    assert hashes_as_bytes(hashes).hex() == "".join(row["hash"] for row in VECTORS["hashes"])
    assert digest_of(hashes) == VECTORS["digest"]
    for case in VECTORS["orders"]:
        order = order_of_epoch(case["rows"], case["seed"], case["epoch"])
        assert order.tolist() == case["order"]
    for case in VECTORS["seeds"]:
        assert seed_of_step(case["step"], case["seed"], case["part"]) == case["drawn"]
