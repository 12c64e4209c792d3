"""What ``GET /v1/live`` tells, and what the live page asks besides, as a JSON schema made of the
records' types.

python -m fleetlearn_coordinator.service.live_schema docs/operate/live-page.schema.json
"""

from __future__ import annotations

import json
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET

from fleetlearn_coordinator.dashboard import live_records
from fleetlearn_coordinator.dashboard.live_records import TOPICS, Glance
from fleetlearn_coordinator.service.views import records
from fleetlearn_coordinator.service.views.records import CanaryView, DeviceDetail, DevicePage

Schema = dict[str, Any]
ANSWERS = {"devices": DevicePage, "device": DeviceDetail}
"""What the page asks beside the stream and what commands print -> its answer."""
NAMES: dict[str, Schema] = {
    "host": {"const": "host"},
    "run": {"type": "string", "pattern": "^run/"},
}
"""Topic -> its names."""


def schema() -> Schema:
    """Return the schema: ``#/$defs/event`` describes each event's data."""
    kinds = [
        Glance,
        CanaryView,
        *ANSWERS.values(),
        *(kind for pair in TOPICS.values() for kind in pair),
    ]
    _, found = msgspec.json.schema_components(kinds, ref_template="#/$defs/{name}")
    known = {**vars(records), **vars(live_records)}
    for each, component in found.items():
        _complete(component, known[each])
    # The dashboard does not know it: a canary is the host's.
    found["Glance"]["properties"]["canary"] = {"$ref": "#/$defs/CanaryView"}
    found["HostValues"]["patternProperties"] = {"^run/": {"$ref": "#/$defs/Glance"}}
    events: dict[str, Schema] = {"ended": _object(topic={"type": "string"}, ended={"const": True})}
    for topic, pair in TOPICS.items():
        values, lists = (found[kind.__name__] for kind in pair)
        name, whole = NAMES[topic], [{"$ref": f"#/$defs/{kind.__name__}"} for kind in pair]
        limits = {"type": "object", "additionalProperties": {"type": "integer"}}
        events[f"{topic}-document"] = _object(
            topic=name, values=whole[0], lists=whole[1], most=limits
        )
        gone = {"type": "array", "items": {"type": "string"}}
        events[f"{topic}-change"] = _object(
            topic=name, set=_some_of(values), add=_some_of(lists), gone=gone
        )
    answers = {name: {"$ref": f"#/$defs/{kind.__name__}"} for name, kind in ANSWERS.items()}
    event = {"anyOf": [{"$ref": f"#/$defs/{name}"} for name in events]}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "What the live page of a fleetlearn coordinator is told",
        "description": (
            "#/$defs/event is the data of each server-sent event of GET /v1/live; "
            "#/$defs/devices and #/$defs/device are the answers to GET /v1/devices and "
            "/v1/devices/NAME. A later version may add fields."
        ),
        "$defs": {
            "event": event, **events, **answers, **{name: found[name] for name in sorted(found)}
        },
    }  # fmt: skip


def _complete(component: Schema, kind: Any) -> None:
    """Say what the types alone do not: which fields of a struct are always there, all but those
    that may be unset; and what the places of a tuple are."""
    if "prefixItems" in component:
        for item, name in zip(component["prefixItems"], kind._fields, strict=True):
            item["title"] = name
        return
    fields = msgspec.structs.fields(kind)
    component["required"] = sorted(each.name for each in fields if each.default is not UNSET)
    for each in component["properties"].values():
        each.pop("default", None)


def _object(**properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": sorted(properties)}


def _some_of(whole: Schema) -> Schema:
    """Return the schema of some of an object's fields."""
    some = deepcopy(whole)
    some.pop("required")
    some.pop("title")
    return some


def text() -> str:
    """Return the schema as the file has it."""
    return json.dumps(schema(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(text(), "utf-8")
