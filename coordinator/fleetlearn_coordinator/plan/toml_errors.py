"""Reading the tables of a TOML file into Structs, with errors that name the key, what was given and what is allowed."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, get_type_hints

import msgspec
import msgspec.inspect


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of a file's tables."""


def near(word: str, known: Iterable[str], prefix: str = "") -> str:
    """The end of a sentence on an unknown word: "; did you mean X?", or "." where nothing is close."""
    close = [prefix + name for name in difflib.get_close_matches(word, known, n=2, cutoff=0.6)]
    return f"; did you mean {' or '.join(close)}?" if close else "."


def refuse_unknown(
    raw: Mapping[str, Any],
    what: str,
    root: type[Section],
    sections: Mapping[str, type[Section]],
    hidden: Collection[str],
) -> None:
    """Raise ValueError for the first key that its table does not have.

    ``what`` is the file's kind for people; ``sections`` are the tables below the root, and the lists of tables, by
    dotted name; ``hidden`` are fields of the root that are not keys.
    """
    tables: list[tuple[str, type[Section]]] = [("", root), *((f"{name}.", kind) for name, kind in sections.items())]
    everywhere = [f"{name}.{key}" for name, kind in sections.items() for key in kind.__struct_fields__]
    for prefix, kind in tables:
        known = [key for key in kind.__struct_fields__ if prefix or key not in hidden]
        table = _at(raw, prefix.rstrip(".").split(".") if prefix else [])
        for row in table if isinstance(table, list) else [table]:
            for key in row if isinstance(row, dict) else ():
                if key not in known:
                    elsewhere = [name for name in everywhere if name.endswith(f".{key}")]
                    hint = near(key, known, prefix)
                    if elsewhere:
                        hint = f"; did you mean {' or '.join(elsewhere)}?"
                    raise ValueError(f"{prefix}{key} is not a key of a {what}{hint} Allowed here: {', '.join(known)}.")


def explain(
    error: msgspec.ValidationError,
    raw: Any,
    what: str,
    root: type[Section],
    sections: Mapping[str, type[Section]],
    prefix: str = "",
) -> str:
    """msgspec's message ("Expected `int` >= 1 - at `$.round.goal`") with the key, what was given and the range.

    ``prefix`` goes before the key, where ``raw`` is a table of a larger one.
    """
    why, _, where = str(error).partition(" - at ")
    found = re.search(r"\$\.?((?:\.?\w+|\[\d+\])*)", where)
    key = found.group(1) if found else ""
    if missing := re.fullmatch(r"Object missing required field `(\w+)`", why):
        return prefix + f"{key}.{missing.group(1)}".lstrip(".") + f" is missing; a {what} must have it"
    section, _, name = re.sub(r"\[\d+\]", "", key).rpartition(".")
    types = get_type_hints(sections.get(section, root), include_extras=True)
    allowed = describe(msgspec.inspect.type_info(types[name])) if name in types and not key.endswith("]") else ""
    why = why.replace("Expected `object`", "expected a table")
    given = _at(raw, re.findall(r"\w+", key))
    takes = f"it takes {allowed}" if allowed else why[0].lower() + why[1:]
    return f"{prefix}{key} = {given!r} is refused: {takes}"


def describe(info: msgspec.inspect.Type) -> str:
    """The values that a key takes, in words; empty where msgspec's own message says it better."""
    if isinstance(info, msgspec.inspect.UnionType):
        tables = [f"a table of {_fields(kind)}" for kind in info.types if isinstance(kind, msgspec.inspect.StructType)]
        return ", or ".join(filter(None, [*map(describe, info.types), *tables]))
    if isinstance(info, msgspec.inspect.LiteralType):
        return " or ".join(f'"{value}"' for value in info.values)
    if not isinstance(info, msgspec.inspect.IntType | msgspec.inspect.FloatType):
        return ""
    words = {"at least": info.ge, "above": info.gt, "at most": info.le, "below": info.lt}
    bounds = " and ".join(f"{word} {bound}" for word, bound in words.items() if bound is not None)
    return f"{'an integer' if isinstance(info, msgspec.inspect.IntType) else 'a number'}, {bounds}"


def _fields(info: msgspec.inspect.StructType) -> str:
    return ", ".join(field.name for field in info.fields)


def _at(raw: Any, path: Iterable[str]) -> Any:
    for part in path:
        if isinstance(raw, list) and part.isdigit() and int(part) < len(raw):
            raw = raw[int(part)]
        else:
            raw = raw.get(part) if isinstance(raw, dict) else None
    return raw
