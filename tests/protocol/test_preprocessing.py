"""What a file of preprocessing may say, and what is said of one that is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fleetlearn_protocol.preprocessing import (
    ChannelsFirst,
    Index,
    Preparation,
    Preprocessing,
    Resampling,
    Standardise,
    Windowing,
    contradiction,
    read_preprocessing,
)

TOML = """
streams = "recording"

[resample]
time = "t"
rate = 50

[windows]
length = 128
hop = 64

[arrays.x]
columns = ["ax", "ay", "az"]
steps = [
  {op = "standardise", mean = [0.1, 0.2, 9.7], std = 2.5},
  {op = "channels_first"},
]

[arrays.y]
columns = "activity"
label = "majority"
steps = [{op = "index", values = ["rest", "walk", "run"]}]
"""
MEANT = Preprocessing(
    arrays={
        "x": Preparation(
            ("ax", "ay", "az"), steps=(Standardise((0.1, 0.2, 9.7), 2.5), ChannelsFirst())
        ),
        "y": Preparation("activity", "majority", (Index(("rest", "walk", "run")),)),
    },
    resample=Resampling("t", 50.0),
    windows=Windowing(128, 64),
    streams="recording",
)


def test_a_toml_file_a_json_file_a_dict_and_the_objects_say_the_same(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(TOML)
    assert read_preprocessing(tmp_path / "a.toml") == MEANT
    raw = msgspec.to_builtins(MEANT)
    (tmp_path / "a.json").write_text(json.dumps(raw))
    assert read_preprocessing(str(tmp_path / "a.json")) == MEANT
    assert read_preprocessing(raw) == MEANT
    assert read_preprocessing(MEANT) is MEANT
    assert MEANT.raw == ("ax", "ay", "az", "activity", "t", "recording")
    assert Preprocessing({"x": Preparation("a")}).raw == ("a",)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.toml", None, "a.toml cannot be read: "),
        ("a.toml", b"[arrays", "a.toml: Expected ']'"),
        ("a.toml", b"\xff", "a.toml: "),
        ("a.json", b"{", "a.json: "),
        ("a.json", b"{}", "a.json: Object missing required field `arrays`"),
        ("a.toml", b"code = 'os.system'", "Object contains unknown field `code`"),
        ("a.toml", b"[arrays.x]\ncolumns='a'\nsteps=[{op='eval'}]", "Invalid value 'eval'"),
    ],
)
def test_a_file_that_is_none(name: str, content: bytes | None, words: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError) as caught:
        read_preprocessing(tmp_path / name)
    assert words in str(caught.value)


def of_x(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"arrays": {"x": {"columns": "x", "steps": steps}}}


@pytest.mark.parametrize(
    ("told", "words"),
    [
        (of_x({"op": "clip", "low": 2, "high": 1}), "array x: clip has low 2.0 above high 1.0"),
        (of_x({"op": "index", "values": ["a", 1]}), "index has both texts and numbers"),
        (of_x({"op": "index", "values": [1, 1]}), "index has a value twice"),
        (of_x({"op": "standardise", "mean": 0, "std": 0}), "standardise has a std of 0"),
        (
            of_x({"op": "standardise", "mean": [1, 2], "std": [1, 2, 3]}),
            "standardise has 2 means and 3 stds",
        ),
        (
            {"arrays": {"y": {"columns": "y", "label": "last"}}},
            "array y has a label for each window, and there are no windows",
        ),
    ],
)
def test_what_contradicts_itself(told: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match="the preprocessing contradicts itself: ") as caught:
        read_preprocessing(told)
    assert words in str(caught.value)


def test_one_number_goes_with_several() -> None:
    for mean, std in ((1.0, (1.0, 2.0)), ((1.0, 2.0), 3.0), ((1.0, 2.0), (3.0, 4.0))):
        steps = (Standardise(mean, std), Index((1, 2)))
        assert contradiction(Preprocessing({"x": Preparation("x", steps=steps)})) is None
