"""Peers' messages: the vectors, as another SDK reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from fleetlearn_device.peers.book import PeerBook, PeerEntry, PeerGraph
from fleetlearn_device.peers.topologies import Topology
from fleetlearn_protocol.errors import ProtocolError
from fleetlearn_protocol.peer_messages import (
    PeerRefusal,
    PeerVote,
    decode_from_peer,
    encode_for_peer,
)

VECTORS: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "protocol" / "vectors" / "peers.json").read_text("ascii")
)


def test_valid_messages() -> None:
    for case in VECTORS["valid"]:
        message = decode_from_peer(case["text"])
        fields = case.get("fields") or json.loads(case["text"])
        assert msgspec.to_builtins(message) == fields, case["name"]
        assert json.loads(encode_for_peer(message)) == fields, case["name"]


def test_refused_messages() -> None:
    for case in VECTORS["invalid"]:
        text = case.get("text") or "".join(piece * times for piece, times in case["pieces"])
        with pytest.raises(ProtocolError) as refused:
            decode_from_peer(text)
        assert refused.value.code == case["code"], case["name"]


def test_what_is_no_json_is_not_sent() -> None:
    with pytest.raises(ProtocolError, match="PeerRefusal cannot be sent"):
        encode_for_peer(PeerRefusal("name", "\ud800"))


def test_what_the_other_side_would_refuse_is_not_sent() -> None:
    with pytest.raises(ProtocolError, match="peer-vote does not fit the protocol"):
        encode_for_peer(PeerVote(0, have=True))


@pytest.mark.parametrize("case", VECTORS["topologies"], ids=lambda case: case["topology"])
def test_digests_of_topologies(case: dict[str, Any]) -> None:
    entries = tuple(PeerEntry(name, "") for name in case["peers"])
    graph = PeerGraph(PeerBook(entries, topology=Topology(case["topology"])))
    assert graph.digest() == case["digest"]


@pytest.mark.parametrize("case", VECTORS["differences"], ids=lambda case: case["weight"])
def test_differences_are_each_others_negatives(case: dict[str, Any]) -> None:
    own, theirs, difference = (
        np.frombuffer(bytes.fromhex(case[name]), np.float32)
        for name in ("own", "theirs", "difference")
    )
    weight = np.float32(case["weight"])
    assert (weight * (theirs - own)).tobytes() == difference.tobytes()
    assert (weight * (own - theirs)).tobytes() == (-difference).tobytes()
