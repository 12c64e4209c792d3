"""Serve a plan, or run a device, that knows the tests' roll call, an exchange of three phases. The
process may kill itself with SIGKILL at a named point of one of its phases.

python crash_roll_call.py POINT PHASE MINIMUM TRAINING serve PLAN.toml --service SERVICE.toml
python crash_roll_call.py POINT PHASE MINIMUM TRAINING run --coordinator URL ... --name device-N ...

POINT is "-" where the process is not to kill itself. The first series alone counts. MINIMUM: fewest
answers of a phase, of three devices. TRAINING: after how many phases the devices train; "-": a
series comes after each round.
"""

from __future__ import annotations

import sys
from pathlib import Path

from dying import signal_at
from dying_in_phases import PhasesOf, Points
from fleetlearn_coordinator import __main__ as coordinator
from fleetlearn_coordinator.storage.ledger import (
    AnswerAccepted,
    ExchangeBegun,
    ExchangeEnded,
)
from fleetlearn_device import __main__ as device
from fleetlearn_device.training.trainer import ANSWERS, Trainer
from fleetlearn_protocol.exchanges import content_of
from fleetlearn_protocol.messages import Question

sys.path.append(str(Path(__file__).parents[1] / "support"))
from roll_call import ROLL_CALL, RollCall, Sent, register

PHASES = PhasesOf(ROLL_CALL, "r")
COORDINATOR: Points = {
    **PHASES.of_coordinator(),
    "a phase is decided but not recorded": (
        lambda at: PHASES.batch(ExchangeBegun, at, after=False)
    ),
    "an answer came and is not recorded": (
        lambda at: PHASES.batch(AnswerAccepted, at, after=False)
    ),
    "a phase is over but not recorded": lambda at: PHASES.batch(ExchangeEnded, at, after=False),
}
DEVICE: Points = {
    **PHASES.of_device(),
    "the device has answered and told nobody": (
        lambda at: PHASES.answers(Trainer, "answer", at, after=True)
    ),
}


def answer(trainer: Trainer, question: Question, seconds: float) -> Sent:
    """Send the device's number, and then the sum of those that the device is told."""
    who = content_of(question).who
    own = int(sys.argv[sys.argv.index("--name") + 1].rpartition("-")[2]) + 1
    return Sent(sum(who.values()) if who else own)


if __name__ == "__main__":
    point, phase, minimum, training = sys.argv[1:5]
    rules = RollCall(devices=3, minimum=int(minimum), deadline=600.0, every=1)
    if training != "-":
        rules = rules._replace(every=0, training_after=int(training))
    register(dict.__setitem__, rules)
    ANSWERS[ROLL_CALL] = answer
    if point != "-":
        signal_at((COORDINATOR | DEVICE)[point](int(phase)), 1)
    sys.argv = ["fleetlearn", *sys.argv[5:]]
    if sys.argv[1] == "serve":
        coordinator.main()
    else:
        sys.exit(device.main(sys.argv[1:]))
