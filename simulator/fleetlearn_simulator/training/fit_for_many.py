"""Whether a bundle can train many devices at once."""

from __future__ import annotations

from fleetlearn_protocol import Bundle
from fleetlearn_protocol.algorithms import OWN
from fleetlearn_protocol.manifest import TRAIN_MANY
from fleetlearn_protocol.messages import PLAIN

from fleetlearn_simulator.errors import SimulatorError
from fleetlearn_simulator.training.tied_rules import RULES


def not_for_many(
    bundle: Bundle, batch_size: int, algorithm: str = PLAIN, *, by_step: bool = False
) -> str | None:
    """Return why the bundle cannot train many devices at once by this algorithm; None if it can.
    by_step: whether the learning rate changes from step to step."""
    many = bundle.manifest.many
    if algorithm != PLAIN and algorithm not in RULES:
        named = "an own algorithm" if algorithm == OWN else f"the algorithm {algorithm}"
        return f"{named} trains device by device"
    if many is None:
        return f"bundle {bundle.manifest.name} has no {TRAIN_MANY}"
    if many.batch is not None and many.batch != batch_size:
        return (
            f"{TRAIN_MANY} of bundle {bundle.manifest.name} takes batches of {many.batch}; the "
            f"plan's local.batch_size is {batch_size}"
        )
    if by_step and many.lr_by_step is not True:
        return (
            f"{TRAIN_MANY} of bundle {bundle.manifest.name} has one learning rate for all of its "
            "steps, and the plan has [local.step_schedule]"
        )
    return None


def check_many(
    bundle: Bundle, batch_size: int, algorithm: str = PLAIN, *, by_step: bool = False
) -> None:
    """Raise SimulatorError if the bundle cannot train many devices at once by this algorithm."""
    why = not_for_many(bundle, batch_size, algorithm, by_step=by_step)
    if why is None:
        return
    if algorithm != PLAIN and algorithm not in RULES:
        raise SimulatorError(f'{why}: choose the back end "bundle"')
    settings = "devices, steps, lr_by_step=True" if by_step else "devices, steps"
    raise SimulatorError(
        f'{why}: export it with many=TrainMany({settings}), or choose the back end "bundle"'
    )
