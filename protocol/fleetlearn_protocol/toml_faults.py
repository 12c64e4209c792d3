"""What is wrong in a TOML file that people write, in their words and not in msgspec's."""

from __future__ import annotations

import difflib
import re

import msgspec

_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "bool": "true or false",
    "array": "a list",
    "object": "a table",
}


def fault_in_words(error: msgspec.ValidationError, root: type) -> str:
    """Return which key is wrong, and what is expected there, without a full stop.

    ``error`` is what msgspec raised for a file that should have been a ``root``, a Struct.
    """
    text, _, path = str(error).partition(" - at `$")
    key = path.rstrip("`").lstrip(".")
    where = f" in {key}" if key else ""
    if found := re.search("unknown field `(.*)`", text):
        known = _allowed(root, key)
        close = difflib.get_close_matches(found[1], known, n=2, cutoff=0.6)
        meant = f"; did you mean {' or '.join(close)}?" if close else "."
        return f"{found[1]} is not a key{where}{meant} Keys: {', '.join(known)}"
    if found := re.search("missing required field `(.*)`", text):
        return f"the key {found[1]} is missing{where}"
    if found := re.search("Invalid enum value (.*)", text):
        return f"{key} is {found[1]}; expected one of {', '.join(_allowed(root, key))}"
    if found := re.fullmatch("Expected `(.*)`, got `(.*)`", text):
        expected, given = (
            " or ".join(_WORDS.get(name, name) for name in side.split(" | "))
            for side in found.groups()
        )
        return f"{key} is {given}; expected {expected}"
    if found := re.fullmatch("Expected `(.*)` (.*)", text):
        return f"{key}: expected {_WORDS.get(found[1], found[1])} {found[2]}"
    return f"{key}: {text}" if key else text


def _allowed(root: type, key: str) -> list[str]:
    """Return the keys of the table at this place, or the values of the key at this place."""
    from msgspec import inspect

    found: object = inspect.type_info(root)
    for name in re.findall(r"[A-Za-z_]\w*|\[", key):
        found = _struct_or_itself(found)
        if name == "[":
            found = getattr(found, "item_type", None)
        else:
            fields = found.fields if isinstance(found, inspect.StructType) else ()
            found = next((field.type for field in fields if field.encode_name == name), None)
    found = _struct_or_itself(found)
    if isinstance(found, inspect.StructType):
        return [field.encode_name for field in found.fields]
    return [str(value) for value in getattr(found, "values", ())]


def _struct_or_itself(found: object) -> object:
    """Return the first of a union's types that is not None; what is no union, as it is."""
    from msgspec import inspect

    while isinstance(found, inspect.UnionType | inspect.Metadata):
        if isinstance(found, inspect.Metadata):
            found = found.type
        else:
            found = next(kind for kind in found.types if not isinstance(kind, inspect.NoneType))
    return found
