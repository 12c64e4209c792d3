"""Values at a field's bounds and just beyond them. Which they are is read off the field's type."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

from fleetlearn_protocol import messages as m
from fleetlearn_protocol.errors import Code
from fleetlearn_protocol.secure import pairwise_messages as pairwise
from msgspec import inspect as types


def pattern(alias: Any) -> str:
    kind = types.type_info(alias)
    assert isinstance(kind, types.StrType)
    assert kind.pattern is not None
    return kind.pattern


IDENTIFIER, DIGEST, NAME = pattern(m.Identifier), pattern(m.Digest), pattern(m.Name)
BYTES32, BYTES64, BYTES80 = map(pattern, (m.Bytes32, m.Bytes64, m.Bytes80))
KEYS = pattern(pairwise.NeighbourKeys)
URL = pattern(m.Url)
FUNCTION = pattern(m.FunctionName)
SEALED, SHARE = pattern(m.Bytes82), pattern(pairwise.SecretShare)
FITS = {
    IDENTIFIER: ["0", "A._-" * 16],
    DIGEST: ["0123456789abcdef" * 4],
    NAME: ["_", "a.-_" * 32],
    BYTES32: ["0123456789abcdef" * 4],
    BYTES64: ["0123456789abcdef" * 8],
    BYTES80: ["0123456789abcdef" * 10],
    KEYS: ["0123456789abcdef" * 8, "0123456789abcdef" * 16],
    FUNCTION: ["_", "a.-_" * 25 + ":" + "b_" * 50],
    SEALED: ["01" * 82],
    SHARE: ["01" * 33],
    URL: ["http://h", "https://" + "~" * 4088],
}
DOES_NOT_FIT = {
    IDENTIFIER: [
        "",
        "-a",
        ".",
        "..",
        "a" * 65,
        "a b",
        "a/b",
        "a\n",
        "a\x00",
        "é",
        "a\u0661",
        "\u212a",
    ],
    DIGEST: ["", "0" * 63, "0" * 65, "A" * 64, "g" * 64, "0" * 64 + "\n", "\uff10" * 64],
    NAME: ["", "1a", "a b", "a" * 129, "a\n", "é"],
    BYTES32: ["", "0" * 62, "0" * 63, "0" * 66, "A" * 64, "0" * 64 + "\n"],
    BYTES64: ["", "0" * 126, "0" * 127, "0" * 130, "A" * 128, "0" * 128 + "\n"],
    BYTES80: ["", "0" * 158, "0" * 159, "0" * 162, "A" * 160, "0" * 160 + "\n"],
    KEYS: ["", "0" * 126, "0" * 130, "0" * 254, "0" * 384, "A" * 128, "0" * 128 + "\n"],
    FUNCTION: ["", "1a", "a" * 101, "a:", ":a", "a:b:c", "a:b.c", "a b", "a\n", "é"],
    SEALED: ["", "0" * 162, "0" * 163, "0" * 166, "A" * 164, "0" * 164 + "\n"],
    SHARE: ["", "0" * 64, "0" * 65, "0" * 68, "A" * 66, "0" * 66 + "\n"],
    URL: [
        "",
        "https://",
        "ftp://h",
        "http://h h",
        "http://h\n",
        "http://é",
        "https://" + "~" * 4089,
    ],
}


def inside(struct: types.StructType) -> Iterator[tuple[str, dict[str, Any]]]:
    """(what, change) for each field at its bounds."""
    for field in struct.fields:
        for value in allowed(field.type):
            yield f"{field.name} = {short(value)}", {field.name: value}


def outside(struct: types.StructType) -> Iterator[tuple[str, dict[str, Any]]]:
    """(what, change) for each field just beyond its bounds, and of other types."""
    for field in struct.fields:
        for value in forbidden(field.type):
            yield f"{field.name} = {short(value)}", {field.name: value}


def allowed(kind: types.Type) -> list[Any]:
    match kind:
        case types.UnionType(types=several):
            return [value for one in several for value in allowed(one)]
        case types.NoneType():
            return [None]
        case types.BoolType():
            return [False, True]
        case types.IntType(ge=int(low), le=int(high)):
            return [low, high]
        case types.FloatType(ge=low, le=high) if low is not None:
            assert high is not None
            return [float(low), float(high), 5e-324 if low <= 0 else math.nextafter(low, high)]
        case types.StrType(pattern=str(wanted)):
            return FITS[wanted]
        case types.StrType(max_length=int(most)):
            return ["", "x" * most, "a\nb\x00\u2028"]
        case types.LiteralType(values=values):
            return list(values)
        case types.EnumType():
            return [code.value for code in Code]
        case types.DictType(value_type=types.FloatType()):
            return [{}, {f"n{i}": 0.5 for i in range(64)}, {"_": 1e30, "type": -1e30}]
        case types.DictType(value_type=types.AnyType(), max_length=int(most)):
            nested = {"a": [1, {"b": None}], "type": "x", "c": 1.5, "d": True}
            return [{}, nested, {f"n{i}": i for i in range(most)}]
        case types.DictType(
            key_type=key, value_type=types.StrType(pattern=str(wanted)), max_length=int(most)
        ) if wanted != IDENTIFIER:
            fits = FITS[wanted]
            return [{allowed(key)[-1]: fits[-1]}, {f"n{i}": fits[0] for i in range(most)}]
        case types.DictType(key_type=key, value_type=value, max_length=int(most)):
            return [
                dict(zip(allowed(key), allowed(value), strict=True)),
                {f"n{i}": f"e{i}" for i in range(most)},
            ]
        case types.VarTupleType(item_type=item, min_length=least, max_length=int(most)):
            return [[], allowed(item), [allowed(item)[0]] * most][bool(least) :]
        case types.StructType(fields=fields):
            return [{f.name: allowed(f.type)[place] for f in fields} for place in (0, -1)]
    raise TypeError(f"no values are known for {kind}")


def forbidden(kind: types.Type) -> list[Any]:
    match kind:
        case types.UnionType(types=several):
            return [value for one in several for value in forbidden(one) if value is not None]
        case types.NoneType():
            return []
        case types.BoolType():
            return [0, 1, "true", None]
        case types.IntType(ge=int(low), le=int(high), multiple_of=step):
            return [
                low - 1,
                high + 1,
                low + 0.5,
                2**70,
                str(low),
                True,
                None,
                [low],
                *([low + 1] if step else []),
            ]
        case types.FloatType(ge=low, le=high) if low is not None:
            assert high is not None
            return [
                math.nextafter(low, -math.inf),
                math.nextafter(high, math.inf),
                "1",
                True,
                None,
                [],
            ]
        case types.StrType(pattern=str(wanted)):
            return [1, None, *DOES_NOT_FIT[wanted]]
        case types.StrType(max_length=int(most)):
            return [1, None, ["a"], "a" * (most + 1)]
        case types.LiteralType() | types.EnumType():
            return ["", "nope", "`$.type`", 0, None]
        case types.DictType(
            key_type=key,
            value_type=types.StrType() as value,
            min_length=least,
            max_length=int(most),
        ):
            fits = "x" if value.pattern == IDENTIFIER else allowed(value)[0]
            keys = [{bad: fits} for bad in forbidden(key) if isinstance(bad, str)]
            values = [{"x": bad} for bad in forbidden(value)]
            none: list[Any] = [{}] if least else []
            many = {f"n{i}": fits for i in range(most + 1)}
            return [[], None, *none, many, *keys, *values]
        case types.VarTupleType(item_type=item, min_length=least, max_length=int(most)):
            good = allowed(item)[0]
            few: list[Any] = [[]] if least else []
            return [
                {},
                None,
                good,
                *few,
                [good] * (most + 1),
                *([good, bad] for bad in forbidden(item)),
            ]
        case types.DictType(value_type=types.AnyType()):
            return [[], None, "x", {f"n{i}": 0 for i in range(65)}, {"1": 1}, {"": 1}, {"a\n": 1}]
        case types.DictType():
            many = {f"n{i}": 0 for i in range(65)}
            return [
                [],
                None,
                many,
                {"a": "1"},
                {"a": None},
                {"a": True},
                {"a": 1.1e30},
                {"1": 1},
                {"": 1},
                {"a\n": 1},
            ]
        case types.StructType(fields=fields):
            good = {f.name: allowed(f.type)[0] for f in fields}
            missing = [{k: v for k, v in good.items() if k != f.name} for f in fields if f.required]
            return [
                [],
                "",
                *missing,
                *(good | {f.name: bad} for f in fields for bad in forbidden(f.type)),
            ]
    raise TypeError(f"no values are known for {kind}")


def short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
