"""Run a device in a process that stops itself with SIGSTOP when its first update is trained and not
yet on disk.

python late_device.py run --coordinator URL ...
"""

from __future__ import annotations

import signal
import sys

from crash_device import POINTS
from dying import signal_at
from fleetlearn_device.__main__ import main

if __name__ == "__main__":
    signal_at(POINTS["the work is done but not on disk"], 1, signal.SIGSTOP)
    sys.exit(main(sys.argv[1:]))
