"""For tests: a command of the coordinator as a person types it, and what it prints as JSON held to
the schema."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import jsonschema
from fleetlearn_coordinator.__main__ import app
from typer.testing import CliRunner

SCHEMA = Path(__file__).parents[2] / "docs/operate/command-line.schema.json"


def typed(*arguments: object, expected: int = 0, **environment: str) -> str:
    """Return what a command prints on its standard output."""
    done = CliRunner().invoke(app, [str(part) for part in arguments], env=environment)
    assert done.exit_code == expected, done.output
    return done.stdout


def strict() -> dict[str, Any]:
    """Return the schema, by which a field that it does not name is an error."""
    found = deepcopy(json.loads(SCHEMA.read_text()))
    for each in found["$defs"].values():
        if "properties" in each:
            each["additionalProperties"] = False
    return found  # type: ignore[no-any-return]


def check(command: str, output: str, *, lines: bool = False) -> list[Any]:
    """Return what a command printed as JSON, which the schema has to allow."""
    found = [json.loads(line) for line in output.splitlines()] if lines else [json.loads(output)]
    schema = strict() | {"$ref": f"#/$defs/{command}"}
    for each in found:
        jsonschema.validate(each, schema)
    return found
