"""Run a device on which bundles do harm, as their names say: "killing" ends the process in the
first step, without a word; "failing" raises there; "slow" takes a tenth of a second for each step.
A device whose process ended is started again, as systemd would.

python harmed_device.py run --coordinator URL ...
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from fleetlearn_device.__main__ import main
from fleetlearn_device.runtimes.runtime_onnx import OnnxRuntime

step = OnnxRuntime.step
KILLED = 77


def harmed(self: OnnxRuntime, *arguments: Any, **named: Any) -> Any:
    match self.manifest.name:
        case "killing":
            os._exit(KILLED)
        case "failing":
            raise RuntimeError("this graph is not for this chip")
        case "slow":
            time.sleep(0.1)
    return step(self, *arguments, **named)


if __name__ == "__main__":
    OnnxRuntime.step = harmed  # type: ignore[method-assign]
    sys.exit(main(sys.argv[1:]))
