"""Checks for the authors of own encodings, to be called from pytest.

from fleetlearn_protocol.testing import check_encoding

def test_my_format() -> None:
    check_encoding(signs(), error=0.9)
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator

import numpy as np

from fleetlearn_protocol.encodings import Encoding
from fleetlearn_protocol.errors import ProtocolError
from fleetlearn_protocol.extensions import ExtensionError
from fleetlearn_protocol.own_encodings import BlockFormat, guarded
from fleetlearn_protocol.vector import Vector

SEEDS = 400
"""Seeds whose mean shows whether what is decoded is right on average."""
DEVIATIONS = 6.0
"""Standard deviations of that mean which chance may make."""
MEMORY = 64
"""How many times as much as the vector itself takes ``decode`` may need."""


def check_encoding(made: BlockFormat, *, error: float = 1.0, unbiased: bool = False) -> None:
    """Raise AssertionError where an own encoding does not do what fleetlearn expects of it.

    error: the greatest share of a block's L2 norm that may be lost between ``encode`` and
    ``decode``, for blocks of ordinary numbers; below 1 where devices keep the residual, which else
    grows without end. unbiased: check too that what is decoded is right on average over seeds.

    Checked are the block and its sizes; types and shapes, also of a shorter last block; that the
    same vector and seed give the same bytes, whatever was encoded before; that ``encode`` leaves
    the vector as it is; that each block is decoded by itself, alone or among others; and that any
    bytes are decoded to finite numbers or refused, in bounded memory.
    """
    try:
        encoding = guarded(made, "own", "the encoding")
        for what, vector in _vectors(made.block):
            _check_vector(encoding, what, vector, error)
        _check_any_bytes(encoding)
        if unbiased:
            _check_mean(encoding)
    except ExtensionError as found:
        raise AssertionError(str(found)) from found


def _vectors(block: int) -> Iterator[tuple[str, Vector]]:
    random = np.random.default_rng(1)
    for length in {1, block - 1, block, block + 1, 3 * block, 9 * block + (block + 1) // 2} - {0}:
        normal = random.standard_normal(length).astype(np.float32)
        yield f"{length} normal numbers", normal
        yield f"{length} zeros", np.zeros(length, np.float32)
        yield f"{length} equal numbers", np.full(length, -0.125, np.float32)
        yield f"{length} numbers, one of them large", _with_one(normal, np.float32(1000.0))
        small = np.float32(0.1) ** random.integers(0, 4, length).astype(np.float32)
        yield f"{length} numbers of four magnitudes", normal * small


def _with_one(vector: Vector, value: np.float32) -> Vector:
    changed = vector.copy()
    changed[len(vector) // 2] = value
    return changed


def _check_vector(encoding: Encoding, what: str, vector: Vector, error: float) -> None:
    try:
        content = bytes(encoding.encode(vector, seed=3))
        encoding.encode(-vector, seed=4)
        again = bytes(encoding.encode(vector, seed=3))
        found = encoding.decode(content, len(vector)).copy()
        largest = encoding.check(content, len(vector))
        encoding.decode(bytes(encoding.encode(-vector, seed=4)), len(vector))
    except ProtocolError as refused:
        raise AssertionError(f"{what}: {refused.text}") from refused
    assert content == again, (
        f"{what}: the same vector and seed gave other bytes. A device that dies encodes again: "
        "what is random is drawn from `fractions`, and nothing is kept"
    )
    assert largest == np.abs(found).max(initial=0.0), f"{what}: decode gave others when asked again"
    _check_blocks(encoding, what, content, found)
    for start in range(0, len(vector), encoding.block):
        place = slice(start, start + encoding.block)
        lost = float(np.linalg.norm(found[place].astype(np.float64) - vector[place]))
        norm = float(np.linalg.norm(vector[place].astype(np.float64)))
        assert lost <= error * norm * (1 + 1e-6) + 1e-12, (
            f"{what}: the block from element {start} loses {lost:g} of its norm {norm:g}; at most "
            f"{error:g} of it may be lost"
        )


def _check_blocks(encoding: Encoding, what: str, content: bytes, found: Vector) -> None:
    """Check that blocks are decoded one by one as together: updates are read in pieces."""
    starts = range(0, len(found), encoding.block)
    for start in reversed(starts):
        count = min(encoding.block, len(found) - start)
        begin = encoding.size(start)
        alone = encoding.decode(content[begin : begin + encoding.size(count)], count)
        assert np.array_equal(alone, found[start : start + count]), (
            f"{what}: the block from element {start} is decoded to other numbers alone than among "
            "others"
        )


def _check_any_bytes(encoding: Encoding) -> None:
    random = np.random.default_rng(2)
    block = encoding.block
    for elements in {1, block, 5 * block + (block + 1) // 2}:
        vector = random.standard_normal(elements).astype(np.float32)
        good = np.frombuffer(encoding.encode(vector, seed=1), np.uint8)
        size = good.size
        tried = [np.full(size, value, np.uint8) for value in (0, 1, 127, 128, 255)]
        tried += [random.integers(0, 256, size, np.uint8) for _ in range(20)]
        for _ in range(20):
            flipped = good.copy()
            flipped[random.integers(size)] ^= np.uint8(1 << random.integers(8))
            tried.append(flipped)
        for content in tried:
            _check_decoded(encoding, content.tobytes(), elements)


def _check_decoded(encoding: Encoding, content: bytes, elements: int) -> None:
    """Check what any bytes become, which ``guarded`` has found to be finite floats, or refused."""
    tracemalloc.start()
    try:
        first = encoding.decode(content, elements).tobytes()
        again = encoding.decode(content, elements).tobytes()
    except ProtocolError:  # it is refused
        first = again = b""
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert first == again, "decode gave other numbers when it was asked again for the same bytes"
    most = MEMORY * 4 * elements + 2**20
    assert peak <= most, (
        f"decode took {peak} bytes of memory for {elements} elements; at most {most} are expected, "
        "whatever the bytes are"
    )


def _check_mean(encoding: Encoding) -> None:
    elements = max(2 * encoding.block, 1024)
    vector = np.random.default_rng(5).standard_normal(elements).astype(np.float32)
    directions = np.stack([np.ones(elements), np.sign(vector)]) / elements
    total, squares, towards = np.zeros(elements), np.zeros(elements), np.zeros((SEEDS, 2))
    for seed in range(SEEDS):
        found = encoding.decode(encoding.encode(vector, seed), elements).astype(np.float64) - vector
        total += found
        squares += found**2
        towards[seed] = directions @ found
    # All elements together, as they are and away from 0: a bias of each may be small.
    slack = 1e-3 * float(np.abs(vector).mean())
    chance = DEVIATIONS * towards.std(axis=0) / np.sqrt(SEEDS) + slack
    for what, moved, most in zip(("up", "away from 0"), towards.mean(axis=0), chance, strict=True):
        assert abs(moved) <= most, (
            f"over {SEEDS} seeds, elements are decoded {moved:g} too far {what} on average: the "
            "encoding is biased"
        )
    mean = total / SEEDS
    deviation = np.sqrt(np.maximum(squares / SEEDS - mean**2, 0.0) / SEEDS)
    # What hardly ever happens may not have happened in so many seeds.
    excess = np.abs(mean) - DEVIATIONS * deviation - 2e-2 * np.abs(vector).max()
    worst = int(excess.argmax())
    assert excess[worst] <= 0, (
        f"over {SEEDS} seeds, element {worst} = {vector[worst]:g} is decoded to "
        f"{vector[worst] + mean[worst]:g} on average: the encoding is biased"
    )
