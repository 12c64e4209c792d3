"""The vectors of computations, as another SDK would read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleetlearn_protocol.computations.layout import Layout, StateField
from fleetlearn_protocol.computations.private_sums import SumsGroup, clip_sums, is_short
from fleetlearn_protocol.encodings import INT64, MASKED64, word_bytes
from fleetlearn_protocol.formats.masked import words_from_bytes, words_to_bytes
from fleetlearn_protocol.formats.whole import sums_from_bytes, sums_to_bytes
from fleetlearn_protocol.secure.whole_words import largest_sum, sums_to_words, words_to_sums

VECTORS: dict[str, Any] = json.loads(
    (Path(__file__).parents[3] / "protocol" / "vectors" / "computations.json").read_text("ascii")
)


@pytest.mark.parametrize("case", VECTORS["elements"])
def test_64_bits(case: dict[str, Any]) -> None:
    layout = Layout(StateField("x", (), "float64"))
    bits = np.array(int(case["bits"], 16), np.uint64)
    assert layout.pack({"x": bits.view(np.float64)}).tolist() == case["elements"]
    vector = np.array(case["elements"], np.float32)
    assert layout.unpack(vector)["x"].view(np.uint64) == bits


def test_whole_numbers_as_bytes() -> None:
    case = VECTORS["int64"]
    sums = np.array(case["sums"], np.int64)
    content = sums_to_bytes(sums)
    assert content.hex() == case["hex"]
    assert sums_from_bytes(content).tolist() == case["sums"]
    assert INT64.size(len(sums)) == content.nbytes
    assert INT64.check(content) == 2.0**62
    assert INT64.check(sums_to_bytes(np.array([-(2**63)], np.int64))) == 2.0**63
    sent = [sums_to_bytes(np.array(row, np.int64)) for row in ([7, 0, 9, 0, 0], [0, 0], [3])]
    assert [sums_from_bytes(each).tolist() for each in sent] == [[7, 0, 9], [0], [3]]
    assert sums_from_bytes(sent[0], 5).tolist() == [7, 0, 9, 0, 0]
    for wrong in (content[:-1], content[:5]):
        with pytest.raises(Exception, match="each sum takes 8"):
            sums_from_bytes(wrong)
    for refused in (lambda: INT64.encode(np.zeros(2, np.float32)), lambda: INT64.decode(content)):
        with pytest.raises(Exception, match="floats were"):
            refused()


def test_sums_as_words_that_are_masked() -> None:
    case = VECTORS["masked64"]
    words = sums_to_words(np.array(case["sums"], np.int64))
    content = words_to_bytes(words)
    assert content.hex() == case["words"]
    assert (content.nbytes, MASKED64.check(content)) == (MASKED64.size(len(case["sums"])), 0.0)
    added = words_from_bytes(bytes.fromhex(case["added"]), word_bytes(MASKED64))
    largest = largest_sum(case["reports"])
    assert words_to_sums(added, case["reports"], largest).tolist() == case["total"]


def test_clipped_sums() -> None:
    """Each is within one step: the order of floating-point sums is a device's own."""
    told = VECTORS["clipped"]
    groups = [
        SumsGroup(np.array(group["places"]), group["bound"], group["ordered"])
        for group in told["groups"]
    ]
    lengths = []
    for case in told["cases"]:
        found = clip_sums(np.array(case["sums"]), groups, case["clip"])
        np.testing.assert_allclose(found.sums, case["sent"], atol=1, rtol=0)
        lengths.append((is_short(found.sums), found.clipped))
    assert lengths == [(True, False), (True, False), (True, True)]
