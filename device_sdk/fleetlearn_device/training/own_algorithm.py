"""An owner's own local algorithm: a function that trains in place of ours.

It takes a ``TaskWork``, and its parameters as keywords, and returns a ``TaskOutcome`` with one
part, the update. ``work.load()`` loads the round's model, ``work.train(...)`` trains as the task
says, and ``work.runtime`` makes single steps. The device's owner allows the function by name; no
code travels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from fleetlearn_protocol import extensions
from fleetlearn_protocol.algorithms import LOCAL_ALGORITHM
from fleetlearn_protocol.errors import FleetError
from fleetlearn_protocol.messages import UPDATE, Task
from fleetlearn_protocol.own_encodings import encoding_of_task
from fleetlearn_protocol.user_errors import ANY_FAILURE, failure
from fleetlearn_protocol.vector import Vector, scatter

from fleetlearn_device.runtimes.checks import DataError
from fleetlearn_device.storage.errors import StateError
from fleetlearn_device.training.algorithms import UnsupportedError
from fleetlearn_device.training.train import DivergedError, TrainingError, TrainingResult
from fleetlearn_device.training.work import TaskOutcome, TaskWork

OF_THE_TRAINING = (TrainingError, FleetError, DataError, StateError, MemoryError)
"""What an own algorithm passes on as it is: the device knows what becomes of the task then."""


def allowed_algorithm(
    task: Task, functions: Mapping[str, Callable[..., Any]]
) -> Callable[[TaskWork], TaskOutcome]:
    """Return the task's own algorithm, checked. ``functions``: those that the device's owner
    allows. Raises UnsupportedError where it is not among them."""
    name = task.function or ""
    if name not in functions:
        raise UnsupportedError(
            f"the task asks for the function {name}, and the device's owner allows "
            f"{', '.join(functions) or 'none'}. Where it is installed, --allow-function {name} "
            "allows it (docs/start/your-own-algorithm.md)"
        )
    return checked(name, functions[name])


def open_task_encoding(task: Task, functions: Mapping[str, Callable[..., Any]]) -> None:
    """Make the own encoding that a task asks for, if it asks for one. ``functions``: those that the
    device's owner allows. Raises UnsupportedError."""
    try:
        encoding_of_task(task, functions)
    except extensions.ExtensionError as error:
        raise UnsupportedError(str(error)) from error


def checked(name: str, function: Callable[..., Any]) -> Callable[[TaskWork], TaskOutcome]:
    """Return the function as an algorithm that raises UnsupportedError where it takes no such
    parameters, TrainingError where it fails or returns no update of the model's shape, and
    DivergedError where that is not finite."""
    what = f"the function {name}"

    def algorithm(work: TaskWork) -> TaskOutcome:
        model = work.inputs.model.copy()
        try:
            bound = extensions.bind(function, LOCAL_ALGORITHM.arguments, work.numbers, what)
        except extensions.ExtensionError as error:
            raise UnsupportedError(str(error)) from None
        try:
            outcome = bound(work)
        except OF_THE_TRAINING:
            raise
        except ANY_FAILURE as error:  # of the owner's code, of any kind
            raise TrainingError(failure(what, error)) from error
        if not np.array_equal(model, work.inputs.model, equal_nan=True):
            raise TrainingError(
                f"{what} changed work.inputs.model in place; the update is the difference from it"
            )
        return _with_update(what, outcome, work)

    return algorithm


def _with_update(what: str, outcome: object, work: TaskWork) -> TaskOutcome:
    """Return the outcome with its update checked, and in its result too."""
    if not isinstance(outcome, TaskOutcome) or not isinstance(outcome.result, TrainingResult):
        raise TrainingError(
            f"{what} returned a {type(outcome).__name__}; expected TaskOutcome(result, "
            '{"update": ...}), where result is what work.train() returned'
        )
    kept = [*outcome.tied, *(["personal"] if outcome.personal is not None else [])]
    if {*outcome.parts} != {UPDATE} or kept:
        raise TrainingError(
            f"{what} returned the parts {', '.join(map(str, outcome.parts)) or 'none'} and keeps "
            f"{', '.join(kept) or 'nothing'}; an own algorithm has one part, {UPDATE}, and keeps "
            "nothing"
        )
    update: Vector = np.array(outcome.parts[UPDATE])  # its own: the buffers' places are written
    if update.dtype != np.float32 or update.shape != work.inputs.model.shape:
        raise TrainingError(
            f"{what} returned an update of {update.dtype}, shape {update.shape}; expected float32, "
            f"shape {work.inputs.model.shape}"
        )
    scatter(update, work.bundle.manifest.buffers, 0.0)
    largest = float(np.abs(update).max(initial=0.0))
    if not np.isfinite(largest):
        raise DivergedError(f"{what} returned an update that is not finite; a smaller lr may help")
    result = outcome.result._replace(update=update, largest=largest)
    return outcome._replace(result=result, parts={UPDATE: update})
