"""For tests: what the live page is told is held to docs/operate/live-page.schema.json."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

SCHEMA = Path(__file__).parents[2] / "docs/operate/live-page.schema.json"


def _strict() -> dict[str, Any]:
    """Return the schema, by which a field that it does not name is an error."""
    found: dict[str, Any] = deepcopy(json.loads(SCHEMA.read_text()))
    for each in found["$defs"].values():
        for part in (each, *each.get("properties", {}).values()):
            if "properties" in part:
                part["additionalProperties"] = False
    return found


STRICT = _strict()


def validator(name: str) -> Draft202012Validator:
    """Return what checks values of one kind, of those that the schema names."""
    return Draft202012Validator(STRICT | {"$ref": f"#/$defs/{name}"})


KINDS = ("ended", "host-document", "host-change", "run-document", "run-change")
EVENTS = {name: validator(name) for name in KINDS}


def check_event(event: dict[str, Any]) -> None:
    """Raise jsonschema.ValidationError if an event is not as the schema says."""
    topic = event.get("topic", "").partition("/")[0]
    kind = (
        "ended" if "ended" in event else f"{topic}-{'document' if 'values' in event else 'change'}"
    )
    EVENTS[kind].validate(event)
