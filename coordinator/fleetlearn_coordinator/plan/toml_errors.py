"""Reading the tables of a TOML file into Structs, with errors that name the key, what was given and
what is allowed."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import repeat
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

import msgspec
from fleetlearn_protocol.paths import in_home
from msgspec import Meta
from msgspec import inspect as types

Positive = Annotated[int, Meta(ge=1, le=10**6)]
"""A count, in any file."""
MISSING = object()
"""Stands for a value that must be given and is not."""


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of a file's tables."""


Table = TypeVar("Table", bound=Section)


def paths_from(base: Path) -> Callable[[type, Any], Path]:
    """Return ``read_tables``'s ``dec_hook`` for a file whose paths are relative to the folder
    ``base``. A URL stays one: it says what there is at another place, such as a store of runs."""

    def place(_: type, given: object) -> Path:
        if isinstance(given, Path):
            return given
        if not isinstance(given, str) or not given:
            raise TypeError("Expected a path")
        if re.match("[a-z][a-z0-9+.-]+://", given):
            return Path(given)
        return (base / in_home(given)).absolute()

    return place


def near(word: str, known: Iterable[str], prefix: str = "") -> str:
    """The end of a sentence on an unknown word: "; did you mean X?", or "." where nothing is
    close."""
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

    ``what`` is the file's kind for people; ``sections`` are the tables below the root, and the
    lists of tables, by dotted name; ``hidden`` are fields of the root that are not keys.
    """
    tables: list[tuple[str, type[Section]]] = [
        ("", root),
        *((f"{name}.", kind) for name, kind in sections.items()),
    ]
    everywhere = [
        f"{name}.{key}" for name, kind in sections.items() for key in kind.__struct_fields__
    ]
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
                    raise ValueError(
                        f"{prefix}{key} is not a key of a {what}{hint} Allowed here: "
                        f"{', '.join(known)}."
                    )


def read_tables(
    raw: Mapping[str, Any],
    what: str,
    root: type[Table],
    dec_hook: Callable[[type, Any], Any] | None = None,
    prefix: str = "",
) -> Table:
    """Return a file's tables as a Struct.

    Raises ValueError, which names the first key that is missing or whose value is refused, what was
    given and what is allowed. ``what`` is the file's kind for people, ``dec_hook`` is msgspec's.
    ``prefix`` goes before each key, where ``raw`` is a table of a larger one.
    """
    try:
        return msgspec.convert(raw, root, dec_hook=dec_hook)
    except msgspec.ValidationError:
        # msgspec says where the mistake is in an English sentence only. So each value is converted
        # by itself.
        raise ValueError(f"{prefix}{_mistake(raw, root, '', what, dec_hook)}") from None


def _mistake(
    value: Any, kind: Any, key: str, what: str, dec_hook: Callable[[type, Any], Any] | None
) -> str | None:
    """Return a sentence on the innermost value that its type refuses, the first where there are
    several, or None."""
    try:
        msgspec.convert(value, kind, dec_hook=dec_hook)
        return None
    except msgspec.ValidationError as error:
        # The innermost value is what the author wrote wrong; a table is refused for its parts.
        for key_path, part, its_kind in _parts(value, kind, key):
            if part is MISSING:
                return f"{key_path} is missing; a {what} must have it"
            if inner := _mistake(part, its_kind, key_path, what, dec_hook):
                return inner
        cause = error.__cause__
        why = (
            cause
            if isinstance(cause, ValueError)
            else f"it takes {describe(types.type_info(kind))}"
        )
        return f"{key} = {value!r} is refused: {why}"


def _parts(value: Any, kind: Any, key: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield what a table or a list holds: key, value and type. The value is MISSING where the type
    requires one."""
    if get_origin(kind) is Annotated:
        yield from _parts(value, get_args(kind)[0], key)
    elif get_origin(kind) in (Union, UnionType):
        # The first alternative with a mistake in a part names it; one that fits has none.
        for alternative in get_args(kind):
            yield from _parts(value, alternative, key)
    elif isinstance(value, dict) and isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        for field in msgspec.structs.fields(kind):
            if field.required or field.name in value:
                yield f"{key}.{field.name}".lstrip("."), value.get(field.name, MISSING), field.type
    elif isinstance(value, dict) and get_origin(kind) is dict:
        for name, item in value.items():
            yield f"{key}.{name}", item, get_args(kind)[1]
    elif isinstance(value, list) and get_origin(kind) is tuple:
        kinds = get_args(kind)
        for index, (item, its_kind) in enumerate(
            zip(value, repeat(kinds[0]) if ... in kinds else kinds, strict=False)
        ):
            yield f"{key}[{index}]", item, its_kind


def describe(info: types.Type) -> str:
    """Return the values that a type takes, in words."""
    match info:
        case types.UnionType():
            return ", or ".join(
                describe(kind) for kind in info.types if not isinstance(kind, types.NoneType)
            )
        case types.LiteralType():
            return " or ".join(f'"{value}"' for value in info.values)
        case types.IntType() | types.FloatType():
            words = {"at least": info.ge, "above": info.gt, "at most": info.le, "below": info.lt}
            bounds = " and ".join(
                f"{word} {bound}" for word, bound in words.items() if bound is not None
            )
            noun = "an integer" if isinstance(info, types.IntType) else "a number"
            return f"{noun}, {bounds}" if bounds else noun
        case types.StrType() if info.pattern is not None:
            return f"a string matching {info.pattern}"
        case types.StrType() if info.max_length is not None:
            return f"a string of {info.min_length} to {info.max_length} characters"
        case types.StrType():
            return "a string"
        case types.BoolType():
            return "true or false"
        case types.StructType():
            return f"a table of {', '.join(field.name for field in info.fields)}"
        case types.DictType():
            return (
                f"a table; each key is {describe(info.key_type)}, each value "
                f"{describe(info.value_type)}"
            )
        case types.VarTupleType():
            return f"a list; each entry is {describe(info.item_type)}"
        case types.TupleType():
            return (
                f"a list of {len(info.item_types)} entries: "
                f"{'; '.join(map(describe, info.item_types))}"
            )
    assert isinstance(info, types.CustomType)
    return f"a {info.cls.__name__.lower()}"


def _at(raw: Any, path: Iterable[str]) -> Any:
    for part in path:
        if isinstance(raw, list) and part.isdigit() and int(part) < len(raw):
            raw = raw[int(part)]
        else:
            raw = raw.get(part) if isinstance(raw, dict) else None
    return raw
