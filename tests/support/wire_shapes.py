"""The shapes of what gateways and the engine process say, as data. Run it to record those of this
release, once ``WIRE`` was raised:

    python tests/support/wire_shapes.py > tests/coordinator/gateways/wire_N.json
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, get_args

from fleetlearn_coordinator.gateways import wire
from fleetlearn_protocol import messages
from msgspec import inspect

TOLD_TO_DEVICES = messages.__name__
"""What devices and coordinators say to each other has rules of its own: PROTOCOL.md."""


def shapes() -> dict[str, Any]:
    """Return name of each message, and of each record in one -> its tag and its fields, in order:
    [name, type, whether it has a default]."""
    found: dict[str, Any] = {}
    for union in (wire.ToEngine, wire.ToGateway):
        for kind in get_args(union):
            for record in _records(inspect.type_info(kind)):
                found.setdefault(record.cls.__name__, _shape(record))
    return dict(sorted(found.items()))


def _records(kind: Any) -> Iterator[Any]:
    """Yield the records in a type: itself, those of its fields, and so on."""
    if isinstance(kind, inspect.StructType | inspect.NamedTupleType):
        if kind.cls.__module__ == TOLD_TO_DEVICES:
            return
        yield kind
    if isinstance(kind, inspect.Type | inspect.Field):
        for field in kind.__struct_fields__:
            value = getattr(kind, field)
            for each in value if isinstance(value, tuple) else (value,):
                yield from _records(each)


def _shape(record: Any) -> dict[str, Any]:
    return {
        "tag": getattr(record, "tag", None),
        "grows": isinstance(record, inspect.StructType),
        "fields": [[each.name, _name(each.type), not each.required] for each in record.fields],
    }


def _name(kind: Any) -> str:
    """Return a short name of a type."""
    if isinstance(kind, inspect.UnionType):
        return " | ".join(sorted(map(_name, kind.types)))
    if hasattr(kind, "cls"):
        return str(kind.cls.__name__)
    inner = [getattr(kind, name, None) for name in ("key_type", "value_type", "item_type")]
    inner += getattr(kind, "item_types", ())
    text = ", ".join(_name(each) for each in inner if each is not None)
    return type(kind).__name__.removesuffix("Type").lower() + (f"[{text}]" if text else "")


if __name__ == "__main__":
    rows = [f"  {json.dumps(name)}: {json.dumps(shape)}" for name, shape in shapes().items()]
    print('{\n "shapes": {', ",\n".join(rows), " }\n}", sep="\n")
