"""Run a device in a process that kills itself with SIGKILL at a checkpoint of its training, the
N-th time that it comes by. Checkpoints are written each second, whatever they cost.

python crash_training.py POINT N run --coordinator URL ...
"""

from __future__ import annotations

import sys

from dying import Point, signal_at
from fleetlearn_device.__main__ import main
from fleetlearn_device.storage import training_checkpoint
from fleetlearn_device.storage.training_checkpoint import TrainingCheckpoint
from fleetlearn_device.training import progress

POINTS = {
    "a checkpoint is to be written": Point(TrainingCheckpoint, "save", False),
    "a checkpoint's place is to be taken": Point(training_checkpoint, "write_durably", False),
    "a checkpoint is written": Point(TrainingCheckpoint, "save", True),
}

if __name__ == "__main__":
    progress.WRITE_SHARE = 1.0
    signal_at(POINTS[sys.argv[1]], int(sys.argv[2]))
    sys.exit(main([*sys.argv[3:], "--checkpoint-every", "1"]))
