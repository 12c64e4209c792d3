"""Writing TOML: what is written is read back as it was."""

import tomllib
from typing import Any

from fleetlearn_simulator.scenario import toml
from hypothesis import given, settings
from hypothesis import strategies as st

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
SCALARS = (
    TEXT
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
)
INLINE = st.recursive(
    SCALARS, lambda inner: st.lists(inner, min_size=1) | st.dictionaries(TEXT, inner, min_size=1)
)
LISTS = st.lists(INLINE, min_size=1, max_size=4)
TABLES = st.recursive(
    st.dictionaries(TEXT, SCALARS | LISTS, min_size=1, max_size=4),
    lambda inner: st.dictionaries(TEXT, SCALARS | LISTS | inner, min_size=1, max_size=4),
    max_leaves=8,
)


@settings(max_examples=40, deadline=None)
@given(TABLES)
def test_what_is_written_is_read_back(tables: dict[str, Any]) -> None:
    assert tomllib.loads(toml.dump(tables)) == tables


def test_what_is_empty_is_left_out() -> None:
    tables = {
        "empty": {},
        "deep": {
            "none": None,
            "er": {"list": [1, {"a": 2.5, "b": None}], "nothing": [], "est": {"none": None}},
        },
        "name": 'a "b"',
        "x y": True,
    }
    expected = {"deep": {"er": {"list": [1, {"a": 2.5}]}}, "name": 'a "b"', "x y": True}
    assert tomllib.loads(toml.dump(tables)) == expected
