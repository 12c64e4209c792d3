"""Writing TOML, which the standard library only reads."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any


def dump(tables: Mapping[str, Any]) -> str:
    """The text of a file with these tables: dicts, lists, strings, numbers and truth values. Leaves out what is None,
    and empty lists and tables."""
    return "".join(_lines(tables, ()))


def _lines(table: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    """A table as lines of TOML, without what is None or empty."""
    if path and any(not isinstance(value, dict) and value not in (None, []) for value in table.values()):
        yield f"\n[{'.'.join(map(_key, path))}]\n"
    for key, value in table.items():
        if not isinstance(value, dict) and value is not None and value != []:
            yield f"{_key(key)} = {_value(value)}\n"
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _lines(value, (*path, key))


def _key(word: str) -> str:
    return word if re.fullmatch(r"[A-Za-z0-9_-]+", word) else _value(word)


def _value(value: Any) -> str:
    if isinstance(value, dict):
        pairs = (f"{_key(key)} = {_value(item)}" for key, item in value.items() if item is not None)
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    # A JSON string is a TOML string, but for one character that must be escaped.
    return (
        json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        if isinstance(value, str | bool)
        else repr(value)
    )
