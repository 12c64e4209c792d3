"""Run a device in a process that kills itself with SIGKILL at a named point, the N-th time that it
comes by.

python crash_device.py POINT N run --coordinator URL ...
"""

from __future__ import annotations

import sys

from dying import Point, signal_at
from fleetlearn_device.__main__ import main
from fleetlearn_device.storage.outbox import Outbox

POINTS = {
    "the work is done but not on disk": Point(Outbox, "save", False),
    "the work is on disk and the device's own part not in its place": Point(
        Outbox, "_settle", False
    ),
    "the work is on disk and not reported": Point(Outbox, "save", True),
    "the upload is granted": Point(Outbox, "chunks", False),
    "the update is acknowledged but not forgotten": Point(Outbox, "drop", False),
}

if __name__ == "__main__":
    signal_at(POINTS[sys.argv[1]], int(sys.argv[2]))
    sys.exit(main(sys.argv[3:]))
