"""Run a device that serves only while a file is there, and looks for it often.

python conditioned_device.py FILE URL DATA STATE NAME
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from fleetlearn_device import Device
from fleetlearn_device.conditions.conditions import Conditions
from fleetlearn_device.driver.timing import Timing

if __name__ == "__main__":
    file, url, data, state, name = sys.argv[1:]
    logging.basicConfig(level=logging.INFO)

    def allowed() -> bool | str:
        """Return True, or why the device must not serve."""
        return Path(file).exists() or "the pump runs"

    Device(
        url,
        data,
        state,
        name=name,
        conditions=Conditions(check=allowed),
        until_finished=True,
        timing=Timing(base=0.05, cap=0.5, paused=0.1),
    ).run()
