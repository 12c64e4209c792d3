"""Where a plan takes functions of other packages, for the rules of its rounds."""

from __future__ import annotations

from typing import Any

from fleetlearn_protocol.extensions import ExtensionPoint

SELECTION_STRATEGY: ExtensionPoint[Any] = ExtensionPoint(
    "selection strategy", object, is_callable=True
)
STOP_RULE: ExtensionPoint[Any] = ExtensionPoint("stop rule", object, is_callable=True)
