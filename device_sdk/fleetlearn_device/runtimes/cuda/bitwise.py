"""Bitwise operators in arithmetic, for ONNX Runtime's CUDA provider (1.31), which has none.

What is rewritten is known by its form alone, whoever made the graph:

- ``x & (2^k - 1)`` is the remainder of a division by 2^k.
- ``x & -2^k`` is x without that remainder.
- ``x ^ y`` of numbers that are known to be from 0 to 2^36 - 1 is looked up in a table, PIECE bits
  of both at a time. Such numbers are constants, the input ``seed``, what a mask or an exclusive or
  left,
  and any of these shifted right: a product with 2^-k in float64, rounded down.

Other bitwise operators stay. The random numbers of the bundles that fleetlearn exports, hashes of
32-bit words, need no others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import frexp
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetlearn_device.runtimes.cuda.encoding import Node, constant, node

PIECE = 9
"""Bits of an operand that are looked up at a time: the table has 2^18 integers (2 MiB)."""
MOST_BITS = 4 * PIECE
"""Operands of an exclusive or have at most this many bits."""
EXACT_BITS = 53
"""float64 has integers below 2^53 without rounding. And every runtime checks that the seed is below
2^53."""
DOUBLE, INT64 = 11, 7
"""TensorProto's data types."""


class BitwiseRewriter:
    """Rewrites the bitwise operators of one graph, whose nodes it is given in their order."""

    def __init__(self, constants: Mapping[str, NDArray[Any]], prefix: str, seeded: bool) -> None:
        """``prefix``: begins the names of new constants. A graph in a graph needs another one.
        ``seeded``: whether the graph has an input ``seed``."""
        self._constants, self._prefix = constants, prefix
        self._bits = {"seed": EXACT_BITS} if seeded else {}
        """Values that are known to be from 0 to 2^bits - 1."""
        for name, values in constants.items():
            if values.dtype == np.int64 and values.size and values.min() >= 0:
                self._bits[name] = int(values.max()).bit_length()
        self._doubles: dict[str, int] = {}
        """Values in float64 that, rounded down to integers, are from 0 to 2^bits - 1."""
        self._used: dict[str, NDArray[Any]] = {}
        """Constants that the new nodes read."""

    def constants(self) -> bytes:
        """Return nodes that give what the new nodes read."""
        return b"".join(constant(name, values) for name, values in self._used.items())

    def rewritten(self, operation: Node) -> bytes | None:
        """Return the nodes in an operation's place; None if it stays."""
        if operation.operator == "BitwiseAnd":
            return self._and(operation)
        if operation.operator == "BitwiseXor":
            return self._xor(operation)
        if operation.operator == "Cast" and operation.integer("to", 0) == DOUBLE:
            bits = self._bits.get(operation.inputs[0], EXACT_BITS + 1)
            if bits <= EXACT_BITS:
                self._doubles[operation.outputs[0]] = bits
        elif (
            operation.operator == "Cast"
            and operation.integer("to", 0) == INT64
            and operation.inputs[0] in self._doubles
        ):
            self._bits[operation.outputs[0]] = self._doubles[operation.inputs[0]]
        elif operation.operator == "Mul":
            self._follow_shift(operation)
        return None

    def _follow_shift(self, operation: Node) -> None:
        for value, factor in (operation.inputs, operation.inputs[::-1]):
            values = self._constants.get(factor)
            if (
                value in self._doubles
                and values is not None
                and values.size == 1
                and values.dtype == np.float64
            ):
                fraction, exponent = frexp(values.item())
                if fraction == 0.5 and exponent <= 1:  # 2^(exponent - 1)
                    self._doubles[operation.outputs[0]] = max(
                        0, self._doubles[value] + exponent - 1
                    )

    def _and(self, operation: Node) -> bytes | None:
        for value, mask in (operation.inputs, operation.inputs[::-1]):
            values = self._constants.get(mask)
            if values is None or values.ndim or values.dtype not in (np.int64, np.int32):
                continue
            ones, (result,) = int(values.item()), operation.outputs
            bits = (ones if ones >= 0 else -ones - 1).bit_length()
            if bits >= 8 * values.itemsize - 1:
                continue
            if ones == 2**bits - 1:
                if values.dtype == np.int64:
                    self._bits[result] = bits
                # Of a negative number too: Mod's result has the sign of the divisor.
                return node("Mod", [value, self._constant(2**bits, values.dtype)], [result])
            if ones == -(2**bits):
                low = f"{result}.low"
                remainder = node("Mod", [value, self._constant(2**bits, values.dtype)], [low])
                return remainder + node("Sub", [value, low], [result])
        return None

    def _xor(self, operation: Node) -> bytes | None:
        bits = [self._bits.get(name, MOST_BITS + 1) for name in operation.inputs]
        if max(bits) > MOST_BITS:
            return None
        (result,) = operation.outputs
        self._bits[result] = max(bits)
        wide, narrow = sorted(operation.inputs, key=lambda name: -self._bits[name])
        return b"".join(self._exclusive_or(wide, narrow, result, max(bits), min(bits)))

    def _exclusive_or(
        self, wide: str, narrow: str, result: str, more: int, bits: int
    ) -> Iterator[bytes]:
        """Yield nodes for ``wide ^ narrow``, which have at most ``more`` and ``bits`` bits."""
        inner = f"{result}.{bits}."
        if more > bits:
            yield from self._with_high_bits(wide, narrow, result, bits, inner)
        elif bits > PIECE:
            yield from self._in_two_parts(wide, narrow, result, bits, inner)
        else:
            yield from self._from_table(wide, narrow, result, inner)

    def _with_high_bits(
        self, wide: str, narrow: str, result: str, bits: int, inner: str
    ) -> Iterator[bytes]:
        """``narrow`` ends before ``wide``: the highest bits of ``wide`` stay as they are."""
        low, high, xored = inner + "low", inner + "high", inner + "xored"
        yield node("Mod", [wide, self._constant(2**bits)], [low])
        yield node("Sub", [wide, low], [high])
        yield from self._exclusive_or(low, narrow, xored, bits, bits)
        yield node("Add", [high, xored], [result])

    def _in_two_parts(
        self, wide: str, narrow: str, result: str, bits: int, inner: str
    ) -> Iterator[bytes]:
        """Both have too many bits for the table: their low and their high bits are worked apart."""
        part = PIECE * (2 if bits > 2 * PIECE else 1)
        unit, low, high, above = (
            self._constant(2**part),
            inner + "low",
            inner + "high",
            inner + "above",
        )
        for name, value in (("wide", wide), ("narrow", narrow)):
            yield node("Mod", [value, unit], [f"{low}.{name}"])
            yield node("Div", [value, unit], [f"{high}.{name}"])
        yield from self._exclusive_or(f"{low}.wide", f"{low}.narrow", low, part, part)
        yield from self._exclusive_or(
            f"{high}.wide", f"{high}.narrow", high, bits - part, bits - part
        )
        yield node("Mul", [high, unit], [above])
        yield node("Add", [above, low], [result])

    def _from_table(self, wide: str, narrow: str, result: str, inner: str) -> Iterator[bytes]:
        """The table has the results in rows: ``wide`` says which row, ``narrow`` where in the
        row."""
        row, place = inner + "row", inner + "place"
        yield node("Mul", [wide, self._constant(2**PIECE)], [row])
        yield node("Add", [row, narrow], [place])
        yield node("Gather", [self._table(), place], [result])

    def _constant(self, value: int, dtype: Any = np.int64) -> str:
        name = f"{self._prefix}.{np.dtype(dtype)}.{value}"
        self._used[name] = np.array(value, dtype)
        return name

    def _table(self) -> str:
        name, row = f"{self._prefix}.xor", np.arange(2**PIECE, dtype=np.int64)
        if name not in self._used:
            self._used[name] = (row[:, None] ^ row).reshape(-1)
        return name
