"""Export the digits' CNN: ``python -m examples.demo.export_digits BUNDLE``; tells how it compares
with PyTorch."""

from __future__ import annotations

import json
import sys
from typing import Any

from fleetlearn_export import export_bundle

from examples import digits


def main() -> int:
    arguments: dict[str, Any] = digits.export()
    exported = export_bundle(path=sys.argv[1], **arguments)
    manifest = exported.bundle.manifest
    found = {"parameters": manifest.size, "largest_difference": exported.difference}
    print(json.dumps({**found, "without_ort_training": exported.without_ort_training}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
