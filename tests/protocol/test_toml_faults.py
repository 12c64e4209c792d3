"""Mistakes in files that people write are named in their words."""

from __future__ import annotations

import msgspec
import pytest
from fleetlearn_device.peers.book import PeerBook
from fleetlearn_protocol.computations.boosting_settings import BoostedTrees
from fleetlearn_protocol.toml_faults import fault_in_words

TREES = {"columns": [{"name": "a"}]}
BOOK = {"peer": [{"name": "a", "certificate": "c"}, {"name": "b", "certificate": "c"}]}


@pytest.mark.parametrize(
    ("kind", "given_", "begin", "within"),
    [
        (
            BoostedTrees,
            {**TREES, "lable": "y"},
            "lable is not a key; did you mean label? Keys: ",
            "",
        ),
        (BoostedTrees, {}, "the key columns is missing", ""),
        (
            BoostedTrees,
            {**TREES, "loss": "logistics"},
            "loss is 'logistics'; expected one of",
            "log",
        ),
        (BoostedTrees, {**TREES, "depth": "5"}, "depth is a text; expected a whole number", ""),
        (
            BoostedTrees,
            {"columns": [{"nam": "a"}]},
            "nam is not a key in columns[0]; did you",
            "name",
        ),
        (PeerBook, {**BOOK, "topology": {"kind": "rnig"}}, "topology.kind is 'rnig'; ", "torus"),
        (
            PeerBook,
            {**BOOK, "training": {"epoch": 1}},
            "epoch is not a key in training; did",
            "epochs",
        ),
        (PeerBook, {**BOOK, "deadline": 0}, "deadline: expected a number >= 1e-30", ""),
    ],
)
def test_a_fault_names_the_key_and_what_is_expected(
    kind: type, given_: dict[str, object], begin: str, within: str
) -> None:
    if kind is BoostedTrees:
        given_ = {"kind": "boosted-trees", **given_}
    with pytest.raises(msgspec.ValidationError) as refused:
        msgspec.convert(given_, kind)
    text = fault_in_words(refused.value, kind)
    assert text.startswith(begin)
    assert within in text
