"""A backup or a restore that dies.

python crash_backup.py POINT N backup|restore ...
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from dying import Point, signal_at
from fleetlearn_coordinator.__main__ import app
from fleetlearn_coordinator.service import backup
from fleetlearn_coordinator.storage import file_copy
from fleetlearn_coordinator.storage.draft_folder import ENDING


def takes_its_name(path: Path, *target: Any) -> bool:
    return path.name.endswith(ENDING)


POINTS = {
    "the ledger is copied": Point(file_copy._Copy, "take_ledger", True),
    "the models are copied": Point(file_copy._Copy, "take_models", True),
    "the open round is copied": Point(file_copy._Copy, "take_open_round", True),
    "the manifest is written": Point(backup, "write_manifest", True),
    "all is safe, and has not its name": Point(Path, "rename", False, takes_its_name),
}
RESTORED = {
    "the files are copied": Point(backup, "verify_files", False),
    "all is restored, and has not its name": Point(Path, "rename", False, takes_its_name),
}


if __name__ == "__main__":
    signal_at({**POINTS, **RESTORED}[sys.argv[1]], int(sys.argv[2]))
    app(sys.argv[3:])
