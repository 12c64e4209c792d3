"""Serve a plan with pairwise masks, or run a device, in a process that kills itself with SIGKILL at
a named point of one of the phases of the first round.

python crash_pairwise.py POINT PHASE serve PLAN.toml --service SERVICE.toml
python crash_pairwise.py POINT PHASE run --coordinator URL ...
"""

from __future__ import annotations

import sys

from dying import Point, signal_at
from dying_in_phases import PhasesOf, Points
from fleetlearn_coordinator import __main__ as coordinator
from fleetlearn_coordinator.service.training_run.pairwise_records import PairwiseRecords
from fleetlearn_coordinator.service.training_run.written_model import ModelWriter
from fleetlearn_device import __main__ as device
from fleetlearn_device.storage.outbox import Outbox
from fleetlearn_device.training.pairwise_sessions import PairwiseSessions
from fleetlearn_protocol.secure.pairwise_messages import PAIRWISE

PHASES = PhasesOf(PAIRWISE, "p")
COORDINATOR: Points = {
    **PHASES.of_coordinator(),
    "the masks are to be put together": lambda at: Point(PairwiseRecords, "masks", False),
    "the model is made and not recorded": lambda at: Point(ModelWriter, "commit", True),
}
DEVICE: Points = {
    **PHASES.of_device(),
    "the update is masked and not saved": lambda at: Point(PairwiseSessions, "masked", True),
    "the masked update is saved": lambda at: Point(Outbox, "save", True),
}


if __name__ == "__main__":
    point, phase = sys.argv[1:3]
    if point != "-":
        signal_at((COORDINATOR | DEVICE)[point](int(phase)), 1)
    sys.argv = ["fleetlearn", *sys.argv[3:]]
    if sys.argv[1] == "serve":
        coordinator.main()
    else:
        sys.exit(device.main(sys.argv[1:]))
