"""What commands print with ``--json``, as a JSON schema made of the records' types.

python -m fleetlearn_coordinator.commands.schemas docs/operate/command-line.schema.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec

from fleetlearn_coordinator.commands.algorithms import OwnAlgorithmView
from fleetlearn_coordinator.commands.data_quality import QualityView
from fleetlearn_coordinator.plan.privacy_statement import PrivacyStatement
from fleetlearn_coordinator.secure.helper_views import HelperView
from fleetlearn_coordinator.service.backup_manifest import BackupManifest
from fleetlearn_coordinator.service.versions import Comparison
from fleetlearn_coordinator.service.views.computation import ComputationView
from fleetlearn_coordinator.service.views.records import (
    AdministratorView,
    AuditView,
    CanaryView,
    CheckView,
    DeviceView,
    EventView,
    FilesView,
    HostView,
    OperationView,
    RoundView,
    RunGlance,
    RunView,
    TokenView,
    TurnsView,
    Version,
)
from fleetlearn_coordinator.storage.vertical_folder import VerticalStatus

OUTPUTS: dict[str, tuple[Any, ...]] = {
    "status": (RunView, HostView),
    "runs": (list[RunGlance],),
    "rounds": (list[RoundView], TurnsView),
    "devices": (list[DeviceView],),
    "models": (list[Version],),
    "compare-models": (Comparison,),
    "result": (ComputationView,),
    "tail": (EventView,),
    "audit": (AuditView,),
    "doctor": (list[CheckView],),
    "algorithms": (list[OwnAlgorithmView],),
    "init": (FilesView,),
    "privacy": (PrivacyStatement,),
    "data-quality": (QualityView,),
    "enrol": (TokenView,),
    "revoke": (OperationView,),
    "pause": (OperationView,),
    "resume": (OperationView,),
    "drain": (OperationView,),
    "stop": (OperationView,),
    "rollback": (OperationView,),
    "evaluate": (OperationView,),
    "canary start": (OperationView,),
    "canary status": (list[CanaryView],),
    "canary widen": (OperationView,),
    "canary back": (OperationView,),
    "canary finish": (OperationView,),
    "helper status": (HelperView,),
    "vertical status": (VerticalStatus,),
    "split status": (VerticalStatus,),
    "administrator list": (list[AdministratorView],),
    "backup": (BackupManifest,),
    "restore": (BackupManifest,),
}
"""Command -> what it prints: one of these. ``status --watch``, ``tail`` and ``audit`` print one to
a line."""


def schema() -> dict[str, Any]:
    """Return the schema: ``#/$defs/COMMAND`` describes what the command prints."""
    kinds = [kind for each in OUTPUTS.values() for kind in each]
    found, components = msgspec.json.schema_components(kinds, ref_template="#/$defs/{name}")
    for component in components.values():
        if "properties" in component:  # all are printed, those with a default too
            component["required"] = sorted(component["properties"])
            for each in component["properties"].values():
                each.pop("default", None)
    own = iter(found)
    commands = {}
    for command, each in OUTPUTS.items():
        schemas = [next(own) for _ in each]
        commands[command] = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "What the commands of fleetlearn-coordinator print with --json",
        "description": (
            "#/$defs/COMMAND is of the command's output; of status --watch, tail and audit each "
            "line is one. Times are Unix times in seconds. A later version may add fields."
        ),
        "$defs": commands | {name: components[name] for name in sorted(components)},
    }


def text() -> str:
    """Return the schema as the file has it."""
    return json.dumps(schema(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(text(), "utf-8")
